"""Recovery of spools: after kills, torn records, lost content and damage."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import structlog.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from coranto import labels
from coranto.fragments.fragment import Codec, sum_of
from coranto_broker.spool.durable_spool import DurableSpool, Fsync, SpoolFolder, folder_of
from coranto_broker.spool.in_sync import UNSTAMPED
from coranto_broker.spool.recovery import Recovered, recover
from tests.broker.running import FaultyDisk, ManualClock
from tests.broker.spool.conftest import JOURNAL, MINE, Observer, append, content_of, names, roll
from tests.sampling import examples

# -------------------------------------------------------------------------------------------------------- recovery


def test_nothing_recovers_to_an_empty_spool(folder: SpoolFolder) -> None:
    recovered = recover(folder)
    assert recovered == Recovered(recovered.spool, watermark=recovered.watermark)
    assert recovered.watermark.offset == 0
    assert (recovered.spool.end, len(recovered.spool.registers.labels)) == (0, 0)
    assert names(folder) == []


def test_a_killed_spool_is_recovered(folder: SpoolFolder, observer: Observer) -> None:
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    roll(spool, codec=Codec.SNAPPY)
    append(spool, b"abc", MINE)
    append(spool, b"def")
    committed = spool.committed
    spool.write(0, b"uncommitted tail")

    with structlog.testing.capture_logs() as logs:
        recovered = recover(folder)
    assert not logs
    assert recovered.spool.committed == committed
    assert recovered.sealed == []
    assert folder.disk.read(spool.content_file.path) == b"abcdef"

    again = recovered.durable(folder, observer, Fsync.NEVER)
    append(again, b"ghi")
    assert again.fragment.sum == sum_of(b"abcdefghi")
    assert recover(folder).spool.end == 9


def test_completed_fragments_and_registers_are_recovered(folder: SpoolFolder, observer: Observer) -> None:
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    append(spool, b"abc", MINE)
    roll(spool)
    append(spool, b"def")
    roll(spool)
    recovered = recover(folder)
    assert (recovered.spool.end, recovered.spool.registers, recovered.spool.fragment.length) == (6, MINE, 0)
    assert [content_of(sealed) for sealed in recovered.sealed] == [b"abc", b"def"]
    for sealed in recovered.sealed:
        sealed.drop()
    recovered = recover(folder)
    assert (recovered.spool.end, recovered.spool.registers, recovered.sealed) == (6, MINE, [])


def test_no_restart_shows_a_completed_fragment_that_others_may_lack(folder: SpoolFolder, observer: Observer) -> None:
    # Found by simulation: after its second restart, a broker showed content that it had not yet shown before its exit.
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    append(spool, b"abc")
    spool.publish(spool.fragment)
    append(spool, b"def")  # No other replica has acknowledged it.
    roll(spool)
    spool.close()
    for revision in (5, 6):
        recovered = recover(folder)
        assert ([content_of(sealed) for sealed in recovered.sealed], recovered.readable) == ([b"abcdef"], 3)
        spool = recovered.durable(folder, observer, Fsync.NEVER)
        spool.propose(spool.fragment, spool.registers, primary=True, revision=revision)
        spool.close()


def test_a_rewritten_log_that_was_cut_short_does_not_replace_the_older_one(
    folder: SpoolFolder, observer: Observer, disk: FaultyDisk
) -> None:
    # Found by simulation: a process was killed while it rewrote the log after a failed sync. The next one found only an
    # earlier stamp, and removed itself from the in-sync record as if it had lost content.
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    append(spool, b"abc", MINE)
    roll(spool)
    for revision in (5, 6, 7):
        spool.propose(spool.fragment, spool.registers, primary=True, revision=revision)
    spool.close()
    disk.full, disk.stuck = "0000000000000003.1.commits", True
    with pytest.raises(OSError, match=r"no space|cannot truncate"):
        recover(folder, distrusted=True)
    disk.full, disk.stuck = None, False
    recovered = recover(folder, distrusted=True)
    assert (recovered.spool.end, recovered.stamp.synced, recovered.lost_end) == (3, 7, 0)


@pytest.mark.parametrize("distrusted", [False, True])
def test_a_fragment_whose_damaged_content_was_set_aside_is_not_lost(
    folder: SpoolFolder, observer: Observer, distrusted: bool
) -> None:
    # Found by simulation: a broker that had it at start, but not since its restart, waited for an operator.
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    append(spool, b"abc", MINE)
    roll(spool)
    append(spool, b"def")
    roll(spool)
    damaged = observer.sealed[-1]
    damaged.quarantine_content()
    spool.close()
    with structlog.testing.capture_logs() as logs:
        recovered = recover(folder, distrusted=distrusted)
    assert not logs
    assert (recovered.spool.end, recovered.spool.registers, recovered.lost_end) == (6, MINE, 0)
    first, second = recovered.sealed
    assert (first.content.is_quarantined, content_of(first)) == (False, b"abc")
    assert (second.content.is_quarantined, second.fragment) == (True, damaged.fragment)
    fetched = second.content.sibling("fetched")
    fetched.write_at(0, b"def")
    second.content.replace_with(fetched)
    assert [content_of(each) for each in recover(folder).sealed] == [b"abc", b"def"]


def test_missing_content_is_lost(folder: SpoolFolder, observer: Observer) -> None:
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    append(spool, b"abc", MINE)
    roll(spool)
    (sealed,) = observer.sealed
    sealed.quarantine_content()
    for each in (folder.path / "set-aside").iterdir():
        each.unlink()
    recovered = recover(folder)
    assert (recovered.spool.end, recovered.lost_end, recovered.sealed) == (0, 3, [])


def test_the_journal_continues_after_a_last_fragment_that_was_set_aside(
    folder: SpoolFolder, observer: Observer
) -> None:
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    append(spool, b"abc", MINE)
    roll(spool)
    observer.sealed[0].quarantine_content()
    spool.close()
    (folder.path / f"{3:016x}.0.commits").write_bytes(b"torn")
    recovered = recover(folder)
    assert (recovered.spool.fragment.begin, recovered.spool.end, recovered.spool.registers) == (3, 3, MINE)
    assert [each.content.is_quarantined for each in recovered.sealed] == [True]


def test_a_torn_record_is_ignored(folder: SpoolFolder, observer: Observer) -> None:
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    append(spool, b"abc", MINE)
    log = folder.path / f"{0:016x}.0.commits"
    whole = folder.disk.read(log)
    append(spool, b"def", labels.label_set(author="you"))
    log.write_bytes(folder.disk.read(log)[:-3])
    recovered = recover(folder)
    assert (recovered.spool.end, recovered.spool.registers) == (3, MINE)
    assert folder.disk.read(log) == whole, "later records go where the torn one was"


@pytest.mark.parametrize("written", [0, 7])
def test_a_kill_within_the_first_commit_of_a_journal_loses_nothing_and_corrupts_nothing(
    folder: SpoolFolder, observer: Observer, written: int
) -> None:
    # Found by simulation: such a spool was set aside, and the journal waited for an operator.
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    spool.write(0, b"content")
    log = folder.log(0, 0)
    before = log.size()
    spool.propose(spool.next_fragment(), MINE, primary=True)
    log = folder.log(0, 0)
    log.truncate(before + written)
    recovered = recover(folder)
    assert (recovered.spool.end, recovered.lost_end) == (0, 0)
    assert not (folder.path / "set-aside").exists()


def test_a_torn_roll_never_happened(folder: SpoolFolder, observer: Observer) -> None:
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    append(spool, b"abc", MINE)
    roll(spool)
    log = folder.path / f"{3:016x}.0.commits"
    log.write_bytes(folder.disk.read(log)[:10])
    recovered = recover(folder)
    assert (recovered.spool.fragment.begin, recovered.spool.end, recovered.sealed) == (0, 3, [])
    assert not log.exists()


def test_an_interrupted_drop_is_completed(folder: SpoolFolder, observer: Observer) -> None:
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    append(spool, b"abc")
    roll(spool)
    observer.sealed[0].log.discard()
    recovered = recover(folder)
    assert (recovered.spool.end, recovered.sealed) == (3, [])
    assert not (folder.path / f"{0:016x}.content").exists()


def test_another_create_revision_is_another_spool(tmp_path: Path, folder: SpoolFolder, observer: Observer) -> None:
    append(DurableSpool(folder, observer, Fsync.NEVER), b"abc", MINE)
    later = SpoolFolder(folder_of(tmp_path, JOURNAL, 8), JOURNAL, 8, folder.disk, folder.clock)
    recovered = recover(later)
    assert (recovered.spool.end, len(recovered.spool.registers.labels)) == (0, 0)
    assert recover(folder).spool.end == 3


@pytest.mark.parametrize("damage", ["flip", "cut", "log of another journal", "log is garbage"])
def test_a_corrupt_spool_is_set_aside_and_its_range_remembered(
    folder: SpoolFolder, observer: Observer, damage: str
) -> None:
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    append(spool, b"abc", MINE)
    roll(spool)
    append(spool, b"defgh")
    content = folder.path / f"{3:016x}.content"
    log = folder.path / f"{3:016x}.0.commits"
    if damage == "flip":
        content.write_bytes(b"deXgh")
    elif damage == "cut":
        content.write_bytes(b"defg")
    elif damage == "log is garbage":
        log.write_bytes(b"garbage" * 20)
    else:
        log.write_bytes(folder.disk.read(folder.path / f"{0:016x}.0.commits"))

    with structlog.testing.capture_logs() as logs:
        recovered = recover(folder)
    (entry,) = logs
    assert entry["log_level"] == "error"
    assert JOURNAL in str(entry)
    assert sorted(path.name for path in (folder.path / "set-aside").iterdir()) == [log.name, content.name]
    assert recovered.lost_end == 8
    assert (recovered.spool.end, recovered.spool.registers) == (3, MINE)
    assert [content_of(sealed) for sealed in recovered.sealed] == [b"abc"]
    assert json.loads(folder.disk.read(folder.path / "lost.json")) == {"end": 8}

    # It stays lost over restarts, until the spool has passed it.
    again = recover(folder)
    assert (again.lost_end, again.spool.end) == (8, 3)
    durable = again.durable(folder, observer, Fsync.NEVER)
    roll(durable, 8)
    append(durable, b"i")
    final = recover(folder)
    assert (final.lost_end, final.spool.end, final.spool.registers) == (0, 9, MINE)
    assert not (folder.path / "lost.json").exists()


def test_recovery_returns_to_the_last_commit_with_complete_content(folder: SpoolFolder, observer: Observer) -> None:
    spool = DurableSpool(folder, observer, Fsync.COMMIT)
    for number in range(5):
        append(spool, b"%d" % number * 100, labels.label_set(nr=str(number)))
    spool.propose(spool.fragment, spool.registers, primary=True, revision=10)
    append(spool, b"x" * 100)
    content = folder.path / f"{0:016x}.content"
    content.write_bytes(content.read_bytes()[:350])
    with structlog.testing.capture_logs() as logs:
        recovered = recover(folder)
    assert [entry["log_level"] for entry in logs] == ["warning"], "nothing of it was acknowledged"
    assert (recovered.spool.end, recovered.lost_end) == (300, 0)
    assert (recovered.spool.registers, recovered.stamp) == (labels.label_set(nr="2"), UNSTAMPED)
    assert recovered.spool.fragment.sum == sum_of(b"0" * 100 + b"1" * 100 + b"2" * 100)
    assert content.read_bytes() == b"0" * 100 + b"1" * 100 + b"2" * 100
    durable = recovered.durable(folder, observer, Fsync.COMMIT)
    append(durable, b"y")
    with structlog.testing.capture_logs() as logs:
        assert recover(folder).spool.end == 301
    assert not logs
    assert "set-aside" not in names(folder)


async def test_missing_acknowledged_content_is_detected_under_every_policy(
    tmp_path: Path, observer: Observer, disk: FaultyDisk
) -> None:
    for policy in Fsync:
        folder = SpoolFolder(folder_of(tmp_path / policy, JOURNAL, 7), JOURNAL, 7, disk, ManualClock())
        spool = DurableSpool(folder, observer, policy)
        append(spool, b"abc", MINE)
        await spool.flush_commits()
        append(spool, b"def")
        await spool.flush_commits()
        content = folder.path / f"{0:016x}.content"
        content.write_bytes(b"abcdXf")
        recovered = recover(folder)
        assert (recovered.spool.end, recovered.lost_end, recovered.spool.registers) == (3, 6, MINE), policy
        assert [content_of(sealed) for sealed in recovered.sealed] == [b"abc"], "sound content is kept"
        aside = folder.path / "set-aside"
        assert sorted(path.name for path in aside.iterdir()) == [f"{0:016x}.0.commits", f"{0:016x}.content"]
        assert (aside / content.name).read_bytes() == b"abcdXf"
        assert (recover(folder).lost_end, len(list(aside.iterdir()))) == (6, 2), "it is reported again, not kept again"


def test_an_empty_fragment_behind_a_loss_leaves_no_gap(folder: SpoolFolder, observer: Observer) -> None:
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    append(spool, b"abc")
    append(spool, b"def")
    roll(spool)
    (folder.path / f"{0:016x}.content").write_bytes(b"abc")
    recovered = recover(folder)
    assert (recovered.spool.end, recovered.lost_end) == (3, 6), "readers would wait at 3 otherwise"
    assert (recover(folder).spool.end, recover(folder).lost_end) == (3, 6)


def test_files_that_were_set_aside_are_not_overwritten(folder: SpoolFolder, observer: Observer) -> None:
    kept = []
    for letter in (b"X", b"Y"):
        spool = recover(folder).durable(folder, observer, Fsync.NEVER)
        content = folder.path / f"{spool.fragment.begin:016x}.content"
        if spool.end == 0:
            append(spool, b"abc")
        content.write_bytes(b"ab" + letter)
        (folder.path / "lost.json").unlink(missing_ok=True)
        recover(folder)
        kept = sorted((folder.path / "set-aside").glob("*.content"))
    assert [path.read_bytes() for path in kept] == [b"abX", b"abY"]


def test_a_torn_log_of_the_commit_policy_is_not_a_loss(folder: SpoolFolder, observer: Observer) -> None:
    spool = DurableSpool(folder, observer, Fsync.COMMIT)
    append(spool, b"abc")
    roll(spool)
    append(spool, b"def")
    (folder.path / f"{3:016x}.0.commits").write_bytes(b"")
    recovered = recover(folder)
    assert (recovered.spool.end, recovered.lost_end) == (3, 0), "nothing was acknowledged before the log was synced"


def test_a_corrupt_older_fragment_does_not_stop_the_journal(folder: SpoolFolder, observer: Observer) -> None:
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    append(spool, b"abc")
    roll(spool)
    append(spool, b"def", MINE)
    (folder.path / f"{0:016x}.content").write_bytes(b"aXc")
    recovered = recover(folder)
    assert (recovered.spool.end, recovered.spool.registers, recovered.lost_end) == (6, MINE, 0)
    assert recovered.sealed == []


@settings(deadline=None, max_examples=examples(60))
@given(st.randoms(use_true_random=False), st.lists(st.sampled_from("aaaaarxk"), max_size=30))
def test_a_kill_at_any_moment_loses_no_commit(
    tmp_path_factory: pytest.TempPathFactory, rng: random.Random, events: list[str]
) -> None:
    """Run appends, rolls, aborts and kills in any order, and compare the recovered content with the commits."""
    folder = SpoolFolder(
        folder_of(tmp_path_factory.mktemp("spool"), JOURNAL, 7), JOURNAL, 7, FaultyDisk(), ManualClock()
    )
    observer = Observer()
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    whole = b""
    sealed_content: dict[int, bytes] = {}
    for event in [*events, "k"]:
        if event == "a":
            content = rng.randbytes(rng.randint(1, 50))
            append(spool, content, labels.label_set(end=str(spool.end)))
            whole += content
        elif event == "r":
            roll(spool, codec=rng.choice(list(Codec)))
        elif event == "x":
            spool.write(0, rng.randbytes(10))
            if rng.random() < 0.5:
                spool.roll_back()
            else:
                spool.propose(spool.fragment, spool.registers, primary=False)
        else:
            before = spool.committed
            if rng.random() < 0.5:
                spool.write(spool.delta, b"tail")
            observer = Observer()
            recovered = recover(folder)
            if before.fragment.end:
                assert recovered.spool.committed == before
            else:  # Without content, only the codec may be lost; the next sync proposes it again.
                assert (recovered.spool.end, recovered.spool.registers) == (0, before.registers)
            assert recovered.lost_end == 0
            for sealed in recovered.sealed:
                sealed_content[sealed.fragment.begin] = content_of(sealed)
            spool = recovered.durable(folder, observer, Fsync.NEVER)
    fragment = spool.fragment
    current = spool.content_file.read_at(0, fragment.length) if fragment.length else b""
    pieces = [sealed_content[begin] for begin in sorted(sealed_content)]
    assert b"".join(pieces) + current == whole


def test_recovery_restores_the_settled_offset(folder: SpoolFolder, observer: Observer) -> None:
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    append(spool, b"abc")
    roll(spool)
    (sealed,) = recover(folder).sealed
    assert not sealed.settled, "an empty fragment behind it proves nothing"
    append(spool, b"def")
    roll(spool)
    assert [each.settled for each in recover(folder).sealed] == [True, False]


def test_a_spool_that_others_continued_without_is_set_aside(folder: SpoolFolder, observer: Observer) -> None:
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    append(spool, b"abc")
    roll(spool)
    append(spool, b"def")
    recovered = recover(folder).without_spool(folder)
    assert (recovered.spool.end, recovered.stamp, recovered.log) == (0, UNSTAMPED, None)
    assert [sealed.fragment.end for sealed in recovered.sealed] == [3]
    kept = folder.disk.list(folder.path / "set-aside")
    assert sorted(name.rpartition(".")[2] for name in kept) == ["commits", "content"]
    again = recover(folder)
    assert again.spool.end == 3, "the rest is recovered as before"


def test_an_empty_spool_that_others_continued_without_leaves_no_files(folder: SpoolFolder, observer: Observer) -> None:
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    append(spool, b"abc")
    kept = names(folder)
    roll(spool)
    recovered = recover(folder).without_spool(folder)
    assert [sealed.fragment.end for sealed in recovered.sealed] == [3]
    assert names(folder) == kept
