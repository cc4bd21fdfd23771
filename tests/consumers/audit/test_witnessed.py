"""The memory of a consumer's audits, and the witness that detects deletion, changes and rollback."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from coranto.audit.witness import Statement, WitnessedFile
from coranto.errors import CorruptData
from coranto_consumers.audit.witnessed import WitnessedMemory

NAME = "orders"


class Kept:
    """A location for one file, whose `save` waits while `open` is not set."""

    url = "file:///memory/"

    def __init__(self) -> None:
        self.content: bytes | None = None
        self.open = asyncio.Event()
        self.open.set()

    async def load(self, name: str) -> bytes | None:
        return self.content

    async def save(self, name: str, content: bytes) -> None:
        await self.open.wait()
        self.content = content


class Known:
    """A witness of this process."""

    def __init__(self) -> None:
        self.statement: Statement | None = Statement()

    async def read(self) -> Statement | None:
        return self.statement

    async def write(self, statement: Statement) -> bool:
        assert self.statement is not None
        if statement.number != self.statement.number:
            return False
        self.statement = replace(statement, number=statement.number + 1)
        return True


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def known() -> Known:
    return Known()


@pytest.fixture
def memory(kept: Kept, known: Known) -> WitnessedMemory:
    return WitnessedMemory(kept, known)


async def save(memory: WitnessedMemory, *contents: bytes) -> None:
    for content in contents:
        await memory.load(NAME)
        await memory.save(NAME, content)


@pytest.mark.parametrize("content", [b"first", b"forged", None])
async def test_a_memory_other_than_the_last_saved_one_is_refused(
    memory: WitnessedMemory, kept: Kept, content: bytes | None
) -> None:
    await save(memory, b"first", b"second", b"second", b"third")
    assert await memory.load(NAME) == b"third"
    kept.content = content
    for _ in range(2):
        with pytest.raises(CorruptData, match="gone" if content is None else "put back"):
            await memory.load(NAME)
    await memory.save(NAME, b"accepted")
    assert await memory.load(NAME) == b"accepted"
    kept.content = b"third"
    with pytest.raises(CorruptData, match="put back"):
        await memory.load(NAME)


async def test_concurrent_audits_do_not_conflict(kept: Kept, known: Known) -> None:
    one, other = WitnessedMemory(kept, known), WitnessedMemory(kept, known)
    await save(one, b"before")
    await other.load(NAME)
    kept.open.clear()
    slow = asyncio.ensure_future(one.save(NAME, b"slow"))
    await asyncio.sleep(0)
    kept.open.set()
    await other.save(NAME, b"quick")
    assert await other.load(NAME) in (b"slow", b"quick")
    await slow
    assert await other.load(NAME) in (b"slow", b"quick")
    await save(other, b"after")
    kept.content = b"quick"
    with pytest.raises(CorruptData, match="put back"):
        await one.load(NAME)


async def test_an_audit_that_died_before_or_after_saving_causes_no_conflict(
    memory: WitnessedMemory, kept: Kept, known: Known
) -> None:
    await save(memory, b"first")
    assert known.statement is not None
    dead = WitnessedFile("died", "died")
    known.statement = replace(known.statement, files=(*known.statement.files, dead))
    assert await memory.load(NAME) == b"first"
    await save(memory, b"second")
    assert await memory.load(NAME) == b"second"


async def test_without_a_witness_the_memory_is_trusted(memory: WitnessedMemory, kept: Kept, known: Known) -> None:
    kept.content = b"from before"
    assert await memory.load(NAME) == b"from before"
    known.statement = Statement(files=(WitnessedFile("died", "died"),), number=1)
    assert await memory.load(NAME) == b"from before"
    known.statement = Statement(number=3, damage="it was put back")
    with pytest.raises(CorruptData, match="cannot be believed: it was put back"):
        await memory.load(NAME)
    known.statement = None
    await save(memory, b"first")
    assert kept.content == b"first"
    kept.content = None
    assert await memory.load(NAME) is None
