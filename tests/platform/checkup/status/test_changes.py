"""The differences between two snapshots of a cluster."""

from __future__ import annotations

from dataclasses import replace

from coranto.checkup.status.changes import changes_between
from coranto.checkup.status.values import ClusterSnapshot, JournalPlace

BEFORE = ClusterSnapshot(
    100.0,
    "c1",
    50,
    3,
    {"a#1": "0.2.0", "b#2": "0.2.0"},
    {f"j/{number}": JournalPlace(number, number, "a#1") for number in range(1, 6)},
    ("broker old",),
)


def texts(now: ClusterSnapshot) -> list[str]:
    changes = changes_between(BEFORE, now)
    assert {(each.since, each.at) for each in changes} <= {(100.0, now.at)}
    return [each.text for each in changes]


def test_equal_snapshots_have_no_difference() -> None:
    assert texts(replace(BEFORE, at=160.0, revision=70)) == []


def test_each_difference_is_named_with_examples() -> None:
    journals = {
        "j/1": JournalPlace(1, 1, "b#2"),
        "j/2": JournalPlace(2, 2, ""),
        "j/3": JournalPlace(3, 61, "a#1"),
        "j/4": JournalPlace(60, 60, "a#1"),
        **{f"new/{number}": JournalPlace(70, 70, "a#1") for number in range(5)},
    }
    now = ClusterSnapshot(160.0, "c1", 70, 5, {"a#1": "0.3.0", "c#3": "0.2.0"}, journals, ("store s3://x/",))
    assert texts(now) == [
        "new problem: store s3://x/",
        "no longer a problem: broker old",
        "broker b#2 no longer answers",
        "broker c#3 answers, and did not before",
        "broker a#1: version 0.2.0 became 0.3.0",
        "etcd's term of leadership changed from 3 to 5",
        "5 journals created: new/0, new/1, new/2 and 2 more",
        "1 journal deleted: j/5",
        "1 journal deleted and created again: j/4",
        "1 journal with a changed spec: j/3",
        "1 journal: the primary a#1 became b#2",
        "1 journal: the primary a#1 became none",
    ]


def test_a_broker_that_started_again_is_named() -> None:
    before = replace(BEFORE, starts={"a#1": 5, "b#2": 6, "gone#3": 7})
    changes = changes_between(before, replace(before, at=160.0, starts={"a#1": 5, "b#2": 60, "new#4": 61}))
    assert [each.text for each in changes] == ["broker b#2 started again"]


def test_another_etcd_is_reported_and_not_compared() -> None:
    assert texts(replace(BEFORE, at=160.0, cluster="c2", journals={})) == [
        "etcd's cluster c1 became c2: etcd was restored or replaced"
    ]


def test_the_listing_of_a_lagging_broker_is_not_taken_for_a_restored_etcd() -> None:
    assert texts(replace(BEFORE, at=160.0, revision=20)) == []
