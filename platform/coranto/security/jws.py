"""Texts that are signed with the keys of a cluster: JWS (HS256), whose header names the kind of text."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from coranto.security.tokens import Keys

if TYPE_CHECKING:
    from jwt import PyJWS

_ALGORITHM: Final = "HS256"


@functools.cache
def _jws() -> PyJWS:
    import jwt  # Imported lazily: it is slow, and not needed without keys.

    return jwt.PyJWS(algorithms=[_ALGORITHM], options={"enforce_minimum_key_length": True})


@dataclass(frozen=True, slots=True)
class Signed:
    """The header and the content of a text that one of the keys has signed."""

    header: Mapping[str, Any]
    content: bytes


def sign(content: bytes, keys: Keys, header: Mapping[str, str]) -> str:
    """Return the content with a header, signed with the first key."""
    return _jws().encode(content, keys.secrets[0].reveal(), algorithm=_ALGORITHM, headers=dict(header))


def verify(text: str | bytes, keys: Keys) -> Signed | None:
    """Return the header and content of a signed text, or None if no key verifies it."""
    import jwt

    for secret in keys.secrets:
        try:
            found = _jws().decode_complete(text, secret.reveal(), algorithms=[_ALGORITHM])
        except (jwt.PyJWTError, ValueError):
            continue
        return Signed(found["header"], found["payload"])
    return None


def claimed_header(text: str | bytes) -> Mapping[str, Any] | None:
    """Return the unverified header of a text, or None if the text is not a JWS."""
    import jwt

    try:
        return _jws().get_unverified_header(text)
    except (jwt.PyJWTError, ValueError):
        return None
