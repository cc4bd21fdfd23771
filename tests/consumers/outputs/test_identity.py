"""The identity of a consumer: changes, their errors, and their confirmation."""

import pytest

from coranto.errors import ConsumerChanged, InvalidInput
from coranto.messages.checkpoints import Checkpoint, Identity, Source
from coranto_consumers.outputs.identity import IdentityCheck, checked_codes, journals_source, sources_of

KNOWN = Identity("name:prefix=a/", frozenset({"table x"}), store="postgresql://db/shop")
OFFSETS = {"a/one": Source(100), "a/two": Source(7)}


def restored(now: Identity, accepted: str = "", known: Identity = KNOWN, unread=tuple, **options) -> IdentityCheck:
    check = IdentityCheck("delays", accepted)
    check.restored(Checkpoint(OFFSETS, identity=known), now, unread, **options)
    return check


def refusal(work) -> tuple[str, str]:
    """Return the text of the error, and the code in it."""
    with pytest.raises(ConsumerChanged) as raised:
        work()
    text = str(raised.value)
    return text, text.partition("accept_changes='")[2].partition("'")[0]


def test_an_unchanged_consumer_passes_and_a_missing_record_is_created():
    check = restored(KNOWN)
    check.take({"table x"})
    assert check.record == KNOWN

    check = restored(KNOWN, known=Identity())
    check.take({"table y"})
    check.require_confirmed()
    assert check.record == Identity(KNOWN.sources, frozenset({"table y"}), store=KNOWN.store)


def test_another_selector_or_store_is_an_error_that_names_the_loss():
    text, code = refusal(lambda: restored(Identity("name:prefix=b/", store=KNOWN.store), unread=lambda: ["a/two"]))
    assert "sources: recorded name:prefix=a/, now name:prefix=b/; the rest of a/two from 7 on is not read" in text
    assert "give it another name" in text
    assert restored(Identity("name:prefix=b/", store=KNOWN.store), code).record.sources == "name:prefix=b/"

    moved = Identity(KNOWN.sources, store="postgresql://copy/shop")
    text, other = refusal(lambda: restored(moved))
    assert "store: recorded postgresql://db/shop, now postgresql://copy/shop; commits there since" in text
    assert other != code
    check = restored(moved, f"{code}, {other}")
    check.take({"table x"})
    assert check.record.store == "postgresql://copy/shop"


def test_another_output_is_an_error_before_it_is_written():
    check = restored(KNOWN)
    text, code = refusal(lambda: check.take({"table y"}))
    assert "table x gets nothing any more, table y gets nothing of the earlier messages (a/one 100, a/two 7)" in text
    with pytest.raises(ConsumerChanged):
        check.require_confirmed()
    check = restored(KNOWN, code)
    check.take({"table y"})
    check.require_confirmed()
    assert check.record.outputs == {"table x", "table y"}
    assert check.record.sometimes == {"table x"}
    again = restored(KNOWN, known=check.record)
    again.take({"table y"})


def test_a_code_confirms_exactly_one_set_of_changes():
    _, code = refusal(lambda: restored(KNOWN).take({"table y"}))
    _, other = refusal(lambda: restored(KNOWN, code).take({"table z"}))
    assert other != code

    now = Identity("name:prefix=b/", store=KNOWN.store)
    _, first = refusal(lambda: restored(now))
    _, both = refusal(lambda: restored(now, first).take({"table y"}))
    check = restored(now, both)
    check.take({"table y"})
    check.require_confirmed()

    unsettled = restored(now, code)  # A commit without outputs does not pass with the code of another change.
    with pytest.raises(ConsumerChanged):
        unsettled.require_confirmed()


def test_outputs_of_only_some_transactions_are_not_a_change():
    check = restored(KNOWN, known=Identity())
    for outputs in ({"table x", "table y"}, {"table x"}, {"table x", "table z"}, {"table x"}):
        check.take(outputs)
    assert check.record.outputs == {"table x", "table y", "table z"}
    assert check.record.sometimes == {"table y", "table z"}
    for outputs in ({"table x"}, {"table x", "table z"}):
        restored(KNOWN, known=check.record).take(outputs)
    refusal(lambda: restored(KNOWN, known=check.record).take({"table z"}))


def test_a_shard_may_gain_journals_but_not_lose_any():
    shard = Identity(journals_source(["a/one", "a/two"]), frozenset({"table x"}))
    more = Identity(journals_source(["a/one", "a/two", "a/zoo"]), frozenset({"table x"}))
    assert restored(more, known=shard, outputs_known=True).record == more
    text, code = refusal(lambda: restored(Identity(journals_source(["a/one"])), known=shard, unread=lambda: ["a/two"]))
    assert "the rest of a/two from 7 on is not read" in text
    fewer = Identity(journals_source(["a/one"]), frozenset({"table x"}))
    assert restored(fewer, code, shard, outputs_known=True).record == fewer
    refusal(lambda: restored(Identity(more.sources, frozenset({"table y"})), known=shard, outputs_known=True))


def test_sources_are_journal_names_or_a_selector_in_any_order():
    assert sources_of("bb=2,aa=1") == sources_of("aa=1,bb=2")
    assert sources_of(["y", "x"]) == journals_source(["x", "y"])


def test_an_invalid_code_is_refused():
    assert checked_codes("0123456789ab, aaaaaaaaaaaa,") == "0123456789ab, aaaaaaaaaaaa,"
    for text in ("yes", "0123456789AB", "0123"):
        with pytest.raises(InvalidInput, match="is not the code of a change"):
            checked_codes(text)
