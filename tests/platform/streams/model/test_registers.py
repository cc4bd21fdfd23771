"""Writers' state in registers, as values: entries, statuses of writers, and conditional changes by appends.

The registers change here exactly as in brokers (`coranto.labels`), so the conditions allow the same appends.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto import labels
from coranto.errors import CorruptData, InvalidInput
from coranto.messages.uuids import ProducerId
from coranto.streams.model.registers import (
    MAX_FENCES,
    Conditions,
    Expired,
    Fence,
    Registers,
    WriterEntry,
    WriterIdentity,
    WriterStatus,
    advance,
    enter,
    hold,
    raise_fence,
    restore,
    stable_producer,
    validate_fence_name,
    writer_status,
)
from coranto.wire import protocol_pb2 as pb

NUMBERS = st.integers(0, (1 << 64) - 1)
ENTRIES = st.builds(WriterEntry, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS)


class Journal:
    """A journal's registers and head, changed by the rules of brokers."""

    def __init__(self) -> None:
        self.found = pb.LabelSet()
        self.head = 0

    @property
    def registers(self) -> Registers:
        return Registers.of(self.found)

    def append(self, conditions: Conditions) -> bool:
        """Append a byte. Return False on a register mismatch."""
        labels.validate_selector(conditions.check)
        labels.validate_label_set(conditions.union)
        strict = any(label.name == labels.HELD for label in conditions.check.include.labels)
        if (self.found.labels or strict) and not labels.matches(conditions.check, self.found):
            return False
        if conditions.subtract is not None:
            self.found = labels.subtract(self.found, conditions.subtract)
        self.found = labels.union(conditions.union, self.found)
        self.head += 1
        return True

    def lose(self) -> None:
        self.found = pb.LabelSet()


def identity(number: int, session: int = 1, *, stable: bool = False) -> WriterIdentity:
    return WriterIdentity(f"writer {number}", ProducerId(b"\x01" + number.to_bytes(5)), session, stable)


def entered(journal: Journal, who: WriterIdentity, entry: WriterEntry, max_writers: int = 64) -> bool:
    nonce = f"{who.session:x}.{who.producer.hex()}.{entry.clock:x}"
    return journal.append(enter(journal.registers, who.label, entry.encode(), nonce=nonce, max_writers=max_writers))


@given(ENTRIES)
def test_an_entry_round_trips_through_its_label(entry: WriterEntry) -> None:
    found = labels.label_set({"coranto.dev/writer-01": entry.encode()})
    assert Registers.of(found).entries == {"coranto.dev/writer-01": entry}


@pytest.mark.parametrize("value", ["", "1.2.3.4", "1.2.3.4.5.6", "1.2.3.4.x", "1.2.3.4.-5", "1.2.3.4.1_0", "1.2.3.4."])
def test_an_invalid_entry_is_corrupt(value: str) -> None:
    with pytest.raises(CorruptData, match="not a register"):
        WriterEntry.decode(value)


@given(st.lists(ENTRIES, min_size=2, max_size=5, unique=True), st.data())
def test_an_append_is_applied_only_after_its_predecessor(chain: list[WriterEntry], data: st.DataObject) -> None:
    """Each attempt is applied once and in order, for any repetitions and order of arrival."""
    journal, who = Journal(), identity(1)
    assert entered(journal, who, chain[0])
    attempts = list(range(1, len(chain)))
    applied = [
        number
        for number in data.draw(st.lists(st.sampled_from(attempts), max_size=12)) + attempts
        if journal.append(advance(who.label, chain[number - 1].encode(), chain[number].encode()))
    ]
    assert applied == attempts
    assert journal.registers.entries[who.label] == chain[-1]


def test_only_one_first_append_to_a_journal_is_applied() -> None:
    journal = Journal()
    first, second = identity(1), identity(2)
    seen = journal.registers
    attempts = [
        enter(seen, who.label, WriterEntry(1, 1, 1, 0, 1).encode(), nonce=who.writer.replace(" ", ""), max_writers=64)
        for who in (first, second)
    ]
    assert journal.append(attempts[0])
    assert not journal.append(attempts[1])  # It has to read the registers again.
    assert entered(journal, second, WriterEntry(1, 1, 1, 0, 1))
    assert set(journal.registers.entries) == {first.label, second.label}
    assert not journal.append(hold())


def test_an_outdated_attempt_to_enter_is_never_applied() -> None:
    """Not even if the writer's entry is absent again, as at the time of the attempt."""
    journal = Journal()
    assert entered(journal, identity(0), WriterEntry(1, 1, 1, 0, 0))
    who = identity(1)
    late = enter(journal.registers, who.label, WriterEntry(1, 1, 1, 0, 1).encode(), nonce="late", max_writers=2)
    assert entered(journal, who, WriterEntry(1, 2, 2, 0, 1), max_writers=2)
    for number in range(2, 6):
        assert entered(journal, identity(number), WriterEntry(1, 1, 1, 0, number), max_writers=2)
    assert who.label not in journal.registers.entries
    assert not journal.append(late)


@given(st.integers(1, 8), st.lists(st.integers(0, 20), max_size=60), st.randoms(use_true_random=False))
def test_entries_are_bounded_and_the_least_recently_used_is_removed_first(
    most: int, writers: list[int], rng: random.Random
) -> None:
    journal = Journal()
    used: dict[str, int] = {}
    removed = Expired(0, 0)
    for now, number in enumerate(writers, start=1):
        who = identity(number)
        before = journal.registers.entries
        entry = WriterEntry(1, now, rng.randrange(1 << 40), 0, now)
        if who.label in before:
            assert journal.append(advance(who.label, before[who.label].encode(), entry.encode()))
        else:
            assert entered(journal, who, entry, most)
            gone = before.keys() - journal.registers.entries.keys()
            assert gone == set(sorted(before, key=lambda label: used[label])[: max(0, len(before) + 1 - most)])
            for label in gone:
                removed = Expired(max(removed.used, before[label].used), max(removed.clock, before[label].clock))
        used[who.label] = now
        assert len(journal.registers.entries) <= most
        assert (journal.registers.expired or Expired(0, 0)) == removed


def test_an_entry_used_in_the_future_is_removed_first() -> None:
    """Otherwise the entries of a machine whose clock is ahead would replace all others."""
    year, now = 365 * 24 * 3600, 1_900_000_000
    journal = Journal()
    for number in range(3):
        assert entered(journal, identity(number), WriterEntry(1, 1, 1, 100 - number, now + year), 4)
    right = identity(5)
    assert entered(journal, right, WriterEntry(1, 1, 1, 90, now), 4)
    for number, gone in ((10, 2), (11, 1), (12, 0)):
        assert identity(gone).label in journal.registers.entries
        assert entered(journal, identity(number), WriterEntry(1, 1, 1, 200, now + number), 4)
        assert identity(gone).label not in journal.registers.entries
    assert right.label in journal.registers.entries
    # A writer whose own clock is behind trusts no clock and compares offsets.
    assert entered(journal, identity(13), WriterEntry(1, 1, 1, 300, now - year), 4)
    assert right.label not in journal.registers.entries


def test_a_writer_used_in_the_meantime_is_not_removed() -> None:
    journal = Journal()
    old, young, new = identity(1), identity(2), identity(3)
    assert entered(journal, old, WriterEntry(1, 1, 1, 0, 1))
    assert entered(journal, young, WriterEntry(1, 1, 1, 0, 2))
    seen = journal.registers
    assert journal.append(advance(old.label, WriterEntry(1, 1, 1, 0, 1).encode(), WriterEntry(1, 2, 2, 0, 3).encode()))
    attempt = enter(seen, new.label, WriterEntry(1, 1, 1, 0, 4).encode(), nonce="n", max_writers=2)
    assert not journal.append(attempt)
    assert entered(journal, new, WriterEntry(1, 1, 1, 0, 4), 2)
    assert set(journal.registers.entries) == {old.label, new.label}


def test_the_status_of_a_writer() -> None:
    journal = Journal()
    plain, stable = identity(1, 7), identity(1, 7, stable=True)

    def status(who: WriterIdentity, taken_from: int | None = None) -> WriterStatus:
        return writer_status(journal.registers, journal.head, who, taken_from)

    assert status(plain) is WriterStatus.NEW
    assert entered(journal, identity(2), WriterEntry(1, 1, 1, 0, 1))
    assert status(plain) is WriterStatus.NEW
    assert entered(journal, identity(1), WriterEntry(3, 1, 1, 0, 2))
    assert status(plain) is WriterStatus.FOREIGN
    assert status(stable) is WriterStatus.FOREIGN
    assert status(stable, taken_from=3) is WriterStatus.TAKEN_OVER
    assert status(plain, taken_from=3) is WriterStatus.FOREIGN  # No other process can have had its id.
    taken = WriterEntry(7, 2, 2, 0, 3)
    assert journal.append(advance(plain.label, WriterEntry(3, 1, 1, 0, 2).encode(), taken.encode()))
    assert status(stable, taken_from=3) is WriterStatus.OURS
    assert entered(journal, identity(4), WriterEntry(1, 1, 1, 0, 4), 1)
    assert status(stable, taken_from=3) is WriterStatus.FORGOTTEN
    journal.lose()
    assert status(stable) is WriterStatus.LOST
    assert journal.append(restore(journal.head))
    assert status(stable) is WriterStatus.FORGOTTEN
    assert journal.registers.restored == 4


def test_after_a_loss_no_earlier_attempt_is_applied_and_one_restore_is() -> None:
    journal, who = Journal(), identity(1)
    fence = Fence("shard-0", "token")
    before, after = WriterEntry(1, 1, 1, 0, 1).encode(), WriterEntry(1, 2, 2, 0, 1).encode()
    assert entered(journal, who, WriterEntry(1, 1, 1, 0, 1))
    assert journal.append(raise_fence(journal.registers, fence))
    late = enter(journal.registers, "coranto.dev/writer-02", before, nonce="late", max_writers=64)
    journal.lose()
    for attempt in (advance(who.label, before, after), advance(who.label, before, after, fence), late):
        assert not journal.append(attempt)
    assert not journal.append(raise_fence(journal.registers, fence))
    restores = [restore(journal.head), restore(journal.head)]
    assert [journal.append(each) for each in restores] == [True, False]
    assert not journal.append(advance(who.label, before, after, fence))
    assert journal.registers.token_of("shard-0") is None


def test_a_fence_refuses_writers_with_another_token() -> None:
    journal, who = Journal(), identity(1)
    chain = [WriterEntry(1, number, number, 0, 1).encode() for number in range(1, 5)]
    assert entered(journal, who, WriterEntry.decode(chain[0]))
    old, new = Fence("f", "old"), Fence("f", "new")
    assert journal.append(raise_fence(journal.registers, old))
    assert journal.append(advance(who.label, chain[0], chain[1], old))
    assert journal.append(raise_fence(journal.registers, new))
    assert not journal.append(advance(who.label, chain[1], chain[2], old))
    assert journal.append(advance(who.label, chain[1], chain[2], new))
    assert journal.append(advance(who.label, chain[2], chain[3]))  # A write without a fence is allowed.
    assert journal.registers.token_of("f") == "new"
    newcomer = enter(journal.registers, "coranto.dev/writer-02", chain[0], nonce="n", max_writers=64, fence=old)
    assert not journal.append(newcomer)


def test_a_late_attempt_to_raise_a_fence_does_not_restore_its_token() -> None:
    journal = Journal()
    assert journal.append(hold())
    first, second = Fence("f", "first"), Fence("f", "second")
    sent, again = raise_fence(journal.registers, first), raise_fence(journal.registers, first)
    assert journal.append(sent)
    late = raise_fence(journal.registers, Fence("f", "late"))
    assert journal.append(raise_fence(journal.registers, second))
    for attempt in (sent, again, late):
        assert not journal.append(attempt)
    assert journal.registers.token_of("f") == "second"


def test_fences_are_limited_in_number_and_length() -> None:
    journal = Journal()
    assert journal.append(hold())
    for number in range(MAX_FENCES):
        assert journal.append(raise_fence(journal.registers, Fence(f"f{number}", "t")))
    assert journal.append(raise_fence(journal.registers, Fence("f0", "u")))
    with pytest.raises(InvalidInput, match="at most 16 fences"):
        raise_fence(journal.registers, Fence("another", "t"))
    assert validate_fence_name("x" * 46) == "x" * 46
    for wrong in ("", "x" * 47, "a b"):
        with pytest.raises(InvalidInput):
            validate_fence_name(wrong)


def test_a_writer_id_has_a_stable_producer_id() -> None:
    assert stable_producer("orders") == stable_producer("orders") != stable_producer("order")
    assert stable_producer("orders")[0] & 1  # Like every producer id.


def test_foreign_registers_are_ignored() -> None:
    registers = Registers.of(labels.label_set({"author": "x", "epoch": "3", "coranto.dev/held": "1"}))
    assert registers.held
    assert not registers.entries
    assert not registers.forgot
