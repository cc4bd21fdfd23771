"""Commits in journals as committed readers see them, including from a position within a journal."""

from __future__ import annotations

import random

import pytest

from coranto.client import JournalClient, commits
from coranto.client.commits import CommitWatch, Producers
from coranto.client.config import ClientConfig
from coranto.client.positions import JournalPosition
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.messages import JsonLines
from coranto.messages.framing import Envelope
from coranto.messages.sequencer import Sequencer
from coranto.messages.uuids import Flags, ProducerId, format_uuid
from coranto.testing.fake_broker import FakeBroker

JOURNAL = "shop/orders/part-000"
ADA, BOB = ProducerId(b"\x01adaad"), ProducerId(b"\x01bobbo")


def line(producer: ProducerId, clock: int, flags: Flags) -> bytes:
    return JsonLines().marshal({}, format_uuid(producer, clock << 4, flags))


@pytest.mark.parametrize("seed", range(200))
def test_decisions_equal_the_sequencers(seed: int) -> None:
    rng = random.Random(seed)
    sequencer: Sequencer[object] = Sequencer()
    producers = Producers(whole=True)
    for offset in range(60):
        clock = rng.choice([0, *range(1, 9)])
        message: Envelope[object] = Envelope(
            JOURNAL, offset, offset + 1, rng.choice([ADA, BOB]), clock, rng.choice(list(Flags)), b"", JsonLines()
        )
        sequencer.queue(message)
        assert sequencer.replay_range is None
        delivered = []
        while (each := sequencer.step()) is not None:
            delivered.append(each)
        content = [each for each in delivered if each.flags != Flags.ACK_TXN or not each.clock]
        assert producers.commits(message) is bool(content), (seed, message)


class Journal:
    """A journal of a fake broker, and the observed commits."""

    def __init__(self, broker: FakeBroker, client: JournalClient, kind: str = JSON_LINES) -> None:
        labels = label_set({CONTENT_TYPE: kind}) if kind else None
        self.broker = broker
        self.client = client
        self.revision = broker.create(JOURNAL, **({"labels": labels} if labels else {})).create_revision
        self.watch = CommitWatch()

    async def write(self, *lines: bytes) -> int:
        await self.broker.write(JOURNAL, b"".join(lines))
        return self.broker.journals[JOURNAL].head

    async def since(self, begin: int, watch: CommitWatch | None = None) -> bool:
        now = {JOURNAL: JournalPosition(self.broker.journals[JOURNAL].head, self.revision)}
        return await (watch or self.watch).since(self.client, {JOURNAL: JournalPosition(begin, self.revision)}, now)


async def test_a_publication_counts_when_it_is_committed() -> None:
    async with FakeBroker() as broker, JournalClient.of(ClientConfig(broker.endpoint)) as client:
        journal = Journal(broker, client)
        for clock in (1, 2, 3):
            await journal.write(line(ADA, clock, Flags.CONTINUE_TXN))
            assert not await journal.since(0)
        end = await journal.write(line(ADA, 3, Flags.ACK_TXN))
        assert await journal.since(0)
        assert not await journal.since(end)
        # A repeated acknowledgement, and an attempt that is killed and rolled back.
        await journal.write(line(ADA, 3, Flags.ACK_TXN), line(BOB, 4, Flags.CONTINUE_TXN))
        await journal.write(line(BOB, 3, Flags.ACK_TXN))
        assert not await journal.since(end)
        await journal.write(line(ADA, 9, Flags.OUTSIDE_TXN))
        assert await journal.since(end)


async def test_a_position_within_a_journal_includes_earlier_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeBroker() as broker, JournalClient.of(ClientConfig(broker.endpoint)) as client:
        journal = Journal(broker, client)
        await journal.write(line(ADA, 1, Flags.CONTINUE_TXN), line(ADA, 1, Flags.ACK_TXN))
        begin = await journal.write(line(BOB, 2, Flags.CONTINUE_TXN))
        await journal.write(line(ADA, 1, Flags.ACK_TXN))
        assert not await journal.since(begin, CommitWatch())
        await journal.write(line(BOB, 2, Flags.ACK_TXN))
        assert await journal.since(begin, CommitWatch())
        # Content further back is unknown, so an acknowledgement may commit it.
        monkeypatch.setattr(commits, "_LOOKBACK", 10)
        end = await journal.write(line(ADA, 1, Flags.ACK_TXN))
        assert await journal.since(begin, CommitWatch())
        assert not await journal.since(end, CommitWatch())


async def test_a_line_in_two_pieces_and_an_invalid_line() -> None:
    async with FakeBroker() as broker, JournalClient.of(ClientConfig(broker.endpoint)) as client:
        journal = Journal(broker, client)
        whole = line(ADA, 1, Flags.OUTSIDE_TXN)
        begin = await journal.write(whole[:20])
        assert not await journal.since(0)
        await journal.write(whole[20:])
        assert await journal.since(0)
        assert await journal.since(begin)
        end = broker.journals[JOURNAL].head
        await journal.write(b"text\n")
        assert await journal.since(end)


async def test_growth_of_other_content_counts() -> None:
    async with FakeBroker() as broker, JournalClient.of(ClientConfig(broker.endpoint)) as client:
        journal = Journal(broker, client, "")
        end = await journal.write(b"x")
        assert await journal.since(0)
        assert not await journal.since(end)


async def test_a_recreated_journal_is_read_from_its_begin() -> None:
    async with FakeBroker() as broker, JournalClient.of(ClientConfig(broker.endpoint)) as client:
        journal = Journal(broker, client)
        end = await journal.write(line(ADA, 1, Flags.OUTSIDE_TXN))
        assert await journal.since(0)
        del broker.journals[JOURNAL]
        again = Journal(broker, client)
        await again.write(line(ADA, 1, Flags.CONTINUE_TXN))
        before = {JOURNAL: JournalPosition(end, journal.revision)}
        now = {JOURNAL: JournalPosition(broker.journals[JOURNAL].head, again.revision)}
        assert not await journal.watch.since(client, before, now)
        await again.write(line(ADA, 1, Flags.ACK_TXN))
        now = {JOURNAL: JournalPosition(broker.journals[JOURNAL].head, again.revision)}
        assert await journal.watch.since(client, before, now)
