"""The deduplication window: the keys of recently committed requests. Pure.

A key is stored as its 16-byte hash, with an 8-byte digest of the request's body, or zeros if bodies are not compared.
"""

from __future__ import annotations

import base64
import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final

from coranto.errors import CorruptData

KEY_BYTES: Final = 16
DIGEST_BYTES: Final = 8
_BYTES: Final = KEY_BYTES + DIGEST_BYTES
ANY_BODY: Final = bytes(DIGEST_BYTES)


def key_of(ingest: str, key: str) -> bytes:
    """Return the hash of a key. It is the id of the request."""
    content = f"{ingest}\0{key}".encode("utf-8", "surrogateescape")
    return hashlib.blake2b(content, digest_size=KEY_BYTES).digest()


def digest_of(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


class DeduplicationWindow:
    """A window of keys, which expire `seconds` after their batch. Add batches in the order of their decisions."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._known: dict[bytes, tuple[bytes, float]] = {}
        self._batches: deque[tuple[float, list[bytes]]] = deque()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: bytes) -> bytes | None:
        """Return the digest of a known key, or None."""
        found = self._known.get(key)
        return None if found is None else found[0]

    def add(self, at: float, packed: bytes) -> None:
        """Add the keys of a batch, as `pack` returns them."""
        keys = [packed[begin : begin + _BYTES] for begin in range(0, len(packed), _BYTES)]
        if keys:
            self._known.update((each[:KEY_BYTES], (each[KEY_BYTES:], at)) for each in keys)
            self._batches.append((at, [each[:KEY_BYTES] for each in keys]))

    def expire(self, now: float) -> None:
        """Remove the keys of expired batches."""
        while self._batches and self._batches[0][0] < now - self._seconds:
            at, keys = self._batches.popleft()
            for key in keys:
                found = self._known.get(key)
                if found is not None and found[1] == at:
                    del self._known[key]

    def clear(self) -> None:
        self._known.clear()
        self._batches.clear()

    def batches(self) -> Iterator[tuple[float, bytes]]:
        """Yield the time and the packed keys of each batch, as `add` takes them."""
        for at, keys in self._batches:
            live = [(key, found) for key in keys if (found := self._known.get(key)) is not None and found[1] == at]
            if live:
                yield at, pack((key, digest) for key, (digest, _) in live)


def pack(keys: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return keys and their digests as one byte string."""
    return b"".join(key + digest for key, digest in keys)


def encode(batches: Iterable[tuple[float, bytes]]) -> list[list[object]]:
    """Return batches of keys as JSON."""
    return [[round(at, 3), base64.b64encode(packed).decode()] for at, packed in batches]


def decode(record: Any) -> list[tuple[float, bytes]]:
    """Return batches of keys from their JSON. Raises CorruptData."""
    try:
        found = [(float(at), base64.b64decode(packed, validate=True)) for at, packed in record]
    except (TypeError, ValueError) as error:
        raise CorruptData(f"the keys of an ingest's progress cannot be read: {error!r}") from error
    if any(len(packed) % _BYTES for _, packed in found):
        raise CorruptData(f"the keys of an ingest's progress are not a multiple of {_BYTES} bytes")
    return found
