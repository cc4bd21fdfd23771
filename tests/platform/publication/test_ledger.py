"""Ledgers of publications: answers that are lost, lost records, and other content."""

from __future__ import annotations

import pytest

from coranto.errors import AppendOutcomeUnknown, CorruptData, InvalidInput, LedgerDamaged
from coranto.labels import label_set
from coranto.publication import Ledger
from coranto.streams.model.stream import HELD_LABEL
from tests.platform.publication.conftest import ONCE, Killed, Shop


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


def test_a_ledger_forgets_the_acknowledgements_that_are_in_their_journals(shop: Shop) -> None:
    for number in range(3):
        shop.publish(writer_id=f"run-{number}")
    with pytest.raises(Killed):  # With the decision in the ledger.
        shop.publish(writer_id="run-3", client=shop.dying(2, applied=True))

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
