"""The small ranges of a task, read concurrently: the same content with fewer calls and no waits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coranto.client import SyncJournalClient
from coranto.client.range_prefetch import JournalRange
from coranto.cluster import EmbeddedCluster
from coranto.errors import InvalidInput, OffsetJump, Unavailable
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.testing.fake_broker import Break, CallPoint
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.journals.ranges import Range, split
from coranto_consumers.journals.reading import JournalContent, read_lines
from coranto_consumers.spark.session.fetching import SMALL_BYTES, read_together
from tests.consumers.spark.folding import FRAMING

LINE = b'{"n":1}\n'


@pytest.fixture
def client(broker) -> Iterator[SyncJournalClient]:
    with SyncJournalClient.of(broker.config, timeout=30) as client:
        yield client


def offsets(content: JournalContent, part: Range) -> list[int]:
    return [begin for lines in read_lines(content, part, FRAMING) for begin in lines.begins.tolist()]


def names(count: int) -> list[str]:
    return [f"a/j/{number:03}" for number in range(count)]


def filled(broker, count: int, lines: int) -> list[Range]:
    broker.create(*names(count))
    for name in names(count):
        broker.write(name, LINE * lines)
    return [Range(name, 0, lines * len(LINE), lines * len(LINE)) for name in names(count)]


def test_many_ranges_are_read_in_order_by_one_call_each(broker, client):
    parts = filled(broker, 100, 3)
    with read_together(client, parts, FRAMING) as content:
        assert [offsets(content, part) for part in parts] == [[0, 8, 16]] * 100
    assert broker.fake.count("Read") == 100


def test_partial_lines_and_the_rest_of_a_last_line_need_no_further_call(broker, client):
    """Ranges of journals with much unread content end anywhere in a line."""
    sizes = random.Random(1)
    parts = [
        part for whole in filled(broker, 10, 50) for part in split(whole, sizes.randint(20, 200)) if part.length > 10
    ]
    with read_together(client, parts, FRAMING) as content:
        together = [offsets(content, part) for part in parts]
    assert broker.fake.count("Read") == len(parts)
    assert together == [offsets(client, part) for part in parts]
    assert broker.fake.count("Read") > 2 * len(parts)


def test_empty_ranges_are_not_read(broker, client):
    parts = filled(broker, 6, 3)
    parts[2:2] = [replace(parts[2], end=0, limit=0), replace(parts[2], begin=24)]
    with read_together(client, parts, FRAMING) as content:
        assert [offsets(content, part) for part in parts] == [*[[0, 8, 16]] * 2, [], [], *[[0, 8, 16]] * 4]
    assert broker.fake.count("Read") == 6


def test_large_ranges_are_read_in_order_and_in_pieces(broker, client, monkeypatch: pytest.MonkeyPatch):
    asked: list[JournalRange] = []
    read_each = client.read_each
    monkeypatch.setattr(client, "read_each", lambda ranges, **named: asked.extend(ranges) or read_each(ranges, **named))
    lines = SMALL_BYTES // len(LINE) + 1
    small, large = filled(broker, 9, 3), names(10)[-1]
    broker.create(large)
    broker.write(large, LINE * lines)
    parts = [*small[:4], Range(large, 0, lines * len(LINE), lines * len(LINE)), *small[4:]]
    with read_together(client, parts, FRAMING) as content:
        found = [len(offsets(content, part)) for part in parts]
    assert found == [3, 3, 3, 3, lines, 3, 3, 3, 3, 3]
    assert [each.journal for each in asked] == names(9)
    assert broker.fake.count("Read") == 10


def test_a_failed_range_names_its_journal_in_order(broker, client, tmp_path: Path):
    parts = filled(broker, 40, 3)
    failing = broker.fake.journals[names(40)[20]]
    failing.roll(tmp_path)
    failing.drop_before(24)
    broker.write(names(40)[20], LINE)
    failing.roll(tmp_path)
    with read_together(client, parts, FRAMING) as content:
        assert [offsets(content, part) for part in parts[:20]] == [[0, 8, 16]] * 20
        with pytest.raises(OffsetJump, match="a/j/020"):
            offsets(content, parts[20])
    # No state is left: the client continues.
    assert client.read_all(names(40)[30], 0, 24) == LINE * 3


def test_hanging_ranges_end_the_read_and_name_their_journal(broker):
    parts = filled(broker, 8, 3)
    broker.fake.at(CallPoint.READ_CONTENT, *[Break.HANG] * 8)
    with (
        SyncJournalClient.of(broker.config, timeout=3.0) as client,
        read_together(client, parts, FRAMING) as content,
        pytest.raises(Unavailable, match="read of a/j/000: nothing arrived within"),
    ):
        offsets(content, parts[0])


def test_stored_fragments_are_read_from_their_store(broker, tmp_path: Path):
    parts = filled(broker, 30, 3)
    for name in names(30):
        broker.fake.journals[name].roll(tmp_path)
    config = replace(broker.config, file_root=tmp_path)
    with SyncJournalClient.of(config, timeout=30) as client, read_together(client, parts, FRAMING) as content:
        assert [offsets(content, part) for part in parts] == [[0, 8, 16]] * 30
    damaged = next((tmp_path / "fragments" / names(30)[7]).rglob("*.*"))
    damaged.write_bytes(b"x" * 24)
    with SyncJournalClient.of(config, timeout=30) as client, read_together(client, parts, FRAMING) as content:
        # The broker has the content that is damaged in the store.
        assert [offsets(content, part) for part in parts] == [[0, 8, 16]] * 30


@pytest.mark.parametrize("wanted", [JournalRange("a/j", 5, 5), JournalRange("a/j", -1, 5), JournalRange("a//j", 0, 5)])
def test_ranges_without_content_or_name_are_refused(client, wanted):
    with pytest.raises(InvalidInput):
        list(client.read_each([wanted]))


def test_a_broken_connection_is_retried_transparently(broker, client):
    parts = filled(broker, 50, 3)
    broker.fake.at(CallPoint.READ_CONTENT, *[None] * 20, Break.CUT)
    with read_together(client, parts, FRAMING) as content:
        assert [offsets(content, part) for part in parts] == [[0, 8, 16]] * 50


def test_real_brokers_serve_many_ranges_concurrently(tmp_path: Path):
    with (
        EmbeddedCluster(tmp_path, 2, lease_seconds=60, etcd_fsync=False) as cluster,
        SyncJournalClient(cluster.info.endpoint, timeout=60) as client,
    ):
        specs = [
            pb.JournalSpec(
                name=name,
                replication=1,
                labels=label_set([(CONTENT_TYPE, JSON_LINES)]),
                fragment=pb.JournalSpec.Fragment(
                    length=1 << 20, compression_codec=pb.NONE, refresh_interval={"seconds": 3600}, stores=["file:///"]
                ),
            )
            for name in names(60)
        ]
        client.apply([pb.ApplyRequest.Change(upsert=spec) for spec in specs])
        with client.append_service() as service:
            for number, name in enumerate(names(60)):
                service.append(name, LINE * (number + 1))
        parts = [Range(name, 0, (n + 1) * 8, (n + 1) * 8) for n, name in enumerate(names(60))]
        with read_together(client, parts, FRAMING) as content:
            assert [len(offsets(content, part)) for part in parts] == list(range(1, 61))
