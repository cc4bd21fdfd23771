"""Files of histories: of single processes, to be merged, and in the formats of external checkers.

* JSON lines, one per operation, in order of invocation: for Porcupine, with the model in `docs/verification.md`.
* EDN lines, two per operation, as in Jepsen: for Elle's checker of appends to lists.

For Porcupine, unknown outcomes are resolved from the final content: an append was applied if and where the content has
it. For Elle, they stay unknown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from google.protobuf import json_format

from coranto.errors import CorruptData
from coranto.testing.histories import History, Operation, OperationKind, OperationOutcome, numbers_in
from coranto.wire import protocol_pb2 as pb

NEVER: Final = (1 << 63) - 1
"""The time of return, in nanoseconds, of an operation that did not return."""
_UNKNOWN: Final = (OperationOutcome.INFO, OperationOutcome.OPEN)


def write_history(history: History, path: Path) -> None:
    """Write a history to a file. `read_histories` merges the files of several processes of one machine."""
    path.write_text("".join(json.dumps(_plain(each)) + "\n" for each in history.operations))


def read_histories(paths: Iterable[Path]) -> History:
    """Return the merged history of files. Raises CorruptData for an invalid line, or a number that occurs twice."""
    merged = History()
    numbers: set[int] = set()
    for path in paths:
        for line in path.read_text().splitlines():
            try:
                operation = _operation(json.loads(line))
            except (ValueError, KeyError, json_format.ParseError) as error:
                raise CorruptData(f"{path} has a line that is not an operation: {line[:80]!r}") from error
            if operation.number in numbers:
                raise CorruptData(
                    f"{path} has operation {operation.number}, as another file does: give each process's History "
                    "another `first`"
                )
            numbers.add(operation.number)
            merged.operations.append(operation)
    merged.operations.sort(key=lambda each: each.invoked)
    return merged


def porcupine_lines(history: History, contents: Mapping[str, bytes]) -> Iterator[str]:
    """Yield the operations that Porcupine checks, as JSON. `contents` is the final content of each journal.

    Fields: `journal`, `client`, `kind`, `call` and `return` (nanoseconds), `size`, `offset`, `check`, `union`,
    `subtract`, `refusal`, `begin`, and `registers` (null if unknown). Refusals that returned after the invocation of a
    journal's first unapplied append of unknown outcome are left out: that append may have caused them. Raises
    InvalidInput for content that is not a list of whole appends.
    """
    places = {journal: dict(reversed(numbers_in(content))) for journal, content in contents.items()}
    unapplied = dict.fromkeys(contents, math.inf)
    for each in history.operations:
        if _is_unapplied(each, places):
            unapplied[each.journal] = min(unapplied[each.journal], each.invoked)
    for each in sorted(history.operations, key=lambda each: each.invoked):
        if each.journal not in places or each.kind is OperationKind.HEAD or _is_unapplied(each, places):
            continue
        is_applied = each.outcome is OperationOutcome.OK
        refusal = pb.Status.Name(each.refusal) if each.refusal else ""
        begin = each.begin
        if each.kind is OperationKind.APPEND and each.outcome in _UNKNOWN:
            begin, is_applied = places[each.journal][each.number], True
        elif not is_applied and (
            refusal not in ("REGISTER_MISMATCH", "WRONG_APPEND_OFFSET") or each.returned >= unapplied[each.journal]
        ):
            continue
        yield json.dumps(
            {
                "journal": each.journal,
                "client": each.client,
                "kind": each.kind.value,
                "call": _nanoseconds(each.invoked),
                "return": _nanoseconds(each.returned if each.outcome not in _UNKNOWN else math.inf),
                "size": len(each.content) if each.kind is OperationKind.APPEND else 0,
                "offset": each.offset,
                "check": _message(each.check),
                "union": _message(each.union),
                "subtract": _message(each.subtract),
                "refusal": "" if is_applied else refusal,
                "begin": begin,
                "registers": _message(each.registers),
            }
        )


def elle_lines(history: History) -> Iterator[str]:
    """Yield a history of appends to lists and reads of lists, for Elle: each journal is a list of append numbers.

    Reads are linearizable, so the model is `strict-serializable`. Raises InvalidInput for a read of content that is not
    a list of whole appends.
    """
    events: list[tuple[float, int, str, Operation]] = []
    for each in history.operations:
        if each.kind in (OperationKind.APPEND, OperationKind.READ):
            outcome = OperationOutcome.INFO if each.outcome is OperationOutcome.OPEN else each.outcome
            # At equal times, returns come last, so that the calls count as concurrent.
            events.append((each.invoked, 0, "invoke", each))
            events.append((each.returned, 1, outcome.value, each))
    events.sort(key=lambda event: event[:2])
    processes: dict[int, int] = {}
    idle: list[int] = []
    known = 0
    for index, (at, _, kind, each) in enumerate(events):
        if kind == "invoke":
            if not idle:
                idle.append(known)
                known += 1
            processes[each.number] = idle.pop()
        process = processes[each.number]
        if kind not in ("invoke", "info"):  # In Jepsen a process ends with an unknown outcome.
            idle.append(process)
        journal = json.dumps(each.journal)
        if each.kind is OperationKind.APPEND:
            value = f"[:append {journal} {each.number}]"
        elif kind == "ok":
            value = f"[:r {journal} [{' '.join(str(number) for number, _ in numbers_in(each.content))}]]"
        else:
            value = f"[:r {journal} nil]"
        event = f":index {index}, :time {_nanoseconds(at)}, :process {process}, :type :{kind}"
        yield f"{{{event}, :f :txn, :value [{value}]}}"


def _is_unapplied(operation: Operation, places: Mapping[str, Mapping[int, int]]) -> bool:
    """Return True for an append of unknown outcome that is not in the final content."""
    is_unknown = operation.kind is OperationKind.APPEND and operation.outcome in _UNKNOWN
    return is_unknown and operation.number not in places.get(operation.journal, ())


def _nanoseconds(seconds: float) -> int:
    return NEVER if math.isinf(seconds) else round(seconds * 1e9)


def _message(message: pb.LabelSet | pb.LabelSelector | None) -> dict[str, Any] | None:
    return None if message is None else json_format.MessageToDict(message, preserving_proto_field_name=True)


def _plain(operation: Operation) -> dict[str, Any]:
    return {
        "number": operation.number,
        "client": operation.client,
        "kind": operation.kind.value,
        "journal": operation.journal,
        "invoked": operation.invoked,
        "returned": None if math.isinf(operation.returned) else operation.returned,
        "content": operation.content.decode("latin-1"),
        "offset": operation.offset,
        "check": _message(operation.check),
        "union": _message(operation.union),
        "subtract": _message(operation.subtract),
        "outcome": operation.outcome.value,
        "begin": operation.begin,
        "end": operation.end,
        "registers": _message(operation.registers),
        "refusal": int(operation.refusal),
        "error": operation.error,
    }


def _operation(fields: dict[str, Any]) -> Operation:
    def registers(name: str) -> pb.LabelSet | None:
        return None if fields[name] is None else json_format.ParseDict(fields[name], pb.LabelSet())

    return Operation(
        fields["number"],
        fields["client"],
        OperationKind(fields["kind"]),
        fields["journal"],
        fields["invoked"],
        content=fields["content"].encode("latin-1"),
        offset=fields["offset"],
        check=None if fields["check"] is None else json_format.ParseDict(fields["check"], pb.LabelSelector()),
        union=registers("union"),
        subtract=registers("subtract"),
        outcome=OperationOutcome(fields["outcome"]),
        returned=math.inf if fields["returned"] is None else fields["returned"],
        begin=fields["begin"],
        end=fields["end"],
        registers=registers("registers"),
        refusal=pb.Status.ValueType(fields["refusal"]),
        error=fields["error"],
    )
