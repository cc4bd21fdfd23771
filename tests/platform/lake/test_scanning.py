"""Scans: committed messages, each once, typed, with offsets. Damage and forgery are errors."""

from __future__ import annotations

import datetime
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pytest

from coranto.client.committed import committed_messages
from coranto.client.sync import SyncJournalClient
from coranto.errors import CorruptFragment, CorruptMessage, InvalidInput, StoreError, TornMessage
from coranto.fragments.codecs import compress
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.lake import JournalPart, ListedFragment, Manifest, scan
from coranto.lake import content as lake_content
from coranto.messages import JsonLines
from coranto.messages.uuids import Flags, ProducerClock, ProducerId, format_uuid
from coranto.testing.command_line import CommandLine, RemoteBroker
from coranto.testing.http_store import HttpStore

J = "shop/orders"
SECOND = 1_000_000_000
EPOCH = 1_700_000_000 * SECOND


class Producer:
    """Makes one line per second."""

    def __init__(self, number: int = 1) -> None:
        self.now = EPOCH
        self._id = ProducerId(bytes([1, 0, 0, 0, 0, number]))
        self._clock = ProducerClock(lambda: self.now)

    def line(self, flags: Flags = Flags.OUTSIDE_TXN, **fields: object) -> bytes:
        self.now += SECOND
        uuid = format_uuid(self._id, self._clock.tick(), flags)
        return json.dumps({"_meta": {"uuid": uuid}, **fields}, separators=(",", ":")).encode() + b"\n"


def manifest_of(root: Path, contents: Sequence[bytes], codec: Codec = Codec.ZSTANDARD, **fields: Any) -> Manifest:
    """Write contents as fragments of a journal, and return their manifest."""
    fragments, at = [], 0
    for content in contents:
        fragment = Fragment(J, at, at + len(content), sum_of(content), codec, "file:///", int(time.time()))
        path = root / fragment.content_path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compress(codec, content))
        fragments.append(ListedFragment.of(fragment, str(path)))
        at += len(content)
    part = JournalPart(J, 0, at, at, "application/x-ndjson", 1, fragments)
    return Manifest.from_json(Manifest("", time.time(), [part], **fields).to_json())


def test_a_scan_has_committed_messages_once_with_types_and_offsets(tmp_path: Path) -> None:
    one, two = Producer(1), Producer(2)
    outside = one.line(n=1, name="ä", at="2026-01-02T03:04:05Z")
    pending = [two.line(Flags.CONTINUE_TXN, n=2), two.line(Flags.CONTINUE_TXN, n=3, name="b", tags=["x", "y"])]
    acknowledged = two.line(Flags.ACK_TXN)
    never = two.line(Flags.CONTINUE_TXN, n=4)
    manifest = manifest_of(tmp_path, [outside + pending[0], outside + pending[1], acknowledged + never])
    schema = pa.schema(
        {"n": pa.int64(), "name": pa.string(), "at": pa.timestamp("us", "UTC"), "tags": pa.list_(pa.string())}
    )
    table = scan(manifest, schema).arrow()
    assert table.schema.names == ["_journal", "_offset", "_next_offset", "_time", "n", "name", "at", "tags"]
    begin = len(outside)
    third = 2 * begin + len(pending[0])
    when = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    first_time = datetime.datetime.fromtimestamp(EPOCH / SECOND + 1, datetime.UTC).replace(microsecond=1)
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        (J, 0, begin, first_time, 1, "ä", when, None),
        (J, begin, begin + len(pending[0]), first_time, 2, None, None, None),
        (J, third, third + len(pending[1]), first_time + datetime.timedelta(seconds=1), 3, "b", None, ["x", "y"]),
    ]
    lines = scan(manifest).arrow()
    assert lines.column("_value").to_pylist() == [line[:-1].decode() for line in (outside, *pending)]


def test_a_scan_returns_the_same_messages_as_a_committed_read(
    run: CommandLine, remote: RemoteBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random histories of several producers, in small fragments and batches, with transactions across them."""
    monkeypatch.setenv("CORANTO_FILE_ROOT", str(tmp_path))
    monkeypatch.setattr(lake_content, "PIECE_BYTES", 700)
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    journal = remote.fake.create(J)
    producers = [Producer(number) for number in range(4)]
    written: list[bytes] = []
    for number in range(600):
        producer = chance.choice(producers)
        flags = chance.choices([Flags.OUTSIDE_TXN, Flags.CONTINUE_TXN, Flags.ACK_TXN], [1, 8, 1])[0]
        line = chance.choice(written) if written and chance.random() < 0.1 else producer.line(flags, n=number)
        written.append(line)
        remote.write(J, line)
        if chance.random() < 0.05:
            journal.roll(tmp_path, chance.choice([Codec.NONE, Codec.GZIP, Codec.SNAPPY, Codec.ZSTANDARD]))
    journal.roll(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(run("journals", "manifest", J).output)
    with SyncJournalClient(remote.fake.endpoint) as client:
        expected = [(each.begin, each.end, each.message["n"]) for each in committed_messages(client, J, JsonLines())]
    table = scan(path, {"n": "int64"}).arrow()
    columns = (table.column(name).to_pylist() for name in ("_offset", "_next_offset", "n"))
    assert list(zip(*columns, strict=True)) == expected, seed
    assert len(expected) > 50


def test_polars_and_duckdb_can_read_a_scan_repeatedly(tmp_path: Path) -> None:
    producer = Producer()
    lines = [producer.line(n=number, name="ab"[number % 2]) for number in range(100)]
    found = scan(manifest_of(tmp_path, [b"".join(lines[:60]), b"".join(lines[60:])]), {"n": "int32", "name": "string"})
    frame = found.polars()
    for _ in range(2):
        assert frame.select(polars.col("n").sum()).collect().item() == 4950
    assert frame.filter(polars.col("name") == "a").head(3).collect().get_column("n").to_list() == [0, 2, 4]
    assert frame.head(70).collect().height == 70
    assert frame.collect_schema().names() == found.schema.names
    with duckdb.connect() as connection:
        relation = found.duckdb(connection)
        for _ in range(2):
            assert relation.aggregate("name, sum(n), max(_offset)", "name").order("name").fetchall() == [
                ("a", 2450, 98 * len(lines[10]) - 10 * 1),
                ("b", 2500, 99 * len(lines[10]) - 10 * 1),
            ]
        assert connection.sql("SELECT count(*) FROM found WHERE _offset >= 0").fetchall() == [(100,)]


def test_duckdb_reads_the_files_of_a_manifest_directly(tmp_path: Path) -> None:
    producer = Producer()
    lines = [producer.line(n=number) for number in range(20)]
    path = tmp_path / "manifest.json"
    path.write_text(manifest_of(tmp_path, [b"".join(lines[:9]), b"".join(lines[9:])], Codec.GZIP).to_json(indent=2))
    with duckdb.connect() as connection:
        connection.execute(
            f"SET VARIABLE files = (SELECT flatten(list(list_transform(j.fragments, lambda f: f.url)))"
            f" FROM (SELECT unnest(journals) AS j FROM read_json('{path}')))"
        )
        query = "SELECT sum(n), count(DISTINCT _meta.uuid) FROM read_json(getvariable('files'), format='nd')"
        assert connection.sql(query).fetchall() == [(190, 20)]


def test_bounds_and_time_exclude_messages(tmp_path: Path) -> None:
    producer = Producer()
    lines = [producer.line(n=number) for number in range(5)]
    open_at = producer.line(Flags.CONTINUE_TXN, n=5)
    without = b'{"n":7}\n'
    whole = manifest_of(tmp_path, [b"".join(lines), open_at + producer.line(Flags.ACK_TXN) + without])

    def numbers(manifest: Manifest) -> list[int]:
        found: list[int] = scan(manifest, {"n": "int64"}).arrow().column("n").to_pylist()
        return found

    def part(**offsets: int) -> Manifest:
        return replace(whole, journals=[replace(whole.journals[0], **offsets)])

    def at(seconds: float) -> Manifest:
        return replace(whole, as_of=EPOCH / SECOND + seconds)

    assert numbers(whole) == [0, 1, 2, 3, 4, 5, 7]
    assert numbers(part(begin=len(lines[0]), end=3 * len(lines[0]))) == [1, 2]
    assert numbers(at(3.5)) == [0, 1, 2, 7], "a message without a UUID has no time"
    assert numbers(at(6.5)) == [0, 1, 2, 3, 4, 7], "the acknowledgement is later"
    assert numbers(at(7.5)) == [0, 1, 2, 3, 4, 5, 7]
    middle = len(lines[0]) + 5
    with pytest.raises(CorruptMessage, match=f"{J}.*{middle}"):
        numbers(part(begin=middle))
    with pytest.raises(InvalidInput, match=f"within the message that begins at {len(lines[0])}"):
        numbers(part(end=middle))


@pytest.mark.parametrize(
    ("line", "schema"),
    [
        (b'{"n":"12"}', {"n": "int64"}),
        (b'{"n":1.5}', {"n": "int64"}),
        (b'{"n":300}', {"n": "int8"}),
        (b'{"n":{"a":1}}', {"n": "string"}),
        (b'{"n":1}{"n":2}', {"n": "int64"}),
        (b'{"n":"\xff"}', {"n": "string"}),
    ],
    ids=str,
)
def test_misfits_are_reported_with_their_offset(tmp_path: Path, line: bytes, schema: dict[str, str]) -> None:
    value = b'{"n":"1"}\n' if schema["n"] == "string" else b'{"n":1}\n'
    content = value * 700 + Producer().line()[:-2] + b"," + line[1:] + b"\n" + value * 300
    manifest = manifest_of(tmp_path, [content])
    with pytest.raises(CorruptMessage, match=f"{J}.*{len(value) * 700}.*does not fit n {schema['n']}"):
        scan(manifest, schema).arrow()
    found = scan(manifest, schema, misfits="nulls").arrow().column("n").to_pylist()
    assert len(found) == 1001
    assert [row for row, each in enumerate(found) if each is None] == [700]


@pytest.mark.parametrize("torn", [b'{"n":20', b'{"_meta":{"uuid":"00000009-0000-1000-8000-010203040506"},"n":3'])
def test_messages_after_torn_lines_are_read(tmp_path: Path, torn: bytes) -> None:
    producer = Producer()
    pending = [producer.line(Flags.CONTINUE_TXN, n=n) for n in range(3)]
    content = torn + pending[0] + pending[1] + torn + pending[2] + torn + producer.line(Flags.ACK_TXN)
    manifest = manifest_of(tmp_path, [content])
    with pytest.raises(TornMessage, match=f"{J} at offset 0: .* next one begins at offset {len(torn)}"):
        scan(manifest, {"n": "int64"}).arrow()
    table = scan(manifest, {"n": "int64"}, misfits="nulls").arrow().sort_by("_offset")
    offsets = [0, len(torn), content.index(pending[1]), content.rindex(torn + pending[2]), content.index(pending[2])]
    offsets.append(content.rindex(torn))
    assert table.column("n").to_pylist() == [None, 0, 1, None, 2, None]
    assert table.column("_offset").to_pylist() == offsets


def test_lines_with_unusual_formatting_keep_their_rows(tmp_path: Path) -> None:
    content = b'{"n":1}\n  {"n":2}  \n{"n":3,"n2":{"a":[1,{"b":"}\\n{"}]}}\n{}\n'
    assert scan(manifest_of(tmp_path, [content]), {"n": "int64"}).arrow().column("n").to_pylist() == [1, 2, 3, None]


def test_damage_ends_a_scan_with_an_error(tmp_path: Path) -> None:
    producer = Producer()
    manifest = manifest_of(tmp_path, [producer.line(n=1), producer.line(n=2)])
    second = Path(manifest.fragments[1].url)
    original = second.read_bytes()
    found = scan(manifest, {"n": "int64"})
    second.write_bytes(compress(Codec.ZSTANDARD, producer.line(n=3)))
    with pytest.raises(CorruptFragment, match="not the one in its name"):
        found.arrow()
    with pytest.raises(polars.exceptions.ComputeError, match="not the one in its name"):
        polars.DataFrame(found)
    with pytest.raises(Exception, match="not the one in its name"):
        found.polars().collect()
    with duckdb.connect() as connection, pytest.raises(duckdb.Error, match="not the one in its name"):
        found.duckdb(connection).aggregate("count(*)").fetchall()
    second.unlink()
    with pytest.raises(StoreError, match="If retention has removed it, make the manifest again"):
        found.arrow()
    second.write_bytes(original)
    assert found.arrow().num_rows == 2


def test_signed_urls_are_read_until_they_expire(tmp_path: Path) -> None:
    line = Producer().line(n=1)
    manifest = manifest_of(tmp_path, [line], urls_expire_at=time.time() + 600)
    (part,) = manifest.journals
    with HttpStore() as store:
        path = "/" + part.fragments[0].fragment.content_path
        store.objects[path] = compress(Codec.ZSTANDARD, line), ""
        part = replace(part, fragments=[replace(part.fragments[0], url=store.url + path)])
        manifest = replace(manifest, journals=[part])
        assert scan(manifest, {"n": "int64"}).arrow().num_rows == 1
        with pytest.raises(InvalidInput, match=r"were good until 2023-.*make the manifest again"):
            scan(replace(manifest, urls_expire_at=EPOCH / SECOND)).arrow()


def test_a_path_below_a_store_needs_its_root(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, [Producer().line(n=1)])
    (part,) = manifest.journals
    moved = [replace(each, url="file:///" + each.fragment.content_path) for each in part.fragments]
    manifest = replace(manifest, journals=[replace(part, fragments=moved)])
    assert scan(manifest, file_root=tmp_path).arrow().num_rows == 1
    with pytest.raises(InvalidInput, match="file_root"):
        scan(manifest).arrow()


def test_invalid_scans_are_refused(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, [b"x"])
    with pytest.raises(InvalidInput, match="_offset: every scan has this column"):
        scan(manifest, {"_offset": "int64"})
    with pytest.raises(InvalidInput, match="give an Arrow schema, or types by name"):
        scan(manifest, {"n": "no type"})
    with pytest.raises(InvalidInput, match="has no fields"):
        scan(manifest, {})
    frames = replace(manifest, journals=[replace(manifest.journals[0], content_type="text/csv")])
    with pytest.raises(InvalidInput, match="has messages of text/csv"):
        scan(frames)
