"""A primary whose disk has lost content of a fragment that was complete: it gets the content from its peers at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from coranto.wire import protocol_pb2 as pb
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool.durable_spool import folder_of
from coranto_broker.testing.process import BrokerChild
from coranto_broker.testing.running import RawClient, eventually

pytestmark = [pytest.mark.system, pytest.mark.integration]

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]


async def test_what_rots_below_newer_content_is_fetched_from_the_followers(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path
) -> None:
    with ExitStack() as exits:
        children: dict[str, BrokerChild] = {}
        for name in ("broker-0", "broker-1", "broker-2"):
            settings = broker_settings.model_copy(update={"id": name, "data_dir": tmp_path / name})
            children[name] = BrokerChild(settings, tmp_path / f"{name}.log")
            exits.callback(children[name].close)
            children[name].start()
        clients = {name: await child.client() for name, child in children.items()}
        made = spec(J, stores=(), fragment={"length": 1500})
        made.replication = 3
        await clients["broker-0"].apply(made)
        content, primary = b"", ""
        while len(long_fragments(tmp_path / primary)) < 2:  # Every second append completes one, and so do new brokers.
            response = await clients["broker-0"].append_when_ready(J, b"%x" % (len(content) // 1000 % 16) * 1000)
            assert (response.status, response.commit.begin) == (pb.OK, len(content))
            content += b"%x" % (len(content) // 1000 % 16) * 1000
            route = response.header.route
            primary = route.members[route.primary].suffix
        await clients[primary].close()
        children[primary].end()
        rot(contents(tmp_path / primary)[0], 100)  # Nothing of the journal's first fragment is left then,
        rot(long_fragments(tmp_path / primary)[-1], 1100)  # and of this one, the first append is.

        children[primary].start()
        back = await children[primary].client()
        await read_here(back, content)
        assert len(children[primary].events("spool.corrupt")) == 2
        assert len(children[primary].events("journal.gap_filled")) == 2
        response = await back.append_when_ready(J, b"the end")
        assert (response.status, response.commit.begin) == (pb.OK, len(content))
        for client in (clients | {primary: back}).values():
            await read_here(client, content + b"the end")
            await client.close()


def contents(data: Path) -> list[Path]:
    """Return the content files of the journal's completed fragments, in offset order."""
    spools = folder_of(data / "spools", J, 0).parent
    return sorted(spools.glob("*/*.content"))[:-1]


def long_fragments(data: Path) -> list[Path]:
    """Return those of several appends."""
    return [path for path in contents(data) if path.stat().st_size >= 2000]


def rot(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


async def read_here(client: RawClient, content: bytes) -> None:
    """Wait until this very broker has the content, for less time than replicas wait before they store anything."""

    async def has_it() -> bool:
        found = b""
        for response in await client.read(J, 0, do_not_proxy=True):
            if response.content:
                assert response.offset == len(found), "nothing may be skipped"
                found += response.content
        assert content.startswith(found)
        return found == content

    await eventually(has_it, 100)
