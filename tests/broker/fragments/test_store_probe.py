"""The health of fragment stores: waits for it, and their limits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from coranto.client.store_probe import probe, probe_delete
from coranto.cluster.processes import free_port
from coranto.errors import StoreError
from coranto.fragments.stores import StoreRegistry, open_store
from coranto.testing.clocks import HurriedClock
from coranto_broker.fragments.store_probe import FORGET_SECONDS, TOLERATED_FAILURES, StoreHealth
from coranto_broker.ownership import Invalidated, Signal

URL = "file:///frags/"


class Health:
    """The health of stores below a folder; its tasks end with the test."""

    def __init__(self, root: Path) -> None:
        self.clock = HurriedClock()
        self.tasks: list[asyncio.Task[None]] = []
        self.probes: list[tuple[str, bool]] = []
        self.forgotten: list[str] = []
        self.health = StoreHealth(
            StoreRegistry(root),
            self.clock,
            self._spawn,
            lambda url, healthy: self.probes.append((url, healthy)),
            self.forgotten.append,
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(self._few(work)))

    async def _few(self, work: Coroutine[Any, Any, None]) -> None:
        await work


@pytest.fixture
async def health(tmp_path: Path) -> Any:
    health = Health(tmp_path)
    yield health
    for task in health.tasks:
        task.cancel()
    await asyncio.gather(*health.tasks, return_exceptions=True)


async def test_a_store_that_works_is_healthy(health: Health) -> None:
    assert await health.health.problem(URL) == ""
    assert await health.health.problem(URL) == ""
    assert len(health.tasks) == 1


async def test_probes_of_an_unused_store_end(tmp_path: Path) -> None:
    health = Health(tmp_path)
    assert await health.health.problem(URL) == ""
    await asyncio.wait_for(asyncio.gather(*health.tasks), 60)
    assert health.forgotten == [URL]
    assert health.clock.slept == FORGET_SECONDS
    assert not health.health.is_healthy(URL)
    assert await health.health.problem(URL) == "", "it is probed again"
    assert len(health.tasks) == 2
    await asyncio.wait_for(asyncio.gather(*health.tasks), 60)
    assert health.health._watched == {}


async def test_waiting_for_a_broken_store_ends_after_some_probes(health: Health, tmp_path: Path) -> None:
    (tmp_path / "frags").write_text("in the way")
    problem = await health.health.problem(URL)
    assert "cannot put" in problem
    assert health.clock.slept >= sum((0.0, 0.1, 1.0, 1.0))
    # Later callers do not wait again.
    assert "cannot put" in await asyncio.wait_for(health.health.problem(URL), 60)
    assert TOLERATED_FAILURES < 10
    assert set(health.probes) == {(URL, False)}


async def test_an_append_continues_when_its_store_recovers(health: Health, tmp_path: Path) -> None:
    (tmp_path / "frags").write_text("in the way")
    waiting = asyncio.create_task(health.health.problem(URL))
    await asyncio.sleep(0)
    (tmp_path / "frags").unlink()
    assert await waiting == ""
    assert health.probes[-1] == (URL, True)


async def test_a_changed_route_ends_the_wait(health: Health) -> None:
    signal = Signal()
    waiting = asyncio.create_task(health.health.problem(URL, signal))
    await asyncio.sleep(0)
    signal.fire()
    with pytest.raises(Invalidated):
        await waiting
    with pytest.raises(Invalidated):
        await health.health.problem("file:///other/", signal)


async def test_a_url_that_cannot_be_opened_is_a_problem(health: Health) -> None:
    assert "unknown" in (await health.health.problem("file:///frags/?unknown=1")).lower()


async def test_probes_leave_the_store_as_it_was(tmp_path: Path) -> None:
    store = open_store(URL, file_root=tmp_path)
    await probe(store)
    await probe(store)
    await probe_delete(store, "some/folder/")
    assert [(folder.removeprefix(str(tmp_path)), len(files)) for folder, _, files in os.walk(tmp_path) if files] == [
        ("/frags/.test/coranto", 1)
    ]


async def test_probes_coexist_with_probes_of_gazettes_brokers(tmp_path: Path) -> None:
    """Gazette's put a file `.test/health-check`, and for a moment a file `<prefix>.gazette-delete-probe`."""
    store = open_store(URL, file_root=tmp_path)
    theirs = [tmp_path / "frags" / path for path in (".test/health-check", "some/folder/.gazette-delete-probe")]
    for _ in range(2):
        await probe(store)
        await probe_delete(store, "some/folder/")
        for path in theirs:
            path.write_bytes(b"theirs\n")
    assert [path.read_bytes() for path in theirs] == [b"theirs\n"] * 2


async def test_a_store_whose_urls_cannot_be_read_is_unhealthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(URL, file_root=tmp_path)

    async def sign(fragment: object, ttl_seconds: float) -> str:
        return f"http://127.0.0.1:{free_port()}/denied?signature=secret"

    monkeypatch.setattr(store, "sign_async", sign)
    with pytest.raises(StoreError, match=r"cannot read fragment \.test/coranto/.* from http://.*/denied: ") as caught:
        await probe(store)
    assert "secret" not in str(caught.value)


async def test_a_store_that_returns_other_content_is_unhealthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(URL, file_root=tmp_path)

    async def get(fragment: object) -> bytes:
        return b"something else"

    monkeypatch.setattr(store, "get", get)
    with pytest.raises(StoreError, match="other content"):
        await probe(store)
