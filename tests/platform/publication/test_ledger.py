"""Ledgers of publications: lost answers, lost records, other content, and the amount of a ledger that is read."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from coranto.client import AppendResult, SyncJournalClient
from coranto.errors import (
    AppendOutcomeUnknown,
    CorruptData,
    InvalidInput,
    LedgerDamaged,
    NotAllowed,
    PermissionDenied,
    Unavailable,
)
from coranto.labels import label_set, value_of
from coranto.publication import Decision, Ledger
from coranto.publication import ledger as ledgers
from coranto.publication.records import Acknowledgement, Summary, digest_of
from coranto.streams.model.stream import HELD_LABEL
from coranto.wire import protocol_pb2 as pb
from tests.platform.publication.conftest import ONCE, Killed, Shop

SUMMARY = "coranto.dev/summary"


class CountingClient(SyncJournalClient):
    """A client that counts the bytes it reads, and calls `before` once, before it appends content."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.bytes_read = 0
        self.before: Any = None

    def read(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        for chunk in super().read(*arguments, **options):
            self.bytes_read += len(chunk.content)
            yield chunk

    def append(self, journal: str, content: Any, **options: Any) -> AppendResult:
        if content and (before := self.before) is not None:
            self.before = None
            before(content)
        return super().append(journal, content, **options)


def counting(shop: Shop) -> CountingClient:
    client = CountingClient.of(shop.client.config)
    assert isinstance(client, CountingClient)
    return client


def opened(shop: Shop, client: SyncJournalClient | None = None, **options: Any) -> Ledger:
    return Ledger.open(client or shop.client, shop.ledger, like=shop.group[0], **options)


def decision(writer_id: str, producer: str = "aa", **options: Any) -> Decision:
    return Decision(writer_id, producer, 7, 1.5, {f"journal-{number}": b"x" * 100 for number in range(3)}, **options)


def remember(shop: Shop, names: list[str]) -> None:
    """Record acknowledged decisions."""
    ledger = Ledger.unread(shop.client, shop.ledger, like=shop.group[0])
    ledger.refresh()
    for name in names:
        ledger.decide(decision(name))
        ledger.acknowledge(name)


def known(ledger: Ledger, names: list[str]) -> dict[str, tuple[int, float]]:
    found = {name: ledger.find(name) for name in names}
    return {name: (each.messages, each.time) for name, each in found.items() if each is not None}


def summary_of(shop: Shop) -> str:
    return value_of(shop.client.append(shop.ledger, b"").registers, SUMMARY) or ""


@pytest.mark.parametrize("applied", [False, True])
def test_lost_answers_of_the_ledger_do_not_publish_twice(shop: Shop, applied: bool) -> None:
    assert shop.publish(client=shop.losing_answers(1, applied=applied)).is_new
    assert shop.seen() == ONCE


def test_an_attempt_with_an_unknown_decision_is_not_rolled_back(shop: Shop) -> None:
    with pytest.raises(AppendOutcomeUnknown):
        shop.publish(client=shop.losing_answers(2, applied=False))
    assert shop.publish().is_new
    assert shop.seen() == ONCE


def test_a_ledger_that_may_have_lost_records_is_refused_until_accepted(shop: Shop) -> None:
    shop.publish()
    removed = label_set({HELD_LABEL: "true"})
    shop.client.append(shop.ledger, b'{"acknowledged":""}\n', subtract_registers=removed)
    with pytest.raises(LedgerDamaged, match="accept"):
        shop.publish(writer_id="run-2")
    assert shop.publish(writer_id="run-2", accept_loss=True).is_new
    assert shop.publish(writer_id="run-3").is_new


def test_a_recreated_ledger_is_refused_at_any_length(shop: Shop) -> None:
    shop.publish()
    ledger = opened(shop)
    (info,) = shop.client.list(f"name={shop.ledger}").journals
    shop.client.apply([pb.ApplyRequest.Change(delete=shop.ledger, expect_mod_revision=info.mod_revision)])
    del info.spec.fragment.stores[:]
    shop.client.apply([pb.ApplyRequest.Change(upsert=info.spec)])
    remember(shop, [f"run-{number}" for number in range(2, 12)])
    with pytest.raises(LedgerDamaged, match="not the one that was read before"):
        ledger.refresh()


def test_a_ledger_with_other_content_is_refused(shop: Shop) -> None:
    shop.publish()
    shop.client.append(shop.ledger, b"something else\n")
    with pytest.raises(CorruptData, match="not a record"):
        shop.publish()


def test_a_ledger_drops_acknowledgements_that_are_in_their_journals(shop: Shop) -> None:
    for number in range(3):
        shop.publish(writer_id=f"run-{number}")
    with pytest.raises(Killed):  # The decision is in the ledger.
        shop.publish(writer_id="run-3", client=shop.crashing(2, applied=True))

    ledger = Ledger.open(shop.client, shop.ledger, like=shop.group[0])

    kept = {f"run-{number}": ledger.find(f"run-{number}") for number in range(4)}
    assert {name: (found.messages, len(found.intents)) for name, found in kept.items() if found is not None} == {
        **dict.fromkeys(["run-0", "run-1", "run-2"], (300, 0)),
        "run-3": (300, 3),
    }


@pytest.mark.parametrize("writer_id", ["", "a\nb", "x" * 2000])
def test_bad_writer_ids_are_refused(shop: Shop, writer_id: str) -> None:
    with pytest.raises(InvalidInput, match="writer_id"):
        shop.publish(writer_id=writer_id)


MANY = [f"run-{number}" for number in range(40)]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write summaries after a few kilobytes."""
    monkeypatch.setattr(ledgers, "SUMMARIZED_BYTES", 4 << 10)


def test_the_first_reader_of_a_ledger_leaves_a_summary_for_the_next_one(shop: Shop, soon: None) -> None:
    remember(shop, MANY)
    opened(shop).decide(decision("late"))
    whole, later, unsummarized = counting(shop), counting(shop), Ledger.unread(shop.client, shop.ledger, like="")
    unsummarized.refresh()

    first = opened(shop, whole)
    summary = summary_of(shop)
    second = opened(shop, later)

    assert summary, "the first reader of many records wrote a summary"
    assert known(first, MANY) == known(second, MANY) == known(unsummarized, MANY) == dict.fromkeys(MANY, (7, 1.5))
    assert second.find("late") == decision("late")
    assert list(first.unacknowledged()) == list(second.unacknowledged()) == [decision("late")]
    assert later.bytes_read < 8 << 10 < shop.client.head(shop.ledger)
    remember(shop, ["other"])
    assert known(opened(shop), [*MANY, "other"]).keys() == {*MANY, "other"}
    assert summary_of(shop) == summary, "one more record causes no summary"


def test_a_summary_applies_to_later_writers(shop: Shop, soon: None) -> None:
    remember(shop, MANY)
    opened(shop)
    ledger = opened(shop)
    assert summary_of(shop)

    for name in (MANY[0], MANY[-1]):
        assert ledger.decide(decision(name, "other")).producer != "other"
    assert ledger.decide(decision("new", "other")).producer == "other"
    ledger.acknowledge("new")
    assert known(opened(shop), ["new"]) == {"new": (7, 1.5)}
    assert not list(opened(shop).unacknowledged())


def test_another_summary_follows_after_many_records(shop: Shop, soon: None) -> None:
    summaries = set()
    for begin in range(0, 200, 40):
        names = [f"run-{number}" for number in range(begin, begin + 40)]
        remember(shop, names)
        assert known(opened(shop), names).keys() == set(names)
        summaries.add(summary_of(shop))
    assert 3 <= len(summaries) <= 5
    reader = Ledger.unread(shop.client, shop.ledger, like="")
    reader.refresh()  # It compares all summaries with the records before them.
    assert len(known(reader, [f"run-{number}" for number in range(200)])) == 200


def test_a_zombie_that_appends_before_a_summary_prevents_it(shop: Shop, soon: None) -> None:
    remember(shop, MANY)
    zombie, client = opened_without_summary(shop), counting(shop)
    client.before = lambda content: zombie.decide(decision("zombie"))

    ledger = opened(shop, client)

    assert not summary_of(shop), "it would lack the zombie's decision"
    assert ledger.decide(decision("zombie", "mine")).producer == "aa"
    assert opened(shop).find("zombie") == opened(shop).find("zombie") == decision("zombie")
    assert summary_of(shop)


def opened_without_summary(shop: Shop) -> Ledger:
    ledger = Ledger.unread(shop.client, shop.ledger, like="")
    ledger.refresh()
    return ledger


def test_a_zombie_that_read_before_a_summary_does_not_decide_again(shop: Shop, soon: None) -> None:
    remember(shop, MANY)
    zombie = opened_without_summary(shop)
    opened(shop).decide(decision("contested", "successor"))
    opened(shop)

    assert zombie.decide(decision("contested", "zombie")).producer == "successor"


@pytest.mark.parametrize(
    "error", [AppendOutcomeUnknown("lost"), NotAllowed("x"), PermissionDenied("x"), Unavailable("x")]
)
def test_a_failure_to_write_a_summary_is_only_logged(shop: Shop, soon: None, error: Exception) -> None:
    remember(shop, MANY)
    client = counting(shop)

    def refuse(content: bytes) -> None:
        raise error

    client.before = refuse
    with capture_logs() as logs:
        ledger = opened(shop, client)
    assert [log["event"] for log in logs] == ["publication.not_summarized"]
    assert ledger.decide(decision("new")) == decision("new")


@pytest.mark.parametrize(
    "register", ["nonsense", "0.{digest}", "{offset}.{wrong}", "9" * 900 + ".{digest}", "٣.{digest}"]
)
def test_a_register_that_points_to_no_summary_is_ignored(shop: Shop, soon: None, register: str) -> None:
    remember(shop, MANY)
    opened(shop)
    offset, digest = summary_of(shop).split(".")
    value = register.format(offset=offset, digest=digest, wrong="0" * 32)
    shop.client.append(shop.ledger, Acknowledgement("").to_line(), union_registers=label_set({SUMMARY: value}))

    with capture_logs() as logs:
        ledger = opened(shop)

    assert known(ledger, MANY).keys() == set(MANY)
    assert [log["event"] for log in logs] == ["publication.summary_unreadable"]


@pytest.mark.parametrize("record", [decision("last").to_line(), Acknowledgement("x").to_line(), b"no record\n"])
def test_a_register_that_points_to_another_record_hides_no_records(shop: Shop, soon: None, record: bytes) -> None:
    remember(shop, MANY)
    value = f"{shop.client.head(shop.ledger)}.{digest_of(record)}"
    shop.client.append(shop.ledger, record, union_registers=label_set({SUMMARY: value}))

    with capture_logs() as logs:
        if record == b"no record\n":
            with pytest.raises(CorruptData, match="not a record of a publication"):
                opened(shop)
        else:
            assert opened(shop).decide(decision(MANY[0], "other")).producer == "aa", "it is decided"
    assert logs[0]["event"] == "publication.summary_unreadable"


def test_a_register_of_a_summary_beyond_the_end_means_lost_records(shop: Shop) -> None:
    """Registers and content of an append are applied together. So the ledger was longer before."""
    remember(shop, MANY[:3])
    mark, value = opened(shop).mark("mine"), f"{1 << 40}.{'0' * 32}"
    shop.client.append(shop.ledger, Acknowledgement("").to_line(), union_registers=label_set({SUMMARY: value}))

    tried: list[Callable[[], Ledger]] = [
        lambda: opened(shop),
        lambda: Ledger.unread(shop.client, shop.ledger, like=""),
        lambda: Ledger.resume(shop.client, mark, like=""),
    ]
    for each in tried:
        with pytest.raises(LedgerDamaged, match=f"points to a summary at {1 << 40}: the last records are gone. Run"):
            each()
    assert known(opened(shop, accept_loss=True), MANY).keys() == set(MANY[:3])
    assert not summary_of(shop)
    for each in tried:
        each()


def test_a_ledger_that_lost_all_records_is_not_taken_for_an_empty_one(shop: Shop) -> None:
    class WithoutContent(SyncJournalClient):
        """A client of brokers that have registers of the ledger, but not its content."""

        def append(self, journal: str, content: Any, **options: Any) -> AppendResult:
            found = super().append(journal, content, **options)
            return found if content else replace(found, end=0)

    remember(shop, MANY[:3])
    without_content = WithoutContent.of(shop.client.config)
    with pytest.raises(LedgerDamaged, match="has the registers of a ledger but no content: all its records are gone"):
        opened(shop, without_content)


def test_a_record_in_many_pieces_is_copied_once(shop: Shop) -> None:
    class Piece(bytes):
        """A piece of content that counts bytes copied by `+`."""

        copied = 0

        def __radd__(self, left: bytes) -> bytes:
            Piece.copied += len(left) + len(self)
            return bytes(left) + bytes(self)

    class InPieces(SyncJournalClient):
        """A client that reads a few bytes at a time."""

        def read(self, *arguments: Any, **options: Any) -> Iterator[Any]:
            for chunk in super().read(*arguments, **options):
                for at in range(0, len(chunk.content), 16):
                    yield replace(chunk, content=Piece(chunk.content[at : at + 16]))

    large = Decision("large", "aa", 7, 1.5, {"journal": b"x" * 100_000})
    offset = shop.client.head(shop.ledger) if opened(shop) else 0
    opened(shop).decide(large)

    ledger = opened(shop, InPieces.of(shop.client.config))

    assert ledger.find("large") == ledger.decision_at(offset) == large
    assert Piece.copied < 4 * len(large.to_line())


def test_a_summary_that_differs_from_the_records_before_it_is_refused(shop: Shop) -> None:
    remember(shop, MANY[:3])
    wrong = Summary({MANY[0]: (7, 1.5), MANY[1]: (8, 1.5), MANY[2]: (7, 1.5)}, ())
    shop.client.append(shop.ledger, wrong.to_line())
    with pytest.raises(LedgerDamaged, match="a summary differs from the records before it"):
        opened(shop)


def test_accepting_a_loss_writes_no_summary_that_hides_it(shop: Shop, soon: None) -> None:
    remember(shop, MANY)
    removed = label_set({HELD_LABEL: "true"})
    shop.client.append(shop.ledger, Acknowledgement("").to_line(), subtract_registers=removed)
    with pytest.raises(LedgerDamaged, match="accept"):
        opened(shop)
    assert known(opened(shop, accept_loss=True), MANY).keys() == set(MANY)
    assert opened(shop).decide(decision("new")) == decision("new")


def test_a_ledger_resumed_at_a_mark_reads_only_later_records(shop: Shop) -> None:
    remember(shop, MANY)
    mark = pickle.loads(pickle.dumps(opened(shop).mark("mine", "also mine")))
    remember(shop, ["other"])
    client = counting(shop)

    ledger = Ledger.resume(client, mark, like=shop.group[0])

    assert 0 < client.bytes_read < 1 << 10
    assert ledger.find("mine") is ledger.find("also mine") is None
    with pytest.raises(ValueError, match="only the records of also mine, mine were read"):
        ledger.find(MANY[0])
    assert ledger.decide(decision("mine")) == decision("mine")
    ledger.acknowledge("mine")
    assert opened(shop).find("mine") is not None


@pytest.mark.parametrize("is_acknowledged", [False, True])
def test_a_zombies_decision_after_a_mark_applies(shop: Shop, soon: None, is_acknowledged: bool) -> None:
    remember(shop, MANY)
    mark = opened_without_summary(shop).mark("contested")
    zombie = opened(shop)
    zombie.decide(decision("contested", "zombie"))
    if is_acknowledged:
        zombie.acknowledge("contested")
    opened(shop)  # With summaries after the mark.

    ledger = Ledger.resume(shop.client, mark, like=shop.group[0])

    assert ledger.decide(decision("contested", "mine")).producer == "zombie"
    assert ledger.is_acknowledged("contested") == is_acknowledged
    with pytest.raises(ValueError, match="contested is decided"):
        opened(shop).mark("contested")


def test_a_concurrent_decision_of_a_zombie_applies(shop: Shop) -> None:
    mark, zombie, client = opened(shop).mark("contested"), opened(shop), counting(shop)
    client.before = lambda content: zombie.decide(decision("contested", "zombie"))

    ledger = Ledger.resume(client, mark, like=shop.group[0])

    assert ledger.decide(decision("contested", "mine")).producer == "zombie"


def test_a_ledger_recreated_after_a_mark_is_read_completely(shop: Shop) -> None:
    remember(shop, MANY)
    mark = opened(shop).mark("mine")
    opened(shop).decide(decision("mine", "before"))
    of_another_journal = replace(mark, offset=shop.client.head(shop.ledger), revision=mark.revision - 1)

    ledger = Ledger.resume(shop.client, of_another_journal, like=shop.group[0])

    assert ledger.decide(decision("mine", "after")).producer == "before"


def test_a_ledger_that_ends_before_a_mark_is_refused_until_accepted(shop: Shop) -> None:
    remember(shop, MANY[:3])
    mark = replace(opened(shop).mark("mine"), offset=1 << 30)  # As after a loss of all brokers with its last records.

    with pytest.raises(LedgerDamaged, match=f"was read up to offset {1 << 30}, but now ends at"):
        Ledger.resume(shop.client, mark, like=shop.group[0])
    ledger = Ledger.resume(shop.client, mark, like=shop.group[0], accept_loss=True)
    assert ledger.decide(decision("mine")) == decision("mine")


def test_a_decision_without_messages_has_nothing_to_acknowledge(shop: Shop) -> None:
    empty = Decision("mine", "aa", 0, 1.5, {})
    assert opened(shop).decide(empty) == empty
    assert opened(shop).is_acknowledged("mine")
    assert not list(opened(shop).unacknowledged())
    assert opened(shop).find("mine") == empty


def test_a_summary_keeps_unacknowledged_batches(shop: Shop, soon: None) -> None:
    remember(shop, MANY)
    batch = decision("query/4", batch=("query", 4))
    shop.client.append(shop.ledger, batch.to_line())
    opened(shop)

    assert summary_of(shop)
    assert list(opened(shop).unacknowledged()) == [batch]
    assert opened(shop).find("query/4") is None, "batches are not publications"


def test_the_digest_of_a_record_is_the_digest_of_its_line() -> None:
    line = Acknowledgement("x").to_line()
    assert digest_of(line) == digest_of(line[:-1]) != digest_of(Acknowledgement("y").to_line())
