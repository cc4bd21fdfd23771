"""Seals of audit records: signatures that reveal forged, changed and renamed records.

A sealed text is a JWS (HS256) of the content. Its header has the content's name, so a copy under
another name is refused, too. A seal does not reveal that a text was deleted, or replaced by an earlier one of the same
name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coranto.errors import CorruptData, InvalidInput
from coranto.security.jws import sign, verify
from coranto.security.tokens import Auth, Keys

TYPE: Final = "coranto-audit-memory"
_BEGIN: Final = b"eyJ"
"""The beginning of every JWS. No content without a seal begins with it."""


@dataclass(frozen=True, slots=True)
class Seal:
    """Signs with the first of `keys`, and verifies with any. Without keys, content is not signed."""

    keys: Keys | None = None

    @classmethod
    def of(cls, auth: Auth | None) -> Seal:
        """Return the seal of a client. A client with a token instead of keys cannot sign."""
        return cls(auth if isinstance(auth, Keys) else None)

    def is_unsealed(self, content: bytes) -> bool:
        """Return True for content without a seal."""
        return not content.startswith(_BEGIN)

    def seal(self, content: bytes, name: str) -> bytes:
        """Return the content as it is stored: signed if there are keys."""
        if self.keys is None:
            return content
        return sign(content, self.keys, {"typ": TYPE, "name": name}).encode()

    def unseal(self, content: bytes, name: str) -> bytes:
        """Return the content that `seal` sealed.

        Raises CorruptData if it was not signed under this name with one of the keys, and InvalidInput if it is sealed
        and there are no keys. Content without a seal is accepted without keys, and while keys are introduced (`AA==`).
        """
        if self.is_unsealed(content):
            if self.keys is None or self.keys.accept_missing:
                return content
            raise CorruptData(
                f"{name} is not signed. Either a writer without a key made it, or it was written before there "
                "were keys: if you know that it was, add AA== to the keys ($CORANTO_AUTH_KEYS) for one audit"
            )
        if self.keys is None:
            raise InvalidInput(
                f"{name} is signed, and this audit has no key to verify it with. Give all audits of one memory the "
                "same keys",
                field="$CORANTO_AUTH_KEYS",
            )
        found = verify(content, self.keys)
        if found is not None and found.header.get("typ") == TYPE and found.header.get("name") == name:
            return found.content
        raise CorruptData(
            f"{name} was changed or renamed after it was signed, or was signed with a key that is not among the given "
            "ones ($CORANTO_AUTH_KEYS)"
        )
