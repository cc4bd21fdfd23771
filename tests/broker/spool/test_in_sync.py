"""The in-sync record: its consequences, and its encoding in etcd."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto import labels
from coranto.coordination.layout import Layout
from coranto.errors import InvalidInput
from coranto.wire import protocol_pb2 as pb
from coranto_broker.spool import in_sync
from coranto_broker.spool.in_sync import (
    MAX_EPOCHS,
    UNSTAMPED,
    Epoch,
    InSyncRecord,
    Judgement,
    Stamp,
    Takeover,
    as_read_for,
    is_complete,
    judge,
    may_leave,
    takeover,
)

A, B, C, D = "zone#a", "zone#b", "zone#c", "zone#d"
RECORD = InSyncRecord(1, (A, B), (Epoch(10, 0), Epoch(20, 100), Epoch(30, 150)))


@pytest.mark.parametrize(
    ("stamp", "end", "expected"),
    [
        (Stamp(10, 10), 100, Judgement.FINAL),  # The next pipeline began behind it.
        (Stamp(10, 10), 101, Judgement.DIVERGED),  # That one continued at 100 without the last byte.
        (Stamp(15, 10), 100, Judgement.FINAL),  # Synchronized by a pipeline that was never recorded.
        (Stamp(15, 10), 101, Judgement.DIVERGED),
        (Stamp(20, 20), 150, Judgement.FINAL),
        (Stamp(29, 20), 160, Judgement.DIVERGED),
        (Stamp(30, 30), 150, Judgement.OPEN),
        (Stamp(30, 30), 999, Judgement.OPEN),
        (Stamp(40, 30), 999, Judgement.OPEN),  # Agreed to a pipeline that is not recorded yet.
        (Stamp(40, 40), 999, Judgement.FINAL),  # Written through a pipeline without a record: Gazette's.
        (UNSTAMPED, 0, Judgement.FINAL),
        (UNSTAMPED, 1, Judgement.DIVERGED),  # Of a log without stamps, where the first record began at 0.
    ],
)
def test_content_is_judged_by_the_first_later_pipeline(stamp: Stamp, end: int, expected: Judgement) -> None:
    assert judge(RECORD, stamp, end, A) is expected
    assert judge(None, stamp, end, A) is Judgement.FINAL


def test_content_of_the_only_member_is_final() -> None:
    alone = in_sync.recorded(RECORD, 1, 40, [A], 180)
    assert judge(alone, Stamp(40, 40), 999, A) is Judgement.FINAL
    assert judge(alone, Stamp(40, 40), 999, B) is Judgement.OPEN
    assert judge(alone, Stamp(30, 30), 999, A) is Judgement.DIVERGED


def test_a_claimed_record_ends_at_its_members_end() -> None:
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


def test_a_route_continues_with_a_member() -> None:
    assert takeover(None, [D], UNSTAMPED, 0) is Takeover.CLEAN
    assert takeover(RECORD, [C, A], UNSTAMPED, 150) is Takeover.CLEAN
    assert takeover(RECORD, [C, D], Stamp(40), 500) is Takeover.LOST
    assert takeover(RECORD, [A, D], Stamp(30), 149) is Takeover.LOST  # It lost content that the record includes.
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


def test_a_spool_of_a_pipeline_after_the_closing_is_trusted_beyond_the_end() -> None:
    """Only a primary of Gazette's continues there without a record. It rolls new spools to its end, empty."""
    closed = replace(in_sync.closed(RECORD, 1, 170, labels.label_set()), written=50)
    assert judge(closed, Stamp(51, 0), 200, C) is Judgement.FINAL
    assert takeover(closed, [C], Stamp(51, 0), 200) is Takeover.CLEAN
    for synced in (30, 40, 50):  # Its participants may not have known yet.
        assert judge(closed, Stamp(synced, 0), 200, C) is Judgement.DIVERGED
    assert judge(replace(closed, written=0), Stamp(51, 0), 200, C) is Judgement.DIVERGED, "the time is unknown"
    for later in (
        in_sync.recorded(closed, 1, 60, [A], 180),
        in_sync.without(closed, A),
        in_sync.claimed(closed, A, 170, labels.label_set()),
        in_sync.closed(closed, 1, 170, labels.label_set()),
    ):
        assert later.written == 0
    assert judge(in_sync.recorded(closed, 1, 60, [A], 180), Stamp(51, 0), 200, C) is Judgement.DIVERGED


def test_old_epochs_are_forgotten_and_older_stamps_are_not_trusted() -> None:
    record = None
    for number in range(MAX_EPOCHS + 5):
        record = in_sync.recorded(record, 1, 10 + number, [A, B], 100 * number)
    assert record is not None
    assert len(record.epochs) == MAX_EPOCHS
    assert record.forgotten == 14
    assert judge(record, Stamp(13, 13), 1, A) is Judgement.DIVERGED
    assert judge(record, Stamp(14, 14), 500, A) is Judgement.FINAL


ALONE = InSyncRecord(1, (A,), (Epoch(10, 0), Epoch(30, 150)))
LEFT = in_sync.left(RECORD, B, 170, labels.label_set(author="me"))


@pytest.mark.parametrize(
    ("record", "stamp", "end", "expected"),
    [
        (ALONE, Stamp(30, 30), 170, True),
        (ALONE, Stamp(40, 30), 170, True),  # It agreed to a later pipeline, which was never recorded.
        (ALONE, Stamp(29, 20), 170, False),  # An older disk.
        (ALONE, UNSTAMPED, 170, False),
        (ALONE, Stamp(30, 30), 149, False),  # The journal is longer.
        (ALONE, Stamp(40, 40), 170, False),  # A primary of Gazette's continued.
        (RECORD, Stamp(30, 30), 170, True),
        (RECORD, Stamp(29, 20), 170, False),
        (in_sync.without(RECORD, A), Stamp(30, 30), 170, False),  # It was removed.
        (LEFT, Stamp(30, 30), 170, True),
        (LEFT, Stamp(30, 30), 175, False),  # Others may continue where B has left.
        (LEFT, Stamp(30, 30), 165, False),
        (in_sync.claimed(RECORD, A, 170, labels.label_set()), Stamp(30, 30), 170, True),
        (in_sync.claimed(RECORD, A, 170, labels.label_set()), Stamp(30, 30), 175, False),  # It has decided already.
        (in_sync.claimed(RECORD, B, 170, labels.label_set()), Stamp(30, 30), 170, False),
        (in_sync.closed(RECORD, 1, 170, labels.label_set()), Stamp(30, 30), 170, False),
        (None, Stamp(30, 30), 170, False),
    ],
)
def test_only_a_member_that_has_all_leaves_a_record(
    record: InSyncRecord | None, stamp: Stamp, end: int, expected: bool
) -> None:
    assert may_leave(record, stamp, end, A) is expected


def test_others_continue_where_a_member_left_unless_the_rest_has_more() -> None:
    assert (LEFT.members, LEFT.end, LEFT.closed, LEFT.claimed) == ((A,), 170, False, False)
    assert takeover(LEFT, [C, D], UNSTAMPED, 0) is Takeover.ROLL
    assert takeover(LEFT, [B], Stamp(30, 30), 170) is Takeover.CLEAN
    assert takeover(LEFT, [A, C], Stamp(30, 30), 175) is Takeover.CLEAN
    for me in (A, B, C):
        assert judge(LEFT, Stamp(30, 30), 170, me) is Judgement.FINAL
        assert judge(LEFT, Stamp(30, 30), 171, me) is Judgement.OPEN, "it may be lost, though A is alone"
    assert judge(LEFT, Stamp(20, 20), 151, A) is Judgement.DIVERGED
    assert in_sync.without(LEFT, A).closed, "no other member has more"
    assert in_sync.left(LEFT, A, 170, labels.label_set()).closed
    assert in_sync.recorded(LEFT, 1, 40, [C, D], 170) == InSyncRecord(
        1, (C, D), (Epoch(10, 0), Epoch(20, 100), Epoch(30, 150), Epoch(40, 170))
    )


def test_a_record_names_the_former_journals_that_its_journal_continues() -> None:
    first = replace(RECORD, carried=40)
    second = in_sync.closed(first, 7, 150, pb.LabelSet())
    assert (second.create_revision, second.formers, second.carried) == (7, (1,), 0)
    taken = in_sync.recorded(second, 7, 50, (C,), 150)
    assert taken.formers == (1,)
    third = in_sync.recorded(replace(taken, carried=60, foreign=True), 9, 70, (D,), 200)
    assert third.formers == (1, 7)
    assert in_sync.decode(in_sync.encode(third)) == third
    assert in_sync.recorded(None, 9, 70, (D,), 0).formers == ()


def test_a_claim_is_void_without_its_subject() -> None:
    """A member that claimed the record and then lost its disk has not stored the content that others rely on."""
    claimed = in_sync.claimed(RECORD, A, 170, labels.label_set())
    struck = in_sync.without(claimed, A)
    assert (struck.members, struck.end, struck.closed) == ((), None, False)
    assert takeover(struck, [A, B, C], Stamp(30, 30), 170) is Takeover.LOST


texts = st.text(st.characters(min_codepoint=33, max_codepoint=1000), min_size=1, max_size=10)
numbers = st.integers(0, 2**60)
records = st.builds(
    InSyncRecord,
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
def test_records_survive_encoding(record: InSyncRecord, ending: tuple[int, dict[str, str]] | None) -> None:
    if ending is not None:
        change = in_sync.left if record.members else in_sync.claimed
        record = change(record, record.members[0] if record.members else A, ending[0], labels.label_set(**ending[1]))
    assert in_sync.decode(in_sync.encode(record)) == record


WRITTEN = (
    (
        b'{"create_revision": 1, "members": ["a#b", "c#d"], "epochs": [[10, 0], [20, 100]]}',
        InSyncRecord(1, ("a#b", "c#d"), (Epoch(10, 0), Epoch(20, 100))),
    ),
    (
        b'{"create_revision": 9, "members": ["a#b"], "epochs": [[10, 0]], "forgotten": 5, "end": 150, '
        b'"registers": [["author", "ada"]], "left": true, "carried": 40, "formers": [1, 7]}',
        InSyncRecord(
            9,
            ("a#b",),
            (Epoch(10, 0),),
            5,
            150,
            labels.label_set(author="ada"),
            left=True,
            carried=40,
            formers=(1, 7),
        ),
    ),
)
"""Records as earlier versions wrote them: with the mandatory fields, and with all fields."""


@pytest.mark.parametrize(("value", "record"), WRITTEN)
def test_records_of_earlier_and_of_later_versions_are_read(value: bytes, record: InSyncRecord) -> None:
    assert in_sync.decode(value) == record
    assert json.loads(in_sync.encode(record)) == json.loads(value), "earlier versions read current records"
    later = {**json.loads(value), "added_later": [1]}
    assert in_sync.decode(json.dumps(later).encode()) == record


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
        b'{"create_revision": 1, "members": ["a#b"], "epochs": [], "end": 1, "registers": [], "left": "no"}',
    ],
)
def test_an_invalid_record_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidInput, match="in-sync record"):
        in_sync.decode(value)


def test_records_are_outside_of_every_prefix() -> None:
    keys = {Layout(prefix).in_sync_key(item) for prefix in ("/a", "/a/b") for item in ("c", "b/c")}
    assert len(keys) == 4
    assert not any(key.startswith("/") for key in keys)
    with pytest.raises(InvalidInput):
        Layout("/a").in_sync_key("b#c")


# ---------------------------------------------------------------------------------------------------------- a model

NAMES = [A, B, C, D]
NOTHING = labels.label_set()


@dataclass
class Spool:
    """A replica in the model: its content of the journal, byte by byte, and its pipelines."""

    content: list[int] = field(default_factory=list)
    stamp: Stamp = UNSTAMPED

    @property
    def end(self) -> int:
        return len(self.content)


class World:
    """Four brokers, the record, and the store.

    Each step is atomic in `coranto_broker`, or one transaction on the record as it was read.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.spools = {name: Spool() for name in NAMES}
        self.record: InSyncRecord | None = None
        self.acknowledged: list[int] = []
        self.stored: dict[int, int] = {}
        self.claims: dict[str, InSyncRecord] = {}
        self.given_up: set[str] = set()
        """Spools that accept no more content."""
        self.is_lost = False
        """True if no broker has all acknowledged content, so that the journal must wait for an operator."""
        self.before: dict[str, int] = {}  # Of the spools in the current pipeline.
        self.stamps: dict[str, Stamp] = {}
        self.revision = 10
        self.next_byte = 0

    def write(self, record: InSyncRecord) -> None:
        self.revision += 1
        self.record = replace(record, written=self.revision)

    def store(self, content: list[int]) -> None:
        for offset, byte in enumerate(content):
            assert self.stored.setdefault(offset, byte) == byte, "the store has another byte at this offset"

    def judged(self, name: str) -> Judgement:
        return judge(self.record, self.spools[name].stamp, self.spools[name].end, name)

    def check(self) -> None:
        for name in NAMES:
            if self.judged(name) is Judgement.FINAL:
                self.store(self.spools[name].content)

    def check_end(self, end: int) -> None:
        """Check that others may continue at `end`."""
        assert end >= len(self.acknowledged), "an acknowledged byte is given up"
        assert [self.stored.get(offset) for offset in range(len(self.acknowledged))] == self.acknowledged

    def wipe(self) -> None:
        """Lose a disk. The disk of the last complete member is mostly kept, unless all of it is stored."""
        record, name = self.record, self.chance.choice(NAMES)
        needed = record is not None and not record.closed and not record.left
        holders = [n for n in NAMES if record is not None and is_complete(record, self.spools[n].stamp, n)]
        if needed and holders == [name]:
            if self.chance.random() < 0.8:
                return
            self.is_lost = True
        self.spools[name] = Spool()
        self.claims.pop(name, None)

    def leave(self) -> None:
        """Have a broker exit gracefully: its spool accepts no more, and its content of the journal is stored."""
        name = self.chance.choice(NAMES)
        spool, record = self.spools[name], self.record
        self.given_up.add(name)
        settled = self.judged(name) is Judgement.FINAL or spool.content == self.acknowledged[: spool.end]
        if settled and may_leave(record, spool.stamp, spool.end, name):
            assert record is not None
            self.store(spool.content)
            self.write(in_sync.left(record, name, spool.end, NOTHING))
            self.check_end(spool.end)

    def claim(self) -> None:
        """Have a broker that sees no member in the Route (perhaps wrongly) begin or continue a rescue of the journal.

        It describes its spool as it was before the current pipeline.
        """
        name = self.chance.choice(NAMES)
        record, end = self.record, self.before.get(name, self.spools[name].end)
        if record is not None and record == self.claims.get(name):
            content = self.spools[name].content[:end]
            if end == record.end and self.judged(name) is Judgement.FINAL:
                self.store(content)
                self.write(in_sync.closed(record, 1, end, NOTHING))
                self.check_end(end)
        elif (
            record is not None
            and not record.left
            and name in record.members
            and is_complete(record, self.stamps.get(name, self.spools[name].stamp), name)
        ):
            self.write(in_sync.claimed(record, name, end, NOTHING))
            assert self.record is not None
            self.claims[name] = self.record

    def verify(self, name: str) -> None:
        """Do the same as `InSyncRecords.verify`."""
        spool, record = self.spools[name], self.record
        if record is not None and name in record.members and not is_complete(record, spool.stamp, name):
            self.write(in_sync.without(record, name))
        if self.judged(name) is Judgement.DIVERGED:
            self.spools[name] = Spool()

    def meddle(self) -> None:
        """Change the record as other brokers may do at any time."""
        for step in (self.leave, self.claim, self.claim):
            if self.chance.random() < 0.2:
                step()
                self.check()

    def pipeline(self) -> None:
        """Run one pipeline, from the spools' check of the record to its last commit, with interruptions."""
        chance, spools = self.chance, self.spools
        self.revision += 5
        revision, route = self.revision, chance.sample(NAMES, chance.randint(1, 3))
        primary = spools[route[0]].stamp
        for name in route:
            self.given_up.discard(name)
            self.verify(name)
            if name == route[0]:
                primary = spools[name].stamp
            if chance.random() < 0.1:
                self.meddle()
        agreed = max((spools[name].content for name in route), key=len)[:]
        self.before = {name: spools[name].end for name in route}
        self.stamps = {name: spools[name].stamp for name in route}
        for name in route:
            if chance.random() < 0.1 or name in self.given_up:
                return  # The synchronization fails midway.
            spools[name].content, spools[name].stamp = agreed[:], spools[name].stamp.followed(revision)
        for _ in range(chance.choice((0, 0, 1, 2))):
            self.meddle()  # The record is read again, but no spool is asked again.
        found = takeover(self.record, route, primary, len(agreed))
        if found is Takeover.LOST or chance.random() < 0.1:
            return
        assert not self.is_lost
        if found is Takeover.ROLL:
            assert self.record is not None
            agreed = [self.stored[offset] for offset in range(self.record.floor)]
            if self.given_up & set(route):
                return
            for name in route:
                spools[name].content = agreed[:]
        self.record = replace(in_sync.recorded(self.record, 1, revision, route, len(agreed)), written=self.revision + 1)
        self.revision += 1
        assert agreed[: len(self.acknowledged)] == self.acknowledged, "an acknowledged byte is gone"
        for _ in range(chance.randint(0, 4)):
            if chance.random() < 0.1:
                self.leave()
            reached = [
                name for name in chance.sample(route, chance.randint(0, len(route))) if name not in self.given_up
            ]
            if self.chance.random() < 0.5:
                reached = [name for name in route if name not in self.given_up]
            for name in reached:
                spools[name].content.append(self.next_byte)
                spools[name].stamp = spools[name].stamp.followed(revision, wrote=True)
            self.next_byte += 1
            if len(reached) < len(route):
                break  # It is not acknowledged, and the pipeline is broken.
            self.acknowledged = spools[route[0]].content[:]
        self.check()


def _play(chance: random.Random) -> None:
    world = World(chance)
    for _ in range(chance.randint(1, 14)):
        if chance.random() < 0.3:
            world.wipe()
        world.before, world.stamps = {}, {}
        world.meddle()
        world.pipeline()


@pytest.mark.parametrize("chunk", range(10))
def test_acknowledged_content_stays_and_final_content_is_the_journals(chunk: int) -> None:
    for seed in range(300 * chunk, 300 * (chunk + 1)):
        _play(random.Random(seed))


def test_the_model_detects_an_omitted_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_caught() -> bool:
        for seed in range(1000):
            try:
                _play(random.Random(seed))
            except (AssertionError, KeyError):
                return True
        return False

    real = in_sync.recorded

    def only_the_last_epoch(*given: Any) -> InSyncRecord:
        return replace(real(*given), epochs=(Epoch(given[2], given[4]),))

    def struck(record: InSyncRecord, member: str) -> InSyncRecord:
        return replace(record, members=tuple(each for each in record.members if each != member), written=0)

    def all_is_final_with_the_last(record: InSyncRecord | None, stamp: Stamp, end: int, me: str) -> Judgement:
        return judge(replace(record, left=False, end=None) if record and record.left else record, stamp, end, me)

    module = globals()
    rules = vars(in_sync)
    for home, name, planted in (
        (module, "takeover", lambda *_: Takeover.CLEAN),
        (module, "judge", lambda *_: Judgement.FINAL),
        (module, "is_complete", lambda record, _, me: record is None or me in record.members),
        (module, "may_leave", lambda record, _, __, me: record is not None and me in record.members),
        (World, "judged", lambda w, n: all_is_final_with_the_last(w.record, w.spools[n].stamp, w.spools[n].end, n)),
        (rules, "recorded", only_the_last_epoch),
        (rules, "without", struck),
    ):
        with monkeypatch.context() as patch:
            if isinstance(home, dict):
                patch.setitem(home, name, planted)
            else:
                patch.setattr(home, name, planted)
            assert is_caught(), name
    assert not is_caught()


def test_a_record_is_read_for_its_journal_and_its_former_journals() -> None:
    own = as_read_for(RECORD, 1, A)
    assert own is not None
    assert (own.members, own.foreign) == ((A, B), False)
    assert as_read_for(RECORD, 2, A) is None, "it is of another journal"
    former = as_read_for(replace(RECORD, formers=(7,)), 7, A)
    assert former is not None
    assert former.members == (B,), "it does not say which members hold the former journal"
    carried = as_read_for(replace(RECORD, carried=30, formers=(7,)), 7, A)
    assert carried is not None
    assert (carried.members, carried.foreign) == ((A, B), True)
