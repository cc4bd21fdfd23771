"""The in-sync record: what follows from it, and what it is in etcd."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto import labels
from coranto.coordination.layout import Layout
from coranto.errors import InvalidInput
from coranto_broker import in_sync
from coranto_broker.in_sync import (
    MAX_EPOCHS,
    UNSTAMPED,
    Epoch,
    Judgement,
    Record,
    Stamp,
    Takeover,
    is_complete,
    judge,
    may_close,
    takeover,
)

A, B, C, D = "zone#a", "zone#b", "zone#c", "zone#d"
RECORD = Record(1, (A, B), (Epoch(10, 0), Epoch(20, 100), Epoch(30, 150)))


@pytest.mark.parametrize(
    ("stamp", "end", "expected"),
    [
        (Stamp(10, 10), 100, Judgement.FINAL),  # The next pipeline began behind it.
        (Stamp(10, 10), 101, Judgement.DIVERGED),  # It went on at 100 without the last byte.
        (Stamp(15, 10), 100, Judgement.FINAL),  # Synchronized by a pipeline that was never recorded.
        (Stamp(15, 10), 101, Judgement.DIVERGED),
        (Stamp(20, 20), 150, Judgement.FINAL),
        (Stamp(29, 20), 160, Judgement.DIVERGED),
        (Stamp(30, 30), 150, Judgement.OPEN),
        (Stamp(30, 30), 999, Judgement.OPEN),
        (Stamp(40, 30), 999, Judgement.OPEN),  # Agreed to a pipeline that is not recorded yet.
        (Stamp(40, 40), 999, Judgement.FINAL),  # Written through one that nobody records: Gazette's.
        (UNSTAMPED, 0, Judgement.FINAL),
        (UNSTAMPED, 1, Judgement.DIVERGED),  # Of a log without stamps, where the first record began at 0.
    ],
)
def test_content_is_judged_by_the_first_later_pipeline(stamp: Stamp, end: int, expected: Judgement) -> None:
    assert judge(RECORD, stamp, end, A) is expected
    assert judge(None, stamp, end, A) is Judgement.FINAL


def test_what_the_only_member_has_is_final() -> None:
    alone = in_sync.recorded(RECORD, 1, 40, [A], 180)
    assert judge(alone, Stamp(40, 40), 999, A) is Judgement.FINAL
    assert judge(alone, Stamp(40, 40), 999, B) is Judgement.OPEN
    assert judge(alone, Stamp(30, 30), 999, A) is Judgement.DIVERGED


def test_a_claimed_record_ends_where_its_member_ends() -> None:
    claimed = in_sync.claimed(RECORD, A, 170, labels.label_set(author="me"))
    assert claimed.members == (A,)
    assert not claimed.closed
    assert judge(claimed, Stamp(30, 30), 170, B) is Judgement.FINAL
    assert judge(claimed, Stamp(30, 30), 171, B) is Judgement.DIVERGED
    assert takeover(claimed, [B, C], Stamp(30, 30), 170) is Takeover.LOST
    assert takeover(claimed, [A, C], Stamp(30, 30), 170) is Takeover.CLEAN
    closed = in_sync.closed(claimed, 1, 170, labels.label_set(author="me"))
    assert closed.closed
    assert takeover(closed, [C, D], UNSTAMPED, 0) is Takeover.ROLL
    assert takeover(closed, [C, D], Stamp(50), 170) is Takeover.CLEAN
    reopened = in_sync.recorded(closed, 1, 50, [C, D], 170)
    assert (reopened.end, reopened.registers, reopened.members) == (None, None, (C, D))


@pytest.mark.parametrize(
    ("stamp", "me", "expected"),
    [
        (Stamp(30, 20), A, True),
        (Stamp(35, 20), A, True),
        (Stamp(29, 20), A, False),  # An older disk.
        (UNSTAMPED, A, False),  # An empty one.
        (Stamp(30, 30), C, False),
        (Stamp(40, 40), C, True),
    ],
)
def test_a_member_holds_all_if_it_followed_the_last_pipeline(stamp: Stamp, me: str, expected: bool) -> None:
    assert is_complete(RECORD, stamp, me) is expected
    assert is_complete(None, stamp, me)


def test_a_route_goes_on_with_a_member() -> None:
    assert takeover(None, [D], UNSTAMPED, 0) is Takeover.CLEAN
    assert takeover(RECORD, [C, A], UNSTAMPED, 150) is Takeover.CLEAN
    assert takeover(RECORD, [C, D], Stamp(40), 500) is Takeover.LOST
    assert takeover(RECORD, [A, D], Stamp(30), 149) is Takeover.LOST  # It lost what the record knows to have been.
    assert takeover(RECORD, [C, D], Stamp(40, 40), 500) is Takeover.CLEAN
    struck = in_sync.without(in_sync.without(RECORD, A), B)
    assert not struck.closed
    assert takeover(struck, [A, B, C, D], Stamp(30, 30), 500) is Takeover.LOST


def test_a_pipeline_that_is_rebuilt_for_the_same_route_keeps_its_epoch() -> None:
    again = in_sync.recorded(RECORD, 1, 30, [B, A], 170)
    assert again == RECORD


def test_of_epochs_at_the_same_offset_the_last_decides() -> None:
    record = in_sync.recorded(RECORD, 1, 40, [A, B], 150)
    assert record.epochs == (Epoch(10, 0), Epoch(20, 100), Epoch(40, 150))
    for stamp in (Stamp(20, 20), Stamp(30, 30)):
        assert judge(record, stamp, 150, A) is Judgement.FINAL
        assert judge(record, stamp, 151, A) is Judgement.DIVERGED


def test_a_spool_of_a_pipeline_from_after_the_closing_is_trusted_behind_the_end() -> None:
    """Only a primary of Gazette's goes on there without a record. It rolls fresh spools to its end, empty."""
    closed = replace(in_sync.closed(RECORD, 1, 170, labels.label_set()), written=50)
    assert judge(closed, Stamp(51, 0), 200, C) is Judgement.FINAL
    assert takeover(closed, [C], Stamp(51, 0), 200) is Takeover.CLEAN
    for synced in (30, 40, 50):  # Whoever took part in it may not have known yet.
        assert judge(closed, Stamp(synced, 0), 200, C) is Judgement.DIVERGED
    assert judge(replace(closed, written=0), Stamp(51, 0), 200, C) is Judgement.DIVERGED, "nobody knows since when"
    for later in (
        in_sync.recorded(closed, 1, 60, [A], 180),
        in_sync.without(closed, A),
        in_sync.claimed(closed, A, 170, labels.label_set()),
        in_sync.closed(closed, 1, 170, labels.label_set()),
    ):
        assert later.written == 0
    assert judge(in_sync.recorded(closed, 1, 60, [A], 180), Stamp(51, 0), 200, C) is Judgement.DIVERGED


def test_old_epochs_are_forgotten_and_what_is_older_is_not_trusted() -> None:
    record = None
    for number in range(MAX_EPOCHS + 5):
        record = in_sync.recorded(record, 1, 10 + number, [A, B], 100 * number)
    assert record is not None
    assert len(record.epochs) == MAX_EPOCHS
    assert record.forgotten == 14
    assert judge(record, Stamp(13, 13), 1, A) is Judgement.DIVERGED
    assert judge(record, Stamp(14, 14), 500, A) is Judgement.FINAL


ALONE = Record(1, (A,), (Epoch(10, 0), Epoch(30, 150)))


@pytest.mark.parametrize(
    ("record", "stamp", "end", "expected"),
    [
        (ALONE, Stamp(30, 30), 170, True),
        (ALONE, Stamp(40, 30), 170, True),  # It agreed to a later pipeline, which was never recorded.
        (ALONE, Stamp(29, 20), 170, False),  # An older disk.
        (ALONE, UNSTAMPED, 170, False),
        (ALONE, Stamp(30, 30), 149, False),  # The journal is longer.
        (ALONE, Stamp(40, 40), 170, False),  # A primary of Gazette's went on.
        (RECORD, Stamp(30, 30), 170, False),  # B may go on.
        (in_sync.without(RECORD, A), Stamp(30, 30), 170, False),  # It was struck out.
        (in_sync.claimed(RECORD, A, 170, labels.label_set()), Stamp(30, 30), 170, True),
        (in_sync.claimed(RECORD, A, 170, labels.label_set()), Stamp(30, 30), 175, False),  # It has decided already.
        (in_sync.closed(RECORD, 1, 170, labels.label_set()), Stamp(30, 30), 170, False),
        (None, Stamp(30, 30), 170, False),
    ],
)
def test_only_a_member_that_is_alone_and_has_all_closes_a_record(
    record: Record | None, stamp: Stamp, end: int, expected: bool
) -> None:
    assert may_close(record, stamp, end, A) is expected


texts = st.text(st.characters(min_codepoint=33, max_codepoint=1000), min_size=1, max_size=10)
numbers = st.integers(0, 2**60)
records = st.builds(
    Record,
    numbers,
    st.lists(texts, max_size=4).map(tuple),
    st.lists(st.builds(Epoch, numbers, numbers), max_size=4).map(tuple),
    numbers,
    st.just(None),
    st.just(None),
)


@given(
    records,
    st.none()
    | st.tuples(numbers, st.dictionaries(st.sampled_from(("author", "owner")), st.sampled_from(("ada", "bob")))),
)
def test_records_are_kept_as_they_are(record: Record, ending: tuple[int, dict[str, str]] | None) -> None:
    if ending is not None:
        record = in_sync.closed(record, 1, ending[0], labels.label_set(**ending[1]))
    assert in_sync.decode(in_sync.encode(record)) == record


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"[]",
        b"7",
        b"{}",
        b'{"create_revision": 1, "members": ["a#b"]}',
        b'{"create_revision": -1, "members": [], "epochs": []}',
        b'{"create_revision": 1, "members": [7], "epochs": []}',
        b'{"create_revision": 1, "members": [], "epochs": [[1]]}',
        b'{"create_revision": 1, "members": [], "epochs": [["1", 2]]}',
        b'{"create_revision": 1, "members": [], "epochs": [], "end": 4}',
        b'{"create_revision": 1, "members": [], "epochs": [], "end": true, "registers": []}',
    ],
)
def test_what_is_no_record_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidInput, match="in-sync record"):
        in_sync.decode(value)


def test_records_lie_outside_of_every_prefix() -> None:
    keys = {Layout(prefix).in_sync_key(item) for prefix in ("/a", "/a/b") for item in ("c", "b/c")}
    assert len(keys) == 4
    assert not any(key.startswith("/") for key in keys)
    with pytest.raises(InvalidInput):
        Layout("/a").in_sync_key("b#c")


# ---------------------------------------------------------------------------------------------------------- a model


@dataclass
class Spool:
    """A replica in the model: what it holds of the journal, byte by byte, and of which pipelines it is."""

    content: list[int] = field(default_factory=list)
    stamp: Stamp = UNSTAMPED


def closing_revision(revision: int) -> int:
    """That at which a record is closed before the pipeline of `revision`."""
    return revision - 2


@pytest.mark.parametrize("chunk", range(10))
def test_whatever_happens_acknowledged_content_stays_and_content_that_is_final_is_the_journal_s(chunk: int) -> None:
    for seed in range(300 * chunk, 300 * (chunk + 1)):
        _play(random.Random(seed))


def _play(chance: random.Random) -> None:
    """Pipelines of random Routes over four brokers. Each broker takes its spool up anew before each, as after a loss of
    its lease; commits reach whom they reach; disks are wiped, as long as one member keeps its own; brokers exit with
    all that they have stored, and close the record where they may."""
    names = [A, B, C, D]
    spools = {name: Spool() for name in names}
    record: Record | None = None
    acknowledged: list[int] = []
    next_byte = 0
    final: dict[int, int] = {}
    stored: list[int] = []

    def check_final() -> None:
        for name, spool in spools.items():
            if judge(record, spool.stamp, len(spool.content), name) is Judgement.FINAL and spool.content:
                for offset, byte in enumerate(spool.content):
                    assert final.setdefault(offset, byte) == byte

    for revision in range(10, 10 + 5 * chance.randint(1, 12), 5):
        if record is not None and chance.random() < 0.3:
            holders = [n for n in record.members if is_complete(record, spools[n].stamp, n)]
            wiped = chance.choice(names)
            if holders != [wiped]:
                spools[wiped] = Spool()
        leaving = chance.choice(names)
        if chance.random() < 0.3 and may_close(record, spools[leaving].stamp, len(spools[leaving].content), leaving):
            stored = list(spools[leaving].content)
            record = replace(
                in_sync.closed(record, 1, len(stored), labels.label_set()), written=closing_revision(revision)
            )
            assert stored[: len(acknowledged)] == acknowledged, "an acknowledged byte is not stored"
            check_final()
        route = chance.sample(names, chance.randint(1, 3))
        for name in route:  # What `InSyncRecords.verify` does.
            spool = spools[name]
            if record is not None and name in record.members and not is_complete(record, spool.stamp, name):
                record = in_sync.without(record, name)
            if judge(record, spool.stamp, len(spool.content), name) is Judgement.DIVERGED:
                spools[name] = Spool()
        longest = max((spools[name] for name in route), key=lambda each: len(each.content))
        agreed = list(longest.content)
        for name in route:
            if chance.random() < 0.1:
                break  # The synchronization fails half-way.
            spools[name].content, spools[name].stamp = list(agreed), spools[name].stamp.followed(revision)
        else:
            found = takeover(record, route, spools[route[0]].stamp, len(agreed))
            if found is Takeover.LOST:
                continue
            if found is Takeover.ROLL:
                agreed = list(stored)
                for name in route:
                    spools[name].content = list(agreed)
            if chance.random() < 0.1:
                continue  # The transaction fails.
            record = in_sync.recorded(record, 1, revision, route, len(agreed))
            assert agreed[: len(acknowledged)] == acknowledged, "an acknowledged byte is gone"
            for _ in range(chance.randint(0, 4)):
                reached = chance.sample(route, chance.randint(0, len(route)))
                for name in reached:
                    spools[name].content.append(next_byte)
                    spools[name].stamp = spools[name].stamp.followed(revision, wrote=True)
                next_byte += 1
                if len(reached) < len(route):
                    break  # It is not acknowledged, and the pipeline is broken.
                acknowledged = list(spools[route[0]].content)
            check_final()


def test_the_model_notices_when_a_rule_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_caught() -> bool:
        for seed in range(1000):
            try:
                _play(random.Random(seed))
            except AssertionError:
                return True
        return False

    real = in_sync.recorded

    def only_the_last_epoch(*given: Any) -> Record:
        return replace(real(*given), epochs=(Epoch(given[2], given[4]),))

    module = globals()
    for home, name, planted in (
        (module, "takeover", lambda *_: Takeover.CLEAN),
        (module, "judge", lambda *_: Judgement.FINAL),
        (module, "is_complete", lambda record, _, me: record is None or me in record.members),
        (module, "may_close", lambda record, _, __, me: record is not None and me in record.members),
        (module, "closing_revision", lambda _: 1),
        (vars(in_sync), "recorded", only_the_last_epoch),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(home, name, planted)
            assert is_caught(), name
    assert not is_caught()
