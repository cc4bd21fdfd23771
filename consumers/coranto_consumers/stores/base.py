"""The interface of stores for the consumer runtime.

A store keeps the state that an application builds from messages, and the `Checkpoint` of these messages. For
exactly-once semantics a store does two things: it changes state and checkpoint together or not at all, and it fences
off former owners. During one assignment of a shard to a process, the runtime makes these calls:

1.  `restore_checkpoint`, once. It raises the fence: after it returns, no earlier owner of the shard can commit. It
    returns the last checkpoint that an earlier owner committed.
2.  Transactions, one after the other. The application changes the state with the store's own methods, and
    `start_commit` ends the transaction.
3.  `destroy`, once, also after a failure.

Between transactions, the runtime may call `require_fence`. It makes one call at a time, with two exceptions. A
transaction may change the state while the commit of the previous transaction is pending, and `destroy` may be called
while a commit is pending.

`coranto_consumers.stores.contract` tests a store against this contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence

from coranto.errors import CorantoError, RejectedRow
from coranto.messages.checkpoints import Checkpoint, Identity


class Store(ABC):
    """The state of one shard, while it is assigned to this process.

    In its methods, `shard` is the shard's full name, which is unique among all consumers. A cancelled call may have
    taken effect. The runtime cancels calls only to end the shard, and then calls `destroy`.
    """

    @abstractmethod
    async def restore_checkpoint(self, shard: str) -> Checkpoint:
        """Fence off all earlier owners of the shard, and return the last committed checkpoint (empty before the first).

        The store's state then corresponds to the checkpoint. Raises Fenced when a later owner has fenced off this one.
        """

    @abstractmethod
    async def start_commit(
        self, shard: str, checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]
    ) -> Awaitable[None]:
        """Begin to commit the application's changes since the last call, together with `checkpoint`.

        Returns as soon as the application may change the state for the next transaction. The returned awaitable is done
        once the commit is durable. The commit must wait until all of `wait_for` are done (the appends of messages that
        the transaction published). If one of them raises, nothing may commit.

        The awaitable raises Fenced when a later owner has fenced off this one; then nothing was committed. After any
        other error the commit may or may not have taken place (unless the error says more), and the shard restarts
        from `restore_checkpoint`. The caller awaits it once, and calls `start_commit` again only after it is done.
        """

    async def require_fence(self) -> None:  # noqa: B027 - most stores detect it only at a commit
        """Raise Fenced if a later owner has fenced off this one, and the store can detect that without a commit.

        The runtime calls it periodically while the shard is idle and no commit is pending. Without it, an idle shard
        would notice only at its next commit that an operator has moved it. Other errors are as for a commit.
        """

    @abstractmethod
    async def destroy(self) -> None:
        """Release the store's connections and files. Uncommitted changes are dropped. Never raises."""

    def rejection_of(self, error: BaseException) -> RejectedRow | None:
        """Return the details if `error` means that the store rejects a row because of its values, else None.

        The error was raised by this store, or by the application's own use of it. The details have no values of the
        row.
        """
        return error if isinstance(error, RejectedRow) else None

    def identity(self) -> Identity:
        """Return the store's location and the tables that the shard writes, as far as known, for checkpoints."""
        return Identity()

    def is_transient(self, error: BaseException) -> bool:
        """Return True for an error, such as a lost connection, that a restart of the shard from its checkpoint may fix.

        The error was raised by this store, or by the application's own use of it. Other errors need an operator.
        """
        return isinstance(error, CorantoError) and error.retriable
