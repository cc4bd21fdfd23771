"""Shards with a source that was deleted and recreated with the same name."""

from __future__ import annotations

from collections.abc import Callable, Container

import pytest
from structlog.testing import capture_logs

from coranto.errors import CorruptData, InvalidInput, JournalRecreated
from coranto.labels import CONTINUE, DATA_LOSS, SAME_CONTENT, as_pairs, label_set
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.runtime.recreated import continues
from coranto_consumers.runtime.testing import running_shard, shard_spec

SPEC = shard_spec("shard-sums", ["in/one", "in/two"], max_seconds=600)


def continuing() -> pc.ShardSpec:
    spec = pc.ShardSpec()
    spec.CopyFrom(SPEC)
    spec.labels.CopyFrom(label_set([(DATA_LOSS, CONTINUE)]))
    return spec


@pytest.fixture(params=["sqlite", "sqlite-batches"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def in_batches(kind: str) -> Container[str]:
    return ("in/one", "in/two") if kind.endswith("-batches") else ()


@pytest.fixture
def store_url(kind: str, new_store: Callable[[str], str]) -> str:
    return new_store("sqlite")


@pytest.fixture
async def known(journals, client, sums):
    """The heads of two journals that a shard's checkpoint has with their ids."""
    journals.fake.has_ids = True
    journals.create("in/one", "in/two", "out/one")
    async with running_shard(sums, SPEC, client) as shard:
        heads = {
            "in/one": await journals.publish("in/one", *({"key": "a", "n": 1} for _ in range(3))),
            "in/two": await journals.publish("in/two", {"key": "b", "n": 1}),
        }
        await shard.read_through(heads)
    sources = sums.database.read("shard-sums").checkpoint.sources
    ids = {journal: source.journal_id for journal, source in sources.items()}
    assert ids == {journal: journals.fake.journals[journal].journal_id for journal in heads}
    return heads


@pytest.mark.parametrize("messages", [1, 10], ids=["shorter", "longer"])
async def test_a_shard_stops_unless_it_may_continue_from_the_beginning(journals, client, sums, known, messages):
    journals.create("in/one")
    head = await journals.publish("in/one", *({"key": "a", "n": 100} for _ in range(messages)))
    with pytest.raises(JournalRecreated, match=f"{DATA_LOSS}={CONTINUE}") as error:
        async with running_shard(sums, SPEC, client) as shard:
            await shard.read_through({"in/one": head + known["in/one"]})
    assert (error.value.offset, error.value.head) == (known["in/one"], head)
    assert sums.sums() == {"a": (3, 3), "b": (1, 1)}

    with capture_logs() as logs:
        async with running_shard(sums, continuing(), client) as shard:
            await shard.read_through({"in/one": head})
    assert sums.sums() == {"a": (3 + 100 * messages, 3 + messages), "b": (1, 1)}
    (lost,) = [each for each in logs if each["event"] == "source.content_lost"]
    assert (lost["journal"], lost["begin"], lost["end"]) == ("in/one", known["in/one"], head)
    async with running_shard(sums, SPEC, client) as shard:
        await shard.read_through({"in/one": await journals.publish("in/one", {"key": "a", "n": 7})})
    assert sums.sums()["a"] == (10 + 100 * messages, 4 + messages)


async def test_a_shard_continues_at_its_offset_in_a_source_with_accepted_content(journals, client, sums, known):
    before = journals.fake.journals["in/one"].content
    journals.create("in/one", "in/two")
    await journals.fake.write("in/one", before)
    await journals.publish("in/one", {"key": "a", "n": 7})
    await journals.publish("in/two", *({"key": "b", "n": 100} for _ in range(9)))
    made = journals.fake.journals
    with pytest.raises(JournalRecreated, match=r"accept-journals shard-sums in/(one|two) --consumer HOST:PORT"):
        async with running_shard(sums, SPEC, client) as shard:
            await shard.read_through({"in/one": len(before) + 1})
    spec = pc.ShardSpec()
    spec.CopyFrom(SPEC)
    spec.labels.CopyFrom(label_set([(SAME_CONTENT, f"{made['in/one'].journal_id}/in/one")]))
    with pytest.raises(JournalRecreated, match="journal in/two was deleted"):  # Only the named journal is accepted.
        async with running_shard(sums, spec, client) as shard:
            await shard.read_through({"in/one": len(before) + 1})
    spec.labels.CopyFrom(label_set([*as_pairs(spec.labels), (DATA_LOSS, CONTINUE)]))
    async with running_shard(sums, spec, client) as shard:
        await shard.read_through({name: made[name].head for name in ("in/one", "in/two")})
    assert sums.sums() == {"a": (10, 4), "b": (1 + 900, 10)}
    sources = sums.database.read("shard-sums").checkpoint.sources
    assert sources["in/one"].journal_id == made["in/one"].journal_id
    async with running_shard(sums, SPEC, client) as shard:  # The label is not needed any more.
        await shard.read_through({"in/one": await journals.publish("in/one", {"key": "a", "n": 1})})
    assert sums.sums()["a"] == (11, 5)


async def test_a_running_shard_detects_a_recreated_source(journals, client, sums, known):
    async with running_shard(sums, SPEC, client) as shard:
        await shard.read_through(known)
        journals.create("in/one")
        head = await journals.publish("in/one", *({"key": "a", "n": 100} for _ in range(10)))
        journals.fake.cut()
        with pytest.raises(JournalRecreated, match=DATA_LOSS):
            await shard.read_through({"in/one": head})
    assert sums.sums() == {"a": (3, 3), "b": (1, 1)}


async def test_a_checkpoint_without_ids_is_accepted_up_to_the_head_and_gets_ids(journals, client, sums):
    async with running_shard(sums, SPEC, client) as shard:
        await shard.read_through({"in/one": await journals.publish("in/one", {"key": "a", "n": 1})})
    assert not sums.database.read("shard-sums").checkpoint.sources["in/one"].journal_id
    journals.fake.journals["in/one"].journal_id = "given-1"
    async with running_shard(sums, SPEC, client) as shard:
        await shard.read_through({"in/one": await journals.publish("in/one", {"key": "a", "n": 2})})
    assert sums.sums() == {"a": (3, 2)}
    assert sums.database.read("shard-sums").checkpoint.sources["in/one"].journal_id == "given-1"

    journals.create("in/one")  # The new journal has no id.
    await journals.publish("in/one", {"key": "a", "n": 9})
    with pytest.raises(CorruptData, match="deleted and created again"):
        async with running_shard(sums, SPEC, client) as shard:
            await shard.read_through({"in/one": 1 << 20})


@pytest.mark.parametrize("kept", [0, 1, 2], ids=["before", "within", "behind"])
async def test_a_shard_stops_at_lost_content_it_has_read_and_can_continue_at_the_new_head(
    journals, client, sums, known, kept
):
    source = journals.fake.journals["in/one"]
    ends = [source.content.index(b"\n") + 1, known["in/one"]]
    before = source.journal_id
    if kept == 2:  # The lost content was not read.
        ends.append(await journals.publish("in/one", {"key": "unread", "n": 1}))
        await journals.publish("in/one", *({"key": "lost", "n": 1} for _ in range(9)))
    source.fall(ends[kept])
    added = [{"key": "a", "n": 100} for _ in range(10)]
    head = await journals.publish("in/one", *added)
    assert head > known["in/one"]
    if kept > 0:
        async with running_shard(sums, SPEC, client) as shard:
            await shard.read_through({"in/one": head})
        assert sums.sums() == {"a": (1003, 13), "b": (1, 1), **({"unread": (1, 1)} if kept == 2 else {})}
        stored = sums.database.read("shard-sums").checkpoint.sources["in/one"]
        assert stored.journal_id == source.journal_id != before
        return

    with pytest.raises(JournalRecreated, match=f"lost its content from offset {ends[0]} on") as error:
        async with running_shard(sums, SPEC, client) as shard:
            await shard.read_through({"in/one": head})
    assert f"would skip its messages from {ends[0]} to {known['in/one']}" in str(error.value)
    assert sums.sums()["a"] == (3, 3)
    with capture_logs() as logs:
        async with running_shard(sums, continuing(), client) as shard:
            await shard.read_through({"in/one": head})
    assert sums.sums()["a"] == (3 + 1000, 13), "new messages count, and earlier ones not twice"
    (lost,) = [each for each in logs if each["event"] == "source.content_lost"]
    assert (lost["journal"], lost["begin"], lost["end"]) == ("in/one", known["in/one"], head)
    assert lost["same_through"] == ends[0]


async def test_a_shard_that_may_continue_stops_at_a_head_below_the_last_reset(journals, client, sums, known):
    source = journals.fake.journals["in/one"]
    kept = source.content.index(b"\n") + 1
    source.fall(kept)
    del source.spool[kept - 1 :]  # Lost after the reset.
    with pytest.raises(CorruptData, match=f"in/one ends at {kept - 1}, but is processed through {kept}"):
        async with running_shard(sums, continuing(), client) as shard:
            await shard.read_through({"in/one": kept})
    assert sums.sums() == {"a": (3, 3), "b": (1, 1)}


async def test_a_running_shard_detects_a_head_that_fell(journals, client, sums, known):
    async with running_shard(sums, SPEC, client) as shard:
        await shard.read_through(known)
        journals.fake.journals["in/one"].fall(10)
        head = await journals.publish("in/one", *({"key": "a", "n": 100} for _ in range(10)))
        with pytest.raises(JournalRecreated, match=DATA_LOSS):
            await shard.read_through({"in/one": head})
    assert sums.sums() == {"a": (3, 3), "b": (1, 1)}


async def test_a_fall_after_an_acceptance_is_detected_again(journals, client, sums, known):
    source = journals.fake.journals["in/one"]
    content, kept = source.content, source.content.index(b"\n") + 1
    source.fall(kept)
    await journals.fake.write("in/one", content[kept:])  # An operator appends the lost content again.
    spec = pc.ShardSpec()
    spec.CopyFrom(SPEC)
    spec.labels.CopyFrom(label_set([(SAME_CONTENT, f"{source.journal_id}/in/one")]))
    async with running_shard(sums, spec, client) as shard:
        await shard.read_through({"in/one": await journals.publish("in/one", {"key": "a", "n": 1})})
    assert sums.sums()["a"] == (4, 4)
    source.fall(kept)
    head = await journals.publish("in/one", *({"key": "a", "n": 100} for _ in range(20)))
    with pytest.raises(JournalRecreated, match=f"lost its content from offset {kept} on"):
        async with running_shard(sums, spec, client) as shard:
            await shard.read_through({"in/one": head})


def test_a_label_with_another_value_is_refused():
    spec = pc.ShardSpec(labels=label_set([(DATA_LOSS, "ignore")]))
    with pytest.raises(InvalidInput, match=CONTINUE):
        continues(spec)
