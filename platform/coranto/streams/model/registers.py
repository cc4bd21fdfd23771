"""The state of a segment's writers in its registers. Pure.

Registers are labels that change atomically with an append; an append may also be conditioned on them. They hold one
*entry* per writer: its session, and the sequence, clock and time of its last append. Every append of a writer checks
that its entry is unchanged since its previous append, and replaces the entry. So of two attempts at the same append
only one can be applied, and the entry shows which appends were applied.

==============================  ======================================================================================
`coranto.dev/writer-<producer>`  the entry of one writer, named by its producer id
`coranto.dev/entered`            changes whenever an entry is added, so that writers enter one at a time, and an
                                 outdated attempt to enter can never be applied
`coranto.dev/expired`            the latest use and the largest clock of the entries that were removed
`coranto.dev/fence-<name>`       the token of a fence that a user raised
`coranto.dev/held`               marks registers that were not lost. A check that includes this label fails on empty
                                 registers; without it, Gazette's rule is that empty registers pass every check
`coranto.dev/restored`           the end of the journal when the registers were restored after a loss
==============================  ======================================================================================

The number of entries is bounded. A writer that enters a full segment removes the least recently used entries. The time
of use comes from the clock of the entry's own writer. A time far ahead of the entering writer's clock is not trusted,
because such an entry would never be removed. Entries with such times are removed first, in the order of their offsets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from coranto import labels
from coranto.errors import CorruptData, InvalidInput
from coranto.messages.uuids import ProducerId, new_producer_id
from coranto.names import validate_token
from coranto.specs.validation import validate
from coranto.streams.model.stream import EXPIRED_LABEL, HELD_LABEL, RESTORED_LABEL
from coranto.wire import protocol_pb2 as pb

WRITER_PREFIX: Final = "coranto.dev/writer-"
ENTERED_LABEL: Final = "coranto.dev/entered"
FENCE_PREFIX: Final = "coranto.dev/fence-"

DEFAULT_MAX_WRITERS: Final = 64
FAR_AHEAD_S: Final = 3600
"""Maximum seconds that a trusted time of use may be ahead of the entering writer's clock."""
MAX_WRITERS: Final = 256
"""Maximum writers per segment.

Brokers accept 64 KiB of registers. This many entries, and all fences with the longest tokens, take less than that.
"""
MAX_FENCES: Final = 16
"""Maximum fences of a segment."""
MAX_FENCE_NAME_BYTES: Final = labels.MAX_NAME_BYTES - len(FENCE_PREFIX)


class WriterEntry(NamedTuple):
    """A writer's state in a segment.

    `sequence` and `clock` are of the last append, and `hint` is an offset at or before its beginning. `used` is the
    time of the last append in Unix seconds. `session` distinguishes processes that use the same writer id in turn.
    """

    session: int
    sequence: int
    clock: int
    hint: int
    used: int

    def encode(self) -> str:
        """Encode the entry as a label's value."""
        return f"{self.session:x}.{self.sequence:x}.{self.clock:x}.{self.hint:x}.{self.used:x}"

    @classmethod
    def decode(cls, value: str) -> WriterEntry:
        """Decode an entry from a label's value. Raises CorruptData."""
        return cls(*_numbers(value, 5))


class Expired(NamedTuple):
    """The latest use, in Unix seconds, and the largest clock of all entries that were removed."""

    used: int
    clock: int


class WriterIdentity(NamedTuple):
    """The identity of a writer. A `stable` writer has a writer id that later processes continue."""

    writer: str
    producer: ProducerId
    session: int
    stable: bool

    @property
    def label(self) -> str:
        return WRITER_PREFIX + self.producer.hex()


class Fence(NamedTuple):
    """A fence that was raised in a segment. It holds until it is raised again, or the registers are lost."""

    name: str
    token: str


@dataclass(frozen=True, slots=True)
class Registers:
    """A segment's registers, decoded."""

    labels: pb.LabelSet
    held: bool
    entries: Mapping[str, WriterEntry]
    entered: str | None = None
    expired: Expired | None = None
    restored: int | None = None
    fences: Mapping[str, str] | None = None

    @classmethod
    def of(cls, found: pb.LabelSet) -> Registers:
        """Decode registers, ignoring labels that are not described in this module. Raises CorruptData."""
        entries: dict[str, WriterEntry] = {}
        fences: dict[str, str] = {}
        single: dict[str, str] = {}
        for label in found.labels:
            if label.name.startswith(WRITER_PREFIX):
                entries[label.name] = WriterEntry.decode(label.value)
            elif label.name.startswith(FENCE_PREFIX):
                fences[label.name.removeprefix(FENCE_PREFIX)] = label.value
            else:
                single[label.name] = label.value
        expired, restored = single.get(EXPIRED_LABEL), single.get(RESTORED_LABEL)
        return cls(
            found,
            HELD_LABEL in single,
            entries,
            single.get(ENTERED_LABEL),
            None if expired is None else Expired(*_numbers(expired, 2)),
            None if restored is None else _numbers(restored, 1)[0],
            fences,
        )

    def value_of(self, label: str) -> str:
        return labels.value_of(self.labels, label)

    @property
    def forgot(self) -> bool:
        """True if entries were removed or lost."""
        return self.expired is not None or self.restored is not None

    def token_of(self, fence: str) -> str | None:
        return (self.fences or {}).get(fence)


def _numbers(value: str, count: int) -> list[int]:
    parts = value.split(".")
    try:
        if len(parts) == count and value.isascii() and "_" not in value and "-" not in value and "+" not in value:
            return [int(part, 16) for part in parts]
    except ValueError:
        pass
    raise CorruptData(f"{value!r} is not a register of a stream's writer")


def stable_producer(writer: str) -> ProducerId:
    """Return the producer id of a writer id. It is always the same."""
    return new_producer_id(lambda size: hashlib.sha256(b"coranto.dev/writer " + writer.encode()).digest()[:size])


NOOP_PRODUCER: Final = stable_producer("")
"""The producer of acknowledgements that are appended only to change registers.

These must not use a writer's producer id: the writer's in-flight appends have earlier clocks, so readers would treat
them as duplicates. The id is derived from the empty writer id, which no writer has.
"""


# ----------------------------------------------------------------------------------------------- the status of a writer


class WriterStatus(Enum):
    """The state of a segment's registers from the point of view of one writer."""

    OURS = auto()
    """The entry is from the writer's own session: exactly its appends up to the entry's clock are durable."""
    TAKEN_OVER = auto()
    """The entry is from the session that this writer has replaced. That session may have appended more since."""
    NEW = auto()
    """There is no entry, and no entry was ever removed or lost: the writer has appended nothing here."""
    FORGOTTEN = auto()
    """There is no entry, but entries were removed or lost."""
    FOREIGN = auto()
    """The entry is from another session."""
    LOST = auto()
    """There is content but no registers: all brokers that had the registers are gone. They must be restored first."""


def writer_status(registers: Registers, head: int, identity: WriterIdentity, taken_from: int | None) -> WriterStatus:
    """Return the status of a writer in a segment whose journal ends at `head`.

    `taken_from` is the session whose entry the writer takes over, if any.
    """
    if not registers.held and head > 0:
        return WriterStatus.LOST
    entry = registers.entries.get(identity.label)
    if entry is None:
        return WriterStatus.FORGOTTEN if registers.forgot else WriterStatus.NEW
    if entry.session == identity.session:
        return WriterStatus.OURS
    if identity.stable and entry.session == taken_from:
        return WriterStatus.TAKEN_OVER
    return WriterStatus.FOREIGN


# ------------------------------------------------------------------------------------------------ conditions of appends


class Conditions(NamedTuple):
    """The register checks and changes of an append."""

    check: pb.LabelSelector
    union: pb.LabelSet
    subtract: pb.LabelSet | None = None

    def parameters(self, journal: str, offset: int = 0) -> pb.AppendRequest:
        """Return the append's first message on the wire. Raises InvalidInput."""
        parameters = pb.AppendRequest(
            journal=journal,
            offset=offset,
            check_registers=self.check,
            union_registers=self.union,
            subtract_registers=self.subtract,
        )
        validate(parameters)
        return parameters


def advance(label: str, before: str, after: str, fence: Fence | None = None) -> Conditions:
    """Replace a writer's entry, on the condition that it is `before` and that the fence, if any, holds."""
    include = {HELD_LABEL: "", label: before}
    if fence is not None:
        include[FENCE_PREFIX + fence.name] = fence.token
    return Conditions(_selector(include), _label_set({label: after}))


class Advances:
    """Prepared parameters of a writer's appends to one segment, without a fence. Only two values differ."""

    def __init__(self, journal: str, label: str) -> None:
        self._template = advance(label, "-", "-").parameters(journal)

    def parameters(self, before: str, after: str) -> pb.AppendRequest:
        """Return the parameters of `advance` for encoded entries."""
        parameters = pb.AppendRequest()
        parameters.CopyFrom(self._template)
        parameters.check_registers.include.labels[-1].value = before  # It sorts after HELD_LABEL.
        parameters.union_registers.labels[0].value = after
        return parameters


def enter(
    registers: Registers, label: str, after: str, *, nonce: str, max_writers: int, fence: Fence | None = None
) -> Conditions:
    """Add an entry, on the condition that no entry was added since `registers` were read.

    If there are `max_writers` entries, others are removed, on the condition that their writers have not appended since.
    `nonce` must be unique to this attempt to enter.
    """
    union = {HELD_LABEL: "1", ENTERED_LABEL: nonce, label: after}
    if not registers.held:
        # The journal's first append: no writer has entered yet, and none may enter in between.
        return Conditions(pb.LabelSelector(exclude=_label_set({HELD_LABEL: ""})), _label_set(union))
    include, exclude, removed = {HELD_LABEL: ""}, {}, {}
    if registers.entered is None:
        exclude[ENTERED_LABEL] = ""
    else:
        include[ENTERED_LABEL] = registers.entered
    if fence is not None:
        include[FENCE_PREFIX + fence.name] = fence.token
    excess = len(registers.entries) + 1 - max_writers
    if excess > 0:
        latest = WriterEntry.decode(after).used + FAR_AHEAD_S
        oldest = sorted(registers.entries.items(), key=lambda item: (*_use(item[1], latest), item[0]))[:excess]
        expired = registers.expired or Expired(0, 0)
        for name, entry in oldest:
            removed[name] = include[name] = registers.value_of(name)
            expired = Expired(max(expired.used, entry.used), max(expired.clock, entry.clock))
        union[EXPIRED_LABEL] = f"{expired.used:x}.{expired.clock:x}"
    return Conditions(_selector(include, exclude), _label_set(union), _label_set(removed) if removed else None)


def _use(entry: WriterEntry, latest: int) -> tuple[bool, int]:
    """Return a sort key by the time of last use. No correct clock is past `latest`."""
    is_trusted = entry.used <= latest
    return is_trusted, entry.used if is_trusted else entry.hint


def restore(head: int) -> Conditions:
    """Restore registers that were lost when the journal ended at `head`, unless another writer already has."""
    return Conditions(
        pb.LabelSelector(exclude=_label_set({HELD_LABEL: ""})),
        _label_set({HELD_LABEL: "1", RESTORED_LABEL: f"{head:x}"}),
    )


def hold() -> Conditions:
    """Mark the registers of a journal without content as held, unless another writer already has."""
    return Conditions(pb.LabelSelector(exclude=_label_set({HELD_LABEL: ""})), _label_set({HELD_LABEL: "1"}))


def raise_fence(registers: Registers, fence: Fence) -> Conditions:
    """Set a fence's token, on the condition that it has not changed, so that a late attempt is not applied.

    Raises InvalidInput if the segment has too many fences.
    """
    names = set(registers.fences or ()) | {fence.name}
    if len(names) > MAX_FENCES:
        raise InvalidInput(
            f"a segment has at most {MAX_FENCES} fences; it has {', '.join(sorted(names - {fence.name}))}"
        )
    label, present = FENCE_PREFIX + fence.name, registers.token_of(fence.name)
    check = _selector({HELD_LABEL: ""}, {label: ""}) if present is None else _selector({HELD_LABEL: "", label: present})
    return Conditions(check, _label_set({label: fence.token}))


def validate_fence_name(name: str) -> str:
    """Return `name` if it is a valid name of a fence. Raises InvalidInput."""
    return validate_token("fence", name, 1, MAX_FENCE_NAME_BYTES)


def _selector(include: Mapping[str, str], exclude: Mapping[str, str] | None = None) -> pb.LabelSelector:
    selector = pb.LabelSelector()
    _add(selector.include, include)
    if exclude:
        _add(selector.exclude, exclude)
    return selector


def _label_set(pairs: Mapping[str, str]) -> pb.LabelSet:
    result = pb.LabelSet()
    _add(result, pairs)
    return result


def _add(to: pb.LabelSet, pairs: Mapping[str, str]) -> None:
    # Validated with the rest of the append.
    add = to.labels.add
    for name in sorted(pairs):
        add(name=name, value=pairs[name])
