"""Rows of one file, from a position on: lines of JSON, CSV with a header, and Parquet."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Final

from coranto.errors import InvalidInput, SourceChanged
from coranto.ingest.files.options import FileOptions
from coranto.ingest.files.schemas import fields_of_csv, fields_of_parquet
from coranto.ingest.rows import MAX_ROW_BYTES, parse_object, plain
from coranto.ingest.source import Poison, SourceRow
from coranto.types.kinds import TypeField

_BOM: Final = b"\xef\xbb\xbf"
_ROWS: Final = 1024
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,400}", re.ASCII)
_NOT_UTF8: Final = re.compile("[\ud800-\udfff]")


class FileRows(ABC):
    """The rows of one file that follow a position."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._name = json.dumps(path, ensure_ascii=False).encode("utf-8", "replace")

    @abstractmethod
    def read(self, max_bytes: int) -> tuple[list[SourceRow | Poison], int, bool]:
        """Return rows of about `max_bytes` bytes, the position after them, and True at the end of the file. Blocks."""

    def fields(self) -> tuple[TypeField, ...]:
        """Return the fields of the rows. Raises InvalidInput without a schema, or if fields cannot represent it."""
        raise InvalidInput("its rows have no schema")

    def row(self, at: int, fields: Mapping[str, Any], text: bytes | None = None) -> SourceRow:
        return SourceRow(self._path, dict(fields), text, b'"file":%b,"position":%d' % (self._name, at))


class Raw(io.RawIOBase):
    """Adapter of a file of the object store's library to Python's `RawIOBase`."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = bytes(self._file.read(len(buffer)))
        buffer[: len(found)] = found
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())


class JsonFileRows(FileRows):
    """Lines of JSON objects. A position is the offset of a line."""

    def __init__(self, path: str, file: io.RawIOBase, after: int) -> None:
        super().__init__(path)
        file.seek(after)
        self._file, self._at = io.BufferedReader(file, 1 << 20), after

    def read(self, max_bytes: int) -> tuple[list[SourceRow | Poison], int, bool]:
        rows, begin = list[SourceRow | Poison](), self._at
        while self._at - begin < max_bytes:
            at, line = self._at, self._file.readline(MAX_ROW_BYTES)
            if not line:
                return rows, self._at, True
            self._at += len(line)
            if len(line) >= MAX_ROW_BYTES and line[-1:] != b"\n":
                self._skip_line()
                rows.append(Poison(f"offset {at}", f"is longer than {MAX_ROW_BYTES} bytes"))
                continue
            content = line.removeprefix(_BOM).strip() if not at else line.strip()
            if not content:
                continue
            try:
                rows.append(self.row(at, *parse_object(content)))
            except InvalidInput as error:
                rows.append(Poison(f"offset {at}", error.message, None, content))
        return rows, self._at, False

    def _skip_line(self) -> None:
        while part := self._file.readline(1 << 20):
            self._at += len(part)
            if part.endswith(b"\n"):
                return


class CsvFileRows(FileRows):
    """Rows of CSV (RFC 4180), with a header. A position is a number of rows."""

    def __init__(self, path: str, file: io.RawIOBase, after: int, options: FileOptions) -> None:
        super().__init__(path)
        csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_BYTES))  # The limit is global.
        buffered = io.BufferedReader(file, 1 << 20)
        text = io.TextIOWrapper(buffered, "utf-8-sig", errors="surrogateescape", newline="")
        self._rows = csv.reader(text, delimiter=options.delimiter, strict=True)
        self._types = options.columns
        self._at = after
        header = next(self._rows, [])
        if len(set(header)) < len(header) or not all(header[:-1]):
            raise InvalidInput(f"the header of {path} names a column twice, or has one without a name: {header[:20]}")
        if missing := sorted(self._types.keys() - set(header)):
            raise InvalidInput(f"{path} has no column {missing[0]}, whose type is given; it has {header[:20]}")
        self._header = header
        for _ in range(after):
            self._next()

    def read(self, max_bytes: int) -> tuple[list[SourceRow | Poison], int, bool]:
        rows, size = list[SourceRow | Poison](), 0
        while size < max_bytes:
            found = self._next()
            if found is None:
                return rows, self._at, True
            at, self._at = self._at, self._at + 1
            if isinstance(found, str):
                rows.append(Poison(f"row {at}", f"is not CSV: {found}"))
                continue
            size += sum(map(len, found)) + 1
            try:
                rows.append(self.row(at, self._fields(found)))
            except InvalidInput as error:
                content = ",".join(found).encode("utf-8", "surrogateescape")
                rows.append(Poison(f"row {at}", error.message, None, content))
        return rows, self._at, False

    def fields(self) -> tuple[TypeField, ...]:
        return fields_of_csv(self._header, self._types)

    def _next(self) -> list[str] | str | None:
        """Return the next row that is not empty, the parser's error for a bad row, or None at the end."""
        while True:
            try:
                found = next(self._rows)
            except StopIteration:
                return None
            except csv.Error as error:
                return str(error)
            if found:
                return found

    def _fields(self, values: list[str]) -> dict[str, Any]:
        if len(values) != len(self._header):
            raise InvalidInput(f"has {len(values)} columns, and the header {len(self._header)}")
        fields: dict[str, Any] = {}
        for name, value in zip(self._header, values, strict=True):
            if _NOT_UTF8.search(value):
                raise InvalidInput(f"is not UTF-8, in column {name}")
            fields[name] = _typed(name, value, self._types.get(name, "text"))
        return fields


def _typed(name: str, value: str, kind: str) -> Any:
    if kind == "text":
        return value
    if not value:
        return None
    try:
        if kind == "integer" and _INTEGER.fullmatch(value):
            return int(value)
        if kind == "number" and math.isfinite(number := float(value)):
            return number
        if kind == "boolean":
            return {"true": True, "false": False}[value.lower()]
        if kind == "json":
            return json.loads(value)
    except (ValueError, KeyError, RecursionError):
        pass
    raise InvalidInput(f"has {value[:40]!r} in column {name}, which is not a valid {kind}")


class ParquetFileRows(FileRows):
    """Rows of Parquet. A position is a number of rows."""

    def __init__(self, path: str, file: io.RawIOBase, after: int) -> None:
        super().__init__(path)
        import pyarrow as pa
        from pyarrow import parquet

        try:
            self._parquet = parquet.ParquetFile(pa.PythonFile(file, mode="r"))
        except (pa.ArrowException, OSError) as error:
            raise InvalidInput(f"{path} is not a file of Parquet: {str(error)[:200]}") from error
        self._at, self._problems = after, (pa.ArrowException, OSError)
        self._rows = self._iterate(after)

    def _iterate(self, after: int) -> Iterator[Mapping[str, Any]]:
        metadata, begin = self._parquet.metadata, 0
        for number in range(metadata.num_row_groups):
            end = begin + metadata.row_group(number).num_rows
            if end > after:
                rows = (
                    row
                    for batch in self._parquet.iter_batches(_ROWS, row_groups=[number])
                    for row in batch.to_pylist(maps_as_pydicts="strict")
                )
                yield from itertools.islice(rows, max(after - begin, 0), None)
            begin = end

    def read(self, max_bytes: int) -> tuple[list[SourceRow | Poison], int, bool]:
        rows = list[SourceRow | Poison]()
        try:
            for each in itertools.islice(self._rows, _ROWS):
                rows.append(self._row(each))
        except self._problems as error:
            raise SourceChanged(f"{self._path} cannot be read behind row {self._at}: {str(error)[:200]}") from error
        return rows, self._at, len(rows) < _ROWS

    def fields(self) -> tuple[TypeField, ...]:
        return fields_of_parquet(self._parquet.schema_arrow)

    def _row(self, values: Mapping[str, Any]) -> SourceRow | Poison:
        at, self._at = self._at, self._at + 1
        try:
            return self.row(at, {name: plain(value) for name, value in values.items()})
        except InvalidInput as error:
            return Poison(f"row {at}", error.message)


def rows_of(options: FileOptions, path: str, file: Any, after: int) -> FileRows:
    """Return the rows of a file after a position. Raises InvalidInput for a file of another format. Blocks."""
    raw = Raw(file)
    if options.format == "csv":
        return CsvFileRows(path, raw, after, options)
    if options.format == "parquet":
        return ParquetFileRows(path, raw, after)
    return JsonFileRows(path, raw, after)
