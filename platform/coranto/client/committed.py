"""Readers of the committed messages of journals: in a range of offsets, or following the write head.

`committed_reader` and `async_committed_reader` make readers that can be stopped and resumed (see
`coranto.messages.reading`). `committed_messages` reads a range once.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from typing import TypeVar

from coranto.client.client import JournalClient
from coranto.client.moments import Moment
from coranto.client.sync import SyncJournalClient
from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages.checkpoints import Source
from coranto.messages.framing import Envelope, Framing
from coranto.messages.reading import AsyncReadCommitted, AsyncReadUncommitted, ReadCommitted, ReadUncommitted
from coranto.messages.sequencer import DEFAULT_RING_SIZE
from coranto.offsets import id_of

M = TypeVar("M")


def committed_messages(
    client: SyncJournalClient,
    journal: str,
    framing: Framing[M],
    *,
    begin: int = 0,
    end: int | None = None,
    block: bool = False,
    as_of: Moment | None = None,
    on_corrupt: Callable[[CorruptMessage], object] | None = None,
) -> Iterator[Envelope[M]]:
    """Yield each committed content message of [begin, end) once, in the order of commits.

    A message must begin at `begin`. Without `end` reading ends at the current write head, or with `block` never.
    Messages of transactions that began before `begin` or are open at `end` are not yielded. `as_of` yields all messages
    of that moment, and raises ContentGone if some of them are gone. Raises JournalRecreated for offsets with the
    id of an earlier journal (`JournalOffset`), CorruptMessage without `on_corrupt`, and the errors of the client's
    reads.
    """
    if as_of is not None:
        if begin or end is not None or block:
            raise InvalidInput("a moment has a begin and an end; leave begin, end and block out", field="as_of")
        begin, end = as_of.span(journal)
        client.require_content(Moment({journal: end}, {journal: begin}))
    else:
        client.require_same({journal: begin}, {journal: end or 0})
    if end is None and not block:
        end = client.head(journal)
    if end is not None and end <= begin:
        return
    reader = committed_reader(
        client,
        journal,
        framing,
        Source(begin, journal_id=id_of(begin) or id_of(end or 0)),
        end=end,
        block=block,
        fail_on_jump=as_of is not None,
        on_corrupt=on_corrupt,
    )
    yield from reader


def committed_reader(
    client: SyncJournalClient,
    journal: str,
    framing: Framing[M],
    source: Source | None = None,
    *,
    end: int | None = None,
    block: bool = False,
    ring_size: int = DEFAULT_RING_SIZE,
    fail_on_jump: bool = False,
    on_corrupt: Callable[[CorruptMessage], object] | None = None,
) -> ReadCommitted[M]:
    """Return a reader of committed messages that begins at `source`, by default at the journal's beginning.

    The reader ends at `end`, or at the write head. With `block` it waits there for more content. With `on_corrupt` it
    skips unreadable content, and calls `on_corrupt` with the error, perhaps repeatedly for the same content. Iteration
    raises CorruptMessage, the errors of the client's reads, JournalRecreated if the journal of `source` was recreated,
    and OffsetJump if messages to be replayed are gone or, with `fail_on_jump`, any content.
    """
    _check(source, end)

    def read(first: int, last: int | None) -> Iterable[Envelope[M]]:
        known = reader.journal_id if reader.offset else ""
        if last is None:
            chunks = client.read(
                journal, first, end_offset=end or 0, block=block, fail_on_jump=fail_on_jump, journal_id=known
            )
        else:
            chunks = client.read(journal, first, end_offset=last, fail_on_jump=True, journal_id=known)
        return ReadUncommitted(framing, journal, chunks, first, on_corrupt=on_corrupt)

    reader = ReadCommitted(read, journal, source, ring_size=ring_size)
    return reader


def async_committed_reader(
    client: JournalClient,
    journal: str,
    framing: Framing[M],
    source: Source | None = None,
    *,
    end: int | None = None,
    block: bool = False,
    ring_size: int = DEFAULT_RING_SIZE,
    on_corrupt: Callable[[CorruptMessage], object] | None = None,
) -> AsyncReadCommitted[M]:
    """Return a `committed_reader` for the asynchronous client.

    Close it (`contextlib.aclosing`) when you leave it early.
    """
    _check(source, end)

    def read(first: int, last: int | None) -> AsyncIterable[Envelope[M]]:
        known = reader.journal_id if reader.offset else ""
        if last is None:
            chunks = client.read(journal, first, end_offset=end or 0, block=block, journal_id=known)
        else:
            chunks = client.read(journal, first, end_offset=last, fail_on_jump=True, journal_id=known)
        return AsyncReadUncommitted(framing, journal, chunks, first, on_corrupt=on_corrupt)

    reader = AsyncReadCommitted(read, journal, source, ring_size=ring_size)
    return reader


def _check(source: Source | None, end: int | None) -> None:
    begin = source.read_through if source is not None else 0
    if end is not None and end <= begin:
        raise InvalidInput(
            f"there is nothing to read from offset {begin} up to {end}; the end must be above the begin", field="end"
        )
