"""Playing logs: standbys, handoffs and their races, gaps, garbage, lost content."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from coranto.client import JournalClient
from coranto.client.values import AppendResult
from coranto.errors import CorruptData, Fenced, InvalidInput, JournalNotFound
from coranto.messages.fixed_frame import encode_frame
from coranto.testing.fake_broker import Break, CallPoint, FakeBroker
from coranto_consumers.recoverylog import (
    Author,
    Hints,
    LiveFnode,
    LogSegment,
    MemoryAuthority,
    Ownership,
    Player,
    RecordedOperation,
    Recorder,
    fence_of,
    new_author,
)
from coranto_consumers.recoverylog.directory import RecordedDirectory
from coranto_consumers.recoverylog.fnode_files import STAGING
from coranto_consumers.recoverylog.lineage import HistoryPosition
from coranto_consumers.recoverylog.operations import Create, Fnode, Write

if TYPE_CHECKING:
    from .conftest import Owners

LOG = "recovery/logs/one"
ContentOf = Callable[[Path], dict[str, bytes]]


def put(directory: RecordedDirectory, name: str, content: bytes) -> None:
    with directory.create(name) as file:
        file.write(content)


async def test_an_empty_log_is_played(owners: Owners, content_of: ContentOf) -> None:
    recovery = await owners.peek()
    assert recovery.fsm.next_seq_no == 1
    assert recovery.handoff is None
    assert recovery.directory.is_dir()
    assert content_of(recovery.directory) == {}


async def test_playing_a_missing_log_is_an_error(client: JournalClient, owners: Owners) -> None:
    async with Player(client, Hints("no/such/log"), owners.new_folder()) as player:
        with pytest.raises(JournalNotFound):
            await player.finish()
        with pytest.raises(JournalNotFound):
            await player.tailing()


async def test_files_have_all_their_paths(owners: Owners, content_of: ContentOf) -> None:
    directory = await owners.take_over()
    put(directory, "a", b"one")
    directory.link("a", "deep/er/b")
    put(directory, "gone", b"two")
    directory.remove("gone")
    with directory.create("sparse") as file:
        file.write_at(5, b"x")
    await directory.recorder.barrier()
    recovery = await owners.peek()
    assert content_of(recovery.directory) == {"a": b"one", "deep/er/b": b"one", "sparse": bytes(5) + b"x"}
    assert (recovery.directory / "a").samefile(recovery.directory / "deep/er/b")
    assert not (recovery.directory / STAGING).exists()


async def test_earlier_content_of_the_folder_is_removed(owners: Owners, client: JournalClient, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").touch()
    async with Player(client, Hints(LOG), tmp_path / "folder") as player:
        await player.finish()
    assert list((tmp_path / "folder").iterdir()) == []


async def test_a_standby_follows_and_takes_over(owners: Owners, client: JournalClient, content_of: ContentOf) -> None:
    first = await owners.take_over()
    put(first, "a", b"before")
    await first.recorder.barrier()
    async with Player(client, Hints(LOG), owners.new_folder()) as standby:
        await standby.tailing()
        for number in range(5):
            put(first, f"while-{number}", b"%d" % number)
            await first.recorder.barrier()
        recovery = await standby.hand_off(Author(0x1234))
    assert content_of(recovery.directory) == content_of(first.recorder.directory)
    put(first, "too late", b"x")
    with pytest.raises(Fenced, match="0x1234"):
        await first.recorder.barrier()
    second = await owners.record(recovery)
    put(second, "after", b"y")
    await second.recorder.barrier()
    assert "too late" not in content_of((await owners.peek()).directory)
    assert "after" in content_of((await owners.peek()).directory)


async def test_a_handoff_sets_the_fence(broker: FakeBroker, owners: Owners) -> None:
    for author in (Author(0x1234), Author(0x5678)):
        recovery = await owners.recover(author=author)
        assert broker.journals[LOG].registers == fence_of(author)
        assert recovery.handoff is not None
        assert recovery.handoff.author == author
    assert recovery.fsm.next_seq_no == 3


async def test_a_standby_can_finish_at_the_head_without_appending(
    broker: FakeBroker, owners: Owners, client: JournalClient, content_of: ContentOf
) -> None:
    first = await owners.take_over()
    async with Player(client, Hints(LOG), owners.new_folder()) as standby:
        await standby.tailing()
        put(first, "a", b"content")
        await first.recorder.barrier()
        head = broker.journals[LOG].head
        recovery = await standby.finish()
    assert content_of(recovery.directory) == {"a": b"content"}
    assert broker.journals[LOG].head == head


async def test_closing_a_player_stops_it_and_removes_its_folder(owners: Owners, client: JournalClient) -> None:
    folder = owners.new_folder()
    async with Player(client, Hints(LOG), folder) as standby:
        await standby.tailing()
        assert folder.exists()
    assert not folder.exists()
    with pytest.raises(asyncio.CancelledError):
        await standby.finish()


async def test_a_player_works_only_inside_its_block(owners: Owners, client: JournalClient) -> None:
    player = Player(client, Hints(LOG), owners.new_folder())
    with pytest.raises(InvalidInput):
        await player.finish()
    async with player:
        with pytest.raises(InvalidInput):
            await player.hand_off(Author(0))


async def test_broken_connections_are_retried(
    broker: FakeBroker, owners: Owners, client: JournalClient, content_of: ContentOf
) -> None:
    first = await owners.take_over()
    put(first, "a", b"x" * 200_000)
    await first.recorder.barrier()
    broker.at(CallPoint.APPEND_APPLIED, Break.CUT)
    broker.at(CallPoint.READ_CONTENT, None, Break.CUT, None, Break.CUT)
    async with Player(client, Hints(LOG), owners.new_folder()) as standby:
        await standby.tailing()
        broker.cut()
        broker.at(CallPoint.APPEND_APPLIED, Break.CUT)
        recovery = await standby.hand_off(new_author())
    assert content_of(recovery.directory) == {"a": b"x" * 200_000}
    # The log has the handoff twice; the second one is out of sequence.
    second = await owners.record(recovery)
    put(second, "b", b"y")
    await second.recorder.barrier()
    assert set(content_of((await owners.peek()).directory)) == {"a", "b"}


# -- Without the fence in registers: only sequence and checksum -------------------------------------------------------


class RacedClient(JournalClient):
    """A client that runs the next of `races` before each append that sets registers."""

    def __init__(self, endpoint: str, *races: Callable[[], Awaitable[object]]) -> None:
        super().__init__(endpoint)
        self.races = list(races)

    async def append(self, *arguments: Any, **options: Any) -> AppendResult:
        if options.get("union_registers") and self.races:
            await self.races.pop(0)()
        return await super().append(*arguments, **options)


def unfence(recorder: Recorder) -> None:
    """Make a recorder append with any registers, and trust the append."""

    async def believe(*arguments: object) -> None:
        pass

    recorder._check.include.ClearField("labels")
    recorder._restore_fence = believe


async def test_a_raced_handoff_is_retried(
    broker: FakeBroker, owners: Owners, client: JournalClient, content_of: ContentOf
) -> None:
    """An unfenced author keeps writing while another takes over: all readers agree on one history."""
    first = await owners.take_over()
    unfence(first.recorder)
    put(first, "a", b"one")
    await first.recorder.barrier()

    def race(number: int) -> Callable[[], Awaitable[object]]:
        async def append() -> None:
            put(first, f"raced-{number}", b"in time")
            await first.recorder.barrier()

        return append

    async with (
        RacedClient(broker.endpoint, race(1), race(2)) as raced,
        Player(raced, Hints(LOG), owners.new_folder()) as standby,
        Player(client, Hints(LOG), owners.new_folder()) as observer,
    ):
        await standby.tailing()
        recovery = await standby.hand_off(Author(0x5678))
        assert raced.races == []
        put(first, "late", b"of the branch that lost")
        await first.recorder.barrier()
        second = await owners.record(recovery)
        put(second, "b", b"two")
        await second.recorder.barrier()
        seen = await observer.finish()
    assert content_of(seen.directory) == {"a": b"one", "raced-1": b"in time", "raced-2": b"in time", "b": b"two"}
    assert seen.fsm.hints(LOG).live_segments().segments[-1].author == 0x5678
    assert b"of the branch that lost" in broker.journals[LOG].content


async def test_garbage_between_appends_is_skipped(broker: FakeBroker, owners: Owners, content_of: ContentOf) -> None:
    first = await owners.take_over()
    put(first, "a", b"one")
    await first.recorder.barrier()
    await broker.write(LOG, b"some garbage \x66\x33\x93\x36 and more of it")
    put(first, "b", b"two")
    await first.recorder.barrier()
    # Garbage that resembles an operation before a large write.
    claim = RecordedOperation(999, 0, Author(1), Write(Fnode(2), 0, 1 << 40)).to_payload()
    await broker.write(LOG, b"x" + encode_frame(claim))
    second = await owners.take_over()
    put(second, "c", b"three")
    await second.recorder.barrier()
    await broker.write(LOG, b"\x66\x33")
    expected = {"a": b"one", "b": b"two", "c": b"three"}
    for hints in (Hints(LOG), await second.recorder.hints()):
        assert content_of((await owners.peek(hints)).directory) == expected


# -- Missing content --------------------------------------------------------------------------------------------------


async def test_pruned_content_is_skipped(
    broker: FakeBroker, owners: Owners, content_of: ContentOf, tmp_path: Path
) -> None:
    journal = broker.journals[LOG]
    first = await owners.take_over()
    put(first, "old", b"x" * 1000)
    await first.recorder.barrier()
    first.remove("old")
    await first.recorder.barrier()
    early = journal.head
    journal.roll(tmp_path)
    put(first, "new", b"y" * 1000)
    hints = await first.recorder.hints()
    journal.roll(tmp_path)
    journal.drop_before(early)
    assert content_of((await owners.peek(hints)).directory) == {"new": b"y" * 1000}
    with pytest.raises(CorruptData, match="has nothing in"):
        await owners.peek()


async def test_missing_hinted_content_is_an_error(broker: FakeBroker, owners: Owners, tmp_path: Path) -> None:
    journal = broker.journals[LOG]
    first = await owners.take_over()
    put(first, "a", b"x" * 1000)
    await first.recorder.barrier()
    recovery = await owners.recover()  # The hints of a player have the ends of segments.
    journal.roll(tmp_path)
    second = await owners.record(recovery)
    put(second, "b", b"y")
    await second.recorder.barrier()
    middle = journal.head
    journal.roll(tmp_path)
    put(second, "c", b"z")
    hints = await second.recorder.hints()
    journal.roll(tmp_path)
    journal.drop_before(middle)
    with pytest.raises(CorruptData, match="where the hinted"):
        await owners.peek(hints)


async def test_hints_beyond_the_head_are_an_error(owners: Owners) -> None:
    first = await owners.take_over()
    put(first, "a", b"x")
    hints = await first.recorder.hints()
    beyond = LogSegment(Author(5678), 1000, 1 << 30, 5, 1000, 0, LOG)
    impossible = replace(hints, live_fnodes=(*hints.live_fnodes, LiveFnode(Fnode(1000), (beyond,))))
    with pytest.raises(CorruptData, match="below the hinted"):
        await owners.peek(impossible)
    # An offset inside the log, but without this operation.
    unmet = replace(
        hints, live_fnodes=(*hints.live_fnodes, LiveFnode(Fnode(1000), (replace(beyond, first_offset=20),)))
    )
    with pytest.raises(CorruptData, match="was not found"):
        await owners.peek(unmet)


async def test_a_hinted_file_must_be_created_in_the_log(broker: FakeBroker, owners: Owners) -> None:
    author, log = Author(7), b""
    checksum = 0
    for change in (Create("/a"), None):
        op = RecordedOperation(1 if change else 2, checksum, author, change)
        log += encode_frame(op.to_payload())
        checksum = HistoryPosition(1, checksum).after(op.to_payload()).checksum
    await broker.write(LOG, log)
    live = LiveFnode(Fnode(1), (LogSegment(author, 1, 0, 0, 2, 0, LOG),))
    ghost = LiveFnode(Fnode(2), (LogSegment(author, 2, 0, HistoryPosition(1, 0).after(b"").checksum, 2, 0, LOG),))
    assert (await owners.peek(Hints(LOG, (live,)))).fsm.live_fnodes == [1]
    with pytest.raises(CorruptData, match="not found"):
        await owners.peek(Hints(LOG, (live, ghost)))


async def test_a_path_that_leaves_the_folder_is_refused(broker: FakeBroker, owners: Owners, tmp_path: Path) -> None:
    op = RecordedOperation(1, 0, Author(7), Create("/../../evil"))
    await broker.write(LOG, encode_frame(op.to_payload()))
    with pytest.raises(CorruptData, match="not below the folder"):
        await owners.peek()
    assert not any("evil" in names for _, _, names in os.walk(tmp_path))


async def test_a_log_that_ends_inside_a_write_is_an_error(broker: FakeBroker, owners: Owners) -> None:
    first = RecordedOperation(1, 0, Author(7), Create("/a")).to_payload()
    checksum = HistoryPosition(1, 0).after(first).checksum
    torn = RecordedOperation(2, checksum, Author(7), Write(Fnode(1), 0, 100)).to_payload()
    await broker.write(LOG, encode_frame(first) + encode_frame(torn) + b"only this")
    with pytest.raises(CorruptData, match="in the middle of a write"):
        await owners.peek()


async def test_logs_of_gazette_are_played(broker: FakeBroker, owners: Owners, content_of: ContentOf) -> None:
    """Bytes encoded by hand from Gazette's message definitions: create, write, link, unlink, property."""
    payloads = [
        ("08011d0700000022040a022f61", b""),
        ("080215{crc}1d070000003a06080110001805", b"hello"),
        ("080315{crc}1d070000002a06080112022f62", b""),
        ("080415{crc}1d070000003206080112022f61", b""),
        ("080515{crc}1d0700000042070a022f70120176", b""),
    ]
    chain, log = HistoryPosition(1, 0), b""
    for text, data in payloads:
        payload = bytes.fromhex(text.format(crc=chain.checksum.to_bytes(4, "little").hex()))
        log += b"\x66\x33\x93\x36" + len(payload).to_bytes(4, "little") + payload + data
        chain = chain.after(payload)
    await broker.write(LOG, log)
    played = await owners.peek()
    assert content_of(played.directory) == {"b": b"hello", "p": b"v"}
    assert (played.fsm.next_seq_no, played.fsm.next_checksum) == (chain.seq_no, chain.checksum)
    assert dict(played.fsm.paths) == {"/b": 1}


# -- Checks by the authority ------------------------------------------------------------------------------------------


async def test_a_takeover_is_claimed_and_confirmed(owners: Owners) -> None:
    authority = MemoryAuthority()
    recovery = await owners.recover(author=Author(7), authority=authority)
    assert authority.ownership is not None
    assert authority.ownership.handoff == recovery.handoff
    again = await owners.recover(author=Author(8), authority=authority)
    assert authority.ownership.handoff == again.handoff


async def test_a_refused_takeover_appends_nothing(broker: FakeBroker, owners: Owners) -> None:
    class Refusal(MemoryAuthority):
        async def claim(self, author: Author) -> None:
            raise Fenced("this process was not assigned the shard")

    with pytest.raises(Fenced, match="not assigned"):
        await owners.recover(authority=Refusal())
    assert broker.journals[LOG].content == b""


async def test_an_author_overtaken_between_claim_and_handoff_does_not_take_over(owners: Owners) -> None:
    class Overtaken(MemoryAuthority):
        async def claim(self, author: Author) -> None:
            await super().claim(author)
            await super().claim(Author(author + 1))

    with pytest.raises(Fenced, match="not its owner"):
        await owners.recover(author=Author(7), authority=Overtaken())


async def test_a_takeover_while_another_player_starts_is_not_a_loss(owners: Owners) -> None:
    class Raced(MemoryAuthority):
        queries = 0

        async def current(self) -> Ownership | None:
            self.queries += 1
            if self.queries == 1:
                await owners.recover(author=Author(7), authority=self)
            return await super().current()

    authority = Raced()
    recovery = await owners.recover(author=Author(8), authority=authority)
    assert authority.ownership is not None
    assert (authority.ownership.author, authority.ownership.handoff) == (8, recovery.handoff)


async def test_a_log_that_lost_its_last_takeover_is_not_played(
    broker: FakeBroker, owners: Owners, client: JournalClient
) -> None:
    authority = MemoryAuthority()
    journal = broker.journals[LOG]
    first = await owners.take_over(authority=authority)
    put(first, "a", b"x")
    hints = await first.recorder.hints()
    kept = journal.head
    await owners.recover(hints, authority=authority)
    del journal.spool[kept:]
    with pytest.raises(CorruptData, match="content is lost"):
        await owners.recover(hints, authority=authority)
    await broker.write(LOG, b"z" * 500 + encode_frame(RecordedOperation(1, 0, Author(9)).to_payload()))
    with pytest.raises(CorruptData, match="something else now"):
        await owners.recover(hints, authority=authority)
    # Without an authority, a player accepts the present content.
    assert set((await owners.peek(hints)).fsm.paths) == {"/a"}


async def test_hints_beyond_the_last_takeover_are_played(owners: Owners, content_of: ContentOf) -> None:
    authority = MemoryAuthority()
    first = await owners.take_over(authority=authority)
    put(first, "a", b"x")
    second = await owners.take_over(authority=authority)
    second.remove("a")
    put(second, "b", b"y")
    hints = await second.recorder.hints()
    third = await owners.take_over(hints, authority=authority)
    assert content_of(third.recorder.directory) == {"b": b"y"}
    put(third, "c", b"z")
    fourth = await owners.take_over(await third.recorder.hints(), authority=authority)
    assert content_of(fourth.recorder.directory) == {"b": b"y", "c": b"z"}
