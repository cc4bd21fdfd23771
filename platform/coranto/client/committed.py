"""Committed messages of one journal, for programs that read it from some offset to another or follow it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from coranto.client.sync import SyncJournalClient
from coranto.messages.framing import Envelope, Framing, iter_messages
from coranto.messages.sequencer import ReplayRange, Sequencer, read_committed

M = TypeVar("M")


def committed_messages(
    client: SyncJournalClient,
    journal: str,
    framing: Framing[M],
    *,
    begin: int = 0,
    end: int | None = None,
    block: bool = False,
) -> Iterator[Envelope[M]]:
    """Yield each committed content message of [begin, end) once, in the order in which they were committed.

    `begin` must be where a message begins. Without `end` reading goes up to the present write head, or with `block`
    goes on for ever. Messages of transactions that began before `begin` or are open at `end` are not yielded.
    Raises CorruptMessage, and what the client's reads raise.
    """
    if end is None and not block:
        end = client.head(journal)
    if end is not None and end <= begin:
        return

    def read(first: int, last: int | None, wait: bool = False) -> Iterator[Envelope[M]]:
        chunks = client.read(journal, first, end_offset=last or 0, block=wait)
        return iter_messages(framing, journal, chunks, first)

    def replay(wanted: ReplayRange) -> Iterator[Envelope[M]]:
        return read(wanted.begin, wanted.end)

    yield from read_committed(read(begin, end, block), Sequencer(), replay)
