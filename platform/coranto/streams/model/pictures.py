"""Renderings of a stream's segments: a table, a map of the keys over time, and both as HTML for notebooks.

The map shows which segment had which keys in each epoch, that is, after each change of the stream's segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Final, Protocol

from coranto.streams.model.keys import KEY_SPACE, KeyRange
from coranto.telemetry import amount

COLUMNS: Final = ("SEGMENT", "EPOCH", "KEYS", "BEGIN", "END", "STATE", "PREDECESSORS")
"""Names of the columns of `segment_row`."""

_EPOCH_WIDTH: Final = 72
_HEIGHT: Final = 240
_TEXT_HEIGHT: Final = 12
_ACTIVE, _ENDED = "#7fbf9f", "#d8d8d8"


class RenderedSegment(Protocol):
    """The part of `coranto.streams.model.stream.Segment` that pictures need."""

    @property
    def number(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def journal(self) -> str: ...
    @property
    def range(self) -> KeyRange: ...
    @property
    def predecessors(self) -> frozenset[int]: ...
    @property
    def sealing(self) -> bool: ...
    @property
    def sealed_at(self) -> int | None: ...
    @property
    def begin(self) -> int: ...


class RenderedStream(Protocol):
    """The part of `coranto.streams.model.stream.Stream` that pictures need."""

    @property
    def name(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def is_sealed(self) -> bool: ...
    @property
    def segments(self) -> Mapping[int, RenderedSegment]: ...
    def active(self) -> Sequence[RenderedSegment]: ...
    def successors(self, number: int) -> Sequence[RenderedSegment]: ...


def segment_row(stream: RenderedStream, segment: RenderedSegment, heads: Mapping[int, int]) -> tuple[str, ...]:
    """Return one segment as texts, in the order of `COLUMNS`. `heads` are the known write heads of active segments."""
    end = segment.sealed_at if segment.sealed_at is not None else heads.get(segment.number)
    return (
        str(segment.number),
        str(segment.epoch),
        str(segment.range),
        str(segment.begin),
        "-" if end is None else f"{end} ({amount(end - segment.begin, 'bytes')})",
        _state(stream, segment),
        _listed(segment.predecessors) or "-",
    )


def _state(stream: RenderedStream, segment: RenderedSegment) -> str:
    if not segment.sealing:
        return "active"
    if segment.sealed_at is None:
        return "being sealed"
    after = _listed(each.number for each in stream.successors(segment.number))
    return f"succeeded by {after}" if after else "sealed"


def _listed(numbers: Iterable[int]) -> str:
    """Return the numbers in order as text, with long runs shortened: `1, 4 to 9`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = (f"{run[0]} to {run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs)
    return ", ".join(shown)


@dataclass(frozen=True, slots=True)
class KeyMap:
    """The segments of each key range over time: per range, the segment's number in each of the epochs.

    The number is None where the segment is truncated away.
    """

    epochs: tuple[int, ...]
    rows: tuple[tuple[KeyRange, tuple[int | None, ...]], ...]


def key_map(stream: RenderedStream, *, epochs: int | None = None) -> KeyMap:
    """Return the map of a stream: all epochs that created a remaining segment, or only the last `epochs` of them."""
    segments = sorted(stream.segments.values(), key=lambda each: each.epoch)
    seen = tuple(sorted({each.epoch for each in segments}))[-epochs if epochs else None :]
    # Segments that ended before the shown epochs would only split the ranges further.
    shown = [each for each in segments if each.epoch >= seen[0] or _ends(stream, each) > seen[0]]
    edges = sorted({edge for each in shown for edge in (each.range.begin, each.range.end)})
    rows = []
    for begin, end in pairwise(edges):
        holders = [each for each in shown if each.range.contains(begin)]
        numbers = (next((each.number for each in reversed(holders) if each.epoch <= epoch), None) for epoch in seen)
        rows.append((KeyRange(begin, end), tuple(numbers)))
    return KeyMap(seen, tuple(rows))


def _ends(stream: RenderedStream, segment: RenderedSegment) -> int:
    """Return the epoch of a segment's first successors; the stream's next epoch if it has none."""
    return min((each.epoch for each in stream.successors(segment.number)), default=stream.epoch + 1)


# ----------------------------------------------------------------------------------------------------------- notebooks


def stream_html(stream: RenderedStream) -> str:
    """Return the map and the table of a stream as HTML, for `_repr_html_`."""
    count = len(stream.active())
    state = "sealed" if stream.is_sealed else f"{count} active segment{'' if count == 1 else 's'}"
    rows = [segment_row(stream, each, {}) for each in stream.segments.values()]
    title = f"<b>{escape(stream.name)}</b>, {state}, epoch {stream.epoch}"
    table = html_table([name.lower() for name in COLUMNS], rows)
    return f'<div style="overflow-x: auto">{title}<br/>{_svg(stream)}{table}</div>'


def html_table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a plain HTML table with all texts escaped."""
    head = _cells("th", columns)
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(tag: str, texts: Iterable[object]) -> str:
    return "".join(f"<{tag}>{escape(str(text))}</{tag}>" for text in texts)


def _svg(stream: RenderedStream) -> str:
    """Draw the segments as boxes, with epochs from left to right and keys from top to bottom."""
    epochs = sorted({each.epoch for each in stream.segments.values()})
    at = {epoch: number for number, epoch in enumerate(epochs)}
    boxes = "".join(_box(stream, each, at, len(epochs)) for each in stream.segments.values())
    labels = "".join(
        f'<text x="{number * _EPOCH_WIDTH + 2}" y="{_HEIGHT + _TEXT_HEIGHT}">epoch {epoch}</text>'
        for number, epoch in enumerate(epochs)
    )
    size = f'width="{len(epochs) * _EPOCH_WIDTH}" height="{_HEIGHT + _TEXT_HEIGHT + 4}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-size="11" fill="currentColor">{boxes}{labels}</svg>'


def _box(stream: RenderedStream, segment: RenderedSegment, at: Mapping[int, int], columns: int) -> str:
    x = at[segment.epoch] * _EPOCH_WIDTH
    width = at.get(_ends(stream, segment), columns) * _EPOCH_WIDTH - x
    y, height = (_HEIGHT * part / KEY_SPACE for part in (segment.range.begin, segment.range.width))
    place = f'x="{x}" y="{y:.1f}" width="{width}" height="{height:.1f}"'
    fill = _ENDED if segment.sealing else _ACTIVE
    title = escape(f"{segment.journal}: keys {segment.range}, {_state(stream, segment)}")
    label = (
        f'<text x="{x + width / 2}" y="{y + height / 2 + 4:.1f}" text-anchor="middle" fill="black">'
        f"{segment.number}</text>"
        if height >= _TEXT_HEIGHT
        else ""
    )
    return f'<g><title>{title}</title><rect {place} fill="{fill}" stroke="black"/>{label}</g>'


def position_html(segments: Sequence[tuple[int, int, int, bool]]) -> str:
    """Return a table of a position.

    Each of the `segments` is a segment number, an offset, the number of open transactions, and True if the segment is
    read to its end.
    """
    rows = [(number, offset, pending or "-", "yes" if whole else "-") for number, offset, pending, whole in segments]
    return html_table(("segment", "offset", "open transactions", "read to its end"), rows)
