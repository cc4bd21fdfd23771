"""Texts of UUIDs, and cuts of content, for tests."""

from __future__ import annotations

from itertools import pairwise

from coranto.messages.uuids import ProducerId, format_uuid

PRODUCER = ProducerId(bytes.fromhex("010203040506"))


def uuid_text(clock: int, flags: int = 0) -> str:
    return format_uuid(PRODUCER, clock, flags)


def cut(content: bytes, cuts: list[int]) -> list[bytes]:
    marks = sorted({0, len(content), *(at % (len(content) + 1) for at in cuts)})
    return [content[begin:end] for begin, end in pairwise(marks)]
