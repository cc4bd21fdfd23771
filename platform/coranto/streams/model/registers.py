"""What a segment's registers say of its writers: pure.

Registers are labels that change atomically with an append, which may be conditioned on them. Of each writer they hold
one *entry*: its session, the sequence and the clock of what it appended last, and when. Every append of a writer checks
that the entry is what it was after the writer's append before, and replaces it. So of two attempts at the same append
only one can be applied, and the entry tells which appends were.

==============================  ======================================================================================
`coranto.dev/writer-<producer>`  the entry of one writer, named by its producer id
`coranto.dev/entered`            changes whenever an entry is added, so that entering is one after the other, and an
                                 outdated attempt at it can never be applied
`coranto.dev/expired`            the latest use and clock of the entries that were removed
`coranto.dev/fence-<name>`       a token that a user raised
`coranto.dev/held`               the registers were not lost. A check that includes it fails on empty registers, which
                                 Gazette's rule lets pass everything
`coranto.dev/restored`           the registers were lost once, when the journal ended at this offset
==============================  ======================================================================================

Entries are bounded: to enter where there is no room, the writer removes those that were not used for the longest time.
When an entry was used is told by its own writer's clock. One that is far ahead of the clock of the writer that enters
is not believed, lest such entries stay for ever and the others' go: these are removed first, in the order of offsets.
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
"""Seconds that a writer's clock may be ahead of another's for them to be compared."""
MAX_WRITERS: Final = 256
"""Brokers take 64 KiB of registers; so many entries and all fences with the longest tokens leave some of it."""
MAX_FENCES: Final = 16
"""How many names of fences a segment has at most."""
MAX_FENCE_NAME_BYTES: Final = labels.MAX_NAME_BYTES - len(FENCE_PREFIX)


class Entry(NamedTuple):
    """A writer's state in a segment.

    `sequence` and `clock` are those of what it appended last, and `hint` an offset at or before where that begins.
    `used` is in Unix seconds. `session` tells apart the processes that use one writer id after another.
    """

    session: int
    sequence: int
    clock: int
    hint: int
    used: int

    def encode(self) -> str:
        """The entry as a label's value."""
        return f"{self.session:x}.{self.sequence:x}.{self.clock:x}.{self.hint:x}.{self.used:x}"

    @classmethod
    def decode(cls, value: str) -> Entry:
        """Raises CorruptData."""
        return cls(*_numbers(value, 5))


class Expired(NamedTuple):
    """Of the entries that were removed: the latest use in Unix seconds, and the largest clock."""

    used: int
    clock: int


class Identity(NamedTuple):
    """Who a writer is. A `stable` one has a writer id that other processes go on with."""

    writer: str
    producer: ProducerId
    session: int
    stable: bool

    @property
    def label(self) -> str:
        return WRITER_PREFIX + self.producer.hex()


class Fence(NamedTuple):
    """A fence that was raised in a segment. It holds until somebody raises it again, or the registers are lost."""

    name: str
    token: str


@dataclass(frozen=True, slots=True)
class Registers:
    """A segment's registers, decoded."""

    labels: pb.LabelSet
    held: bool
    entries: Mapping[str, Entry]
    entered: str | None = None
    expired: Expired | None = None
    restored: int | None = None
    fences: Mapping[str, str] | None = None

    @classmethod
    def of(cls, found: pb.LabelSet) -> Registers:
        """Registers that are not of a writer, a fence or the like are passed over. Raises CorruptData."""
        entries: dict[str, Entry] = {}
        fences: dict[str, str] = {}
        single: dict[str, str] = {}
        for label in found.labels:
            if label.name.startswith(WRITER_PREFIX):
                entries[label.name] = Entry.decode(label.value)
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
        """Whether entries were removed or lost."""
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
    """The producer id of a writer id: always the same."""
    return new_producer_id(lambda size: hashlib.sha256(b"coranto.dev/writer " + writer.encode()).digest()[:size])


NOOP_PRODUCER: Final = stable_producer("")
"""Of acknowledgements that are appended only so that registers change.

They must not be of a writer: what it has in flight has earlier clocks, and readers would take that for repeated. No
writer id is empty.
"""


# ---------------------------------------------------------------------------------------------- how a writer stands


class Standing(Enum):
    """What registers mean to a writer."""

    OURS = auto()
    """The entry is of its own session: what it appended up to the entry's clock is durable, and nothing else."""
    TAKEN_OVER = auto()
    """The entry is of the session that it took the writer id over from, and which has appended more since."""
    NEW = auto()
    """There is no entry, and nothing was ever forgotten: it has appended nothing here, or the segment is empty."""
    FORGOTTEN = auto()
    """There is no entry, and entries were removed or lost."""
    FOREIGN = auto()
    """The entry is of another session."""
    LOST = auto()
    """There is content but no registers: all brokers that had them are gone. To be restored first."""


def standing(registers: Registers, head: int, identity: Identity, taken_from: int | None) -> Standing:
    """How a writer stands in a segment whose journal ends at `head`.

    `taken_from` is the session whose entry it takes over, if any.
    """
    if not registers.held and head > 0:
        return Standing.LOST
    entry = registers.entries.get(identity.label)
    if entry is None:
        return Standing.FORGOTTEN if registers.forgot else Standing.NEW
    if entry.session == identity.session:
        return Standing.OURS
    if identity.stable and entry.session == taken_from:
        return Standing.TAKEN_OVER
    return Standing.FOREIGN


# ------------------------------------------------------------------------------------------------ what appends carry


class Conditions(NamedTuple):
    """The register part of an append."""

    check: pb.LabelSelector
    union: pb.LabelSet
    subtract: pb.LabelSet | None = None

    def parameters(self, journal: str, offset: int = 0) -> pb.AppendRequest:
        """The append's first message on the wire. Raises InvalidInput."""
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
    """Replace a writer's entry, on the condition that it is `before`, and that a fence holds."""
    include = {HELD_LABEL: "", label: before}
    if fence is not None:
        include[FENCE_PREFIX + fence.name] = fence.token
    return Conditions(_selector(include), _label_set({label: after}))


class Advances:
    """The parameters of a writer's appends to one segment without a fence, of which only two values differ."""

    def __init__(self, journal: str, label: str) -> None:
        self._template = advance(label, "-", "-").parameters(journal)

    def parameters(self, before: str, after: str) -> pb.AppendRequest:
        """As of `advance`, for encoded entries."""
        parameters = pb.AppendRequest()
        parameters.CopyFrom(self._template)
        parameters.check_registers.include.labels[-1].value = before  # It sorts behind HELD_LABEL.
        parameters.union_registers.labels[0].value = after
        return parameters


def enter(
    registers: Registers, label: str, after: str, *, nonce: str, max_writers: int, fence: Fence | None = None
) -> Conditions:
    """Add an entry, on the condition that none was added since, removing others where there is no room.

    `nonce` is never used for another attempt at entering. Writers that are removed must not have appended meanwhile.
    """
    union = {HELD_LABEL: "1", ENTERED_LABEL: nonce, label: after}
    if not registers.held:
        # The journal's first append: nobody has been here, and nobody must come in between.
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
        latest = Entry.decode(after).used + FAR_AHEAD_S
        oldest = sorted(registers.entries.items(), key=lambda item: (*_use(item[1], latest), item[0]))[:excess]
        expired = registers.expired or Expired(0, 0)
        for name, entry in oldest:
            removed[name] = include[name] = registers.value_of(name)
            expired = Expired(max(expired.used, entry.used), max(expired.clock, entry.clock))
        union[EXPIRED_LABEL] = f"{expired.used:x}.{expired.clock:x}"
    return Conditions(_selector(include, exclude), _label_set(union), _label_set(removed) if removed else None)


def _use(entry: Entry, latest: int) -> tuple[bool, int]:
    """How recently an entry was used, to sort by, when no clock that is right is past `latest`."""
    is_believed = entry.used <= latest
    return is_believed, entry.used if is_believed else entry.hint


def restore(head: int) -> Conditions:
    """Hold registers anew that were lost when the journal ended at `head`, unless somebody else did."""
    return Conditions(
        pb.LabelSelector(exclude=_label_set({HELD_LABEL: ""})),
        _label_set({HELD_LABEL: "1", RESTORED_LABEL: f"{head:x}"}),
    )


def hold() -> Conditions:
    """Hold the registers of a journal without content, unless somebody else does."""
    return Conditions(pb.LabelSelector(exclude=_label_set({HELD_LABEL: ""})), _label_set({HELD_LABEL: "1"}))


def raise_fence(registers: Registers, fence: Fence) -> Conditions:
    """Set a fence's token, on the condition that it is still what it was, so that no attempt at it comes late.

    Raises InvalidInput when the segment has too many fences.
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
    """Return `name` when a fence can be called so. Raises InvalidInput."""
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
