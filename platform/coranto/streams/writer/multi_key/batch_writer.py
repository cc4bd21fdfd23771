"""The writer of numbered batches (`numbered.py`): multi-key transactions that are decided one after the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from coranto.streams.writer.multi_key.numbered import (
    LastBatch,
    NumberedBatch,
    last_batch_of,
    records_of,
    take_turn,
)
from coranto.streams.writer.multi_key.writer import MultiKeyWriter

E = TypeVar("E")


class BatchWriter(MultiKeyWriter[E], Generic[E]):
    """A multi-key writer that also commits numbered batches. Only one task at a time may commit batches."""

    async def last_batch(self, writer: str) -> LastBatch:
        """Return the last decided batch of a writer, after appending its missing acknowledgements."""
        gate = await self._log.decisions.gate()
        await self._log.decisions.finish(gate)
        return last_batch_of(gate, writer)

    def records(self, last: LastBatch, writer: str) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the records of a writer's batches, from the last complete one on. Raises CorruptData."""
        return records_of(self._log.decisions, last, writer)

    async def take_turn(self, previous: LastBatch, writer: str, process: str, *, dead: str = "") -> LastBatch | None:
        """Announce the next batch, to be committed with `in_turn`. Other processes that take turns wait for it.

        Returns `previous` with the current turn. Its `turn` begins with `<number>.<process>.`, where the process is the
        one to commit the next batch. Returns None if the next batch is already decided. A turn that equals `dead` is
        replaced.
        """
        nonce = self._log.entropy(6).hex()
        return await take_turn(self._log.decisions, previous, writer, process, nonce, dead)

    async def commit_batch(self, batch: NumberedBatch, keys: Sequence[str], events: Sequence[bytes]) -> LastBatch:
        """Commit a batch of encoded events with these keys, unless its number is already decided.

        A batch without events is decided, too. Commit the next one only if the result is `visible`; otherwise call
        `last_batch` first. Raises Fenced if another process has decided the batch: then no event of this call is or
        will be committed. After CommitUnknown or a cancellation, `last_batch` shows which batch is decided. Raises
        StreamSealed, TransactionTimeout and errors of the client, after which nothing is committed.
        """
        result = await self._attempts(keys, events, batch)
        return batch.decided(result.txn, self._decided_to, visible=result.visible)
