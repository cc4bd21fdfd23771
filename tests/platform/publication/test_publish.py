"""Publications: readers see each one once, although processes are killed and retry."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from structlog.testing import capture_logs

from coranto.client import SyncJournalClient
from coranto.errors import InvalidInput, JournalNotFound, NotAllowed
from coranto.messages import JsonLines
from coranto.publication import Publication
from coranto.wire import protocol_pb2 as pb
from tests.platform.publication.conftest import ONCE, ROWS, Killed, Shop


def test_a_publication_is_seen_once_and_repeating_it_adds_nothing(shop: Shop) -> None:
    first = shop.publish()
    heads = [shop.client.head(name) for name in (*shop.group, shop.ledger)]
    second = shop.publish()
    assert (first.messages, first.is_new, second.is_new) == (300, True, False)
    assert (second.messages, second.time) == (first.messages, first.time)
    assert [shop.client.head(name) for name in (*shop.group, shop.ledger)] == heads
    assert shop.seen() == ONCE


def test_messages_of_a_decided_publication_are_not_read(shop: Shop) -> None:
    shop.publish()

    def refuse() -> Iterator[dict[str, Any]]:
        raise AssertionError("the messages were read")
        yield {}

    assert not shop.publish(refuse()).is_new


def test_other_writer_ids_publish_independently(shop: Shop) -> None:
    shop.publish(writer_id="run-1")
    assert shop.publish(writer_id="run-2").is_new
    assert set(shop.seen().values()) == {2}


def test_a_publication_without_messages_is_decided(shop: Shop) -> None:
    assert shop.publish([]).messages == 0
    assert not shop.publish().is_new
    assert not shop.seen()


@pytest.mark.parametrize("applied", [False, True])
def test_a_process_may_be_killed_at_any_append(shop: Shop, applied: bool) -> None:
    whole = shop.crashing(0, applied=applied)
    shop.publish(writer_id="first")  # It creates the ledger.
    shop.publish(writer_id="count", client=whole)
    for at in range(1, whole.appends + 1):
        with pytest.raises(Killed):
            shop.publish(writer_id=f"run-{at}", client=shop.crashing(at, applied=applied))
        shop.publish(writer_id=f"run-{at}")
        assert not shop.publish(writer_id=f"run-{at}").is_new
        assert set(shop.seen().values()) == {2 + at}
    assert whole.appends > len(shop.group) + 2


def test_a_decided_publication_is_completed_by_the_next_one(shop: Shop) -> None:
    shop.publish([], writer_id="first")
    with pytest.raises(Killed):  # After opening the ledger, the decision and one acknowledgement.
        shop.publish(client=shop.crashing(3, applied=True))
    assert 0 < shop.seen().total() < len(ROWS)
    shop.publish([], writer_id="other")
    assert shop.seen() == ONCE
    assert not shop.publish().is_new


def test_one_of_several_concurrent_attempts_publishes(shop: Shop) -> None:
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda _: shop.publish(client=SyncJournalClient.of(shop.client.config)), range(4)))
    assert [outcome.messages for outcome in outcomes] == [300] * 4
    assert sum(outcome.is_new for outcome in outcomes) == 1
    assert shop.seen() == ONCE


def test_concurrent_publications_are_all_seen(shop: Shop) -> None:
    def publish(number: int) -> Publication:
        return shop.publish(writer_id=f"run-{number}", client=SyncJournalClient.of(shop.client.config))

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(publish, range(6)))
    assert all(outcome.is_new for outcome in outcomes)
    assert set(shop.seen().values()) == {6}


def test_a_failed_attempt_leaves_no_visible_messages(shop: Shop) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield from ROWS[:200]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shop.publish(broken())
    assert not shop.seen()
    assert shop.publish().is_new
    assert shop.seen() == ONCE


def test_a_deleted_journal_does_not_block_other_publications(shop: Shop) -> None:
    shop.publish([], writer_id="first")
    with pytest.raises(Killed):  # The decision is in the ledger.
        shop.publish(client=shop.crashing(2, applied=True))
    shop.delete(shop.group[0])
    assert shop.publish(writer_id="run-2", journals=shop.group[1:]).is_new
    assert not shop.pending()


def test_publications_that_cannot_be_finished_are_logged_and_stay_in_the_ledger(shop: Shop) -> None:
    shop.publish([], writer_id="first")
    with pytest.raises(Killed):  # The decision is in the ledger.
        shop.publish(writer_id="run-1", client=shop.crashing(2, applied=True))
    shop.set_flags(shop.group[0], pb.JournalSpec.O_RDONLY)
    with pytest.raises(Killed):  # It has tried three acknowledgements before its own decision.
        shop.publish(writer_id="run-2", journals=shop.group[1:], client=shop.crashing(5, applied=True))
    assert [each.writer_id for each in shop.pending()] == ["run-1", "run-2"]

    with capture_logs() as logs:
        assert shop.publish(writer_id="run-3", journals=shop.group[1:]).is_new
    warnings = [(each["event"], each["writer_id"]) for each in logs if each["log_level"] == "warning"]
    assert warnings == [("publication.not_finished", "run-1")]
    assert [each.writer_id for each in shop.pending()] == ["run-1"]
    with pytest.raises(NotAllowed):
        shop.publish(writer_id="run-1")

    shop.set_flags(shop.group[0], pb.JournalSpec.O_RDWR)
    assert shop.publish(writer_id="run-4").is_new
    assert not shop.pending()
    assert set(shop.seen().values()) == {4}


def test_messages_without_uuids_are_refused(shop: Shop) -> None:
    with pytest.raises(InvalidInput, match="UUIDs"):
        shop.publish(framing=JsonLines(None))
    assert not any(shop.client.head(name) for name in shop.group)


def test_publishing_to_no_journal_or_to_the_ledger_is_refused(shop: Shop) -> None:
    with pytest.raises(JournalNotFound):
        shop.publish(journals=[])
    with pytest.raises(InvalidInput, match="ledger"):
        shop.publish(ledger=shop.group[0])
