"""The trigger with a real broker: each appended byte is in exactly one event, over any restarts of the trigger."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from airflow.triggers.base import TriggerEvent
from structlog.testing import capture_logs

from airflow_coranto.offsets import reconcile_event
from airflow_coranto.triggers import journal as module
from airflow_coranto.triggers.journal import JournalOffsetTrigger
from coranto.client import JournalClient, SyncJournalClient
from coranto.client.config import ClientConfig
from coranto.client.publishing import publisher
from coranto.labels import CONTENT_TYPE, JSON_LINES
from coranto.messages import JsonLines
from coranto.offsets import id_of, vector_of_json, vector_to_json
from coranto.testing import SyncCluster
from coranto.wire import protocol_pb2 as pb

pytestmark = pytest.mark.usefixtures("client")
SECONDS = 30.0


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Airflow's variables, as a dictionary."""
    kept: dict[str, str] = {}

    async def get(name: str) -> str | None:
        return kept.get(name)

    async def put(name: str, value: str) -> None:
        kept[name] = value

    monkeypatch.setattr(module, "get_variable", get)
    monkeypatch.setattr(module, "set_variable", put)
    return kept


@pytest.fixture
async def appending(broker: SyncCluster, group: str) -> AsyncIterator[Any]:
    async with JournalClient.of(ClientConfig(broker.endpoint)) as client:

        async def append(part: int, content: bytes) -> None:
            await client.append(f"{group}/part-{part:03}", content)

        yield append


def watcher(group: str, **options: Any) -> JournalOffsetTrigger:
    made = JournalOffsetTrigger(group, interval=0.02, **options)
    path, arguments = made.serialize()  # As the triggerer receives it.
    assert path == "airflow_coranto.triggers.journal.JournalOffsetTrigger"
    return JournalOffsetTrigger(**json.loads(json.dumps(arguments)))


async def next_event(events: AsyncIterator[TriggerEvent]) -> dict[str, Any]:
    async with asyncio.timeout(SECONDS):
        payload: dict[str, Any] = (await anext(events)).payload
        return payload


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not holds():  # noqa: ASYNC110  # there is no event
            await asyncio.sleep(0.01)


async def begun(variables: dict[str, str], of: JournalOffsetTrigger) -> None:
    await until(lambda: of.variable in variables)


async def first_event(variables: dict[str, str], of: JournalOffsetTrigger, append: Any) -> dict[str, Any]:
    """Start a watcher, append to the first journal after its start, and return its event."""
    async with aclosing(of.run()) as events:
        waiting = asyncio.ensure_future(next_event(events))
        await begun(variables, of)
        await append(0, b"new")
        return await waiting


async def test_a_watcher_begins_at_the_current_heads(variables: dict[str, str], appending: Any, group: str) -> None:
    await appending(0, b"old")
    event = await first_event(variables, watcher(group), appending)
    since, heads = (vector_of_json(event[name], name) for name in ("since", "heads"))
    assert (event["bytes"], since[f"{group}/part-000"], heads[f"{group}/part-000"]) == (3, 3, 6)
    assert id_of(heads[f"{group}/part-000"]) == id_of(since[f"{group}/part-000"]) != ""


async def test_a_watcher_can_begin_at_the_earliest_content(
    variables: dict[str, str], appending: Any, group: str
) -> None:
    await appending(1, b"old")
    async with aclosing(watcher(group, earliest=True).run()) as events:
        assert (await next_event(events))["bytes"] == 3


async def test_a_restarted_watcher_continues_after_the_last_stored_event(
    variables: dict[str, str], appending: Any, group: str
) -> None:
    of = watcher(group)
    event = await first_event(variables, of, appending)
    async with aclosing(watcher(group).run()) as events:  # The triggerer died before it stored the event.
        assert (await next_event(events))["heads"] == event["heads"]
    variables[of.variable] = reconcile_event(event, None)[1].to_json()  # Stored now.
    await appending(1, b"while nobody looked")
    async with aclosing(watcher(group).run()) as events:
        again = await next_event(events)
    assert (again["since"], again["bytes"], again["after"]) == (event["heads"], 19, event["event"])


async def test_small_growth_waits_for_more(variables: dict[str, str], appending: Any, group: str) -> None:
    of = watcher(group, min_bytes=10)
    async with aclosing(of.run()) as events:
        waiting = asyncio.ensure_future(next_event(events))
        await begun(variables, of)
        await appending(0, b"12345")
        await appending(1, b"67890")
        assert (await waiting)["bytes"] == 10


async def test_a_damaged_variable_is_not_replaced(variables: dict[str, str], appending: Any, group: str) -> None:
    of = watcher(group)
    variables[of.variable] = '{"a": "b"}'
    await appending(0, b"grown")
    async with aclosing(of.run()) as events:
        waiting = asyncio.ensure_future(next_event(events))
        await until(lambda: "delete the variable" in of._logged_error)
        assert not waiting.done()
        variables[of.variable] = "{}"
        assert (await waiting)["bytes"] == 5


async def test_a_watcher_waits_for_a_missing_connection_or_cluster(
    variables: dict[str, str], appending: Any, group: str, monkeypatch: pytest.MonkeyPatch, broker: SyncCluster
) -> None:
    monkeypatch.setattr(module, "_MAX_PAUSE", 0.05)
    of = watcher(group, coranto_conn_id="later")
    async with aclosing(of.run()) as events:
        waiting = asyncio.ensure_future(next_event(events))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        monkeypatch.setenv("AIRFLOW_CONN_LATER", json.dumps({"conn_type": "coranto", "host": broker.endpoint}))
        await begun(variables, of)
        await appending(0, b"new")
        assert (await waiting)["bytes"] == 3


async def test_a_waiting_task_gets_one_event_from_its_vector(appending: Any, group: str) -> None:
    await appending(0, b"12345")
    beyond = {f"{group}/part-000": 5, f"{group}/part-001": 0}
    async with aclosing(watcher(group, beyond=beyond).run()) as events:
        waiting = asyncio.ensure_future(next_event(events))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await appending(1, b"678")
        event = await waiting
        assert vector_of_json(event["heads"], "heads") == {f"{group}/part-000": 5, f"{group}/part-001": 3}
        assert event["bytes"] == 3
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_a_waiting_task_gets_an_error_for_a_recreated_journal(
    appending: Any, group: str, client: SyncJournalClient
) -> None:
    journal = f"{group}/part-000"
    await appending(0, b"12345")
    heads = vector_to_json({journal: client.head(journal)})
    (info,) = client.list(f"name={journal}").journals
    client.apply([pb.ApplyRequest.Change(delete=journal, expect_mod_revision=info.mod_revision)])
    client.apply([pb.ApplyRequest.Change(upsert=info.spec)])
    await appending(0, b"abcdefgh")
    async with aclosing(watcher(group, beyond=heads).run()) as events:
        event = await next_event(events)
    assert event["recreated"]
    assert f"journal {journal} was deleted and created again: offset 5" in event["error"]
    async with aclosing(watcher(group, beyond={}).run()) as events:
        assert (await next_event(events))["bytes"] == 8, "as the error advises"
    async with aclosing(watcher(group, beyond={journal: 5}).run()) as events:
        assert (await next_event(events))["bytes"] == 3, "an offset without an id fits any journal"


async def test_a_waiting_task_gets_permanent_errors(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_WRONG", json.dumps({"conn_type": "coranto", "extra": {"tls_cs": "x"}}))
    for coranto_conn_id in ("wrong", "absent"):
        async with aclosing(watcher(group, beyond={}, coranto_conn_id=coranto_conn_id).run()) as events:
            assert "error" in await next_event(events)


async def json_group(broker: SyncCluster) -> str:
    name = f"json-{os.urandom(4).hex()}/orders"
    broker.create(f"{name}/part-000", labels={CONTENT_TYPE: JSON_LINES})
    return name


@asynccontextmanager
async def next_event_of(of: JournalOffsetTrigger) -> AsyncIterator[asyncio.Future[dict[str, Any]]]:
    """Wait for an event in the background."""
    async with aclosing(of.run()) as events:
        waiting = asyncio.ensure_future(next_event(events))
        try:
            yield waiting
        finally:
            waiting.cancel()
            await asyncio.wait([waiting])


async def test_a_publication_is_one_event_and_a_killed_attempt_has_none(
    variables: dict[str, str], broker: SyncCluster, client: SyncJournalClient
) -> None:
    group = await json_group(broker)
    of, bytes_of = watcher(group), watcher(group, committed=False, name="bytes")

    async def publish(*, commit: bool) -> None:
        async with JournalClient.of(ClientConfig(broker.endpoint)) as writing:
            publishing = publisher(writing, JsonLines())
            for number in range(5):
                await publishing.add(f"{group}/part-000", {"order": number})
                await publishing.flush()
            if commit:
                await publishing.commit()

    async with next_event_of(of) as waiting:
        async with next_event_of(bytes_of) as raw:
            await begun(variables, of)
            await begun(variables, bytes_of)
            await publish(commit=False)
            assert (await raw)["bytes"] > 0
        await asyncio.sleep(0.2)
        assert not waiting.done(), "a killed attempt made an event"
        await publish(commit=True)
        event = await waiting
    assert vector_of_json(event["heads"], "heads")[f"{group}/part-000"] == client.head(f"{group}/part-000")
    variables[of.variable] = reconcile_event(event, None)[1].to_json()
    async with next_event_of(of) as more:
        await asyncio.sleep(0.2)
        assert not more.done(), "a publication made two events"


async def test_a_task_waits_for_a_commit(broker: SyncCluster, client: SyncJournalClient) -> None:
    group = await json_group(broker)
    async with next_event_of(watcher(group, beyond={})) as waiting:
        async with JournalClient.of(ClientConfig(broker.endpoint)) as writing:
            publishing = publisher(writing, JsonLines())
            await publishing.add(f"{group}/part-000", {"order": 1})
            await publishing.flush()
            await asyncio.sleep(0.2)
            assert not waiting.done()
            await publishing.commit()
        assert vector_of_json((await waiting)["heads"], "heads") == {
            f"{group}/part-000": client.head(f"{group}/part-000")
        }


async def test_a_group_without_journals_is_logged_once(broker: SyncCluster, client: SyncJournalClient) -> None:
    group = f"later-{os.urandom(4).hex()}"
    with capture_logs() as logs:
        async with next_event_of(watcher(group, beyond={})) as waiting:

            def said() -> list[Any]:
                return [each for each in logs if "Waits for a journal" in str(each["event"])]

            await until(lambda: bool(said()))
            await asyncio.sleep(0.1)
            broker.create(f"{group}/part-000")
            client.append(f"{group}/part-000", b"x")
            assert (await waiting)["bytes"] == 1
    (once,) = said()
    assert once["log_level"] == "warning"
    assert group in str(once)
