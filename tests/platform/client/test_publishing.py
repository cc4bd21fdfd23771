"""Publishers that append through a client."""

from __future__ import annotations

from coranto.client import JournalClient
from coranto.client.committed import committed_messages
from coranto.client.publishing import publisher, sync_publisher
from coranto.client.sync import SyncJournalClient
from coranto.messages.framing import JsonLines
from coranto.testing.command_line import RemoteBroker
from coranto.testing.fake_broker import Break, CallPoint, FakeBroker, FakeJournal


async def test_an_append_whose_answer_is_lost_is_retried(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    broker.at(CallPoint.APPEND_APPLIED, Break.CUT)
    async with publisher(client, JsonLines()) as publishing:
        await publishing.publish("test/journal", {"n": 1})
    lines = journal.content.splitlines()
    assert len(lines) == 2, "readers drop it by its UUID"
    assert lines[0] == lines[1]


def test_a_blocking_publisher_retries_a_lost_answer(remote: RemoteBroker) -> None:
    remote.fake.create("test/journal")
    with SyncJournalClient(remote.fake.endpoint) as client:
        remote.fake.at(CallPoint.APPEND_APPLIED, Break.CUT)
        publishing = sync_publisher(client, JsonLines())
        publishing.publish("test/journal", {"n": 1})
        publishing.flush()
        found = [each.message["n"] for each in committed_messages(client, "test/journal", JsonLines())]
    assert found == [1]
