"""Streams are created, scaled, sealed, truncated and deleted, by concurrent processes and by processes that die."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from coranto import labels
from coranto.client import AppendResult, JournalClient
from coranto.errors import (
    ApplyOutcomeUnknown,
    IndexHasGreaterOffset,
    InvalidInput,
    NotAllowed,
    RegisterMismatch,
    RpcFailed,
    StreamChanged,
    StreamExists,
    StreamNotFound,
    StreamSealed,
)
from coranto.specs.durability import FSYNC
from coranto.streams.control.decisions import Decisions, Gate
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.control.scaling import Merge, ScalingPolicy, Split
from coranto.streams.groups.reader_groups import ReaderGroup
from coranto.streams.model.keys import KeyRange
from coranto.streams.model.stream import (
    HELD_LABEL,
    STREAM_PART_LABEL,
    Stream,
    covers,
    marks_journal,
    readers_journal,
    transactions_journal,
)
from coranto.testing.cluster import STORE_URL, Cluster
from coranto.wire import protocol_pb2 as pb

TEMPLATE = default_template(stores=[STORE_URL])
HELD = labels.label_set({HELD_LABEL: "1"})


async def fill(client: JournalClient, stream: Stream) -> dict[int, int]:
    """Append to each active segment, as a writer does: more to segments of higher numbers. Return the ends."""
    ends = {}
    for segment in stream.active():
        result = await client.append(segment.journal, b"event\n" * (segment.number + 1), union_registers=HELD)
        ends[segment.number] = result.end
    return ends


async def gate(client: JournalClient, name: str) -> Gate:
    return await Decisions(client, name, lambda size: b"x" * size).gate()


# ------------------------------------------------------------------------------------------------------------ creating


async def test_creating_a_stream_creates_all_its_parts(streams: Streams, client: JournalClient) -> None:
    created = await streams.create(
        "shop/orders", 3, template=TEMPLATE, policy=ScalingPolicy.by_events(10), max_writers=5
    )
    assert covers((each.range for each in created.active()), KeyRange.FULL)
    assert [each.number for each in created.active()] == [0, 1, 2]
    assert (created.epoch, created.content_type, created.max_writers) == (0, labels.JSON_LINES, 5)
    assert created.scaling == "events/10/2/1/64"
    assert created == await streams.describe("shop/orders")
    assert await streams.heads(created) == {0: 0, 1: 0, 2: 0}
    others = {info.name: info.spec for info in (await client.list(f"{STREAM_PART_LABEL}=shop/orders")).journals}
    assert set(others) == {transactions_journal("shop/orders"), marks_journal("shop/orders")}
    for spec in others.values():
        assert not any(label.name == "coranto.dev/scaling" for label in spec.labels.labels)
    assert await streams.list() == (created,)
    with pytest.raises(StreamExists, match="choose another name"):
        await streams.create("shop/orders", template=TEMPLATE)


async def test_streams_are_distinguished_by_full_names(streams: Streams) -> None:
    outer = await streams.create("orders", 2, template=TEMPLATE)
    inner = await streams.create("orders/late", template=TEMPLATE)
    await streams.scale("orders", [Split(0)])
    assert await streams.describe("orders/late") == inner
    await streams.delete("orders")
    assert await streams.list() == (inner,)
    with pytest.raises(StreamNotFound, match="no stream orders"):
        await streams.describe(outer.name)


async def test_stream_names_that_nest_with_journals_are_refused(streams: Streams, client: JournalClient) -> None:
    await streams.create("shop/orders", template=TEMPLATE)

    async def journal(name: str) -> None:
        spec = pb.JournalSpec()
        spec.CopyFrom(TEMPLATE)
        spec.name = name
        await client.apply([pb.ApplyRequest.Change(upsert=spec)])

    for name in ("shop/orders", "shop/orders/segment/00000000/x", "shop"):
        with pytest.raises(RpcFailed, match=f"{name} nests with shop/orders/"):
            await journal(name)
    await journal("shop/late")
    with pytest.raises(RpcFailed, match="shop/late/segment/00000000 nests with shop/late"):
        await streams.create("shop/late", template=TEMPLATE)
    with pytest.raises(RpcFailed, match="nests with shop/orders/transactions"):
        await streams.create("shop/orders/transactions", template=TEMPLATE)
    assert [stream.name for stream in await streams.list()] == ["shop/orders"]


async def test_nested_reader_group_names_are_refused(streams: Streams, client: JournalClient) -> None:
    await streams.create("shop/orders", template=TEMPLATE)
    assert await ReaderGroup(client, "shop/orders", "billing").create()
    for group in ("billing/eu", "billing/eu/1"):
        with pytest.raises(InvalidInput, match=f"readers/{group} would nest with shop/orders/readers/billing, "):
            await ReaderGroup(client, "shop/orders", group).create()
    assert await ReaderGroup(client, "shop/orders", "billing-eu").create()
    assert await ReaderGroup(client, "shop/orders", "sales/eu").create()
    with pytest.raises(InvalidInput, match="readers/sales would nest with shop/orders/readers/sales/eu"):
        await ReaderGroup(client, "shop/orders", "sales").create()
    assert not await ReaderGroup(client, "shop/orders", "sales/eu").create(), "it is there already"


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("a b", {}, "character ' '"),
        ("orders", {"segments": 0}, "not between 1 and 120"),
        ("orders", {"segments": 121}, "not between 1 and 120"),
        ("orders", {"max_writers": 0}, "between 1 and 256"),
        ("orders", {"max_writers": 257}, "between 1 and 256"),
        ("orders", {"template": pb.JournalSpec(replication=0)}, "replication"),
    ],
)
async def test_invalid_creations_are_refused(
    streams: Streams, name: str, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidInput, match=problem):
        await streams.create(name, **{"template": TEMPLATE, **options})
    assert await streams.list() == ()


async def test_content_of_a_deleted_stream_is_not_used_by_a_new_one(
    cluster: Cluster, streams: Streams, client: JournalClient
) -> None:
    await fill(client, await streams.create("orders", 2, template=TEMPLATE))
    await cluster.stop(0)  # The broker stores its local content.
    await cluster.start(0)
    await streams.delete("orders")
    with pytest.raises(StreamExists, match="content of an earlier stream orders"):
        await streams.create("orders", 2, template=TEMPLATE)
    assert (await client.list()).journals == ()


async def test_parts_are_created_once(streams: Streams, client: JournalClient) -> None:
    template = pb.JournalSpec()
    template.CopyFrom(TEMPLATE)
    template.labels.CopyFrom(labels.label_set({FSYNC: "commit"}))
    await streams.create("orders", template=template, max_writers=3)
    journal = readers_journal("orders", "group")
    for _ in range(2):
        await streams.ensure_part("orders", journal, more={"coranto.dev/mark": "0"})
    (info,) = (await client.list(f"name={journal}")).journals
    assert labels.as_pairs(info.spec.labels) == (
        (labels.CONTENT_TYPE, labels.JSON_LINES),
        (FSYNC, "commit"),  # Parts are as durable as segments.
        ("coranto.dev/mark", "0"),
        (STREAM_PART_LABEL, "orders"),
    )
    assert info.spec.fragment == TEMPLATE.fragment


# ------------------------------------------------------------------------------------------------------------- scaling


async def test_predecessors_end_at_their_last_event(streams: Streams, client: JournalClient) -> None:
    ends = await fill(client, await streams.create("orders", 2, template=TEMPLATE))
    scaled = await streams.scale("orders", [Split(1, 3)])
    assert (scaled.epoch, [each.number for each in scaled.active()]) == (1, [0, 2, 3, 4])
    assert scaled.segments[1].sealed_at == ends[1]
    assert [each.number for each in scaled.successors(1)] == [2, 3, 4]
    with pytest.raises(NotAllowed):
        await client.append(scaled.segments[1].journal, b"late\n")
    ends |= await fill(client, scaled)
    merged = await streams.scale("orders", [Merge((0, 2)), Merge((3, 4))])
    assert (merged.epoch, [each.number for each in merged.active()]) == (2, [5, 6])
    assert {n: each.sealed_at for n, each in merged.segments.items() if each.sealing} == ends
    assert merged.segments[5].predecessors == {0, 2}
    assert (await gate(client, "orders")).is_open
    assert merged.unfinished() == ()


async def test_appends_during_sealing_are_below_the_final_offset_or_refused(
    streams: Streams, client: JournalClient
) -> None:
    stream = await streams.create("orders", 1, template=TEMPLATE)
    journal = stream.segments[0].journal
    committed: list[int] = []
    enough = asyncio.Event()

    async def append(size: int) -> None:
        try:
            while True:
                result = await client.append(journal, b"e" * size + b"\n", union_registers=HELD)
                committed.append(result.end)
                if len(committed) >= 10:
                    enough.set()
        except NotAllowed:
            return

    writers = [asyncio.create_task(append(size)) for size in (1, 100, 1 << 17)]
    await enough.wait()
    scaled = await streams.scale("orders", [Split(0)])
    await asyncio.gather(*writers)
    assert scaled.segments[0].sealed_at == max(committed) == await client.head(journal)


async def test_one_of_two_concurrent_scalings_wins(streams: Streams, client: JournalClient) -> None:
    stream = await streams.create("orders", 2, template=TEMPLATE)
    await fill(client, stream)
    both = await asyncio.gather(
        streams.scale("orders", [Split(0)]), Streams(client).scale("orders", [Split(1)]), return_exceptions=True
    )
    won = [each for each in both if isinstance(each, Stream)]
    lost = [each for each in both if isinstance(each, BaseException)]
    assert (len(won), len(lost)) == (1, 1)
    assert isinstance(lost[0], StreamChanged)
    assert "at epoch 1 now. Nothing of this change was applied" in str(lost[0])
    found = await streams.describe("orders")
    assert (found.epoch, len(found.active()), found.unfinished()) == (1, 3, ())
    assert (await gate(client, "orders")).is_open


class Died(Exception):
    """The process died."""


class Mortal:
    """A client whose process dies just before call number `last`, or that loses the answer of an Apply at that call."""

    def __init__(self, client: JournalClient, last: int, *, dies: bool = True) -> None:
        self._client = client
        self._last = last
        self._dies = dies
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if name not in ("apply", "append", "list", "head"):
            return call

        async def counted(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls >= self._last and self._dies:
                raise Died
            result = await call(*args, **options)
            if self.calls == self._last and name == "apply":
                raise ApplyOutcomeUnknown("the answer was lost")
            return result

        return counted


async def test_another_process_completes_or_undoes_an_interrupted_scaling(
    streams: Streams, client: JournalClient
) -> None:
    """The process dies before each of its calls; the point after a call is the point before the next one."""
    outcomes = set()
    last, survived = 1, False
    while not survived:
        name = f"orders-{last}"
        ends = await fill(client, await streams.create(name, 2, template=TEMPLATE))
        mortal: Any = Mortal(client, last)
        try:
            await Streams(mortal).scale(name, [Split(1)])
            survived = True
        except Died:
            last += 1
        found = await streams.resume(name)
        outcomes.add(found.epoch)
        assert (await gate(client, name)).is_open or found.epoch == 0
        assert found.unfinished() == ()
        if found.epoch == 1:
            assert found.segments[1].sealed_at == ends[1]
            assert [each.number for each in found.active()] == [0, 2, 3]
        again = await streams.scale(name, [Split(0)])  # The stream can be scaled again.
        assert again.epoch == found.epoch + 1
        assert again.segments[0].sealed_at == ends[0]
        assert (await gate(client, name)).is_open
        assert await streams.resume(name) == again, "there is nothing left to do"
        await streams.delete(name)
    assert outcomes == {0, 1}
    assert last > 6


async def test_a_lost_apply_answer_is_recovered(streams: Streams, client: JournalClient) -> None:
    for last in range(1, 8):
        name = f"orders-{last}"
        await fill(client, await streams.create(name, 2, template=TEMPLATE))
        deaf: Any = Mortal(client, last, dies=False)
        scaled = await Streams(deaf).scale(name, [Split(1)])
        assert (scaled.epoch, len(scaled.active()), scaled.unfinished()) == (1, 3, ())
        assert (await gate(client, name)).is_open
    deaf = Mortal(client, 1, dies=False)
    created = await Streams(deaf).create("returns", 2, template=TEMPLATE)
    assert len(created.active()) == 2


async def test_the_gate_has_the_revision_of_a_change_whose_answers_were_lost(
    streams: Streams, client: JournalClient
) -> None:
    await streams.create("orders", 2, template=TEMPLATE)

    class Deaf:
        applied_revision = applied_cluster = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

        async def apply(self, changes: Any) -> Any:
            await client.apply(changes)
            raise ApplyOutcomeUnknown("the answer was lost")

    deaf: Any = Deaf()
    scaled = await Streams(deaf).scale("orders", [Split(1)])
    found = await gate(client, "orders")
    assert found.is_open
    assert found.cluster == scaled.cluster != 0
    assert found.revision == max(each.mod_revision for each in scaled.segments.values())


async def test_a_delayed_process_that_was_overtaken_changes_nothing(streams: Streams, client: JournalClient) -> None:
    """Another process takes it for dead and opens its gate, and its Apply arrives later."""
    await fill(client, await streams.create("orders", 2, template=TEMPLATE))
    away, back = asyncio.Event(), asyncio.Event()

    class Slow(Mortal):
        def __getattr__(self, name: str) -> Any:
            call = getattr(self._client, name)
            if name != "apply":
                return call

            async def late(*args: Any, **options: Any) -> Any:
                away.set()
                await back.wait()
                return await call(*args, **options)

            return late

    slow: Any = Slow(client, 0)
    scaling = asyncio.create_task(Streams(slow).scale("orders", [Split(0)]))
    await away.wait()
    assert not (await gate(client, "orders")).is_open
    resumed = await streams.resume("orders")
    opened = await gate(client, "orders")
    assert (resumed.epoch, opened.is_open) == (0, True)
    back.set()
    with pytest.raises(StreamChanged):
        await scaling
    assert (await streams.describe("orders")).epoch == 0
    assert (await gate(client, "orders")).token == opened.token


@pytest.mark.parametrize("held", [True, False])
async def test_a_segment_whose_brokers_are_lost_is_not_sealed_at_a_guessed_offset(
    held: bool, streams: Streams, client: JournalClient
) -> None:
    """Tests of brokers cover their answer for such a journal. This test covers the consequences."""
    stream = await streams.create("orders", 2, template=TEMPLATE)
    journal = stream.segments[1].journal
    await client.append(journal, b"event\n", union_registers=HELD if held else None)

    class Lost(Mortal):
        def __getattr__(self, name: str) -> Any:
            async def append(where: str, content: bytes, **options: Any) -> AppendResult:
                if where == journal and not content:
                    if options.get("check_registers") is not None:
                        raise IndexHasGreaterOffset(where) if held else RegisterMismatch(where)
                    return dataclasses.replace(await self._client.append(where, content), end=0)
                return await self._client.append(where, content, **options)

            return append if name == "append" else getattr(self._client, name)

    lost: Any = Lost(client, 0)
    with pytest.raises(IndexHasGreaterOffset, match="reset-head"):
        await Streams(lost).scale("orders", [Split(1)])
    with pytest.raises(IndexHasGreaterOffset, match="reset-head"):
        await Streams(lost).resume("orders")
    found = await streams.describe("orders")
    assert (found.epoch, found.segments[1].sealing, found.segments[1].sealed_at) == (1, True, None)
    assert (await streams.resume("orders")).segments[1].sealed_at == 6


# ------------------------------------------------------------------------------------------------- sealing and deleting


async def test_a_sealed_stream_refuses_changes(streams: Streams, client: JournalClient) -> None:
    ends = await fill(client, await streams.create("orders", 2, template=TEMPLATE))
    sealed = await streams.seal("orders")
    assert sealed.is_sealed
    assert {n: each.sealed_at for n, each in sealed.segments.items()} == ends
    assert all(each.end_of_stream for each in sealed.segments.values())
    assert await streams.seal("orders") == sealed
    with pytest.raises(StreamSealed):
        await streams.scale("orders", [Split(0)])
    with pytest.raises(NotAllowed):
        await client.append(sealed.segments[0].journal, b"late\n")


async def test_deleting_removes_everything_and_a_missing_stream_is_an_error(
    streams: Streams, client: JournalClient
) -> None:
    await streams.create("orders", 2, template=TEMPLATE)
    await streams.ensure_part("orders", readers_journal("orders", "group"))
    await streams.scale("orders", [Merge((0, 1))])
    await streams.delete("orders")
    assert (await client.list()).journals == ()
    for call in (streams.delete, streams.describe, streams.seal, streams.resume):
        with pytest.raises(StreamNotFound, match="no stream orders"):
            await call("orders")
    with pytest.raises(StreamNotFound, match="no stream orders"):
        await streams.ensure_part("orders", "orders/readers/group")


async def test_retention_never_removes_decisions(streams: Streams, client: JournalClient) -> None:
    """A recovery may come later than the retention. Marks have the retention of events."""

    async def retention(journal: str) -> int:
        (info,) = (await client.list(f"name={journal}")).journals
        return info.spec.fragment.retention.seconds

    template = pb.JournalSpec()
    template.CopyFrom(TEMPLATE)
    template.fragment.retention.seconds = 3600
    stream = await streams.create("orders", template=template)
    decisions = transactions_journal("orders")
    assert await retention(decisions) == 0
    assert [await retention(name) for name in (stream.segments[0].journal, marks_journal("orders"))] == [3600, 3600]
    # Scaling removes the retention of decisions from streams that were created with one.
    (info,) = (await client.list(f"name={decisions}")).journals
    info.spec.fragment.retention.seconds = 3600
    await client.apply([pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)])
    assert await retention(decisions) == 3600
    stream = await streams.scale("orders", [Split(0)])
    assert await retention(decisions) == 0
    assert await retention(stream.segments[1].journal) == 3600


# ---------------------------------------------------------------------------------------------------------- truncating


async def test_a_cut_removes_content_before_it(streams: Streams, client: JournalClient) -> None:
    stream = await streams.create("orders", 2, template=TEMPLATE)
    await fill(client, stream)
    stream = await streams.scale("orders", [Split(1)])
    ends = await fill(client, stream)
    cut = {0: 3, 2: ends[2], 3: 0}
    truncated = await streams.truncate("orders", cut)
    assert sorted(truncated.segments) == [0, 2, 3], "the predecessor of 2 and 3 is wholly before the cut"
    assert {n: each.begin for n, each in truncated.segments.items()} == cut
    assert [each.number for each in truncated.heads()] == [0, 2, 3]
    assert (await client.list("name=orders/segment/00000001")).journals == ()
    assert await streams.truncate("orders", cut) == truncated
    back = await streams.truncate("orders", {0: 1, 2: 0, 3: 2})
    assert {n: each.begin for n, each in back.segments.items()} == {0: 3, 2: ends[2], 3: 2}, "it only moves forward"
    scaled = await streams.scale("orders", [Merge((0, 2))])
    assert scaled.segments[0].begin == 3
    assert scaled.segments[4].begin == 0, "successors begin at their beginning"


async def test_invalid_cuts_are_refused(streams: Streams, client: JournalClient) -> None:
    await fill(client, await streams.create("orders", 2, template=TEMPLATE))
    await streams.scale("orders", [Merge((0, 1))])
    stream = await streams.scale("orders", [Split(2)])
    for cut, problem in [
        ({}, r"lacks the keys \[0, 1\); name the segments that have them, such as 3, 4"),
        ({0: 0}, r"lacks the keys \[0\.5, 1\)"),
        ({0: 0, 1: 0, 2: 0}, "it has both segment 0 and a successor of it"),
        ({0: 0, 4: 0}, "it has both segment 0 and a successor of it"),
        ({3: 0, 9: 0}, "segment 9 is not in stream orders"),
        ({0: 7, 1: 0}, "offset 7 is not in segment 0, which ends at 6"),
        ({0: -1, 1: 0}, "offset -1 is not in segment 0"),
        ({3: 1, 4: 0}, "offset 1 is not in segment 3, which ends at 0"),
    ]:
        with pytest.raises(InvalidInput, match=problem):
            await streams.truncate("orders", cut)
    assert await streams.describe("orders") == stream
