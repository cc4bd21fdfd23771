"""Options of `format("journal")`. Options that Spark's Kafka source also has use its spelling."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import tzinfo

from coranto.client import ClientConfig
from coranto.client.disk_cache import DEFAULT_CACHE_BYTES
from coranto.errors import InvalidInput
from coranto.messages.framing import JsonLines
from coranto.names import validate_journal
from coranto_consumers.journals import framings
from coranto_consumers.journals.discovery import JournalLabels
from coranto_consumers.journals.framings import ReadFraming, labels_of
from coranto_consumers.spark.decoding.json_times import zone_of
from coranto_consumers.spark.decoding.rows import FIELDS, PARSED_PREFIX, Misfits
from coranto_consumers.spark.options import bounds, client_options, selections
from coranto_consumers.spark.options.bounds import TimeOptions
from coranto_consumers.spark.options.option_values import (
    BYTES_HINT,
    TASKS_HINT,
    choice_option,
    flag_option,
    number_option,
    require_known,
)
from coranto_consumers.spark.options.selections import SelectedJournals

DEFAULT_MAX_BYTES = 64 << 20
"""A task costs about 30 ms of CPU time in addition to its content, and larger parts need fewer scans for other tasks in
committed reads. But a task holds its part in memory (`joint_reading.HELD_BYTES`), so parts are not larger."""

STREAM_OPTIONS = {
    "maxBytesPerTrigger": "bytes of content that a micro-batch reads at most: 268435456 (default)",
    "maxOffsetsPerTrigger": "messages that a micro-batch reads at most (default: as many as there are)",
    "minOffsetsPerTrigger": "messages to wait for before a micro-batch (default: none)",
    "acceptJournals": "ID/JOURNAL, separated by commas: journals that have the content of earlier journals of the same "
    "name, so that a query continues in them at its offsets",
    "maxTriggerDelay": "longest wait for minOffsetsPerTrigger: 15m (default)",
    "trigger": "processingTime, if the query has this trigger: PySpark before 4.2 needs it for limits of micro-batches",
}
"""The options that only streaming queries have."""
OPTIONS = {
    **client_options.OPTIONS,
    **selections.OPTIONS,
    **bounds.OPTIONS,
    "isolation": "read_committed (default) or read_uncommitted",
    "fragmentCacheBytes": "bytes of fragments that executors keep on a machine's local disk, to share them",
    "maxBytesPerPartition": "bytes of content that a task reads at most",
    "maxRecordsPerPartition": "messages that a task reads at most, by the length of each journal's first messages",
    "minPartitions": "number of tasks to read with at least, if there is enough content",
    "parse": "name of the framing, such as json: columns without underscore are fields of messages (default if no "
    "column is the source's own)",
    "mode": "for values that do not fit their columns: PERMISSIVE (null, default) or FAILFAST (an error)",
    "columnNameOfCorruptRecord": "column for lines that do not fit, if the schema has it: _corrupt_record (default)",
    "timeZone": "time zone of TIMESTAMP columns for times without one, such as Europe/Paris: use the session's",
    **framings.OPTIONS,
    "registry": "journal that registers message types: columns and framing come from the type that messageType names, "
    "or else from the type in the journals' labels",
    "metadataColumns": "the source's own columns to add to a registered type's columns, as _journal,_offset (default: "
    "none)",
    "failOnDataLoss": "whether offsets whose content is gone are an error (true, default) or a warning (false)",
    **STREAM_OPTIONS,
}


class Isolation(enum.StrEnum):
    """The isolation level of a read."""

    READ_COMMITTED = "read_committed"
    """Committed content, each message once. Messages pending or rolled back at the end of the range are left out."""
    READ_UNCOMMITTED = "read_uncommitted"
    """Every message in the journal, including duplicates, pending messages and acknowledgements."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The parsed options of one read."""

    client: ClientConfig
    selected: SelectedJournals
    isolation: Isolation
    parses: bool
    """True if columns are fields of messages even if they have the names of the source's own columns."""
    misfits: Misfits
    framing: ReadFraming
    zone: tzinfo | None
    """The time zone of times without one. None: times without a zone are errors."""
    starting: Mapping[str, int] | None = None
    """None means earliest."""
    ending: Mapping[str, int] | None = None
    """None means latest."""
    as_of: float | Mapping[str, int] | None = None
    """A time in Unix seconds or ends of journals, instead of `ending`. By default, the read then begins at each
    journal's first offset, even if that content is gone."""
    max_bytes: int = DEFAULT_MAX_BYTES
    max_records: int | None = None
    min_partitions: int = 1
    cache_bytes: int = DEFAULT_CACHE_BYTES
    """The maximum bytes of fragments that the executors of a machine cache. 0: none."""
    text_column: str = "_corrupt_record"
    fail_on_data_loss: bool = True
    times: TimeOptions = field(default_factory=TimeOptions)
    labels: JournalLabels = field(default_factory=JournalLabels)
    registry: str | None = None
    """The journal that registers the type of the messages. `framing` and `labels` must then match the type."""
    type_reference: str | None = None
    """The type in the registry. None: the type that the journals' labels name."""
    metadata: tuple[str, ...] = ()
    """The source's columns to add to the type's columns, if the user gives no schema."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Parse options, in any case. Raises InvalidInput."""
        given = {key.lower(): value for key, value in options.items()}
        for key in options:
            require_known(key, OPTIONS)
        # Unparsed lines cannot become null, so invalid ones are errors unless `mode` is given.
        misfits = Misfits(choice_option(given, "mode", (Misfits.PERMISSIVE, Misfits.FAILFAST), Misfits.PERMISSIVE))
        tolerant = "mode" in given and misfits is Misfits.PERMISSIVE
        registry, parse = _registry(given), given.get("parse", "")
        if not registry and parse not in ("", named := given.get("framing", "json").lower()):
            raise InvalidInput(f"{parse!r} is not {named}, the framing of the messages", field="option parse")
        framing = JsonLines(tolerant=tolerant) if registry else framings.parse_framing(given, tolerant=tolerant)
        return cls(
            client=client_options.client_of(given),
            selected=SelectedJournals.parse(given),
            starting=bounds.bounds_of(given, "startingOffsets", "earliest", bounds.EARLIEST),
            ending=bounds.bounds_of(given, "endingOffsets", "latest", bounds.LATEST),
            as_of=bounds.as_of(given),
            isolation=Isolation(choice_option(given, "isolation", Isolation, Isolation.READ_COMMITTED)),
            max_bytes=number_option(given, "maxBytesPerPartition", DEFAULT_MAX_BYTES, hint=BYTES_HINT),
            max_records=number_option(given, "maxRecordsPerPartition", 1, hint=TASKS_HINT)
            if "maxrecordsperpartition" in given
            else None,
            min_partitions=number_option(given, "minPartitions", 1, hint=TASKS_HINT),
            cache_bytes=number_option(given, "fragmentCacheBytes", DEFAULT_CACHE_BYTES, least=0, hint=BYTES_HINT),
            parses=bool(registry) or bool(parse),
            misfits=misfits,
            text_column=given.get("columnnameofcorruptrecord", "_corrupt_record"),
            framing=framing,
            zone=zone_option(given["timezone"]) if "timezone" in given else None,
            times=TimeOptions.parse(given),
            fail_on_data_loss=flag_option(given, "failOnDataLoss", True),
            labels=labels_of(framing),
            registry=registry,
            type_reference=type_reference(given) if registry else None,
            metadata=_metadata(given, registry),
        )


def _registry(given: Mapping[str, str]) -> str | None:
    registry = given.get("registry", "")
    if not registry:
        if "registry" in given:
            raise InvalidInput("names no journal: give one, as types/registry", field="option registry")
        return None
    for name in (*framings.OPTIONS, "parse"):
        if name.lower() in given and name != "messageType":
            raise InvalidInput("comes from the registry: leave it out", field=f"option {name}")
    return validate_journal(registry, kind="option registry")


def type_reference(given: Mapping[str, str]) -> str | None:
    """Return the message type that an option names, if any. Raises InvalidInput."""
    if "messagetype" not in given:
        return None
    from coranto.types.references import parse_reference  # Workers do not need it.

    return str(parse_reference(given["messagetype"], field="option messageType"))


def _metadata(given: Mapping[str, str], registry: str | None) -> tuple[str, ...]:
    field = "option metadataColumns"
    if "metadatacolumns" not in given:
        return ()
    if not registry:
        raise InvalidInput("is for reads by a registry; name columns in the schema", field=field)
    names = tuple(dict.fromkeys(name.strip() for name in given["metadatacolumns"].split(",")))
    known = [PARSED_PREFIX + name for name in FIELDS] + [given.get("columnnameofcorruptrecord", "_corrupt_record")]
    if unknown := [name for name in names if name not in known]:
        raise InvalidInput(f"{unknown[0]!r} is not one of {', '.join(known)}", field=field)
    return names


def zone_option(name: str) -> tzinfo:
    """Return the time zone with a name. Raises InvalidInput."""
    if (zone := zone_of(name)) is None:
        raise InvalidInput(f"{name!r} is not a time zone: write it as Europe/Paris or +01:00", field="option timeZone")
    return zone
