"""Authorization by bearer tokens: each grants capabilities on some journals for some time.

A token is a JWT, signed with a key that brokers share (HS256; HS384 is accepted too). Besides the registered claims
`iat` and `exp`, and `sub` if it names its bearer, it has two claims, the same as in Gazette::

    cap    a bit mask of capabilities
    sel    a label selector for the journals in scope

    {"cap": 8, "sel": {"include": {"labels": [{"name": "name", "value": "flights/", "prefix": true}]},
                       "exclude": {"labels": []}}, "iat": 1700000000, "exp": 1700003600}

A token that is not fully understood is rejected. No error shows a token or a key.
"""

from __future__ import annotations

import base64
import binascii
import enum
import functools
import hashlib
import hmac
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

from coranto import labels
from coranto.errors import InvalidInput, PermissionDenied, Unauthenticated
from coranto.names import strip_metadata
from coranto.wire import protocol_pb2 as pb

if TYPE_CHECKING:
    from jwt import PyJWS

    from coranto.security.oidc.client import OidcClient

LEEWAY_SECONDS: Final = 5.0
"""The tolerated difference between the clocks of signers and verifiers."""
TOKEN_SECONDS: Final = 3600.0
"""The lifetime of a token that is made for one call. Reads, watches and appends may take long."""
APPLY_TOKEN_SECONDS: Final = 60.0
MIN_KEY_BYTES: Final = 32
HEADER: Final = "authorization"

_ACCEPT_MISSING = "AA=="
_SIGN_WITH = "HS256"
_MAX_SUBJECT = 256
_MAX_TIME = 2.0**53
_MAX_SCOPE_BYTES = 2048
"""The size limit for selectors in tokens, in bytes. Larger ones would exceed the metadata that servers accept."""


@functools.cache
def _jws() -> PyJWS:
    # Imported lazily: it is slow, and Spark's workers rarely need it.
    import jwt

    # Keys shorter than the hash are rejected (RFC 7518, 3.2): for HS384, keys below 48 bytes.
    return jwt.PyJWS(algorithms=["HS256", "HS384"], options={"enforce_minimum_key_length": True})


class Capability(enum.IntFlag):
    """The capabilities that a token may grant. Applications may define bits from 1 << 16 on."""

    LIST = 1 << 1
    APPLY = 1 << 2
    READ = 1 << 3
    APPEND = 1 << 4
    REPLICATE = 1 << 5
    """For calls between brokers."""
    NOTE = 1 << 6
    """For notes about files in fragment stores, which audits keep."""
    ALL = 0xFFFFFFFF


class Secret:
    """A value that no representation shows, and that compares in constant time."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes | str) -> None:
        self._value = value.encode() if isinstance(value, str) else value

    def reveal(self) -> bytes:
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash(self._value)

    def __reduce__(self) -> tuple[type[Secret], tuple[bytes]]:
        return Secret, (self._value,)


@dataclass(frozen=True, slots=True)
class Claims:
    """The grant of a token: `capability` on the journals that `selector` matches, until `exp`. Times are Unix seconds.

    The selector matches a journal's labels and its `name`. An empty selector matches every journal.
    """

    capability: Capability
    selector: pb.LabelSelector = field(default_factory=pb.LabelSelector)
    iat: float = 0.0
    exp: float = math.inf
    subject: str = ""
    """The bearer's name. Limits count all tokens of one bearer together."""

    @property
    def identity(self) -> str:
        """A text that identifies the bearer: its name, or else the rights of the token."""
        if self.subject:
            return f"the bearer {self.subject}"
        scope = hashlib.sha256(self.selector.SerializeToString(deterministic=True)).hexdigest()[:12]
        return f"the bearer of capability {int(self.capability)} over scope {scope}"

    @property
    def covers_all(self) -> bool:
        """True if every journal is in scope."""
        return not self.selector.include.labels and not self.selector.exclude.labels

    @property
    def by_name_alone(self) -> bool:
        """True if the scope depends only on a journal's name, which never changes."""
        both = (*self.selector.include.labels, *self.selector.exclude.labels)
        return all(label.name == labels.NAME for label in both)

    def covers(self, journal: str, journal_labels: pb.LabelSet | None = None) -> bool:
        """Return True if a journal with these labels is in scope."""
        if self.covers_all:
            return True
        return labels.matches(self.selector, labels.with_meta(journal, journal_labels or pb.LabelSet()))


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that brokers and signers of tokens share. The first one signs, all of them verify."""

    secrets: tuple[Secret, ...]
    accept_missing: bool = False
    """True if requests without a token are accepted, with all capabilities. Use it only while keys are introduced."""

    @classmethod
    def parse(cls, text: str) -> Keys:
        """Parse keys in base64, separated by commas or whitespace. `AA==` among them means `accept_missing`.

        Raises InvalidInput with the position of a bad key, but without the key.
        """
        secrets: list[Secret] = []
        accept_missing = False
        for index, word in enumerate(text.replace(",", " ").split()):
            if word == _ACCEPT_MISSING:
                accept_missing = True
                continue
            try:
                key = base64.b64decode(word, validate=True)
            except (binascii.Error, ValueError):
                raise InvalidInput(
                    f"key {index + 1} of the list is not base64; `openssl rand -base64 32` makes a key",
                    field="auth keys",
                ) from None
            if len(key) < MIN_KEY_BYTES:
                raise InvalidInput(
                    f"key {index + 1} of the list has {len(key)} bytes, and {MIN_KEY_BYTES} random ones are needed; "
                    "`openssl rand -base64 32` makes a key",
                    field="auth keys",
                )
            secrets.append(Secret(key))
        if not secrets:
            raise InvalidInput(
                "there is no key to sign and verify with; `openssl rand -base64 32` makes one", field="auth keys"
            )
        return cls(tuple(secrets), accept_missing)

    def bearer(self, claims: Claims) -> str:
        """Return a token with these claims, signed for one call."""
        return sign(claims, self)


@dataclass(frozen=True, slots=True)
class BearerToken:
    """A token signed by another party. It is sent with every call until it expires."""

    token: Secret

    @classmethod
    def parse(cls, text: str) -> BearerToken:
        """Parse a token. Raises InvalidInput, which doesn't show the token."""
        text = text.strip()
        if not text or not text.isascii() or not text.isprintable() or " " in text:
            raise InvalidInput("is not a token: expected three base64 parts with dots between them", field="auth token")
        return cls(Secret(text))

    def bearer(self, claims: Claims) -> str:
        """Return the token. The claims that the call needs are ignored."""
        return self.token.reveal().decode()


Auth: TypeAlias = "Keys | BearerToken | OidcClient"


def scope_of(journals: Iterable[str]) -> pb.LabelSelector:
    """Return a selector of journals by their names."""
    names = sorted({strip_metadata(journal) for journal in journals})
    return pb.LabelSelector(include=pb.LabelSet(labels=[pb.Label(name=labels.NAME, value=name) for name in names]))


def shows(auth: Auth | None, journal: str) -> bool:
    """Return True if JOURNAL_NOT_FOUND means that a journal of this name does not exist.

    Brokers also return this status for a journal outside of a token's scope. Returns False for such a token, and for a
    token whose scope depends on labels or cannot be read. The token is not verified.
    """
    if not isinstance(auth, BearerToken):
        return auth is None or isinstance(auth, Keys)
    try:
        content = auth.token.reveal().split(b".")[1]
        scope = _selector(json_object(base64.urlsafe_b64decode(content + b"=" * (-len(content) % 4))))
    except (IndexError, ValueError, Unauthenticated):
        return False
    claims = Claims(Capability.ALL, scope)
    return claims.by_name_alone and claims.covers(journal)


def claims_for(
    capability: Capability, selector: pb.LabelSelector, now: float, seconds: float, subject: str = ""
) -> Claims:
    """Return claims for one call, valid for `seconds` from `now`. A selector too large for metadata is omitted."""
    if selector.ByteSize() > _MAX_SCOPE_BYTES:
        selector = pb.LabelSelector()
    return Claims(capability, selector, now, now + seconds, subject)


def sign(claims: Claims, keys: Keys) -> str:
    """Return a token with these claims, signed with the first key. They must expire. Raises InvalidInput."""
    if not math.isfinite(claims.exp):
        raise InvalidInput("a token must expire; give it a time above 0", field="exp")
    content: dict[str, Any] = {
        "cap": int(claims.capability),
        "sel": {"include": _side_to_json(claims.selector.include), "exclude": _side_to_json(claims.selector.exclude)},
        "iat": int(claims.iat),
        "exp": int(claims.exp),
    }
    if claims.subject:
        content["sub"] = claims.subject
    payload = json.dumps(content, separators=(",", ":")).encode()
    return _jws().encode(payload, keys.secrets[0].reveal(), _SIGN_WITH)


def verify(token: str, keys: Keys, now: float) -> Claims:
    """Return the claims of a token, if one of the keys signed it and it is valid at `now`. Raises Unauthenticated."""
    claims, not_before = _signed_claims(token, keys)
    require_valid(claims, not_before, now)
    return claims


def require_valid(claims: Claims, not_before: float, now: float) -> None:
    """Check that claims are valid at `now`. Raises Unauthenticated."""
    if now >= claims.exp + LEEWAY_SECONDS:
        raise Unauthenticated("the token has expired; get another one")
    if now < not_before - LEEWAY_SECONDS:
        raise Unauthenticated("the token is not valid yet: the clocks disagree")


@functools.lru_cache(maxsize=1024)
def _signed_claims(token: str, keys: Keys) -> tuple[Claims, float]:
    """Return a token's verified claims and the beginning of their validity. Cached, because clients reuse tokens."""
    content = json_object(_payload(token, keys))
    if "aud" in content:
        raise Unauthenticated("the token is meant for another audience; get one for this cluster")
    capability = content.get("cap")
    if not isinstance(capability, int) or isinstance(capability, bool) or not 0 <= capability <= Capability.ALL:
        raise Unauthenticated("the token's claim `cap` is not a 32-bit mask")
    return claims_of(content, Capability(capability), _selector(content))


def claims_of(content: dict[str, Any], capability: Capability, selector: pb.LabelSelector) -> tuple[Claims, float]:
    """Return claims with the times and the bearer of a token's content, and the beginning of their validity.

    Raises Unauthenticated.
    """
    issued, not_before = _time(content, "iat", 0.0), _time(content, "nbf", 0.0)
    expires = _time(content, "exp", None)
    subject = content.get("sub", "")
    if not isinstance(subject, str) or len(subject) > _MAX_SUBJECT or not subject.isprintable():
        raise Unauthenticated(f"the token's claim `sub` is not a printable text of at most {_MAX_SUBJECT} characters")
    return Claims(capability, selector, issued, expires, subject), max(issued, not_before)


def require(claims: Claims, capability: Capability) -> None:
    """Check that the claims have every bit of `capability`. Raises PermissionDenied."""
    missing = capability & ~claims.capability
    if missing:
        names = "|".join(bit.name or hex(bit) for bit in Capability(missing))
        raise PermissionDenied(f"the token lacks the capability {names}; get one that grants it")


def bearer_of(values: Iterable[str | bytes]) -> str | None:
    """Return the token in the values of the `authorization` header; None without values. Raises Unauthenticated."""
    given = list(values)
    if not given:
        return None
    if len(given) > 1:
        raise Unauthenticated("there is more than one authorization header; send one")
    header = given[0]
    scheme, _, token = (header.decode("ascii", "replace") if isinstance(header, bytes) else header).partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("the authorization header is not `Bearer <token>`")
    return token.strip()


def _payload(token: str, keys: Keys) -> bytes:
    """Return the content of a token that one of the keys signed. Raises Unauthenticated."""
    import jwt

    reason = "the token's signature is not by a key that is known here"
    for secret in keys.secrets:
        try:
            payload: bytes = _jws().decode(token, secret.reveal(), algorithms=["HS256", "HS384"])
        except jwt.InvalidAlgorithmError:
            reason = "the token is not signed with HS256 or HS384"
        except (jwt.InvalidSignatureError, jwt.InvalidKeyError):
            continue
        except (jwt.PyJWTError, UnicodeError, ValueError):
            # The library's error may quote the token.
            reason = "the token is not a JWT"
        else:
            return payload
    raise Unauthenticated(reason)


def json_object(payload: bytes) -> dict[str, Any]:
    """Return the JSON object of a token's payload. Raises Unauthenticated."""
    try:
        content = json.loads(payload, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Unauthenticated("the token's content is not JSON") from None
    if not isinstance(content, dict):
        raise Unauthenticated("the token's content is not a JSON object")
    return content


def _no_constant(_: str) -> NoReturn:
    raise ValueError("NaN and infinities are not JSON")


def _time(content: dict[str, Any], name: str, default: float | None) -> float:
    value = content.get(name, default)
    if value is None and name not in content:
        raise Unauthenticated(f"the token lacks the claim `{name}`")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MAX_TIME:
        raise Unauthenticated(f"the token's claim `{name}` is not a time")
    return float(value)


def _side_to_json(side: pb.LabelSet) -> dict[str, list[dict[str, str | bool]]]:
    return {"labels": [_label_to_json(label) for label in side.labels]}


def _label_to_json(label: pb.Label) -> dict[str, str | bool]:
    result: dict[str, str | bool] = {"name": label.name}
    if label.value:
        result["value"] = label.value
    if label.prefix:
        result["prefix"] = True
    return result


def _selector(content: dict[str, Any]) -> pb.LabelSelector:
    """Return the claim `sel`. Null or missing parts are empty. Unknown parts are rejected: they may be restrictions.

    A token without the claim is also rejected: it may have other restrictions.
    """
    if content.get("sel") is None:
        raise Unauthenticated("the token lacks the claim `sel`")
    fields = _fields(content["sel"], {"include", "exclude"})
    selector = pb.LabelSelector(include=_side(fields.get("include")), exclude=_side(fields.get("exclude")))
    try:
        return labels.rewrite_legacy_prefix(selector)
    except InvalidInput:
        raise _bad_selector() from None


def _side(content: object) -> pb.LabelSet:
    entries = _fields(content, {"labels"}).get("labels")
    if entries is None:
        entries = []
    if not isinstance(entries, list):
        raise _bad_selector()
    return pb.LabelSet(labels=map(_label, entries))


def _label(content: object) -> pb.Label:
    fields = _fields(content, {"name", "value", "prefix"})
    name, value, prefix = fields.get("name"), fields.get("value", ""), fields.get("prefix", False)
    if not isinstance(name, str) or not name or not isinstance(value, str) or not isinstance(prefix, bool):
        raise _bad_selector()
    try:
        return pb.Label(name=name, value=value, prefix=prefix)
    except ValueError:  # A lone surrogate.
        raise _bad_selector() from None


def _fields(content: object, known: set[str]) -> dict[str, Any]:
    if content is None:
        return {}
    if not isinstance(content, dict) or not content.keys() <= known:
        raise _bad_selector()
    return content


def _bad_selector() -> Unauthenticated:
    return Unauthenticated("the token's claim `sel` is not a label selector")
