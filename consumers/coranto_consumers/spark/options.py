"""Options of `format("journal")`. They are checked before anything is read.

Options that Spark's Kafka source has too are spelled as there.
"""

from __future__ import annotations

import difflib
import enum
import json
import os
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from coranto.client import ClientConfig
from coranto.client.config import DEFAULT_PATIENCE
from coranto.client.disk_cache import DEFAULT_CACHE_BYTES
from coranto.errors import InvalidInput
from coranto.labels import format_selector
from coranto.names import validate_journal
from coranto.security.tokens import BearerToken
from coranto_consumers.spark import framings, times
from coranto_consumers.spark.framings import ReadFraming
from coranto_consumers.spark.rows import Misfits
from coranto_consumers.spark.times import TimeOptions

EARLIEST = -2
LATEST = -1
DEFAULT_MAX_BYTES = 32 << 20

OPTIONS = {
    "endpoint": "a broker's host:port (required)",
    "fileRoot": "folder that file:/// fragment stores are rooted at, where executors can read it",
    "patience": "seconds for which calls are repeated while brokers cannot serve them",
    "zone": "zone of the executors, whose brokers are read from first (default: $CORANTO_ZONE of the executors)",
    "authToken": "a bearer token for brokers (default: $CORANTO_AUTH_TOKEN of the executors)",
    "authSecret": "keys to sign tokens with, as base64 (default: $CORANTO_AUTH_KEYS of the executors)",
    "tlsCa": "PEM file of the authorities to trust (default: $CORANTO_TLS_CA of the executors)",
    "tlsCert": "PEM file of the certificate that shows brokers who reads (default: $CORANTO_TLS_CERT)",
    "tlsKey": "PEM file of the certificate's key (default: $CORANTO_TLS_KEY)",
    "assign": 'journals, as a JSON list: ["flights/events/part-000"]',
    "subscribe": "journals, separated by commas",
    "subscribePattern": "regular expression for whole names of journals: flights/.*",
    "selector": "label selector of journals: name:prefix=flights/events/",
    "stream": "name of a stream, whose segments are read, those of its splits included: shop/orders",
    "startingOffsets": 'earliest (default), or JSON: {"flights/events/part-000": 1024}; -2 is earliest',
    "endingOffsets": "latest (default), or JSON as above; -1 is latest",
    "asOf": "the content of a moment: ISO 8601, milliseconds since 1970 UTC, or the journals' ends as JSON (as above)",
    **times.OPTIONS,
    "isolation": "read_committed (default) or read_uncommitted",
    "fragmentCacheBytes": "bytes of fragments that an executor keeps on its local disk, for its tasks to share",
    "maxBytesPerPartition": "bytes of content that a task reads at most",
    "maxRecordsPerPartition": "messages that a task reads at most, by the length of each journal's first messages",
    "minPartitions": "number of tasks to read with at least, if there is enough content",
    "includeUuid": "whether there are columns producer, clock and flags: true (default) or false",
    "parse": "name of the framing, such as json: columns without underscore are fields of messages (default if no "
    "column is the source's own)",
    "mode": "for values that do not fit their columns: PERMISSIVE (null, default) or FAILFAST (an error)",
    "columnNameOfCorruptRecord": "column for lines that do not fit, if the schema has it: _corrupt_record (default)",
    **framings.OPTIONS,
    "includeHeaders": "false (default): as in Spark's Kafka source, but no framing has headers",
    "failOnDataLoss": "whether offsets whose content is gone are an error (true, default) or a warning (false)",
    "slices": "what each task reads, planned by a consumer; excludes all options that say what to read",
    "maxBytesPerTrigger": "bytes of content that a micro-batch reads at most: 268435456 (default)",
    "maxOffsetsPerTrigger": "messages that a micro-batch reads at most (default: as many as there are)",
    "minOffsetsPerTrigger": "messages for which a micro-batch waits (default: none)",
    "maxTriggerDelay": "time for which a micro-batch waits for minOffsetsPerTrigger at most: 15m (default)",
}
STREAM_OPTIONS = ("maxBytesPerTrigger", "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
"""The options that only streaming queries have."""
SELECTIONS = ("assign", "subscribe", "subscribePattern", "selector", "stream")
"""The options that select journals. Exactly one of them is given."""
CLIENT_OPTIONS = ("endpoint", "fileRoot", "patience", "zone", "authToken", "authSecret", "tlsCa", "tlsCert", "tlsKey")
"""The options that tell how to reach brokers."""

E = TypeVar("E", bound=enum.StrEnum)


class Isolation(enum.StrEnum):
    """The isolation of a read, which decides the messages that are read."""

    READ_COMMITTED = "read_committed"
    """Committed content, each message once. Messages pending or rolled back at the end of the range are left out."""
    READ_UNCOMMITTED = "read_uncommitted"
    """Every message as it is written, with duplicates, pending messages and acknowledgements."""
    SEQUENCED = "sequenced"
    """For consumers: every message with the number of its segment, and summaries to resolve segments in the driver."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The parsed options of one read."""

    client: ClientConfig
    journals: tuple[str, ...] | None
    """None means the journals of `pattern` or `selector`."""
    pattern: str
    selector: str
    starting: Mapping[str, int] | None
    """None means earliest."""
    ending: Mapping[str, int] | None
    """None means latest."""
    as_of: float | Mapping[str, int] | None
    """A time in Unix seconds or ends of journals, instead of `ending`. Content then counts from 0 on by default."""
    isolation: Isolation
    max_bytes: int
    max_records: int | None
    min_partitions: int
    cache_bytes: int
    """Bytes of fragments that an executor keeps. 0: none."""
    include_uuid: bool
    parses: bool
    """True if columns are fields of messages, although the source has columns of these names."""
    misfits: Misfits
    text_column: str
    """The column for lines that do not fit."""
    framing: ReadFraming
    fail_on_data_loss: bool
    times: TimeOptions
    slices: str

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Parse options from a mapping. The case of keys does not matter. Raises InvalidInput."""
        given = {key.lower(): value for key, value in options.items()}
        for key in options:
            require_known(key, OPTIONS)
        slices = given.get("slices", "")
        isolation = _choice(given, "isolation", Isolation, Isolation.READ_COMMITTED)
        if (isolation is Isolation.SEQUENCED) != bool(slices):
            raise InvalidInput(
                "slices and the isolation `sequenced` go together; give both or neither", field="option slices"
            )
        selections = [name for name in SELECTIONS if name.lower() in given]
        if len(selections) != (0 if slices else 1):
            raise InvalidInput(
                f"exactly one of {', '.join(SELECTIONS)} must be given, not {', '.join(selections) or 'none'}",
                field="options",
            )
        # Lines as they are have no nulls for what is wrong with them, so that has to be asked for.
        tolerant = "mode" in given and _misfits(given) is Misfits.PERMISSIVE
        if flag_option(given, "includeHeaders", False):
            raise InvalidInput(
                "no framing has headers: write what they would tell into the messages, and leave the option out",
                field="option includeHeaders",
            )
        return cls(
            client=_client(given),
            journals=_journals(given),
            pattern=_pattern(given),
            selector=_stream(given) if "stream" in given else given.get("selector", ""),
            starting=_offsets(given, "startingOffsets", "earliest", EARLIEST),
            ending=_offsets(given, "endingOffsets", "latest", LATEST),
            as_of=_as_of(given),
            isolation=isolation,
            max_bytes=_bytes(given, "maxBytesPerPartition", DEFAULT_MAX_BYTES),
            max_records=_number(given, "maxRecordsPerPartition", "10000")
            if "maxrecordsperpartition" in given
            else None,
            min_partitions=_number(given, "minPartitions", "1"),
            cache_bytes=_bytes(given, "fragmentCacheBytes", DEFAULT_CACHE_BYTES, least=0),
            include_uuid=flag_option(given, "includeUuid", True),
            parses=_parse(given),
            misfits=Misfits.DEFERRED if slices else _misfits(given),
            text_column=given.get("columnnameofcorruptrecord", "_corrupt_record"),
            framing=framings.parse_framing(given, tolerant=tolerant),
            times=TimeOptions.parse(given),
            fail_on_data_loss=flag_option(given, "failOnDataLoss", True),
            slices=slices,
        )


def client_options(config: ClientConfig) -> dict[str, str]:
    """Return the options that are equivalent to a client's configuration."""
    options = {"endpoint": config.endpoint, "patience": str(config.patience)}
    if config.zone:
        options["zone"] = config.zone
    if config.file_root is not None:
        options["fileRoot"] = str(config.file_root)
    if isinstance(config.auth, BearerToken):
        options["authToken"] = config.auth.token.reveal().decode()
    elif config.auth is not None:
        options["authSecret"] = ",".join(b64encode(key.reveal()).decode() for key in config.auth.secrets)
    if config.tls is not None:
        files = {"tlsCa": config.tls.ca, "tlsCert": config.tls.cert, "tlsKey": config.tls.key}
        options |= {name: str(path) for name, path in files.items() if path is not None}
    return options


def _client(given: Mapping[str, str]) -> ClientConfig:
    endpoint = given.get("endpoint", "")
    if not endpoint:
        raise InvalidInput(f"is required: {OPTIONS['endpoint']}", field="option endpoint")
    root = given.get("fileroot", "")
    environment = dict(os.environ)
    auth = {"CORANTO_AUTH_TOKEN": given.get("authtoken", ""), "CORANTO_AUTH_KEYS": given.get("authsecret", "")}
    if any(auth.values()):
        environment |= auth
    if zone := given.get("zone", ""):
        environment["CORANTO_ZONE"] = zone
    for name in ("CA", "CERT", "KEY"):
        if path := given.get(f"tls{name.lower()}", ""):
            environment[f"CORANTO_TLS_{name}"] = path
    try:
        patience = float(given.get("patience", DEFAULT_PATIENCE))
    except ValueError as error:
        raise InvalidInput(
            f"{given['patience']!r} is not a number of seconds, such as 30", field="option patience"
        ) from error
    return ClientConfig.from_environment(endpoint, Path(root) if root else None, patience, environment)


def require_known(key: str, names: Iterable[str]) -> None:
    """Raise InvalidInput for an option that is not among those of these names."""
    known = {name.lower(): name for name in names}
    if key.lower() in known:
        return
    close = difflib.get_close_matches(key.lower(), known, n=1)
    hint = f"did you mean {known[close[0]]}?" if close else f"there are {', '.join(sorted(known.values()))}"
    raise InvalidInput(f"there is no such option; {hint}", field=f"option {key}")


def _journals(given: Mapping[str, str]) -> tuple[str, ...] | None:
    if "assign" in given:
        try:
            names = json.loads(given["assign"])
        except ValueError as error:
            raise InvalidInput(f"not JSON: {error}", field="option assign") from error
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidInput('not a JSON list of journal names, such as ["a/one", "a/two"]', field="option assign")
    elif "subscribe" in given:
        names = [name.strip() for name in given["subscribe"].split(",")]
    else:
        return None
    if not names or not all(names):
        raise InvalidInput("names no journal; give at least one", field="options")
    return tuple(dict.fromkeys(names))


def _offsets(given: Mapping[str, str], name: str, word: str, symbol: int) -> dict[str, int] | None:
    text = given.get(name.lower(), word).strip()
    where = f"option {name}"
    if text.lower() == word:
        return None
    offsets: dict[str, int] = offsets_option(text, name, word)
    for journal, offset in offsets.items():
        if type(offset) is not int or (offset < 0 and offset != symbol):
            raise InvalidInput(
                f"{offset!r} is not an offset for {journal}: 0 or more, or {symbol} for {word}", field=where
            )
    return offsets


def _as_of(given: Mapping[str, str]) -> float | Mapping[str, int] | None:
    text = given.get("asof", "").strip()
    if not text:
        return None
    for other in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp", "startingTimestamp"):
        if other.lower() in given:
            raise InvalidInput(f"{other} is given, too; leave one of them out", field="option asOf")
    if text.startswith("{"):
        ends: dict[str, int] = offsets_option(text, "asOf", "a time")
        for journal, end in ends.items():
            if type(end) is not int or end < 0:
                raise InvalidInput(f"{end!r} is not an offset for {journal}: 0 or more", field="option asOf")
        return ends
    if text.isascii() and text.isdigit():
        return int(text) / 1000
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(
            f"{text!r} is neither a time, such as 2026-03-01T00:00Z or 1772323200000, nor JSON", field="option asOf"
        ) from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def offsets_option(text: str, name: str, words: str) -> dict[str, Any]:
    """Return the JSON object of an option with offsets, whose values are not checked. Raises InvalidInput."""
    where = f"option {name}"
    try:
        offsets = json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"{text!r} is neither {words} nor JSON: {error}", field=where) from error
    if not isinstance(offsets, dict):
        raise InvalidInput(f"{text!r} is not a JSON object of journals and offsets", field=where)
    return offsets


def _bytes(given: Mapping[str, str], name: str, default: int, least: int = 1) -> int:
    return number_option(given, name, default, least=least, of="bytes, such as 67108864")


def number_option(
    given: Mapping[str, str], name: str, default: int, *, least: int = 1, of: str = "messages, such as 100000"
) -> int:
    """Return the number that an option holds, of bytes or messages. Raises InvalidInput."""
    text = given.get(name.lower(), str(default))
    if not text.isascii() or not text.isdigit() or int(text) < least:
        kind = "a positive number" if least else "a number"
        raise InvalidInput(f"{text!r} is not {kind} of {of}", field=f"option {name}")
    return int(text)


def _number(given: Mapping[str, str], name: str, default: str) -> int:
    text = given.get(name.lower(), default)
    if not text.isascii() or not text.isdigit() or not int(text):
        raise InvalidInput(f"{text!r} is not a positive number, such as 8", field=f"option {name}")
    return int(text)


def _pattern(given: Mapping[str, str]) -> str:
    text = given.get("subscribepattern", "")
    try:
        re.compile(text)
    except re.error as error:
        raise InvalidInput(f"{text!r} is not a regular expression: {error}", field="option subscribePattern") from error
    if "subscribepattern" in given and not text:
        raise InvalidInput("matches no journal; to match all, write .*", field="option subscribePattern")
    return text


def _stream(given: Mapping[str, str]) -> str:
    """Return the selector of the segments of the stream that an option names."""
    from coranto.streams.model.stream import segments_selector  # Not for each worker.

    try:
        validate_journal(given["stream"])
    except InvalidInput as error:
        raise InvalidInput(error.message, field="option stream") from error
    return format_selector(segments_selector(given["stream"]))


def _parse(given: Mapping[str, str]) -> bool:
    text = given.get("parse", "")
    framing = given.get("framing", "json").lower()
    if text not in ("", framing):
        raise InvalidInput(f"{text!r} is not {framing}, the framing of the messages", field="option parse")
    return bool(text)


def _misfits(given: Mapping[str, str]) -> Misfits:
    text = given.get("mode", Misfits.PERMISSIVE.value).upper()
    offered = (Misfits.PERMISSIVE, Misfits.FAILFAST)
    if text not in (each.value for each in offered):
        raise InvalidInput(f"{given['mode']!r} is not one of PERMISSIVE, FAILFAST", field="option mode")
    return Misfits(text)


def flag_option(given: Mapping[str, str], name: str, default: bool) -> bool:
    """Return True or False, as an option says. Raises InvalidInput."""
    text = given.get(name.lower(), str(default)).lower()
    if text not in ("true", "false"):
        raise InvalidInput(f"{text!r} is neither true nor false; write one of them", field=f"option {name}")
    return text == "true"


def _choice(given: Mapping[str, str], name: str, kind: type[E], default: E) -> E:
    text = given.get(name.lower(), default.value)
    try:
        return kind(text.lower())
    except ValueError as error:
        raise InvalidInput(f"{text!r} is not one of {', '.join(kind)}", field=f"option {name}") from error
