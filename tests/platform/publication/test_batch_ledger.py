"""Decisions about numbered batches on real brokers: one for each batch, and none about an old batch."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from coranto.client import AppendResult, SyncJournalClient
from coranto.errors import AppendOutcomeUnknown, CorruptData, Fenced, InvalidInput, LedgerDamaged
from coranto.labels import label_set
from coranto.publication import BatchLedger, Decision, Ledger
from coranto.publication.publish import finish_decisions
from coranto.testing import SyncCluster

GROUP = "orders/part-0"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    with SyncCluster(brokers=1) as cluster:
        cluster.create(GROUP)
        yield cluster


@pytest.fixture
def client(cluster: SyncCluster) -> SyncJournalClient:
    return cluster.client()


@pytest.fixture
def journal() -> str:
    return f"ledgers/{uuid.uuid4().hex[:8]}"


def opened(client: SyncJournalClient, journal: str, writer: str = "query-1", **options: Any) -> BatchLedger:
    return BatchLedger.open(client, journal, writer, like=GROUP, **options)


def decision(name: str) -> Decision:
    """Return a decision; `writer/n` is about batch n of a writer."""
    writer, _, batch = name.partition("/")
    about = (writer, int(batch)) if batch else None
    return Decision(name, uuid.uuid4().hex, 7, time.time(), {GROUP: b"ack\n"}, about)


def test_the_first_decision_about_a_batch_applies(client, journal):
    ledger, mine, other = opened(client, journal), decision("query-1/0"), decision("query-1/0")
    assert ledger.last() is None

    assert ledger.decide(0, mine) == mine
    assert opened(client, journal).decide(0, other) == mine

    found = opened(client, journal).last()
    assert found is not None
    assert (found.batch, found.is_acknowledged) == (0, False)
    assert ledger.acknowledge(0)
    found = ledger.last()
    assert found is not None
    assert found.is_acknowledged
    head = client.head(journal)
    assert not ledger.acknowledge(0)
    assert client.head(journal) == head


def test_an_acknowledgement_reports_if_another_process_took_over(client, journal):
    ledger, other, mine = opened(client, journal), opened(client, journal), decision("query-1/0")
    assert other.take_over(0) is None
    ledger.decide(0, mine)

    assert other.take_over(0) == mine
    assert opened(client, journal).take_over(0) == mine
    assert not ledger.acknowledge(0), "the other process may be slow"
    assert other.take_over(0) is None
    found = other.last()
    assert found is not None
    assert found.is_acknowledged

    later = decision("query-1/1")
    ledger.decide(1, later)
    assert other.take_over(0) is None
    assert ledger.acknowledge(1)
    assert other.take_over(1) is None, "it has nothing to append"


def test_a_publication_with_the_same_ledger_takes_over_batches_it_finishes(client, journal):
    ledger = opened(client, journal)
    ledger.decide(0, decision("query-1/0"))
    before = client.head(GROUP)

    finish_decisions(client, Ledger.open(client, journal, like=GROUP))

    assert client.head(GROUP) == before + len(b"ack\n")
    assert not ledger.acknowledge(0)
    finish_decisions(client, Ledger.open(client, journal, like=GROUP))
    assert client.head(GROUP) == before + len(b"ack\n")


def test_old_batches_are_fenced_and_writers_are_independent(client, journal):
    ledger, other = opened(client, journal), opened(client, journal, "query-2")
    ledger.decide(4, decision("query-1/4"))
    ledger.decide(5, decision("query-1/5"))
    ledger.acknowledge(4)  # It is no longer the last one.

    with pytest.raises(Fenced, match="batch 4 of query-1 is old: batch 5 is written already"):
        ledger.decide(4, decision("query-1/4"))
    assert other.last() is None
    first = decision("query-2/0")
    assert other.decide(0, first) == first
    found = ledger.last()
    assert found is not None
    assert (found.batch, found.is_acknowledged) == (5, False)


def test_one_of_many_concurrent_processes_decides(client, journal, cluster):
    ledgers = [opened(cluster.client(), journal) for _ in range(6)]
    mine = [decision("query-1/0") for _ in ledgers]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda pair: pair[0].decide(0, pair[1]), zip(ledgers, mine, strict=True)))

    assert len({each.producer for each in found if each is not None}) == 1
    assert client.read_all(journal, 0, client.head(journal)).count(b"publication") == 1


class AnswerLosingClient(SyncJournalClient):
    """A client that loses the answer to an append, which was applied or not."""

    times = 0
    applied = True

    def append(self, journal: str, content: Any, **options: Any) -> AppendResult:
        if content and self.times:
            self.times -= 1
            if self.applied:
                super().append(journal, content, **options)
            raise AppendOutcomeUnknown("the answer was lost")
        return super().append(journal, content, **options)


@pytest.mark.parametrize("applied", [True, False])
def test_a_lost_answer_leads_to_one_decision(cluster, client, journal, applied):
    losing_answers = AnswerLosingClient(cluster.endpoint)
    with losing_answers:
        ledger, mine = opened(losing_answers, journal), decision("query-1/0")
        losing_answers.times, losing_answers.applied = 1, applied
        assert ledger.decide(0, mine) == mine
    assert client.read_all(journal, 0, client.head(journal)).count(b"publication") == 1


def test_a_ledger_can_hold_both_batches_and_publications(client, journal):
    ledger = opened(client, journal)
    mine = decision("query-1/0")
    ledger.decide(0, mine)
    both = Ledger.open(client, journal, like=GROUP)
    assert [each.writer_id for each in both.unacknowledged()] == ["query-1/0"]
    single = decision("single")
    both.decide(single)
    ledger.acknowledge(0)
    assert opened(client, journal).decide(0, decision("query-1/0")) == mine
    again = Ledger.open(client, journal, like=GROUP)
    assert again.find("single") == single
    assert again.is_acknowledged("query-1/0")


def test_a_ledger_without_its_registers_and_other_journals_are_refused(client, journal):
    ledger = opened(client, journal)
    ledger.decide(0, decision("query-1/0"))
    registers = client.append(journal, b"").registers
    client.append(journal, b'{"acknowledged":""}\n', subtract_registers=registers)

    with pytest.raises(LedgerDamaged):
        opened(client, journal)
    assert opened(client, journal, accept_loss=True).last() is None


@pytest.mark.parametrize("value", ["later", "9" * 1000 + ".0", "0." + "9" * 1000, "٣.٣"])
def test_an_invalid_register_is_corrupt_data(client, journal, value):
    ledger = opened(client, journal)
    ledger.decide(0, decision("query-1/0"))
    client.append(journal, b"\n", union_registers=label_set({"coranto.dev/batch/query-1": value}))

    with pytest.raises(CorruptData, match=f"is '{value}'"):
        ledger.last()
    with pytest.raises(InvalidInput, match="cannot name a writer of batches"):
        opened(client, journal, "a/b")
