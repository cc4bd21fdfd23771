"""Preconditions of appends and ends of fragments: pure decisions of the primary.

`check` is the pure part of the state "validate preconditions" (seed 001). `propose` chooses the fragment that the
pipeline should work on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coranto import labels
from coranto.errors import InvalidInput
from coranto.fragments.fragment import Codec, Fragment
from coranto.specs.validation import may_write
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments.index_summary import IndexSummary
from coranto_broker.spool.spool import CommittedState, empty_at

Suspend = pb.JournalSpec.Suspend
DEFAULT_FLUSH_SECONDS = 24 * 60 * 60

MAX_REGISTERS_BYTES: Final = 64 << 10
"""Largest encoded size of a journal's registers. Every proposal and every record of a commit log holds all of them.

A stream's segment with 64 writers and all of its fences takes less than half of that.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking the preconditions.

    With a `status` other than OK, the append ends. With `resync`, the pipeline must be synchronized again, rolled to
    `roll_to`. With `suspend`, the spool is rolled to `roll_to`, and then the journal's suspension is changed. Otherwise
    content may stream, after a roll to `roll_to` (0: no roll).
    """

    status: pb.Status.ValueType = pb.OK
    roll_to: int = 0
    resync: bool = False
    suspend: pb.JournalSpec.Suspend | None = None


GO: Final = Verdict()
"""Content may stream to the present fragment."""


def check(
    request: pb.AppendRequest, spec: pb.JournalSpec, spool: CommittedState, known: IndexSummary, now: float
) -> Verdict:
    """Check an append against the synchronized spool and all known fragments. `now` is wall time in seconds.

    An index that reaches beyond the spool means that consistency was lost. Then only an append with that explicit
    offset may go on: by it an operator confirms that no earlier broker can still hold content. Journals that cannot be
    written to are exempt, because nothing can be written twice there. Strict checks of registers have no exemption.
    """
    strict = is_strict(request)
    if not registers_match(request, spool.registers):
        return Verdict(pb.REGISTER_MISMATCH)
    if spool.fragment.end < spec.suspend.offset:
        return Verdict(roll_to=spec.suspend.offset, resync=True)
    head = max(spool.fragment.end, known.end)
    if request.offset:
        if request.offset != head:
            return Verdict(pb.WRONG_APPEND_OFFSET)
        if spool.fragment.end != head:
            return Verdict(roll_to=head, resync=True)
    elif spool.fragment.end != head and (may_write(spec) or strict):
        return Verdict(pb.INDEX_HAS_GREATER_OFFSET)
    suspension = _check_suspension(request, spec, spool, known, now)
    if suspension is not None:
        return suspension
    if spool.fragment.begin == known.begin:
        # The journal's first known content goes to the store early. Brokers that recover from lost consistency then
        # see in the store that this is not a new journal.
        return Verdict(roll_to=spool.fragment.end)
    return GO


def registers_match(request: pb.AppendRequest, registers: pb.LabelSet) -> bool:
    """Return True if the registers match the append's selector. Empty registers match unless the append is strict."""
    if not request.HasField("check_registers"):
        return True
    return not (registers.labels or is_strict(request)) or labels.matches(request.check_registers, registers)


def is_strict(request: pb.AppendRequest) -> bool:
    """Return True if the append's check includes the register `labels.HELD`, and so fails on lost registers.

    Lost registers are empty. Empty registers pass every other check.
    """
    if not request.HasField("check_registers"):
        return False
    return any(label.name == labels.HELD for label in request.check_registers.include.labels)


def may_have_content(request: pb.AppendRequest) -> bool:
    """Return True if the append may have content. One that suspends, or keeps a suspension, may not."""
    return request.suspend in (pb.AppendRequest.SUSPEND_RESUME, pb.AppendRequest.SUSPEND_NO_RESUME)


def _check_suspension(
    request: pb.AppendRequest, spec: pb.JournalSpec, spool: CommittedState, known: IndexSummary, now: float
) -> Verdict | None:
    """Return the verdict on the request's suspend mode for a journal that is not fully suspended; None to go on."""
    level, end = spec.suspend.level, spool.fragment.end
    suspended = level != Suspend.NONE
    if request.suspend == pb.AppendRequest.SUSPEND_RESUME:
        return Verdict(suspend=Suspend(level=Suspend.NONE, offset=end)) if suspended else None
    if request.suspend == pb.AppendRequest.SUSPEND_NO_RESUME:
        return Verdict(pb.SUSPENDED) if suspended else None
    if request.suspend == pb.AppendRequest.SUSPEND_KEEP:
        return None
    if known.empty:
        return Verdict(suspend=Suspend(level=Suspend.FULL, offset=end))
    if suspended:
        return Verdict(pb.SUSPENDED)
    # A journal without an append for a whole flush interval is idle.
    idle_since = now - (spec.fragment.flush_interval.ToSeconds() or DEFAULT_FLUSH_SECONDS)
    if request.suspend == pb.AppendRequest.SUSPEND_NOW or 0 < known.flushed_at <= idle_since:
        return Verdict(suspend=Suspend(level=Suspend.PARTIAL, offset=end), roll_to=end)
    return None


def propose(spool: CommittedState, roll_to: int, fragment_spec: pb.JournalSpec.Fragment, now: float) -> Fragment:
    """Return the spool's fragment or, if a roll is due, an empty one at its end or at `roll_to`, whichever is greater.

    A roll is due when the fragment is empty (so that it adopts a changed codec), is longer than the spec's length, does
    not begin at `roll_to` (unless that is 0), or had its first append in an earlier flush interval. Intervals are
    counted from the epoch, in UTC. `now` is wall time in seconds.
    """
    current = spool.fragment
    interval = fragment_spec.flush_interval.ToSeconds()
    due = (
        current.length == 0
        or current.length > fragment_spec.length
        or (roll_to != 0 and roll_to != current.begin)
        or (interval > 0 and int(spool.first_append_time) // interval != int(now) // interval)
    )
    if not due:
        return current
    return empty_at(current, max(roll_to, current.end), Codec(fragment_spec.compression_codec))


def foresee(request: pb.AppendRequest, registers: pb.LabelSet) -> pb.LabelSet | None:
    """Return the registers after an append that checks some of them by name and value and replaces one's value.

    Writers of streams do this all the time. So one pass checks that the append is well-formed, matches the registers,
    and computes the new ones. None means that the append is of another form or does not match; it may still be valid.
    """
    check, replacements = request.check_registers, request.union_registers.labels
    if len(replacements) != 1 or check.exclude.labels or request.content or request.HasField("subtract_registers"):
        return None
    new = replacements[0]
    replaced, place, last = new.name, -1, ""
    asked = iter(check.include.labels)
    wanted = next(asked, None)
    for index, label in enumerate(registers.labels):
        name = label.name
        if name == last:
            return None  # It has several values.
        last = name
        if wanted is not None and name == wanted.name:
            if wanted.value and wanted.value != label.value:
                return None
            wanted = next(asked, None)
        if name == replaced:
            place = index
    if wanted is not None or place < 0 or new.prefix or not labels.is_plain_value(new.value):
        return None
    result = pb.LabelSet()
    result.CopyFrom(registers)
    result.labels[place].value = new.value
    if len(new.value) > len(registers.labels[place].value) and outgrown(registers, result) is not None:
        return None
    return result


def next_registers(registers: pb.LabelSet, request: pb.AppendRequest) -> pb.LabelSet:
    """Return the registers once the append commits: subtract first, then union, which wins over existing values."""
    if request.HasField("subtract_registers"):
        registers = labels.subtract(registers, request.subtract_registers)
    if request.HasField("union_registers"):
        registers = labels.union(request.union_registers, registers)
    return registers


def outgrown(before: pb.LabelSet, after: pb.LabelSet) -> InvalidInput | None:
    """Return the error of an append that makes the registers too large, or None.

    Registers that are too large already, from an earlier version, may stay as they are or shrink.
    """
    if after is before:
        return None
    size = after.ByteSize()
    if size <= MAX_REGISTERS_BYTES or size <= before.ByteSize():
        return None
    return InvalidInput(
        f"the journal's registers would take {size} bytes, which is more than {MAX_REGISTERS_BYTES}; "
        "subtract registers that are not needed any more, or keep such data in the journal's content",
        field="union_registers",
    )
