"""Fixtures of the consumers' tests: stores of all databases, a fake broker."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coranto.client import ClientConfig
from coranto.client.loop import LoopThread
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.messages.framing import JsonLines
from coranto.messages.publisher import SyncPublisher
from coranto.messages.uuids import ProducerClock, new_producer_id
from coranto.streams.model.stream import Segment, spec_of
from coranto.testing.fake_broker import FakeBroker
from coranto.wire import protocol_pb2 as pb
from tests.servers.sql import MariadbServer, PostgresServer, why_no_mariadb


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


needs_mariadb = pytest.mark.skipif(bool(why_no_mariadb()), reason=why_no_mariadb())
DATABASES = (
    "sqlite",
    pytest.param("postgresql", marks=pytest.mark.integration),
    pytest.param("mariadb", marks=[pytest.mark.integration, needs_mariadb]),
)


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariadbServer]:
    with MariadbServer() as server:
        yield server


@pytest.fixture
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], str]:
    """Return the URL of an empty store in a database of the given kind."""

    def make(kind: str) -> str:
        if kind == "sqlite":
            return f"sqlite:///{tmp_path}/store.db"
        server: PostgresServer | MariadbServer = request.getfixturevalue(
            {"postgresql": "postgres", "mariadb": "mariadb"}[kind]
        )
        return server.new_database()

    return make


@pytest.fixture(params=DATABASES)
def store_url(request: pytest.FixtureRequest, new_store: Callable[[str], str]) -> str:
    """The URL of an empty store, for each kind of database."""
    return new_store(request.param)


class Broker:
    """A fake broker on its own event loop, so that Spark's processes can reach it while a test blocks."""

    def __init__(self, fake: FakeBroker, loop: LoopThread) -> None:
        self.fake = fake
        self._loop = loop
        self.config = ClientConfig(fake.endpoint)

    @property
    def endpoint(self) -> str:
        return self.fake.endpoint

    def create(self, *names: str, content_type: str = JSON_LINES) -> None:
        for name in names:
            self.fake.create(name, labels=label_set([(CONTENT_TYPE, content_type)]))

    def publisher_at(self, now_ns: Callable[[], int]) -> SyncPublisher:
        """Return a publisher of JSON lines whose clock shows the nanoseconds since 1970 UTC that `now_ns` returns."""
        return SyncPublisher(
            self.write, producer=new_producer_id(os.urandom), clock=ProducerClock(now_ns), framing=JsonLines()
        )

    def set_segment(self, stream: str, segment: Segment) -> None:
        """Create or change the journal of a stream's segment."""
        template = pb.JournalSpec(labels=label_set([(CONTENT_TYPE, JSON_LINES)]))
        spec = spec_of(stream, segment, template)
        if segment.journal in self.fake.journals:
            self.fake.journals[segment.journal].spec.CopyFrom(spec)
        else:
            self.fake.create(spec.name, flags=spec.flags, labels=spec.labels)

    def refuse(self) -> None:
        """Break all connections and refuse new ones, until `accept`."""
        self._loop.run(self.fake.refuse())

    def accept(self) -> None:
        self._loop.run(self.fake.accept())

    def delete(self, journal: str) -> None:
        del self.fake.journals[journal]

    def write(self, journal: str, content: bytes) -> None:
        self._loop.run(self.fake.write(journal, content))

    def content(self, journal: str) -> bytes:
        return self.fake.journals[journal].content

    def head(self, journal: str) -> int:
        return self.fake.journals[journal].head


@pytest.fixture
def broker() -> Iterator[Broker]:
    loop = LoopThread("fake-broker")
    fake = FakeBroker()
    try:
        loop.run(fake.__aenter__())
        yield Broker(fake, loop)
        loop.run(fake.__aexit__(None, None, None))
    finally:
        loop.stop()
