"""Compaction: files of committed messages, each once, for any number and size of runs."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coranto.errors import CorruptData, InvalidInput, OffsetJump
from coranto.fragments.stores import open_store
from coranto.lake import Manifest, scan
from coranto.lake.compaction import FOLDER, CompactedSpan, CompactionOptions, compact, compacted
from coranto.messages.uuids import Flags
from tests.platform.lake.test_scanning import J, Producer, manifest_of

LATER = 1e12


def options(root: Path, **changes: object) -> CompactionOptions:
    return replace(CompactionOptions(LATER, {"n": "int64"}, 1, file_root=root), **changes)  # type: ignore[arg-type]


def files(root: Path) -> list[Path]:
    store = open_store("file:///", file_root=root)
    return [root / each.path for each in compacted(store, J)]


def rows(root: Path) -> list[tuple[int, int]]:
    """Return the offsets and numbers of all files, in the order of the files, as DuckDB reads them."""
    with duckdb.connect() as connection:
        found: list[tuple[int, int]] = []
        for path in files(root):
            found += connection.execute("SELECT _offset, n FROM read_parquet(?)", [str(path)]).fetchall()
        return found


def committed(manifest: Manifest) -> list[tuple[int, int]]:
    table = scan(manifest, {"n": "int64"}).arrow()
    return list(zip(table.column("_offset").to_pylist(), table.column("n").to_pylist(), strict=True))


def history(rng: random.Random, count: int) -> list[bytes]:
    """Return fragments with overlapping, rolled back and open transactions, and with repeated lines."""
    producers = [Producer(number) for number in range(1, 5)]
    fragments, n = [], 0
    for _ in range(count):
        lines = []
        for _ in range(rng.randrange(1, 8)):
            n += 1
            each = rng.choice(producers)
            flags = rng.choice([Flags.OUTSIDE_TXN, Flags.CONTINUE_TXN, Flags.CONTINUE_TXN, Flags.ACK_TXN])
            lines.append(each.line(flags) if flags == Flags.ACK_TXN else each.line(flags, n=n))
            if rng.random() < 0.2:
                lines.append(rng.choice(lines))
        fragments.append(b"".join(lines))
    return fragments


def first(manifest: Manifest, count: int) -> Manifest:
    """Return the manifest as it was when only `count` fragments were stored."""
    (part,) = manifest.journals
    kept = part.fragments[:count]
    return replace(manifest, journals=[replace(part, fragments=kept, end=kept[-1].end, unstored_end=kept[-1].end)])


@pytest.mark.parametrize("seed", range(8))
def test_files_of_any_steps_equal_a_committed_read(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    manifest = manifest_of(tmp_path, history(rng, 20))
    done = 0
    while done < 20:
        done = min(20, done + rng.randrange(1, 6))
        size = rng.choice([1, 300, 3000])
        list(compact(first(manifest, done), options(tmp_path, file_bytes=size, partial=rng.random() < 0.5)))
    list(compact(manifest, options(tmp_path, file_bytes=1)))
    assert rows(tmp_path) == committed(manifest)
    assert committed(manifest)
    kept = {path: path.read_bytes() for path in files(tmp_path)}
    assert list(compact(manifest, options(tmp_path))) == []
    assert {path: path.read_bytes() for path in files(tmp_path)} == kept


def test_only_old_content_that_fills_a_file_is_compacted(tmp_path: Path) -> None:
    producer = Producer()
    manifest = manifest_of(tmp_path, [producer.line(n=n) for n in range(5)])
    (part,) = manifest.journals
    aged = [replace(each, stored_at=100 * n) for n, each in enumerate(part.fragments)]
    manifest = replace(manifest, journals=[replace(part, fragments=aged)])
    size = aged[0].length + 1
    (span,) = compact(manifest, options(tmp_path, stored_before=200, file_bytes=size))
    assert (span.begin, span.end, span.rows) == (0, aged[1].end, 2)
    assert list(compact(manifest, options(tmp_path, stored_before=200, file_bytes=size))) == []
    (span,) = compact(manifest, options(tmp_path, stored_before=200, file_bytes=size, partial=True))
    assert (span.begin, span.end, span.rows) == (aged[1].end, aged[2].end, 1)
    table = pq.read_table(tmp_path / span.path)
    assert table.column_names == ["_journal", "_offset", "_next_offset", "_time", "_producer", "_clock", "n"]
    assert table.column("_journal").to_pylist() == [J]
    assert all(Path(each.url).exists() for each in aged), "fragments stay"
    texts = list(compact(manifest, options(tmp_path, schema=None)))
    assert [pq.read_table(tmp_path / each.path).column("_value").to_pylist()[0][:10] for each in texts] == [
        '{"_meta":{'
    ] * 2


def test_spans_of_concurrent_runs_are_counted_once(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, history(random.Random(3), 12))
    ends = [each.end for each in manifest.fragments]

    def runs(*sizes: int) -> list[CompactedSpan]:
        """Run compactions that do not see each other's files."""
        found, aside = [], tmp_path / "aside"
        for number, size in enumerate(sizes):
            found += list(compact(first(manifest, 12 - number), options(tmp_path, file_bytes=size)))
            shutil.copytree(tmp_path / FOLDER, aside, dirs_exist_ok=True)
            shutil.rmtree(tmp_path / FOLDER)
        aside.rename(tmp_path / FOLDER)
        return found

    assert len(runs(1, ends[4], ends[6])) > len(files(tmp_path))
    assert rows(tmp_path) == committed(manifest)
    assert list(compact(manifest, options(tmp_path))) == []
    assert len(list((tmp_path / FOLDER).rglob("*.parquet"))) == len(files(tmp_path)), "the others are removed"
    assert rows(tmp_path) == committed(manifest)


def test_a_run_after_a_removed_file_does_not_block_later_runs(tmp_path: Path) -> None:
    producer = Producer()
    manifest = manifest_of(tmp_path, [producer.line(n=n) for n in range(10, 17)])
    size = manifest.fragments[0].length
    slow = compact(manifest, options(tmp_path, file_bytes=3 * size))
    begun = next(slow)
    shutil.move(tmp_path / begun.path, tmp_path / "aside")
    chain = list(compact(first(manifest, 4), options(tmp_path, file_bytes=2 * size)))
    shutil.move(tmp_path / "aside", tmp_path / begun.path)
    assert list(compact(first(manifest, 4), options(tmp_path))) == []
    assert not (tmp_path / begun.path).exists()
    follows = next(slow)
    assert begun.end == follows.begin < chain[-1].end < follows.end
    list(compact(manifest, options(tmp_path)))
    assert not (tmp_path / follows.path).exists()
    assert rows(tmp_path) == committed(manifest)


def test_missing_or_contradictory_files_are_errors(tmp_path: Path) -> None:
    producer = Producer()
    lines = [
        producer.line(Flags.CONTINUE_TXN, n=1),
        producer.line(Flags.CONTINUE_TXN, n=2),
        producer.line(Flags.ACK_TXN),
    ]
    manifest = manifest_of(tmp_path, lines)
    (part,) = manifest.journals
    one, two = (
        replace(manifest, journals=[replace(part, begin=each.begin, fragments=part.fragments[n:])])
        for n, each in enumerate(part.fragments[1:], 1)
    )
    list(compact(first(manifest, 2), options(tmp_path)))
    with pytest.raises(OffsetJump, match=J):  # The beginning of the continued transaction is missing.
        list(compact(two, options(tmp_path)))
    with pytest.raises(CorruptData, match="of a journal that was deleted and created again since"):
        list(compact(replace(manifest, journals=[replace(part, revision=2)]), options(tmp_path)))
    list(compact(manifest, options(tmp_path)))
    assert [n for _, n in rows(tmp_path)] == [1, 2]
    middle = files(tmp_path)[1]
    middle.unlink()
    with pytest.raises(CorruptData, match="restore the missing file, or remove the later files"):
        list(compact(manifest, options(tmp_path)))
    shutil.rmtree(tmp_path / FOLDER)
    (span,) = compact(one, options(tmp_path, file_bytes=10_000, partial=True))
    assert span.begin == part.fragments[1].begin, "content removed before the first run is omitted"
    (tmp_path / span.path).write_bytes(b"no file of ours")
    with pytest.raises(CorruptData, match="is not a file of a compaction"):
        list(compact(one, options(tmp_path)))
    with pytest.raises(InvalidInput, match="is not a positive number of bytes"):
        list(compact(manifest, options(tmp_path, file_bytes=0)))


def test_a_file_ends_with_a_line(tmp_path: Path) -> None:
    lines: Sequence[bytes] = [Producer(number).line(n=number) for number in (1, 2, 3)]
    cut = len(lines[1]) // 2
    manifest = manifest_of(tmp_path, [lines[0] + lines[1][:cut], lines[1][cut:] + lines[2]])
    (span,) = compact(manifest, options(tmp_path))
    assert (span.end, span.rows) == (sum(map(len, lines)), 3)
    assert isinstance(pq.read_table(tmp_path / span.path), pa.Table)
