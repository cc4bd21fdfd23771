"""The records of a ledger: one JSON object per line.

- a decision: `{"publication": writer_id, "producer": hex, "messages": n, "time": Unix seconds, "intents": {journal:
  base64}}`, and `"batch": [writer, n]` if it is about a batch (`batch_ledger.py`)
- an acknowledgement, which records that a decision's intents are in their journals: `{"acknowledged": writer_id}`
- a summary of all records before it: `{"acknowledged": "", "summary": {"decided": {writer_id: [n, time]}, "pending":
  [decision, …]}}`. Versions without summaries read it as an acknowledgement of nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Decision:
    """A decided publication: the producer of its messages, their number, and the time (Unix seconds)."""

    writer_id: str
    producer: str
    """Empty if the decision is known only from a summary."""
    messages: int
    time: float
    intents: Mapping[str, bytes]
    batch: tuple[str, int] | None = None
    """The writer and the number of a batch; None for other publications."""

    def to_line(self) -> bytes:
        return _line(self._to_record())

    def _to_record(self) -> dict[str, Any]:
        intents = {journal: base64.b64encode(intent).decode() for journal, intent in sorted(self.intents.items())}
        return {
            "publication": self.writer_id,
            "producer": self.producer,
            "messages": self.messages,
            "time": self.time,
            "intents": intents,
            **({} if self.batch is None else {"batch": list(self.batch)}),
        }

    @classmethod
    def _of(cls, record: dict[str, Any]) -> Decision:
        intents = {name: base64.b64decode(text, validate=True) for name, text in record["intents"].items()}
        about = None
        if "batch" in record:
            writer, batch = record["batch"]
            about = _text(writer), _count(batch)
        return cls(
            _text(record["publication"]),
            _text(record["producer"]),
            _count(record["messages"]),
            _time(record["time"]),
            intents,
            about,
        )


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """A record that the intents of a decision are in their journals. An empty writer id acknowledges nothing."""

    writer_id: str

    def to_line(self) -> bytes:
        return _line({"acknowledged": self.writer_id})


@dataclass(frozen=True, slots=True)
class Summary:
    """The combined content of all records before it."""

    decided: Mapping[str, tuple[int, float]]
    """Number of messages and time of each publication."""
    pending: tuple[Decision, ...]
    """Decisions of publications and batches whose acknowledgements may not be in their journals, in order."""

    def to_line(self) -> bytes:
        decided = {writer_id: list(each) for writer_id, each in self.decided.items()}
        pending = [decision._to_record() for decision in self.pending]
        return _line({"acknowledged": "", "summary": {"decided": decided, "pending": pending}})

    @classmethod
    def _of(cls, record: dict[str, Any]) -> Summary:
        decided = {name: (_count(messages), _time(time)) for name, (messages, time) in record["decided"].items()}
        return cls(decided, tuple(Decision._of(each) for each in record["pending"]))


Record: TypeAlias = Decision | Acknowledgement | Summary


def parse_record(line: bytes) -> Record:
    """Return the record in a line without its newline. Raises ValueError if the line is not a record."""
    try:
        record = json.loads(line)
        if "summary" in record:
            return Summary._of(record["summary"])
        return Acknowledgement(_text(record["acknowledged"])) if "acknowledged" in record else Decision._of(record)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a record of a publication: {error}") from error


def digest_of(line: bytes) -> str:
    """Return a short digest that identifies a record."""
    return hashlib.sha256(line.rstrip(b"\n")).hexdigest()[:32]


def _line(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, separators=(",", ":"), sort_keys=True, allow_nan=False).encode() + b"\n"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a number of messages or of a batch")
    return value


def _time(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:  # Also rejects NaN.
        raise ValueError(f"{value!r} is not a time in Unix seconds")
    return float(value)
