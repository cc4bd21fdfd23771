"""Options of `readStream.format("journal")`, in addition to the options of batch reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from coranto.errors import InvalidInput
from coranto.specs.durations import parse_duration
from coranto_consumers.spark.options.bounds import EARLIEST, ENDINGS, LATEST
from coranto_consumers.spark.options.option_values import BYTES_HINT, number_option, offsets_option
from coranto_consumers.spark.options.source_options import STREAM_OPTIONS, Isolation, SourceOptions
from coranto_consumers.spark.streaming.offsets import Position

DEFAULT_TRIGGER_BYTES: Final = 256 << 20
DEFAULT_TRIGGER_DELAY: Final = "15m"


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The parsed options of one streaming query."""

    source: SourceOptions
    starting: Mapping[str, Position | None] | None
    """None: `latest`, for one journal or for all journals. An empty mapping: `earliest`."""
    max_bytes: int
    max_messages: int | None
    min_messages: int
    max_delay: float
    """The maximum seconds that a batch waits for `min_messages`."""
    limits: tuple[str, ...] = ()
    processing_time: bool = False
    """True if the user declares that the query has a processing-time trigger."""
    accepted: frozenset[str] = frozenset()
    """`<id>/<journal>` of journals that have the content of the earlier journals from the query's checkpoint."""

    @property
    def committed(self) -> bool:
        return self.source.isolation is Isolation.READ_COMMITTED

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> StreamOptions:
        """Parse options, in any case. Raises InvalidInput."""
        given = {key.lower(): value for key, value in options.items()}
        for name in (*ENDINGS, "asOf", "timestampAsOf"):
            if name.lower() in given:
                raise InvalidInput(
                    "a streaming query has no end; use trigger(availableNow=True) to read what there is now",
                    field=f"option {name}",
                )
        source = SourceOptions.parse({key: value for key, value in options.items() if key.lower() != "startingoffsets"})
        if source.times.starting is not None and "startingoffsets" in given:
            raise InvalidInput("cannot be used with a starting time; leave one out", field="option startingOffsets")
        if source.max_records is not None:
            raise InvalidInput("is for spark.read; give maxOffsetsPerTrigger", field="option maxRecordsPerPartition")
        most = number_option(given, "maxOffsetsPerTrigger", 0, least=0)
        least = number_option(given, "minOffsetsPerTrigger", 0, least=0)
        if most and least > most:
            raise InvalidInput(
                f"{least} is more than maxOffsetsPerTrigger, {most}: give no more than that",
                field="option minOffsetsPerTrigger",
            )
        chosen = [
            *(["maxBytesPerTrigger"] if "maxbytespertrigger" in given else []),
            *(["maxOffsetsPerTrigger"] if most else []),
            *(["minOffsetsPerTrigger"] if least else []),
        ]
        if (trigger := given.get("trigger", "")).lower() not in ("", "processingtime"):
            raise InvalidInput(
                f"{trigger!r} is not processingTime, the only trigger that needs the option; leave it out",
                field="option trigger",
            )
        return cls(
            source,
            _starting(given.get("startingoffsets", "latest")),
            number_option(given, "maxBytesPerTrigger", DEFAULT_TRIGGER_BYTES, hint=BYTES_HINT),
            most or None,
            least,
            _seconds(given.get("maxtriggerdelay", DEFAULT_TRIGGER_DELAY)),
            tuple(chosen),
            bool(trigger),
            frozenset(filter(None, map(str.strip, given.get("acceptjournals", "").split(",")))),
        )


def refuse_stream_options(options: Mapping[str, str]) -> None:
    """Raise InvalidInput for an option that only streaming queries have."""
    names = {name.lower(): name for name in STREAM_OPTIONS}
    for key in options:
        if name := names.get(key.lower()):
            raise InvalidInput("is for readStream; leave it out", field=f"option {name}")


def _starting(text: str) -> Mapping[str, Position | None] | None:
    text = text.strip()
    if text.lower() == "latest":
        return None
    if text.lower() == "earliest":
        return {}
    raw = offsets_option(text, "startingOffsets", "'earliest' nor 'latest'")
    return {
        journal: None if found == LATEST else Position.loads(journal, found)
        for journal, found in raw.items()
        if found != EARLIEST
    }


def _seconds(text: str) -> float:
    try:
        seconds = parse_duration(text.strip().replace(" ", "")).ToNanoseconds() / 1e9
    except InvalidInput as error:
        raise InvalidInput(error.message, field="option maxTriggerDelay") from error
    if seconds < 0:
        raise InvalidInput(f"{text!r} is negative; write 0 to wait for nothing", field="option maxTriggerDelay")
    return seconds
