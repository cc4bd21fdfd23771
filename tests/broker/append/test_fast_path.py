"""Appends that commit at once: which do, and that they come to what the state machine makes of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import grpc.aio
import pytest

from coranto import labels
from coranto.fragments.fragment import sum_from_wire, sum_of
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import fast_path
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from coranto_broker.testing.running import FaultyDisk, RawClient, create, eventually, running_broker

pytestmark = pytest.mark.integration

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]


class Commits:
    """Counts of appends that were offered to the fast path, and of those that it committed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = self.done = 0
        commit = fast_path.commit

        def counted(*arguments: object) -> fast_path.CommittedAppend | None:
            self.asked += 1
            found = commit(*arguments)  # type: ignore[arg-type]
            self.done += found is not None
            return found

        monkeypatch.setattr(fast_path, "commit", counted)

    @contextmanager
    def expected(self, done: int, *, asked: int | None = None) -> Iterator[None]:
        before = self.asked, self.done
        yield
        assert (self.asked - before[0], self.done - before[1]) == (done if asked is None else asked, done)


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> Commits:
    return Commits(monkeypatch)


@pytest.fixture
async def broker(broker_settings: BrokerSettings) -> AsyncIterator[tuple[BrokerProcess, RawClient]]:
    async with running_broker(broker_settings) as found:
        yield found


async def begun(client: RawClient, spec: pb.JournalSpec) -> bytes:
    """Create a journal, and append what completes its first fragment, and begins the next. Returns that."""
    await create(client, spec)
    for content in (b"first", b"second"):
        assert (await client.append(J, content)).status == pb.OK
    return b"firstsecond"


async def test_both_ways_give_the_same_answer(
    broker: tuple[BrokerProcess, RawClient], spec: MakeSpec, commits: Commits, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, client = broker
    await begun(client, spec())
    metrics = process.broker.metrics
    groups = metrics.group_appends.sum
    with commits.expected(1):
        quick = await client.append(J, b"some", b"more", union_registers=labels.label_set(author="me"))
    monkeypatch.setattr(fast_path, "candidate", lambda *_: None)
    with commits.expected(0):
        slow = await client.append(J, b"some", b"more", union_registers=labels.label_set(author="me"))
    assert (quick.commit.begin, quick.commit.end) == (11, 19)
    assert (slow.commit.begin, slow.commit.end) == (19, 27)
    assert sum_from_wire(quick.commit.sum) == sum_of(b"somemore")
    assert quick.registers == labels.label_set(author="me")
    assert quick.total_chunks == 2
    slow.commit.begin, slow.commit.end = 11, 19
    assert quick == slow
    assert metrics.append_bytes.value == 27
    assert metrics.group_appends.sum == groups + 2
    assert await client.content(J) == b"firstsecondsomemoresomemore"


async def test_what_asks_for_more_goes_through_the_state_machine(
    broker: tuple[BrokerProcess, RawClient], spec: MakeSpec, commits: Commits
) -> None:
    _, client = broker
    content = await begun(client, spec())
    with commits.expected(1):
        assert (await client.append(J, b"x", union_registers=labels.label_set(author="you"))).status == pb.OK
    content += b"x"
    cases: list[tuple[dict[str, object], int, pb.Status.ValueType]] = [
        ({"offset": len(content)}, 0, pb.OK),
        ({"offset": len(content) - 1}, 0, pb.WRONG_APPEND_OFFSET),
        ({"suspend": pb.AppendRequest.SUSPEND_NO_RESUME}, 0, pb.OK),
        ({"check_registers": labels.label_selector(include={"author": "me"})}, 1, pb.REGISTER_MISMATCH),
    ]
    for parameters, asked, status in cases:
        with commits.expected(0, asked=asked):
            response = await client.append(J, b"y", **parameters)
        assert response.status == status, parameters
        content += b"y" if status == pb.OK else b""
    assert response.registers == labels.label_set(author="you")
    with commits.expected(1):
        same = labels.label_selector(include={"author": "you"})
        assert (await client.append(J, b"z", check_registers=same, do_not_proxy=True)).registers == response.registers
    assert await client.content(J) == content + b"z"


async def test_a_revision_that_is_known_is_no_reason_to_wait(
    broker: tuple[BrokerProcess, RawClient], spec: MakeSpec, commits: Commits
) -> None:
    process, client = broker
    content = await begun(client, spec())
    revision = (await client.listing())[0].header.etcd.revision
    with commits.expected(1):
        assert (await client.append(J, b"x", min_etcd_revision=revision)).status == pb.OK
    known = process.broker.keyspace.known_revision
    assert process.broker.resolver.known(J, known) is not None
    assert process.broker.resolver.known(J, known + 1) is None
    assert await client.content(J) == content + b"x"


async def test_registers_that_changed_since_an_append_began_are_looked_at_again(
    broker: tuple[BrokerProcess, RawClient], spec: MakeSpec, commits: Commits
) -> None:
    process, client = broker
    await begun(client, spec())
    await client.append(J, b"x", union_registers=labels.label_set(author="me", epoch="1"))
    replica = process.broker.resolver.local_replicas[0]
    advance: dict[str, object] = {
        "check_registers": labels.label_selector(include={"epoch": "1"}),
        "union_registers": labels.label_set(epoch="2"),
    }
    first, second, third = (client.stub.Append() for _ in range(3))
    for call in (first, second):
        await call.write(pb.AppendRequest(journal=J, **advance))  # type: ignore[arg-type]
    await third.write(pb.AppendRequest(journal=J, union_registers=labels.label_set(author="you")))
    for call in (first, second, third):
        await call.write(pb.AppendRequest(content=b"y"))
    await eventually(lambda: replica.line.coming == 3)
    with commits.expected(2, asked=3):
        for call, status in ((third, pb.OK), (first, pb.OK), (second, pb.REGISTER_MISMATCH)):
            await call.write(pb.AppendRequest())
            await call.done_writing()
            response = await call
            assert response.status == status
            assert response.registers == labels.label_set(author="you", epoch="1" if call is third else "2")


async def test_a_fragment_that_is_long_enough_is_completed_first(
    broker: tuple[BrokerProcess, RawClient], spec: MakeSpec, commits: Commits
) -> None:
    process, client = broker
    short = spec()
    short.fragment.length = 1024
    content = await begun(client, short)
    with commits.expected(2, asked=3):
        for letter in (b"a", b"b", b"c"):
            assert (await client.append(J, letter * 1000)).status == pb.OK
    replica = process.broker.resolver.local_replicas[0]
    assert [(entry.begin, entry.end) for entry in replica.index.entries] == [(0, 5), (5, 2011), (2011, 3011)]
    assert await client.content(J) == content + b"a" * 1000 + b"b" * 1000 + b"c" * 1000


async def test_whatever_changes_while_an_append_is_received_is_heeded(
    broker: tuple[BrokerProcess, RawClient], spec: MakeSpec, commits: Commits
) -> None:
    process, client = broker
    read_only = spec()
    content = await begun(client, read_only)
    replica = process.broker.resolver.local_replicas[0]
    call = client.stub.Append()
    await call.write(pb.AppendRequest(journal=J))
    await call.write(pb.AppendRequest(content=b"late"))
    await eventually(lambda: replica.line.coming == 1)
    read_only.flags = pb.JournalSpec.O_RDONLY
    (listed,) = (await client.listing())[0].journals
    await client.apply(read_only, revision=listed.mod_revision)
    with commits.expected(0, asked=1):
        await call.write(pb.AppendRequest())
        await call.done_writing()
        assert (await call).status == pb.NOT_ALLOWED
    assert await client.content(J) == content


async def test_a_limited_rate_is_kept(broker_settings: BrokerSettings, spec: MakeSpec, commits: Commits) -> None:
    async with running_broker(broker_settings.model_copy(update={"max_append_rate": 1 << 20})) as (_, client):
        await begun(client, spec())
        with commits.expected(0, asked=1):
            assert (await client.append(J, b"x")).status == pb.OK


@pytest.mark.parametrize("full", [".content", ".commits"])
async def test_a_disk_that_fails_fails_the_append_and_leaves_no_trace(
    broker_settings: BrokerSettings, spec: MakeSpec, commits: Commits, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    disk = FaultyDisk()
    monkeypatch.setattr("coranto_broker.server.process.LocalDisk", lambda: disk)
    async with running_broker(broker_settings) as (_, client):
        content = await begun(client, spec())
        disk.full = full
        with commits.expected(0, asked=1), pytest.raises(grpc.aio.AioRpcError, match="no space left"):
            await client.append(J, b"lost")
        disk.full = None
        assert (await client.append(J, b"kept")).commit.begin == len(content)
        with commits.expected(1):
            assert (await client.append(J, b"again")).status == pb.OK
        assert await client.content(J) == content + b"keptagain"
