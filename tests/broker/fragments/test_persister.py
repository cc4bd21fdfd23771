"""The persister: stored fragments, retries, and its end."""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coranto.effects import LocalDisk
from coranto.errors import CorruptSpool, StoreDenied, StoreError
from coranto.fragments.codecs import compress, decompress
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.fragments.journal_folders import StoredFile
from coranto.fragments.stores import Content, FragmentStore
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments.backlog import Backlog
from coranto_broker.fragments.persister import FragmentPersister
from coranto_broker.metrics import Metrics
from coranto_broker.spool.durable_spool import Sealed
from coranto_broker.spool.in_sync import Judgement
from coranto_broker.spool.shared_file import SharedFile
from tests.broker.running import ManualClock, eventually

JOURNAL = "a/journal"


class MemoryStore(FragmentStore):
    """Keeps fragments in memory; `failures` are raised first."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.kept: dict[str, bytes] = {}
        self.marked: list[str] = []
        self.failures: list[Exception] = []
        self.attempts = 0
        self.parallel = self.max_parallel = 0
        self.may_continue = asyncio.Event()
        self.may_continue.set()

    async def put(self, fragment: Fragment, content: Content) -> None:
        self.attempts += 1
        self.parallel += 1
        self.max_parallel = max(self.max_parallel, self.parallel)
        try:
            await asyncio.sleep(0)
            await self.may_continue.wait()
            if self.failures:
                raise self.failures.pop(0)
            data = content if isinstance(content, bytes) else b"".join([piece async for piece in content])
            self.kept[fragment.content_path] = data
        finally:
            self.parallel -= 1

    async def size(self, fragment: Fragment) -> int | None:
        data = self.kept.get(fragment.content_path)
        return None if data is None else len(data)

    async def files(self, journal: str) -> AsyncIterator[StoredFile]:
        raise NotImplementedError
        yield

    async def mark(self, journal: str) -> None:
        self.marked.append(journal)

    async def get(self, fragment: Fragment) -> bytes:
        return self.kept[fragment.content_path]

    def sign(self, fragment: Fragment, ttl_seconds: float) -> str:
        raise NotImplementedError

    async def sign_async(self, fragment: Fragment, ttl_seconds: float) -> str:
        raise NotImplementedError

    async def remove(self, fragment: Fragment) -> None:
        raise NotImplementedError

    async def put_note(self, path: str, content: bytes) -> None:
        raise NotImplementedError

    async def get_note(self, path: str) -> bytes:
        raise NotImplementedError

    async def remove_note(self, path: str) -> None:
        raise NotImplementedError


class Stores:
    def __init__(self) -> None:
        self.first, self.second = MemoryStore("file:///first/"), MemoryStore("file:///second/")
        self.file_root = None

    def get(self, url: str) -> FragmentStore:
        return {self.first.url: self.first, self.second.url: self.second}[url]


class Copies:
    """Another broker, which has `content` and answers once it is `free`."""

    def __init__(self) -> None:
        self.content = b""
        self.asked = 0
        self.free = asyncio.Event()
        self.free.set()

    async def fetch(self, fragment: Fragment, target: SharedFile) -> str:
        self.asked += 1
        await self.free.wait()
        target.write_at(0, self.content)
        return "zone#other" if self.content else ""


class Fixture:
    """A persister whose specs and stores the test controls, with short delays."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("REPLICA_DELAY_SECONDS", 0.2), ("_BACKOFF_SECONDS", (0.01,)), ("_LATER_SECONDS", 0.02)):
            monkeypatch.setattr(f"coranto_broker.fragments.persister.{name}", value)
        self.folder = folder
        self.stores = Stores()
        self.spec: pb.JournalSpec | None = pb.JournalSpec(
            name=JOURNAL, fragment=pb.JournalSpec.Fragment(stores=["file:///first/", "file:///second/"])
        )
        self.stored: list[Fragment] = []
        self.copies = Copies()
        self.clock = ManualClock(1_700_000_000.0)
        self.backlog = Backlog(self.clock)
        self.metrics = Metrics()
        self.persister = FragmentPersister(
            lambda journal, create_revision: self.spec,
            self.stores,  # type: ignore[arg-type]
            self.clock,
            self.metrics,
            max_parallel=2,
            judge=self._judge,
            copies=self.copies,
            backlog=self.backlog,
        )
        self.judgement = Judgement.FINAL
        self.judged = 0
        self.diverged: list[Sealed] = []

    async def _judge(self, sealed: Sealed) -> Judgement:
        self.judged += 1
        return self.judgement

    def add(self, content: bytes, begin: int = 0, *, codec: Codec = Codec.GZIP, primary: bool = True) -> Sealed:
        files = [SharedFile(LocalDisk(), self.folder / f"{begin}.{kind}") for kind in ("content", "commits")]
        for file in files:
            file.write_at(0, content)
            file.seal()
        fragment = Fragment(JOURNAL, begin, begin + len(content), sum_of(content), codec)
        sealed = Sealed(fragment, 1_699_000_000.0, pb.LabelSet(), files[0], files[1], 5)
        self.persister.add(
            sealed, lambda _, stored: self.stored.append(stored), primary=primary, on_diverged=self.diverged.append
        )
        return sealed


@pytest.fixture
async def fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fixture]:
    fixture = Fixture(tmp_path, monkeypatch)
    yield fixture
    await fixture.persister.close(0.0)


@pytest.mark.parametrize("size", [1, 5 << 20])
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP, Codec.SNAPPY, Codec.ZSTANDARD])
async def test_a_fragment_is_stored_compressed(fixture: Fixture, codec: Codec, size: int) -> None:
    content = bytes(range(256)) * (size // 256) or b"x"
    sealed = fixture.add(content, codec=codec)
    await eventually(lambda: fixture.stored)
    (stored,) = fixture.stored
    assert (stored.backing_store, stored.mod_time) == ("file:///first/", 1_700_000_000)
    data = fixture.stores.first.kept[sealed.fragment.content_path]
    assert decompress(codec, data, len(content)) == content
    assert sealed.content.path.exists(), "the file stays until a listing shows the fragment"


async def test_a_stored_fragment_is_not_stored_again(fixture: Fixture) -> None:
    fragment = Fragment(JOURNAL, 0, 3, sum_of(b"abc"), Codec.GZIP)
    fixture.stores.first.kept[fragment.content_path] = b"stored by another broker"
    fixture.add(b"abc")
    await eventually(lambda: fixture.stored)
    assert fixture.stores.first.attempts == 0


@pytest.mark.parametrize(("codec", "found"), [(Codec.NONE, b"ab"), (Codec.NONE, b"abcd"), (Codec.GZIP, b"")])
async def test_a_stored_file_that_cannot_be_the_fragment_is_replaced(
    fixture: Fixture, codec: Codec, found: bytes
) -> None:
    fragment = Fragment(JOURNAL, 0, 3, sum_of(b"abc"), codec)
    fixture.stores.first.kept[fragment.content_path] = found
    fixture.add(b"abc", codec=codec)
    await eventually(lambda: fixture.stored)
    assert decompress(codec, fixture.stores.first.kept[fragment.content_path], 3) == b"abc"


async def test_failed_attempts_are_repeated_until_one_succeeds(fixture: Fixture) -> None:
    fixture.stores.first.failures = [StoreError("no answer"), OSError("reset"), StoreDenied("expired")]
    fixture.add(b"abc")
    await eventually(lambda: fixture.stored)
    assert fixture.stores.first.attempts == 4
    assert fixture.stored[0].backing_store == "file:///first/"


async def test_uploads_are_bounded(fixture: Fixture) -> None:
    store = fixture.stores.first
    store.may_continue.clear()
    for n in range(10):
        fixture.add(b"abc", n * 3)
    await eventually(lambda: store.parallel == 2)
    store.may_continue.set()
    await eventually(lambda: len(fixture.stored) == 10)
    assert store.max_parallel == 2


async def test_replicas_delay_their_attempts_unless_they_become_primary(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    fixture.add(b"abc", primary=False)
    await eventually(lambda: fixture.stored)
    assert loop.time() - begun >= 0.2

    monkeypatch.setattr("coranto_broker.fragments.persister.REPLICA_DELAY_SECONDS", 600.0)
    fixture.add(b"def", 3, primary=False)
    await asyncio.sleep(0)
    fixture.persister.wake("another/journal")
    assert fixture.backlog.total == 0, "it is left to the primary"
    fixture.persister.wake(JOURNAL)
    assert fixture.backlog.total == 3
    await eventually(lambda: len(fixture.stored) == 2)


async def test_a_fragment_discarded_during_a_replicas_delay_is_not_a_failure(fixture: Fixture) -> None:
    sealed = fixture.add(b"abc", primary=False)
    await asyncio.sleep(0)
    assert fixture.persister.pending == 1
    sealed.content.discard()  # A listing showed it, and retention removed it before the end of the delay.
    assert fixture.persister.pending == 0
    await eventually(lambda: not fixture.persister._tasks)
    assert (fixture.metrics.persist_failures._value.get(), fixture.stores.first.attempts) == (0, 0)


async def test_a_fragment_that_a_replica_cannot_store_either_counts(fixture: Fixture) -> None:
    fixture.stores.first.failures = [StoreError("down")] * 1_000_000
    sealed = fixture.add(b"abc", primary=False)
    await eventually(lambda: fixture.backlog.holds(JOURNAL))
    problem = fixture.backlog.problem(JOURNAL, "file:///first/")
    assert "down" in problem
    assert fixture.persister.oldest == sealed.first_append_time
    fixture.stores.first.failures = []
    await eventually(lambda: fixture.stored)
    await eventually(lambda: not fixture.persister.pending)
    assert (fixture.backlog.held, fixture.backlog.total, fixture.persister.oldest) == (0, 0, math.inf)


async def test_fragments_of_deleted_journals_stay_until_they_are_set_aside(fixture: Fixture) -> None:
    fixture.spec = None
    sealed = fixture.add(b"abc")
    await eventually(lambda: not fixture.persister.pending)
    assert sealed.content.path.read_bytes() == b"abc"
    assert fixture.stored == []


async def test_journals_without_stores_keep_their_files(fixture: Fixture) -> None:
    fixture.spec = pb.JournalSpec(name=JOURNAL)
    sealed = fixture.add(b"abc")
    await eventually(lambda: not fixture.persister.pending)
    assert sealed.content.path.exists()


async def test_a_damaged_file_is_not_stored(fixture: Fixture) -> None:
    sealed = fixture.add(b"abc")
    sealed.content.path.write_bytes(b"ab")
    await eventually(lambda: fixture.persister._metrics.persist_failures._value.get() >= 2)
    assert fixture.stores.first.kept == {}


def flip(sealed: Sealed, position: int) -> None:
    """Flip one bit of the file on disk."""
    data = bytearray(sealed.content.path.read_bytes())
    data[position] ^= 1
    sealed.content.path.write_bytes(data)


@pytest.mark.parametrize("size", [3, 3 << 20])
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP])
async def test_a_flipped_bit_is_not_stored_and_is_repaired_from_a_replica(
    fixture: Fixture, codec: Codec, size: int
) -> None:
    content = (b"abc" * size)[:size]
    fixture.copies.content = content
    fixture.copies.free.clear()
    fixture.stores.first.failures = [StoreError("down")]
    sealed = fixture.add(content, codec=codec)
    flip(sealed, size - 1)
    with sealed.content.borrow() as reader:
        await eventually(lambda: fixture.copies.asked)
        with pytest.raises(CorruptSpool, match="damaged"):
            reader.read_at(0, 3)  # Open readers read no more of it, too.
        assert fixture.stores.first.kept == {}
        fixture.copies.free.set()
        await eventually(lambda: fixture.stored)
        assert reader.read_at(0, size) == content
    data = fixture.stores.first.kept[sealed.fragment.content_path]
    assert decompress(codec, data, size) == content
    assert sealed.content.path.read_bytes() == content
    (aside,) = (fixture.folder / "set-aside").iterdir()
    assert aside.read_bytes() != content
    assert sorted(path.name for path in fixture.folder.iterdir()) == ["0.commits", "0.content", "set-aside"]
    assert fixture.persister.damaged == 0


async def test_damaged_content_without_another_copy_waits_for_a_stored_one(fixture: Fixture) -> None:
    sealed = fixture.add(b"abc")
    flip(sealed, 0)
    await eventually(lambda: fixture.copies.asked > 2)
    following = fixture.add(b"def", 3)
    asked = fixture.copies.asked
    await eventually(lambda: fixture.copies.asked > asked + 2)
    assert (fixture.persister.damaged, fixture.persister.pending, fixture.stores.first.kept) == (1, 2, {})
    fixture.stores.first.kept[sealed.fragment.content_path] = compress(Codec.GZIP, b"abc")
    await eventually(lambda: len(fixture.stored) == 2)
    assert {stored.begin for stored in fixture.stored} == {0, following.fragment.begin}
    assert sealed.log.path.exists(), "it goes when a listing covers it"
    sealed.drop()
    assert [path.name for path in fixture.folder.iterdir() if path.name.startswith("0")] == []


async def test_fragments_behind_a_damaged_one_wait_for_a_limited_time(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(fixture.add(b"abc"), 0)
    await eventually(lambda: fixture.copies.asked > 2)
    monkeypatch.setattr("coranto_broker.fragments.persister._TURN_SECONDS", 0.01)
    fixture.add(b"def", 3)
    assert fixture.backlog.total == 6
    fixture.clock.advance(301.0)
    await eventually(lambda: fixture.stored)
    assert (fixture.stored[0].begin, fixture.persister.damaged) == (3, 1)
    await eventually(lambda: fixture.persister.pending == 1)
    assert fixture.backlog.total == 0, "appends do not wait for a fragment that no store can repair"
    fixture.copies.content = b"abc"
    await eventually(lambda: len(fixture.stored) == 2)
    assert (fixture.persister.damaged, fixture.backlog.total) == (0, 0)


async def test_a_read_error_of_the_disk_counts_as_damage(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture.copies.content = b"abc"
    failures = [OSError(errno.EIO, "input/output error"), OSError(errno.EMFILE, "too many open files")]
    real = SharedFile.read_at

    def read_at(self: SharedFile, position: int, length: int) -> bytes:
        if failures:
            raise failures.pop()
        return real(self, position, length)

    monkeypatch.setattr(SharedFile, "read_at", read_at)
    fixture.add(b"abc")
    await eventually(lambda: fixture.stored)
    assert fixture.copies.asked == 1, "a temporary error is not damage"


async def test_closing_tries_every_fragment_once_more_and_ends_in_time(fixture: Fixture) -> None:
    fixture.add(b"abc", primary=False)
    assert await fixture.persister.close(60.0) == 0
    assert len(fixture.stored) == 1


async def test_closing_skips_a_store_that_denies_access(fixture: Fixture) -> None:
    fixture.stores.first.failures = [StoreDenied("expired")] * 1000
    fixture.add(b"abc")
    assert await fixture.persister.close(60.0) == 0
    assert fixture.stored[0].backing_store == "file:///second/"


async def test_closing_leaves_unstored_fragments_to_the_next_start(fixture: Fixture) -> None:
    fixture.stores.first.failures = [StoreError("down")] * 1_000_000
    sealed = fixture.add(b"abc")
    assert await fixture.persister.close(0.3) == 1
    assert sealed.content.path.exists()
    assert sealed.log.path.exists()


async def test_closing_does_not_wait_for_fragments_that_others_must_settle(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coranto_broker.fragments.persister._OPEN_SECONDS", 0.05)
    fixture.judgement = Judgement.OPEN
    fixture.add(b"abc")
    fixture.add(b"def", 3)
    await eventually(lambda: fixture.judged)
    async with asyncio.timeout(60):
        assert await fixture.persister.close(600.0) == 2
    assert fixture.stored == []


async def test_closing_waits_for_slow_uploads(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coranto_broker.fragments.persister._OPEN_SECONDS", 0.05)
    fixture.stores.first.failures = [StoreError("no answer")] * 2  # Each attempt is repeated after a delay.
    fixture.add(b"abc")
    assert await fixture.persister.close(60.0) == 0
    assert len(fixture.stored) == 1


async def test_content_that_may_not_be_part_of_the_journal_waits(fixture: Fixture) -> None:
    fixture.judgement = Judgement.OPEN
    sealed = fixture.add(b"abc")
    await eventually(lambda: fixture.judged > 3)
    assert fixture.stores.first.kept == {}
    fixture.judgement = Judgement.FINAL
    await eventually(lambda: fixture.stored)
    assert fixture.stores.first.kept.keys() == {sealed.fragment.content_path}


async def test_a_settled_fragment_is_stored_without_delay(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coranto_broker.fragments.persister._BACKOFF_SECONDS", (600.0,))
    fixture.judgement = Judgement.OPEN
    sealed = fixture.add(b"abc")
    (job,) = fixture.persister._tasks.values()
    await eventually(lambda: job.waits)
    fixture.judgement = Judgement.FINAL
    sealed.watermark.raise_to(2)
    assert not job.wake.is_set(), "a part of it is not settled"
    sealed.watermark.raise_to(3)
    await eventually(lambda: fixture.stored)


async def test_no_fragment_is_stored_before_an_earlier_waiting_one(fixture: Fixture) -> None:
    fixture.judgement = Judgement.OPEN
    fixture.add(b"abc")
    await eventually(lambda: fixture.judged)
    fixture.stores.first.failures = [StoreError("no answer")] * 5
    fixture.judgement = Judgement.FINAL
    fixture.add(b"ghi", 6)
    fixture.add(b"def", 3)
    await eventually(lambda: len(fixture.stored) == 3)
    assert fixture.stored[0].begin == 0
    assert fixture.stores.first.attempts == 8, "later fragments are not tried while it is refused"


async def test_a_fragment_whose_file_cannot_be_opened_blocks_no_other(fixture: Fixture) -> None:
    sealed = fixture.add(b"abc")
    sealed.content.path.unlink()
    sealed.content.path.mkdir()
    await eventually(lambda: fixture.persister._metrics.persist_failures._value.get())
    fixture.add(b"def", 3)
    await eventually(lambda: fixture.stored)
    assert [stored.begin for stored in fixture.stored] == [3]


async def test_a_stored_fragment_is_not_judged(fixture: Fixture) -> None:
    fixture.judgement = Judgement.DIVERGED
    fragment = Fragment(JOURNAL, 0, 3, sum_of(b"abc"), Codec.GZIP)
    fixture.stores.first.kept[fragment.content_path] = b"stored by another broker"
    fixture.add(b"abc")
    await eventually(lambda: fixture.stored)
    assert (fixture.judged, fixture.diverged) == (0, [])


async def test_a_fragment_that_others_continued_without_is_set_aside(fixture: Fixture) -> None:
    fixture.judgement = Judgement.DIVERGED
    sealed = fixture.add(b"abc")
    await eventually(lambda: fixture.diverged == [sealed])
    assert fixture.stored == []
    kept = sorted((fixture.folder / "set-aside").iterdir())
    assert [file.read_bytes() for file in kept] == [b"abc", b"abc"]
    assert not sealed.content.path.exists()
    assert fixture.persister.pending == 0


async def test_fragments_released_to_another_owner_are_left_alone(fixture: Fixture) -> None:
    fixture.judgement = Judgement.OPEN
    sealed = fixture.add(b"abc")
    await fixture.persister.release("another/journal", sealed.create_revision)
    assert fixture.persister.pending == 1
    await fixture.persister.release(JOURNAL, sealed.create_revision)
    assert fixture.persister.pending == 0
    assert sealed.content.path.exists()
