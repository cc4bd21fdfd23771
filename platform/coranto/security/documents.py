"""Signed documents: a JWT (HS256) whose content is a document, so that nobody can change the document unnoticed.

The keys are those of the cluster (`coranto.security.tokens.Keys`). A document is no token: the header's `typ` names its
kind, and only documents of the expected kind are accepted. Brokers in turn refuse a document as a token, because it
lacks the claims of one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

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

    Raises Unauthenticated if none of the keys signed it or if it was changed, and InvalidInput if it is a document of
    another kind or none at all.
    """
    text = signed.strip()
    header = claimed_header(text)
    if header is None:
        raise InvalidInput(f"is not a signed {kind.name}: expected what `{kind.command}` wrote", field=kind.name)
    if (found := header.get("typ")) != kind.typ:
        raise InvalidInput(f"is a JWT of type {found!r}, not a signed {kind.name} ({kind.typ})", field=kind.name)
    if (document := verify(text, keys)) is None:
        raise Unauthenticated(
            f"the {kind.name} was changed after it was signed, or it was signed with a key that is not among the given "
            "ones ($CORANTO_AUTH_KEYS)"
        )
    return document.content


def environment_keys(kind: DocumentKind) -> Keys:
    """Return the keys of $CORANTO_AUTH_KEYS. Raises InvalidInput if it is not set, or malformed."""
    text = os.environ.get("CORANTO_AUTH_KEYS", "")
    if not text.strip():
        raise InvalidInput(f"is not set: it has the keys that {kind.name}s are signed with", field="$CORANTO_AUTH_KEYS")
    return Keys.parse(text)
