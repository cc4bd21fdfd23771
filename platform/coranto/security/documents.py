"""Documents such as reports and manifests: read from JSON, and signed so that changes are detected.

A signed document is a JWT (HS256) whose content is the document.

The keys are the cluster's (`coranto.security.tokens.Keys`). A document is not a token: the header's `typ` names its
kind, and only documents of the expected kind are accepted. Brokers in turn reject a document as a token, because it
lacks the claims of a token.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol, TypeVar

import pydantic

from coranto.errors import InvalidInput, Unauthenticated
from coranto.security.jws import claimed_header, sign, verify
from coranto.security.tokens import Keys


@dataclass(frozen=True, slots=True)
class DocumentKind:
    """A kind of signed documents: the `typ` of its JWTs, its name in errors, and the command that writes it."""

    typ: str
    name: str
    command: str


def sign_document(kind: DocumentKind, content: bytes, keys: Keys) -> str:
    """Return the document, signed with the first key."""
    return sign(content, keys, {"typ": kind.typ})


def verify_document(kind: DocumentKind, signed: str, keys: Keys) -> bytes:
    """Return the content of a signed document.

    Raises Unauthenticated if none of the keys signed it or if it was changed, and InvalidInput for a document of
    another kind and for any other text.
    """
    text = signed.strip()
    header = claimed_header(text)
    if header is None:
        raise InvalidInput(f"is not a signed {kind.name}: expected the output of `{kind.command}`", field=kind.name)
    if (found := header.get("typ")) != kind.typ:
        raise InvalidInput(f"is a JWT of type {found!r}, not a signed {kind.name} ({kind.typ})", field=kind.name)
    if (document := verify(text, keys)) is None:
        raise Unauthenticated(
            f"the {kind.name} was changed after it was signed, or it was signed with a key that is not among the given "
            "ones ($CORANTO_AUTH_KEYS)"
        )
    return document.content


class Versioned(Protocol):
    """A document that names the version of its format."""

    @property
    def format(self) -> int: ...


D = TypeVar("D", bound=Versioned)


def parse_document(adapter: pydantic.TypeAdapter[D], text: str | bytes, *, name: str, field: str, newest: int) -> D:
    """Parse a document from JSON. `newest` is the last version of the format that this program reads.

    Raises InvalidInput for other text, and for documents of later versions.
    """
    try:
        document = adapter.validate_json(text)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the text"
        raise InvalidInput(
            f"is not a {name}, or one of a later version: {where}: {first['msg']}", field=field
        ) from None
    if document.format > newest:
        raise InvalidInput(
            f"has format {document.format}, and this version reads up to {newest}: use the version that wrote it",
            field=field,
        )
    return document


def environment_keys(kind: DocumentKind) -> Keys:
    """Return the keys of $CORANTO_AUTH_KEYS. Raises InvalidInput if it is not set, or malformed."""
    text = os.environ.get("CORANTO_AUTH_KEYS", "")
    if not text.strip():
        raise InvalidInput(f"is not set: it has the keys that {kind.name}s are signed with", field="$CORANTO_AUTH_KEYS")
    return Keys.parse(text)
