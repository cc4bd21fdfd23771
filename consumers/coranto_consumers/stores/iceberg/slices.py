"""Slices of rows to merge, which limit the rows in memory. All rows of a key are in one slice."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from coranto_consumers.stores.iceberg.merge import check_keys
from coranto_consumers.stores.merge import MergePlan

Parts = Callable[[], Iterable[pa.Table]]
"""Reads all rows, in parts, at each call."""
MAX_BYTES: Final = 256 << 20
"""The target size of a slice in memory, in bytes."""
_SAMPLED: Final = 1000


class _Sample(NamedTuple):
    """The values of a key column in every `step`th row of a part."""

    values: pa.ChunkedArray
    step: int


def slices(plan: MergePlan, parts: Parts, max_bytes: int = MAX_BYTES) -> Iterator[pa.Table]:
    """Yield rows in tables of about `max_bytes`, split by the values of one key column.

    Reads the parts again for each table if they exceed `max_bytes`. Tables are larger if no key column has a reliable
    order or enough distinct values. Raises InvalidInput for rows that a plan cannot merge.
    """
    held: list[pa.Table] = []
    samples: dict[str, list[_Sample]] = {}
    size = 0
    for part in parts():
        size += part.nbytes
        if size <= max_bytes:
            held.append(part)
        else:
            held = []
        step = max(1, int(part.num_rows) // _SAMPLED)
        every = part.take(pa.array(range(0, part.num_rows, step), pa.int64()))
        for key in plan.keys:
            if _has_order(part.column(key).type):
                samples.setdefault(key, []).append(_Sample(every.column(key), step))
    bounds: list[Any] = []
    key = ""
    if size > max_bytes and samples:
        number = math.ceil(size / max_bytes)
        found = {name: _bounds(taken, number) for name, taken in samples.items()}
        key = max(found, key=lambda name: len(found[name]))  # Most bounds mean the smallest slices.
        bounds = found[key]
    for low, high in itertools.pairwise([None, *bounds, None]):
        chosen = held or [_between(part, key, low, high) for part in parts()]
        rows = pa.concat_tables(chosen, promote_options="default")
        check_keys(plan, rows)
        yield rows


def _has_order(kind: pa.DataType) -> bool:
    is_text: bool = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return is_text or bool(pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def _bounds(samples: Sequence[_Sample], number: int) -> list[pa.Scalar]:
    """Return the lowest value of each slice but the first, such that slices have about equal numbers of rows."""
    values = pa.chunked_array([each.values for each in samples]).combine_chunks()
    rows = [each.step for each in samples for _ in range(len(each.values))]
    order = pc.sort_indices(values).slice(0, len(values) - values.null_count)
    ordered = values.take(order)
    ends = list(itertools.accumulate(rows[index] for index in order.to_pylist()))
    total = ends[-1] if ends else 0
    found: list[pa.Scalar] = []
    for each in range(1, number):
        at = bisect.bisect_right(ends, total * each / number)
        if at < len(ends) and ordered[at] not in (ordered[0], *found[-1:]):
            found.append(ordered[at])
    return found


def _between(part: pa.Table, key: str, low: Any, high: Any) -> pa.Table:
    """Return the rows whose key is in [low, high). Rows with a null key are in the first slice, which rejects them."""
    if low is not None:
        part = part.filter(pc.greater_equal(part.column(key), low))
    return part if high is None else part.filter(pc.fill_null(pc.less(part.column(key), high), True))
