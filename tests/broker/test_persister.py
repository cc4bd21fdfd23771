"""The persister: what it stores, when it tries again, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coranto.codecs import decompress
from coranto.effects import LocalDisk
from coranto.errors import StoreDenied, StoreError
from coranto.fragments import Codec, Fragment, sum_of
from coranto.stores import Content, FragmentStore
from coranto.wire import protocol_pb2 as pb
from coranto_broker.in_sync import Judgement
from coranto_broker.metrics import Metrics
from coranto_broker.persister import FragmentPersister
from coranto_broker.shared_file import SharedFile
from coranto_broker.spool_files import Sealed
from coranto_broker.testing import ManualClock, eventually

JOURNAL = "a/journal"


class MemoryStore(FragmentStore):
    """Keeps fragments in memory; `failures` are raised first."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.files: dict[str, bytes] = {}
        self.failures: list[Exception] = []
        self.attempts = 0
        self.parallel = self.most_parallel = 0

    async def put(self, fragment: Fragment, content: Content) -> None:
        self.attempts += 1
        self.parallel += 1
        self.most_parallel = max(self.most_parallel, self.parallel)
        try:
            await asyncio.sleep(0)
            if self.failures:
                raise self.failures.pop(0)
            data = content if isinstance(content, bytes) else b"".join([piece async for piece in content])
            self.files[fragment.content_path] = data
        finally:
            self.parallel -= 1

    async def exists(self, fragment: Fragment) -> bool:
        return fragment.content_path in self.files

    async def list(self, journal: str) -> AsyncIterator[Fragment]:
        raise NotImplementedError
        yield

    async def get(self, fragment: Fragment) -> bytes:
        return self.files[fragment.content_path]

    def sign(self, fragment: Fragment, ttl_seconds: float) -> str:
        raise NotImplementedError

    async def sign_async(self, fragment: Fragment, ttl_seconds: float) -> str:
        raise NotImplementedError

    async def remove(self, fragment: Fragment) -> None:
        raise NotImplementedError


class Stores:
    def __init__(self) -> None:
        self.first, self.second = MemoryStore("file:///first/"), MemoryStore("file:///second/")
        self.file_root = None

    def get(self, url: str) -> FragmentStore:
        return {self.first.url: self.first, self.second.url: self.second}[url]


class Fixture:
    """A persister whose specs and stores the test controls, with times in which tests can wait."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("REPLICA_DELAY_SECONDS", 0.2), ("_BACKOFF_SECONDS", (0.01,)), ("_LATER_SECONDS", 0.02)):
            monkeypatch.setattr(f"coranto_broker.persister.{name}", value)
        self.folder = folder
        self.stores = Stores()
        self.spec: pb.JournalSpec | None = pb.JournalSpec(
            name=JOURNAL, fragment=pb.JournalSpec.Fragment(stores=["file:///first/", "file:///second/"])
        )
        self.stored: list[Fragment] = []
        self.persister = FragmentPersister(
            lambda journal, create_revision: self.spec,
            self.stores,  # type: ignore[arg-type]
            ManualClock(1_700_000_000.0),
            Metrics(),
            max_parallel=2,
            judge=self._judge,
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
    data = fixture.stores.first.files[sealed.fragment.content_path]
    assert decompress(codec, data, len(content)) == content
    assert sealed.content.path.exists(), "the file stays until a listing shows the fragment"


async def test_what_is_there_already_is_not_stored_again(fixture: Fixture) -> None:
    fragment = Fragment(JOURNAL, 0, 3, sum_of(b"abc"), Codec.GZIP)
    fixture.stores.first.files[fragment.content_path] = b"stored by another broker"
    fixture.add(b"abc")
    await eventually(lambda: fixture.stored)
    assert fixture.stores.first.attempts == 0


async def test_failures_are_repeated_until_it_works(fixture: Fixture) -> None:
    fixture.stores.first.failures = [StoreError("no answer"), OSError("reset"), StoreDenied("expired")]
    fixture.add(b"abc")
    await eventually(lambda: fixture.stored)
    assert fixture.stores.first.attempts == 4
    assert fixture.stored[0].backing_store == "file:///first/"


async def test_uploads_are_bounded(fixture: Fixture) -> None:
    for n in range(10):
        fixture.add(b"abc", n * 3)
    await eventually(lambda: len(fixture.stored) == 10)
    assert fixture.stores.first.most_parallel == 2


async def test_replicas_hold_back_unless_they_become_primary(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    fixture.add(b"abc", primary=False)
    await eventually(lambda: fixture.stored)
    assert loop.time() - begun >= 0.2

    monkeypatch.setattr("coranto_broker.persister.REPLICA_DELAY_SECONDS", 600.0)
    fixture.add(b"def", 3, primary=False)
    await asyncio.sleep(0)
    fixture.persister.hurry("another/journal")
    fixture.persister.hurry(JOURNAL)
    await eventually(lambda: len(fixture.stored) == 2)


async def test_fragments_of_deleted_journals_stay_to_be_set_aside(fixture: Fixture) -> None:
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
    assert fixture.stores.first.files == {}


async def test_closing_tries_everything_once_more_and_ends_in_time(fixture: Fixture) -> None:
    fixture.add(b"abc", primary=False)
    assert await fixture.persister.close(60.0) == 0
    assert len(fixture.stored) == 1


async def test_closing_passes_over_a_store_that_denies_access(fixture: Fixture) -> None:
    fixture.stores.first.failures = [StoreDenied("expired")] * 1000
    fixture.add(b"abc")
    assert await fixture.persister.close(60.0) == 0
    assert fixture.stored[0].backing_store == "file:///second/"


async def test_closing_leaves_what_cannot_be_stored_to_the_next_start(fixture: Fixture) -> None:
    fixture.stores.first.failures = [StoreError("down")] * 1_000_000
    sealed = fixture.add(b"abc")
    assert await fixture.persister.close(0.3) == 1
    assert sealed.content.path.exists()
    assert sealed.log.path.exists()


async def test_closing_does_not_wait_for_what_only_others_can_decide(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coranto_broker.persister._OPEN_SECONDS", 0.05)
    fixture.judgement = Judgement.OPEN
    fixture.add(b"abc")
    fixture.add(b"def", 3)
    await eventually(lambda: fixture.judged)
    async with asyncio.timeout(60):
        assert await fixture.persister.close(600.0) == 2
    assert fixture.stored == []


async def test_closing_waits_for_what_is_stored_slowly(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coranto_broker.persister._OPEN_SECONDS", 0.05)
    fixture.stores.first.failures = [StoreError("no answer")] * 2  # Each is repeated after a while.
    fixture.add(b"abc")
    assert await fixture.persister.close(60.0) == 0
    assert len(fixture.stored) == 1


async def test_what_may_not_be_part_of_the_journal_waits(fixture: Fixture) -> None:
    fixture.judgement = Judgement.OPEN
    sealed = fixture.add(b"abc")
    await eventually(lambda: fixture.judged > 3)
    assert fixture.stores.first.files == {}
    fixture.judgement = Judgement.FINAL
    await eventually(lambda: fixture.stored)
    assert fixture.stores.first.files.keys() == {sealed.fragment.content_path}


async def test_a_fragment_that_is_settled_waits_no_longer(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coranto_broker.persister._BACKOFF_SECONDS", (600.0,))
    fixture.judgement = Judgement.OPEN
    sealed = fixture.add(b"abc")
    await eventually(lambda: fixture.judged)
    fixture.judgement = Judgement.FINAL
    sealed.watermark.raise_to(2)
    await asyncio.sleep(0.02)
    assert fixture.stored == []
    sealed.watermark.raise_to(3)
    await eventually(lambda: fixture.stored)


async def test_no_fragment_is_stored_before_an_earlier_one_that_waits(fixture: Fixture) -> None:
    fixture.judgement = Judgement.OPEN
    fixture.add(b"abc")
    await eventually(lambda: fixture.judged)
    fixture.stores.first.failures = [StoreError("no answer")] * 5
    fixture.judgement = Judgement.FINAL
    fixture.add(b"ghi", 6)
    fixture.add(b"def", 3)
    await eventually(lambda: len(fixture.stored) == 3)
    assert fixture.stored[0].begin == 0
    assert fixture.stores.first.attempts == 8, "those behind it were not even tried while it was refused"


async def test_a_fragment_whose_file_is_damaged_holds_up_nobody(fixture: Fixture) -> None:
    sealed = fixture.add(b"abc")
    sealed.content.path.write_bytes(b"ab")
    await eventually(lambda: fixture.persister._metrics.persist_failures._value.get())
    fixture.add(b"def", 3)
    await eventually(lambda: fixture.stored)
    assert [stored.begin for stored in fixture.stored] == [3]


async def test_what_is_stored_need_not_be_judged(fixture: Fixture) -> None:
    fixture.judgement = Judgement.DIVERGED
    fragment = Fragment(JOURNAL, 0, 3, sum_of(b"abc"), Codec.GZIP)
    fixture.stores.first.files[fragment.content_path] = b"stored by another broker"
    fixture.add(b"abc")
    await eventually(lambda: fixture.stored)
    assert (fixture.judged, fixture.diverged) == (0, [])


async def test_what_others_went_on_without_is_set_aside(fixture: Fixture) -> None:
    fixture.judgement = Judgement.DIVERGED
    sealed = fixture.add(b"abc")
    await eventually(lambda: fixture.diverged == [sealed])
    assert fixture.stored == []
    kept = sorted((fixture.folder / "set-aside").iterdir())
    assert [file.read_bytes() for file in kept] == [b"abc", b"abc"]
    assert not sealed.content.path.exists()
    assert fixture.persister.pending == 0


async def test_fragments_that_somebody_else_takes_up_are_left_alone(fixture: Fixture) -> None:
    fixture.judgement = Judgement.OPEN
    sealed = fixture.add(b"abc")
    await fixture.persister.release("another/journal")
    assert fixture.persister.pending == 1
    await fixture.persister.release(JOURNAL)
    assert fixture.persister.pending == 0
    assert sealed.content.path.exists()
