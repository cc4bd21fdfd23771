"""The cache of journals' routes, learned from answers. Pure.

Every answer about a journal has its Route, as of an etcd revision. `RouteCache` keeps the latest Route of each journal
for some time, so that calls go directly to a broker of the journal, without a proxy. A route can be outdated, so it
decides only where a call goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from coranto.names import strip_metadata
from coranto.wire import protocol_pb2 as pb

TTL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class RouteMember:
    """A broker of a route: its zone, and the endpoint that it advertises."""

    zone: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class KnownRoute:
    """A journal's brokers as of an etcd revision. `primary` is an index of `members`, or -1."""

    members: tuple[RouteMember, ...]
    primary: int
    cluster: int
    revision: int

    @classmethod
    def of(cls, header: pb.Header) -> KnownRoute:
        """Return the route of an answer's header. Members without an endpoint are kept, so that indices stay valid."""
        return cls._of(header.SerializeToString())  # Cached, because nearly all answers have the same header.

    @classmethod
    def listed(cls, route: pb.Route) -> KnownRoute:
        """Return the route of a listed journal. Its revision is 0, so that any answer replaces it."""
        return cls._of(pb.Header(route=route).SerializeToString())

    @classmethod
    @lru_cache(maxsize=1024)
    def _of(cls, serialized: bytes) -> KnownRoute:
        header = pb.Header.FromString(serialized)
        route = header.route
        endpoints = [*route.endpoints, *[""] * (len(route.members) - len(route.endpoints))]
        members = tuple(
            RouteMember(process.zone, endpoint) for process, endpoint in zip(route.members, endpoints, strict=False)
        )
        primary = route.primary if 0 <= route.primary < len(members) else -1
        return cls(members, primary, header.etcd.cluster_id, header.etcd.revision)

    @property
    def writers(self) -> Sequence[str]:
        """The primary's endpoint; empty without a primary."""
        return [self.members[self.primary].endpoint] if self.primary >= 0 else []

    def readers(self, zone: str, choice: int) -> Sequence[str]:
        """Return the endpoints of replicas: those in `zone`, then the others.

        `choice`, any number, rotates the order within both groups, to spread the readers of a journal.
        """
        count = len(self.members)
        turned = [self.members[(index + choice) % count] for index in range(count)]
        return [member.endpoint for member in sorted(turned, key=lambda member: not zone or member.zone != zone)]


class RouteCache:
    """An LRU cache of the routes of up to `size` journals. Routes expire after TTL_SECONDS."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._routes: OrderedDict[str, tuple[float, KnownRoute]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._routes)

    def get(self, journal: str, now: float) -> KnownRoute | None:
        """Return the route of a journal, or None. `now` is a monotonic time."""
        name = strip_metadata(journal)
        learnt, route = self._routes.get(name, (0.0, None))
        if route is None:
            return None
        if now >= learnt + TTL_SECONDS:
            del self._routes[name]
            return None
        self._routes.move_to_end(name)
        return route

    def learn(self, journal: str, header: pb.Header, now: float) -> None:
        """Store an answer's route, unless a later one of its cluster is known. An empty route removes the known one."""
        name = strip_metadata(journal)
        route = KnownRoute.of(header)
        _, known = self._routes.get(name, (0.0, None))
        if known is not None and known.cluster == route.cluster and known.revision > route.revision:
            return
        if not route.members:
            self._routes.pop(name, None)
            return
        self._routes[name] = now, route
        self._routes.move_to_end(name)
        while len(self._routes) > self._size:
            self._routes.popitem(last=False)

    def suggest(self, routes: Mapping[str, KnownRoute], now: float) -> None:
        """Store routes of journals without a known route, until the cache is full."""
        for journal, route in routes.items():
            if len(self._routes) >= self._size:
                return
            if route.members:
                self._routes.setdefault(strip_metadata(journal), (now, route))

    def refused(self, journal: str, header: pb.Header, now: float) -> None:
        """Handle a refusal by a broker that does not serve a journal: store its Route if later, or forget the known."""
        _, known = self._routes.get(strip_metadata(journal), (0.0, None))
        if known is not None and known.cluster == header.etcd.cluster_id and known.revision >= header.etcd.revision:
            self.forget(journal)
        else:
            self.learn(journal, header, now)

    def forget(self, journal: str) -> None:
        self._routes.pop(strip_metadata(journal), None)
