"""Appends of the acknowledgements that end multi-key transactions in a segment: each once, by any process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from coranto.client.client import JournalClient
from coranto.errors import RegisterMismatch, WrongAppendOffset
from coranto.messages.framing import Framing
from coranto.messages.uuids import CLOCK_TICK, Flags, ProducerClock, build_uuid
from coranto.streams.model.lanes import LaneChange, LaneStep, LaneUse, after_refusal, lanes_in, parameters


class LaneEnd(NamedTuple):
    """The acknowledgement that makes a transaction's events visible in a segment.

    Without `use`, as for bulk transactions and earlier versions, it may be appended any number of times, because its
    producer id is not reused.
    """

    use: LaneUse | None
    ack: bytes


async def end_transactions(
    client: JournalClient,
    journal: str,
    ends: Sequence[LaneEnd],
    *,
    retry_timeout: float | None = None,
    is_done: Callable[[str], Awaitable[bool]] | None = None,
) -> None:
    """End the decided transactions in a segment that have not ended yet.

    Retries for `retry_timeout` seconds if answers are lost; by default, for the client's retry timeout. `is_done`
    returns True if another process's transaction is recorded as done, so that its lane may be in use again. It is
    called after a loss of the registers that would show this. Raises NotAllowed and JournalNotFound if the segment
    accepts no more appends, and errors of the client.
    """
    changes = [LaneChange(LaneStep.END, each.use) for each in ends if each.use is not None]
    try:
        await client.append(
            journal, [each.ack for each in ends], retry_unknown=True, retry_timeout=retry_timeout, **parameters(changes)
        )
    except RegisterMismatch:  # Some have ended.
        for each in ends:
            await _end(client, journal, each, retry_timeout, is_done)


async def _end(
    client: JournalClient,
    journal: str,
    end: LaneEnd,
    retry_timeout: float | None,
    is_done: Callable[[str], Awaitable[bool]] | None,
) -> None:
    step: LaneStep | None = LaneStep.END
    while step is not None:
        changes, offset = [] if end.use is None else [LaneChange(step, end.use)], 0
        if step is LaneStep.END_AFTER_LOSS and end.use is not None and is_done is not None:
            # A lane is reused only after its transaction is recorded as done. So it was not reused before this offset.
            offset = (await client.append(journal, b"", retry_unknown=True, retry_timeout=retry_timeout)).end
            if await is_done(end.use.txn):
                return
        try:
            await client.append(
                journal, end.ack, offset=offset, retry_unknown=True, retry_timeout=retry_timeout, **parameters(changes)
            )
        except RegisterMismatch as error:
            assert end.use is not None
            step = after_refusal(error.registers, end.use)
        except WrongAppendOffset:
            continue  # Other content was appended, perhaps by an attempt whose answer was lost. Look again.
        else:
            return


def dropping(format: Framing[Any], use: LaneUse, last: bytes) -> bytes:
    """Return content that makes readers drop a transaction's events. `last` is an acknowledgement after all of them.

    The first acknowledgement drops pending events. Because of the second one, events of an append whose outcome is
    unknown count as duplicates if they arrive later.
    """
    return format.acknowledgement(build_uuid(use.producer, use.begin, Flags.ACK_TXN)) + last


async def drop_transaction(
    client: JournalClient, journal: str, use: LaneUse, content: bytes, *, retry_timeout: float | None = None
) -> None:
    """Append `content` from `dropping`, for a transaction that can never be decided. Raises errors of the client."""
    change = LaneChange(LaneStep.DROP, use)
    await client.append(journal, content, retry_unknown=True, retry_timeout=retry_timeout, **parameters([change]))


async def open_lanes(client: JournalClient, journal: str, *, retry_timeout: float | None = None) -> tuple[LaneUse, ...]:
    """Return the transactions in progress in a segment. Raises errors of the client."""
    return lanes_in((await client.append(journal, b"", retry_unknown=True, retry_timeout=retry_timeout)).registers)


async def drop_undecided(
    client: JournalClient, journal: str, uses: Sequence[LaneUse], format: Framing[Any], ticks: ProducerClock
) -> int:
    """Drop the transactions that are still in progress and can never be decided. Returns their number."""
    dropped = 0
    for use in uses:
        last = max(ticks.tick(), use.begin + CLOCK_TICK)
        ack = format.acknowledgement(build_uuid(use.producer, last, Flags.ACK_TXN))
        condition = parameters([LaneChange(LaneStep.DROP_OPEN, use)])
        try:
            await client.append(journal, dropping(format, use, ack), retry_unknown=True, **condition)
        except RegisterMismatch:
            continue  # It has ended, or its own writer has dropped it.
        dropped += 1
    return dropped
