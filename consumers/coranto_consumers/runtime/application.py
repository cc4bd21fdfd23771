"""What a user of the consumer runtime writes: one class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any, Generic, TypeVar

from coranto.client import JournalClient
from coranto.errors import InvalidInput
from coranto.labels import CONTENT_TYPE, JSON_LINES, value_of
from coranto.messages import Envelope, Framing, JsonLines
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.recoverylog import Recorder
from coranto_consumers.runtime.publishing import ShardPublisher
from coranto_consumers.stores.base import Store

StoreT = TypeVar("StoreT", bound=Store)


class Shard:
    """The shard that a call of the application is about, while it is assigned to this process."""

    def __init__(self, spec: pc.ShardSpec, client: JournalClient, fqn: str = "") -> None:
        self.log_recorder: Recorder | None = None
        self.fqn = fqn or spec.id
        """Its full name, by which stores know it, as Gazette's do: the key of its spec in etcd. Consumers that share a
        database may so have shards of the same id. In a test without etcd it is the id."""
        self.spec = spec
        """As it is now: changes of the spec show here."""
        self.client = client
        """For journals other than by the runtime's own reading and publishing. Used on the runtime's event loop."""

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def recorder(self) -> Recorder:
        """Of the shard's recovery log, for a store whose files live there. Raises InvalidInput when it has no log."""
        if self.log_recorder is None:
            raise InvalidInput(
                f"shard {self.id} has no recovery log: give its spec recovery_log_prefix and hint_prefix",
                field="recovery_log_prefix",
            )
        return self.log_recorder


class Application(ABC, Generic[StoreT]):
    """A consumer. One instance serves all shards of a process, at the same time.

    Every method may be `async` or plain. Plain ones of a shard are called on a thread of that shard's own, one after
    the other, so they may block; `async` ones must not. The calls of one transaction are

    ::

        consume_message(shard, store, message, publisher)      once for each message
        finalize_txn(shard, store, publisher)

    and then the store commits what was done to it, together with how far was read and what was published. It is not
    certain that calls are made only once for a message: a transaction may be abandoned, and its messages are consumed
    again, by this process or another, with the store as it was before. What counts once is the effect on the store, and
    what readers see of published messages. So keep the effects of messages in the store and in the publisher.

    An error that a method raises fails the shard, unless the store calls it transient: then the shard starts anew from
    its last checkpoint.
    """

    @abstractmethod
    def new_store(self, shard: Shard) -> StoreT | Awaitable[StoreT]:
        """The store of a shard that this process is now the primary of."""

    def new_message(self, journal: pb.JournalSpec) -> Framing[Any]:
        """How messages stand in a source journal, which says as what type `Envelope.message` decodes them.

        By default JSON lines with a UUID at `/_meta/uuid`, for journals labelled as such.
        """
        content_type = value_of(journal.labels, CONTENT_TYPE)
        if content_type != JSON_LINES:
            raise InvalidInput(
                f"{journal.name} has {CONTENT_TYPE} {content_type or 'none'!r}, not {JSON_LINES}: override new_message "
                "to say how its messages are framed",
                field="new_message",
            )
        return JsonLines()

    @abstractmethod
    def consume_message(
        self, shard: Shard, store: StoreT, message: Envelope[Any], publisher: ShardPublisher
    ) -> Awaitable[None] | None:
        """Consume one committed message: change the store, publish.

        Raise `DeferToNextTransaction` to have the transaction end before this message.
        """

    def finalize_txn(self, shard: Shard, store: StoreT, publisher: ShardPublisher) -> Awaitable[None] | None:
        """All messages of a transaction were consumed: write to the store what was gathered, publish what is due."""
        return None
