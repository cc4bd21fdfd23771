"""The decision on an append, made by the primary from a snapshot of the journal. Pure.

Only `decide` knows the preconditions of a commit and their order (seed 001, "validate preconditions"). The state
machine (`coranto_broker.append.fsm`) carries out its decision, and decides again after changes. Batches
(`coranto_broker.append.batch`) admit appends by its decision on the state after earlier members. Within a `Steady`
range, `apply_registers` gives the same answer at lower cost.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

from coranto.effects import Bytes
from coranto.errors import InvalidInput
from coranto.fragments.fragment import Codec, Fragment
from coranto.specs.validation import may_write
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import registers as of_registers
from coranto_broker.fragments.index_summary import IndexSummary
from coranto_broker.spool.spool import CommittedState, empty_at
from coranto_broker.spool.steady import Steady

Suspend = pb.JournalSpec.Suspend
DEFAULT_FLUSH_SECONDS: Final = 24 * 60 * 60

TORN_LINE: Final = (
    "the append does not end with a newline, and by its labels the journal has whole lines: the next append would "
    "continue the line. Journals labelled coranto.dev/lines=any accept it"
)
"""The reason for NOT_ALLOWED of an append that ends within a line."""
_NEWLINE: Final = ord("\n")


@dataclass(frozen=True, slots=True)
class JournalSnapshot:
    """The state of a journal at its primary, whose spool is synchronized with all replicas.

    `known` summarizes all known fragments. `now` is wall time in seconds. `store_problem` is the problem of the store
    of new fragments, "" without one, and None if unknown. `listed` is True once all stores have been listed. `recorded`
    is True if the in-sync record names the pipeline's replicas: one of them then holds all acknowledged content.
    `loss_confirmed` is True if this append is known to be empty.
    """

    spec: pb.JournalSpec
    committed: CommittedState
    known: IndexSummary
    now: float
    store_problem: str | None = ""
    listed: bool = True
    recorded: bool = True
    loss_confirmed: bool = False
    refusal: str = ""
    """The reason for refusing content whose acknowledgements cannot meet the demand of the journal's labels, or ""."""
    whole_lines: bool = False
    """`labels.takes_whole_lines` of the journal."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The append may commit, with these registers after it. With `roll`, that empty fragment must begin first."""

    registers: pb.LabelSet
    roll: Fragment | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """The append ends with a status. `registers` are the journal's; `reason` is text for the client."""

    status: pb.Status.ValueType
    registers: pb.LabelSet
    reason: str = ""


class Need(enum.Enum):
    """A missing part of the snapshot that the decision needs. Provide it, then decide again."""

    STORE = "the health of the fragment store"
    LISTING = "a first listing of all fragment stores"
    EMPTY_APPEND = "the end of an append without content, which confirms a loss"
    RECORD = "an in-sync record of the replicas that continue after a confirmed loss"


@dataclass(frozen=True, slots=True)
class Synchronize:
    """All replicas must first roll to this offset. Then decide again."""

    offset: int


@dataclass(frozen=True, slots=True)
class ChangeSuspension:
    """The journal's suspension must change first; with `roll`, after that empty fragment began. Then decide again."""

    suspend: pb.JournalSpec.Suspend
    roll: Fragment | None = None


AppendDecision = Commit | Refuse | Need | Synchronize | ChangeSuspension


def decide(request: pb.AppendRequest, snapshot: JournalSnapshot, content: Bytes | None = None) -> AppendDecision:
    """Decide an append with this content (None if unknown: then `judge_content` judges each part of it).

    Raises InvalidInput if the append is invalid regardless of the journal.
    """
    spec, present = snapshot.spec, snapshot.committed.registers
    if spec.fragment.stores:
        if snapshot.store_problem is None:
            return Need.STORE
        if snapshot.store_problem:
            return Refuse(pb.FRAGMENT_STORE_UNHEALTHY, present, snapshot.store_problem)
    if not snapshot.listed:
        return Need.LISTING
    found = _check(request, snapshot)
    # A strict check demands all acknowledged content, even of a journal that cannot be written to.
    lost = not snapshot.recorded and (may_write(spec) or of_registers.is_strict(request))
    is_at_head = request.offset or request.at_start
    if lost and (not is_at_head or isinstance(found, Refuse)):
        # Perhaps no replica holds all acknowledged content, so the journal's head and registers are unknown.
        return Refuse(pb.INDEX_HAS_GREATER_OFFSET, present)
    if isinstance(found, Refuse):
        return found
    after = of_registers.after(request, present)
    if lost and not snapshot.loss_confirmed:
        # An operator confirms the loss by an empty append at an explicit offset, or at the start.
        return Refuse(pb.INDEX_HAS_GREATER_OFFSET, present) if content else Need.EMPTY_APPEND
    if isinstance(found, Synchronize):
        return found
    if lost:
        return Need.RECORD
    if isinstance(found, ChangeSuspension):
        return found
    refusal = None
    if content is not None:
        refusal = judge_content(request, spec, len(content), present, snapshot.refusal)
        if refusal is None and is_torn(content, snapshot.whole_lines):
            refusal = Refuse(pb.NOT_ALLOWED, present, TORN_LINE)
    return refusal or Commit(after, _roll(snapshot, found))


def is_torn(content: Bytes, whole_lines: bool) -> bool:
    """Return True if content, or its last part, ends within a line of a journal of whole lines."""
    return whole_lines and len(content) > 0 and content[-1] != _NEWLINE


def judge_content(
    request: pb.AppendRequest, spec: pb.JournalSpec, length: int, registers: pb.LabelSet, refusal: str = ""
) -> Refuse | None:
    """Return the refusal of this append's content, or None.

    `length` is the length of the whole append or of a non-empty part. `registers` and `refusal` are the snapshot's.
    Raises InvalidInput for an append without content that changes registers.
    """
    if not length:
        if of_registers.change(request):
            raise InvalidInput("registers change only with content: append at least one byte", field="union_registers")
        return None
    # Appends that suspend, or keep a suspension, must be empty.
    resumes = request.suspend in (pb.AppendRequest.SUSPEND_RESUME, pb.AppendRequest.SUSPEND_NO_RESUME)
    if not resumes or not may_write(spec):
        return Refuse(pb.NOT_ALLOWED, registers)
    return Refuse(pb.INSUFFICIENT_JOURNAL_BROKERS, registers, refusal) if refusal else None


def next_fragment(committed: CommittedState, roll_to: int, spec: pb.JournalSpec.Fragment, now: float) -> Fragment:
    """Return the spool's fragment or, if a roll is due, an empty one at its end or at `roll_to`, whichever is greater.

    A roll is due if the fragment is empty (to adopt a changed codec), is longer than the spec's length, does not begin
    at `roll_to` (unless that is 0), or had its first append in an earlier flush interval. Intervals are counted from
    the epoch, in UTC. `now` is wall time in seconds.
    """
    current = committed.fragment
    interval = spec.flush_interval.ToSeconds()
    due = (
        current.length == 0
        or current.length > spec.length
        or (roll_to != 0 and roll_to != current.begin)
        or (interval > 0 and int(committed.first_append_time) // interval != int(now) // interval)
    )
    if not due:
        return current
    return empty_at(current, max(roll_to, current.end), Codec(spec.compression_codec))


def is_plain(request: pb.AppendRequest) -> bool:
    """Return True if an append names its journal and sets no header, condition, offset, register or suspension."""
    return len(request.ListFields()) == 1 + request.do_not_proxy + (request.min_etcd_revision != 0)


def steady(snapshot: JournalSnapshot) -> Steady | None:
    """Return the range where every plain append commits without a roll, or None if the next one would not."""
    spec, fragment, known, now = snapshot.spec, snapshot.committed.fragment, snapshot.known, snapshot.now
    if not fragment.length or known.empty:
        return None  # The next append may roll, because it is the first known content.
    if decide(_PLAIN, snapshot, b"\n") != Commit(snapshot.committed.registers):
        return None
    interval = spec.fragment.flush_interval.ToSeconds()
    until = (int(now) // interval + 1) * interval if interval > 0 else math.inf
    return Steady(fragment.begin, fragment.begin + spec.fragment.length, until)


def apply_registers(request: pb.AppendRequest, registers: pb.LabelSet) -> pb.LabelSet | None:
    """Return the registers after an append with content in a steady range, or None if `decide` must decide it."""
    if is_plain(request):
        return registers
    if request.offset or request.at_start or request.suspend or not of_registers.match(request, registers):
        return None
    try:
        return of_registers.after(request, registers)
    except InvalidInput:
        return None


_PLAIN: Final = pb.AppendRequest()


def _check(request: pb.AppendRequest, snapshot: JournalSnapshot) -> Refuse | Synchronize | ChangeSuspension | int:
    """Check registers, offset and suspension, in this order. Return the offset to roll to (0: no roll).

    An index beyond the spool's end means that consistency was lost. Then only an append with that explicit offset may
    continue: with it an operator confirms that no earlier broker still holds content. Journals that cannot be written
    to are exempt, unless the check of registers is strict.
    """
    spec, fragment, known = snapshot.spec, snapshot.committed.fragment, snapshot.known
    present = snapshot.committed.registers
    if not of_registers.match(request, present):
        return Refuse(pb.REGISTER_MISMATCH, present)
    if fragment.end < spec.suspend.offset:
        return Synchronize(spec.suspend.offset)
    head = max(fragment.end, known.end)
    if request.at_start and head:
        return Refuse(pb.WRONG_APPEND_OFFSET, present)
    if request.offset:
        if request.offset != head:
            return Refuse(pb.WRONG_APPEND_OFFSET, present)
        if fragment.end != head:
            return Synchronize(head)
    elif fragment.end != head and (may_write(spec) or of_registers.is_strict(request)):
        return Refuse(pb.INDEX_HAS_GREATER_OFFSET, present)
    suspension = _check_suspension(request, snapshot)
    if suspension is not None:
        return suspension
    # The journal's first known content is stored early, so that brokers that recover from lost consistency see that
    # this is not a new journal.
    return fragment.end if fragment.begin == known.begin else 0


def _check_suspension(request: pb.AppendRequest, snapshot: JournalSnapshot) -> Refuse | ChangeSuspension | None:
    """Check the request's suspend mode for a journal that is not fully suspended. Return None to continue."""
    spec, known, registers = snapshot.spec, snapshot.known, snapshot.committed.registers
    end, suspended = snapshot.committed.fragment.end, spec.suspend.level != Suspend.NONE
    if request.suspend == pb.AppendRequest.SUSPEND_RESUME:
        return ChangeSuspension(Suspend(level=Suspend.NONE, offset=end)) if suspended else None
    if request.suspend == pb.AppendRequest.SUSPEND_NO_RESUME:
        return Refuse(pb.SUSPENDED, registers) if suspended else None
    if request.suspend == pb.AppendRequest.SUSPEND_KEEP:
        return None
    if known.empty and not snapshot.committed.fragment.length:  # The index lacks unacknowledged content.
        return ChangeSuspension(Suspend(level=Suspend.FULL, offset=end))
    if suspended:
        return Refuse(pb.SUSPENDED, registers)
    # A journal without an append for a whole flush interval is idle.
    idle_since = snapshot.now - (spec.fragment.flush_interval.ToSeconds() or DEFAULT_FLUSH_SECONDS)
    if request.suspend == pb.AppendRequest.SUSPEND_NOW or 0 < known.flushed_at <= idle_since:
        # The roll completes the local fragment, which is then stored.
        return ChangeSuspension(Suspend(level=Suspend.PARTIAL, offset=end), _roll(snapshot, end))
    return None


def _roll(snapshot: JournalSnapshot, roll_to: int) -> Fragment | None:
    """Return the fragment that must begin first, or None if the current one continues."""
    found = next_fragment(snapshot.committed, roll_to, snapshot.spec.fragment, snapshot.now)
    return found if found != snapshot.committed.fragment else None
