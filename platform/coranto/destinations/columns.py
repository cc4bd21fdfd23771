"""Columns of dlt as fields of message types, and rows of a load file as messages."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from coranto.errors import InvalidInput
from coranto.ingest.rows import META, plain
from coranto.types.kinds import DecimalKind, Kind, PlainKind, TypeField

_KINDS: Final[Mapping[str, PlainKind]] = {
    "text": PlainKind.STRING,
    "double": PlainKind.DOUBLE,
    "bool": PlainKind.BOOLEAN,
    "timestamp": PlainKind.TIMESTAMP,
    "bigint": PlainKind.BIGINT,
    "binary": PlainKind.STRING,
    "json": PlainKind.STRING,
    "wei": PlainKind.STRING,
    "date": PlainKind.DATE,
    "time": PlainKind.STRING,
}
"""The kinds for dlt's types. Binary is base64. JSON is text, because it may have any form; so are 256-bit numbers."""
DEFAULT_DECIMAL: Final = (38, 9)
"""dlt's precision and scale of decimals without hints."""
_GZIP: Final = b"\x1f\x8b"


def fields_of(columns: Mapping[str, Mapping[str, Any]], load_id: str) -> tuple[TypeField, ...]:
    """Return the fields of a table, with the column `load_id` if it is given. Raises InvalidInput."""
    if META in columns:
        raise InvalidInput(f"column {META} is the place of the messages' UUIDs: rename it in the source")
    found = [
        TypeField(name, _kind_of(name, column), column.get("nullable", True))
        for name, column in columns.items()
        if column.get("data_type")
    ]
    if load_id and load_id not in columns:
        found.append(TypeField(load_id, PlainKind.STRING, nullable=False))
    return tuple(found)


def _kind_of(name: str, column: Mapping[str, Any]) -> Kind:
    kind = column["data_type"]
    if kind == "decimal":
        precision, scale = column.get("precision"), column.get("scale")
        if precision is None:
            return DecimalKind(*DEFAULT_DECIMAL)
        return DecimalKind(precision, DEFAULT_DECIMAL[1] if scale is None else scale)
    if kind == "timestamp" and column.get("timezone") is False:
        return PlainKind.TIMESTAMP_NTZ
    if kind not in _KINDS:
        raise InvalidInput(f"column {name} is {kind}, which Coranto does not know: give it the hint text")
    return _KINDS[kind]


def rows_of(path: Path, columns: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a load file, of JSON lines or Parquet, as messages. Raises InvalidInput for a broken file."""
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    texts = [name for name, column in columns.items() if column.get("data_type") == "json"]
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    with path.open("rb") as raw:
        is_packed = raw.read(len(_GZIP)) == _GZIP
    with gzip.open(path) if is_packed else path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = decode(line)
            except msgspec.MsgspecError as error:
                raise InvalidInput(f"line {number} of {path.name} is not a JSON object: {error}") from error
            for name in texts:
                if row.get(name) is not None:
                    row[name] = json.dumps(row[name], ensure_ascii=False, separators=(",", ":"))
            yield row


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield rows of Parquet. dlt stores JSON as text there; lists and structs of Arrow tables become JSON text, too."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                found = {name: plain(value) for name, value in row.items()}
                yield {
                    name: json.dumps(value, ensure_ascii=False, separators=(",", ":"))
                    if isinstance(value, dict | list)
                    else value
                    for name, value in found.items()
                }
