"""Histories of real clients, and the files that external checkers read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from coranto import labels
from coranto.errors import CorruptData, InvalidInput
from coranto.labels import label_set
from coranto.testing import Cluster
from coranto.testing.histories import (
    History,
    Operation,
    OperationKind,
    OperationOutcome,
    RecordedClient,
    numbered_content,
    numbers_in,
    unique_content,
)
from coranto.testing.history_files import NEVER, elle_lines, porcupine_lines, read_histories, write_history
from coranto.wire import protocol_pb2 as pb
from tests.simulation.kit.checker import FinalJournal, check

ROOT = Path(__file__).parents[3]
JOURNAL = "shop/orders"


def appended(history: History, at: float, **fields: object) -> Operation:
    """Record an append of 20 bytes that was invoked at `at` and returned one second later."""
    operation = history.begin("ada", OperationKind.APPEND, JOURNAL, at)
    operation.content = numbered_content(operation.number, b"abcdef")
    operation.returned = at + 1
    for name, value in fields.items():
        setattr(operation, name, value)
    return operation


def small_history() -> tuple[History, bytes]:
    """Return a history with each kind of outcome, and the final content: appends 0 and 2 of 0 to 4."""
    history = History()
    first = appended(history, 0.0)
    first.succeeded(0, 20, label_set(owner="ada"))
    appended(history, 0.5, outcome=OperationOutcome.INFO)
    late = appended(history, 2.0, outcome=OperationOutcome.OPEN, returned=float("inf"))
    early = appended(history, 0.2, outcome=OperationOutcome.FAIL, refusal=pb.REGISTER_MISMATCH, returned=0.4)
    early.check, early.registers = pb.LabelSelector(include=label_set(owner="bob")), label_set(owner="ada")
    appended(history, 3.0, outcome=OperationOutcome.FAIL, refusal=pb.REGISTER_MISMATCH)
    read = history.begin("bob", OperationKind.READ, JOURNAL, 4.0)
    read.content, read.returned = first.content + late.content, 5.0
    read.succeeded(40, 40, label_set(owner="ada"))
    return history, read.content


def test_porcupine_files_have_outcomes_resolved_from_the_content() -> None:
    history, content = small_history()
    lines = [json.loads(line) for line in porcupine_lines(history, {JOURNAL: content})]
    # The refusal at 3 s may be due to the append at 0.5 s, which was never applied.
    assert [(each["call"], each["return"], each["begin"], each["refusal"]) for each in lines] == [
        (0, 10**9, 0, ""),
        (2 * 10**8, 4 * 10**8, -1, "REGISTER_MISMATCH"),
        (2 * 10**9, NEVER, 20, ""),
        (4 * 10**9, 5 * 10**9, 40, ""),
    ]
    assert [each["size"] for each in lines] == [20, 20, 20, 0]
    assert lines[0]["registers"] == {"labels": [{"name": "owner", "value": "ada"}]}
    assert lines[1]["check"] == {"include": {"labels": [{"name": "owner", "value": "bob"}]}}
    assert lines[2]["registers"] is None


def test_elle_files_have_appends_to_lists_and_reads_of_lists() -> None:
    history, _ = small_history()
    lines = list(elle_lines(history))
    assert lines[:2] == [
        '{:index 0, :time 0, :process 0, :type :invoke, :f :txn, :value [[:append "shop/orders" 0]]}',
        '{:index 1, :time 200000000, :process 1, :type :invoke, :f :txn, :value [[:append "shop/orders" 3]]}',
    ]
    assert any(line.endswith(':type :ok, :f :txn, :value [[:r "shop/orders" [0 2]]]}') for line in lines)
    assert lines[-1].endswith(':type :info, :f :txn, :value [[:append "shop/orders" 2]]}')
    # A process whose outcome is unknown makes no further call.
    ended = [line.split(":process ")[1].split(",")[0] for line in lines if ":type :info" in line]
    assert len(set(ended)) == len(ended) == 2
    for process in ended:
        assert ":type :info" in [line for line in lines if f":process {process}," in line][-1]


def test_a_read_of_an_append_twice_shows_it_twice() -> None:
    history = History()
    append = appended(history, 0.0)
    append.succeeded(0, 20, pb.LabelSet())
    read = history.begin("bob", OperationKind.READ, JOURNAL, 4.0)
    read.content, read.returned = append.content * 2, 5.0
    read.succeeded(40, 40, pb.LabelSet())
    assert list(elle_lines(history))[-1].endswith('[[:r "shop/orders" [0 0]]]}')
    assert [json.loads(line)["begin"] for line in porcupine_lines(history, {JOURNAL: read.content})] == [0, 40]


def test_histories_of_several_processes_are_merged(tmp_path: Path) -> None:
    history, content = small_history()
    other = History(first=1000)
    appended(other, 0.1).succeeded(40, 60, pb.LabelSet())
    paths = [tmp_path / "one.jsonl", tmp_path / "other.jsonl"]
    write_history(history, paths[0])
    write_history(other, paths[1])
    merged = read_histories(paths)
    assert [each.number for each in merged.operations] == [0, 1000, 3, 1, 2, 4, 5]
    again = History(sorted((each for each in merged.operations if each.number < 1000), key=lambda each: each.number))
    assert list(porcupine_lines(again, {JOURNAL: content})) == list(porcupine_lines(history, {JOURNAL: content}))
    with pytest.raises(CorruptData, match=r"other\.jsonl has operation 1000, as another file does"):
        read_histories([paths[1], paths[1]])
    paths[1].write_text('{"number": 3')
    with pytest.raises(CorruptData, match="a line that is not an operation"):
        read_histories(paths)


@pytest.mark.parametrize("content", [b"x", numbered_content(1, b"abc")[:-1], numbered_content(1, b"abc") + b"@"])
def test_content_that_is_not_a_list_of_appends_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidInput, match="is not a whole append at offset"):
        numbers_in(content)


def test_content_identifies_its_append() -> None:
    large = 1_234_567
    contents = [unique_content(number, random.Random(1), 0, 60) for number in (0, 7, large)]
    assert numbers_in(b"".join(contents)) == [
        (0, 0),
        (7, len(contents[0])),
        (large, len(contents[0]) + len(contents[1])),
    ]
    with pytest.raises(InvalidInput, match="has 100000 bytes; at most 99985 fit"):
        numbered_content(1, bytes(100_000))


async def test_calls_of_a_real_client_are_recorded() -> None:
    async with Cluster() as cluster:
        await cluster.create(JOURNAL)
        history = History()
        ada = RecordedClient(cluster.client(), history, "ada")
        assert (await ada.read(JOURNAL)).content == b""
        first = await ada.append(JOURNAL, b"one", union_registers=label_set(owner="ada"))
        refused = await ada.append(JOURNAL, b"two", check_registers=pb.LabelSelector(include=label_set(owner="bob")))
        misplaced = await ada.append(JOURNAL, b"three", offset=7)
        barrier = await ada.barrier(JOURNAL)
        read = await ada.read(JOURNAL)
    assert (first.outcome, first.begin, first.end) == (OperationOutcome.OK, 0, len(first.content))
    assert (refused.outcome, refused.refusal, refused.registers) == (
        OperationOutcome.FAIL,
        pb.REGISTER_MISMATCH,
        label_set(owner="ada"),
    )
    assert misplaced.refusal == pb.WRONG_APPEND_OFFSET
    assert (barrier.begin, barrier.end) == (first.end, first.end)
    assert labels.value_of(barrier.registers or pb.LabelSet(), "owner") == "ada"
    assert read.content == first.content
    assert all(each.invoked <= each.returned for each in history.operations)
    assert check(history, {JOURNAL: FinalJournal(first.content)}) == []
    assert len(list(porcupine_lines(history, {JOURNAL: first.content}))) == 6


def test_the_example_of_the_page_records_a_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "verification.md").read_text()
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)

    async def record() -> None:
        async with Cluster() as cluster:
            await cluster.create("check/one")
            names["JournalClient"] = lambda endpoint: contextlib.nullcontext(cluster.client())
            await names["record"](cluster.endpoint, 7)

    asyncio.run(record())
    assert [each.number for each in read_histories([Path("history-7.jsonl")]).operations] == [
        7_000_000,
        7_000_001,
        7_000_002,
    ]
    assert len(Path("check.jsonl").read_text().splitlines()) == 3
    assert '[[:r "check/one" [7000000]]]' in Path("check.edn").read_text()
