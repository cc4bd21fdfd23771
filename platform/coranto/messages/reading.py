"""Readers of one journal's messages: all messages, the committed ones, or whole transactions.

`ReadUncommitted` yields every message, with duplicates, pending messages and acknowledgements. `ReadCommitted` adds a
`Sequencer` and yields committed content messages, each once. Its `transactions` yields them in the groups that were
committed together. Each reader has an asynchronous version. A callable provides the content, so that readers work with
any client (`coranto.client.committed` has readers for journals of brokers) and with plain bytes in a test.

A reader of committed messages starts from a `Source`, and its `source()` returns the `Source` for a later reader. After
an error it yields no more messages: create another reader from its `source()`.

Close a reader that was not read to its end. This also closes its input.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from typing import Generic, NamedTuple, Self, TypeAlias, TypeVar

import structlog

from coranto.errors import CorruptMessage
from coranto.messages.checkpoints import Source
from coranto.messages.framing import ContentChunk, Decoder, Envelope, Framing, IncompleteTail
from coranto.messages.pruning import DEFAULT_PRUNE_HORIZON_S, Pruning
from coranto.messages.sequencer import DEFAULT_RING_SIZE, QueueOutcome, Sequencer
from coranto.messages.skew import SkewWatch
from coranto.messages.uuids import Flags, ProducerId

M = TypeVar("M")

_log = structlog.get_logger(__name__)


class ReadTransaction(NamedTuple, Generic[M]):
    """Messages that were committed together: by one acknowledgement, or one message outside of transactions.

    `end` is the end offset of the message that committed them, and `clock` its clock.
    """

    journal: str
    producer: ProducerId
    clock: int
    end: int
    messages: tuple[Envelope[M], ...]
    """In order of publication; never empty."""


Read: TypeAlias = Callable[[int, int | None], Iterable[Envelope[M]]]
"""Reads the messages of [begin, end) of a journal.

With end None it reads as far as the reader needs. With an end it reads messages again (a replay), and must fail rather
than skip messages if content is gone.
"""

ReadAsync: TypeAlias = Callable[[int, int | None], AsyncIterable[Envelope[M]]]
"""The asynchronous `Read`."""


class _UncommittedReader(Generic[M]):
    """The common part of both readers of uncommitted messages."""

    def __init__(
        self,
        framing: Framing[M],
        journal: str,
        offset: int,
        on_corrupt: Callable[[CorruptMessage], object] | None,
    ) -> None:
        self._decoder: Decoder[M] = framing.decoder(journal, offset)
        self._decoded: Iterator[Envelope[M]] = iter(())
        self._on_corrupt = on_corrupt
        self.journal_id = ""
        """The id of the journal, from its content (`Chunk.journal_id`); empty until it is known."""

    @property
    def offset(self) -> int:
        """The begin offset of the next message."""
        return self._decoder.offset

    @property
    def tail(self) -> IncompleteTail | None:
        """The incomplete message at the end of the content read so far, or None."""
        return self._decoder.finish()

    def _next_decoded(self) -> Envelope[M] | None:
        while True:
            try:
                return next(self._decoded, None)
            except CorruptMessage as error:
                self._decoded = self._decoder.feed(b"")  # Continue after the corrupt message.
                if self._on_corrupt is None:
                    raise
                self._on_corrupt(error)

    def _feed(self, chunk: bytes | ContentChunk) -> None:
        if isinstance(chunk, bytes):
            self._decoded = self._decoder.feed(chunk)
        else:
            self.journal_id = getattr(chunk, "journal_id", "") or self.journal_id
            self._decoded = self._decoder.feed(chunk.content, chunk.offset)


class ReadUncommitted(_UncommittedReader[M]):
    """Iterates over all messages in `chunks`, consecutive content of `journal` from `offset` on.

    A message is decoded when its `Envelope.message` is read. `on_corrupt` is called with the error of a message that
    cannot be read, and reading continues after that message. Without `on_corrupt` the reader raises CorruptMessage, and
    the iteration may continue after the error. An incomplete message at the end of the content is not yielded: see
    `tail`. Offsets have a gap where content is gone.
    """

    def __init__(
        self,
        framing: Framing[M],
        journal: str,
        chunks: Iterable[bytes | ContentChunk],
        offset: int = 0,
        *,
        on_corrupt: Callable[[CorruptMessage], object] | None = None,
    ) -> None:
        super().__init__(framing, journal, offset, on_corrupt)
        self._chunks = iter(chunks)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Envelope[M]:
        while (envelope := self._next_decoded()) is None:
            self._feed(next(self._chunks))
        return envelope

    def close(self) -> None:
        _close(self._chunks)


class AsyncReadUncommitted(_UncommittedReader[M]):
    """The asynchronous `ReadUncommitted`.

    Cancelling a read may end the iteration over `chunks`. Then continue with a new reader from `offset`.
    """

    def __init__(
        self,
        framing: Framing[M],
        journal: str,
        chunks: AsyncIterable[bytes | ContentChunk],
        offset: int = 0,
        *,
        on_corrupt: Callable[[CorruptMessage], object] | None = None,
    ) -> None:
        super().__init__(framing, journal, offset, on_corrupt)
        self._chunks = aiter(chunks)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Envelope[M]:
        while (envelope := self._next_decoded()) is None:
            self._feed(await anext(self._chunks))
        return envelope

    async def aclose(self) -> None:
        await _aclose(self._chunks)


class _CommittedReader(Generic[M]):
    """The common part of both readers of committed messages."""

    def __init__(self, journal: str, source: Source | None, ring_size: int) -> None:
        self.journal = journal
        self._journal_id = source.journal_id if source is not None else ""
        self._reading: object = None
        self._sequencer: Sequencer[M] = Sequencer({journal: source or Source()}, ring_size)
        self._skew = SkewWatch(journal, source or Source())

    @property
    def offset(self) -> int:
        """The end offset of the messages that were read and, if committed, returned."""
        return self._sequencer.read_through(self.journal)

    @property
    def journal_id(self) -> str:
        """The id of the journal; empty until it is known."""
        self._journal_id = getattr(self._reading, "journal_id", "") or self._journal_id
        return self._journal_id

    def source(self, prune_horizon_s: float = DEFAULT_PRUNE_HORIZON_S) -> Source:
        """Return the state for continuing. It covers exactly the messages returned so far.

        Producers that have been silent for long are forgotten: `prune_horizon_s` is the horizon of `Pruning`, in
        seconds. With 0 no producer is forgotten.
        """
        now = time.time()
        source = self._sequencer.checkpoint(Pruning(now, prune_horizon_s) if prune_horizon_s else None)[self.journal]
        self._skew.check(source, now)
        return replace(source, journal_id=self.journal_id)

    def _queue(self, envelope: Envelope[M]) -> None:
        if self._sequencer.queue(envelope) is QueueOutcome.ACK_RESET:
            _log.warning(
                "producer.reset",
                journal=envelope.journal,
                offset=envelope.begin,
                producer=envelope.producer.hex(),
                clock=envelope.clock,
            )


class ReadCommitted(_CommittedReader[M]):
    """Iterates over the committed content messages of a journal, each once, in order of commit.

    `read` is called with the begin offset. It is called again for each replay, when an acknowledgement commits messages
    that are no longer among the `ring_size` messages in memory. The messages of a transaction are returned without
    others in between, as soon as it is acknowledged, even if other producers have open transactions.
    """

    def __init__(
        self, read: Read[M], journal: str, source: Source | None = None, *, ring_size: int = DEFAULT_RING_SIZE
    ) -> None:
        super().__init__(journal, source, ring_size)
        self._read = read
        self._messages = self._run()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Envelope[M]:
        for message in self._messages:
            if _is_content(message):
                return message
        raise StopIteration

    def close(self) -> None:
        _close(self._messages)

    def transactions(self) -> Iterator[ReadTransaction[M]]:
        """Yield the remaining messages by transaction. A whole transaction is held in memory.

        A `source()` that is taken between two transactions covers exactly the transactions returned so far.
        """
        collected: list[Envelope[M]] = []
        for message in self._messages:
            if _is_content(message):
                collected.append(message)
            if not self._sequencer.is_delivering and collected:
                yield _transaction(message, collected)
                collected = []

    def _run(self) -> Iterator[Envelope[M]]:
        """Yield all messages that the sequencer returns, acknowledgements included."""
        sequencer = self._sequencer
        with _closing(self._read(self.offset, None)) as envelopes:
            self._reading = envelopes
            for envelope in envelopes:
                self._queue(envelope)
                wanted = sequencer.replay_range
                if wanted is not None:
                    with _closing(self._read(wanted.begin, wanted.end)) as replayed:
                        yield from filter(sequencer.replay, replayed)
                    sequencer.end_replay()
                while (committed := sequencer.step()) is not None:
                    yield committed
            sequencer.advance_to(self.journal, getattr(envelopes, "offset", 0))


class AsyncReadCommitted(_CommittedReader[M]):
    """The asynchronous `ReadCommitted`.

    A cancelled read ends the iteration. Continue with a new reader from the last `source` that was kept.
    """

    def __init__(
        self, read: ReadAsync[M], journal: str, source: Source | None = None, *, ring_size: int = DEFAULT_RING_SIZE
    ) -> None:
        super().__init__(journal, source, ring_size)
        self._read = read
        self._messages = self._run()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Envelope[M]:
        while not _is_content(message := await anext(self._messages)):
            pass
        return message

    async def aclose(self) -> None:
        await _aclose(self._messages)

    async def transactions(self) -> AsyncIterator[ReadTransaction[M]]:
        """Yield the remaining messages by transaction, like `ReadCommitted.transactions`."""
        collected: list[Envelope[M]] = []
        async for message in self._messages:
            if _is_content(message):
                collected.append(message)
            if not self._sequencer.is_delivering and collected:
                yield _transaction(message, collected)
                collected = []

    async def _run(self) -> AsyncIterator[Envelope[M]]:
        sequencer = self._sequencer
        async with _aclosing(self._read(self.offset, None)) as envelopes:
            self._reading = envelopes
            async for envelope in envelopes:
                self._queue(envelope)
                wanted = sequencer.replay_range
                if wanted is not None:
                    async with _aclosing(self._read(wanted.begin, wanted.end)) as replay:
                        async for replayed in replay:
                            if sequencer.replay(replayed):
                                yield replayed
                    sequencer.end_replay()
                while (committed := sequencer.step()) is not None:
                    yield committed
            sequencer.advance_to(self.journal, getattr(envelopes, "offset", 0))


def _is_content(message: Envelope[M]) -> bool:
    return message.flags != Flags.ACK_TXN or message.clock == 0


def _transaction(last: Envelope[M], messages: list[Envelope[M]]) -> ReadTransaction[M]:
    return ReadTransaction(last.journal, last.producer, last.clock, last.end, tuple(messages))


def _close(iterated: object) -> None:
    close = getattr(iterated, "close", None)
    if close is not None:
        close()


async def _aclose(iterated: object) -> None:
    close = getattr(iterated, "aclose", None)
    if close is not None:
        await close()


@contextlib.contextmanager
def _closing(iterated: Iterable[Envelope[M]]) -> Iterator[Iterable[Envelope[M]]]:
    try:
        yield iterated
    finally:
        _close(iterated)


@contextlib.asynccontextmanager
async def _aclosing(iterated: AsyncIterable[Envelope[M]]) -> AsyncIterator[AsyncIterable[Envelope[M]]]:
    try:
        yield iterated
    finally:
        await _aclose(iterated)
