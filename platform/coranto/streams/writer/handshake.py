"""The first contact with a segment: reading its registers, and restoring them if they were lost."""

from __future__ import annotations

import contextlib
from typing import Any

import structlog

from coranto.client.client import JournalClient
from coranto.errors import RegisterMismatch
from coranto.messages.framing import Framing
from coranto.messages.uuids import Flags, ProducerClock, build_uuid
from coranto.streams.model import registers as rules
from coranto.streams.model.registers import Registers
from coranto.streams.writer.shared import Shared
from coranto.wire import protocol_pb2 as pb

_log = structlog.get_logger(__name__)


async def handshake(shared: Shared, journal: str) -> tuple[Registers, int]:
    """Return a segment's registers and its head. If it has content, the registers are held.

    This takes one empty append, or more if all brokers that had the registers are gone. If earlier processes may have
    written under the same writer id, an empty segment takes two appends. Raises JournalNotFound, NotAllowed if the
    registers of a sealed segment are lost, IndexHasGreaterOffset if they may be lost, and errors of the client.
    """
    while True:
        result = await (shared.certain_barrier if shared.identity.stable else shared.barrier)(journal)
        registers, head = Registers.of(result.registers), result.end
        if registers.held or head == 0:
            return registers, head
        await hold(shared, journal, head)
        _log.warning("stream_writer.registers_lost", journal=journal, head=head)


async def hold(shared: Shared, journal: str, head: int) -> None:
    """Mark registers as held, for a journal that ends at `head`. If it has content, they were lost and are restored."""
    await hold_registers(shared.client, journal, head, shared.events, shared.ticks, shared.retry_timeout)


async def hold_registers(
    client: JournalClient, journal: str, head: int, events: Framing[Any], ticks: ProducerClock, retry_timeout: float
) -> None:
    """Mark registers as held, like `hold`, but without the `Shared` of segment writers."""
    noop = events.acknowledgement(build_uuid(rules.NOOP_PRODUCER, ticks.tick(), Flags.ACK_TXN))
    conditions = rules.restore(head) if head else rules.hold()
    with contextlib.suppress(RegisterMismatch):  # Another process has marked them.
        await client.append(
            journal,
            noop,
            check_registers=conditions.check,
            union_registers=conditions.union,
            retry_unknown=True,
            retry_timeout=retry_timeout,
        )


async def ensure_held(
    client: JournalClient, journal: str, events: Framing[Any], ticks: ProducerClock, retry_timeout: float
) -> pb.LabelSet:
    """Mark the registers of a segment as held if they are not, so that no writer considers them lost later.

    Returns the registers as they were before.
    """
    found = await client.append(journal, b"", retry_unknown=True, retry_timeout=retry_timeout)
    if not Registers.of(found.registers).held:
        await hold_registers(client, journal, found.end, events, ticks, retry_timeout)
    return found.registers
