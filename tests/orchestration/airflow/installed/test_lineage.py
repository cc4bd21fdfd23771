"""Positions of groups before and after a task's work, for lineage."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from airflow.sdk.execution_time.context import OutletEventAccessors

from airflow_coranto.assets.journal import journal_asset
from airflow_coranto.lineage import emit_growth, positions_after, positions_in
from coranto.client import SyncJournalClient
from coranto.client.heads import Heads
from coranto.errors import Unavailable
from coranto.wire import protocol_pb2 as pb


class Forgetful:
    """A client with one unknown head in its first answers."""

    def __init__(self, client: SyncJournalClient, answers: int, retry_timeout: float = 10.0) -> None:
        self.config = SimpleNamespace(retry_timeout=retry_timeout)
        self.queried = 0
        self._client = client
        self._answers = answers

    def heads(self, selector: Any) -> Heads:
        heads = self._client.heads(selector)
        self.queried += 1
        if self.queried > self._answers:
            return heads
        first, *others = heads.journals
        unknown = replace(first, status=pb.NO_JOURNAL_PRIMARY_BROKER, problem="it has no primary", head=0)
        return replace(heads, journals=(unknown, *others))


def forgetful(client: SyncJournalClient, answers: int, retry_timeout: float = 10.0) -> SyncJournalClient:
    return cast(SyncJournalClient, Forgetful(client, answers, retry_timeout))


@pytest.fixture
def filled(client: SyncJournalClient, group: str) -> str:
    """A group with content in its journals."""
    for journal in client.list(f"name:prefix={group}/").names:
        client.append(journal, b"before\n")
    return group


def test_unknown_heads_are_waited_for(client: SyncJournalClient, filled: str) -> None:
    known = positions_in(client, [filled])
    queried = forgetful(client, 2)
    assert positions_in(queried, [filled]) == known
    assert cast(Forgetful, queried).queried == 3
    assert positions_after(forgetful(client, 2), known) == known


def test_work_does_not_begin_while_heads_are_unknown(client: SyncJournalClient, filled: str) -> None:
    with pytest.raises(Unavailable, match=f"the head of {filled}/part-000 is unknown: it has no primary"):
        positions_in(forgetful(client, 1000, 0.1), [filled])


def test_a_head_unknown_after_the_work_counts_as_no_growth(client: SyncJournalClient, filled: str) -> None:
    before = positions_in(client, [filled])
    first, second = client.list(f"name:prefix={filled}/").names
    client.append(first, b"unseen\n")
    client.append(second, b"seen\n")
    after = positions_after(forgetful(client, 1000, 0.1), before)
    asset = journal_asset(filled, cluster="test")
    events = OutletEventAccessors()
    emit_growth({"outlet_events": events}, [asset], "test", before, after)
    payload = events[asset].extra["payload"]
    assert payload["bytes"] == len(b"seen\n")
    assert {name: at["offset"] for name, at in payload["heads"].items()} == {first: 7, second: 12}
