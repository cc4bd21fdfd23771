"""The twins of disks, networks, etcd and stores behave only in ways that the real ones may."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from coranto.coordination.etcd import Delete, Put, WatchBatch, absent, unmodified
from coranto.errors import FragmentNotFound, StoreError, TxnOutcomeUnknown, Unavailable, WatchReset
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.etcd import SimCoordinator, SimEtcd
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.testing.sim.network import Delays, Lane, Network
from coranto.testing.sim.object_store import SimFragments, SimObjectStore, StoreFaults
from coranto.testing.sim.rpc import Rpc
from coranto.testing.sim.timeline import Killed, Process
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb
from tests.simulation.kit.disk import SimDisk

FILE = Path("/data/file")


def run(scenario: Callable[[SimLoop], Awaitable[None]], seed: int = 1) -> None:
    async def main(loop: SimLoop) -> None:
        await scenario(loop)

    with simulated(seed) as loop:
        loop.run_until_complete(main(loop))


# -- Disk --------------------------------------------------------------------------------------------------------------


def written(seed: int) -> tuple[SimLoop, SimDisk, Process]:
    loop = SimLoop(seed)
    disk = SimDisk(loop, random.Random(seed))
    process = Process(loop, "writer")
    return loop, disk, process


def test_a_killed_process_leaves_all_written_bytes() -> None:
    loop, disk, process = written(0)
    file = disk.for_process(process).open(FILE)
    file.write(b"some")
    file.write(b" bytes")
    process.kill()
    with pytest.raises(Killed):
        file.write(b" more")
    assert disk.for_process(Process(loop, "next")).read(FILE) == b"some bytes"
    loop.close()


def test_a_crash_keeps_synced_content_and_any_prefix_of_the_rest() -> None:
    left: set[bytes | None] = set()
    for seed in range(200):
        loop, disk, process = written(seed)
        files = disk.for_process(process)
        file = files.open(FILE)
        file.write(b"abc")
        file.sync()
        files.sync_folder(FILE.parent)
        files.sync_folder(FILE.parent.parent)
        file.write(b"def")
        files.open(FILE.with_name("unsynced")).write(b"xyz")
        process.kill()
        disk.crash("in order")
        content = disk.content(FILE)
        assert content is not None
        assert b"abcdef".startswith(content)
        assert len(content) >= 3
        other = disk.content(FILE.with_name("unsynced"))
        assert not other or content == b"abcdef"  # In order: later writes survive only with all earlier ones.
        left |= {content, other}
        loop.close()
    assert {b"abc", b"abcd", b"abcdef", None, b"xy"} <= left


def test_without_an_order_a_later_write_may_survive_alone() -> None:
    found = set()
    for seed in range(300):
        loop, disk, process = written(seed)
        files = disk.for_process(process)
        files.open(FILE).write(b"abc")
        files.open(FILE.with_name("later")).write(b"xyz")
        process.kill()
        disk.crash()
        found.add((disk.content(FILE), disk.content(FILE.with_name("later"))))
        loop.close()
    assert any(earlier is None and later == b"xyz" for earlier, later in found)


def test_a_crash_keeps_any_sectors_of_unsynced_content() -> None:
    found = set()
    for seed in range(100):
        loop, disk, process = written(seed)
        files = disk.for_process(process)
        file = files.open(FILE)
        file.write(b"s" * 100)
        file.sync()
        for folder in (FILE.parent, FILE.parent.parent):
            files.sync_folder(folder)
        file.write(b"a" * 412 + b"b" * 512)
        file.write(b"c" * 100)
        disk.crash("sector by sector")
        content = disk.content(FILE)
        assert content is not None
        assert content.startswith(b"s" * 100), "synced content stays, even in a sector that was written later"
        found.add((len(content), content[100:512].strip(b"\0")[:1], content[512:1024].strip(b"\0")[:1]))
        loop.close()
    assert {(1124, b"", b"b"), (1124, b"a", b""), (100, b"", b"")} <= found


def test_names_survive_a_crash_once_their_folders_are_synced() -> None:
    for synced in ([FILE.parent, FILE.parent.parent], [FILE.parent], []):
        loop, disk, process = written(1)
        files = disk.for_process(process)
        file = files.open(FILE)
        file.write(b"abc")
        file.sync()
        for folder in synced:
            files.sync_folder(folder)
        assert (disk.durable(FILE) is not None) == (len(synced) == 2)
        disk.crash("nothing" if len(synced) == 2 else "all")
        assert (disk.content(FILE) is not None) == (len(synced) == 2)
        loop.close()


def test_a_crash_may_undo_a_rename_or_a_removal() -> None:
    found = set()
    for seed in range(100):
        loop, disk, process = written(seed)
        files = disk.for_process(process)
        for name in ("one", "two"):
            file = files.open(FILE.with_name(name))
            file.write(name.encode())
            file.sync()
        for folder in (FILE.parent, FILE.parent.parent):
            files.sync_folder(folder)
        files.rename(FILE.with_name("one"), FILE)
        files.remove(FILE.with_name("two"))
        disk.crash()
        found.add(tuple(files.list(FILE.parent)))
        loop.close()
    assert found == {("one", "two"), ("one",), ("file", "two"), ("file",)}


def test_content_dropped_by_a_failed_sync_never_reaches_the_disk() -> None:
    lost = 0
    for seed in range(40):
        loop, disk, process = written(seed)
        files = disk.for_process(process)
        file = files.open(FILE)
        for folder in (FILE.parent, FILE.parent.parent):
            files.sync_folder(folder)
        file.write(b"a" * 512)
        disk.fail_sync = lambda name: name == "file"
        with pytest.raises(OSError, match="cannot write"):
            file.sync()
        disk.fail_sync = None
        assert file.read_at(0, 512) == b"a" * 512, "processes see it"
        file.sync()
        disk.crash("nothing")
        lost += disk.content(FILE) != b"a" * 512
        loop.close()
    assert lost


def test_a_process_may_die_during_a_write() -> None:
    lengths = set()
    for seed in range(40):
        loop, disk, process = written(seed)
        file = disk.for_process(process).open(FILE)
        disk.kill_in_write = lambda name: name == "file"
        with pytest.raises(Killed):
            file.write(b"12345678")
        assert not process.alive
        lengths.add(disk.size(FILE))
        loop.close()
    assert {0, 8} < lengths


def test_a_full_disk_writes_half() -> None:
    loop, disk, process = written(0)
    file = disk.for_process(process).open(FILE)
    disk.full = True
    with pytest.raises(OSError, match="no space"):
        file.write(b"1234")
    assert disk.content(FILE) == b"12"
    loop.close()


def test_an_open_file_survives_the_removal_of_its_name() -> None:
    loop, disk, process = written(0)
    files = disk.for_process(process)
    file = files.open(FILE)
    file.write(b"abc")
    files.remove(FILE)
    assert files.list(FILE.parent) == []
    assert file.read_at(1, 9) == b"bc"
    loop.close()


# -- Network -----------------------------------------------------------------------------------------------------------


def test_a_lane_is_fifo_and_a_cut_delays_it() -> None:
    async def scenario(loop: SimLoop) -> None:
        network = Network(loop, loop.rng, Delays(congestion=0.3))
        arrived: list[tuple[int, float]] = []
        lane = Lane(network, "a", "b", lambda number: arrived.append((number, loop.time())))
        for number in range(50):
            lane.send(number)
        restore = network.cut("a", "b")
        await asyncio.sleep(5)
        assert arrived == []
        restore()
        for number in range(50, 60):
            lane.send(number)
        await asyncio.sleep(5)
        assert [number for number, _ in arrived] == list(range(60))

    run(scenario)


# -- Calls -------------------------------------------------------------------------------------------------------------


class Service:
    """A service that concatenates a client's appends. The end of its handler is in `ended`."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def Append(self, _: object, context: grpc.aio.ServicerContext[pb.AppendRequest, None]) -> pb.AppendResponse:
        total = 0
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                total += len(message.content)
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append(f"end after {total}")
        return pb.AppendResponse(total_chunks=total)

    async def Apply(self, _: pb.ApplyRequest, context: grpc.aio.ServicerContext[pb.ApplyRequest, None]) -> None:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not now")


class Setting:
    def __init__(self, loop: SimLoop) -> None:
        self.network = Network(loop, loop.rng)
        self.rpc = Rpc(self.network)
        self.process = Process(loop, "server")
        self.service = Service()
        self.rpc.endpoints.listen("http://server:80", "server", self.process, self.service)
        self.stub = self.rpc.stub("client", "http://server:80")

    async def started(self) -> grpc.aio.StreamUnaryCall[pb.AppendRequest, pb.AppendResponse]:
        call = self.stub.Append()
        await call.write(pb.AppendRequest(content=b"12345"))
        await asyncio.sleep(0.5)
        return call


def test_a_call_succeeds() -> None:
    async def scenario(loop: SimLoop) -> None:
        setting = Setting(loop)
        call = await setting.started()
        await call.write(pb.AppendRequest(content=b"678"))
        await call.done_writing()
        assert (await call).total_chunks == 8
        assert not setting.rpc.live
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(pb.AppendRequest())

    run(scenario)


def test_an_abort_is_the_clients_error() -> None:
    async def scenario(loop: SimLoop) -> None:
        with pytest.raises(grpc.aio.AioRpcError, match="not now") as caught:
            await Setting(loop).stub.Apply(pb.ApplyRequest())
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    run(scenario)


@pytest.mark.parametrize("way", ["kill", "break", "cut", "cancel"])
def test_a_broken_call_ends_on_both_sides(way: str) -> None:
    async def scenario(loop: SimLoop) -> None:
        setting = Setting(loop)
        call = await setting.started()
        result = asyncio.ensure_future(call)
        if way == "kill":
            setting.process.kill()
        elif way == "break":
            setting.rpc.break_call(next(iter(setting.rpc.live)))
        elif way == "cut":
            setting.network.cut_both("client", "server")
        else:
            call.cancel()
        await asyncio.sleep(20)
        if way == "cancel":
            with pytest.raises(asyncio.CancelledError):
                await result
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await result
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert len(setting.service.ended) == 1
        assert not setting.rpc.problems

    for seed in range(10):
        run(scenario, seed)


def test_a_call_to_an_endpoint_without_a_listener_is_refused() -> None:
    async def scenario(loop: SimLoop) -> None:
        stub = Setting(loop).rpc.stub("client", "http://nobody:80")
        with pytest.raises(grpc.aio.AioRpcError, match="refused"):
            await stub.ListFragments(pb.FragmentsRequest())

    run(scenario)


def test_consumer_services_have_their_own_methods() -> None:
    class Shards:
        async def List(self, request: pc.ListRequest, context: Any) -> pc.ListResponse:
            return pc.ListResponse(shards=[pc.ListResponse.Shard(mod_revision=7)])

    async def scenario(loop: SimLoop) -> None:
        setting = Setting(loop)
        setting.rpc.endpoints.listen("http://shards:80", "shards", Process(loop, "consumer"), Shards())
        stub = setting.rpc.shard_stub("client", "http://shards:80")
        assert [each.mod_revision for each in (await stub.List(pc.ListRequest())).shards] == [7]
        with pytest.raises(AttributeError):
            _ = stub.Append  # type: ignore[attr-defined]

    run(scenario)


def test_a_channel_is_ready_while_there_is_a_listener_and_a_link() -> None:
    ready = grpc.ChannelConnectivity.READY

    async def scenario(loop: SimLoop) -> None:
        setting = Setting(loop)
        channel = setting.rpc.channel("client", "http://server:80")
        restore = setting.network.cut("server", "client")
        waiting = asyncio.ensure_future(channel.channel_ready())
        await asyncio.sleep(5.0)
        assert not waiting.done()
        assert channel.get_state() is not ready
        restore()
        await waiting
        assert channel.get_state() is ready
        setting.process.kill()
        assert channel.get_state() is not ready

    run(scenario)


# -- etcd --------------------------------------------------------------------------------------------------------------


class _Held:
    """A timeline whose timers fire when a test advances it, however late."""

    epoch = 0.0

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[..., object], tuple[object, ...]]] = []

    def time(self) -> float:
        return self.now

    def later(self, seconds: float, action: Callable[..., object], *arguments: object) -> None:
        self.timers.append((self.now + seconds, action, arguments))

    def note(self, what: str) -> None:
        """Do nothing: no runs are compared."""

    def pass_until(self, now: float) -> None:
        """Stall until then, and fire all due timers."""
        self.now = now
        due, self.timers = [t for t in self.timers if t[0] <= now], [t for t in self.timers if t[0] > now]
        for _, action, arguments in due:
            action(*arguments)


def test_a_lease_does_not_expire_because_the_whole_process_stalled() -> None:
    held = _Held()
    etcd = SimEtcd(cast(Any, held), cast(Any, None))
    lease = etcd.grant(10).id
    held.pass_until(100.0)
    assert etcd.keep_alive(lease) == 10  # Its holder is as late.
    held.pass_until(105.0)
    held.pass_until(110.0)
    assert etcd.status(lease).granted == 0
    lease = etcd.grant(10).id
    held.pass_until(200.0)
    held.pass_until(205.0)
    assert not etcd.keep_alive(lease)  # The holder did not use its additional time.
    lease = etcd.grant(10).id
    held.pass_until(215.3)
    assert etcd.keep_alive(lease) == 10  # The stall may have lasted for the whole excess.


def coordinator(loop: SimLoop) -> tuple[Network, SimEtcd, SimCoordinator]:
    network = Network(loop, loop.rng)
    etcd = SimEtcd(loop, network)
    process = Process(loop, "client")
    return network, etcd, SimCoordinator(etcd, network, "client", process, SimClock(loop, process))


def test_transactions_are_guarded() -> None:
    async def scenario(loop: SimLoop) -> None:
        _, _, client = coordinator(loop)
        created = await client.txn([absent("/a")], [Put("/a", b"1")])
        assert (created.succeeded, created.header.revision) == (True, 2)
        refused = await client.txn([absent("/a")], [Put("/a", b"2")], otherwise=["/a"])
        assert not refused.succeeded
        (found,) = refused.found
        assert found is not None
        assert (found.value, found.create_revision) == (b"1", 2)
        assert (await client.txn([unmodified(found)], [Delete("/a")])).succeeded
        assert (await client.range("/")).kvs == ()

    run(scenario)


def test_a_lease_that_is_not_kept_alive_expires_with_its_keys() -> None:
    async def scenario(loop: SimLoop) -> None:
        _, _, client = coordinator(loop)
        lease = await client.lease_grant(5)
        await client.txn([], [Put("/member", b"", lease=lease.id)])
        for _ in range(4):
            await asyncio.sleep(3)
            assert await client.lease_keepalive(lease.id) == 5
        assert (await client.get("/member"))[1] is not None
        await asyncio.sleep(6)
        assert (await client.get("/member"))[1] is None
        assert await client.lease_keepalive(lease.id) == 0

    run(scenario)


def test_a_watch_resumes_without_a_gap_and_is_reset_by_compaction() -> None:
    async def scenario(loop: SimLoop) -> None:
        _, etcd, client = coordinator(loop)
        watch = client.watch("/", 2)
        seen: list[int] = []
        reconnects: list[int] = []

        async def follow(count: int) -> None:
            while len(seen) < count:
                batch: WatchBatch = await anext(watch)
                if batch.reconnected:
                    assert (batch.header.revision, batch.events) == (seen[-1], ())
                    reconnects.append(batch.header.revision)
                else:
                    seen.append(batch.header.revision)

        etcd.txn([], [Put("/a", b"1")], [])
        await follow(1)
        etcd.break_watches()
        etcd.txn([], [Put("/a", b"2")], [])
        etcd.txn([], [Put("/a", b"3")], [])
        await follow(3)
        assert (seen, reconnects) == ([2, 3, 4], [2])
        etcd.break_watches()
        etcd.txn([], [Put("/a", b"4")], [])
        etcd.compact()
        with pytest.raises(WatchReset):
            await follow(4)

    run(scenario)


def test_a_lost_answer_leaves_the_outcome_unknown() -> None:
    async def scenario(loop: SimLoop) -> None:
        network, etcd, client = coordinator(loop)
        restore = network.cut("etcd", "client")
        with pytest.raises(TxnOutcomeUnknown):
            await client.txn([], [Put("/a", b"1")])
        with pytest.raises(Unavailable):
            await client.get("/a")
        assert "/a" in etcd.kvs
        restore()
        assert (await client.get("/a"))[1] is not None

    run(scenario)


# -- Object store ------------------------------------------------------------------------------------------------------


def test_the_store_may_apply_a_put_and_still_fail() -> None:
    async def scenario(loop: SimLoop) -> None:
        network = Network(loop, loop.rng)
        service = SimObjectStore(network, loop.rng)
        store = SimFragments("s3://it/", service, network, "broker", Process(loop, "broker"))
        fragment = Fragment("a/journal", 0, 3, sum_of(b"abc"), Codec.NONE)
        service.faults = StoreFaults(fail_after_applying=1.0, list_lag=10.0)
        with pytest.raises(StoreError, match="503"):
            await store.put(fragment, b"abc")
        assert await store.exists(fragment)
        assert await store.read(fragment) == b"abc"
        assert [found async for found in store.list("a/journal")] == []
        await asyncio.sleep(11)
        assert [found.content_path async for found in store.list("a/journal")] == [fragment.content_path]
        await store.remove(fragment)
        with pytest.raises(FragmentNotFound):
            await store.get(fragment)
        service.faults = StoreFaults(refuse=1.0)
        with pytest.raises(StoreError):
            await store.exists(fragment)

    run(scenario)
