"""Files of recovery logs with forged content."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from coranto.client import JournalClient
from coranto.errors import CorruptData
from coranto.testing.fake_broker import FakeBroker
from coranto_consumers.recoverylog import Hints, Player
from coranto_consumers.recoverylog.fnode_files import MAX_OPEN
from coranto_consumers.recoverylog.operations import Change, Create, Fnode, Link, SetProperty, Write

if TYPE_CHECKING:
    from .conftest import Owners
from tests.consumers.recoverylog.forged import LOG, forged


def left_in(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*")}


@pytest.mark.parametrize(
    "path",
    [
        "/../outside",
        "/a/../../outside",
        "../outside",
        "/.fnodes/2",
        "/.fnodes/new",
        "//.fnodes//new",
        "/a\0b",
        "/",
        "",
        "/.",
        "/" + "x" * 300,
        "/" + "d/" * 3000 + "f",
    ],
)
@pytest.mark.parametrize("kind", ["file", "link", "property"])
@pytest.mark.parametrize("is_relative", [False, True], ids=["absolute", "relative"])
async def test_recorded_paths_stay_inside_the_folder(
    owners: Owners,
    client: JournalClient,
    broker: FakeBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    kind: str,
    is_relative: bool,
) -> None:
    """This includes the current folder, as in `coranto shards recover --dir .`."""
    folder = tmp_path / "inner"
    folder.mkdir()
    monkeypatch.chdir(folder)
    made: dict[str, tuple[Change, ...]] = {
        "file": (Create(path), Create("/fine")),
        "link": (Create("/fine"), Link(Fnode(1), path)),
        "property": (Create("/fine"), SetProperty(path, "content")),
    }
    await broker.write(LOG, forged(*made[kind]))
    async with Player(client, Hints(LOG), Path() if is_relative else folder) as player:
        with pytest.raises(CorruptData, match="recorded path"):
            await player.finish()
    assert left_in(tmp_path) <= {"inner"}


@pytest.mark.parametrize(("one", "other"), [("/a", "/a/b"), ("/a/b", "/a"), ("/x/a/b/c", "/x/a")])
@pytest.mark.parametrize("kind", ["file", "property"])
async def test_a_path_that_is_both_a_file_and_a_folder_is_refused(
    client: JournalClient, broker: FakeBroker, tmp_path: Path, one: str, other: str, kind: str
) -> None:
    await broker.write(LOG, forged(Create(one), Create(other) if kind == "file" else SetProperty(other, "content")))
    async with Player(client, Hints(LOG), tmp_path / "played") as player:
        with pytest.raises(CorruptData, match="cannot both be files"):
            await player.finish()
    assert not (tmp_path / "played").exists()


async def test_many_files_need_few_descriptors(client: JournalClient, broker: FakeBroker, tmp_path: Path) -> None:
    """A process plays the logs of many shards, and needs descriptors for its connections."""
    count = 4 * MAX_OPEN
    creations = [Create(f"/file-{number}") for number in range(count)]
    writes = [
        Write(Fnode(number + 1), offset, 3)
        for offset in (0, 3)
        for number in (*range(count), *range(count - 1, -1, -1))
    ]
    await broker.write(LOG, forged(*creations, *writes))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The descriptors open now, the maximum of a player, and some for running calls.
    limit = max(int(name) for name in os.listdir("/proc/self/fd")) + MAX_OPEN + 32
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, before[0]), before[1]))
    try:
        async with Player(client, Hints(LOG), tmp_path / "played") as player:
            recovery = await player.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(recovery.fsm.live_fnodes) == count
    assert {each.read_bytes() for each in (tmp_path / "played").iterdir()} == {b"x" * 6}
    assert (tmp_path / "played").stat().st_mode & 0o077 == 0
