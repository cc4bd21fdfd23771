"""`Application`, the one class that a user of the consumer runtime writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import Any, Generic, TypeVar

from coranto.client import JournalClient
from coranto.errors import InvalidInput
from coranto.labels import CONTENT_TYPE, JSON_LINES, value_of
from coranto.messages import Envelope, Framing, JsonLines
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.outputs.dead_letters import DeadLetters, MisfitPolicy
from coranto_consumers.recoverylog import Recorder
from coranto_consumers.runtime.columns import Columns, MessageBatch
from coranto_consumers.runtime.publishing import ShardPublisher
from coranto_consumers.stores.base import Store

StoreT = TypeVar("StoreT", bound=Store)


class Shard:
    """An assigned shard, as the methods of an application get it."""

    def __init__(self, spec: pc.ShardSpec, client: JournalClient, fqn: str = "") -> None:
        self.log_recorder: Recorder | None = None
        self.fqn = fqn or spec.id
        """Its full name: the key of its spec in etcd. Stores use it, as Gazette's stores do, so consumers that share a
        database may have shards of the same id. In a test without etcd it is the id."""
        self.spec = spec
        """The current spec. It is replaced when the spec changes."""
        self.client = client
        """A client for the application's own use, on the runtime's event loop."""

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def recorder(self) -> Recorder:
        """The recorder of the shard's recovery log, for a store with files. Raises InvalidInput without a log."""
        if self.log_recorder is None:
            raise InvalidInput(
                f"shard {self.id} has no recovery log: give its spec recovery_log_prefix and hint_prefix",
                field="recovery_log_prefix",
            )
        return self.log_recorder


class Application(ABC, Generic[StoreT]):
    """A consumer. One instance serves all shards of a process at the same time.

    Every method may be `async` or plain. Plain methods are called on a thread of their shard's own, one after the
    other, so they may block. `async` methods must not block. The calls of one transaction are

    ::

        consume_message(shard, store, message, publisher)      once for each message
        consume_batch(shard, store, batch, publisher)          instead, for sources in columns
        finalize_txn(shard, store, publisher)

    and then the store commits its changes, together with a checkpoint of the offsets read and the messages published.
    A message may be consumed more than once: a transaction may be abandoned, and then its messages are consumed again,
    by this process or another one, with the store as it was before. The effects on the store count exactly once, and so
    do published messages for read-committed readers. So keep all effects of messages in the store and the publisher.

    An error that a method raises fails the shard, unless the store considers it transient. Then the shard restarts
    from its last checkpoint.
    """

    misfits: MisfitPolicy | DeadLetters = MisfitPolicy.FAIL
    """The handling of messages whose rows the store rejects, with `consume_message`: they fail the shard, or become
    `DeadLetters`. For sources in columns, `Columns.misfits` decides."""

    atomic: bool = False
    """True to consume each set of messages that one acknowledgement commits in a journal in a single transaction,
    however long that takes. A set of more than 65,536 messages takes several calls of `consume_batch`. A set that spans
    more than 256 MiB of its journal (`intake.ATOMIC_BYTES`) fails the shard with InvalidInput, before any of it is
    committed. A rejected row fails the shard, too, since the search for its message would split sets. Deferring a
    message within a set is an error.
    """

    publishes: str | Sequence[str] = ()
    """The journals that the application publishes to: a label selector, or a list of names.

    Checkpoints record the journals, and an application with other journals is refused (`ConsumerChanged`). A message
    for another journal fails the shard with InvalidInput, before its transaction commits. If empty, checkpoints do not
    record where messages go. Journals of dead letters are not included."""

    @abstractmethod
    def new_store(self, shard: Shard) -> StoreT | Awaitable[StoreT]:
        """Return the store of a shard. Called when this process becomes the shard's primary."""

    def new_message(self, journal: pb.JournalSpec) -> Framing[Any] | Columns:
        """Return the framing of a source journal. It decides the type of `Envelope.message`.

        With `Columns`, the journal's messages come in Arrow batches, to `consume_batch`.

        The default is JSON lines with a UUID at `/_meta/uuid`, for journals with the label of that content type. Other
        journals raise InvalidInput.
        """
        content_type = value_of(journal.labels, CONTENT_TYPE)
        if content_type != JSON_LINES:
            raise InvalidInput(
                f"{journal.name} has {CONTENT_TYPE} {content_type or 'none'!r}, not {JSON_LINES}: override new_message "
                "to say how its messages are framed",
                field="new_message",
            )
        return JsonLines()

    def consume_message(
        self, shard: Shard, store: StoreT, message: Envelope[Any], publisher: ShardPublisher
    ) -> Awaitable[None] | None:
        """Consume one committed message: change the store, and publish.

        Raise `DeferToNextTransaction` to end the transaction before this message.
        """
        raise InvalidInput(
            f"{type(self).__name__} cannot consume {message.journal} message by message: give it a consume_message, or "
            "return Columns from new_message",
            field="consume_message",
        )

    def consume_batch(
        self, shard: Shard, store: StoreT, batch: MessageBatch, publisher: ShardPublisher
    ) -> Awaitable[None] | None:
        """Consume committed messages of a source if `new_message` returned `Columns` for it.

        As for `consume_message`, and the batch is consumed as a whole or not at all. Messages of a producer that were
        committed together are in one batch unless there are very many. Then they are in several batches, and these may
        be in consecutive transactions if the application is not `atomic`.
        """
        raise InvalidInput(
            f"{type(self).__name__} cannot consume {batch.journal} in batches: give it a consume_batch, or return a "
            "framing from new_message",
            field="consume_batch",
        )

    def finalize_txn(self, shard: Shard, store: StoreT, publisher: ShardPublisher) -> Awaitable[None] | None:
        """Finish a transaction whose messages were all consumed: write gathered changes to the store, and publish."""
        return None
