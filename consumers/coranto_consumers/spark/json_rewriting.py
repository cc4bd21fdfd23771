"""Lines of JSON, rewritten so that pyarrow parses what it has no types for, or reads only in one form.

==========================  ==================================================================================
``{"a":1,"b":2}`` for a MAP  ``[{"k":"a","v":1},{"k":"b","v":2}]``, a list of entries
``{"x":1}`` for a STRING     ``"{\\"x\\":1}"``, and so for any other JSON that is no text
``5`` for a TIMESTAMP        ``"#5"``, as times are parsed as texts
==========================  ==================================================================================

What replaces a value that becomes a text stands before it: the value itself goes to a field that nobody asks for, so
that pyarrow checks that it is JSON. Many lines are rewritten at once, by arrays of the places of brackets, commas,
colons and quotes. Nothing here checks lines in full. A line that is not JSON must not become JSON by being rewritten:
where that could happen, the line is doubtful, and so is one in which it is hard to tell what is where.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructType, TimestampType

from coranto.messages.columnar import Int64s, Mask

NUMBER_MARK: Final = "#"
"""The first character of a text that was a number."""
ENTRY: Final = ("k", "v")
"""The names of key and value in the entries of a map."""

Bytes: TypeAlias = NDArray[np.uint8]
_QUOTE, _BRACE, _BRACKET, _BRACE_END, _BRACKET_END, _COLON, _COMMA, _BACKSLASH = range(1, 9)
_KINDS: Final = np.zeros(256, dtype=np.uint8)
_KINDS[list(b'"{[}]:,\\')] = range(1, 9)
_STEP: Final = np.array([0, 0, 1, 1, -1, -1, 0, 0, 0], dtype=np.int8)
"""By how much a token changes the depth."""
_SPACE: Final = b" "[0]
_OPENS_LIST, _OPENS_ENTRIES, _NEXT_ENTRY, _VALUE_OF_ENTRY, _CLOSES_ENTRIES, _CLOSES_LIST = range(6)
_WRITTEN: Final = (b"[", b'[{"k":', b'},{"k":', b',"v":', b"}]", b"]")
_LENGTHS: Final = np.array([len(each) for each in _WRITTEN])


def rewrites(kind: DataType, *, maps_only: bool = False) -> bool:
    """Return True if values of a type may have to be rewritten. `maps_only`: if they have to be."""
    match kind:
        case ArrayType():
            return _rewrites_elements(kind.elementType, maps_only)
        case StructType():
            return any(rewrites(field.dataType, maps_only=maps_only) for field in kind.fields)
        case StringType() | TimestampType():
            return not maps_only
    return isinstance(kind, MapType)


def _rewrites_elements(kind: DataType, maps_only: bool = False) -> bool:
    """Return True if elements of lists, or values of maps, may have to be rewritten. Texts and times are left alone."""
    return not isinstance(kind, StringType | TimestampType) and rewrites(kind, maps_only=maps_only)


def rewritten(content: Any, schema: StructType, spare: str, *, maps_only: bool = False) -> tuple[Any, Mask]:
    """Rewrite an Arrow binary array of lines with their newlines, each of which begins with a brace.

    `spare` is a name that is not among the names of the schema. `maps_only`: only maps are rewritten. Returns the
    lines, and the mask of doubtful ones.
    """
    lines = _Lines(content)
    edits = _Edits(lines, spare, maps_only)
    edits.of_objects(lines.roots(), schema, 1)
    return edits.apply(), lines.doubtful


class _Lines:
    """Lines, and the places of the tokens in them that are within no text.

    Lines with brackets or quotes that do not match are doubtful, and have no tokens.
    """

    def __init__(self, content: Any) -> None:
        _, borders, data = content.buffers()
        ends = np.frombuffer(borders, dtype=np.int32)[content.offset : content.offset + len(content) + 1]
        self.data: Bytes = np.frombuffer(data, dtype=np.uint8)[int(ends[0]) : int(ends[-1])]
        self.ends: Int64s = ends[1:].astype(np.int64) - int(ends[0])
        self.doubtful: Mask = np.zeros(len(content), dtype=np.bool_)
        self.line: Int64s = np.zeros(0, dtype=np.int64)
        """By token, the number of its line."""
        kinds = _KINDS[self.data]
        self.at: Int64s = np.flatnonzero(kinds)
        self.kinds: NDArray[np.uint8] = kinds[self.at]
        self.backslashes: Int64s = self.at[self.kinds == _BACKSLASH]
        if len(self.backslashes):
            self._keep((self.kinds != _BACKSLASH) & ~self._escaped())
        self._number()
        self._drop(self._sums(self.kinds == _QUOTE) % 2 == 1)
        is_quote = self.kinds == _QUOTE
        self._keep((np.cumsum(is_quote, dtype=np.int32) % 2 == 0) | is_quote)
        self._drop(self._sums(_STEP[self.kinds]) != 0)
        step = _STEP[self.kinds]
        after = np.cumsum(step, dtype=np.int32)
        # An object that ends before the last token of its line is followed by something else.
        is_end = (step < 0) & (after == 0)
        last = np.maximum(self._borders[1:], 1) - 1
        ends_well = is_end[last] if len(is_end) else self.doubtful
        self._drop((self._sums(is_end) != 1) | ~ends_well)
        self._number()
        step = self.step = _STEP[self.kinds]
        """By how much a token changes the depth."""
        self.depth = np.cumsum(step, dtype=np.int32) - (step > 0) + (step < 0)
        """The number of brackets around a token; a closing one counts its own."""
        self.pairs: Int64s = self._pairs()
        """By opening token, the token that closes it."""

    def roots(self) -> Int64s:
        """Return the tokens that open lines."""
        return np.flatnonzero(self.depth == 0)

    def within(self, opens: Int64s, depth: int) -> Int64s:
        """Return the tokens that are directly within some of the brackets that open at a depth below `depth`."""
        borders = np.zeros(len(self.at) + 1, dtype=np.int8)
        borders[opens + 1] = 1
        borders[self.pairs[opens]] -= 1
        inside = np.cumsum(borders[:-1], dtype=np.int8).view(np.bool_)
        inside &= self.depth == depth
        return np.flatnonzero(inside)

    def doubt(self, tokens: Int64s) -> None:
        """Have the lines of tokens be doubtful."""
        self.doubtful[self.line[tokens]] = True

    def named(self, starts: Int64s, lengths: Int64s, name: bytes) -> Int64s:
        """Return those texts that are a name. `starts` are the tokens of their first quotes."""
        alike = starts[lengths == len(name)]
        places = self.at[alike][:, None] + 1 + np.arange(len(name))
        found: Int64s = alike[(self.data[places] == np.frombuffer(name, dtype=np.uint8)).all(axis=1)]
        return found

    def have_backslashes(self, starts: Int64s) -> Mask:
        """Return the mask of texts with backslashes. `starts` are the tokens of their first quotes."""
        first, last = (np.searchsorted(self.backslashes, self.at[each]) for each in (starts, starts + 1))
        mask: Mask = first != last
        return mask

    def behind(self, tokens: Int64s) -> Int64s:
        """Return the places of the first characters behind tokens. One space is skipped."""
        place: Int64s = self.at[tokens] + 1
        place += self.data[place] == _SPACE
        return place

    def _escaped(self) -> Mask:
        """Return the mask of tokens with an odd number of backslashes before them."""
        places = self.backslashes
        is_first = np.diff(places, prepend=-2) != 1
        numbers = np.arange(len(places))
        run = numbers - np.maximum.accumulate(np.where(is_first, numbers, 0)) + 1
        before = np.searchsorted(places, self.at - 1)
        before[before == len(places)] = 0
        mask: Mask = (places[before] == self.at - 1) & (run[before] % 2 == 1)
        return mask

    def _pairs(self) -> Int64s:
        brackets = np.flatnonzero(self.step)
        level = (self.depth[brackets] + (self.step[brackets] > 0)).astype(np.int16)
        in_order = brackets[np.argsort(level, kind="stable")]  # Of one depth, each is closed before the next opens.
        opens, closes = in_order[::2], in_order[1::2]
        pairs = np.zeros(len(self.at), dtype=np.int64)
        pairs[opens] = closes
        self.doubt(opens[self.kinds[opens] + 2 != self.kinds[closes]])
        return pairs

    def _number(self) -> None:
        """Number the lines of tokens."""
        self._borders = np.concatenate([[0], np.searchsorted(self.at, self.ends)])
        self.line = np.repeat(np.arange(len(self.ends)), np.diff(self._borders))

    def _sums(self, values: NDArray[Any]) -> Int64s:
        """Return the sum of tokens' values for each line."""
        sums: Int64s = np.diff(np.concatenate([[0], np.cumsum(values, dtype=np.int32)])[self._borders])
        return sums

    def _drop(self, lines: Mask) -> None:
        """Leave out the tokens of lines, which are doubtful from now on."""
        lines &= ~self.doubtful
        if lines.any():
            self.doubtful |= lines
            self._keep(~lines[self.line])

    def _keep(self, mask: Mask) -> None:
        self.at, self.kinds = self.at[mask], self.kinds[mask]
        if len(self.line):
            self._number()


class _Edits:
    """The texts to write in place of tokens, and before values."""

    def __init__(self, lines: _Lines, spare: str, maps_only: bool) -> None:
        self._lines = lines
        self._maps_only = maps_only
        self._codes = np.full(len(lines.at), -1, dtype=np.int64)
        self._before: dict[int, bytes] = {}
        """By place, what is written before the value there."""
        self._spare = f'","{spare}":'.encode()

    def of_objects(self, opens: Int64s, kind: StructType, depth: int) -> None:
        """Rewrite the fields of objects whose brackets are open."""
        lines = self._lines
        tokens = lines.within(opens, depth)
        quotes = tokens[(lines.kinds[tokens] == _QUOTE) & (tokens + 2 < len(lines.at))]
        keys = quotes[lines.kinds[quotes + 2] == _COLON]  # Only of a first quote is the next but one a colon.
        if len(lines.backslashes):
            lines.doubt(keys[lines.have_backslashes(keys)])
        lengths = lines.at[keys + 1] - lines.at[keys] - 1
        for field in kind.fields:
            if rewrites(field.dataType, maps_only=self._maps_only):
                self._of_values(lines.named(keys, lengths, field.name.encode()) + 2, field.dataType, depth)

    def _of_values(self, colons: Int64s, kind: DataType, depth: int) -> None:
        lines = self._lines
        places = lines.behind(colons)
        first = lines.data[places]
        lines.doubt(colons[first <= _SPACE])
        match kind:
            case StringType():
                self._as_texts(colons[(first != b'"'[0]) & (first != b"n"[0])], "")
            case TimestampType():
                is_number = ((first >= b"0"[0]) & (first <= b"9"[0])) | (first == b"-"[0])
                self._as_texts(colons[is_number], NUMBER_MARK)
                # A text of this form would be taken for a number.
                lines.doubt(colons[(first == b'"'[0]) & (lines.data[places + 1] == NUMBER_MARK.encode()[0])])
            case _:
                nested = (first == b"{"[0]) | (first == b"["[0])
                self._of_brackets(colons[nested] + 1, kind, depth + 1)

    def _of_brackets(self, opens: Int64s, kind: DataType, depth: int) -> None:
        """Rewrite what begins with brackets, if these are those of the type."""
        lines = self._lines
        is_object = lines.kinds[opens] == _BRACE
        match kind:
            case StructType():
                self.of_objects(opens[is_object], kind, depth)
            case ArrayType():
                self._of_elements(opens[~is_object], kind.elementType, depth)
            case MapType():
                lines.doubt(opens[~is_object])  # It must not be taken for a list of entries.
                self._of_maps(opens[is_object], kind, depth)

    def _of_elements(self, opens: Int64s, kind: DataType, depth: int) -> None:
        tokens = self._lines.within(opens, depth)
        nested = tokens[self._lines.step[tokens] > 0]
        if _rewrites_elements(kind, self._maps_only):
            self._of_brackets(nested, kind, depth + 1)

    def _of_maps(self, opens: Int64s, kind: MapType, depth: int) -> None:
        lines = self._lines
        is_empty = lines.pairs[opens] == opens + 1
        empty, opens = opens[is_empty], opens[~is_empty]
        lines.doubt(empty[lines.behind(empty) != lines.at[empty + 1]])  # There is something in it.
        self._codes[empty], self._codes[empty + 1] = _OPENS_LIST, _CLOSES_LIST
        self._codes[opens], self._codes[lines.pairs[opens]] = _OPENS_ENTRIES, _CLOSES_ENTRIES
        tokens = lines.within(opens, depth)
        kinds = lines.kinds[tokens]
        commas, colons = tokens[kinds == _COMMA], tokens[kinds == _COLON]
        self._codes[commas], self._codes[colons] = _NEXT_ENTRY, _VALUE_OF_ENTRY
        starts = np.concatenate([opens, commas])
        # Each entry is a text, a colon and a value: otherwise it is not JSON, but might become so.
        lines.doubt(starts[lines.data[lines.behind(starts)] != b'"'[0]])
        third = np.minimum(starts + 3, len(lines.at) - 1)
        lines.doubt(starts[lines.kinds[third] != _COLON])
        lines.doubt(colons[~np.isin(colons - 3, starts)])
        self._of_elements(opens, kind.valueType, depth)

    def _as_texts(self, colons: Int64s, mark: str) -> None:
        """Write values before themselves, as texts."""
        lines = self._lines
        begins = lines.behind(colons)
        following = colons + 1
        nested = np.flatnonzero(lines.step[following] > 0)
        nested = nested[lines.at[following[nested]] == begins[nested]]
        ends = lines.at[following].copy()
        ends[nested] = lines.at[lines.pairs[following[nested]]] + 1
        lines.doubt(colons[lines.data[ends - 1] <= _SPACE])  # Where the value ends is hard to tell.
        data = lines.data.tobytes() if len(colons) else b""
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            text = data[begin:end].replace(b"\\", b"\\\\").replace(b'"', b'\\"')
            self._before[begin] = b'"' + mark.encode() + text + self._spare

    def apply(self) -> Any:
        """Return the lines as they are to be."""
        lines = self._lines
        coded = np.flatnonzero(self._codes >= 0)
        before = np.array(sorted(self._before), dtype=np.int64)
        texts = [self._before[place] for place in before.tolist()]
        # A token becomes what is written for it, and a text is put in before a place.
        places = np.concatenate([lines.at[coded], before])
        codes = np.concatenate([self._codes[coded], np.full(len(before), -1)])
        added = np.concatenate([_LENGTHS[self._codes[coded]] - 1, [len(each) for each in texts]]).astype(np.int64)
        order = np.argsort(places, kind="stable")
        shifted = np.empty(len(places), dtype=np.int64)
        shifts = np.cumsum(added[order])
        shifted[order] = places[order] + shifts - added[order]
        out = np.empty(len(lines.data) + int(added.sum()), dtype=np.uint8)
        is_old = np.ones(len(out), dtype=np.bool_)
        written = [(shifted[codes == code], each) for code, each in enumerate(_WRITTEN)]
        for begins, each in written:
            for further in range(1, len(each)):
                is_old[begins + further] = False
        inserted = list(zip(shifted[len(coded) :].tolist(), texts, strict=True))
        for begin, text in inserted:
            is_old[begin : begin + len(text)] = False
        out[is_old] = lines.data
        for begins, each in written:
            for further, character in enumerate(each):
                out[begins + further] = character
        for begin, text in inserted:
            out[begin : begin + len(text)] = np.frombuffer(text, dtype=np.uint8)
        grown = np.concatenate([[0], shifts])[np.searchsorted(places[order], lines.ends)]
        ends = np.concatenate([[0], lines.ends + grown]).astype(np.int32)
        return pa.Array.from_buffers(pa.binary(), len(lines.ends), [None, pa.py_buffer(ends), pa.py_buffer(out)])
