"""Store URLs: the locations of a journal's fragments.

=================================================  ==========================================================
URL                                                query arguments (`find` and `replace` are valid for all)
=================================================  ==========================================================
`file:///prefix/`
`s3://bucket/prefix/`                              profile, endpoint, region, acl, storageClass, sse, sseKmsKeyId
`gs://bucket/prefix/`
`azure://container/prefix/`
`azure-ad://tenant/account/container/prefix/`
=================================================  ==========================================================

The path must end in `/`. An object's key is the prefix and the fragment's content path, with the first occurrence of
`find` replaced by `replace`. The result must be a clean path, so that no key leads out of the prefix.

All users who may apply specs can write URLs. Some parts (buckets, accounts, tenants, regions) become part of a
service's address. They are accepted only if they cannot change it to another party's address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from coranto.errors import InvalidInput
from coranto.names import is_clean_path

SCHEMES: Final = ("file", "s3", "gs", "azure", "azure-ad")

_REWRITER = ("find", "replace")
_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "file": _REWRITER,
    "s3": ("profile", "endpoint", "region", "acl", "storageClass", "sse", "sseKmsKeyId", *_REWRITER),
    "gs": _REWRITER,
    "azure": _REWRITER,
    "azure-ad": _REWRITER,
}
MAX_URL_BYTES: Final = 4096
MAX_KEY_BYTES: Final = 4096
_MAX_ARGUMENTS: Final = 16
_ALPHANUMERIC: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
_IN_ADDRESSES: Final[Mapping[str, frozenset[str]]] = {
    "bucket": _ALPHANUMERIC | frozenset("-._$:"),
    "region": _ALPHANUMERIC | frozenset("-"),
    "account": _ALPHANUMERIC | frozenset("-"),
    "tenant": _ALPHANUMERIC | frozenset("-."),
}
_MAX_IN_ADDRESSES: Final = 255
_AUTHORITY: Final[Mapping[str, str]] = {
    "s3": "bucket",
    "gs": "bucket",
    "azure": "container",
    "azure-ad": "tenant",
}


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A parsed store URL.

    `bucket` is empty for files. `tenant` and `account` are for `azure-ad` only. `prefix` has no leading slash, and is
    empty or ends in `/`. `options` are the query arguments except `find` and `replace`.
    """

    text: str
    scheme: str
    bucket: str
    prefix: str
    find: str = ""
    replace: str = ""
    tenant: str = ""
    account: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def key(self, content_path: str) -> str:
        """Return the object's key for a path that begins with a journal's name. A path that ends in `/` is a folder.

        Raises InvalidInput when the result of `find` and `replace` is not a path below the prefix.
        """
        if not self.find:
            return self.prefix + content_path
        path = content_path.replace(self.find, self.replace, 1)
        if content_path.endswith("/") and path in ("", "/"):
            return self.prefix
        bare = path.removesuffix("/") if content_path.endswith("/") else path
        if bare.startswith("/") or not is_clean_path(bare) or not bare.isprintable() or "\\" in bare:
            raise InvalidInput(
                f"{self.text!r} makes {path!r} of {content_path!r}; a key must be a clean path below the store's own, "
                "without empty, '.' and '..' parts",
                field="store",
            )
        if len(bare.encode()) > MAX_KEY_BYTES:
            raise InvalidInput(
                f"{self.text!r} makes keys of more than {MAX_KEY_BYTES} bytes; shorten its prefix", field="store"
            )
        return self.prefix + path

    @property
    def rewrites(self) -> bool:
        """True if keys may be outside of the folder with the journal's name."""
        return bool(self.find)


def parse_store_url(text: str, *, check_options: bool = True) -> StoreUrl:
    """Parse a store URL, without opening the store. Raises InvalidInput.

    Without `check_options`, query arguments that this version doesn't know are dropped instead of refused.
    """
    if len(text.encode()) > MAX_URL_BYTES:
        raise InvalidInput(f"{text[:100]!r}… is longer than {MAX_URL_BYTES} bytes", field="store")
    try:
        parts = urlsplit(text)
        query = parse_qsl(
            parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), max_num_fields=_MAX_ARGUMENTS
        )
    except ValueError as err:
        raise InvalidInput(f"{text!r} is not a URL: {err}", field="store") from err
    scheme = parts.scheme
    if scheme not in SCHEMES:
        raise InvalidInput(
            f"{text!r} must begin with one of {', '.join(f'{name}://' for name in SCHEMES)}", field="store"
        )
    if parts.fragment:
        raise InvalidInput(f"{text!r} has a '#' part; write %23 for a '#' in a name", field="store")
    path = unquote(parts.path)
    if not path.startswith("/") or not path.endswith("/"):
        raise InvalidInput(f"the path {path!r} of {text!r} must begin and end with '/'", field="store")
    bucket, prefix, tenant, account = unquote(parts.netloc), path[1:], "", ""
    if scheme == "file":
        if bucket:
            raise InvalidInput(f"{text!r} has the host {bucket!r}; write file:/// and the path", field="store")
    elif not bucket:
        raise InvalidInput(f"{text!r} has no {_AUTHORITY[scheme]} after {scheme}://", field="store")
    if scheme == "azure-ad":
        tenant = bucket
        account, _, rest = prefix.partition("/")
        bucket, _, prefix = rest.partition("/")
        if not account or not bucket:
            raise InvalidInput(f"{text!r} must be azure-ad://tenant/account/container/prefix/", field="store")
    if any(part in ("", ".", "..") for part in prefix.split("/")[:-1]):
        raise InvalidInput(f"the path of {text!r} has an empty, '.' or '..' part; remove it", field="store")
    if not prefix.isprintable() or "\\" in prefix:
        raise InvalidInput(f"the path of {text!r} has a character that no key may have; remove it", field="store")
    options = _options(text, scheme, query, check=check_options)
    named = {"bucket": bucket, "account": account, "tenant": tenant, "region": options.get("region", "")}
    for kind, value in named.items():
        if not set(value) <= _IN_ADDRESSES[kind] or len(value) > _MAX_IN_ADDRESSES:
            raise InvalidInput(f"{text!r} has the {kind} {value!r}, which cannot be part of an address", field="store")
    return StoreUrl(
        text=text,
        scheme=scheme,
        bucket=bucket,
        prefix=prefix,
        find=options.pop("find", ""),
        replace=options.pop("replace", ""),
        tenant=tenant,
        account=account,
        options=options,
    )


def _options(text: str, scheme: str, query: list[tuple[str, str]], *, check: bool) -> dict[str, str]:
    known = {name.lower(): name for name in _OPTIONS[scheme]}
    options: dict[str, str] = {}
    for name, value in query:
        option = known.get(name.lower())
        if option is None and not check:
            continue
        if option is None:
            raise InvalidInput(
                f"{text!r} has the argument {name!r}, which {scheme}:// doesn't know; known are "
                f"{', '.join(_OPTIONS[scheme])}",
                field="store",
            )
        if option in options:
            raise InvalidInput(f"{text!r} has the argument {name!r} more than once; give it once", field="store")
        options[option] = value
    return options
