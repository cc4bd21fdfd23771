"""A shop that publishes to journals on brokers, and clients that crash or lose answers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest

from coranto.client import AppendResult, SyncJournalClient
from coranto.client.committed import committed_messages
from coranto.errors import AppendOutcomeUnknown
from coranto.messages import JsonLines
from coranto.publication import Decision, Ledger, Publication, publish_once
from coranto.testing import SyncCluster
from coranto.wire import protocol_pb2 as pb

ROWS = [{"order": number, "item": "x" * (number % 50)} for number in range(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    with SyncCluster(brokers=1) as cluster:
        yield cluster


class Killed(BaseException):
    """The process died."""


class CrashingClient(SyncJournalClient):
    """A client whose process is killed at its `at`-th append, either before sending it or after it was applied."""

    at = 0
    applied = False
    appends = 0

    def append(self, *arguments: Any, **options: Any) -> AppendResult:
        self.appends += 1
        if self.appends == self.at and self.applied:
            super().append(*arguments, **options)
        if self.at and self.appends >= self.at:
            raise Killed
        return super().append(*arguments, **options)


class AnswerLosingClient(SyncJournalClient):
    """A client that loses the answers to a number of appends to the ledger, which were applied or not."""

    ledger = ""
    times = 0
    applied = True

    def append(self, journal: str, content: Any, **options: Any) -> AppendResult:
        if journal == self.ledger and content and self.times:
            self.times -= 1
            if self.applied:
                super().append(journal, content, **options)
            raise AppendOutcomeUnknown("the answer was lost")
        return super().append(journal, content, **options)


@dataclass(frozen=True)
class Shop:
    """The journals of one test, and their client."""

    client: SyncJournalClient
    name: str

    @property
    def group(self) -> tuple[str, ...]:
        return tuple(f"{self.name}/orders/part-{index:03}" for index in range(3))

    @property
    def ledger(self) -> str:
        return f"{self.name}/orders-publications"

    def publish(
        self,
        rows: Iterable[dict[str, Any]] = ROWS,
        writer_id: str = "run-1",
        *,
        client: SyncJournalClient | None = None,
        **options: Any,
    ) -> Publication:
        arguments: dict[str, Any] = {
            "journals": self.group,
            "writer_id": writer_id,
            "key": lambda row: str(row["order"]).encode(),
            "framing": JsonLines(),
            "ledger": self.ledger,
        }
        return publish_once(client or self.client, messages=rows, **arguments | options)

    def seen(self) -> Counter[int]:
        """Return the number of times that a reader of committed messages sees each order."""
        envelopes = (committed_messages(self.client, name, JsonLines()) for name in self.group)
        return Counter(envelope.message["order"] for envelope in chain.from_iterable(envelopes))

    def pending(self) -> list[Decision]:
        return list(Ledger.open(self.client, self.ledger, like=self.group[1]).unacknowledged())

    def crashing(self, at: int, *, applied: bool) -> CrashingClient:
        client = CrashingClient.of(self.client.config)
        assert isinstance(client, CrashingClient)
        client.at, client.applied = at, applied
        return client

    def losing_answers(self, times: int, *, applied: bool) -> AnswerLosingClient:
        client = AnswerLosingClient.of(self.client.config)
        assert isinstance(client, AnswerLosingClient)
        client.ledger, client.times, client.applied = self.ledger, times, applied
        return client

    def set_flags(self, journal: str, flags: int) -> None:
        (info,) = self.client.list(f"name={journal}").journals
        info.spec.flags = flags
        self.client.apply([pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)])

    def delete(self, journal: str) -> None:
        (info,) = self.client.list(f"name={journal}").journals
        self.client.apply([pb.ApplyRequest.Change(delete=journal, expect_mod_revision=info.mod_revision)])


@pytest.fixture
def shop(cluster: SyncCluster) -> Shop:
    shop = Shop(cluster.client(), f"shop-{os.urandom(4).hex()}")
    for name in shop.group:
        cluster.create(name)
    return shop


ONCE = Counter(dict.fromkeys(range(300), 1))
