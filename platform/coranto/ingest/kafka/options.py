"""The options of topics: `source: {kafka: …}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import yaml

from coranto.ingest.option_fields import choice, pairs, required, seconds, text, texts
from coranto.specs.yaml_fields import entries_of, line_error, line_of

META: Final = ("topic", "partition", "offset", "timestamp", "key", "headers")
"""The parts of a record that `_meta` of its event may have."""
_FIELDS: Final = (
    "brokers",
    "topics",
    "value",
    "registry",
    "start",
    "meta",
    "tombstones",
    "operation",
    "lost",
    "recreated",
    "look",
    "options",
)
_TOPIC: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")
OWN_OPTIONS: Final = frozenset(
    (
        "bootstrap.servers",
        "group.id",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "auto.offset.reset",
        "isolation.level",
        "enable.partition.eof",
    )
)
"""Options of the client that the ingest sets itself, for exactly-once delivery."""


@dataclass(frozen=True, slots=True)
class KafkaOptions:
    """The topics to read, and the form of their records."""

    brokers: str
    topics: tuple[str, ...]
    value: str = "json"
    registry: Mapping[str, str] = field(default_factory=dict)
    """The options of the Schema Registry's client."""
    from_end: bool = False
    """True to skip the records that partitions have at the first start."""
    meta: tuple[str, ...] = META[:4]
    tombstones: bool = True
    """True if records without a value become events; otherwise they are skipped."""
    accepts_loss: bool = False
    restarts: bool = False
    """True to read a recreated topic from its beginning; otherwise it is an error."""
    poll_seconds: float = 10.0
    operation: str = ""
    """The field that is `delete` in the event of a tombstone; empty for none."""
    client: Mapping[str, str] = field(default_factory=dict)
    """Further options of the client, such as SASL and TLS."""

    @property
    def without_schema(self) -> str:
        """The name of values without a schema in errors; empty if the values have a schema."""
        return f"values that are {self.value}" if self.value in ("json", "text") else ""


def read_kafka(node: yaml.Node) -> KafkaOptions:
    """Read the options of topics. Raises InvalidInput, with the line."""
    entries = entries_of(node, _FIELDS)
    required(node, entries, "brokers", "topics")
    topics, meta = texts(entries, "topics"), texts(entries, "meta", META[:4])
    for topic in topics:
        if not _TOPIC.fullmatch(topic):
            raise line_error(line_of(entries["topics"]), f"{topic!r} is not a name of a topic")
    if not topics or len(set(topics)) < len(topics):
        raise line_error(line_of(entries["topics"]), "give one topic or more, each once")
    for name in meta:
        if name not in META:
            raise line_error(line_of(entries["meta"]), f"meta has {name!r}; it may have {', '.join(META)}")
    client, registry = pairs(entries, "options"), pairs(entries, "registry")
    for name in client:
        if name in OWN_OPTIONS:
            raise line_error(line_of(entries["options"]), f"the option {name} is set by the ingest; leave it out")
    value = choice(entries, "value", ("json", "text", "avro", "protobuf"))
    if (value in ("avro", "protobuf")) != ("url" in registry):
        raise line_error(
            line_of(node),
            f"values are {value}: "
            + (
                "leave the registry out"
                if "url" in registry
                else "give the registry that has their schemas, with its url"
            ),
        )
    return KafkaOptions(
        text(entries, "brokers"),
        topics,
        value,
        registry,
        choice(entries, "start", ("earliest", "latest")) == "latest",
        meta,
        choice(entries, "tombstones", ("events", "skip")) == "events",
        choice(entries, "lost", ("fail", "continue")) == "continue",
        choice(entries, "recreated", ("fail", "restart")) == "restart",
        seconds(entries, "look", 10.0),
        text(entries, "operation"),
        client,
    )
