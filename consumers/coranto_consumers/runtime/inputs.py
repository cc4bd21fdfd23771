"""The two forms of an application's input: message by message, and in batches.

Both decode content, sequence it, replay it where the sequencer requires that, and deliver committed messages to the
application. A shard may have sources of both forms.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coranto.client import Chunk
from coranto.errors import InvalidInput
from coranto.messages import Envelope, Flags, Framing, Pruning, ReplayRange, Source
from coranto.messages.mapping import rendezvous
from coranto_consumers.outputs.dead_letters import DeadLetters, MisfitPolicy, policy_of
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.columns import Columns
from coranto_consumers.runtime.intake import ATOMIC_BYTES, Intake
from coranto_consumers.runtime.publishing import ShardPublisher
from coranto_consumers.runtime.rejections import Consumed, Treatments
from coranto_consumers.stores.base import Store
from coranto_consumers.stores.sql_shard import SqlShardStore

if TYPE_CHECKING:
    from coranto_consumers.runtime.batch_reading import BatchReader

Feed = Callable[[Chunk], tuple[Any, int]]
"""Decodes the next content of a journal. Returns the messages that it completes, perhaps empty or None, and the end
offset of the decoded content."""


class SourceInput(ABC):
    """An input in one form. Results of `feed` go to `add` or `add_replayed`, and results of `pull` to `consume`."""

    intake: Any
    """The sequencing: `Intake` or `ColumnIntake`."""
    is_async: bool
    """True if the application's method is `async`."""

    @abstractmethod
    def feed(self, journal: str, offset: int) -> Feed:
        """Return a decoder of a source's content from an offset on."""

    @abstractmethod
    def add(self, journal: str, decoded: Any) -> None:
        """Add read content of a source."""

    @abstractmethod
    def size_of(self, decoded: Any) -> tuple[int, int]:
        """Return the number of messages that were decoded, and their bytes."""

    @abstractmethod
    def weigh(self, pulled: Any) -> tuple[int, int, int]:
        """Return the number of messages and of acknowledgements that were pulled, and their bytes."""

    @abstractmethod
    def consume(self, store: Store, pulled: Any) -> None:
        """Let a plain application consume pulled messages, on the shard's thread."""

    @abstractmethod
    async def consume_async(self, store: Store, pulled: Any) -> None:
        """Let an `async` application consume pulled messages."""

    @abstractmethod
    def checkpoint(self, pruning: Pruning | None) -> Mapping[str, Source]:
        """Return the states of this input's sources."""

    @abstractmethod
    def subject(self, pulled: Any) -> Consumed | None:
        """Return the pulled message, for the search for rejected rows. None unless it is exactly one message."""

    def add_replayed(self, decoded: Any) -> None:
        self.intake.add_replayed(decoded)

    @property
    def replay_range(self) -> ReplayRange | None:
        wanted: ReplayRange | None = self.intake.replay_range
        return wanted


class MessageInput(SourceInput):
    """Sources whose messages are consumed one by one."""

    def __init__(
        self,
        app: Application[Any],
        shard: Shard,
        publisher: ShardPublisher,
        sources: Mapping[str, Source],
        ring_size: int,
        treatments: Treatments,
    ) -> None:
        self._app = app
        self._shard = shard
        self._publisher = publisher
        self._treatments = treatments
        self._framings: dict[str, Framing[Any]] = {}
        self.intake: Intake[Any] = Intake(sources, ring_size, ATOMIC_BYTES if app.atomic else None)
        self.is_async = inspect.iscoroutinefunction(getattr(app, "consume_message", None))

    def add_source(self, journal: str, framing: Framing[Any], store: Store) -> None:
        """Set the framing of a source. Raises InvalidInput for unsupported `misfits` of the application."""
        if policy_of(self._app.misfits) is MisfitPolicy.NULLS:
            raise InvalidInput(
                "an application that takes messages one by one chooses nulls itself: choose DeadLetters or "
                "MisfitPolicy.FAIL, or take messages in Columns",
                field="misfits",
            )
        _require_place(self._app.misfits, store)
        self._framings[journal] = framing

    def feed(self, journal: str, offset: int) -> Feed:
        decoder = self._framings[journal].decoder(journal, offset)
        return lambda chunk: (list(decoder.feed(chunk.content, chunk.offset)), decoder.offset)

    def add(self, journal: str, decoded: Sequence[Envelope[Any]]) -> None:
        self.intake.add(decoded)

    def size_of(self, decoded: Sequence[Envelope[Any]]) -> tuple[int, int]:
        return len(decoded), sum(each.end - each.begin for each in decoded)

    def weigh(self, pulled: Envelope[Any]) -> tuple[int, int, int]:
        acknowledgements = int(_is_ack(pulled))
        return 1 - acknowledgements, acknowledgements, pulled.end - pulled.begin

    def consume(self, store: Store, pulled: Envelope[Any]) -> None:
        if not _is_ack(pulled) and not self._leaves_out(store, pulled):
            self._app.consume_message(self._shard, store, pulled, self._publisher)

    async def consume_async(self, store: Store, pulled: Envelope[Any]) -> None:
        if not _is_ack(pulled) and not self._leaves_out(store, pulled):
            outcome = self._app.consume_message(self._shard, store, pulled, self._publisher)
            assert outcome is not None
            await outcome

    def checkpoint(self, pruning: Pruning | None) -> Mapping[str, Source]:
        return self.intake.checkpoint(pruning)

    def subject(self, pulled: Envelope[Any]) -> Consumed | None:
        return None if _is_ack(pulled) else Consumed(pulled.journal, pulled.begin, self._app.misfits)

    def _leaves_out(self, store: Store, pulled: Envelope[Any]) -> bool:
        """Store a message whose rows the store rejects as a dead letter. Return False for other messages."""
        if not self._treatments or (pulled.journal, pulled.begin) not in self._treatments:
            return False
        _keep(self._app.misfits, store, self._publisher, [(pulled.journal, pulled.begin, pulled.content)])
        return True


class BatchInput(SourceInput):
    """Sources whose messages are consumed in batches."""

    def __init__(
        self,
        app: Application[Any],
        shard: Shard,
        publisher: ShardPublisher,
        sources: Mapping[str, Source],
        in_thread: Callable[..., Awaitable[Any]],
        treatments: Treatments,
    ) -> None:
        """`in_thread` calls a function on the shard's thread."""
        from coranto_consumers.runtime.column_intake import ColumnIntake

        rows = {"ring_rows": shard.spec.ring_buffer_size} if shard.spec.ring_buffer_size else {}
        self._app = app
        self._shard = shard
        self._publisher = publisher
        self._in_thread = in_thread
        self._treatments = treatments
        self._columns: dict[str, Columns] = {}
        self._readers: dict[str, BatchReader] = {}
        self.intake = ColumnIntake(sources, **rows, atomic_bytes=ATOMIC_BYTES if app.atomic else None)
        self.is_async = inspect.iscoroutinefunction(app.consume_batch)

    def add_source(self, journal: str, columns: Columns, store: Store) -> None:
        """Set the columns of a source. Raises InvalidInput if the store does not support its dead letters."""
        from coranto_consumers.runtime.batch_reading import BatchReader

        _require_place(columns.misfits, store)
        self._columns[journal] = columns
        self._readers[journal] = BatchReader(columns, self._treatments)

    def limit(self, max_rows: int | None) -> None:
        """Limit the messages in a batch. None: the default limit."""
        from coranto_consumers.runtime.column_intake import MAX_ROWS

        self.intake.max_rows = MAX_ROWS if max_rows is None else min(max_rows, MAX_ROWS)

    def feed(self, journal: str, offset: int) -> Feed:
        from coranto.messages.line_batches import LineBatchDecoder

        decoder = LineBatchDecoder(self._columns[journal].lines, journal, offset)
        return lambda chunk: (decoder.feed(chunk.content, chunk.offset), decoder.offset)

    def add(self, journal: str, decoded: Any) -> None:
        self.intake.add(journal, decoded)

    def size_of(self, decoded: Any) -> tuple[int, int]:
        return decoded.num_rows, decoded.column("end")[-1].as_py() - decoded.column("offset")[0].as_py()

    def weigh(self, pulled: Any) -> tuple[int, int, int]:
        messages = pulled.rows.num_rows
        return messages, int(not messages), pulled.size

    def consume(self, store: Store, pulled: Any) -> None:
        if not pulled.rows.num_rows:
            return
        batch, misfits = self._readers[pulled.journal].read(pulled)
        if len(batch):
            self._app.consume_batch(self._shard, store, batch, self._publisher)
        # After the call: a deferred batch comes again, together with its dead letters.
        _keep(self._columns[pulled.journal].misfits, store, self._publisher, misfits)

    async def consume_async(self, store: Store, pulled: Any) -> None:
        if not pulled.rows.num_rows:
            return
        batch, misfits = await self._in_thread(self._readers[pulled.journal].read, pulled)
        if len(batch):
            outcome = self._app.consume_batch(self._shard, store, batch, self._publisher)
            assert outcome is not None
            await outcome
        _keep(self._columns[pulled.journal].misfits, store, self._publisher, misfits)

    def checkpoint(self, pruning: Pruning | None) -> Mapping[str, Source]:
        sources: Mapping[str, Source] = self.intake.checkpoint(pruning)
        return sources

    def subject(self, pulled: Any) -> Consumed | None:
        if pulled.rows.num_rows != 1:
            return None
        columns = self._columns[pulled.journal]
        nullable = tuple(field.name for field in columns.schema if field.nullable)
        return Consumed(pulled.journal, pulled.rows.column("offset")[0].as_py(), columns.misfits, nullable)


def _require_place(misfits: MisfitPolicy | DeadLetters, store: Store) -> None:
    """Raise InvalidInput if the store, or the shard, does not support the destination of dead letters."""
    if not isinstance(misfits, DeadLetters):
        return
    if misfits.table is not None and not isinstance(store, SqlShardStore):
        raise InvalidInput(
            f"a {type(store).__name__} has no table for dead letters: use a SqlShardStore, or name journals",
            field="misfits",
        )
    if isinstance(misfits.journals, str):
        raise InvalidInput("name the journals of dead letters in a list: a shard does not list them", field="misfits")


def _keep(
    letters: MisfitPolicy | DeadLetters,
    store: Store,
    publisher: ShardPublisher,
    misfits: Sequence[tuple[str, int, bytes]],
) -> None:
    """Store dead letters in the transaction."""
    for journal, offset, line in misfits:
        assert isinstance(letters, DeadLetters)
        if letters.table is not None:
            assert isinstance(store, SqlShardStore)
            store.insert(letters.table, {"journal": journal, "offset": offset, "line": line})
        else:
            message = {"journal": journal, "offset": offset, "line": b64encode(line).decode()}
            publisher.keep(rendezvous(journal.encode(), letters.journals), message)


def _is_ack(message: Envelope[Any]) -> bool:
    """Return True if a message is an acknowledgement. These commit other messages, and the application skips them."""
    return message.flags == Flags.ACK_TXN and message.clock != 0
