"""Offsets to read from journals in any state."""

from types import SimpleNamespace

import pytest
from pyspark.sql.types import StructType

from coranto.client import SyncJournalClient
from coranto.client.heads import Heads, JournalHead
from coranto.errors import CorruptData, InvalidInput, JournalRecreated, Unavailable
from coranto.labels import CONTENT_TYPE, FORK_OF, JSON_LINES, label_set
from coranto.messages import JsonLines
from coranto.streams.model.keys import KeyRange
from coranto.streams.model.stream import Segment, segment_journal
from coranto.testing import SyncCluster
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.journals.discovery import contents, extents, list_journals, require_unread, routes_of
from coranto_consumers.journals.losses import LostContent
from coranto_consumers.journals.ranges import Range, ReadPlan
from coranto_consumers.spark import SparkConsumer
from coranto_consumers.spark.inputs.frames import planned_rows, sequenced_layout
from coranto_consumers.spark.options.source_options import SourceOptions
from coranto_consumers.spark.source.planning import plan_read
from coranto_consumers.spark.streaming.offsets import Position
from coranto_consumers.spark.streaming.query_planner import lost_at, require
from coranto_consumers.spark.streaming.stream_options import StreamOptions

AWAKE, ASLEEP = "a/awake", "a/asleep"


def planned(client, options):
    ranges, _ = plan_read(client, options)
    return [part for parts in ranges.values() for part in parts]


@pytest.fixture
def journals(broker):
    """One journal with content, and one that is fully suspended and has lost its content."""
    broker.create(AWAKE)
    broker.write(AWAKE, b'{"n":1}\n')
    broker.fake.create(
        ASLEEP,
        labels=label_set([(CONTENT_TYPE, JSON_LINES)]),
        suspend=pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.FULL, offset=120),
    )
    return broker


@pytest.mark.parametrize(
    "offsets",
    [{}, {"startingOffsets": '{"a/awake": -2, "a/asleep": 120}'}, {"endingOffsets": '{"a/awake": -1, "a/asleep": -1}'}],
)
def test_a_fully_suspended_journal_has_nothing_to_read(journals, offsets):
    options = SourceOptions.parse({"endpoint": journals.endpoint, "selector": "name:prefix=a/", **offsets})
    with SyncJournalClient.of(journals.config) as client:
        assert [(part.journal, part.begin, part.end) for part in planned(client, options)] == [(AWAKE, 0, 8)]


class Nothing:
    name = "nothing"
    sources = f"name={ASLEEP}"
    value_schema = "n BIGINT"

    def outputs(self, committed):
        raise AssertionError("there is nothing to consume")


def test_a_consumer_begins_at_the_head_of_a_fully_suspended_journal(journals, tmp_path):
    def no_spark():
        raise AssertionError("there is nothing to read")

    report = SparkConsumer(Nothing(), journals.config, f"sqlite:///{tmp_path}/s.db", no_spark).run_until_caught_up()
    assert report.offsets == report.heads == {ASLEEP: 120}


def test_a_journal_without_remaining_content_is_read_from_its_head(broker):
    broker.create(AWAKE)
    broker.write(AWAKE, b'{"n":1}\n')
    broker.fake.journals[AWAKE].roll()
    broker.fake.journals[AWAKE].drop_before(8)
    options = SourceOptions.parse({"endpoint": broker.endpoint, "subscribe": AWAKE})
    with SyncJournalClient.of(broker.config) as client:
        assert planned(client, options) == []
        broker.write(AWAKE, b'{"n":2}\n')
        assert [(part.begin, part.end) for part in planned(client, options)] == [(8, 16)]


def test_a_stream_consists_of_all_its_segments_including_splits(broker):
    low, high = KeyRange.FULL.split(2)
    for stream in ("shop/orders", "shop/orders-eu"):
        for segment in (
            Segment(0, 0, segment_journal(stream, 0), KeyRange.FULL, sealing=True, sealed_at=8),
            Segment(1, 1, segment_journal(stream, 1), low, frozenset((0,))),
            Segment(2, 1, segment_journal(stream, 2), high, frozenset((0,))),
        ):
            broker.set_segment(stream, segment)
            broker.write(segment.journal, b'{"n":1}\n')
    broker.create("shop/orders/marks")
    broker.write("shop/orders/marks", b'{"n":1}\n')
    options = {"endpoint": broker.endpoint, "stream": "shop/orders"}
    with SyncJournalClient.of(broker.config) as client:
        ranges, _ = plan_read(client, SourceOptions.parse(options))
        assert list(ranges) == [segment_journal("shop/orders", n) for n in range(3)]
        with pytest.raises(InvalidInput, match=r"no journal matches .*shop/nothing"):
            plan_read(client, SourceOptions.parse({**options, "stream": "shop/nothing"}))
    assert StreamOptions.parse(options).source.selected == SourceOptions.parse(options).selected


@pytest.mark.parametrize("name", ["", "a,b", "x"])
def test_a_stream_name_must_be_a_journal_name(name):
    with pytest.raises(InvalidInput, match="option stream: "):
        SourceOptions.parse({"endpoint": "127.0.0.1:1", "stream": name})


def test_forks_cannot_replace_journals_that_were_read_as_sources(broker):
    broker.create("live/a", "live/b")
    broker.fake.create("new/a", labels=label_set([(CONTENT_TYPE, JSON_LINES), (FORK_OF, "live/a")]))
    with SyncJournalClient.of(broker.config) as client:
        with pytest.raises(InvalidInput, match=r"source new/a: is a fork of live/a.* make live/a its source"):
            require_unread(client, ["live/b", "new/a"], ["live/a", "live/b"])
        require_unread(client, ["live/a", "new/a"], ["live/a"])
        require_unread(client, ["new/a"], ["live/a", "new/a"])
        require_unread(client, ["new/a"], ["live/b"])


def test_tasks_get_the_listed_routes_of_their_journals(broker):
    broker.create("a/one", "a/two", "b/other")
    with SyncJournalClient.of(broker.config) as client:
        present = contents(client, list_journals(client, "name:prefix=a/", field="sources"))
    routes = routes_of(present)
    assert sorted(routes) == ["a/one", "a/two"]
    assert [route.readers("", 0) for route in routes.values()] == [[f"http://{broker.endpoint}"]] * 2
    plan = ReadPlan((tuple(Range(name, 0, 1, 1) for name in ("a/two", "b/other")),))
    layout = sequenced_layout(StructType([]), JsonLines(), None)
    [task] = planned_rows(layout, plan, broker.config, routes).task.slices
    assert task.routes == {"a/two": routes["a/two"]}


@pytest.mark.parametrize(
    ("changes", "is_end"),
    [
        ({}, True),
        ({"append_status": pb.INDEX_HAS_GREATER_OFFSET}, False),
        ({"append_status_time": 0.0}, False),
        ({"is_primary": False}, False),
        ({"append_status_time": 0.0, "broker": ""}, True),
    ],
)
def test_the_head_of_a_broker_that_may_lack_content_is_not_a_loss(changes, is_end):
    fields = {"broker": "zone#id", "is_primary": True, "head": 10, "append_status_time": 1.0} | changes
    heads = Heads(pb.Header(), (JournalHead("a/one", pb.OK, **fields),))
    found = extents(SimpleNamespace(heads=lambda selector: heads), ["a/one"])["a/one"]
    assert (found.head, found.is_end) == (10, is_end)
    position = Position(11, created=found.created)
    if is_end:
        assert lost_at("a/one", position, found) == LostContent("a/one", 11, 10, recreated=True)
    else:
        with pytest.raises(Unavailable, match="a/one is processed through 11"):
            lost_at("a/one", position, found)
    with pytest.raises(CorruptData if is_end else Unavailable, match="processed through 11"):
        require("a/one", position, {"a/one": found})


@pytest.mark.integration
def test_real_brokers_report_journal_ids_and_another_id_for_a_recreated_journal():
    with SyncCluster(brokers=3) as cluster, cluster.client() as client:
        cluster.create(AWAKE)
        end = client.append(AWAKE, b'{"n":1}\n').end
        (info,) = client.list(f"name={AWAKE}").journals
        before = extents(client, [AWAKE])[AWAKE]
        (chunk,) = client.read(AWAKE)
        assert before.journal_id == chunk.journal_id != ""
        client.apply([pb.ApplyRequest.Change(delete=AWAKE, expect_mod_revision=info.mod_revision)])
        del info.spec.fragment.stores[:]
        client.apply([pb.ApplyRequest.Change(upsert=info.spec)])
        client.append(AWAKE, b'{"n":2}\n' * 3)
        found = extents(client, [AWAKE])[AWAKE]
        assert found.journal_id not in ("", before.journal_id)
        for block in (False, True):
            with pytest.raises(JournalRecreated) as error:
                list(client.read(AWAKE, end, block=block, journal_id=before.journal_id))
            assert (error.value.found, error.value.head) == (found.journal_id, found.head)
