"""The decisions of a stream's multi-key transactions, and the gate that scaling closes to stop them.

A multi-key transaction appends its events to several segments. In each segment, readers treat the events as uncommitted
until an acknowledgement follows. One record in the journal `<stream>/transactions` holds all acknowledgements together.
It is appended before any of the acknowledgements, and *decides* the transaction: any process that finds the record
appends the missing acknowledgements. So one append commits the transaction in all segments.

The journal is JSON lines:

====================================  ===============================================================================
`{"decided": txn, "acks": {…}}`       the transaction is committed; by journal, its acknowledgements in base64; `lane`
                                      is its producer id and the clock at its start (`lanes.py`)
`{"void": txn}`                       it is not committed, unless an earlier record decided it
`{"done": txn}`                       its acknowledgements are in their segments
`{"settled": offset}`                 all transactions decided below the offset are done
`{"gate": state}`                     the gate was opened or closed
`{"writer": name}`                    the register of a writer of numbered batches was created (`bulk.py`)
`{"progress": name, …}`               a writer's record of the batch that is decided by the same append
                                      (`numbered.py`)
====================================  ===============================================================================

A segment must not be sealed between a decision and its acknowledgements. The journal's register `coranto.dev/gate`
prevents that. It is a token, `open-…` or `closed-…`. A transaction reads the gate when it begins, before it lists the
segments; the append that decides is conditioned on the gate being open with the same token. A process that changes the
segments first closes the gate, then appends the acknowledgements of all decided transactions, and opens the gate with
another token once the segments are sealed. The register `coranto.dev/gate-revision` = `<cluster>.<revision>` then has
the etcd revision of the change of segments, so that a transaction does not trust a broker that still lists older
segments. The cluster id is needed because a restored etcd counts from an earlier revision.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from coranto import labels
from coranto.client.client import JournalClient
from coranto.client.record_journals import RecordLines
from coranto.client.values import AppendResult
from coranto.effects import Entropy
from coranto.errors import CorruptData, JournalNotFound, NotAllowed, RegisterMismatch
from coranto.messages.uuids import ProducerId
from coranto.streams.control.batches import Batches
from coranto.streams.control.transaction_ends import LaneEnd, end_transactions
from coranto.streams.model.lanes import LaneUse
from coranto.streams.model.stream import HELD_LABEL, MAX_RECORD_BYTES, Stream, transactions_journal
from coranto.wire import protocol_pb2 as pb

GATE_LABEL: Final = "coranto.dev/gate"
SETTLED_LABEL: Final = "coranto.dev/settled"
REVISION_LABEL: Final = "coranto.dev/gate-revision"
_OPEN, _CLOSED = "open-", "closed-"
_TOKEN_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Gate:
    """The state of the gate at an append. `token` is None if the gate was never opened, or the registers were lost.

    All decisions below the offset `settled` of the journal are complete. `end` is the end of the journal. `revision` is
    the etcd revision of the last change of segments, if the process that opened the gate recorded it, or 0; `cluster`
    is the id of that etcd cluster, or 0 if it is unknown.
    """

    token: str | None
    settled: int
    end: int
    registers: pb.LabelSet
    revision: int
    cluster: int

    @property
    def is_open(self) -> bool:
        return self.token is not None and self.token.startswith(_OPEN)

    def is_before(self, stream: Stream) -> bool:
        """Return True if the listing of `stream` includes all changes that were made before the gate was opened.

        A listing of an etcd cluster that was restored since always does.
        """
        return self.cluster not in (0, stream.cluster) or self.revision <= stream.revision

    @classmethod
    def of(cls, result: AppendResult) -> Gate:
        cluster, _, revision = labels.value_of(result.registers, REVISION_LABEL).rpartition(".")
        return cls(
            labels.value_of(result.registers, GATE_LABEL) or None,
            int(labels.value_of(result.registers, SETTLED_LABEL) or "0"),
            result.end,
            result.registers,
            int(revision or "0"),
            int(cluster or "0", 16),
        )


@dataclass(frozen=True, slots=True)
class Decided:
    """A decided transaction: the acknowledgements to append, by journal, and the offset of its record.

    `use` is None for bulk transactions and transactions of earlier versions: their producer ids are not reused.
    """

    txn: str
    acks: Mapping[str, bytes]
    offset: int
    use: LaneUse | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """The content of some records: decisions by transaction, in order, and the transactions that are void or done."""

    decided: Mapping[str, Decided]
    void: frozenset[str]
    done: frozenset[str]

    def undone(self) -> tuple[Decided, ...]:
        return tuple(each for txn, each in self.decided.items() if txn not in self.done)


def replay(records: Iterable[tuple[int, Mapping[str, Any]]]) -> Recorded:
    """Combine records, given with their offsets. Raises CorruptData."""
    decided: dict[str, Decided] = {}
    void: set[str] = set()
    done: set[str] = set()
    for offset, record in records:
        try:
            if "decided" in record:
                txn = str(record["decided"])
                acks = {str(journal): base64.b64decode(ack, validate=True) for journal, ack in record["acks"].items()}
                if txn not in void:
                    decided.setdefault(txn, Decided(txn, acks, offset, _lane_in(record)))
            elif "void" in record:
                txn = str(record["void"])
                if txn not in decided:
                    void.add(txn)
            elif "done" in record:
                done.add(str(record["done"]))
        except (KeyError, AttributeError, TypeError, ValueError, binascii.Error) as error:
            raise CorruptData(f"the record at offset {offset} is not a record of a transaction: {error}") from error
    return Recorded(decided, frozenset(void), frozenset(done))


def _lane_in(record: Mapping[str, Any]) -> LaneUse | None:
    if "lane" not in record:
        return None
    producer, begin = record["lane"]
    return LaneUse(ProducerId(bytes.fromhex(producer)), str(record["decided"]), int(begin))


class Decisions:
    """The journal of a stream's decisions. Safe for use by many tasks."""

    def __init__(self, client: JournalClient, stream: str, entropy: Entropy) -> None:
        self._client = client
        self._entropy = entropy
        self._batches: tuple[str, Batches[None]] | None = None  # For the token of the last call.
        self.journal = transactions_journal(stream)

    # -- The gate --------------------------------------------------------------------------------------------------

    async def gate(self) -> Gate:
        """Return the current state of the gate. Raises JournalNotFound for a stream without multi-key transactions."""
        return Gate.of(await self._client.append(self.journal, b"", retry_unknown=True))

    async def close(self) -> Gate:
        """Close the gate, so that no transaction can be decided. Decisions that are not carried out are below `end`."""
        state = _CLOSED + self._entropy(_TOKEN_BYTES).hex()
        return Gate.of(
            await self.record({"gate": state}, union={HELD_LABEL: "1", GATE_LABEL: state}, retry_unknown=True)
        )

    async def open(self, before: str | None, revision: int = 0, cluster: int = 0) -> bool:
        """Open the gate if it still is in the state `before`. Returns False if its state has changed.

        `revision` is the etcd revision of the change of segments: readers of the gate ignore older listings of the
        segments. `cluster` is the id of the etcd cluster, by default the cluster of the client's last change.
        """
        state = _OPEN + self._entropy(_TOKEN_BYTES).hex()
        selector = (
            labels.label_selector(exclude={GATE_LABEL: ""})
            if before is None
            else labels.label_selector(include={HELD_LABEL: "", GATE_LABEL: before})
        )
        try:
            union = {HELD_LABEL: "1", GATE_LABEL: state}
            if revision:
                union[REVISION_LABEL] = f"{cluster or self._client.applied_cluster:x}.{revision}"
            await self.record({"gate": state}, check=selector, union=union, retry_unknown=True)
        except RegisterMismatch as error:
            return labels.value_of(error.registers, GATE_LABEL) == state  # Applied by an attempt whose answer was lost.
        return True

    # -- Decisions -------------------------------------------------------------------------------------------------

    async def decide(
        self,
        txn: str,
        acks: Mapping[str, bytes],
        token: str,
        *,
        use: LaneUse | None = None,
        done: Iterable[str] = (),
        before: Mapping[str, str] | None = None,
        after: Mapping[str, str] | None = None,
        extra: Mapping[str, object] | None = None,
        retry_unknown: bool = False,
    ) -> int:
        """Commit a transaction with these acknowledgements, by journal, if the gate still has this `token`.

        Returns the end offset of the decision.

        `use` is the transaction's lane. `done` are earlier transactions whose acknowledgements are in their segments.
        `before` are registers that must also have these values ("" if they must be missing), and `after` their new
        values. Without `before`, queued transactions share an append. `extra` is another record in the same append.
        With `retry_unknown`, which needs `before`, the append is retried if its answer is lost: the registers of a
        RegisterMismatch then show if it was applied. Otherwise, RegisterMismatch means that nothing was decided. Raises
        AppendOutcomeUnknown if the outcome is unknown; then call `was_decided`.
        """
        encoded = {journal: base64.b64encode(ack).decode() for journal, ack in acks.items()}
        lane = {} if use is None else {"lane": [use.producer.hex(), use.begin]}
        records: list[Mapping[str, object]] = [{"decided": txn, "acks": encoded, **lane}]
        records += [*([] if extra is None else [extra]), *({"done": each} for each in done)]
        content = b"".join(map(_line, records))
        required, append = {GATE_LABEL: token, **(before or {})}, self._client.append
        check = labels.label_selector(
            include={HELD_LABEL: "", **{name: value for name, value in required.items() if value}},
            exclude={name: "" for name, value in required.items() if not value},
        )
        if before:
            union = labels.label_set(after or {})
            appended = await append(
                self.journal, content, check_registers=check, union_registers=union, retry_unknown=retry_unknown
            )
            return appended.end
        if self._batches is None or self._batches[0] != token:
            self._batches = token, Batches(lambda each, _: append(self.journal, each, check_registers=check))
        return (await self._batches[1].append(content, None)).end

    async def was_decided(self, txn: str, begin: int) -> bool:
        """Return True if a transaction was decided. If not, it is void: it never will be decided.

        `begin` is the end of the journal when the transaction began.
        """
        end = (await self.record({"void": txn}, retry_unknown=True)).end
        return txn in (await self.read(begin, end)).decided

    async def done(self, txns: Iterable[str]) -> None:
        """Record that the acknowledgements of transactions are in their segments."""
        content = b"".join(_line({"done": txn}) for txn in txns)
        if content:
            await self._client.append(self.journal, content, retry_unknown=True)

    async def read(self, begin: int, end: int) -> Recorded:
        """Read the records in [begin, end). A record must begin at `begin`. Raises CorruptData."""
        return replay([record async for record in self.records(begin, end)])

    async def finish(self, gate: Gate) -> int:
        """Append the missing acknowledgements of all transactions decided below `gate.end`. Returns their number.

        Sealed or removed segments are skipped: the process that sealed them appended their acknowledgements first.
        """
        if gate.settled >= gate.end:
            return 0
        undone = (await self.read(gate.settled, gate.end)).undone()
        by_journal: dict[str, list[LaneEnd]] = {}
        for each in undone:
            for journal, ack in each.acks.items():
                by_journal.setdefault(journal, []).append(LaneEnd(each.use, ack))
        await asyncio.gather(*(self._acknowledge(journal, acks, gate.settled) for journal, acks in by_journal.items()))
        settled = {SETTLED_LABEL: str(gate.end)}
        # If the registers were lost and restored since, they must not claim that later decisions are settled.
        check = labels.label_selector(include={HELD_LABEL: "", GATE_LABEL: gate.token or ""})
        try:
            await self.record({"settled": gate.end}, check=check, union=settled, retry_unknown=True)
        except RegisterMismatch:
            return len(undone)  # Another process has changed the gate, and finishes the same transactions.
        return len(undone)

    async def _acknowledge(self, journal: str, ends: list[LaneEnd], settled: int) -> None:
        async def is_done(txn: str) -> bool:
            return txn in (await self.read(settled, (await self.gate()).end)).done

        with contextlib.suppress(NotAllowed, JournalNotFound):
            await end_transactions(self._client, journal, ends, is_done=is_done)

    async def record(
        self,
        record: Mapping[str, object],
        *,
        check: pb.LabelSelector | None = None,
        union: Mapping[str, str] | None = None,
        retry_unknown: bool = False,
    ) -> AppendResult:
        """Append a record if `check` matches the registers, and set those in `union`.

        With `retry_unknown`, retries if the answer is lost. Raises RegisterMismatch, errors of the client, and, without
        `retry_unknown`, AppendOutcomeUnknown.
        """
        return await self._client.append(
            self.journal,
            _line(record),
            check_registers=check,
            union_registers=labels.label_set(union) if union else None,
            retry_unknown=retry_unknown,
        )

    async def records(self, begin: int, end: int) -> AsyncIterator[tuple[int, Mapping[str, Any]]]:
        """Yield the records in [begin, end) with their begin offsets. Raises CorruptData."""
        if begin >= end:
            return
        lines, at = RecordLines(), begin
        async for chunk in self._client.read(self.journal, begin, end_offset=end):
            if chunk.offset != at + lines.partial_bytes:
                # Retention removed older decisions, which were carried out long ago.
                lines, at = RecordLines(), chunk.offset
            for line in lines.feed(chunk.content):
                yield at, _parsed(line, at)
                at += len(line) + 1
            if lines.partial_bytes > MAX_RECORD_BYTES:
                raise CorruptData(f"journal {self.journal}: content at offset {at} is not a decision: it does not end")


def _line(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _parsed(line: bytes, offset: int) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"the record at offset {offset} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise CorruptData(f"the record at offset {offset} is {type(record).__name__}, not an object")
    return record
