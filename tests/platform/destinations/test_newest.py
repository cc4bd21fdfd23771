"""The newest matching message is found from the end of a journal, even if it is far from it."""

from __future__ import annotations

from typing import Any

import pytest

from coranto.client import SyncJournalClient
from coranto.client.publishing import sync_publisher
from coranto.destinations import newest as module
from coranto.destinations.newest import newest
from coranto.errors import JournalNotFound
from coranto.messages.framing import JsonLines
from tests.platform.destinations.conftest import Running

JOURNAL = "states/all"


def test_the_last_match_is_found(running: Running, client: SyncJournalClient, monkeypatch: pytest.MonkeyPatch) -> None:
    running.loop.run(running.cluster.create(JOURNAL))
    assert newest(client, JOURNAL, lambda row: True) is None
    publisher = sync_publisher(client, JsonLines())
    for number in range(50):
        publisher.publish(JOURNAL, {"n": number, "of": number % 3, "text": "x" * (number % 7)})
    publisher.flush()
    publisher.add(JOURNAL, {"n": 99, "of": 0})  # Never committed.
    publisher.flush()

    for size in (1, 7, 100, 1 << 20):
        monkeypatch.setattr(module, "_FIRST_BYTES", size)

        def found(**wanted: Any) -> Any:
            row = newest(client, JOURNAL, lambda row: wanted.items() <= row.items())
            return row and row["n"]

        assert [found(), found(of=0), found(of=1), found(n=0), found(n=7), found(n=77)] == [49, 48, 49, 0, 7, None]


def test_a_missing_journal_is_an_error(client: SyncJournalClient) -> None:
    with pytest.raises(JournalNotFound):
        newest(client, "states/none", lambda row: True)
