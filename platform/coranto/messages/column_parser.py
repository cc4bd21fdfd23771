"""Parsing of JSON lines into typed columns: many lines together, with the same result as parsing each line alone.

pyarrow parses the lines. It rejects all lines because of a single *misfit* (a line that does not fit the schema), and
accepts objects that span a newline, and words as numbers. Its result is therefore used only for lines that are
certainly valid. All other lines are *doubtful*: `LineParser` returns no values for them, and its caller decides
(`line_values.py`, Spark's parser).

If each line begins with `{` and ends with `}`, no JSON object spans a newline: it would have to continue with `{` after
`}`, or contain a newline in a string. As many objects as lines therefore means one object per line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from coranto.messages.arrow_values import joined, value_offsets
from coranto.messages.columnar import Bytes, Int64s, Mask

_FEW_LINES: Final = 64
_AT_ROW: Final = re.compile(r" in row ([0-9]{1,9})\Z")
_SHORTEST: Final = len(b"{}\n")
_WORDS: Final = (b"NaN", b"Inf")
"""Prefixes of the words that pyarrow reads as numbers. Other parsers accept other spellings, or no words."""
_TINY: Final = r"""[:,\[\s"][-+]?[0-9]*(?:\.[0-9]*)?[eE]-0*(?:[2-9][0-9]|[1-9][0-9]{2})|\.[0-9]{18,}[eE]-"""
"""Numbers with many decimal places and a negative exponent.

For a decimal, pyarrow looks up the power of ten for the excess digits without a bounds check. This crashes the process
or returns a wrong value.
"""


class LineParser:
    """Parses lines of JSON objects into columns of a schema."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._options = pyarrow.json.ParseOptions(explicit_schema=self.schema, unexpected_field_behavior="ignore")
        self._has_decimals = any(_has_decimals(field.type) for field in schema)

    def parse(self, content: Any) -> tuple[Any, Mask]:
        """Parse an Arrow binary array of lines with their newlines.

        Returns a table with a row for each line, and the mask of doubtful lines, whose rows hold nulls.
        """
        doubtful = self.doubtful_lines(content)
        parsed = []
        rows = np.flatnonzero(~doubtful)
        kept = content if len(rows) == len(content) else content.take(pa.array(rows))
        for begin, end, table in self._tables(kept, 0):
            if table is None:
                doubtful[rows[begin:end]] = True
            else:
                doubtful[rows[begin:end][self.doubtful_rows(table)]] = True
                parsed.append((rows[begin:end], table))
        return self._assembled(parsed, doubtful), doubtful

    def parse_one(self, line: bytes) -> Any | None:
        """Return a table of one line's values, or None if they do not fit. The line must be an object of JSON."""
        content = pa.array([line + b"\n"], pa.binary())
        return None if self._are_tiny(content).any() else self._attempt(content)[0]

    def doubtful_lines(self, content: Any) -> Mask:
        """Return the mask of lines that must not be parsed."""
        return doubtful_objects(content) | self._are_tiny(content)

    def doubtful_rows(self, table: Any) -> Mask:
        """Return the mask of parsed rows with doubtful values: none, unless a subclass overrides this."""
        return np.zeros(table.num_rows, dtype=np.bool_)

    def _are_tiny(self, content: Any) -> Mask:
        """Return the mask of lines with numbers that pyarrow must not parse as decimals."""
        mask: Mask = np.zeros(len(content), dtype=np.bool_)
        characters = joined(content) if self._has_decimals else mask
        at = np.flatnonzero((characters[:-1] | 0x20 == ord("e")) & (characters[1:] == ord("-")))
        if len(at):
            lengths = pc.binary_length(content).to_numpy()
            rows = np.unique(np.searchsorted(np.cumsum(lengths), at, side="right"))
            mask[rows] = pc.match_substring_regex(content.take(pa.array(rows)), _TINY)
        return mask

    def _tables(self, content: Any, at: int) -> Iterator[tuple[int, int, Any]]:
        """Yield (begin, end, table) for parts of the lines, counted from `at`. A part with a misfit has no table."""
        while len(content):
            table, misfit = self._attempt(content)
            if table is not None or len(content) <= _FEW_LINES:
                yield at, at + len(content), table
                return
            if misfit is None:
                done = len(content) // 2
                yield from self._tables(content.slice(0, done), at)
            elif misfit < _FEW_LINES // 4:  # Splitting at a misfit this close is slower than checking each line.
                done = _FEW_LINES
                yield at, at + done, None
            else:
                done = misfit + 1
                if misfit:
                    yield from self._until(content.slice(0, misfit), at)
                yield at + misfit, at + done, None
            at += done
            content = content.slice(done)

    def _until(self, content: Any, at: int) -> Iterator[tuple[int, int, Any]]:
        """Yield parsed parts of the lines before a misfit: one part, unless pyarrow finds further misfits in them."""
        table, _ = self._attempt(content)
        if table is not None:
            yield at, at + len(content), table
            return
        half = len(content) // 2
        yield from self._tables(content.slice(0, half), at)
        yield from self._tables(content.slice(half), at + half)

    def _attempt(self, content: Any) -> tuple[Any, int | None]:
        """Return the table of the lines, or None and the index of a misfit if there is one. The index may be unknown.

        pyarrow's error contains the index if a line is not JSON, or has a value of another type. The index only saves
        time: a wrong or missing index does not affect the result.
        """
        lines = joined(content)
        blocks = pyarrow.json.ReadOptions(use_threads=False, block_size=len(lines) + 1)
        try:
            table = pyarrow.json.read_json(pa.BufferReader(lines), blocks, self._options)
        except pa.ArrowInvalid as error:
            row = _AT_ROW.search(str(error))
            return None, int(row[1]) if row is not None and int(row[1]) < len(content) else None
        return (table, None) if table.num_rows == len(content) else (None, None)

    def _assembled(self, parsed: list[tuple[Int64s, Any]], doubtful: Mask) -> Any:
        if len(parsed) == 1 and len(parsed[0][0]) == len(doubtful) and not doubtful.any():
            return parsed[0][1]
        together = pa.concat_tables([self.schema.empty_table(), *(table for _, table in parsed)])
        place = np.zeros(len(doubtful), dtype=np.int64)
        if parsed:
            place[np.concatenate([rows for rows, _ in parsed])] = np.arange(together.num_rows)
        return together.take(pa.array(place, mask=doubtful))


def _has_decimals(kind: Any) -> bool:
    return pa.types.is_decimal(kind) or any(_has_decimals(kind.field(at).type) for at in range(kind.num_fields))


def without_heads(content: Any, headed: Mask, head_bytes: int) -> Any:
    """Remove the first field from the lines of the mask `headed`. The field has `head_bytes` with its comma.

    `content` is an Arrow binary array. Parsing the unused field of the UUID would take a sixth of the time.
    """
    ends = value_offsets(content)
    parts = np.empty(3 * len(content) + 1, dtype=np.int32)  # Of each line: its brace, the omitted part, the rest.
    parts[:-1:3] = ends[:-1]
    parts[1::3] = ends[:-1] + 1
    parts[2::3] = ends[:-1] + np.where(headed, 1 + head_bytes, 1)
    parts[-1] = ends[-1]
    kept = np.ones(3 * len(content), dtype=np.bool_)
    kept[1::3] = False
    split = pa.Array.from_buffers(pa.binary(), len(kept), [None, pa.py_buffer(parts), content.buffers()[2]])
    rest = split.filter(pa.array(kept))
    ends = value_offsets(rest)[::2].copy()
    return pa.Array.from_buffers(pa.binary(), len(content), [None, pa.py_buffer(ends), rest.buffers()[2]])


def doubtful_objects(content: Any) -> Mask:
    """Return the mask of lines that are not UTF-8, or may not be exactly one object that every parser accepts."""
    offsets = value_offsets(content).astype(np.int64)
    starts, ends = offsets[:-1] - offsets[0], offsets[1:] - offsets[0]
    characters = joined(content)
    doubtful: Mask = ends - starts < _SHORTEST
    whole = np.flatnonzero(~doubtful)
    doubtful[whole] = (characters[starts[whole]] != ord("{")) | (characters[ends[whole] - 2] != ord("}"))
    text = characters.tobytes() if _have_words(characters) else b""
    for at in _words(text):
        doubtful[np.searchsorted(ends, at, side="right")] = True
    try:
        content.cast(pa.string())
    except pa.ArrowInvalid:
        doubtful |= np.fromiter((not is_text(value.as_py()) for value in content), np.bool_, len(content))
    return doubtful


def _have_words(characters: Bytes) -> bool:
    """Return True if a word occurs anywhere. Compares pairs of letters, at even and then at odd positions."""
    for first, shifted in enumerate((characters, characters[1:].copy())):
        pairs = shifted[: len(shifted) & ~1].view("<u2")
        for word in _WORDS:
            places = first + 2 * np.flatnonzero(pairs == int.from_bytes(word[:2], "little"))
            thirds = characters[places[places + 2 < len(characters)] + 2]
            if (thirds == word[2]).any():
                return True
    return False


def _words(text: bytes) -> Iterator[int]:
    """Yield the positions of words where a number is possible."""
    for word in _WORDS:
        at = text.find(word)
        while at >= 0:
            before = at - 1
            while text[before] in b" \t\r-":
                before -= 1
            if text[before] in b":,[":
                yield at
            at = text.find(word, at + len(word))


def is_text(value: bytes) -> bool:
    """Return True if bytes are UTF-8."""
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
