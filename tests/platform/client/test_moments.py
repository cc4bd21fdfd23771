"""Moments: the offsets of journals at a time, equal for all clients, and content removed by retention."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from coranto.client import JournalClient, Moment
from coranto.client.moments import SKEW_SECONDS
from coranto.errors import ContentGone, InvalidInput, JournalNotFound
from coranto.labels import CONTENT_TYPE, label_set
from coranto.messages.framing import JsonLines
from coranto.messages.uuids import Flags, ProducerId, clock_from_ns, format_uuid
from coranto.testing.fake_broker import FakeBroker, FakeJournal

J = "test/journal"
T = 1_700_000_000


def line(second: float, number: int = 0, flags: Flags = Flags.OUTSIDE_TXN) -> bytes:
    """Return a message of a second after T. All have the same length."""
    uuid = format_uuid(ProducerId(bytes([1, 0, 0, 0, 0, 1])), clock_from_ns(int((T + second) * 1e9)), flags)
    return JsonLines().marshal({"n": number}, uuid)


SIZE = len(line(0))


def stored_at(journal: FakeJournal, root: Path, second: float) -> None:
    journal.roll(root)
    item = journal.stored[-1]
    item.fragment = replace(item.fragment, mod_time=int(T + second))


async def test_a_time_is_the_offset_of_the_first_later_message(
    broker: FakeBroker, journal: FakeJournal, client: JournalClient, tmp_path: Path
) -> None:
    for second in (0, 10, 20):
        await broker.write(J, line(second))
    stored_at(journal, tmp_path, 25)
    for second in (30, 60, 40, 90):  # The third comes from a producer whose clock is slow.
        await broker.write(J, line(second))
    cases = [(-1, 0), (0, 1), (9.5, 1), (20, 3), (30, 4), (59, 4), (60, 6), (89, 6), (90, 7), (10_000, 7)]
    for second, messages in cases:
        assert (await client.moment(f"name={J}", T + second)).ends == {J: messages * SIZE}, second
    stored_at(journal, tmp_path, 100)
    for second, messages in cases:  # Storing changes nothing.
        assert (await client.moment(f"name={J}", T + second)).ends == {J: messages * SIZE}, second


async def test_fragments_stored_well_before_the_time_are_not_read(
    broker: FakeBroker, journal: FakeJournal, client: JournalClient, tmp_path: Path
) -> None:
    await broker.write(J, line(10_000))  # Its producer's clock is fast, but its fragment was stored before.
    stored_at(journal, tmp_path, 0)
    await broker.write(J, line(5))
    later = SKEW_SECONDS + 2
    await broker.write(J, line(later))
    assert (await client.moment(f"name={J}", T + SKEW_SECONDS + 1)).ends == {J: 2 * SIZE}
    assert (await client.moment(f"name={J}", T + SKEW_SECONDS)).ends == {J: 0}


async def test_times_that_cannot_be_resolved_are_refused(
    broker: FakeBroker, journal: FakeJournal, client: JournalClient, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match="is in the future"):
        await client.moment(f"name={J}", time.time() + 60)
    with pytest.raises(InvalidInput, match="no journal matches"):
        await client.moment("name=none", T)
    for second in (0, 10):
        await broker.write(J, line(second))
        stored_at(journal, tmp_path, second)
    journal.drop_before(SIZE)
    with pytest.raises(ContentGone, match=rf"{J} \[0, {SIZE}\) \(and the end at that time\)"):
        await client.moment(f"name={J}", T + 5)
    assert (await client.moment(f"name={J}", T + 10)).ends == {J: 2 * SIZE}
    journal.spec.labels.CopyFrom(label_set([(CONTENT_TYPE, "text/csv")]))
    with pytest.raises(InvalidInput, match="messages of text/csv without readable times: give offsets"):
        await client.moment(f"name={J}", T)


async def test_the_error_names_all_removed_content_and_the_remaining_begins(
    broker: FakeBroker, journal: FakeJournal, client: JournalClient, tmp_path: Path
) -> None:
    other = broker.create("test/other")
    for name, each in ((J, journal), ("test/other", other)):
        for second in (0, 10, 20):
            await broker.write(name, line(second))
            stored_at(each, tmp_path, second)
    ends = {J: 2 * SIZE, "test/other": 3 * SIZE, "test/not-yet": 0}
    await client.require_content(Moment.offsets(ends))
    journal.drop_before(SIZE)
    other.drop_before(2 * SIZE)
    with pytest.raises(ContentGone, match=rf"{J} \[0, {SIZE}\), test/other \[0, {2 * SIZE}\).*begin at") as caught:
        await client.require_content(Moment.offsets(ends))
    assert caught.value.gone == {J: (0, SIZE), "test/other": (0, 2 * SIZE)}
    await client.require_content(Moment.offsets(ends, caught.value.left))
    await client.require_content(Moment({J: 0}))
    with pytest.raises(InvalidInput, match=f"{J} ends at {3 * SIZE}, before {4 * SIZE}: it was recreated"):
        await client.require_content(Moment.offsets({J: 4 * SIZE}))
    with pytest.raises(JournalNotFound):
        await client.require_content(Moment.offsets({"test/gone": 5}))


@pytest.mark.parametrize(
    ("ends", "begins"), [({}, {}), ({J: 5}, {J: 6}), ({J: -1}, {}), ({J: 5}, {"b": 1}), ({J: 5}, {J: -1})]
)
def test_invalid_offsets_are_refused(ends: dict[str, int], begins: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="offsets"):
        Moment.offsets(ends, begins)
