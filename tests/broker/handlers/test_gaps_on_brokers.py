"""A broker whose disk has lost content serves it from its peers, without delay and without another append."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from coranto.wire import protocol_pb2 as pb
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool.durable_spool import folder_of
from tests.broker.process import BrokerChild

pytestmark = pytest.mark.system

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]


async def test_content_damaged_on_the_disk_of_a_primary_is_read_from_followers(
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
        while len(long_fragments(tmp_path / primary)) < 3:  # Every second append completes one.
            response = await clients["broker-0"].append_when_ready(J, b"%x" % (len(content) // 1000 % 16) * 1000)
            assert (response.status, response.commit.begin) == (pb.OK, len(content))
            content += b"%x" % (len(content) // 1000 % 16) * 1000
            route = response.header.route
            primary = route.members[route.primary].suffix
        await clients[primary].close()
        children[primary].end()
        first, *_, last = contents(tmp_path / primary)
        rot(first, 100)  # This damages all of the journal's first fragment,
        rot(long_fragments(tmp_path / primary)[1], 1100)  # all of this one but its first append,
        if last.stat().st_size:
            rot(last, 0)  # and the journal's end.
        rot(long_fragments(tmp_path / primary)[-1], 1100)

        children[primary].start()
        back = await children[primary].client()
        assert await back.content(J, do_not_proxy=True) == content
        assert len(children[primary].events("spool.corrupt")) >= 3
        assert await back.content(J, 1500, end_offset=1600, do_not_proxy=True) == content[1500:1600]
        response = await back.append_when_ready(J, b"the end")
        assert (response.status, response.commit.begin) == (pb.OK, len(content))
        for client in (clients | {primary: back}).values():
            assert await client.content(J, block=True, end_offset=len(content) + 7) == content + b"the end"
            await client.close()


def contents(data: Path) -> list[Path]:
    """Return the files of the journal's content, in offset order."""
    return sorted(folder_of(data / "spools", J, 0).parent.glob("*/*.content"))


def long_fragments(data: Path) -> list[Path]:
    """Return the files with several appends."""
    return [path for path in contents(data) if path.stat().st_size >= 2000]


def rot(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
