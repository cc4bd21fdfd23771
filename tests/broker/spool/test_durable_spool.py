"""Durable spools: files after any event, recovery, and visible content."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import structlog.testing

from coranto import labels
from coranto.errors import InvalidInput
from coranto.fragments.fragment import ZERO_SUM, Codec, Fragment, sum_of
from coranto.wire import protocol_pb2 as pb
from coranto_broker.spool import commit_log, durable_spool
from coranto_broker.spool.durable_spool import DurableSpool, Fsync, SpoolFolder, folder_of
from coranto_broker.spool.flush import DiskFailed, Flusher
from coranto_broker.spool.in_sync import UNSTAMPED, Stamp
from coranto_broker.spool.recovery import recover
from coranto_broker.spool.spool import ProposalEffect, empty_at
from tests.broker.running import FaultyDisk, ManualClock
from tests.broker.spool.conftest import JOURNAL, MINE, Observer, append, content_of, names, roll

NONE = pb.LabelSet()


# ----------------------------------------------------------------------------------------------------- while it runs


def test_a_journal_that_was_never_written_leaves_no_files(spool: DurableSpool, folder: SpoolFolder) -> None:
    roll(spool)
    roll(spool, codec=Codec.SNAPPY)
    assert names(folder) == []
    assert spool.fragment.codec is Codec.SNAPPY


def test_committing_in_one_step_has_the_same_result(tmp_path: Path) -> None:
    left: list[list[bytes]] = []
    for in_one_go in (True, False):
        observer = Observer()
        folder = SpoolFolder(folder_of(tmp_path / str(in_one_go), JOURNAL, 7), JOURNAL, 7, FaultyDisk(), ManualClock())
        spool = DurableSpool(folder, observer, Fsync.NEVER)
        for number, registers in enumerate((NONE, MINE, MINE)):
            content = b"%d" % number * 100
            if in_one_go:
                fragment = spool.commit(content, registers, 5)
            else:
                spool.write(0, content)
                fragment = spool.next_fragment()
                spool.propose(fragment, registers, primary=True, revision=5)
            assert (spool.fragment, spool.registers, spool.stamp) == (fragment, registers, Stamp(5, 5))
        assert observer.visible == []
        spool.close()
        left.append([folder.disk.read(folder.path / name) for name in names(folder)])
    assert left[0] == left[1]


async def test_a_spool_that_begins_to_sync_commits_records_earlier_acknowledgements(folder: SpoolFolder) -> None:
    spool = DurableSpool(folder, Observer(), Fsync.NEVER)
    append(spool, b"acknowledged without the disk")
    before = spool.end
    spool.set_fsync(Fsync.COMMIT)
    append(spool, b"waits for the disk")
    (log,) = (name for name in names(folder) if name.endswith(".commits"))
    *_, last = commit_log.scan(folder.disk.read(folder.path / log))
    assert isinstance(last, commit_log.CommitRecord)
    assert (last.awaits_flush, last.promised) == (True, before), "it counts as lost if power loss takes it"
    assert not spool.is_on_disk(spool.version)
    await spool.flush_commits()
    assert spool.is_on_disk(spool.version)
    spool.set_fsync(Fsync.NEVER)
    append(spool, b"no more")
    assert not spool.is_on_disk(spool.version)


def test_the_log_is_synced_before_content_that_is_sent_with_its_proposal(folder: SpoolFolder, disk: FaultyDisk) -> None:
    # Otherwise power loss may leave content without a log, as if acknowledged content were lost.
    spool = DurableSpool(folder, Observer(), Fsync.NEVER)
    spool.propose(spool.fragment, NONE, primary=False, revision=5)
    spool.set_fsync(Fsync.COMMIT)
    assert disk.syncs == []
    proposal = Fragment(JOURNAL, 0, 5, sum_of(b"first"), Codec.NONE)
    assert not spool.commit_proposed(b"first", proposal.to_wire(), 5)
    spool.write(0, b"first")
    (log,) = (name for name in names(folder) if name.endswith(".commits"))
    assert log in disk.syncs
    assert spool.propose(proposal, NONE, primary=False, revision=5).effect is ProposalEffect.COMMIT
    more = replace(proposal, end=9, sum=sum_of(b"firstmore"))
    assert spool.commit_proposed(b"more", more.to_wire(), 5)


async def test_forcing_includes_completed_fragments(spool: DurableSpool, observer: Observer, disk: FaultyDisk) -> None:
    append(spool, b"completed")
    roll(spool)
    append(spool, b"growing")
    (sealed,) = observer.sealed
    disk.syncs.clear()
    await spool.force(sealed.content, sealed.log)
    assert {sealed.content.path.name, sealed.log.path.name, spool.content_file.path.name} <= set(disk.syncs)
    disk.syncs.clear()
    await spool.force()
    assert disk.syncs == [], "all of it is synced"


@pytest.mark.parametrize("fsync", Fsync)
async def test_a_commit_is_on_the_disk_only_with_the_fragment_that_completed_since(
    fsync: Fsync, folder: SpoolFolder, observer: Observer, disk: FaultyDisk
) -> None:
    spool = DurableSpool(folder, observer, fsync)
    append(spool, b"completed")
    version = spool.version
    roll(spool)
    assert spool.is_on_disk(version) == (fsync is Fsync.COMMIT)
    await spool.flush()
    (sealed,) = observer.sealed
    assert spool.is_on_disk(version)
    assert {sealed.content.path.name, sealed.log.path.name} <= set(disk.syncs)


async def test_a_spool_that_is_never_flushed_forgets_stored_fragments(
    folder: SpoolFolder, observer: Observer, disk: FaultyDisk
) -> None:
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    for number in range(20):
        append(spool, b"%d" % number)
        roll(spool)
        for file in (observer.sealed[-1].content, observer.sealed[-1].log):
            file.discard()
    assert len(spool._flusher._retired) <= 2
    await spool.flush()
    assert not spool._flusher._retired
    assert not any(each.content.path.name in disk.syncs for each in observer.sealed)


@pytest.mark.parametrize("full", [".content", ".commits"])
def test_a_failed_commit_in_one_step_leaves_the_spool_unchanged(
    full: str, spool: DurableSpool, disk: FaultyDisk
) -> None:
    append(spool, b"some")
    before, stamp = spool.committed, spool.stamp
    disk.full = full
    with pytest.raises(OSError, match="no space left"):
        spool.commit(b"more", MINE, 9)
    assert (spool.committed, spool.stamp, spool.delta) == (before, stamp, 0)
    disk.full = None
    assert spool.commit(b"else", MINE, 9).sum == sum_of(b"someelse")


def test_content_sent_with_its_proposal_commits_as_in_two_steps(tmp_path: Path) -> None:
    left: list[list[bytes]] = []
    seen: list[Observer] = []
    for in_one_go in (True, False):
        observer = Observer()
        folder = SpoolFolder(folder_of(tmp_path / str(in_one_go), JOURNAL, 7), JOURNAL, 7, FaultyDisk(), ManualClock())
        spool = DurableSpool(folder, observer, Fsync.NEVER)
        append(spool, b"begun", MINE)
        whole = b"begun"
        for number in range(3):
            content = b"%d" % number * 100
            whole += content
            proposal = Fragment(JOURNAL, 0, len(whole), sum_of(whole), Codec.NONE)
            if in_one_go:
                assert spool.commit_proposed(content, proposal.to_wire(), 5 + number)
            else:
                spool.write(0, content)
                assert spool.propose(proposal, MINE, primary=False, revision=5 + number).effect is ProposalEffect.COMMIT
            assert (spool.fragment, spool.registers, spool.delta) == (proposal, MINE, 0)
            assert spool.stamp == Stamp(5 + number, 5 + number)
        assert recover(folder).spool.fragment == spool.fragment
        left.append([folder.disk.read(folder.path / name) for name in names(folder)])
        seen.append(observer)
        spool.publish_through(spool.end)
    assert left[0] == left[1]
    assert seen[0] == seen[1]
    assert seen[0].ahead == seen[0].readable == 305


def test_a_proposal_with_content_that_does_not_continue_the_spool_changes_nothing(
    spool: DurableSpool, folder: SpoolFolder, observer: Observer
) -> None:
    append(spool, b"begun", MINE)
    before = spool.committed, spool.stamp, spool.delta, observer.ahead
    files = [folder.disk.read(folder.path / name) for name in names(folder)]
    right = Fragment(JOURNAL, 0, 9, sum_of(b"begunmore"), Codec.NONE)
    others = [
        replace(right, sum=sum_of(b"begunless")),
        replace(right, end=10),
        replace(right, end=8),
        replace(right, begin=1),
        replace(right, begin=5, sum=sum_of(b"more")),
        replace(right, journal="a/nother"),
        replace(right, codec=Codec.GZIP),
        replace(right, sum=ZERO_SUM),
    ]
    for other in others:
        assert not spool.commit_proposed(b"more", other.to_wire(), 9), other
        assert (spool.committed, spool.stamp, spool.delta, observer.ahead) == before
        assert [folder.disk.read(folder.path / name) for name in names(folder)] == files
    spool.write(0, b"x")
    assert not spool.commit_proposed(b"more", right.to_wire(), 9), "it has content that is not committed"
    spool.roll_back()
    assert spool.commit_proposed(b"more", right.to_wire(), 9)
    assert spool.committed.fragment == right


@pytest.mark.parametrize("full", [".content", ".commits"])
def test_a_full_disk_for_proposed_content_leaves_the_spool_unchanged(
    full: str, spool: DurableSpool, folder: SpoolFolder, disk: FaultyDisk, observer: Observer
) -> None:
    append(spool, b"some", MINE)
    before, stamp, ahead = spool.committed, spool.stamp, observer.ahead
    disk.full = full
    proposal = Fragment(JOURNAL, 0, 8, sum_of(b"somemore"), Codec.NONE).to_wire()
    with pytest.raises(OSError, match="no space left"):
        spool.commit_proposed(b"more", proposal, 9)
    assert (spool.committed, spool.stamp, spool.delta, observer.ahead) == (before, stamp, 0, ahead)
    disk.full = None
    assert spool.commit_proposed(b"more", proposal, 9)
    assert recover(folder).spool.fragment == spool.fragment


@pytest.mark.parametrize("lacks", [True, False])
def test_content_that_the_primary_lacks_is_stored_immediately(
    lacks: bool, spool: DurableSpool, observer: Observer
) -> None:
    """Only this broker may have it, and readers at others would wait for the delay of replicas."""

    def follow(proposal: Fragment) -> ProposalEffect:
        return spool.propose(proposal, NONE, primary=False).effect

    for content in (b"abc", b"def"):
        spool.write(0, content)
        assert follow(spool.next_fragment()) is ProposalEffect.COMMIT
    shorter = replace(spool.fragment, end=3, sum=sum_of(b"abc"))
    synchronized = follow(shorter if lacks else spool.fragment)
    assert synchronized is (ProposalEffect.MISMATCH if lacks else ProposalEffect.KEEP)
    follow(empty_at(spool.fragment, 6, Codec.GZIP))
    assert observer.urgent == [lacks]

    spool.write(0, b"ghi")
    follow(spool.next_fragment())
    follow(empty_at(spool.fragment, 9, Codec.GZIP))
    assert observer.urgent == [lacks, False]


def test_content_is_visible_only_after_publish(spool: DurableSpool, observer: Observer) -> None:
    spool.write(0, b"abc")
    assert observer.visible == []
    decision = spool.propose(spool.next_fragment(), NONE, primary=True)
    assert decision.effect is ProposalEffect.COMMIT
    assert observer.visible == []
    spool.publish(spool.fragment)
    spool.publish(spool.fragment)
    assert observer.visible == [(0, 3)]


def test_publish_shows_content_only_up_to_the_given_offset(spool: DurableSpool, observer: Observer) -> None:
    append(spool, b"abc")
    first = spool.fragment
    append(spool, b"def")
    spool.publish(first)
    assert observer.visible == [(0, 3)]
    roll(spool)
    spool.publish(first)
    assert observer.visible == [(0, 3)]
    assert [sealed.fragment.end for sealed in observer.sealed] == [6]


def test_a_roll_seals_the_content(spool: DurableSpool, folder: SpoolFolder, observer: Observer) -> None:
    append(spool, b"abcdef", MINE)
    spool.write(0, b"never committed")
    roll(spool)
    (sealed,) = observer.sealed
    assert content_of(sealed) == b"abcdef"
    assert (sealed.fragment.begin, sealed.fragment.end, sealed.registers) == (0, 6, MINE)
    assert sealed.fragment.sum == sum_of(b"abcdef")
    append(spool, b"ghi")
    with sealed.content.borrow() as file:
        sealed.drop()
        assert file.read_at(0, 6) == b"abcdef", "a reader keeps the borrowed content"
    assert [name for name in names(folder) if name.startswith("0" * 16)] == []
    with pytest.raises(FileNotFoundError):
        content_of(sealed)


def test_a_roll_beyond_the_end_is_reported(spool: DurableSpool, folder: SpoolFolder, observer: Observer) -> None:
    append(spool, b"abc")
    roll(spool)
    assert observer.skips == []
    roll(spool, 50)
    append(spool, b"d")
    assert observer.skips == [50]
    spool.close()
    recovered = recover(folder)
    assert (recovered.spool.fragment.begin, recovered.spool.end) == (50, 51)


def test_rolled_back_content_is_overwritten(spool: DurableSpool, folder: SpoolFolder) -> None:
    append(spool, b"abc")
    spool.write(0, b"a long piece of content that will not commit")
    spool.propose(spool.fragment, spool.registers, primary=True)
    append(spool, b"def")
    assert folder.disk.read(spool.content_file.path) == b"abcdef"


def test_a_full_disk_fails_the_write_and_changes_nothing(
    spool: DurableSpool, folder: SpoolFolder, disk: FaultyDisk
) -> None:
    append(spool, b"abc")
    disk.full = "content"
    with pytest.raises(OSError, match="no space left"):
        spool.write(0, b"defghi")
    disk.full = None
    spool.roll_back()
    append(spool, b"xyz")
    assert folder.disk.read(spool.content_file.path) == b"abcxyz"


def test_a_full_disk_fails_the_commit_and_changes_nothing(
    spool: DurableSpool, folder: SpoolFolder, disk: FaultyDisk
) -> None:
    append(spool, b"abc", MINE)
    spool.write(0, b"def")
    disk.full = "commits"
    with pytest.raises(OSError, match="no space left"):
        spool.propose(spool.next_fragment(), labels.label_set(author="you"), primary=True)
    assert (spool.end, spool.registers) == (3, MINE)
    with pytest.raises(OSError, match="no space left"):
        roll(spool)
    disk.full = None
    spool.roll_back()
    append(spool, b"xyz")
    spool.close()
    recovered = recover(folder)
    assert (recovered.spool.end, recovered.spool.fragment.sum) == (6, sum_of(b"abcxyz"))


def test_a_partial_record_of_a_failed_commit_is_overwritten(
    spool: DurableSpool, folder: SpoolFolder, disk: FaultyDisk
) -> None:
    append(spool, b"abc")
    spool.write(0, b"def")
    disk.full, disk.stuck = "commits", True  # Truncating the partial record fails, too.
    with pytest.raises(OSError, match="cannot truncate"):
        spool.propose(spool.next_fragment(), NONE, primary=True)
    spool.roll_back()
    disk.full, disk.stuck = None, False
    append(spool, b"xyz")
    assert recover(folder).spool.fragment.sum == sum_of(b"abcxyz")


def test_content_at_a_wrong_delta_touches_no_file(spool: DurableSpool, folder: SpoolFolder) -> None:
    append(spool, b"abc")
    with pytest.raises(InvalidInput):
        spool.write(5, b"hole")
    assert folder.disk.read(spool.content_file.path) == b"abc"


def test_a_long_commit_log_is_started_over(
    spool: DurableSpool, folder: SpoolFolder, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_spool, "COMPACT_LOG_BYTES", 500)
    for n in range(40):
        append(spool, bytes([n]))
    older, log = sorted(name for name in names(folder) if name.endswith("commits"))  # One replaces the other.
    assert int(log.split(".")[1]) >= 5
    assert len(folder.disk.read(folder.path / log)) + len(folder.disk.read(folder.path / older)) < 2000
    spool.close()
    assert recover(folder).spool.end == 40


async def test_the_commit_policy_syncs_content_and_log_and_shares_flushes(
    folder: SpoolFolder, observer: Observer, disk: FaultyDisk
) -> None:
    spool = DurableSpool(folder, observer, Fsync.COMMIT)
    spool.propose(spool.fragment, NONE, primary=True, revision=10)
    await spool.flush_commits()
    assert [name.rpartition(".")[2] for name in disk.syncs] == ["commits"]
    assert len(disk.folder_syncs) == 5, "the folder is new, and those above it may be"
    disk.folder_syncs.clear()
    append(spool, b"abc")
    assert len(disk.syncs) == 1
    await asyncio.gather(*(spool.flush_commits() for _ in range(10)))
    assert sorted(name.rpartition(".")[2] for name in disk.syncs[1:]) == ["commits", "content"]
    assert disk.folder_syncs == ["7"], "the content is new"
    await spool.flush_commits()
    assert len(disk.syncs) == 3
    append(spool, b"def")
    roll(spool)
    assert len(disk.syncs) == 5, "a fragment that completes is visible, so it is forced to the disk"


async def test_a_flush_requested_in_the_turn_when_another_ended_begins_a_new_one(
    folder: SpoolFolder, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second task runs between the end of the first flush and the callbacks of its task."""
    later: list[asyncio.Task[None]] = []
    awaited: list[asyncio.Future[None]] = []
    flush, shield = Flusher.flush, asyncio.shield

    async def flush_and_ask(flusher: Flusher) -> None:
        await flush(flusher)
        if not later:
            append(spool, b"def")
            later.append(asyncio.create_task(spool.flush_commits()))

    def counting(flushing: asyncio.Future[None]) -> asyncio.Future[None]:
        awaited.append(flushing)
        assert len(awaited) < 100, "the loop awaits a flush that has ended, and never suspends"
        return shield(flushing)

    monkeypatch.setattr(Flusher, "flush", flush_and_ask)
    monkeypatch.setattr(asyncio, "shield", counting)
    spool = DurableSpool(folder, observer, Fsync.COMMIT)
    append(spool, b"abc")
    await spool.flush_commits()
    await later[0]
    assert len(awaited) == 2
    spool.close()
    assert recover(folder).spool.end == 6


async def test_a_commit_takes_two_syncs_and_a_new_fragment_one_of_its_folder(
    folder: SpoolFolder, observer: Observer, disk: FaultyDisk
) -> None:
    spool = DurableSpool(folder, observer, Fsync.COMMIT)
    append(spool, b"abc")
    await spool.flush_commits()
    disk.syncs.clear()
    disk.folder_syncs.clear()
    for _ in range(20):
        append(spool, b"abc")
        await spool.flush_commits()
    assert (len(disk.syncs), disk.folder_syncs) == (40, [])
    roll(spool)
    await spool.flush_commits()
    append(spool, b"abc")
    await spool.flush_commits()
    assert disk.folder_syncs == ["7", "7"], "one for the log, one for the content"


async def test_the_interval_policy_syncs_on_request(folder: SpoolFolder, observer: Observer, disk: FaultyDisk) -> None:
    spool = DurableSpool(folder, observer, Fsync.INTERVAL)
    append(spool, b"abc")
    roll(spool)
    append(spool, b"def")
    await spool.flush_commits()
    assert disk.syncs == []
    await spool.flush()
    assert sorted({name[:16] for name in disk.syncs}) == ["0" * 16, "0" * 15 + "3"]
    await spool.flush()
    assert len(disk.syncs) == 4


async def test_content_that_was_set_aside_is_not_synced(folder: SpoolFolder, observer: Observer) -> None:
    spool = DurableSpool(folder, observer, Fsync.INTERVAL)
    append(spool, b"abc")
    roll(spool)
    (sealed,) = observer.sealed
    sealed.quarantine_content()
    await spool.flush()
    fetched = sealed.content.sibling("fetched")
    fetched.write_at(0, b"abc")
    sealed.content.replace_with(fetched)
    assert sealed.content.path.read_bytes() == sealed.content.read_at(0, 3) == b"abc"


# ----------------------------------------------------------------------------------------------- a disk that fails


@pytest.mark.parametrize("failing", [".content", ".commits"])
async def test_nothing_is_acknowledged_after_a_failed_sync(
    folder: SpoolFolder, observer: Observer, disk: FaultyDisk, failing: str
) -> None:
    spool = DurableSpool(folder, observer, Fsync.COMMIT)
    failures: list[None] = []
    spool.on_failure = lambda: failures.append(None)
    append(spool, b"abc")
    await spool.flush_commits()
    append(spool, b"def")
    disk.failing = failing
    with structlog.testing.capture_logs() as logs, pytest.raises(OSError, match="cannot write"):
        await spool.flush_commits()
    disk.failing = None
    assert [entry["log_level"] for entry in logs] == ["error"]
    assert failures == [None]
    for flush in (spool.flush_commits, spool.flush):
        with pytest.raises(DiskFailed, match="the disk failed to keep"):
            await flush()
    refusals: list[Callable[[], object]] = [
        lambda: spool.write(0, b"ghi"),
        lambda: spool.commit(b"ghi", NONE, 1),
        lambda: spool.propose(spool.fragment, NONE, primary=True, revision=11),
    ]
    for refused in refusals:
        with pytest.raises(DiskFailed, match="the disk failed to keep"):
            refused()
    spool.close()
    before = {name: folder.disk.read(folder.path / name) for name in names(folder)}
    assert durable_spool.DISTRUSTED_FILE in before

    # Reads may return content that is only in memory: it is written again, to other files.
    disk.syncs.clear()
    recovered = recover(folder)
    assert (recovered.spool.end, recovered.lost_end) == (6, 0)
    assert disk.syncs == [f"{0:016x}.content.partial", f"{0:016x}.1.commits.partial"]
    assert names(folder) == [f"{0:016x}.1.commits", f"{0:016x}.content"]
    disk.syncs.clear()
    assert recover(folder).spool.end == 6
    assert disk.syncs == [], "it is trusted again"


async def test_a_failed_interval_sync_loses_no_content(
    folder: SpoolFolder, observer: Observer, disk: FaultyDisk
) -> None:
    spool = DurableSpool(folder, observer, Fsync.INTERVAL)
    append(spool, b"abc")
    disk.failing = ".content"
    with pytest.raises(OSError, match="cannot write"):
        await spool.flush()
    with pytest.raises(OSError, match="cannot write"):
        recover(folder)  # The sync still fails.
    disk.failing = None
    assert recover(folder).spool.end == 3


@pytest.mark.parametrize("policy", list(Fsync))
async def test_content_synced_during_a_roll_is_synced_again(
    folder: SpoolFolder, observer: Observer, disk: FaultyDisk, policy: Fsync
) -> None:
    spool = DurableSpool(folder, observer, policy)
    append(spool, b"abc")
    flushing = asyncio.create_task(spool.flush())
    await asyncio.sleep(0)
    append(spool, b"def")
    roll(spool)
    await flushing
    disk.syncs.clear()
    await spool.flush()
    again = policy is not Fsync.COMMIT  # COMMIT has synced it immediately. Otherwise a later flush includes it.
    assert (f"{0:016x}.content" in disk.syncs) == again


def test_rolls_on_a_full_disk_leak_no_descriptors(
    spool: DurableSpool, folder: SpoolFolder, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(spool, b"abc")
    disk.full = ".commits"
    before = (len(os.listdir("/proc/self/fd")), names(folder))
    for _ in range(50):
        with pytest.raises(OSError, match="no space"):
            roll(spool)
    monkeypatch.setattr(durable_spool, "COMPACT_LOG_BYTES", 1)
    for _ in range(50):
        with pytest.raises(OSError, match="no space"):
            append(spool, b"def")
        spool.roll_back()
    assert (len(os.listdir("/proc/self/fd")), names(folder)) == before
    disk.full = None
    append(spool, b"def")
    assert recover(folder).spool.end == 6


def test_a_first_log_that_a_full_disk_refused_is_created_again(
    spool: DurableSpool, folder: SpoolFolder, disk: FaultyDisk
) -> None:
    disk.full = ".commits"
    with pytest.raises(OSError, match="no space"):
        spool.write(0, b"abc")
    disk.full = None
    assert names(folder) == []
    spool.write(0, b"abc")  # At a kill here, the content has a log with a whole record.
    assert (recover(folder).lost_end, names(folder)) == (0, [f"{0:016x}.0.commits", f"{0:016x}.content"])


def test_similar_names_have_separate_folders(tmp_path: Path) -> None:
    assert folder_of(tmp_path, "a/bcd", 1) != folder_of(tmp_path, "a_bcd", 1)
    assert len(folder_of(tmp_path, "x" * 512, 1).parent.name) < 100


# --------------------------------------------------------------------------------------------------- followed pipelines


def test_a_spool_remembers_the_pipelines_that_it_followed(spool: DurableSpool, folder: SpoolFolder) -> None:
    spool.propose(empty_at(spool.fragment, 0, Codec.GZIP), NONE, primary=False, revision=10)
    assert recover(folder).stamp == Stamp(10, 0), "also before it has any content"
    spool.write(0, b"abc")
    spool.propose(spool.next_fragment(), NONE, primary=False, revision=10)
    assert recover(folder).stamp == Stamp(10, 10)
    spool.propose(spool.fragment, NONE, primary=False, revision=20)
    assert recover(folder).stamp == Stamp(20, 10)
    before = len(folder.disk.read(folder.path / names(folder)[0]))
    spool.propose(spool.fragment, NONE, primary=False, revision=20)
    assert len(folder.disk.read(folder.path / names(folder)[0])) == before, "an idle journal does not fill the disk"


def test_a_refused_proposal_leaves_no_stamp(spool: DurableSpool, folder: SpoolFolder) -> None:
    append(spool, b"abc")
    other = Fragment(JOURNAL, 0, 2, sum_of(b"xy"), Codec.NONE)
    assert spool.propose(other, NONE, primary=False, revision=10).effect is ProposalEffect.MISMATCH
    assert spool.stamp == recover(folder).stamp == UNSTAMPED


def test_a_full_disk_leaves_no_stamp(spool: DurableSpool, folder: SpoolFolder, disk: FaultyDisk) -> None:
    append(spool, b"abc")
    disk.full = ".commits"
    with pytest.raises(OSError, match="no space"):
        spool.propose(spool.fragment, NONE, primary=False, revision=10)
    assert spool.stamp == UNSTAMPED
    disk.full = None
    spool.propose(spool.fragment, NONE, primary=False, revision=10)
    assert recover(folder).stamp == Stamp(10, 0)


async def test_the_commit_policy_syncs_stamps(folder: SpoolFolder, observer: Observer, disk: FaultyDisk) -> None:
    spool = DurableSpool(folder, observer, Fsync.COMMIT)
    spool.propose(spool.fragment, NONE, primary=False, revision=10)
    await spool.flush_commits()
    assert len(disk.syncs) == 1


def test_a_completed_fragment_is_settled_once_content_follows(spool: DurableSpool, observer: Observer) -> None:
    append(spool, b"abc")
    roll(spool)
    (first,) = observer.sealed
    assert not first.settled
    spool.write(0, b"def")
    assert not first.settled
    spool.propose(spool.next_fragment(), NONE, primary=False)
    assert first.settled
    spool.propose(empty_at(spool.fragment, 6, Codec.GZIP), NONE, primary=False, settled=True)
    assert observer.sealed[1].settled


# --------------------------------------------------------------------------------------- large content, deferred writes

LARGE = durable_spool.DEFERRED_BYTES


async def test_large_content_is_written_in_order_and_hashed(spool: DurableSpool, folder: SpoolFolder) -> None:
    rng = random.Random(1)
    chunks = [rng.randbytes(size) for size in (3, LARGE, 5, LARGE + 1, 3 * LARGE, 7)]
    whole = hashlib.sha1(usedforsecurity=False)
    for chunk in chunks:
        spool.write(spool.delta, memoryview(chunk))
        spool.hash(whole, chunk)
        await spool.wait_for_capacity()
    await spool.written()
    content = b"".join(chunks)
    proposal = spool.next_fragment()
    assert proposal.sum == sum_of(content)
    assert whole.digest() == hashlib.sha1(content).digest()
    assert spool.propose(proposal, NONE, primary=True).effect is ProposalEffect.COMMIT
    assert recover(folder).durable(folder, Observer(), Fsync.NEVER).fragment == proposal


async def test_large_content_that_was_rolled_back_is_not_written_later(
    spool: DurableSpool, folder: SpoolFolder
) -> None:
    append(spool, b"first,")
    for turn in range(20):
        for _ in range(4):
            spool.write(spool.delta, b"x" * LARGE)
        if turn % 2:
            spool.roll_back()
        else:
            assert spool.propose(spool.fragment, spool.registers, primary=True).effect is ProposalEffect.ROLL_BACK
        assert folder.disk.read(spool.content_file.path) == b"first,"
        assert spool.delta == 0
    append(spool, b"second")
    assert folder.disk.read(spool.content_file.path) == b"first,second"
    assert spool.fragment.sum == sum_of(b"first,second")


@pytest.mark.parametrize("when", ["written", "next", "proposal"])
async def test_a_full_disk_for_large_content_keeps_committed_content(
    spool: DurableSpool, folder: SpoolFolder, disk: FaultyDisk, when: str
) -> None:
    append(spool, b"first,")
    disk.full = "content"
    spool.write(spool.delta, b"x" * LARGE)

    async def more() -> None:
        while True:
            spool.write(spool.delta, b"x" * LARGE)
            await spool.wait_for_capacity()
            await asyncio.sleep(0)

    async def proposal() -> None:
        spool.propose(spool.fragment, spool.registers, primary=True)

    steps = {"written": spool.written, "next": more, "proposal": proposal}
    with pytest.raises(OSError, match="no space"):
        await steps[when]()
    assert spool.delta == 0
    disk.full = None
    assert folder.disk.read(spool.content_file.path) == b"first,"
    append(spool, b"second")
    assert folder.disk.read(spool.content_file.path) == b"first,second"
    assert spool.fragment.sum == sum_of(b"first,second")
