"""Numbered batches: multi-key transactions of a named writer, each decided once, with a record of its progress.

A register of the journal of decisions holds the number of the writer's last batch, as for bulk transactions:

    `coranto.dev/batch/<writer>`     =  `<number>.<transaction>`
    `coranto.dev/progress/<writer>`  =  an offset at or before the writer's last complete record of progress
    `coranto.dev/turn/<writer>`      =  `<number>.<process>.<nonce>`, if processes take turns

The decision, the record of progress and the registers are one append, on the condition that the first register is as
the writer read it. So of several processes that decide the same number one wins, and a process that continues the
writer reads the record of the winner. The same append is repeated if its answer is lost, because it can be applied only
once. A numbered batch is never voided: the register would count a transaction that is not committed.

Each loser of such a race leaves a producer id, which readers remember. So processes that always compete take turns: one
announces the next batch first, and others wait for it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from coranto import labels
from coranto.errors import CorruptData, RegisterMismatch
from coranto.streams.control.decisions import GATE_LABEL, Decisions, Gate
from coranto.streams.model.batch_content import BATCH_REGISTER
from coranto.streams.model.stream import HELD_LABEL
from coranto.wire import protocol_pb2 as pb

PROGRESS_REGISTER: Final = "coranto.dev/progress/"
TURN_REGISTER: Final = "coranto.dev/turn/"
PROGRESS: Final = "progress"
"""The field of a record of progress that has the writer's name."""
_VALUE: Final = re.compile(r"(\d{1,18})\.[0-9a-f]{1,64}")


@dataclass(frozen=True, slots=True)
class LastBatch:
    """The last batch of a writer that is decided and carried out. `number` is 0, and `value` empty, before the first.

    The writer's progress can be read from [begin, end) of the journal of decisions. Acknowledgements are missing unless
    the batch is `visible`. `turn` is the value of the turn register when it was read.
    """

    number: int
    value: str
    begin: int
    end: int
    visible: bool = True
    turn: str = ""


@dataclass(frozen=True, slots=True)
class NumberedBatch:
    """The next batch of a writer, after `previous`.

    `record` is stored with the decision; it `is_complete` if no earlier record is needed. `letters` are messages for
    the stream's journal of dead letters, in the same transaction. With `in_turn`, it is decided only if no other
    process has taken a turn since `previous` was read.
    """

    writer: str
    previous: LastBatch
    record: Mapping[str, object]
    is_complete: bool = False
    letters: Sequence[Mapping[str, object]] = ()
    in_turn: bool = False

    @property
    def number(self) -> int:
        return self.previous.number + 1

    @property
    def register(self) -> str:
        return BATCH_REGISTER + self.writer

    def before(self) -> dict[str, str]:
        """Return the registers that must be unchanged since the writer read them."""
        turn = {TURN_REGISTER + self.writer: self.previous.turn} if self.in_turn else {}
        return {self.register: self.previous.value, **turn}

    def value(self, txn: str) -> str:
        """Return the register's value once the batch is decided by this transaction."""
        return f"{self.number}.{txn}"

    def after(self, txn: str, begin: int) -> dict[str, str]:
        """Return the registers to set. No record of the batch is before the offset `begin`."""
        registers = {self.register: self.value(txn)}
        if self.is_complete:
            registers[PROGRESS_REGISTER + self.writer] = str(begin)
        return registers

    def decided(self, txn: str, end: int, *, visible: bool) -> LastBatch:
        """Return the writer's last batch once this one is decided."""
        return LastBatch(self.number, self.value(txn), self.previous.begin, end, visible, self.previous.turn)

    def line(self) -> dict[str, object]:
        """Return the record as it is stored in the journal of decisions."""
        return {PROGRESS: self.writer, "batch": self.number, "complete": self.is_complete, **self.record}


def last_batch_of(gate: Gate, writer: str) -> LastBatch:
    """Return the last batch of a writer from the registers of the journal of decisions. Raises CorruptData."""
    value, turn = (labels.value_of(gate.registers, each + writer) for each in (BATCH_REGISTER, TURN_REGISTER))
    if not value:
        return LastBatch(0, "", 0, gate.end, turn=turn)
    found, begin = _VALUE.fullmatch(value), labels.value_of(gate.registers, PROGRESS_REGISTER + writer)
    if found is None or not begin.isdecimal():
        raise CorruptData(
            f"the registers of batches of {writer} are {value!r} and {begin!r}, which no writer of numbered batches "
            "sets: another kind of writer has the same name"
        )
    return LastBatch(int(found[1]), value, int(begin), gate.end, turn=turn)


async def records_of(decisions: Decisions, last: LastBatch, writer: str) -> AsyncIterator[Mapping[str, Any]]:
    """Yield the writer's records of progress from `last.begin` on, in the order of batches. Raises CorruptData."""
    async for _, record in decisions.records(last.begin, last.end):
        if record.get(PROGRESS) == writer:
            yield record


def is_decided(registers: pb.LabelSet, batch: NumberedBatch, txn: str) -> bool:
    """Return True if the registers that refused a decision show that an earlier attempt at it was applied."""
    return labels.value_of(registers, batch.register) == batch.value(txn)


def is_overtaken(registers: pb.LabelSet, batch: NumberedBatch) -> bool:
    """Return True if another process has decided the batch or taken the turn, so that this one does not decide it."""
    return any(labels.value_of(registers, name) != value for name, value in batch.before().items())


async def take_turn(
    decisions: Decisions, previous: LastBatch, writer: str, process: str, nonce: str, dead: str
) -> LastBatch | None:
    """Announce the batch after `previous`. Returns `previous` with the new turn, or with the turn of a faster process.

    Returns None if the batch is decided. A turn that equals `dead` is replaced. The `nonce` must make the turn unique:
    otherwise an abandoned decision that is conditioned on an earlier turn could still be applied.
    """
    gate = await decisions.gate()
    known, number = last_batch_of(gate, writer), f"{previous.number + 1}."
    if known.value != previous.value:
        return None
    is_mine = known.turn.startswith(f"{number}{process}.")
    if is_mine or (known.turn.startswith(number) and known.turn != dead):
        return known
    turn = f"{number}{process}.{nonce}"
    required = {GATE_LABEL: gate.token or "", BATCH_REGISTER + writer: known.value, TURN_REGISTER + writer: known.turn}
    check = labels.label_selector(
        include={HELD_LABEL: "", **{name: value for name, value in required.items() if value}},
        exclude={name: "" for name, value in required.items() if not value},
    )
    try:
        union = {TURN_REGISTER + writer: turn}
        await decisions.record({"turn": turn, "writer": writer}, check=check, union=union, retry_unknown=True)
    except RegisterMismatch as error:
        return replace(known, turn=labels.value_of(error.registers, TURN_REGISTER + writer))
    return replace(known, turn=turn)
