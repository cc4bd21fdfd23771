"""Random histories of several authors in a log: players always rebuild the owner's durable files.

The owner changes files at random. At random points, also during an append, a new owner recovers from hints of any age
and replaces it. Earlier owners keep running as zombies. Appends are repeated, answers are lost, garbage is written, all
brokers are lost with the registers, dead content is pruned, and the log is forked.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any, cast

from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from coranto.client import JournalClient
from coranto.errors import Fenced
from coranto.messages.fixed_frame import encode_frame
from coranto.testing.clocks import HurriedClock
from coranto.testing.memory_journals import MemoryJournals
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.recoverylog import (
    Author,
    Hints,
    MemoryAuthority,
    Player,
    RecordedOperation,
    Recorder,
    RecoveredFiles,
)
from coranto_consumers.recoverylog.directory import RecordedDirectory
from coranto_consumers.recoverylog.operations import Create, Fnode, Write
from tests.sampling import examples

LOGS = ("log/zero", "log/one", "log/two")
NAMES = ("a", "b", "c", "folder/d")

Model = dict[str, bytes]


def write_at(content: bytes, offset: int, piece: bytes) -> bytes:
    grown = content.ljust(offset, b"\0")
    return grown[:offset] + piece + grown[offset + len(piece) :]


class Owner:
    """An author, its files, and a model of the files with links as the identity of a list."""

    def __init__(self, directory: RecordedDirectory, paths: dict[str, list[bytes]]) -> None:
        self.directory = directory
        self.paths = paths  # A file is a list with its content as the only item; links share the list.
        self.since_durable: list[Model] = [self.model]

    @property
    def model(self) -> Model:
        return {path: file[0] for path, file in self.paths.items()}

    def change(self, draw: Any) -> None:
        """Make one change, drawn from the possible ones."""
        directory, paths = self.directory, self.paths
        kinds = ["create"] + (["write", "remove", "rename", "link", "together"] if paths else [])
        kind = draw(st.sampled_from(kinds))
        target = draw(st.sampled_from(NAMES))
        source = draw(st.sampled_from(sorted(paths))) if paths else ""
        content = draw(st.binary(max_size=40))
        match kind:
            case "create":
                with directory.create(target) as file:
                    self.note(target, [b""])
                    if content:
                        file.write(content)
                        self.note(target, [content])
                paths[target] = [content]
            case "write":
                offset = draw(st.integers(0, 50))
                with directory.open(source) as file:
                    file.write_at(offset, content)
                if content:
                    paths[source][0] = write_at(paths[source][0], offset, content)
            case "remove":
                directory.remove(source)
                del paths[source]
            case "rename":
                directory.rename(source, target)
                if paths.get(target) is not paths[source]:
                    paths[target] = paths.pop(source)
            case "link" if target not in paths:
                directory.link(source, target)
                paths[target] = paths[source]
            case "together":
                with directory.recorder.together():
                    with directory.create("next") as file:
                        file.write(content)
                    directory.rename("next", target)
                paths[target] = [content]
        self.since_durable.append(self.model)

    def note(self, target: str, file: list[bytes]) -> None:
        """Record an intermediate state that a crash may leave."""
        self.since_durable.append({path: each[0] for path, each in {**self.paths, target: file}.items()})

    async def make_durable(self) -> None:
        await self.directory.recorder.barrier()
        self.since_durable = [self.model]


def files_of(folder: Path) -> Model:
    return {
        str(Path(parent, name).relative_to(folder)): Path(parent, name).read_bytes()
        for parent, _, names in os.walk(folder)
        for name in names
    }


def linked(folder: Path) -> dict[str, list[bytes]]:
    """Return the files below a folder with their links, in the form of an owner's model."""
    by_inode: dict[int, list[bytes]] = {}
    found: dict[str, list[bytes]] = {}
    for name, content in files_of(folder).items():
        found[name] = by_inode.setdefault((folder / name).stat().st_ino, [content])
    return found


class World:
    def __init__(self, folder: Path, draw: Any) -> None:
        self.folder, self.draw = folder, draw
        self.journals = MemoryJournals(*LOGS)
        self.client = cast(JournalClient, self.journals)
        self.authority = MemoryAuthority()
        self.hints = [Hints(LOGS[0])]  # All hints for the current history, the latest last.
        self.zombies: list[Owner] = []
        self.folders = 0
        self.log = 0

    def new_folder(self) -> Path:
        self.folders += 1
        return self.folder / str(self.folders)

    async def play(self, hints: Hints, author: Author | None) -> RecoveredFiles:
        async with Player(self.client, hints, self.new_folder(), authority=self.authority) as player:
            if author is None:
                return await player.finish()
            if self.draw(st.booleans()):
                await player.tailing()
            return await player.hand_off(author)

    async def take_over(self, earlier: Owner | None) -> Owner:
        """Replace the owner, at any point of its work."""
        for _ in range(self.draw(st.integers(0, 6))):
            await asyncio.sleep(0)
        stop = earlier is not None and self.draw(st.booleans())
        if stop:
            await earlier.directory.recorder.close()
        elif earlier is not None:
            self.zombies.append(earlier)
        hints = self.draw(st.sampled_from(self.hints))
        recovery = await self.play(hints, Author(self.folders + 1))
        found = linked(recovery.directory)
        if earlier is not None:
            assert {path: file[0] for path, file in found.items()} in earlier.since_durable
        fork = self.log + 1 < len(LOGS) and found and self.draw(st.integers(0, 5)) == 0
        self.log += bool(fork)
        recorder = Recorder(self.client, recovery, log=LOGS[self.log], authority=self.authority, clock=HurriedClock())
        await recorder.__aenter__()
        owner = Owner(RecordedDirectory(recorder), found)
        if fork:
            event("forked")
            # Hints include the fork only after a write there.
            name = min(found)
            with owner.directory.open(name) as file:
                file.write_at(0, b"forked")
            found[name][0] = write_at(found[name][0], 0, b"forked")
            await owner.make_durable()
            self.hints = [await recorder.hints()]
        return owner

    async def fresh_hints(self, owner: Owner) -> Hints | None:
        """Return new hints, or None if they would need the beginning of the log, which may be pruned."""
        await owner.make_durable()
        live = owner.directory.recorder._fsm.hints(LOGS[self.log]).live_fnodes
        if not any(segment.log == LOGS[self.log] for each in live for segment in each.segments):
            return None
        return await owner.directory.recorder.hints()

    async def check(self, owner: Owner) -> None:
        """Check that playing any hints gives the owner's files."""
        fresh = await self.fresh_hints(owner)
        candidates = [self.draw(st.sampled_from(self.hints))]
        if fresh is not None:
            candidates += [fresh, Hints.from_bytes(fresh.to_json())]
        for hints in candidates:
            played = await self.play(hints, None)
            assert files_of(played.directory) == owner.model == files_of(owner.directory.recorder.directory)
            state = owner.directory.recorder._fsm
            assert (played.fsm.next_seq_no, played.fsm.next_checksum) == (state.next_seq_no, state.next_checksum)
            assert dict(played.fsm.paths) == dict(state.paths)

    async def step(self, owner: Owner) -> Owner:
        draw, journal = self.draw, self.journals.journals[LOGS[self.log]]
        kind = draw(
            st.sampled_from(
                ["change"] * 6
                + ["durable", "hints", "take over", "zombie", "garbage", "lose registers", "prune", "check", "faults"]
            )
        )
        event(kind)
        match kind:
            case "change":
                owner.change(draw)
            case "durable":
                await owner.make_durable()
            case "hints":
                hints = await self.fresh_hints(owner)
                if hints is not None:
                    self.hints.append(hints)
            case "take over":
                return await self.take_over(owner)
            case "zombie" if self.zombies:
                await self.stir(draw(st.sampled_from(self.zombies)))
            case "garbage":
                journal.write(draw(st.sampled_from(GARBAGE)))
            case "lose registers":
                journal.registers = pb.LabelSet()
                if self.zombies and draw(st.booleans()):
                    await self.stir(self.zombies[-1])
            case "prune":
                hints = await self.fresh_hints(owner)
                if hints is not None:
                    self.hints = [hints]
                    segments = [each for each in hints.live_segments() if each.log == LOGS[self.log]]
                    live = min(each.first_offset for each in segments)
                    journal.begin = max([journal.begin, *(end for end in journal.appends if end <= live)])
            case "check":
                await self.check(owner)
            case "faults":
                rate = draw(st.sampled_from([0, 3]))
                turn = 0

                def faulty() -> str:
                    nonlocal turn
                    turn += 1
                    return ("lost", "unanswered")[turn // 3 % 2] if rate and turn % rate == 0 else ""

                self.journals.faulty = faulty
        return owner

    async def stir(self, zombie: Owner) -> None:
        """Let a zombie write. Its writes are never reported as durable."""
        try:
            zombie.directory.recorder.create("zombie")
            await zombie.directory.recorder.barrier()
        except Fenced:
            return
        raise AssertionError("an append of a zombie was acknowledged")


GARBAGE = (
    b"\0",
    b"plain text",
    b"\x66\x33\x93",
    b"\x66\x33\x93\x36\xff\xff\xff\xff",
    encode_frame(b"\xff"),
    encode_frame(RecordedOperation(5, 5, Author(5), Create("/evil")).to_payload()),
    b"!" + encode_frame(RecordedOperation(5, 5, Author(5), Write(Fnode(1), 0, 1 << 30)).to_payload()),
)


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
@given(st.data())
def test_players_rebuild_the_owners_durable_files(data: st.DataObject) -> None:
    async def history(folder: Path) -> None:
        world = World(folder, data.draw)
        piece = data.draw(st.sampled_from([1 << 15, 7, 1]))
        world.journals.piece_bytes = lambda: piece
        owner = await world.take_over(None)
        for _ in range(data.draw(st.integers(1, 40))):
            owner = await world.step(owner)
        await world.check(owner)
        for each in (owner, *world.zombies):
            await each.directory.recorder.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(history(Path(folder)))
