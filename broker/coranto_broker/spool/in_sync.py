"""The in-sync record of a journal, and the rules that follow from it: pure values and functions.

A broker whose lease expired may hold content that only it has committed, at offsets that the others have written since.
Assignments in etcd do not show this. So the primary keeps one small record per journal in etcd. It writes the record
once per pipeline, in the transaction that advertises a synchronized Route: before the pipeline takes content, and
before the allocator may remove a replica. The record holds

* its *members*. Each member holds everything that was ever acknowledged. Content is acknowledged only by all members.
* its *epochs*: for each pipeline that was recorded, the etcd revision of its Route and the journal's end when it began.

Each spool carries a `Stamp`: the revisions of the pipelines that it followed. Record and stamp together decide whether
content of a spool is permanently part of the journal (`judge`), and whether a Route may continue (`takeover`):

* The next epoch after the content's pipeline decides. If it begins before the end of the content, the others continued
  without it: the content has *diverged*. If it begins at or after that end, a replica with the content agreed to it:
  the content is *final*. Without a later epoch the content is *open*, unless the spool's broker is the only member. (A
  Kafka follower truncates by leader epochs in the same way.)
* A Route may continue if it has one of the record's members, because this member has taken part in synchronization.
* A member that lacks required content (after a disk was emptied or restored) removes itself from the record before it
  answers any call.
* When no member can return to the Route, one of them may *claim* the record, store everything that it has, and *close*
  the record. A closed record has the end and registers that any broker needs to continue.
* A member that exits with everything stored *leaves* the record and writes its end into it. Nothing beyond this end is
  acknowledged, because an acknowledgement takes all members. So a Route without any remaining member continues at this
  end. The remaining members may have more content, but none that was acknowledged. The last member that leaves closes
  the record.

Gazette's brokers keep no record. Content of a later pipeline than the last recorded one shows that such a broker was
primary, and is trusted as Gazette trusts it. So is a spool that ends after the end of a closed record, if the Route of
its latest pipeline is newer than the closing: that pipeline's brokers knew the record.
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
"""The number of epochs with content that a record keeps. Content from before them is only known to be old."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The pipelines that a spool has followed, by the etcd revisions of their Routes. 0 is before any pipeline.

    `synced` is the latest pipeline that it agreed to, `written` the latest one through which it committed content.
    """

    synced: int = 0
    written: int = 0

    def followed(self, revision: int, *, wrote: bool = False) -> Stamp:
        """Return the stamp after a proposal by the pipeline of `revision`. `wrote`: the proposal committed content."""
        return Stamp(max(self.synced, revision), max(self.written, revision) if wrote else self.written)


UNSTAMPED = Stamp()
"""The stamp of a spool that has followed no pipeline, or was written before stamps existed."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """A recorded pipeline: the revision of its Route, and the journal's end when it began."""

    revision: int
    begin: int


@dataclass(frozen=True, slots=True)
class InSyncRecord:
    """The in-sync record of one journal with that `create_revision`.

    `end` and `registers` belong to a claimed, left or closed record, else they are None. Stamps below `forgotten` are
    too old to be judged. `written` is the etcd revision of this version, 0 unless it was read from etcd. All revisions
    are rebased (`coranto_broker.recovery.identity`).
    """

    create_revision: int
    members: tuple[str, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    forgotten: int = 0
    end: int | None = None
    registers: pb.LabelSet | None = field(default=None, hash=False)
    left: bool = False
    """True if `end` was written by a member that has left, and other members remain."""
    carried: int = 0
    """The revision of its last version, if etcd was restored since; 0 otherwise."""
    journal_id: str = ""
    """The journal's id (`coranto.journal_ids`), which survives a restored etcd. Records of earlier versions have
    none."""
    formers: tuple[int, ...] = ()
    """The create revisions of former journals that this journal continues, as etcd was restored since. Their spools may
    hold content of the journal that is not stored yet."""
    foreign: bool = field(default=False, compare=False)
    """True if it was read for a journal that was recreated after etcd was restored. The content of its members
    belongs to the journal, but is in spools of the former journal."""
    written: int = field(default=0, compare=False)

    @property
    def revision(self) -> int:
        """The revision of the latest recorded pipeline; 0 if there is none."""
        return self.epochs[-1].revision if self.epochs else 0

    @property
    def floor(self) -> int:
        """A lower bound of the journal's end."""
        return max(self.epochs[-1].begin if self.epochs else 0, self.end or 0)

    @property
    def closed(self) -> bool:
        """True if everything up to `end` is in the fragment store, so that any broker may continue there."""
        return self.end is not None and not self.members

    @property
    def claimed(self) -> bool:
        """True if its only member alone decides where the journal continues."""
        return self.end is not None and bool(self.members) and not self.left

    @property
    def order(self) -> tuple[int, int]:
        """A sort key: greater for the later of two records of a journal, even if etcd has lost one of them."""
        return self.revision, self.written

    def limit(self, revision: int) -> int | None:
        """Return the end of the valid content of the pipeline of `revision`; None while it is undecided."""
        if revision < self.forgotten:
            return 0
        last = None if self.left else self.end
        return next((epoch.begin for epoch in self.epochs if epoch.revision > revision), last)


class Judgement(enum.Enum):
    """The status of some content according to the in-sync record."""

    FINAL = "final"
    """The content is permanently part of the journal and may be stored."""
    OPEN = "open"
    """Other brokers may still be able to continue without the content."""
    DIVERGED = "diverged"
    """Other brokers have continued without the content."""


def as_read_for(record: InSyncRecord, create_revision: int, me: str) -> InSyncRecord | None:
    """Return a record as `me` must read it for the journal of `create_revision`; None if it is of another journal.

    A record that was carried over a restored etcd applies to every journal of its name, and is `foreign` to journals of
    other create revisions. Otherwise, a record decides which content of the former journals that it continues counts,
    but not that `me` holds all of it.
    """
    if create_revision in record.formers and not record.carried:
        return replace(record, members=tuple(member for member in record.members if member != me))
    if record.carried or record.create_revision == create_revision:
        return replace(record, foreign=record.create_revision != create_revision)
    return None


def judge(record: InSyncRecord | None, stamp: Stamp, end: int, me: str) -> Judgement:
    """Judge content that ends at `end` in a spool of broker `me`. Without a record it is FINAL, as in Gazette."""
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


def is_complete(record: InSyncRecord | None, stamp: Stamp, me: str) -> bool:
    """Return True if a spool of `me` with that stamp holds everything that was acknowledged."""
    if record is None or stamp.written > record.revision:
        return True
    return me in record.members and not record.foreign and stamp.synced >= record.revision


def may_leave(record: InSyncRecord | None, stamp: Stamp, end: int, me: str) -> bool:
    """Return True if `me` knows the journal's end. Its spool has that stamp and end, and accepts no more content.

    The spool then holds all acknowledged content, and by this record nothing more can be acknowledged. Once all
    of it is stored, `me` may leave the record, if it is unchanged since it was read.
    """
    if record is None or me not in record.members or record.foreign or stamp.written > record.revision:
        return False
    return is_complete(record, stamp, me) and end >= record.floor and record.end in (None, end)


class Takeover(enum.Enum):
    """The next step of a synchronized Route."""

    CLEAN = "clean"
    """Continue."""
    ROLL = "roll"
    """Roll to the end of the record that was closed or left, with its registers, and synchronize again."""
    VERIFY = "verify"
    """Let each replica check its spool again: the record was closed below the replicas' end after they had agreed."""
    LOST = "lost"
    """Wait for a member of the record, for its rescue of the journal, or for an operator."""


def takeover(record: InSyncRecord | None, route: Iterable[str], stamp: Stamp, end: int) -> Takeover:
    """Decide for a Route whose replicas agree on `end`. `stamp` is from the primary's spool before this pipeline."""
    if record is None or stamp.written > record.revision:
        return Takeover.CLEAN
    if end >= record.floor and not record.foreign and not set(record.members).isdisjoint(route):
        return Takeover.CLEAN
    if record.closed or record.left:
        return Takeover.CLEAN if end >= record.floor else Takeover.ROLL
    return Takeover.LOST


def is_continued(record: InSyncRecord | None, create_revision: int) -> bool:
    """Return True if a journal recreated after etcd was restored continues the one with that create revision.

    Final content of the former journal then counts, at any broker that holds it.
    """
    if record is None:
        return False
    carried = bool(record.carried) and record.create_revision == create_revision
    return carried or create_revision in record.formers


def recorded(
    record: InSyncRecord | None,
    create_revision: int,
    revision: int,
    members: Iterable[str],
    begin: int,
    journal_id: str = "",
) -> InSyncRecord:
    """Return the record that lets the pipeline of `revision`, whose replicas agreed on `begin`, take content."""
    epochs, forgotten = (record.epochs, record.forgotten) if record is not None else ((), 0)
    if not epochs or epochs[-1].revision < revision:
        # Among epochs that begin at the same offset, the last one alone decides every judgement.
        epochs = (*(each for each in epochs if each.begin < begin), Epoch(revision, begin))
    if len(epochs) > MAX_EPOCHS:
        forgotten, epochs = epochs[-MAX_EPOCHS - 1].revision, epochs[-MAX_EPOCHS:]
    formers = _formers(record, create_revision) if record is not None else ()
    members = tuple(sorted(members))
    return InSyncRecord(create_revision, members, epochs, forgotten, journal_id=journal_id, formers=formers)


def without(record: InSyncRecord, member: str) -> InSyncRecord:
    """Return the record without `member`, which has found that it lacks required content."""
    others = tuple(each for each in record.members if each != member)
    if record.claimed:  # Perhaps not everything is stored yet.
        return replace(record, members=others, end=None, registers=None, written=0)
    return replace(record, members=others, left=record.left and bool(others), written=0)


def claimed(record: InSyncRecord, member: str, end: int, registers: pb.LabelSet) -> InSyncRecord:
    """Return the record that lets `member` alone decide that the journal ends at `end`."""
    return replace(record, members=(member,), end=end, registers=registers, left=False, written=0)


def left(record: InSyncRecord, member: str, end: int, registers: pb.LabelSet) -> InSyncRecord:
    """Return the record after `member` has left it. It is closed if this was the last member."""
    others = tuple(each for each in record.members if each != member)
    return replace(record, members=others, end=end, registers=registers, left=bool(others), written=0)


def closed(record: InSyncRecord | None, create_revision: int, end: int, registers: pb.LabelSet) -> InSyncRecord:
    """Return the record of a journal that no broker holds any more, because all its content is stored or gone."""
    found = record or InSyncRecord(create_revision)
    carried = found.carried if found.create_revision == create_revision else 0
    return replace(
        found,
        create_revision=create_revision,
        members=(),
        end=end,
        registers=registers,
        left=False,
        carried=carried,
        formers=_formers(found, create_revision),
        foreign=False,
        written=0,
    )


def _formers(record: InSyncRecord, create_revision: int) -> tuple[int, ...]:
    """Return `formers` of the journal with that create revision, which continues from `record`."""
    if record.create_revision == create_revision:
        return record.formers
    return (*(each for each in record.formers if each != create_revision), record.create_revision)


def encode(record: InSyncRecord) -> bytes:
    """Encode a record as JSON, so that operators can read it."""
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
    if record.journal_id:
        document["journal_id"] = record.journal_id
    if record.formers:
        document["formers"] = list(record.formers)
    return json.dumps(document).encode()


def decode(value: bytes) -> InSyncRecord:
    """Decode a record. Raises InvalidInput if `value` is not one."""
    try:
        document = json.loads(value)
        members, epochs = document["members"], document["epochs"]
        if not all(isinstance(member, str) for member in members):
            raise TypeError("a member is not a text")
        record = InSyncRecord(
            _number(document["create_revision"]),
            tuple(members),
            tuple(Epoch(_number(revision), _number(begin)) for revision, begin in epochs),
            _number(document.get("forgotten", 0)),
            carried=_number(document.get("carried", 0)),
            journal_id=_text(document.get("journal_id", "")),
            formers=tuple(map(_number, document.get("formers", ()))),
        )
        if "end" in document:
            labels = [pb.Label(name=name, value=text) for name, text in document["registers"]]
            left = document.get("left", False)
            if left not in (False, True) or (left and not members):
                raise ValueError("no member is left")
            record = replace(record, end=_number(document["end"]), registers=pb.LabelSet(labels=labels), left=left)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidInput(
            f"this is not an in-sync record: {value[:200]!r} ({error})", field="in-sync record"
        ) from error
    return record


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value
