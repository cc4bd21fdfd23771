"""Raising a fence in a segment, even if other processes raise it at the same time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from coranto.errors import NotAllowed, RegisterMismatch
from coranto.messages.uuids import Flags, build_uuid
from coranto.streams.model import registers as rules
from coranto.streams.model.registers import Fence
from coranto.streams.writer.handshake import handshake, hold
from coranto.streams.writer.segment_writer import SegmentWriter
from coranto.streams.writer.shared import Shared


async def raise_fence(shared: Shared, fence: Fence, writer_of: Callable[[], Awaitable[SegmentWriter]]) -> None:
    """Raise the fence in a segment, and return once it is raised.

    `writer_of` returns the writer of the current segment, after its handshake.
    """
    while True:
        writer = await writer_of()
        journal = writer.segment.journal
        registers, head = await handshake(shared, journal)
        if not registers.held:
            await hold(shared, journal, head)
            continue
        if registers.token_of(fence.name) == fence.token:
            return  # The answer to an earlier attempt was lost.
        uuid = build_uuid(rules.NOOP_PRODUCER, shared.ticks.tick(), Flags.ACK_TXN)
        conditions = rules.raise_fence(registers, fence)
        try:
            await shared.client.append(
                journal,
                shared.events.acknowledgement(uuid),
                check_registers=conditions.check,
                union_registers=conditions.union,
                retry_unknown=True,
                retry_timeout=shared.retry_timeout,
            )
        except RegisterMismatch:
            continue  # Another token was set, or ours was and the answer was lost, or the registers were lost.
        except NotAllowed:
            writer.leave()
            await writer.idle()
            continue
        return
