"""Reading from the first of several etcd members that answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from coranto.checkup.status.etcd_members import ask_members
from coranto.cluster import EtcdServer
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.errors import InvalidInput, Unavailable


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EtcdServer(tmp_path_factory.mktemp("etcd"), fsync=False) as server:
        yield server.endpoint


@pytest.fixture
def silent() -> Iterator[str]:
    """A member that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def read(coordinator: EtcdCoordinator) -> str:
    await coordinator.range("/no/such/key")
    return coordinator.endpoint


@pytest.mark.timeout(120)
async def test_a_silent_member_uses_no_share_of_the_timeout(etcd: str, silent: str) -> None:
    assert await ask_members(f"{silent}, {etcd}", None, 1e6, read) == etcd


async def test_a_member_that_is_down_is_skipped(etcd: str) -> None:
    asked = []

    async def refuse_the_first(coordinator: EtcdCoordinator) -> str:
        asked.append(coordinator.endpoint)
        if len(asked) == 1:
            raise Unavailable("down")
        return await read(coordinator)

    assert await ask_members(f"127.0.0.1:1,{etcd}", None, 60, refuse_the_first) == etcd
    assert asked == ["127.0.0.1:1", etcd]


async def test_members_that_are_all_silent_time_out(silent: str) -> None:
    with pytest.raises(Unavailable, match=f"no member of etcd at {silent} answered within 0.1 s"):
        await ask_members(silent, None, 0.1, lambda _: asyncio.sleep(1e6))


async def test_an_endpoint_list_without_members_is_invalid() -> None:
    with pytest.raises(InvalidInput, match="names no endpoint"):
        await ask_members(" , ", None, 60, read)
