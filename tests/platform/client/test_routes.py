"""Routes and their cache."""

from __future__ import annotations

import pytest

from coranto.client.routes import TTL_SECONDS, KnownRoute, RouteCache
from coranto.wire import protocol_pb2 as pb

JOURNAL = "test/journal"


def header(*endpoints: str, primary: int = 0, revision: int = 5, zones: str = "", cluster: int = 1) -> pb.Header:
    zone_of = zones or "a" * len(endpoints)
    route = pb.Route(
        members=[pb.ProcessSpec.ID(zone=zone_of[i], suffix=f"broker-{i}") for i in range(len(endpoints))],
        endpoints=endpoints,
        primary=primary if endpoints else -1,
    )
    return pb.Header(route=route, etcd=pb.Header.Etcd(cluster_id=cluster, member_id=1, revision=revision, raft_term=1))


# ------------------------------------------------------------------------------------------------------- routes, pure


def test_a_route_has_writers_and_readers() -> None:
    route = KnownRoute.of(header("http://x:1", "http://y:1", "http://z:1", primary=2, zones="abb"))
    assert route.writers == ["http://z:1"]
    assert [route.readers("", choice)[0] for choice in range(4)] == [
        "http://x:1",
        "http://y:1",
        "http://z:1",
        "http://x:1",
    ]
    assert {tuple(route.readers("b", choice)[:2]) for choice in range(6)} == {
        ("http://y:1", "http://z:1"),
        ("http://z:1", "http://y:1"),
    }
    assert all(route.readers("a", choice)[0] == "http://x:1" for choice in range(6))
    assert all(sorted(route.readers("c", choice)) == ["http://x:1", "http://y:1", "http://z:1"] for choice in range(6))


@pytest.mark.parametrize("primary", [-1, 7])
def test_a_route_without_a_primary(primary: int) -> None:
    route = KnownRoute.of(header("http://x:1", primary=primary))
    assert route.writers == []
    assert route.readers("", 0) == ["http://x:1"]


def test_members_without_an_endpoint_keep_their_place() -> None:
    received = header("http://x:1", "http://y:1")
    del received.route.endpoints[1:]
    assert KnownRoute.of(received).readers("", 0) == ["http://x:1", ""]


def test_the_least_recently_used_route_is_removed() -> None:
    cache = RouteCache(2)
    for name in ("a/one", "a/two"):
        cache.learn(name, header("http://x:1"), 0.0)
    assert cache.get("a/one", 1.0)
    cache.learn("a/three;reader", header("http://y:1"), 2.0)
    assert len(cache) == 2
    assert cache.get("a/two", 3.0) is None
    assert cache.get("a/three", 3.0) == cache.get("a/three;other", 3.0) == KnownRoute.of(header("http://y:1"))


def test_routes_expire() -> None:
    cache = RouteCache(2)
    cache.learn(JOURNAL, header("http://x:1"), 10.0)
    assert cache.get(JOURNAL, 10.0 + TTL_SECONDS - 0.1)
    assert cache.get(JOURNAL, 10.0 + TTL_SECONDS) is None
    assert len(cache) == 0


def test_suggested_routes_replace_no_learned_ones_and_evict_none() -> None:
    cache = RouteCache(2)
    learnt, suggested = header("http://x:1"), KnownRoute.listed(header("http://y:1").route)
    cache.learn("a/one", learnt, 0.0)
    nowhere = KnownRoute.listed(header().route)
    cache.suggest({"a/zero": nowhere, "a/one": suggested, "a/two": suggested, "a/three": suggested}, 1.0)
    assert cache.get("a/one", 2.0) == KnownRoute.of(learnt)
    assert cache.get("a/two", 2.0) == suggested
    assert cache.get("a/zero", 2.0) is cache.get("a/three", 2.0) is None
    cache.learn("a/two", header("http://z:1", revision=1), 3.0)
    assert cache.get("a/two", 3.0) == KnownRoute.of(header("http://z:1", revision=1))


def test_only_later_routes_replace_a_route() -> None:
    cache = RouteCache(2)
    cache.learn(JOURNAL, header("http://new:1", revision=9), 0.0)
    cache.learn(JOURNAL, header("http://old:1", revision=8), 0.0)
    assert cache.get(JOURNAL, 0.0) == KnownRoute.of(header("http://new:1", revision=9))
    cache.learn(JOURNAL, header(revision=8), 0.0)
    assert cache.get(JOURNAL, 0.0)
    # Another cluster counts its own revisions.
    cache.learn(JOURNAL, header("http://other:1", revision=1, cluster=2), 0.0)
    assert cache.get(JOURNAL, 0.0) == KnownRoute.of(header("http://other:1", revision=1, cluster=2))
    cache.learn(JOURNAL, header(revision=2, cluster=2), 0.0)
    assert cache.get(JOURNAL, 0.0) is None


@pytest.mark.parametrize(("revision", "known"), [(4, False), (5, False), (6, True)])
def test_a_refusal_provides_a_later_route_or_removes_the_known_one(revision: int, known: bool) -> None:
    cache = RouteCache(2)
    cache.learn(JOURNAL, header("http://x:1", revision=5), 0.0)
    cache.refused(JOURNAL, header("http://y:1", revision=revision), 0.0)
    found = cache.get(JOURNAL, 0.0)
    assert (found is not None) == known
    assert found is None or found.writers == ["http://y:1"]
