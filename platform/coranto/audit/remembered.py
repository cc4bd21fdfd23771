"""Records of audits, which let a later audit find lost content. Pure.

A record has the results of the last audit: the journal's creation and end, and each fragment with its SHA-1, the time
when it was stored, and the time when an audit last read it. A loss stays in the record, so that every later audit
reports it again, until the content is back or the loss is accepted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import pydantic

from coranto.errors import CorruptData
from coranto.wire import protocol_pb2 as pb

FORMAT: Final = 1


Key = tuple[int, int, str]
"""The identity of a fragment: both offsets, and the SHA-1 in hexadecimal."""


class KnownFragment(NamedTuple):
    """A fragment as an audit has seen it. Offsets are bytes, times are Unix seconds.

    `mod_time` is the time when the store received it; 0 if only brokers had it. `verified_at` is the time when
    an audit last verified its content; 0 if none has. `bad` describes the fault found at the last read. `store`,
    `codec` (its number on the wire) and `postfix` belong to its file; empty and 0 if only brokers had it.
    """

    begin: int
    end: int
    sum: str
    mod_time: int = 0
    verified_at: float = 0.0
    lost_since: float = 0.0
    bad: str = ""
    store: str = ""
    codec: int = 0
    postfix: str = ""

    @property
    def stored(self) -> bool:
        return self.mod_time != 0

    @property
    def key(self) -> Key:
        return self.begin, self.end, self.sum


@dataclass(frozen=True, slots=True)
class Acceptance:
    """An operator's decision to accept the journal as it was at that time."""

    at: float
    reason: str
    losses: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """The record of one journal. `at` is the time of the last audit that could examine it."""

    journal: str
    cluster: str
    create_revision: int
    mod_revision: int
    at: float
    head: int
    persisted_head: int
    retention_seconds: float
    labels: list[tuple[str, str]] = field(default_factory=list)
    registers: str | None = None
    """A digest of the registers; None if they are not known."""
    first: int = 0
    """The first offset that must have content, unless retention has removed it."""
    fragments: list[KnownFragment] = field(default_factory=list)
    since: dict[str, float] = field(default_factory=dict)
    """The time when each kind of lasting finding was first found."""
    accepted: list[Acceptance] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """Spans [begin, end) without content between fragments that were accepted as lost."""
    sequence: int = 0
    """The number of this record among the journal's. It orders them, because an audit's clock may be wrong."""
    lost_at_change: bool = False
    """True if the spec changed between the last audit that had this content and the first one that missed it."""

    @property
    def digest(self) -> str:
        return digest_of(self.fragments)

    def dated_until(self, now: float) -> JournalRecord:
        """Return the record with all audit times limited to `now`, so that a corrected clock has no later effects."""
        fragments = [
            each._replace(verified_at=min(each.verified_at, now), lost_since=min(each.lost_since, now))
            for each in self.fragments
        ]
        since = {kind: min(time, now) for kind, time in self.since.items()}
        return replace(self, at=min(self.at, now), fragments=fragments, since=since)

    @property
    def stored_end(self) -> int:
        """The largest end of a fragment that a store had."""
        return max((each.end for each in self.fragments if each.stored), default=0)


@dataclass(frozen=True, slots=True)
class Records:
    """The content of one file: records by journal. They include all records of the files in `merged`."""

    journals: dict[str, JournalRecord] = field(default_factory=dict)
    format: int = FORMAT
    merged: list[str] = field(default_factory=list)


_RECORDS: Final = pydantic.TypeAdapter(Records)


def encode(records: Mapping[str, JournalRecord], merged: Iterable[str] = ()) -> bytes:
    return _RECORDS.dump_json(Records(dict(records), merged=list(merged)))


def decode(content: bytes) -> Records:
    """Return the records of a file. Raises CorruptData."""
    try:
        found = _RECORDS.validate_json(content)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise CorruptData(f"records of audits: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if found.format > FORMAT:
        raise CorruptData(f"records of audits have format {found.format}; this version reads up to {FORMAT}")
    return found


def digest_of(fragments: Iterable[KnownFragment]) -> str:
    """Return a digest of fragments: equal for the same offsets and SHA-1s, in any order."""
    lines = sorted(f"{each.begin:x}-{each.end:x}-{each.sum}" for each in fragments)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digest_of_registers(registers: pb.LabelSet) -> str:
    """Return a digest of registers; "" for empty ones."""
    if not registers.labels:
        return ""
    return hashlib.sha256(registers.SerializeToString(deterministic=True)).hexdigest()


def newest(files: Iterable[Mapping[str, JournalRecord]]) -> dict[str, JournalRecord]:
    """Return the latest record of each journal: the one with the highest sequence.

    If concurrent audits wrote the same sequence, the latest time decides.
    """
    found: dict[str, JournalRecord] = {}
    for records in files:
        for name, record in records.items():
            if name not in found or _rank(found[name]) < _rank(record):
                found[name] = record
    return found


def _rank(record: JournalRecord) -> tuple[int, float]:
    return record.sequence, record.at


def accepted(record: JournalRecord, now: JournalRecord, reason: str, losses: list[str], at: float) -> JournalRecord:
    """Return the record `now` of an accepted journal, with the earlier acceptances of `record` and the new one."""
    return replace(now, accepted=[*record.accepted, Acceptance(at, reason, losses)])
