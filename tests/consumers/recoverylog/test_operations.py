"""Operations as bytes, fences, and checksums."""

import pytest

from coranto.errors import InvalidInput
from coranto.labels import label_set
from coranto_consumers.recoverylog.operations import (
    Author,
    Change,
    Create,
    Fnode,
    Link,
    RecordedOperation,
    SetProperty,
    Unlink,
    Write,
    author_of,
    crc32c,
    fence_of,
    new_author,
)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)],
)
def test_checksums_use_crc32c(content: bytes, expected: int) -> None:
    assert crc32c(0, content) == expected


def test_a_checksum_can_be_continued() -> None:
    assert crc32c(crc32c(0, b"12345"), b"6789") == crc32c(0, b"123456789")


@pytest.mark.parametrize(
    ("author", "register"), [(1, "1"), (31, "v"), (32, "10"), (0x1234, "4hk"), (0xFFFFFFFF, "3vvvvvv")]
)
def test_a_fence_is_the_author_in_base_32(author: int, register: str) -> None:
    assert fence_of(Author(author)) == label_set([("author", register)])
    assert author_of(fence_of(Author(author))) == author


def test_registers_without_an_author() -> None:
    assert author_of(label_set([])) is None
    assert author_of(label_set([("author", "zzz")])) is None


def test_authors_are_random_and_never_zero() -> None:
    authors = [new_author() for _ in range(100)]
    assert len(set(authors)) == 100
    assert all(0 < author < 1 << 32 for author in authors)


@pytest.mark.parametrize(
    ("change", "payload"),
    [
        # First seq_no 3, checksum 0x01020304 and author 0x0a0b0c0d, then the field of the change.
        (None, ""),
        (Create("/a"), "2204" + "0a022f61"),
        (Link(Fnode(2), "/a"), "2a06" + "0802" + "12022f61"),
        (Unlink(Fnode(2), "/a"), "3206" + "0802" + "12022f61"),
        (Write(Fnode(2), 5, 300), "3a07" + "0802" + "1005" + "18ac02"),
        (SetProperty("/a", "b"), "4207" + "0a022f61" + "120162"),
    ],
)
def test_operations_have_the_encoding_of_gazette(change: Change | None, payload: str) -> None:
    op = RecordedOperation(3, 0x01020304, Author(0x0A0B0C0D), change, "a/log", 100, 120)
    encoded = bytes.fromhex("0803" + "1504030201" + "1d0d0c0b0a" + payload)
    assert op.to_payload() == encoded
    end = 120 + (change.length if isinstance(change, Write) else 0)
    decoded = RecordedOperation.from_payload(encoded, "a/log", 100, 120)
    assert (decoded.change, decoded.seq_no, decoded.checksum, decoded.end) == (change, 3, 0x01020304, end)


@pytest.mark.parametrize(
    "payload", [b"\xff\xff", RecordedOperation(1, 0, Author(1), Write(Fnode(1), -1, 1)).to_payload()]
)
def test_invalid_operations_are_refused(payload: bytes) -> None:
    with pytest.raises(InvalidInput):
        RecordedOperation.from_payload(payload, "a/log", 0, 10)
