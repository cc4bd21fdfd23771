"""What a consumer's runtime asks of a store.

A store keeps the state that an application builds from messages, and with it the `Checkpoint` that says which messages
those were. Both change together or not at all: that is the whole of its part in exactly-once semantics, and the fence
is the other half of it. The life of a store within one assignment of a shard to a process is

1.  `restore_checkpoint`, once. It places the fence: when it returns, no process that was assigned the shard before can
    commit any more. The checkpoint that it returns is the last that any of them committed.
2.  Transactions, one after the other. The application changes the store's state in whatever way the store offers for
    that, and `start_commit` ends the transaction.
3.  `destroy`, once, also after a failure.

Calls are made one at a time, except that a transaction's state may be changed while the commit of the one before is
still pending, and that `destroy` may find one pending.

`coranto_consumers.stores.contract` holds any store to this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence

from coranto.errors import CorantoError
from coranto.messages.checkpoints import Checkpoint


class Store(ABC):
    """The state of one shard, while it is assigned to this process.

    `shard` is its full name, which no shard of another consumer has.
    """

    @abstractmethod
    async def restore_checkpoint(self, shard: str) -> Checkpoint:
        """Fence off all earlier owners of the shard, and return the checkpoint last committed (empty before the first).

        The store's state is that of the checkpoint. Raises Fenced when a later owner has fenced off this one.
        """

    @abstractmethod
    async def start_commit(
        self, shard: str, checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]
    ) -> Awaitable[None]:
        """Begin to commit what the application changed since the last call, together with `checkpoint`.

        Returns as soon as the application may change the state for the next transaction, with an awaitable that is
        done once the commit is durable. Nothing may commit before all of `wait_for` are done (the appends of messages
        that the transaction published), and when one of those raises, nothing may commit at all.

        The next call is made after the awaitable of this one was done. It raises Fenced when a later owner has fenced
        off this one, and then nothing was committed; with any other error the commit may or may not have taken place
        (unless the error says more), and the shard starts anew from `restore_checkpoint`. The caller awaits it once.
        """

    @abstractmethod
    async def destroy(self) -> None:
        """Give back what the store holds (connections, files). What was not committed is dropped. Never raises."""

    def is_transient(self, error: BaseException) -> bool:
        """Whether an error, of this store or of the application's own use of it, may be gone when the shard starts anew
        from its checkpoint, as after a lost connection. Other errors need somebody's attention."""
        return isinstance(error, CorantoError) and error.retriable
