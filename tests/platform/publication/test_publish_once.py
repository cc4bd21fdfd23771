"""Publications on real brokers: each message once, although processes die and other writers publish."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest

from coranto.client import AppendResult, SyncJournalClient
from coranto.client.committed import committed_messages
from coranto.errors import AppendOutcomeUnknown, CorruptData, InvalidInput, JournalNotFound, LedgerDamaged
from coranto.labels import label_set
from coranto.messages import JsonLines
from coranto.publication import Ledger, Publication, publish_once
from coranto.streams.model.stream import HELD_LABEL
from coranto.testing import SyncCluster
from coranto.wire import protocol_pb2 as pb

ROWS = [{"order": number, "item": "x" * (number % 50)} for number in range(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    with SyncCluster(brokers=1) as cluster:
        yield cluster


class Killed(BaseException):
    """The process died."""


class DyingClient(SyncJournalClient):
    """A client whose process dies at its `at`-th append: before it is sent, or when it was applied."""

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


class DeafClient(SyncJournalClient):
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
    """The journals of one test, and a client of theirs."""

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
        """Return how often a reader of committed messages sees each order."""
        envelopes = (committed_messages(self.client, name, JsonLines()) for name in self.group)
        return Counter(envelope.message["order"] for envelope in chain.from_iterable(envelopes))

    def dying(self, at: int, *, applied: bool) -> DyingClient:
        client = DyingClient.of(self.client.config)
        assert isinstance(client, DyingClient)
        client.at, client.applied = at, applied
        return client

    def deaf(self, times: int, *, applied: bool) -> DeafClient:
        client = DeafClient.of(self.client.config)
        assert isinstance(client, DeafClient)
        client.ledger, client.times, client.applied = self.ledger, times, applied
        return client

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


def test_a_publication_is_seen_once_and_repeating_it_adds_nothing(shop: Shop) -> None:
    first = shop.publish()
    heads = [shop.client.head(name) for name in (*shop.group, shop.ledger)]
    second = shop.publish()
    assert (first.messages, first.is_new, second.is_new) == (300, True, False)
    assert (second.messages, second.time) == (first.messages, first.time)
    assert [shop.client.head(name) for name in (*shop.group, shop.ledger)] == heads
    assert shop.seen() == ONCE


def test_messages_of_a_decided_publication_are_not_even_read(shop: Shop) -> None:
    shop.publish()

    def refuse() -> Iterator[dict[str, Any]]:
        raise AssertionError("the messages were read")
        yield {}

    assert not shop.publish(refuse()).is_new


def test_other_writer_ids_publish_beside_each_other(shop: Shop) -> None:
    shop.publish(writer_id="run-1")
    assert shop.publish(writer_id="run-2").is_new
    assert set(shop.seen().values()) == {2}


def test_a_publication_of_nothing_is_decided_too(shop: Shop) -> None:
    assert shop.publish([]).messages == 0
    assert not shop.publish().is_new
    assert not shop.seen()


@pytest.mark.parametrize("applied", [False, True])
def test_a_process_may_die_at_any_append(shop: Shop, applied: bool) -> None:
    whole = shop.dying(0, applied=applied)
    shop.publish(writer_id="first")  # It creates the ledger.
    shop.publish(writer_id="count", client=whole)
    for at in range(1, whole.appends + 1):
        with pytest.raises(Killed):
            shop.publish(writer_id=f"run-{at}", client=shop.dying(at, applied=applied))
        shop.publish(writer_id=f"run-{at}")
        assert not shop.publish(writer_id=f"run-{at}").is_new
        assert set(shop.seen().values()) == {2 + at}
    assert whole.appends > len(shop.group) + 2


def test_a_decided_publication_is_completed_by_the_next_one(shop: Shop) -> None:
    shop.publish([], writer_id="first")
    with pytest.raises(Killed):  # After the look into the ledger, the decision and one acknowledgement.
        shop.publish(client=shop.dying(3, applied=True))
    assert 0 < shop.seen().total() < len(ROWS)
    shop.publish([], writer_id="other")
    assert shop.seen() == ONCE
    assert not shop.publish().is_new


def test_of_several_attempts_at_once_one_counts(shop: Shop) -> None:
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda _: shop.publish(client=SyncJournalClient.of(shop.client.config)), range(4)))
    assert [outcome.messages for outcome in outcomes] == [300] * 4
    assert sum(outcome.is_new for outcome in outcomes) == 1
    assert shop.seen() == ONCE


def test_several_publications_at_once_are_all_seen(shop: Shop) -> None:
    def publish(number: int) -> Publication:
        return shop.publish(writer_id=f"run-{number}", client=SyncJournalClient.of(shop.client.config))

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(publish, range(6)))
    assert all(outcome.is_new for outcome in outcomes)
    assert set(shop.seen().values()) == {6}


def test_an_attempt_that_fails_leaves_nothing_that_is_seen(shop: Shop) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield from ROWS[:200]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shop.publish(broken())
    assert not shop.seen()
    assert shop.publish().is_new
    assert shop.seen() == ONCE


@pytest.mark.parametrize("applied", [False, True])
def test_lost_answers_of_the_ledger_do_not_publish_twice(shop: Shop, applied: bool) -> None:
    assert shop.publish(client=shop.deaf(1, applied=applied)).is_new
    assert shop.seen() == ONCE


def test_an_attempt_with_an_unknown_decision_is_not_rolled_back(shop: Shop) -> None:
    with pytest.raises(AppendOutcomeUnknown):
        shop.publish(client=shop.deaf(2, applied=False))
    assert shop.publish().is_new
    assert shop.seen() == ONCE


def test_a_ledger_that_may_have_lost_records_is_refused_until_the_loss_is_accepted(shop: Shop) -> None:
    shop.publish()
    removed = label_set({HELD_LABEL: "true"})
    shop.client.append(shop.ledger, b'{"acknowledged":""}\n', subtract_registers=removed)
    with pytest.raises(LedgerDamaged, match="accept"):
        shop.publish(writer_id="run-2")
    assert shop.publish(writer_id="run-2", accept_loss=True).is_new
    assert shop.publish(writer_id="run-3").is_new


def test_a_ledger_with_other_content_is_refused(shop: Shop) -> None:
    shop.publish()
    shop.client.append(shop.ledger, b"something else\n")
    with pytest.raises(CorruptData, match="no record"):
        shop.publish()


def test_a_deleted_journal_does_not_keep_others_from_publishing(shop: Shop) -> None:
    shop.publish([], writer_id="first")
    with pytest.raises(Killed):  # With the decision in the ledger.
        shop.publish(client=shop.dying(2, applied=True))
    shop.delete(shop.group[0])
    assert shop.publish(writer_id="run-2", journals=shop.group[1:]).is_new
    assert not list(Ledger.open(shop.client, shop.ledger, like=shop.group[1]).unacknowledged())


@pytest.mark.parametrize("writer_id", ["", "a\nb", "x" * 2000])
def test_bad_writer_ids_are_refused(shop: Shop, writer_id: str) -> None:
    with pytest.raises(InvalidInput, match="writer_id"):
        shop.publish(writer_id=writer_id)


def test_messages_without_uuids_are_refused(shop: Shop) -> None:
    with pytest.raises(InvalidInput, match="UUIDs"):
        shop.publish(framing=JsonLines(None))
    assert not any(shop.client.head(name) for name in shop.group)


def test_publishing_to_no_journal_or_to_the_ledger_is_refused(shop: Shop) -> None:
    with pytest.raises(JournalNotFound):
        shop.publish(journals=[])
    with pytest.raises(InvalidInput, match="ledger"):
        shop.publish(ledger=shop.group[0])
