"""Forks on real brokers in this process, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from itertools import accumulate

import pytest

from coranto import labels
from coranto.client import JournalClient
from coranto.client.heads import JournalHead
from coranto.client.values import Chunk
from coranto.errors import ContentGone, CorruptData, InvalidInput, JournalNotFound, RpcFailed, Unavailable
from coranto.forks import Fork, creating, drop_fork, filling, fork_journal, fork_journals, fork_of, forks_of
from coranto.forks.choosing import SharedSpan, fork_at, new_spec, with_hold
from coranto.fragments.forks import holds_of
from coranto.fragments.fragment import Fragment
from coranto.testing import Cluster
from coranto.testing.sim.loop import simulated
from coranto.testing.sim.object_store import SimFragments
from coranto.wire import protocol_pb2 as pb

SOURCE, FORK = "shop/orders", "what-if/orders"
PIECES = [f'{{"number":{number},"pad":"{"x" * 800}"}}\n'.encode() for number in range(12)]
WHOLE = b"".join(PIECES)


def spec(name: str = SOURCE, retention: int = 0, **label: str) -> pb.JournalSpec:
    """Return a journal with fragments of two pieces, listed every second."""
    made = pb.JournalSpec(name=name, replication=2, flags=pb.JournalSpec.O_RDWR)
    made.labels.CopyFrom(labels.label_set({labels.CONTENT_TYPE: labels.JSON_LINES, **label}))
    made.fragment.length, made.fragment.compression_codec = 1024, pb.GZIP
    made.fragment.stores.append("file:///fragments/")
    made.fragment.refresh_interval.FromSeconds(1)
    made.fragment.retention.FromSeconds(retention)
    return made


Test = Callable[[Cluster, JournalClient], Awaitable[None]]


def on_cluster(test: Test, brokers: int = 3, **fields: int) -> None:
    """Run a test on a cluster with a filled source."""

    async def main() -> None:
        async with Cluster(brokers=brokers) as cluster:
            client = cluster.client()
            await cluster.create(spec(**fields))
            for piece in PIECES:
                await client.append(SOURCE, piece)
            await client._clock.sleep(2)  # Whole fragments are stored and listed.
            await test(cluster, client)

    with simulated(0, shuffle=False) as loop:
        loop.run_until_complete(main())
        assert not loop.problems


async def fork(client: JournalClient, source: str, name: str, at: int | None = None) -> Fork:
    return await fork_journal(client, source, name, at=at, clock=client._clock)


async def content(client: JournalClient, journal: str, begin: int = 0) -> bytes:
    return await client.read_all(journal, begin, await client.head(journal))


async def present(client: JournalClient, name: str) -> pb.JournalSpec:
    (info,) = (await client.list(f"name={name}")).journals
    return info.spec


async def change(client: JournalClient, changed: pb.JournalSpec) -> None:
    await client.apply([pb.ApplyRequest.Change(upsert=changed, expect_mod_revision=-1)])


def test_a_fork_shares_stored_fragments_and_diverges() -> None:
    async def test(cluster: Cluster, client: JournalClient) -> None:
        at = len(b"".join(PIECES[:8]))
        made = await fork(client, SOURCE, FORK, at=at)
        assert made == fork_of(await present(client, FORK))
        assert (made.source, made.name, made.offset, made.begin) == (SOURCE, FORK, at, 0)
        assert 0 < made.shared_end < at
        assert not made.forming
        assert await content(client, FORK) == WHOLE[:at]
        # Shared content is only in the folder of the source.
        assert all(each.begin >= made.shared_end for each in cluster.fragments(FORK))
        shared = [each.fragment for each in await client.fragments(FORK) if each.fragment.journal == SOURCE]
        assert max(each.end for each in shared) == made.shared_end
        # They diverge.
        await client.append(FORK, b"fork\n")
        await client.append(SOURCE, b"source\n")
        assert await content(client, FORK) == WHOLE[:at] + b"fork\n"
        assert await content(client, SOURCE) == WHOLE + b"source\n"
        assert await forks_of(client, SOURCE) == (made,)
        assert await fork(client, SOURCE, FORK, at=at) == made  # It exists already.
        with pytest.raises(InvalidInput, match="diverges"):
            await fork(client, SOURCE, FORK, at=at + 1)

    on_cluster(test)


def test_a_fork_at_the_head_of_a_fork_survives_restarts() -> None:
    """A fork of a fork shares the fragments of both, and brokers find them with only specs and stores."""

    async def test(cluster: Cluster, client: JournalClient) -> None:
        first = await fork(client, SOURCE, FORK)
        assert first.offset == len(WHOLE)
        more = [piece.replace(b"x", b"y") for piece in PIECES]
        for piece in more:
            await client.append(FORK, piece)
        await client._clock.sleep(2)
        second = await fork(client, FORK, "what-if/again")
        assert [(each.journal, each.end) for each in second.shares] == [
            (SOURCE, first.shared_end),
            (FORK, second.shared_end),
        ]
        assert await content(client, "what-if/again") == WHOLE + b"".join(more)
        for number in range(3):
            await cluster.stop(number)
        for number in range(3):
            await cluster.start(number)
        for journal in (FORK, "what-if/again"):
            assert await content(client, journal) == WHOLE + b"".join(more)
            assert (await client.append(journal, b"end\n")).begin == len(WHOLE + b"".join(more))
        with pytest.raises(RpcFailed, match="its fork what-if/again"):
            await drop_fork(client, FORK)
        await drop_fork(client, "what-if/again")
        await drop_fork(client, FORK)
        assert holds_of(await present(client, SOURCE)) == {}

    on_cluster(test)


def test_retention_keeps_shared_fragments_until_the_fork_is_dropped() -> None:
    async def test(cluster: Cluster, client: JournalClient) -> None:
        made = await fork(client, SOURCE, FORK)
        unretained = await present(client, FORK)
        unretained.fragment.retention.Clear()
        await change(client, unretained)
        before = set(cluster.fragments(SOURCE))
        clock = client._clock
        await clock.sleep(200)
        assert before <= set(cluster.fragments(SOURCE))
        assert await content(client, FORK) == WHOLE
        await drop_fork(client, FORK)
        await clock.sleep(30)
        assert len(cluster.fragments(SOURCE)) == 1  # The last one, which marks the head.
        assert made.begin == 0

    on_cluster(test, retention=100)


def test_a_forks_own_retention_removes_no_files_of_its_source() -> None:
    async def test(cluster: Cluster, client: JournalClient) -> None:
        made = await fork(client, SOURCE, FORK)
        kept = await present(client, SOURCE)
        kept.fragment.retention.Clear()
        await change(client, kept)
        before = set(cluster.fragments(SOURCE))
        await client._clock.sleep(110)
        for piece in PIECES[:4]:
            await client.append(FORK, piece)
        await client._clock.sleep(10)
        assert before <= set(cluster.fragments(SOURCE))
        first = min(each.fragment.begin for each in await client.fragments(FORK))
        assert first >= made.shared_end
        assert all(each.begin >= made.shared_end for each in cluster.fragments(FORK))
        assert (await client.append(FORK, b"x\n")).begin == len(WHOLE + b"".join(PIECES[:4]))

    on_cluster(test, retention=100)


def test_fragments_close_to_the_end_of_retention_are_not_shared() -> None:
    async def test(cluster: Cluster, client: JournalClient) -> None:
        await client._clock.sleep(90)  # Retention may remove it soon: its age is within the margin.
        young = [piece.replace(b"x", b"z") for piece in PIECES[:6]]
        for piece in young:
            await client.append(SOURCE, piece)
        await client._clock.sleep(2)
        made = await fork(client, SOURCE, FORK)
        assert len(WHOLE) - 2 * len(PIECES[0]) - 100 <= made.begin
        assert made.shared_end > made.begin
        assert await content(client, FORK, made.begin) == (WHOLE + b"".join(young))[made.begin :]
        begun = client._clock.monotonic()
        chunks = [chunk async for chunk in client.read(FORK, 0, direct=False)]  # It skips the gap, as on the source.
        assert (chunks[0].offset, chunks[-1].end) == (made.begin, made.offset)
        assert client._clock.monotonic() < begun + 1
        await client._clock.sleep(20)
        assert min(each.end for each in cluster.fragments(SOURCE)) > made.begin
        assert await content(client, FORK, made.begin) == (WHOLE + b"".join(young))[made.begin :]
        with pytest.raises(ContentGone):
            await fork(client, SOURCE, "what-if/late", at=len(PIECES[0]))

    on_cluster(test, retention=100)


def test_fragments_that_are_being_removed_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal is in progress and cannot be stopped, and listings still show its fragment."""

    async def test(cluster: Cluster, client: JournalClient) -> None:
        remove, begun, allowed = SimFragments.remove, list[Fragment](), asyncio.Event()

        async def later(self: SimFragments, fragment: Fragment) -> None:
            begun.append(fragment)
            await allowed.wait()
            await remove(self, fragment)

        monkeypatch.setattr(SimFragments, "remove", later)
        await client._clock.sleep(80)
        young = [piece.replace(b"x", b"z") for piece in PIECES]
        for piece in young:
            await client.append(SOURCE, piece)
        while not begun:
            await client._clock.sleep(1)
        await client._clock.sleep(3)
        assert begun[0] in [replace(each.fragment, file_bytes=None) for each in await client.fragments(SOURCE)]
        made = await fork(client, SOURCE, FORK)
        assert made.begin >= begun[0].end
        allowed.set()
        await client._clock.sleep(3)
        assert begun[0].begin not in [each.begin for each in cluster.fragments(SOURCE)]
        assert max(each.end for each in begun) <= made.begin  # The removal round continues below the hold.
        assert await content(client, FORK, made.begin) == (WHOLE + b"".join(young))[made.begin :]

    on_cluster(test, retention=100)


def test_an_interrupted_fork_is_finished_by_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = ("_create", "_protect", "_fill", "_complete")

    async def test(cluster: Cluster, client: JournalClient) -> None:
        at = len(WHOLE) - len(PIECES[-1])
        for step in steps:
            name = f"what-if/{step.strip('_')}"
            work = getattr(creating._Batch, step)

            async def stop(self: object, *args: object, work: Callable[..., Awaitable[None]] = work) -> None:
                await work(self, *args)
                raise ConnectionError

            with monkeypatch.context() as patch:
                patch.setattr(creating._Batch, step, stop)
                with pytest.raises(ConnectionError):
                    await fork(client, SOURCE, name, at=at)
            made = await fork(client, SOURCE, name, at=at)
            assert not made.forming
            assert await content(client, name) == WHOLE[:at]

    on_cluster(test)


def test_a_fork_with_other_content_is_not_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cluster: Cluster, client: JournalClient) -> None:
        first = await fork(client, SOURCE, FORK)
        for piece in PIECES:
            await client.append(FORK, piece)
        await client._clock.sleep(2)
        await drop_fork(client, FORK)
        assert cluster.fragments(FORK)  # Its files stay.
        with pytest.raises(CorruptData, match="other content"):
            await fork(client, SOURCE, FORK, at=first.shared_end)
        (forming,) = await forks_of(client, SOURCE)
        assert forming.forming
        await drop_fork(client, FORK)
        with pytest.raises(JournalNotFound):
            await drop_fork(client, FORK)

    on_cluster(test)


def test_no_fragment_of_a_fork_begins_within_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at the ends of readers' chunks, nor where the first fragment ends early."""

    async def test(cluster: Cluster, client: JournalClient) -> None:
        read = filling.InitialContent._read

        async def torn(self: filling.InitialContent, journal: str, begin: int, end: int) -> AsyncGenerator[Chunk]:
            async for chunk in read(self, journal, begin, end):
                for at in range(0, len(chunk.content), 700):
                    yield Chunk(chunk.offset + at, chunk.content[at : at + 700], chunk.write_head)

        monkeypatch.setattr(filling.InitialContent, "_read", torn)
        await client._clock.sleep(90)  # All of it is too old to be shared.
        for piece in PIECES[:3]:
            await client.append(SOURCE, piece)
        made = await fork(client, SOURCE, FORK)
        for piece in PIECES:
            await client.append(FORK, piece)
        await client._clock.sleep(2)
        boundaries = set(accumulate(map(len, [*PIECES, *PIECES[:3], *PIECES]), initial=0))
        begins = {each.fragment.begin for each in await client.fragments(FORK)}
        assert made.shares == ()
        assert min(begins) == made.begin
        assert begins <= boundaries

    on_cluster(test, retention=100)


def test_concurrent_calls_for_the_same_fork_append_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes offset 0, where an append cannot be fenced by its offset alone."""

    async def test(cluster: Cluster, client: JournalClient) -> None:
        append, waiting, both = filling.InitialContent._append, list[int](), asyncio.Event()

        async def together(self: filling.InitialContent, made: Fork, begin: int, end: int) -> None:
            waiting.append(begin)
            if len(waiting) == 2:
                both.set()
            await both.wait()
            await append(self, made, begin, end)

        monkeypatch.setattr(filling.InitialContent, "_append", together)
        await cluster.create(spec("shop/returns"))
        await client.append("shop/returns", PIECES[0])
        made, again = await asyncio.gather(*(fork(client, "shop/returns", "what-if/returns") for _ in range(2)))
        assert waiting == [0, 0]
        assert made == again
        assert await content(client, "what-if/returns") == PIECES[0]

    on_cluster(test)


def test_forks_require_brokers_that_support_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cluster: Cluster, client: JournalClient) -> None:
        of_wire = JournalHead.of
        monkeypatch.setattr(JournalHead, "of", lambda wire: replace(of_wire(wire), keeps_forks=False))
        with pytest.raises(InvalidInput, match="Upgrade all brokers"):
            await fork(client, SOURCE, FORK)
        assert await forks_of(client, SOURCE) == ()
        # The fork's own primary must support forks, too.
        monkeypatch.setattr(JournalHead, "of", lambda wire: replace(of_wire(wire), keeps_forks=wire.journal == SOURCE))
        with pytest.raises(InvalidInput, match=f"the primary of {FORK}"):
            await fork(client, SOURCE, FORK)
        monkeypatch.setattr(JournalHead, "of", of_wire)
        assert not (await fork(client, SOURCE, FORK)).forming

    on_cluster(test)


def test_no_fork_shares_content_that_its_source_does_not_have_yet() -> None:
    """It would list later content, even after its creator lost the right to read the source."""

    async def test(cluster: Cluster, client: JournalClient) -> None:
        primaries = set()
        for name in (SOURCE, "shop/b", "shop/c", "shop/d", "shop/e"):
            if name != SOURCE:
                await cluster.create(spec(name))
            source = await present(client, name)
            greedy = fork_at(source, FORK, 1 << 62, SharedSpan(0, 1 << 62))
            changes = [new_spec(source, greedy), with_hold(source, greedy)]
            with pytest.raises((InvalidInput, RpcFailed), match="its stores have it up to"):
                await client.apply([pb.ApplyRequest.Change(upsert=each, expect_mod_revision=-1) for each in changes])
            primaries.add((await client.heads(f"name={name}")).journals[0].broker)
        assert len(primaries) > 1  # More than one broker must reject it.
        assert await forks_of(client, SOURCE) == ()

    on_cluster(test)


def test_a_reused_name_does_not_show_content_of_the_earlier_fork() -> None:
    """The earlier fork's files stay, at offsets below and within the shared span of the new fork."""

    async def test(cluster: Cluster, client: JournalClient) -> None:
        await fork(client, SOURCE, FORK)
        for _ in range(3):
            await client.append(FORK, PIECES[0].replace(b"x", b"o") * 3)
        await client._clock.sleep(2)
        await drop_fork(client, FORK)
        left = [each for each in cluster.fragments(FORK) if each.end > each.begin]
        assert left
        more = [piece.replace(b"x", b"y") for piece in PIECES]
        for piece in more:
            await client.append(SOURCE, piece)
        await client._clock.sleep(2)
        made = await fork(client, SOURCE, FORK)
        assert made.shared_end > max(each.begin for each in left)
        again = await fork(client, FORK, "what-if/again", at=made.shared_end)
        for _ in range(2):
            assert await content(client, FORK) == WHOLE + b"".join(more)
            assert await content(client, again.name) == (WHOLE + b"".join(more))[: made.shared_end]
            for number in range(3):
                await cluster.stop(number)
            for number in range(3):
                await cluster.start(number)

    on_cluster(test)


def test_a_fork_is_dropped_if_a_shared_fragment_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cluster: Cluster, client: JournalClient) -> None:
        create = creating._Batch._create

        async def lose(self: creating._Batch, *args: object) -> None:
            first = min(cluster.fragments(SOURCE), key=lambda each: each.begin)
            cluster._world.store.remove(first)
            await create(self, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(creating._Batch, "_create", lose)
        with pytest.raises(Unavailable, match="fork it again"):
            await fork(client, SOURCE, FORK)
        assert await forks_of(client, SOURCE) == ()
        assert holds_of(await present(client, SOURCE)) == {}

    on_cluster(test)


def test_an_interrupted_fork_that_lacks_content_of_its_source_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cluster: Cluster, client: JournalClient) -> None:
        create = creating._Batch._create

        async def lose(self: creating._Batch, *args: object) -> None:
            inner = sorted(cluster.fragments(SOURCE), key=lambda each: each.begin)[1]
            cluster._world.store.remove(inner)
            await create(self, *args)  # type: ignore[arg-type]
            raise ConnectionError

        with monkeypatch.context() as patch:
            patch.setattr(creating._Batch, "_create", lose)
            with pytest.raises(ConnectionError):
                await fork(client, SOURCE, FORK)
        with pytest.raises(Unavailable, match="fork it again"):
            await fork(client, SOURCE, FORK)
        assert await forks_of(client, SOURCE) == ()

    on_cluster(test)


def test_concurrent_forks_retry_after_a_change_of_their_source() -> None:
    async def test(cluster: Cluster, client: JournalClient) -> None:
        forks = [fork(client, SOURCE, f"what-if/{number}") for number in range(4)]
        made = await asyncio.gather(*forks)
        assert holds_of(await present(client, SOURCE)) == {each.name: 0 for each in made}

    on_cluster(test)


def test_journals_are_forked_together_with_labels_of_their_own() -> None:
    async def test(cluster: Cluster, client: JournalClient) -> None:
        await cluster.create(spec("shop/returns", region="eu"))
        await client.append("shop/returns", PIECES[0])
        made = await fork_journals(
            client,
            {SOURCE: (FORK, None), "shop/returns": ("what-if/returns", None)},
            labels={"what-if/returns": labels.label_set(region="us", run="7")},
        )
        assert [each.name for each in made] == [FORK, "what-if/returns"]
        found = await present(client, "what-if/returns")
        assert labels.value_of(found.labels, "region") == "us"
        assert labels.value_of(found.labels, "run") == "7"
        assert await content(client, "what-if/returns") == PIECES[0]  # None of it was stored.
        assert made[1].shares == ()
        assert holds_of(await present(client, "shop/returns")) == {}

    on_cluster(test)


@pytest.mark.parametrize(
    ("source", "name", "at", "match"),
    [
        (SOURCE, FORK, len(WHOLE) + 1, "ends at"),
        (SOURCE, FORK, len(PIECES[0]) - 1, "within a message"),
        (SOURCE, SOURCE, None, "no fork"),
        (SOURCE, "shop/orders/nested", None, "nests"),
        ("shop/nothing", FORK, None, "shop/nothing"),
    ],
)
def test_invalid_forks_are_refused(source: str, name: str, at: int | None, match: str) -> None:
    async def test(cluster: Cluster, client: JournalClient) -> None:
        with pytest.raises((InvalidInput, JournalNotFound, RpcFailed), match=match):
            await fork(client, source, name, at=at)
        assert await forks_of(client, SOURCE) == ()

    on_cluster(test)


def test_changes_of_a_journal_without_forks_need_no_further_call() -> None:
    async def test(cluster: Cluster, client: JournalClient) -> None:
        before = cluster.revision
        await change(client, await present(client, SOURCE))
        assert cluster.revision == before + 1

    on_cluster(test)
