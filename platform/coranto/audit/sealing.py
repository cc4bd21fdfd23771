"""Seals of what audits remember: signed with a key, nobody without the key can make, change or rename it unnoticed.

A sealed text is a JWS (HS256) of the content. Its header has the name that the content was kept under, so a copy under
another name is refused, too. Nothing shows that the latest text was replaced by an earlier one of the same name, or was
deleted.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from coranto.errors import CorruptData, InvalidInput
from coranto.security.tokens import Auth, Keys

if TYPE_CHECKING:
    from jwt import PyJWS

TYPE: Final = "coranto-audit-memory"
_ALGORITHM: Final = "HS256"
_BEGIN: Final = b"eyJ"
"""The beginning of every JWS, and of nothing that audits keep without a seal."""


@functools.cache
def _jws() -> PyJWS:
    import jwt  # Imported here: it takes long, and without keys it is not needed.

    return jwt.PyJWS(algorithms=[_ALGORITHM], options={"enforce_minimum_key_length": True})


@dataclass(frozen=True, slots=True)
class Seal:
    """Signs with the first of `keys`, and verifies with any. Without keys, content is kept as it is."""

    keys: Keys | None = None

    @classmethod
    def of(cls, auth: Auth | None) -> Seal:
        """Return the seal of a client. A client that has a token in place of keys cannot sign."""
        return cls(auth if isinstance(auth, Keys) else None)

    def is_open(self, content: bytes) -> bool:
        """Return True for content without a seal."""
        return not content.startswith(_BEGIN)

    def close(self, content: bytes, name: str) -> bytes:
        """Return the content for its place."""
        if self.keys is None:
            return content
        headers = {"typ": TYPE, "name": name}
        return _jws().encode(content, self.keys.secrets[0].reveal(), algorithm=_ALGORITHM, headers=headers).encode()

    def open(self, content: bytes, name: str) -> bytes:
        """Return the content that was given to `close`.

        Raises CorruptData if nobody with one of the keys has kept it under this name, and InvalidInput if it is sealed
        and there are no keys. Content without a seal is accepted without keys, and while keys are introduced (`AA==`).
        """
        if self.is_open(content):
            if self.keys is None or self.keys.accept_missing:
                return content
            raise CorruptData(
                f"{name} is not signed. Either somebody without a key wrote it, or it is from before there were keys: "
                "put AA== among the keys ($CORANTO_AUTH_KEYS) for one audit if you know that it is"
            )
        if self.keys is None:
            raise InvalidInput(
                f"{name} is signed, and this audit has no key to verify it with. Give all audits of one memory the "
                "same keys",
                field="$CORANTO_AUTH_KEYS",
            )
        import jwt

        for secret in self.keys.secrets:
            try:
                found = _jws().decode_complete(content, secret.reveal(), algorithms=[_ALGORITHM])
            except (jwt.PyJWTError, ValueError):
                continue
            header = found["header"]
            if header.get("typ") == TYPE and header.get("name") == name:
                payload: bytes = found["payload"]
                return payload
        raise CorruptData(
            f"{name} was changed or renamed after it was signed, or was signed with a key that is not among the given "
            "ones ($CORANTO_AUTH_KEYS)"
        )
