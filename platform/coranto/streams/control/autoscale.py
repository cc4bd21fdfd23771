"""`Autoscaler`: measures streams and scales them according to their policies.

Any number of processes may run an autoscaler. If two make the same decision, one wins. Measurements are not stored: a
new process first observes the streams for as long as the windows and the cool-down.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import structlog

from coranto.client.client import JournalClient
from coranto.effects import Clock, SystemClock
from coranto.errors import CorantoError, CorruptData, InvalidInput, StreamNotFound
from coranto.messages.uuids import Flags
from coranto.streams.control.lifecycle import Streams
from coranto.streams.control.scaling import (
    Change,
    Meter,
    Rates,
    RateUnit,
    RateWindows,
    ScalingPolicy,
    decide,
    parse_policy,
)
from coranto.streams.model.events import format_of
from coranto.streams.model.stream import Segment, Stream

DEFAULT_INTERVAL = 10.0
_SAMPLE_BYTES = 1 << 16
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Scaled:
    """A stream that was scaled, and the changes of its segments."""

    stream: Stream
    changes: tuple[Change, ...]


class Autoscaler:
    """Scales streams by their load: the named streams, or by default all streams with a policy.

    If a change of a stream is cancelled, the next step or `Streams.resume` finishes it.
    """

    def __init__(
        self,
        client: JournalClient,
        names: Iterable[str] = (),
        *,
        policy: ScalingPolicy | None = None,
        windows: RateWindows | None = None,
        clock: Clock | None = None,
        streams: Streams | None = None,
    ) -> None:
        """Create an autoscaler. `policy` takes precedence over the streams' own policies."""
        self._client = client
        self._names = tuple(names)
        self._policy = policy
        self._windows = windows or RateWindows()
        self._clock: Clock = clock or SystemClock()
        self._streams = streams or Streams(client, clock=self._clock)
        self._meters: dict[str, Meter] = {}

    async def run(self, interval: float = DEFAULT_INTERVAL) -> None:
        """Measure and scale every `interval` seconds, until cancelled. Failures are logged and retried."""
        if not interval > 0:
            raise InvalidInput(f"{interval:g} seconds is not an interval; give more than 0", field="interval")
        while True:
            try:
                with contextlib.suppress(StreamNotFound):
                    await self.step()
            except CorantoError as error:
                _log.warning("autoscale.measuring_failed", error=str(error))
            await self._clock.sleep(interval)

    async def step(self) -> list[Scaled]:
        """Measure once, scale the streams that need it, and return the scaled streams.

        Raises StreamNotFound for a name without a stream.
        """
        found = await self._found()
        self._meters = {each.name: self._meters.get(each.name) or Meter(self._windows) for each in found}
        done = await asyncio.gather(*(self._scale(stream) for stream in found))
        return [each for each in done if each is not None]

    async def _found(self) -> list[Stream]:
        """Return the streams to scale. A stream with inconsistent labels is logged and left out."""
        invalid: dict[str, CorruptData] = {}
        found = []
        for name in self._names:
            try:
                found.append(await self._streams.describe(name))
            except CorruptData as error:
                invalid[name] = error
        if not self._names:
            found += await self._streams.list(invalid)
        for name, problem in invalid.items():
            _log.warning("autoscale.stream_inconsistent", stream=name, error=str(problem))
        return found

    async def _scale(self, stream: Stream) -> Scaled | None:
        try:
            policy = self._policy or (parse_policy(stream.scaling) if stream.scaling else None)
            if policy is None or policy.unit is None or stream.is_sealed:
                return None
            if stream.unfinished():
                stream = await self._streams.resume(stream.name)
            changes = decide(stream, await self._rates(stream, policy.unit), policy, self._windows)
            if not changes:
                return None
            scaled = await self._streams.scale(stream.name, changes)
        except CorantoError as error:
            _log.warning("autoscale.scaling_failed", stream=stream.name, error=str(error))
            return None
        _log.info("autoscale.scaled", stream=stream.name, epoch=scaled.epoch, changes=[str(each) for each in changes])
        return Scaled(scaled, tuple(changes))

    async def _rates(self, stream: Stream, unit: RateUnit) -> Mapping[int, Rates]:
        meter = self._meters[stream.name]
        heads = await self._streams.heads(stream, stream.active())
        meter.sample(self._clock.monotonic(), {number: float(head) for number, head in heads.items()})
        rates = meter.rates()
        if unit is RateUnit.BYTES:
            return rates
        busy = [number for number, found in rates.items() if any((found.short, found.middle, found.long, found.idle))]
        sizes = await asyncio.gather(*(self._event_bytes(stream, stream.segments[number]) for number in busy))
        return rates | {number: _divided(rates[number], size) for number, size in zip(busy, sizes, strict=True)}

    async def _event_bytes(self, stream: Stream, segment: Segment) -> float:
        """Return the average bytes per event, in a sample of the journal's newest fragment."""
        # Every fragment begins at the beginning of a message.
        fragments = await self._client.fragments(segment.journal)
        begin = max((each.fragment.begin for each in fragments), default=0)
        end = min(begin + _SAMPLE_BYTES, await self._client.head(segment.journal))
        if end <= begin:
            return 1.0
        format = format_of(stream.content_type)
        decoder = format.decoder(segment.journal, begin)
        events = 0
        async for chunk in self._client.read(segment.journal, begin, end_offset=end):
            events += sum(each.flags != Flags.ACK_TXN for each in decoder.feed(chunk.content, chunk.offset))
        return (decoder.offset - begin) / max(events, 1)


def _divided(rates: Rates, by: float) -> Rates:
    def each(rate: float | None) -> float | None:
        return None if rate is None else rate / by

    return replace(
        rates, short=each(rates.short), middle=each(rates.middle), long=each(rates.long), idle=each(rates.idle)
    )
