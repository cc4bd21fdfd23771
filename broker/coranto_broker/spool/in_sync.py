"""The in-sync record of a journal, and the rules that follow from it: pure values and functions.

A broker whose lease ran out may hold content that only it has committed, at offsets that the others wrote since. etcd's
assignments alone cannot tell such content from what everybody has. So the primary keeps one small record per journal in
etcd. It writes the record in the transaction that advertises a synchronized Route, that is, once per pipeline, before
the pipeline takes content and before the allocator may remove anybody. The record says

* its *members*: whoever is one holds all that was ever acknowledged. Content is acknowledged only by all members.
* its *epochs*: for each pipeline that was recorded, the etcd revision of its Route and the journal's end when it began.

Spools carry a `Stamp`: the revisions of the pipelines that they followed. From both follows, for any content of any
spool (`judge`), whether it is part of the journal for good, and for any Route whether it may go on (`takeover`):

* A later epoch that begins before the content ends went on without it: the content has *diverged*. A later epoch that
  begins behind it was agreed with somebody who has it: it is *final*. Without a later epoch that is open, unless we
  are the only member. (Kafka's leader epochs decide the same way where a follower truncates.)
* A Route goes on if one of the record's members is in it: that one has been asked during synchronization.
* A member that finds itself without what it should hold (an empty disk, an older one) strikes itself out before it
  answers anybody.
* When no member can come back into the Route, one of them may *claim* the record, store all that it has, and *close*
  it. A closed record says where, and with which registers, anyone may go on.
* A member that exits with everything stored *leaves* the record: it writes down where it ended. Nothing beyond that was
  acknowledged, nor will be by that record, since that takes its word. So a Route without any of the remaining members,
  who may have more that was not, goes on there. The last member that leaves closes the record.

Gazette's brokers keep no record. Content that was written through a later pipeline than any that was recorded is proof
of such a primary, and is trusted as Gazette trusts it. So is a spool whose latest pipeline is of a Route from after the
record was closed, and which ends behind that: whoever took part in it knew the record, and others of ours begin at its
end.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from coranto.errors import InvalidInput
from coranto.wire import protocol_pb2 as pb

MAX_EPOCHS = 64
"""Epochs with content that are remembered. Content from before them is only known to be old."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Of which pipelines a spool is: etcd revisions of their Routes; 0 is before any.

    `synced` is the latest that it agreed to, `written` the latest by which content was committed.
    """

    synced: int = 0
    written: int = 0

    def followed(self, revision: int, *, wrote: bool = False) -> Stamp:
        """The stamp after a proposal of the pipeline of `revision` was taken."""
        return Stamp(max(self.synced, revision), max(self.written, revision) if wrote else self.written)


UNSTAMPED = Stamp()
"""Of a spool that has followed none, or was written before there were stamps."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """A recorded pipeline: the revision of its Route, and the journal's end when it began."""

    revision: int
    begin: int


@dataclass(frozen=True, slots=True)
class Record:
    """What etcd says of one journal, of that `create_revision`.

    `end` and `registers` are those of a claimed, left or closed record, else None. Stamps below `forgotten` are too old
    to be judged. `written` is the etcd revision at which it was written so, 0 unless it was read from there. All
    revisions are counted on (`coranto_broker.recovery.identity`).
    """

    create_revision: int
    members: tuple[str, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    forgotten: int = 0
    end: int | None = None
    registers: pb.LabelSet | None = field(default=None, hash=False)
    left: bool = False
    """Whether `end` is that of a member who is none any more, and there are others."""
    carried: int = 0
    """The revision at which it was written last, if etcd was restored since; 0 otherwise."""
    foreign: bool = field(default=False, compare=False)
    """Whether it was read for a journal that was created anew after etcd was restored: what its members have belongs
    to the journal, but lies in spools of the former one."""
    written: int = field(default=0, compare=False)

    @property
    def revision(self) -> int:
        """That of the latest pipeline."""
        return self.epochs[-1].revision if self.epochs else 0

    @property
    def floor(self) -> int:
        """The journal is at least that long."""
        return max(self.epochs[-1].begin if self.epochs else 0, self.end or 0)

    @property
    def closed(self) -> bool:
        """Whether everything up to `end` is in the fragment store, so that anybody may go on there."""
        return self.end is not None and not self.members

    @property
    def claimed(self) -> bool:
        """Whether its only member is to say where the journal goes on."""
        return self.end is not None and bool(self.members) and not self.left

    @property
    def order(self) -> tuple[int, int]:
        """Of two records of a journal the later one has the greater order, also where etcd has forgotten one."""
        return self.revision, self.written

    def limit(self, revision: int) -> int | None:
        """Up to where content of the pipeline of `revision` counts; None when that is not decided."""
        if revision < self.forgotten:
            return 0
        last = None if self.left else self.end
        return next((epoch.begin for epoch in self.epochs if epoch.revision > revision), last)


class Judgement(enum.Enum):
    """What a record says of some content."""

    FINAL = "final"
    """Part of the journal for good: it may be stored."""
    OPEN = "open"
    """Perhaps others can still go on without it."""
    DIVERGED = "diverged"
    """Others went on without it."""


def judge(record: Record | None, stamp: Stamp, end: int, me: str) -> Judgement:
    """Of content that ends at `end`, in a spool of broker `me`. A journal without a record is judged as by Gazette."""
    if record is None or stamp.written > record.revision:
        return Judgement.FINAL
    if record.foreign:
        return Judgement.OPEN
    if record.closed and 0 < record.written < stamp.synced:
        return Judgement.FINAL
    limit = record.limit(stamp.synced)
    if limit is None:
        final = end <= (record.end or 0) if record.left else record.members == (me,)
        return Judgement.FINAL if final else Judgement.OPEN
    return Judgement.FINAL if limit >= end else Judgement.DIVERGED


def is_complete(record: Record | None, stamp: Stamp, me: str) -> bool:
    """Whether a spool of `me` with that stamp holds all that was acknowledged."""
    if record is None or stamp.written > record.revision:
        return True
    return me in record.members and not record.foreign and stamp.synced >= record.revision


def may_leave(record: Record | None, stamp: Stamp, end: int, me: str) -> bool:
    """Whether `me`, whose spool has that stamp and end and takes no more content, knows where the journal ends.

    It holds all that was acknowledged, and by the record nothing more can be. Once all of that is stored it may leave
    the record, if nobody has changed it since it was read.
    """
    if record is None or me not in record.members or record.foreign or stamp.written > record.revision:
        return False
    return is_complete(record, stamp, me) and end >= record.floor and record.end in (None, end)


class Takeover(enum.Enum):
    """What a synchronized Route may do."""

    CLEAN = "clean"
    ROLL = "roll"
    """Roll to the end of the record that was closed or left, with its registers, and synchronize again."""
    LOST = "lost"
    """Wait for a member of the record, for its rescue of the journal, or for an operator."""


def takeover(record: Record | None, route: Iterable[str], stamp: Stamp, end: int) -> Takeover:
    """For a Route whose replicas agree on `end`; `stamp` is that of the primary's spool before this pipeline."""
    if record is None or stamp.written > record.revision:
        return Takeover.CLEAN
    if end >= record.floor and not record.foreign and not set(record.members).isdisjoint(route):
        return Takeover.CLEAN
    if record.closed or record.left:
        return Takeover.CLEAN if end >= record.floor else Takeover.ROLL
    return Takeover.LOST


def recorded(record: Record | None, create_revision: int, revision: int, members: Iterable[str], begin: int) -> Record:
    """The record once the pipeline of `revision`, which agreed on `begin`, may take content."""
    epochs, forgotten = (record.epochs, record.forgotten) if record is not None else ((), 0)
    if not epochs or epochs[-1].revision < revision:
        # Of epochs that begin at the same offset the last decides, whatever content is judged.
        epochs = (*(each for each in epochs if each.begin < begin), Epoch(revision, begin))
    if len(epochs) > MAX_EPOCHS:
        forgotten, epochs = epochs[-MAX_EPOCHS - 1].revision, epochs[-MAX_EPOCHS:]
    return Record(create_revision, tuple(sorted(members)), epochs, forgotten)


def without(record: Record, member: str) -> Record:
    """The record once `member` has found that it does not hold what it should."""
    others = tuple(each for each in record.members if each != member)
    if record.claimed:  # Not everything may be stored.
        return replace(record, members=others, end=None, registers=None, written=0)
    return replace(record, members=others, left=record.left and bool(others), written=0)


def claimed(record: Record, member: str, end: int, registers: pb.LabelSet) -> Record:
    """The record that lets `member` alone decide: the journal ends at `end`."""
    return replace(record, members=(member,), end=end, registers=registers, left=False, written=0)


def left(record: Record, member: str, end: int, registers: pb.LabelSet) -> Record:
    """The record once `member`, which may leave it, has done so; closed, if it was the last one."""
    others = tuple(each for each in record.members if each != member)
    return replace(record, members=others, end=end, registers=registers, left=bool(others), written=0)


def closed(record: Record | None, create_revision: int, end: int, registers: pb.LabelSet) -> Record:
    """The record of a journal that nobody holds any more, because all of it is stored or gone."""
    found = record or Record(create_revision)
    carried = found.carried if found.create_revision == create_revision else 0
    return replace(
        found,
        create_revision=create_revision,
        members=(),
        end=end,
        registers=registers,
        left=False,
        carried=carried,
        foreign=False,
        written=0,
    )


def encode(record: Record) -> bytes:
    """As JSON, for people to read, too."""
    document: dict[str, Any] = {
        "create_revision": record.create_revision,
        "members": list(record.members),
        "epochs": [[epoch.revision, epoch.begin] for epoch in record.epochs],
    }
    if record.forgotten:
        document["forgotten"] = record.forgotten
    if record.end is not None:
        document["end"] = record.end
        labels = record.registers.labels if record.registers is not None else ()
        document["registers"] = [[label.name, label.value] for label in labels]
    if record.left:
        document["left"] = True
    if record.carried:
        document["carried"] = record.carried
    return json.dumps(document).encode()


def decode(value: bytes) -> Record:
    """Raises InvalidInput for what is no record."""
    try:
        document = json.loads(value)
        members, epochs = document["members"], document["epochs"]
        if not all(isinstance(member, str) for member in members):
            raise TypeError("a member is not a text")
        record = Record(
            _number(document["create_revision"]),
            tuple(members),
            tuple(Epoch(_number(revision), _number(begin)) for revision, begin in epochs),
            _number(document.get("forgotten", 0)),
            carried=_number(document.get("carried", 0)),
        )
        if "end" in document:
            labels = [pb.Label(name=name, value=text) for name, text in document["registers"]]
            left = document.get("left", False)
            if left not in (False, True) or (left and not members):
                raise ValueError("nobody is left")
            record = replace(record, end=_number(document["end"]), registers=pb.LabelSet(labels=labels), left=left)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidInput(f"not an in-sync record: {value[:200]!r} ({error})", field="in-sync record") from error
    return record


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value
