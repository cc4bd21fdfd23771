"""The check of clients' observations, and of the content of replicas and stores, against a correct journal.

`check` takes a history, the final content of every journal, and the content of replicas and stores after all faults
have ended. It returns anomalies, named as in Jepsen's catalogue for Kafka where possible:

========================  ==========================================================================================
lost-write                an acknowledged append is not in the journal
inconsistent-offsets      an acknowledged append is not at its acknowledged offset, or an offset had different bytes
                          at different times or places: no reader may see an append that does not commit
aborted-read              (G1a) an append that failed or was abandoned is in the journal
duplicate                 an append is in the journal twice
torn-append               a part of an append is in the journal, or content of no append
register-drift            registers after an append do not follow from the appends up to it
unchecked-registers       an append was accepted against registers that do not satisfy it
misplaced-append          an append with an explicit offset was accepted at another one
not-linearizable          no order of the calls explains all answers
stale-head                a write head below an append that was acknowledged before the call for the head
future-head               a write head above all appends begun so far
diverged-replica          a replica has other bytes than the journal
diverged-fragment         a stored fragment has other bytes than the journal
corrupt-fragment          a stored fragment disagrees with its own name
fragment-gap              stored fragments do not cover the journal
========================  ==========================================================================================

Unknown outcomes are resolved from the final content first: an append that is there was applied, any other was not.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from coranto import labels
from coranto.errors import CorruptFragment
from coranto.fragments.fragment import Fragment
from coranto.fragments.stores import verified_content
from coranto.testing.histories import HEADER, History, Observation, Operation, OperationKind, OperationOutcome
from coranto.wire import protocol_pb2 as pb
from tests.simulation.kit.linearizability import Call, first_impossible


@dataclass(frozen=True, slots=True)
class Anomaly:
    name: str
    journal: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name} in {self.journal}: {self.detail}"


@dataclass(slots=True)
class FinalJournal:
    content: bytes
    registers: pb.LabelSet | None = None
    replicas: list[Observation] = field(default_factory=list)
    """Content of single replicas, in memory and on disks."""
    fragments: list[tuple[Fragment, bytes]] = field(default_factory=list)
    """Objects in the store, as stored."""
    fully_stored: bool = False
    """True if all content must be in the store. Otherwise a broker may still have to store an earlier fragment."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """An append and its place in the final content."""

    operation: Operation
    begin: int
    end: int


def check(history: History, finals: Mapping[str, FinalJournal], *, fresh_heads: bool = True) -> list[Anomaly]:
    """Return all anomalies. With `fresh_heads`, a head that lags behind acknowledged appends is an anomaly.

    Brokers that were cut off from etcd, or paused, may serve such heads until they detect it.
    """
    found: list[Anomaly] = []
    for journal, final in finals.items():
        operations = [operation for operation in history.operations if operation.journal == journal]
        observations = [each for each in history.observations if each.journal == journal]
        observations += [
            Observation(each.client, journal, 0, each.content, each.returned)
            for each in operations
            if each.kind is OperationKind.READ and each.outcome is OperationOutcome.OK
        ]
        found += _check_journal(journal, final, operations, observations, fresh_heads)
    return found


def _check_journal(
    journal: str, final: FinalJournal, operations: Sequence[Operation], observations: Sequence[Observation], fresh: bool
) -> Iterable[Anomaly]:
    placed, found = _parse(journal, final.content, {operation.number: operation for operation in operations})
    found += _check_outcomes(journal, placed, operations, len(final.content))
    found += _check_bytes(journal, final, observations)
    registers, drift = _replay_registers(journal, placed, final)
    found += drift
    if not found:
        # The order of appends is known. All answers must be consistent with it.
        found += _check_order(journal, placed, operations, registers)
        found += _check_heads(journal, placed, operations, fresh)
    found += _check_fragments(journal, final)
    return found


def _parse(journal: str, content: bytes, operations: Mapping[int, Operation]) -> tuple[list[_Placed], list[Anomaly]]:
    """Split the content into appends. Return them, and an anomaly for any other content."""
    placed: list[_Placed] = []
    found: list[Anomaly] = []
    position = 0
    while position < len(content):
        match = HEADER.match(content, position)
        operation = operations.get(int(match[1])) if match else None
        if operation is not None and content.startswith(operation.content, position) and operation.content:
            end = position + len(operation.content)
            placed.append(_Placed(operation, position, end))
            position = end
            continue
        following = HEADER.search(content, position + 1)
        end = following.start() if following else len(content)
        whose = f"a part of {operation}" if operation is not None else "content of no append"
        found.append(Anomaly("torn-append", journal, f"[{position}, {end}) is {whose}"))
        position = end
    return placed, found


def _check_outcomes(
    journal: str, placed: Sequence[_Placed], operations: Sequence[Operation], length: int
) -> list[Anomaly]:
    found: list[Anomaly] = []
    places: dict[int, list[_Placed]] = {}
    for each in placed:
        places.setdefault(each.operation.number, []).append(each)
    for operation in operations:
        at = places.get(operation.number, [])
        if operation.kind is not OperationKind.APPEND:
            continue
        if len(at) > 1:
            where = ", ".join(f"[{each.begin}, {each.end})" for each in at)
            found.append(Anomaly("duplicate", journal, f"{operation} is at {where}"))
        if operation.outcome is OperationOutcome.OK and not at:
            found.append(Anomaly("lost-write", journal, f"{operation} is gone; the journal ends at {length}"))
        elif operation.outcome is OperationOutcome.OK and all(
            (operation.begin, operation.end) != (each.begin, each.end) for each in at
        ):
            found.append(Anomaly("inconsistent-offsets", journal, f"{operation} is at [{at[0].begin}, {at[0].end})"))
        elif operation.outcome is OperationOutcome.FAIL and at:
            found.append(Anomaly("aborted-read", journal, f"{operation} is at [{at[0].begin}, {at[0].end})"))
        if at and operation.offset and at[0].begin != operation.offset:
            found.append(Anomaly("misplaced-append", journal, f"{operation} requested offset {operation.offset}"))
    return found


def _unapplied(placed: Sequence[_Placed], operations: Sequence[Operation]) -> dict[int, Operation]:
    """Return the appends of unknown outcome that are not in the journal, by number."""
    applied = {each.operation.number for each in placed}
    return {each.number: each for each in operations if _is_unapplied(each, applied)}


def _check_bytes(journal: str, final: FinalJournal, observations: Sequence[Observation]) -> list[Anomaly]:
    found = [
        Anomaly("inconsistent-offsets", journal, f"{each.by} read at {each.at:.3f} {_difference(each, final.content)}")
        for each in observations
        if not _agrees(each, final.content)
    ]
    found += [
        Anomaly("diverged-replica", journal, f"{each.by} has {_difference(each, final.content)}")
        for each in final.replicas
        if not _agrees(each, final.content)
    ]
    return found


def _agrees(seen: Observation, content: bytes) -> bool:
    return content[seen.offset : seen.offset + len(seen.content)] == seen.content


def _difference(seen: Observation, content: bytes) -> str:
    truth = content[seen.offset : seen.offset + len(seen.content)]
    at = next((i for i, (a, b) in enumerate(zip(seen.content, truth, strict=False)) if a != b), len(truth))
    return (
        f"[{seen.offset}, {seen.offset + len(seen.content)}), which differs from offset {seen.offset + at} on: "
        f"{seen.content[at : at + 24]!r} instead of {truth[at : at + 24]!r}"
    )


def _replay_registers(
    journal: str, placed: Sequence[_Placed], final: FinalJournal
) -> tuple[list[pb.LabelSet], list[Anomaly]]:
    """Return the registers before each append and, last, after all of them, and anomalies where answers disagree."""
    registers = pb.LabelSet()
    timeline = [registers]
    found: list[Anomaly] = []
    for each in placed:
        operation = each.operation
        if operation.check is not None and registers.labels and not labels.matches(operation.check, registers):
            found.append(Anomaly("unchecked-registers", journal, f"{operation} with registers {_text(registers)}"))
        registers = after(registers, operation)
        timeline.append(registers)
        if operation.outcome is OperationOutcome.OK and operation.registers != registers:
            found.append(
                Anomaly(
                    "register-drift",
                    journal,
                    f"{operation} answered {_text(operation.registers)} instead of {_text(registers)}",
                )
            )
    if final.registers is not None and final.registers != registers:
        found.append(
            Anomaly("register-drift", journal, f"at the end {_text(final.registers)} instead of {_text(registers)}")
        )
    return timeline, found


def after(registers: pb.LabelSet, operation: Operation) -> pb.LabelSet:
    """Return the registers after an append: subtracted ones are removed first, then united ones override others."""
    if operation.subtract is not None:
        registers = labels.subtract(registers, operation.subtract)
    if operation.union is not None:
        registers = labels.union(operation.union, registers)
    return registers


def _text(registers: pb.LabelSet | None) -> str:
    if registers is None:
        return "none"
    return "{" + ", ".join(f"{label.name}={label.value}" for label in registers.labels) + "}"


def _check_order(
    journal: str, placed: Sequence[_Placed], operations: Sequence[Operation], registers: Sequence[pb.LabelSet]
) -> list[Anomaly]:
    """Check linearizability. The state is the number of applied appends, which determines head and registers.

    Some refusals are not checked: they may be due to an earlier append that was in progress and then did not commit.
    """
    applied = {each.operation.number for each in placed}
    unapplied = min((each.invoked for each in operations if _is_unapplied(each, applied)), default=float("inf"))
    tails = [0, *(each.end for each in placed)]
    calls = [_append_call(index, each.operation) for index, each in enumerate(placed)]
    for operation in operations:
        possible: set[int] | None = None
        if operation.kind in (OperationKind.BARRIER, OperationKind.READ) and operation.outcome is OperationOutcome.OK:
            possible = {
                index
                for index, tail in enumerate(tails)
                if tail == operation.begin and registers[index] == operation.registers
            }
        elif operation.kind is not OperationKind.HEAD and operation.refusal == pb.REGISTER_MISMATCH:
            check = operation.check
            possible = {
                index
                for index, found in enumerate(registers)
                if found == operation.registers and check is not None and not labels.matches(check, found)
            }
        elif operation.kind is not OperationKind.HEAD and operation.refusal == pb.WRONG_APPEND_OFFSET:
            possible = {index for index, tail in enumerate(tails) if tail != operation.offset}
        if possible is not None and (operation.outcome is OperationOutcome.OK or operation.returned < unapplied):
            calls.append(_look_call(possible, operation))
    impossible = first_impossible(0, calls)
    return [Anomaly("not-linearizable", journal, impossible.label)] if impossible is not None else []


def _is_unapplied(operation: Operation, applied: set[int]) -> bool:
    unknown = operation.outcome in (OperationOutcome.INFO, OperationOutcome.OPEN)
    return unknown and operation.kind is OperationKind.APPEND and operation.number not in applied


def _append_call(index: int, operation: Operation) -> Call:
    def step(state: Hashable) -> Hashable | None:
        return index + 1 if state == index else None

    returned = operation.returned if operation.outcome is OperationOutcome.OK else float("inf")
    return Call(operation.invoked, returned, step, str(operation))


def _look_call(possible: set[int], operation: Operation) -> Call:
    def step(state: Hashable) -> Hashable | None:
        return state if state in possible else None

    return Call(operation.invoked, operation.returned, step, str(operation))


def _check_heads(
    journal: str, placed: Sequence[_Placed], operations: Sequence[Operation], fresh: bool
) -> list[Anomaly]:
    """Check heads. Any replica may report one. It may be ahead of acknowledgements, but not behind."""
    found: list[Anomaly] = []
    acknowledged = [
        (each.operation.returned, each.end) for each in placed if each.operation.outcome is OperationOutcome.OK
    ]
    begun = [(each.operation.invoked, each.end) for each in placed]
    # A single replica may include appends that did not commit, beyond any other replica.
    unapplied = [(each.invoked, len(each.content)) for each in _unapplied(placed, operations).values()]
    for operation in operations:
        if operation.kind is not OperationKind.HEAD or operation.outcome is not OperationOutcome.OK:
            continue
        low = max((end for at, end in acknowledged if at < operation.invoked), default=0)
        high = max((end for at, end in begun if at <= operation.returned), default=0)
        high += sum(length for at, length in unapplied if at <= operation.returned)
        if fresh and operation.begin < low:
            found.append(Anomaly("stale-head", journal, f"{operation}, but {low} had been acknowledged"))
        if operation.begin > high:
            found.append(Anomaly("future-head", journal, f"{operation}, but no append was beyond {high}"))
    return found


def _check_fragments(journal: str, final: FinalJournal) -> list[Anomaly]:
    found: list[Anomaly] = []
    covered = 0
    for fragment, data in sorted(final.fragments, key=lambda each: (each[0].begin, each[0].end)):
        try:
            content = verified_content(fragment, data, source="the store")
        except CorruptFragment as error:
            found.append(Anomaly("corrupt-fragment", journal, str(error)))
            continue
        seen = Observation(f"fragment {fragment.content_name}", journal, fragment.begin, content, 0.0)
        if not _agrees(seen, final.content):
            found.append(Anomaly("diverged-fragment", journal, f"{seen.by}: {_difference(seen, final.content)}"))
        if final.fully_stored and fragment.begin > covered:
            found.append(Anomaly("fragment-gap", journal, f"nothing stored covers [{covered}, {fragment.begin})"))
        covered = max(covered, fragment.end)
    if final.fully_stored and covered < len(final.content):
        found.append(Anomaly("fragment-gap", journal, f"nothing stored covers [{covered}, {len(final.content)})"))
    return found
