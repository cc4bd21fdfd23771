"""Ingests write each row once, despite restarts, failures, several processes, and rows that cannot be events."""

from __future__ import annotations

import asyncio
import base64
from itertools import pairwise
from typing import Any

import pytest

from coranto.client import JournalClient
from coranto.errors import (
    CorruptData,
    InvalidInput,
    PoisonRow,
    SourceChanged,
    StreamNotFound,
    Unavailable,
)
from coranto.labels import FIXED_FRAMES, label_set
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.control.scaling import Split
from coranto.streams.model.stream import transactions_journal
from coranto.testing.cluster import STORE_URL
from coranto.types import JsonForm, MessageType, TypeRegistry, parse_fields
from tests.platform.ingest.lists import STREAM, Lists, Unreliable, dead_letters, events, ingest, numbers, spec, until


def lists(count: int = 20, splits: int = 3) -> dict[str, list[Any]]:
    return {f"split-{each}": list(range(each * 1000, each * 1000 + count)) for each in range(splits)}


def rows(given: dict[str, list[Any]]) -> list[tuple[str, int]]:
    return sorted((split, n) for split, found in given.items() for n in found)


async def test_rows_become_events_with_their_key_and_origin(client: JournalClient) -> None:
    given = {"a": [0, 1, 2]}
    report = await ingest(client, Lists(given)).run()
    assert (report.rows, report.dead_letters, report.progress.splits) == (3, 0, {"a": 3})
    found = {each["n"]: each for each in await events(client)}
    assert found.keys() == {0, 1, 2}
    assert (found[1]["_meta"]["at"], found[1]["split"]) == (1, "a")
    assert set(found[1]["_meta"]) == {"uuid", "at"}


async def test_a_run_continues_after_the_previous_one(client: JournalClient) -> None:
    given = lists()
    await ingest(client, Lists(given)).run()
    again = await ingest(client, Lists(given)).run()
    assert (again.rows, again.batches) == (0, 0)
    for split, found in given.items():
        found.append(int(split[-1]) * 1000 + 999)
    more = await ingest(client, Lists(given)).run()
    assert (more.rows, more.progress.rows) == (3, 63)
    assert await numbers(client) == rows(given)


async def test_many_splits_need_one_writer(client: JournalClient) -> None:
    given = lists(2, 500)
    await ingest(client, Lists(given, at_once=1), given=spec(batch_bytes=4000)).run()
    report = await ingest(client, Lists(given)).run()
    assert (report.rows, len(report.progress.splits)) == (0, 500)
    assert await numbers(client) == rows(given)


async def test_the_events_of_a_key_are_in_the_order_of_its_split(client: JournalClient) -> None:
    given = {"a": list(range(200))}
    await ingest(client, Lists(given, at_once=7), given=spec(batch_bytes=500)).run()
    found = await events(client)
    for key in range(5):
        mine = [each["n"] for each in found if each["n"] % 5 == key]
        assert mine == sorted(mine)
    assert len(found) == 200


async def test_two_processes_write_each_row_once(client: JournalClient) -> None:
    given = lists(100)
    both = [ingest(client, Lists(given, at_once=5), given=spec(batch_bytes=600)) for _ in range(2)]
    reports = await asyncio.gather(*(each.run() for each in both))
    assert sum(each.rows for each in reports) == 300
    assert {each.progress.rows for each in reports} <= {300} | set(range(300))
    assert await numbers(client) == rows(given)


async def test_failures_of_the_source_are_retried(client: JournalClient) -> None:
    given = lists()
    source = Lists(given, outages=3)
    await ingest(client, source).run()
    assert source.opened == 4
    assert await numbers(client) == rows(given)
    with pytest.raises(Unavailable, match="the source does not answer"):
        await ingest(client, Lists(given, outages=1000)).run()


@pytest.mark.parametrize("seed", range(6))
async def test_lost_answers_and_outages_of_the_stream_duplicate_nothing(client: JournalClient, seed: int) -> None:
    given = lists(60)
    unreliable: Any = Unreliable(client, seed)
    await ingest(client, Lists(given), given=spec(batch_bytes=700)).run()
    for found in given.values():
        found.extend(range(found[0] + 60, found[0] + 160))
    await ingest(unreliable, Lists(given, at_once=7), given=spec(batch_bytes=700)).run()
    assert await numbers(client) == rows(given)
    found_events = await events(client)
    for split in given:
        for key in range(5):
            mine = [each["n"] for each in found_events if each["split"] == split and each["n"] % 5 == key]
            assert all(a < b for a, b in pairwise(mine))


async def test_the_stream_may_be_scaled_during_a_run(client: JournalClient) -> None:
    given = lists(200)
    running = asyncio.create_task(ingest(client, Lists(given), given=spec(batch_bytes=500)).run())
    streams = Streams(client)
    await until(lambda: has_events(client))
    await streams.scale(STREAM, [Split(0)])
    await running
    assert await numbers(client) == rows(given)


async def has_events(client: JournalClient) -> bool:
    try:
        return bool(await numbers(client))
    except StreamNotFound:
        return False


async def test_a_poison_row_fails_the_run_after_the_earlier_rows(client: JournalClient) -> None:
    given: dict[str, list[Any]] = {"a": [0, 1, 2], "b": [5, 6, 7, "x", 8]}
    with pytest.raises(PoisonRow, match=r"lists b, place 3: the row is no number.*poison: dead letters"):
        await ingest(client, Lists(given)).run()
    assert await numbers(client) == [("a", 0), ("a", 1), ("a", 2), ("b", 5), ("b", 6), ("b", 7)]
    given["b"][3] = 9
    await ingest(client, Lists(given)).run()
    assert len(await numbers(client)) == 8


async def test_poison_rows_are_kept_in_the_same_transaction(client: JournalClient) -> None:
    given: dict[str, list[Any]] = {"a": [0, "x", 1], "b": ["y"]}
    keeping = spec(keeps_poison=True)
    report = await ingest(client, Lists(given), given=keeping).run()
    assert (report.rows, report.dead_letters) == (2, 2)
    await ingest(client, Lists(given), given=keeping).run()
    assert await numbers(client) == [("a", 0), ("a", 1)]
    assert await dead_letters(client) == [
        {
            "ingest": "loads",
            "split": "a",
            "place": "place 1",
            "problem": "is no number",
            "key": "aw==",
            "value": "eA==",
        },
        {
            "ingest": "loads",
            "split": "b",
            "place": "place 0",
            "problem": "is no number",
            "key": "aw==",
            "value": "eQ==",
        },
    ]


async def test_a_field_can_be_the_key_and_rows_are_checked_by_their_type(client: JournalClient) -> None:
    await Streams(client).create(STREAM, 1, template=default_template(stores=[STORE_URL]))
    registry = TypeRegistry(client, "types/registry")
    journals = [each.name for each in (await client.list()).journals]
    like = next(each for each in journals if "/segment/" in each)
    definition = MessageType("shop.N", JsonForm(), parse_fields("split STRING"))
    await registry.register(definition, like=like)
    typed = spec(type="shop.N", registry="types/registry", key="split")
    with pytest.raises(PoisonRow, match=r"does not fit shop.N@1: 'n' is not a field of the type"):
        await ingest(client, Lists({"a": [1]}), given=typed).run()
    with pytest.raises(PoisonRow, match="has no field 'customer', which is the key of the stream"):
        await ingest(client, Lists({"a": [1]}), given=spec(key="customer")).run()


async def test_dead_letters_of_invalid_rows_have_their_key_and_value(client: JournalClient) -> None:
    await ingest(client, Lists({"a": [7]}), given=spec(key="customer", keeps_poison=True)).run()
    [letter] = await dead_letters(client)
    assert base64.b64decode(letter["value"]) == b'{"split": "a", "n": 7}'
    assert base64.b64decode(letter["key"]) == b"key-2"
    assert letter["place"] == '{"at":0}'


async def test_another_source_with_the_same_name_is_refused(client: JournalClient) -> None:
    await ingest(client, Lists({"a": [1]})).run()
    with pytest.raises(SourceChanged, match="has read lists into stream shop/orders, and is to read others now"):
        await ingest(client, Lists({"a": [1]}, identity="others")).run()


async def test_a_source_that_changed_while_reading_is_not_committed(client: JournalClient) -> None:
    with pytest.raises(SourceChanged, match="the source changed"):
        await ingest(client, Lists({"a": [1]}, changed=True)).run()
    assert await numbers(client) == []


async def test_stop_commits_the_rows_read_so_far_and_ends(client: JournalClient) -> None:
    given = {"a": [1]}
    source = Lists(given)
    one = ingest(client, source, given=spec(batch_seconds=0.05))
    running = asyncio.create_task(one.run(follow=True))
    await until(lambda: source.confirmed)
    given["a"].append(2)
    await until(lambda: source.positions["a"] == 2)
    one.stop()
    assert (await running).rows == 2
    assert await numbers(client) == [("a", 1), ("a", 2)]


async def test_a_failed_commit_is_detected_while_the_source_is_silent(client: JournalClient) -> None:
    given = {"a": [1]}
    source, other = Lists(given), Lists(given)
    one = ingest(client, source, given=spec(batch_seconds=0.01))
    real, overtaken = source.confirm, asyncio.Event()

    async def confirm() -> None:
        if not overtaken.is_set():  # Another process commits the same batch first.
            overtaken.set()
            await ingest(client, other).run()
        await real()

    source.confirm = confirm  # type: ignore[method-assign]
    running = asyncio.create_task(one.run(follow=True))
    await until(lambda: source.opened == 2)
    one.stop()
    assert (await running).progress.rows == 1
    assert await numbers(client) == [("a", 1)]


async def test_metrics_count_committed_rows(client: JournalClient) -> None:
    one = ingest(client, Lists({"a": [0, "x", 1]}, kept=7), given=spec(keeps_poison=True))
    await one.run()
    value = one.metrics.registry.get_sample_value
    mine = {"ingest": "loads"}
    assert value("coranto_ingest_rows_total", mine) == 2
    assert value("coranto_ingest_dead_letters_total", mine) == 1
    assert value("coranto_ingest_batches_total", mine) == 1
    assert value("coranto_ingest_lag", mine) in (0, 3)
    assert value("coranto_ingest_retained_bytes", mine) == 7
    assert (value("coranto_ingest_last_commit_timestamp_seconds", mine) or 0) > 0


async def test_lost_registers_are_reported_and_can_be_accepted(client: JournalClient) -> None:
    given = {"a": [1, 2]}
    await ingest(client, Lists(given)).run()
    journal = transactions_journal(STREAM)
    registers = (await client.append(journal, b"")).registers
    lost = [(each.name, each.value) for each in registers.labels if "/batch/" in each.name]
    await client.append(journal, b'{"done":"x"}\n', subtract_registers=label_set(lost))
    given["a"].append(3)
    with pytest.raises(CorruptData, match="knows 0 batches of ingest loads, and has records of 1"):
        await ingest(client, Lists(given)).run()
    await ingest(client, Lists(given), accept_loss=True).run()
    assert await numbers(client) == [("a", 1), ("a", 2), ("a", 3)]
    await ingest(client, Lists(given)).run()


async def test_a_missing_stream_or_another_format_is_refused_immediately(client: JournalClient) -> None:
    with pytest.raises(StreamNotFound, match=r"coranto streams create shop/orders.*create: \{segments: 4\}"):
        await ingest(client, Lists({}), given=spec(create=None)).run()
    template = default_template(stores=[STORE_URL])
    await Streams(client).create("shop/raw", 1, template=template, content_type=FIXED_FRAMES)
    with pytest.raises(InvalidInput, match="not lines of JSON"):
        await ingest(client, Lists({}), given=spec(stream="shop/raw")).run()
