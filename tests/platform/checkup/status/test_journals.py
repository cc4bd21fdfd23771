"""Status of journals by a listing and heads."""

from __future__ import annotations

from dataclasses import replace

from coranto.audit.findings import Kind
from coranto.checkup.results import Condition
from coranto.checkup.status.journals import examinations_of, head_by_route, judge, places_of, silent_brokers
from coranto.client import JournalInfo
from coranto.client.heads import JournalHead
from coranto.wire import protocol_pb2 as pb


def journal(name: str, members: int = 2, primary: int = 0, *, asleep: bool = False) -> JournalInfo:
    spec = pb.JournalSpec(name=name, replication=2, flags=pb.JournalSpec.O_RDWR)
    spec.fragment.stores.append("s3://bucket/")
    if asleep:
        spec.suspend.level = pb.JournalSpec.Suspend.FULL
    route = pb.Route(primary=primary)
    for number in range(members):
        route.members.add(zone="z", suffix=str(number))
        route.endpoints.append(f"http://broker-{number}:8080")
    return JournalInfo(spec, 2, 1, route)


def head(info: JournalInfo) -> JournalHead:
    return JournalHead(
        info.name, pb.OK, replication=2, replicas=len(info.route.members), in_sync=True, broker="z#0", is_primary=True
    )


def test_healthy_and_suspended_journals_have_no_problem() -> None:
    well, asleep, gazettes = journal("a"), journal("b", 0, -1, asleep=True), journal("c")
    heads = {"a": head(well), "c": head_by_route(gazettes)}
    assert judge([well, asleep, gazettes], heads, set(), 1.0) == []


def test_problems_are_grouped_by_kind_in_order_of_severity() -> None:
    unplaced = [journal(f"unplaced/{number}", 0, -1) for number in range(5)]
    thin, unsynced, quiet = journal("thin", 1), journal("unsynced"), journal("quiet")
    heads = {"thin": head(thin), "unsynced": replace(head(unsynced), in_sync=False)}
    problems = judge([*unplaced, thin, unsynced, quiet], heads, {"z#0"}, 1.0)
    assert [(each.kind, each.condition, each.count) for each in problems] == [
        (Kind.NO_PRIMARY, Condition.PROBLEM, 6),
        (Kind.REPLICAS_MISSING, Condition.PROBLEM, 1),
        (Kind.REPLICAS_MISSING, Condition.WARNING, 1),
    ]
    first, *_ = examinations_of(problems)
    assert first.subject == "journals with no_primary"
    assert first.found.startswith("6: unplaced/0, unplaced/1, unplaced/2 and 3 more. unplaced/0: no broker is")
    (silent,) = judge([quiet], {}, {"z#0"}, 1.0)
    assert "its primary z#0 does not answer" in silent.found
    (other,) = judge([quiet], {}, set(), 1.0)
    assert "its primary z#0 does not report its head" in other.found


def test_journals_that_are_held_back_are_a_problem() -> None:
    info = journal("held")
    (problem,) = judge([info], {"held": replace(head(info), store_problem="the bucket is gone")}, set(), 1.0)
    assert (problem.kind, problem.condition) == (Kind.STORE_UNHEALTHY, Condition.PROBLEM)


def test_brokers_that_answered_at_their_endpoint_are_not_silent() -> None:
    info = journal("a", 3)
    assert silent_brokers([info], {"z#0"}, {"http://broker-1:8080"}) == {"z#2"}


def test_the_places_of_a_journal_name_its_primary() -> None:
    places = places_of([journal("a", 2, 1), journal("b", 0, -1)])
    assert [(name, place.primary) for name, place in places.items()] == [("a", "z#1"), ("b", "")]
