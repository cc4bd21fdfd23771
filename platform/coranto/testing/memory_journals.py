"""Journals in memory with the methods of a `JournalClient`, for fast tests of code that uses a client.

Without network and processes, an append or a read takes a few turns of the event loop. Use `FakeBroker` to test clients
themselves.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from coranto import labels
from coranto.client.values import AppendResult, Chunk
from coranto.errors import AppendOutcomeUnknown, JournalNotFound, OffsetJump, OffsetNotYetAvailable, RegisterMismatch
from coranto.fragments.fragment import ZERO_SUM
from coranto.wire import protocol_pb2 as pb


@dataclass(slots=True)
class MemoryJournal:
    """A journal's content and registers. Content below `begin` is gone."""

    content: bytearray = field(default_factory=bytearray)
    registers: pb.LabelSet = field(default_factory=pb.LabelSet)
    begin: int = 0
    appends: list[int] = field(default_factory=list)
    """The end offsets of appends with content."""
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    def write(self, content: bytes) -> None:
        """Append without any checks."""
        self.content += content
        self.appends.append(len(self.content))
        self.grown.set()
        self.grown = asyncio.Event()

    def lose(self, kept: int) -> None:
        """Simulate the loss of all brokers: registers are lost, and content from offset `kept` on."""
        self.registers = pb.LabelSet()
        del self.content[kept:]
        self.appends = [end for end in self.appends if end <= kept]


class MemoryJournals:
    """The methods of a `JournalClient` for appends and reads, on journals in this process.

    `faulty` chooses a fault for each append with content: "" (none), "lost" (not applied, outcome unknown) or
    "unanswered" (applied, outcome unknown). `piece_bytes` is the length of a chunk in bytes.
    """

    def __init__(self, *names: str) -> None:
        self.journals = {name: MemoryJournal() for name in names}
        self.faulty: Callable[[], str] = lambda: ""
        self.piece_bytes: Callable[[], int] = lambda: 1 << 15

    def _journal(self, name: str) -> MemoryJournal:
        if name not in self.journals:
            raise JournalNotFound(name)
        return self.journals[name]

    async def append(
        self,
        journal: str,
        content: bytes | Sequence[bytes],
        *,
        check_registers: pb.LabelSelector | None = None,
        union_registers: pb.LabelSet | None = None,
        retry_unknown: bool = False,
        retry_timeout: float | None = None,
    ) -> AppendResult:
        """Append as `JournalClient.append` does. Applied after one turn of the loop, answered after another."""
        whole = content if isinstance(content, bytes) else b"".join(content)
        while True:
            await asyncio.sleep(0)
            state, fault = self._journal(journal), self.faulty() if whole else ""
            registers = state.registers
            if registers.labels and check_registers is not None and not labels.matches(check_registers, registers):
                raise RegisterMismatch(f"append to {journal}", registers=registers)
            begin = len(state.content)
            if whole and fault != "lost":
                state.write(whole)
                if union_registers is not None:
                    state.registers = labels.union(union_registers, state.registers)
            end, registers = len(state.content), state.registers
            await asyncio.sleep(0)
            if not fault:
                break
            if not retry_unknown:
                raise AppendOutcomeUnknown(f"append to {journal}")
        digest = hashlib.sha1(whole, usedforsecurity=False).digest() if whole else ZERO_SUM
        return AppendResult(journal, begin, end, digest, registers, pb.Header())

    async def head(self, journal: str) -> int:
        """Return the write head, as `JournalClient.head` does."""
        await asyncio.sleep(0)
        return len(self._journal(journal).content)

    async def read(
        self,
        journal: str,
        offset: int = 0,
        *,
        end_offset: int = 0,
        block: bool = False,
        fail_on_jump: bool = False,
        journal_id: str = "",
    ) -> AsyncGenerator[Chunk]:
        """Read as `JournalClient.read` does. Journals here have no ids, and are never created again."""
        assert not journal_id
        while not end_offset or offset < end_offset:
            await asyncio.sleep(0)
            state = self._journal(journal)
            head = len(state.content)
            if offset < state.begin < head:
                if fail_on_jump:
                    raise OffsetJump(journal, offset, state.begin)
                offset = state.begin
                continue
            if offset >= head:
                if block:
                    await state.grown.wait()
                    continue
                if offset > head:
                    raise OffsetNotYetAvailable(f"read of {journal} at {offset} with write head {head}")
                return
            end = min(head, end_offset or head, offset + max(1, self.piece_bytes()))
            yield Chunk(offset, bytes(state.content[offset:end]), head)
            offset = end
