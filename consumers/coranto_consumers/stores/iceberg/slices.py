"""Slices of rows to merge, so that few are in memory at a time. All rows of a key are in one slice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from coranto_consumers.stores.iceberg.merge import check_keys
from coranto_consumers.stores.merge import MergePlan

Parts = Callable[[], Iterable[pa.Table]]
"""Reads rows in parts, anew at each call."""
MOST_BYTES: Final = 256 << 20
"""The bytes of rows, in memory, that are merged at once."""
_SAMPLED: Final = 1000


def slices(plan: MergePlan, parts: Parts, most_bytes: int = MOST_BYTES) -> Iterator[pa.Table]:
    """Yield rows in tables of about `most_bytes`, cut by values of one key. They are read again for each.

    Rows whose keys have no order that is sure, or have a few values only, come in larger slices. Raises InvalidInput
    for rows that a plan cannot merge.
    """
    held: list[pa.Table] = []
    samples: dict[str, list[Any]] = {}
    size = 0
    for part in parts():
        size += part.nbytes
        if size <= most_bytes:
            held.append(part)
        else:
            held = []
        every = part.take(pa.array(range(0, part.num_rows, max(1, int(part.num_rows) // _SAMPLED)), pa.int64()))
        for key in plan.keys:
            if _has_order(part.column(key).type):
                samples.setdefault(key, []).append(every.column(key))
    bounds: list[Any] = []
    key = ""
    if size > most_bytes and samples:
        values = {name: pc.unique(pa.chunked_array(found)) for name, found in samples.items()}
        key = max(values, key=lambda name: len(values[name]))
        bounds = _bounds(values[key], math.ceil(size / most_bytes))
    for low, high in itertools.pairwise([None, *bounds, None]):
        chosen = held or [_between(part, key, low, high) for part in parts()]
        rows = pa.concat_tables(chosen, promote_options="default")
        check_keys(plan, rows)
        yield rows


def _has_order(kind: pa.DataType) -> bool:
    is_text: bool = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return is_text or bool(pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def _bounds(values: pa.Array, number: int) -> list[pa.Scalar]:
    """Return the lowest values of all slices but the first."""
    ordered = values.drop_null().sort()
    wanted = sorted({len(ordered) * each // number for each in range(1, number)} - {0})
    return [ordered[each] for each in wanted if each < len(ordered)]


def _between(part: pa.Table, key: str, low: Any, high: Any) -> pa.Table:
    """Return the rows whose key is in [low, high). Those without a key are in the first slice, to be refused."""
    if low is not None:
        part = part.filter(pc.greater_equal(part.column(key), low))
    return part if high is None else part.filter(pc.fill_null(pc.less(part.column(key), high), True))
