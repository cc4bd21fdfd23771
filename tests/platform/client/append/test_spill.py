"""Pending appends on disk: they survive the process in order, and losses or damage are errors."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from coranto.client import AppendService, JournalClient
from coranto.client.append.spill import Spill
from coranto.client.config import ClientConfig
from coranto.client.sync import SyncJournalClient
from coranto.errors import CorruptData, DirectoryInUse, InvalidInput, JournalNotFound, SpillFailed
from coranto.testing.fake_broker import Break, CallPoint, FakeBroker, FakeJournal

NAME = "test/journal"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spill"


@pytest.fixture
def spill(folder: Path) -> Iterator[Spill]:
    made = Spill(folder, 10_000, segment_bytes=200)
    yield made
    made.close()


def content_of(spill: Spill) -> list[tuple[str, bytes]]:
    return [(each.journal, spill.read(each)) for each in spill.pending]


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.spill"))


# -- The files ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_after_each_restart_a_spill_has_its_unsettled_content(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("spill")
    wanted: dict[str, list[bytes]] = {"a": [], "b": []}
    spill = Spill(folder, 2_000, segment_bytes=150)
    try:
        for step in range(data.draw(st.integers(1, 40))):
            journal = data.draw(st.sampled_from(["a", "b"]))
            action = data.draw(st.sampled_from(["add", "add", "settle", "restart"]))
            if action == "add":
                content = b"%d:" % step + b"x" * data.draw(st.integers(0, 120))
                if spill.has_capacity(journal, len(content)):
                    spill.add(journal, content)
                    wanted[journal].append(content)
            elif action == "settle":
                mine = [each for each in spill.pending if each.journal == journal]
                count = data.draw(st.integers(0, len(mine)))
                spill.mark_done(journal, mine[:count])
                del wanted[journal][:count]
            else:
                spill.close()
                spill = Spill(folder, 2_000, segment_bytes=150)
            assert {
                name: [spill.read(each) for each in spill.pending if each.journal == name] for name in "ab"
            } == wanted
            assert used(folder) < 2_600
    finally:
        spill.close()


def test_a_stuck_journal_does_not_keep_the_files_of_others(spill: Spill, folder: Path) -> None:
    stuck = spill.add("stuck", b"first")
    for number in range(1_000):
        assert spill.has_capacity("busy", 100)
        spill.mark_done("busy", [spill.add("busy", b"%d" % number * 25)])
    assert spill.read(stuck) == b"first"
    assert used(folder) <= 10_000
    spill.mark_done("stuck", [stuck])
    assert used(folder) == 0


def test_a_torn_record_is_removed_and_logged(folder: Path) -> None:
    for cut in range(1, 40):
        spill = Spill(folder)
        spill.mark_done("a", spill.pending)
        spill.add("a", b"whole")
        spill.add("a", b"cut off here")
        spill.close()
        (path,) = folder.glob("*.spill")
        whole = len(b"whole") + 24
        os.truncate(path, whole + (cut % 34) + 1)
        with capture_logs() as logs:
            spill = Spill(folder)
        assert content_of(spill) == [("a", b"whole")]
        assert [(each["event"], each["offset"]) for each in logs] == [("spill.torn_tail", whole)]
        spill.add("a", b"next")
        spill.close()
        spill = Spill(folder)
        assert content_of(spill) == [("a", b"whole"), ("a", b"next")]
        spill.close()


def test_a_damaged_record_before_others_is_an_error(folder: Path) -> None:
    spill = Spill(folder)
    for number in range(3):
        spill.add("a", b"content %d" % number)
    spill.close()
    (path,) = folder.glob("*.spill")
    data = bytearray(path.read_bytes())
    data[data.index(b"content 1")] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptData, match=rf"{path} has a damaged record at offset 33\. .*Move the folder .* away"):
        Spill(folder)
    with pytest.raises(CorruptData):
        Spill(folder)  # The lock was released.


def test_content_that_changes_on_disk_is_not_appended(spill: Spill, folder: Path) -> None:
    added = spill.add("a", b"content")
    (path,) = folder.glob("*.spill")
    with path.open("r+b") as file:
        file.seek(added.begin)
        file.write(b"C")
    with pytest.raises(CorruptData, match="damaged record"):
        spill.read(added)


def test_a_spill_is_used_by_one_process_at_a_time(spill: Spill, folder: Path) -> None:
    program = f"from pathlib import Path; from coranto.client.append.spill import Spill; Spill(Path({str(folder)!r}))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "DirectoryInUse" in found.stderr
    assert str(os.getpid()) in found.stderr
    with pytest.raises(DirectoryInUse):
        Spill(folder)


def test_a_full_disk_refuses_content_and_keeps_existing_content(folder: Path) -> None:
    """A limit on file sizes simulates a full disk: one write is partial, and the next one fails."""
    program = f"""
import resource, signal
from pathlib import Path
from coranto.client.append.spill import Spill
from coranto.errors import SpillFailed
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
spill = Spill(Path({str(folder)!r}))
spill.add("a", b"one")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for _ in range(2):
    try:
        spill.add("a", b"x" * 2000)
    except SpillFailed as error:
        print(error)
spill.add("a", b"two")
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.count("Free space on its disk") == 2
    spill = Spill(folder)
    assert content_of(spill) == [("a", b"one"), ("a", b"two")]
    spill.close()


def test_a_spill_is_bounded(spill: Spill) -> None:
    while spill.has_capacity("a", 500):
        spill.add("a", b"x" * 500)
    assert len(spill.pending) == 10_000 // 524
    with pytest.raises(InvalidInput, match="do not fit into a spill"):
        spill.has_capacity("a", 20_000)
    with pytest.raises(InvalidInput, match="spill_bytes"):
        Spill(Path("x"), 0)


# -- The service -------------------------------------------------------------------------------------------------------


async def test_content_accepted_before_a_stop_is_appended_first_after_the_restart(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal, folder: Path
) -> None:
    broker.at(CallPoint.APPEND_BEGUN, Break.HANG)
    service = AppendService(client, spill=folder)
    await service.__aenter__()
    for piece in (b"one,", b"two,", b"three,"):
        await service.append(NAME, piece)
    await broker.reached(CallPoint.APPEND_BEGUN)
    await service.close()
    broker.cut()
    assert journal.content == b""
    async with AppendService(client, spill=folder) as again:
        assert again.pending_bytes == len(b"one,two,three,")
        await again.append(NAME, b"four,")
    assert journal.content == b"one,two,three,four,"
    assert used(folder) == 0


async def test_pending_content_on_disk_is_bounded_by_spill_bytes(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal, folder: Path
) -> None:
    broker.at(CallPoint.APPEND_BEGUN, Break.HANG)
    async with AppendService(client, spill=folder, pending_bytes=10, spill_bytes=1_000) as service:
        for _ in range(4):
            await service.append(NAME, b"x" * 200)  # More than the memory limit.
        waiting = asyncio.ensure_future(service.append(NAME, b"y" * 200))
        await broker.reached(CallPoint.APPEND_BEGUN)
        await asyncio.sleep(0)  # With free space, one turn of the loop would be enough.
        assert not waiting.done()
        broker.cut()
        await waiting
    assert journal.content == b"x" * 800 + b"y" * 200


async def test_permanently_failed_content_is_kept_until_its_journal_is_reset(
    client: JournalClient, broker: FakeBroker, folder: Path
) -> None:
    with pytest.raises(JournalNotFound):
        async with AppendService(client, spill=folder) as service:
            await service.append("no/such", b"kept")
    with pytest.raises(JournalNotFound):
        async with AppendService(client, spill=folder) as service:
            await service.flush()
    created = broker.create("no/such")
    async with AppendService(client, spill=folder):
        pass
    assert created.content == b"kept"

    service = AppendService(client, spill=folder)
    async with service:
        done = await service.append("never/there", b"dropped")
        with pytest.raises(JournalNotFound):
            await done
        with pytest.raises(JournalNotFound):
            await (await service.append("never/there", b"refused at once"))
        service.reset("never/there")
    assert used(folder) == 0


async def test_options_that_conflict_with_a_spill_are_refused(client: JournalClient, folder: Path) -> None:
    with pytest.raises(InvalidInput, match="delivers at least once"):
        AppendService(client, spill=folder, retry_unknown=False)
    service = AppendService(client, spill=folder)
    with pytest.raises(InvalidInput, match="by `async with`"):
        await service.append(NAME, b"x")
    async with service:
        with pytest.raises(DirectoryInUse):
            await AppendService(client, spill=folder).__aenter__()


async def test_a_full_disk_is_an_error_of_append(
    client: JournalClient, journal: FakeJournal, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AppendService(client, spill=folder) as service:
        await service.append(NAME, b"one,")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            with pytest.raises(SpillFailed, match="Free space on its disk"):
                await service.append(NAME, b"x" * 1_000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        await service.append(NAME, b"two,")
    assert journal.content == b"one,two,"


PROCESS = """
import sys
from coranto.client.config import ClientConfig
from coranto.client.sync import SyncJournalClient

endpoint, folder = sys.argv[1:]
with SyncJournalClient.of(ClientConfig(endpoint)) as client, client.append_service(spill=folder) as service:
    for number in range(1_000_000):
        service.append("test/journal", b"%d," % number)
        print(number, flush=True)
"""


@pytest.mark.parametrize("is_away", [True, False], ids=["brokers away", "brokers there"])
async def test_a_killed_process_loses_no_accepted_content(
    broker: FakeBroker, journal: FakeJournal, folder: Path, is_away: bool
) -> None:
    if is_away:
        broker.at(CallPoint.APPEND_BEGUN, Break.HANG)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROCESS, broker.endpoint, str(folder), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    accepted = -1
    while accepted < 500:
        accepted = int(await asyncio.wait_for(process.stdout.readline(), 60))
    process.kill()
    rest = (await process.stdout.read()).split(b"\n")
    await process.wait()
    accepted = max([accepted, *(int(line) for line in rest[:-1])])  # The last line may be cut off.
    broker.cut()
    before = journal.content.count(b",")

    def append_the_rest() -> None:
        with SyncJournalClient.of(ClientConfig(broker.endpoint)) as client, client.append_service(spill=folder):
            pass

    await asyncio.to_thread(append_the_rest)
    numbers = [int(each) for each in journal.content.split(b",")[:-1]]
    first_seen = list(dict.fromkeys(numbers))
    assert first_seen == list(range(len(first_seen))), "all in order"
    assert len(first_seen) > accepted
    repeated = numbers[before:][: len(numbers) - len(first_seen)]
    assert repeated == sorted(repeated), "content is repeated in order"
    assert used(folder) == 0
