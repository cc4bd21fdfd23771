"""Committed reads by many tasks: any split of a journal into ranges yields the rows of the unsplit read."""

import concurrent.futures
import os
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from coranto.errors import CorruptMessage
from coranto_consumers.journals.ranges import Range, split
from coranto_consumers.spark.committed.joint_reading import HELD_BYTES, CommittedReader
from coranto_consumers.spark.options.source_options import DEFAULT_MAX_BYTES
from tests.consumers.spark.folding import FRAMING, Memory
from tests.consumers.spark.histories import expected, histories
from tests.sampling import examples


class Watched(Memory):
    """Content in chunks that counts reads from each offset, and can fail once."""

    def __init__(self, content: bytes, chunk: int, fails_at: int = -1) -> None:
        super().__init__({"j/j": content}, chunk)
        self.begun: dict[int, int] = {}
        self.fails_at = fails_at
        self._lock = threading.Lock()

    def read(self, journal, offset=0, **options):
        with self._lock:
            self.begun[offset] = self.begun.get(offset, 0) + 1
            if offset == self.fails_at:
                self.fails_at = -1
                raise CorruptMessage(journal, offset, "this task has bad luck")
        return super().read(journal, offset, **options)


def rows(reader: CommittedReader, number: int) -> list[int]:
    return [offset for lines in reader.read(number) for offset in lines.begins.tolist()]


def rows_with_commits(reader: CommittedReader, number: int) -> list[tuple[int, int]]:
    """Return rows as pairs of the commit's offset and their own."""
    read = reader.read(number)
    return [row for found in read for row in zip(found.commits.tolist(), found.begins.tolist(), strict=True)]


@given(
    content=histories(),
    chunk=st.integers(50, 500),
    max_bytes=st.integers(20, 1500),
    executors=st.integers(0, 3),
    tasks=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=examples(50), deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_any_split_yields_the_rows_of_the_unsplit_read(content, chunk, max_bytes, executors, tasks, order):
    memory = Memory({"j/j": content}, chunk)
    parts = split(Range("j/j", 0, len(content), len(content)), max_bytes)
    numbers = list(range(len(parts)))
    order.shuffle(numbers)
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(tasks) as pool:
        folders = [Path(folder, "scans", str(executor)) for executor in range(executors)] or [None]
        readers = [CommittedReader(memory, parts, FRAMING, order.choice(folders), commits=True) for _ in numbers]
        found = list(pool.map(rows_with_commits, readers, numbers))

    by_number = dict(zip(numbers, found, strict=True))
    together = [row for number in range(len(parts)) for row in by_number[number]]
    assert [offset for _, offset in together] == sorted(expected("j/j", content))
    assert [offset for _, offset in sorted(together)] == expected("j/j", content), "the order of commits"


def lines(count: int) -> bytes:
    return b"".join(b'{"n":%d}\n' % (10_000 + n) for n in range(count))


def test_tasks_of_an_executor_scan_each_range_once(tmp_path):
    content = lines(1000)
    memory = Watched(content, 500)
    parts = split(Range("j/j", 0, len(content), len(content)), 1200)
    readers = [CommittedReader(memory, parts, FRAMING, tmp_path / "scans" / "one") for _ in parts]

    first = rows(readers[3], 3)

    assert first == [offset for offset in range(0, len(content), 12) if 3600 <= offset < 4800]
    begins = [part.begin - (not part.aligned) for part in parts]
    assert [memory.begun[begin] for begin in begins] == [1] * len(parts), "it kept its own lines, and scanned the rest"
    assert rows(readers[0], 0) == list(range(0, 1200, 12))
    assert [memory.begun[begin] for begin in begins] == [2, *[1] * (len(parts) - 1)]


def test_waiting_tasks_scan_a_range_that_another_task_failed_to_scan(tmp_path):
    content = lines(400)
    parts = split(Range("j/j", 0, len(content), len(content)), 1200)
    memory = Watched(content, 500, fails_at=parts[1].begin - 1)
    readers = [CommittedReader(memory, parts, FRAMING, tmp_path / "scans" / "one") for _ in parts]

    with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
        tasks = [pool.submit(rows, reader, number) for number, reader in enumerate(readers)]
        failed = [number for number, task in enumerate(tasks) if task.exception()]
        done = {number: task.result() for number, task in enumerate(tasks) if not task.exception()}

    assert len(failed) == 1
    assert done | {failed[0]: rows(readers[failed[0]], failed[0])} == {
        number: [offset for offset in range(0, len(content), 12) if part.begin <= offset < part.end]
        for number, part in enumerate(parts)
    }


def test_an_unusable_folder_only_repeats_work(tmp_path):
    content = lines(400)
    parts = split(Range("j/j", 0, len(content), len(content)), 1200)
    occupied = tmp_path / "scans"
    occupied.write_text("not a folder")

    reader = CommittedReader(Memory({"j/j": content}, 500), parts, FRAMING, occupied / "one")

    assert [row for number in range(len(parts)) for row in rows(reader, number)] == list(range(0, len(content), 12))


def test_scans_of_reads_that_ended_long_ago_are_removed(tmp_path):
    content = lines(400)
    parts = split(Range("j/j", 0, len(content), len(content)), 1200)
    folders = [tmp_path / "scans" / name for name in ("old", "recent", "new")]
    for folder in folders[:2]:
        rows(CommittedReader(Memory({"j/j": content}, 500), parts, FRAMING, folder), 0)
    os.utime(folders[0], (1, 1))

    rows(CommittedReader(Memory({"j/j": content}, 500), parts, FRAMING, folders[2]), 0)

    assert sorted(each.name for each in (tmp_path / "scans").iterdir()) == ["new", "recent"]
    assert folders[2].stat().st_mode & 0o777 == 0o700


def test_a_range_that_is_too_large_to_hold_is_read_again(tmp_path, monkeypatch):
    content = lines(400)
    assert HELD_BYTES >= DEFAULT_MAX_BYTES, "ranges of the usual size are held"
    monkeypatch.setattr("coranto_consumers.spark.committed.joint_reading.HELD_BYTES", 100)
    memory = Watched(content, 500)

    assert rows(CommittedReader(memory, [Range("j/j", 0, len(content), len(content))], FRAMING), 0) == list(
        range(0, len(content), 12)
    )
    assert memory.begun == {0: 2}


@pytest.mark.parametrize("shared", [True, False])
def test_a_corrupt_line_anywhere_in_the_journal_ends_the_read(tmp_path, shared):
    content = lines(300) + b"no json\n" + lines(10)
    parts = split(Range("j/j", 0, len(content), len(content)), 1200)

    reader = CommittedReader(Memory({"j/j": content}, 500), parts, FRAMING, tmp_path / "s" / "1" if shared else None)

    with pytest.raises(CorruptMessage, match="offset 3600"):
        rows(reader, 0)
