"""The operator's commands for content that was set aside: list it, and compare it with the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coranto.client import JournalClient
from coranto.effects import LocalDisk
from coranto.errors import InvalidInput
from coranto.fragments.fragment import sum_of
from coranto.wire import protocol_pb2 as pb
from coranto_broker.recovery import set_aside
from coranto_broker.recovery.deleted_spools import DeletedSpools
from coranto_broker.recovery.set_aside import SetAsideFragment
from coranto_broker.server.cli import app
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool.durable_spool import DurableSpool, Fsync, SpoolFolder, folder_of
from coranto_broker.spool.recovery import recover
from tests.broker.running import ManualClock, RawClient, running_broker
from tests.broker.spool.test_durable_spool import Observer, append

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]
runner = CliRunner()


def damaged(data_dir: Path, *pieces: bytes, damage: Callable[[bytes], bytes], log: bool = True) -> SetAsideFragment:
    """A spool of these commits, whose content was damaged and recovered since."""
    folder = SpoolFolder(folder_of(data_dir / "spools", J, 7), J, 7, LocalDisk(), ManualClock())
    spool = DurableSpool(folder, Observer(), Fsync.NEVER)
    for piece in pieces:
        append(spool, piece)
    content = folder.path / f"{0:016x}.content"
    content.write_bytes(damage(content.read_bytes()))
    if not log:
        (folder.path / f"{0:016x}.0.commits").write_bytes(b"")
    recover(folder)
    (kept,) = set_aside.find(data_dir, LocalDisk())
    return kept


def test_content_that_was_set_aside_is_found_and_judged(tmp_path: Path) -> None:
    kept = damaged(tmp_path, b"abc", b"def", b"ghi", damage=lambda content: content[:7] + b"X" + content[8:])
    assert (kept.journal, kept.create_revision, kept.begin, kept.end) == (J, 7, 0, 9)
    assert (kept.committed_end, kept.sound_end) == (9, 6)
    assert set_aside.at(kept.path, LocalDisk()) == kept
    assert b"".join(set_aside.read(kept, LocalDisk(), 2, 9)) == b"cdefgXi"
    with pytest.raises(InvalidInput, match="not within"):
        list(set_aside.read(kept, LocalDisk(), 2, 10))
    with pytest.raises(InvalidInput, match="not set-aside content"):
        set_aside.at(tmp_path / "spools" / "x" / "set-aside" / "y", LocalDisk())


def test_the_sound_part_of_content_is_found_by_its_sum(tmp_path: Path) -> None:
    kept = damaged(tmp_path, b"abc", b"def", b"ghi", damage=lambda content: content[:7] + b"X" + content[8:])
    assert kept.path.exists()

    def found(begin: int, end: int, content: bytes) -> bytes | None:
        pieces = set_aside.pieces_with_sum(tmp_path, LocalDisk(), J, begin, end, sum_of(content))
        return None if pieces is None else b"".join(pieces)

    assert found(0, 6, b"abcdef") == b"abcdef"
    assert found(2, 7, b"cdefg") == b"cdefg"
    assert found(0, 9, b"abcdefghi") is None  # It is damaged.
    assert found(0, 10, b"abcdefghij") is None  # It is shorter.
    assert set_aside.pieces_with_sum(tmp_path, LocalDisk(), "test/other", 0, 6, sum_of(b"abcdef")) is None
    assert set_aside.pieces_with_sum(tmp_path / "no spool", LocalDisk(), J, 0, 3, sum_of(b"abc")) is None


def test_spools_of_deleted_journals_are_listed_read_and_exported(tmp_path: Path) -> None:
    folder = SpoolFolder(folder_of(tmp_path / "spools", J, 7), J, 7, LocalDisk(), ManualClock())
    spool = DurableSpool(folder, Observer(), Fsync.NEVER)
    append(spool, b"abc")
    append(spool, b"def")
    assert set_aside.find(tmp_path, LocalDisk()) == [], "the journal exists"
    DeletedSpools(tmp_path, LocalDisk(), ManualClock(), 3600.0).take(folder.path, J, 7)

    (kept,) = set_aside.find(tmp_path, LocalDisk())
    assert kept.deleted
    assert (kept.journal, kept.create_revision, kept.begin, kept.committed_end, kept.sound_end) == (J, 7, 0, 6, 6)
    assert set_aside.at(kept.path, LocalDisk()) == kept
    pieces = set_aside.pieces_with_sum(tmp_path, LocalDisk(), J, 1, 5, sum_of(b"bcde"))
    assert pieces is not None
    assert b"".join(pieces) == b"bcde"
    other = kept.path.with_name(f"{6:016x}.content")
    other.write_bytes(b"ghi")
    pieces = set_aside.pieces_with_sum(tmp_path, LocalDisk(), J, 4, 8, sum_of(b"efgh"))
    assert pieces is not None
    assert b"".join(pieces) == b"efgh", "from two files"
    assert set_aside.pieces_with_sum(tmp_path, LocalDisk(), J, 4, 10, sum_of(b"efghij")) is None
    other.unlink()
    listed = runner.invoke(app, ["set-aside", "list", "--data-dir", str(tmp_path)])
    assert "the journal was deleted" in listed.output
    assert runner.invoke(app, ["set-aside", "export", str(kept.path)]).stdout_bytes == b"abcdef"


def test_the_list_says_how_much_is_sound(tmp_path: Path) -> None:
    for name, damage, log, extent in (
        ("flip", lambda content: b"X" + content[1:], True, "nothing"),
        ("cut", lambda content: content[:4], True, "up to 3"),
        ("torn", lambda content: content, False, "unknown: no log"),
    ):
        damaged(tmp_path / name, b"abc", b"def", damage=damage, log=log)
        result = runner.invoke(app, ["set-aside", "list", "--data-dir", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        assert extent in result.output.splitlines()[1]
    result = runner.invoke(app, ["set-aside", "list", "--data-dir", str(tmp_path / "none")])
    assert "nothing is set aside" in result.output


def test_sound_bytes_are_exported(tmp_path: Path) -> None:
    kept = damaged(tmp_path, b"abc", b"def", b"ghi", damage=lambda content: content[:7] + b"XY")
    result = runner.invoke(app, ["set-aside", "export", str(kept.path)])
    assert result.stdout_bytes == b"abcdef"
    result = runner.invoke(app, ["set-aside", "export", str(kept.path), "--begin", "4", "--end", "9"])
    assert result.stdout_bytes == b"efgXY"
    assert "beyond 6 are not known" in result.stderr
    assert runner.invoke(app, ["set-aside", "export", str(kept.path), "--end", "10"]).exit_code == 2


async def test_set_aside_content_is_compared_with_the_journal(
    tmp_path: Path, broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    kept = damaged(tmp_path / "old", b"abc", b"def", b"ghi", damage=lambda content: content[:7] + b"XY")
    async with running_broker(broker_settings) as (process, client):
        await client.apply(spec())

        async def compared() -> tuple[int, list[str]]:
            arguments = ["set-aside", "compare", str(kept.path), "--endpoint", process.endpoint]
            result = await asyncio.to_thread(runner.invoke, app, arguments)
            return result.exit_code, result.output.splitlines()

        await client.append_when_ready(J, b"abc")
        assert await compared() == (
            1,
            ["[0, 3): the journal has the same bytes", "[3, 9): the journal has nothing here"],
        )
        await _append(client, process.endpoint, b"dXfg")
        assert await compared() == (
            1,
            [
                "[0, 4): the journal has the same bytes",
                "[4, 7): the journal has other bytes",
                "[7, 9): the journal has nothing here",
            ],
        )
    undamaged = damaged(tmp_path / "other", b"abc", damage=lambda content: content[:2])
    async with running_broker(broker_settings) as (process, client):
        await client.append_when_ready(J)
        arguments = ["set-aside", "compare", str(undamaged.path), "--endpoint", process.endpoint]
        result = await asyncio.to_thread(runner.invoke, app, arguments)
        assert (result.exit_code, result.output) == (0, "[0, 2): the journal has the same bytes\n")


async def _append(client: RawClient, endpoint: str, content: bytes) -> None:
    async with JournalClient(endpoint) as ours:
        await ours.append(J, content)
