"""The state of a stream that a multi-key transaction depends on: the gate, and the segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import structlog

from coranto.effects import Clock
from coranto.errors import Unavailable
from coranto.streams.control.decisions import Decisions, Gate
from coranto.streams.control.lifecycle import Streams
from coranto.streams.model.stream import Stream

_GATE_SECONDS: Final = 5.0
"""Seconds to wait at a closed gate before the process that closed it is taken for dead."""
_POLL_SECONDS: Final = 0.05
_LISTING_SECONDS: Final = 60.0
"""Seconds for which a broker may list what was there before the last change."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StreamSnapshot:
    """The gate, which is open and was read first, and the segments then or later."""

    token: str
    gate: Gate
    stream: Stream


async def take_snapshot(name: str, streams: Streams, decisions: Decisions, clock: Clock) -> StreamSnapshot:
    """Return the state of a stream, once its gate is open.

    If the gate stays closed, finishes the change of segments of the process that closed it. Raises what
    `Streams.resume` and `Streams.describe` raise.
    """
    gate = await decisions.gate()
    since = clock.monotonic()
    while not gate.is_open:
        if gate.token is None:
            await decisions.open(None)
        elif clock.monotonic() - since < _GATE_SECONDS:
            await clock.sleep(_POLL_SECONDS)
        else:
            _log.warning("multi_key_writer.scaling_unfinished", stream=name)
            await streams.resume(name)
            since = clock.monotonic()
        gate = await decisions.gate()
    assert gate.token is not None
    # Who opened the gate had changed the segments before. Not all brokers may know that yet.
    deadline = clock.monotonic() + _LISTING_SECONDS
    while not gate.is_before(stream := await streams.describe(name)):
        if clock.monotonic() > deadline:
            raise Unavailable(
                f"stream {name} changed at etcd revision {gate.revision}, and the broker that lists it knows only "
                f"revision {stream.revision}: look at its connection to etcd, or name another broker"
            )
        await clock.sleep(_POLL_SECONDS)
    return StreamSnapshot(gate.token, gate, stream)
