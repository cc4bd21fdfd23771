"""Files in a folder and in a bucket: each is read once, new ones are found, and changed ones are an error."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import obstore
import pyarrow as pa
import pytest
from pyarrow import parquet

from coranto.client import JournalClient
from coranto.errors import InvalidInput, SourceChanged, Unavailable
from coranto.fragments.stores import open_objects
from coranto.ingest.files.options import FileOptions
from coranto.ingest.files.source import FileSource
from coranto.ingest.runs import IngestReport
from coranto.ingest.source import Positions
from coranto.ingest.spec import IngestSpec
from coranto.types.kinds import format_fields
from coranto.types.registry import TypeRegistry
from tests.platform.ingest.lists import events, ingest, spec, until
from tests.servers.s3 import S3Server

FILES = spec(kind="files", batch_bytes=2000)
OPTIONS = FileOptions("file:///in/", "*.jsonl", poll_seconds=0.05)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def put(folder: Path, name: str, numbers: range) -> None:
    """Put a file into the folder atomically."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps({"n": number}) + "\n" for number in numbers))
    partial.rename(path)


async def run(client: JournalClient, folder: Path, options: FileOptions = OPTIONS, **given: IngestSpec) -> IngestReport:
    return await ingest(client, FileSource(options, folder.parent), given=given.get("given", FILES)).run()


async def numbers(client: JournalClient) -> list[int]:
    return sorted(each["n"] for each in await events(client))


async def test_files_are_read_once_and_new_ones_are_found(client: JournalClient, folder: Path) -> None:
    put(folder, "a.jsonl", range(100))
    put(folder, "sub/b.jsonl", range(100, 200))
    (folder / "c.txt").write_text("no")
    first = await run(client, folder)
    assert (first.rows, sorted(first.progress.splits)) == (200, ["a.jsonl", "sub/b.jsonl"])
    assert (await run(client, folder)).batches == 0
    put(folder, "d.jsonl", range(200, 300))
    assert (await run(client, folder)).rows == 100
    assert await numbers(client) == list(range(300))
    assert {each["_meta"]["file"] for each in await events(client)} == {"a.jsonl", "sub/b.jsonl", "d.jsonl"}


async def test_new_files_are_found_while_following(client: JournalClient, folder: Path) -> None:
    one = ingest(client, FileSource(OPTIONS, folder.parent), given=spec(kind="files", batch_seconds=0.05))
    running = asyncio.create_task(one.run(follow=True))
    value = one.metrics.registry.get_sample_value
    for number in range(3):
        put(folder, f"{number}.jsonl", range(number * 10, number * 10 + 10))
        rows = (number + 1) * 10
        await until(lambda rows=rows: value("coranto_ingest_rows_total", {"ingest": "loads"}) == rows)
    one.stop()
    await running
    assert await numbers(client) == list(range(30))


async def test_a_file_that_changed_is_an_error(client: JournalClient, folder: Path) -> None:
    put(folder, "a.jsonl", range(10))
    await run(client, folder)
    put(folder, "a.jsonl", range(11))
    with pytest.raises(SourceChanged, match=r"a.jsonl changed after it was read to its end: put a file in place"):
        await run(client, folder)
    ignoring = FileOptions("file:///in/", "*.jsonl", ignores_changes=True)
    assert (await run(client, folder, ignoring)).rows == 0
    (folder / "a.jsonl").unlink()
    assert (await run(client, folder)).rows == 0
    assert await numbers(client) == list(range(10))


@pytest.mark.parametrize("change", ["truncated", "gone", "same"])
async def test_a_partly_read_file_that_changed_is_an_error(client: JournalClient, folder: Path, change: str) -> None:
    put(folder, "a.jsonl", range(100))
    small = spec(kind="files", batch_bytes=1)
    with pytest.raises(SourceChanged, match="interrupted"):
        await ingest(client, Half(OPTIONS, folder.parent), given=small).run()
    count = len(await numbers(client))
    assert 0 < count < 100
    if change == "truncated":
        os.truncate(folder / "a.jsonl", 9)
        with pytest.raises(SourceChanged, match="changed after it was read to"):
            await run(client, folder)
    elif change == "gone":
        (folder / "a.jsonl").unlink()
        with pytest.raises(SourceChanged, match="is gone, and was read only to"):
            await run(client, folder)
    else:
        assert (await run(client, folder)).rows == 100 - count
        assert await numbers(client) == list(range(100))


class Half(FileSource):
    """A source that fails at its third read."""

    reads = 0

    async def read(self, max_bytes: int):  # type: ignore[no-untyped-def]
        self.reads += 1
        if self.reads == 3:
            raise SourceChanged("interrupted")
        return await super().read(50)


async def test_a_file_that_changes_while_it_is_read_is_not_committed(client: JournalClient, folder: Path) -> None:
    put(folder, "a.jsonl", range(100))
    source = FileSource(OPTIONS, folder.parent)
    real = source.confirm

    async def confirm() -> None:
        put(folder, "a.jsonl", range(1000, 1200))
        await real()

    source.confirm = confirm  # type: ignore[method-assign]
    with pytest.raises(SourceChanged, match="changed while it was read"):
        await ingest(client, source, given=FILES).run()
    assert await numbers(client) == []


async def test_files_replaced_or_removed_before_reading(client: JournalClient, folder: Path) -> None:
    for number in range(3):
        put(folder, f"{number}.jsonl", range(number * 10, number * 10 + 10))
    source = FileSource(OPTIONS, folder.parent)
    real = source.open

    async def opened(after: Positions, *, follow: bool) -> str:
        found = await real(after, follow=follow)
        put(folder, "1.jsonl", range(100, 110))
        (folder / "2.jsonl").unlink()
        return found

    source.open = opened  # type: ignore[method-assign]
    report = await ingest(client, source, given=FILES).run()
    assert sorted(report.progress.splits) == ["0.jsonl", "1.jsonl"]
    assert await numbers(client) == [*range(10), *range(100, 110)]


async def test_csv_continues_in_the_middle_of_a_file(client: JournalClient, folder: Path) -> None:
    (folder / "a.csv").write_text("n\n" + "".join(f"{number}\n" for number in range(1000)))
    options = FileOptions("file:///in/", "*.csv", "csv", {"n": "integer"})
    with pytest.raises(SourceChanged, match="interrupted"):
        await ingest(client, Half(options, folder.parent), given=spec(kind="files", batch_bytes=1)).run()
    await run(client, folder, options)
    assert await numbers(client) == list(range(1000))


async def test_the_schemas_of_files_are_registered(client: JournalClient, folder: Path) -> None:
    given = spec(kind="files", type="shop.Order", registry="types/registry", registers=True)
    options = FileOptions("file:///in/", "*.parquet", "parquet")
    parquet.write_table(pa.table({"n": pa.array([1, 2], pa.int32())}), folder / "a.parquet")
    await run(client, folder, options, given=given)
    parquet.write_table(pa.table({"n": pa.array([2**40]), "note": ["x"]}), folder / "b.parquet")
    await run(client, folder, options, given=given)
    latest = await TypeRegistry(client, "types/registry").find("shop.Order")
    assert (latest.number, format_fields(latest.definition.fields)) == (2, "n BIGINT, note STRING")
    parquet.write_table(pa.table({"n": ["text"]}), folder / "c.parquet")
    with pytest.raises(InvalidInput, match=r"cannot be registered.*n is BIGINT, and STRING"):
        await run(client, folder, options, given=given)
    assert await numbers(client) == [1, 2, 2**40]


async def test_objects_of_a_bucket(client: JournalClient, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.create_bucket("ingest")
    for name, value in {**s3_server.environment, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}.items():
        monkeypatch.setenv(name, value)
    url = s3_server.store_url("ingest", "orders/")
    store, prefix = open_objects(url)
    for number in range(120):
        obstore.put(store, f"{prefix}{number:03}.jsonl", b'{"n":%d}\n' % number)
    source = FileSource(FileOptions(url, "*.jsonl"), Path("/"))
    assert sum((await source.lag({})).values()) > 120
    assert (await ingest(client, source, given=FILES).run()).rows == 120
    assert await numbers(client) == list(range(120))
    obstore.put(store, f"{prefix}007.jsonl", b'{"n":8}\n')
    with pytest.raises(SourceChanged, match=r"007.jsonl changed after it was read to its end"):
        await ingest(client, FileSource(FileOptions(url, "*.jsonl"), Path("/")), given=FILES).run()
    missing = FileOptions(url.replace("s3://ingest", "s3://missing"))
    with pytest.raises(Unavailable, match="missing"):
        await ingest(client, FileSource(missing, Path("/")), given=FILES).run()
