"""Shards applied by a hostile client, and sources written by a hostile producer, with a real etcd."""

from __future__ import annotations

import asyncio
import itertools
import threading
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from coranto.coordination.etcd import Put
from coranto.effects import SystemClock
from coranto.labels import CONTENT_TYPE, RECOVERY_LOG, label_selector, label_set
from coranto.security.call_tokens import CallTokens
from coranto.security.tokens import Capability, Keys
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.recoverylog import Author, Fnode, Hints, LiveFnode, LogSegment
from coranto_consumers.runtime import intake, primary
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.replica import MAX_ERROR_CHARS
from coranto_consumers.runtime.testing import running_shard, shard_spec
from coranto_consumers.stores.json_file import JsonFileStore

KEY = "c2VjcmV0IGtleSBvZiB0aGUgdGVzdHMsIGxvbmcgZW5vdWdo"


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """These tests need only one kind of store."""
    return f"sqlite:///{tmp_path}/store.db"


def spec(id: str = "shard-sums", **fields: Any) -> pc.ShardSpec:
    return shard_spec(id, ["in/one"], max_seconds=600, **fields)


def recorded(id: str, logs: str = "logs", hints: str = "/hints", **fields: Any) -> pc.ShardSpec:
    return spec(id, recovery_log_prefix=logs, hint_prefix=f"{_place}{hints}", **fields)


_numbers = itertools.count()
_place = ""


@pytest.fixture(autouse=True)
def place() -> str:
    """Return the prefix of a test's hints, as all tests share one etcd."""
    global _place
    _place = f"/hostile-shards/{next(_numbers)}"
    return _place


def hints_of(log: str, *segment_logs: str) -> pc.ApplyRequest.Change:
    """Return a change with hints for `log` with segments in other logs."""
    segments = [
        LogSegment(Author(7), first, 10 * first, first, first, 10 * first + 5, name)
        for first, name in enumerate((*segment_logs, log), 1)
    ]
    files = tuple(LiveFnode(Fnode(each.first_seq_no), (each,)) for each in segments)
    change = pc.ApplyRequest.Change(expect_mod_revision=-1)
    change.primary_hints.CopyFrom(Hints(log, files).to_wire())
    return change


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code(), raised.value.details() or ""


async def test_a_shard_that_fails_on_an_enormous_message_reports_its_failure(journals, consumer, sums):
    """The error repeats the message. etcd refuses values of 2 MiB and more."""

    def explode(message: dict[str, Any]) -> None:
        raise ValueError(f"cannot make sense of {message}")

    sums.before = explode
    process = await consumer.start(sums)
    await consumer.apply(process, spec())
    await consumer.status(process, "PRIMARY")
    await journals.publish("in/one", {"key": "x" * (3 << 20), "n": 1})

    await consumer.status(process, "FAILED")
    (status,) = (await consumer.shard(process)).status
    (error,) = status.errors
    assert "cannot make sense of" in error
    assert "characters …" in error, "the error gives the number of omitted characters"
    assert len(error) < MAX_ERROR_CHARS + 100


async def test_the_error_of_an_invalid_uuid_is_short(journals, consumer, sums):
    process = await consumer.start(sums)
    await consumer.apply(process, spec())
    await consumer.status(process, "PRIMARY")
    await journals.fake.write("in/one", b'{"_meta":{"uuid":["' + b"x" * (3 << 20) + b'"]}}\n')

    await consumer.status(process, "FAILED")
    (status,) = (await consumer.shard(process)).status
    assert "is not a string" in status.errors[0]
    assert len(status.errors[0]) < 500


class Counter(Application[JsonFileStore[int]]):
    """An application with its store in a recovery log. It gets no messages."""

    def new_store(self, shard: Shard) -> JsonFileStore[int]:
        return JsonFileStore(shard.recorder, 0)

    def consume_message(self, *_: Any) -> None:
        raise AssertionError("there is nothing to consume")


def create_log(journals: Any, name: str) -> None:
    journals.fake.create(name, labels=label_set([(CONTENT_TYPE, RECOVERY_LOG)]))


@pytest.mark.parametrize("id", ["app/part-000", "x" * 400, "é" * 200])
async def test_ids_that_are_not_file_names_are_served(journals, consumer, id):
    """Ids are tokens of up to 512 bytes. The folder of a played log is directly in the folder of the process."""
    create_log(journals, f"logs/{id}")
    process = await consumer.start(Counter())
    await consumer.apply(process, recorded(id))
    await consumer.status(process, "PRIMARY", id=id)
    folder = process.consumer.recovery_folder
    assert [each.is_dir() for each in folder.iterdir()] == [True]
    assert folder.stat().st_mode & 0o077 == 0


def scoped(capability: Capability, **scope: str) -> Any:
    return CallTokens(Keys.parse(KEY), SystemClock()).for_selector(capability, label_selector(include=scope))


BLUE, RED = label_set({"team": "blue"}), label_set({"team": "red"})


@pytest.mark.parametrize(
    ("prefix", "id", "hints", "what"),
    [
        ("logs", "app/sums-000", "/hints/red", "the recovery log logs/app/sums-000"),
        ("logs/red", "app/sums-000", "/hints", "the hints at {place}/hints/app/sums-000.primary"),
    ],
)
async def test_a_shard_cannot_take_over_the_log_or_the_hints_of_another(
    journals, consumer, place, prefix, id, hints, what
):
    """An id with a slash can give the same names, and a takeover would fence off the recording shard."""
    create_log(journals, "logs/app/sums-000")
    process = await consumer.start(Counter(), auth_keys=KEY)
    apply = consumer.stub(process).Apply
    victim = recorded("sums-000", "logs/app", "/hints/app", labels=BLUE)
    mine = recorded(id, prefix, hints, labels=RED)
    blue, red = (
        pc.ApplyRequest(changes=[pc.ApplyRequest.Change(upsert=each, expect_mod_revision=-1)])
        for each in (victim, mine)
    )
    assert (await apply(blue, metadata=scoped(Capability.APPLY, team="blue"))).status == pc.OK
    await consumer.status(process, "PRIMARY", id="sums-000")

    code, details = await refused(apply(red, metadata=scoped(Capability.APPLY, team="red")))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert what.format(place=place) in details
    both = pc.ApplyRequest(changes=[*red.changes, *blue.changes])
    code, _ = await refused(apply(both, metadata=scoped(Capability.APPLY)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert (await apply(blue, metadata=scoped(Capability.APPLY, team="blue"))).status == pc.OK, (
        "an owner may apply its shard again"
    )


async def test_a_shard_with_the_log_of_an_earlier_shard_does_not_play_it(journals, consumer):
    """Two processes accepted the changes concurrently, or the shards are older than the comparison of names."""
    create_log(journals, "logs/app/sums-000")
    process = await consumer.start(Counter())
    await consumer.apply(process, recorded("sums-000", "logs/app", "/hints/app"))
    await consumer.status(process, "PRIMARY", id="sums-000")
    registers = journals.fake.journals["logs/app/sums-000"].registers

    mine = recorded("app/sums-000", "logs", "/hints/red")
    key = process.keyspace.layout.item_key(mine.id)
    await process.consumer.coordinator.txn([], [Put(key, mine.SerializeToString())])
    await consumer.status(process, "FAILED", id=mine.id)
    (status,) = (await consumer.shard(process, mine.id)).status
    assert "which shard sums-000 had before" in status.errors[0]
    assert journals.fake.journals["logs/app/sums-000"].registers == registers
    await consumer.status(process, "PRIMARY", id="sums-000")


async def test_applied_hints_cannot_name_logs_outside_the_scope(journals, consumer):
    """A process reads all logs named in hints with its own rights."""
    process = await consumer.start(Counter(), auth_keys=KEY)
    apply, everything = consumer.stub(process).Apply, scoped(Capability.APPLY)
    others = [
        pc.ApplyRequest.Change(upsert=recorded("blue-000", labels=BLUE)),
        pc.ApplyRequest.Change(upsert=recorded("red-0000", labels=RED)),
    ]
    assert (await apply(pc.ApplyRequest(changes=others), metadata=everything)).status == pc.OK

    async def give(*logs: str, of: str = "logs/red-0001", by: Any) -> pc.ApplyResponse:
        change = hints_of(of, *logs)
        change.upsert.CopyFrom(recorded("red-0001", labels=RED))
        response: pc.ApplyResponse = await apply(pc.ApplyRequest(changes=[change]), metadata=by)
        return response

    red = scoped(Capability.APPLY, team="red")
    for log in ("logs/blue-000", "secret/journal"):
        code, details = await refused(give(log, by=red))
        assert code == grpc.StatusCode.PERMISSION_DENIED
        assert log in details
    code, details = await refused(give(of="logs/blue-000", by=everything))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "whose log is logs/red-0001" in details
    large = [f"logs/red-{'x' * 400}-{number}" for number in range(4000)]
    code, details = await refused(give(*large, by=everything))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "bytes are more than" in details
    assert (await give("logs/red-0000", by=red)).status == pc.OK, "a fork of a log in scope"
    assert (await give("secret/journal", by=everything)).status == pc.OK


async def test_read_ahead_is_limited_in_bytes(journals, client, sums, monkeypatch):
    """A limit only on the number of messages would let their writer choose the memory of a consumer."""
    monkeypatch.setattr(primary, "READ_AHEAD_BYTES", 1 << 20)
    held = threading.Event()
    sums.before = lambda message: held.wait()
    sums.output = ""
    async with running_shard(sums, spec(), client) as shard:
        try:
            for n in range(40):
                head = await journals.publish("in/one", {"key": "a", "n": n, "pad": "x" * (256 << 10)})
            at_work = shard.primary

            def read_ahead() -> int:
                return at_work._input.size_bytes

            async with asyncio.timeout(60):
                # Until the reader waits for capacity, or has read all.
                while not at_work._has_capacity._waiters and read_ahead() < head // 2:  # noqa: ASYNC110 - there is no event for it
                    await asyncio.sleep(0.01)
            # Each piece of read content has a few messages, and one piece may exceed the limit.
            assert read_ahead() < 3 << 20
        finally:
            held.set()
        await shard.read_through({"in/one": head})
    assert sums.sums() == {"a": (sum(range(40)), 40)}


async def test_a_source_with_too_many_producers_stops_only_its_shard(journals, consumer, sums, monkeypatch):
    """Each producer is in every checkpoint. A process that is too slow to write checkpoints loses all of its shards."""
    monkeypatch.setattr(intake, "MAX_PRODUCERS", 50)
    process = await consumer.start(sums)
    await consumer.apply(process, spec(), shard_spec("shard-other", ["in/two"], max_seconds=600))
    await consumer.status(process, "PRIMARY")
    await consumer.status(process, "PRIMARY", id="shard-other")
    for n in range(50):
        head = await journals.publish("in/one", {"key": "a", "n": n})
    await consumer.stat(process, one=head)
    last = await journals.publish("in/one", {"key": "a", "n": 50})
    assert last > head

    await consumer.status(process, "FAILED")
    (status,) = (await consumer.shard(process)).status
    assert f"more than 50 producers: one more is at offset {head}" in status.errors[0]
    head = await journals.publish("in/two", {"key": "b", "n": 1})
    await consumer.stat(process, id="shard-other", two=head)
    assert sums.sums() == {"a": (sum(range(50)), 50), "b": (1, 1)}
