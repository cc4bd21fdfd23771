"""Column-wise conversion of texts of dates, times and bytes.

pyarrow converts texts of a plain form. Functions of `json_values.py` convert the others, once for each distinct text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import DataType, DateType, StructField, TimestampNTZType, TimestampType

from coranto.messages.columnar import Mask
from coranto_consumers.spark.decoding.json_times import NoZone
from coranto_consumers.spark.decoding.json_values import MISFIT, converter_of

_DAY: Final = (
    r"[12]\d{3}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1\d|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
)
_CLOCK: Final = r"[T ](?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?"
_PLAIN_DAY: Final = f"^{_DAY}$"
"""Dates that exist in each year: not the 29th of February."""
_PLAIN_LOCAL: Final = f"^{_DAY}{_CLOCK}$"
_PLAIN_ZONED: Final = rf"^{_DAY}{_CLOCK}(?:Z|[+-](?:0\d|1[0-7]):[0-5]\d)$"
_LOCAL: Final = pa.timestamp("us")
_UTC: Final = pa.timestamp("us", "UTC")


def settled_texts(array: Any, kind: DataType, to: Any, zone: tzinfo | None) -> tuple[Any, Mask]:
    """Convert texts to a type. Return them, and the mask of texts that do not fit, or lack a zone if none is known."""
    found, unlike = _plain_values(array, kind, to, zone)
    if not unlike.any():
        return found, unlike
    odd = pa.array(unlike)
    values, misfits = _each_once(array.filter(odd), _converter(kind, zone), to)
    unlike[unlike] = misfits
    return pc.replace_with_mask(found, odd, values), unlike


def _plain_values(array: Any, kind: DataType, to: Any, zone: tzinfo | None) -> tuple[Any, Mask]:
    """Convert texts of plain forms to a type. Return them, with nulls for other texts, and the mask of the others."""
    match kind:
        case DateType():
            return _where_plain(array, _PLAIN_DAY, to)
        case TimestampNTZType():
            return _where_plain(array, _PLAIN_LOCAL, to)
        case TimestampType():
            zoned, unlike = _where_plain(array, _PLAIN_ZONED, to)
            if zone is None or not unlike.any():
                return zoned, unlike
            local, not_local = _where_plain(array, _PLAIN_LOCAL, _LOCAL)
            times, unsure = _in_zone(local, zone)
            return pc.coalesce(zoned, times.cast(to)), unlike & (not_local | unsure)
    return pa.nulls(len(array), to), mask_of(pc.is_valid(array))


def _converter(kind: DataType, zone: tzinfo | None) -> Callable[[str], object]:
    convert = converter_of(StructField("", kind), kind, zone)

    def converted(text: str) -> object:
        try:
            return convert(text, text)
        except NoZone:
            return MISFIT

    return converted


def _each_once(array: Any, convert: Callable[[str], object], to: Any) -> tuple[Any, Mask]:
    """Convert texts by a function, called once for equal texts. Return the values and the mask of misfits."""
    encoded = array.dictionary_encode()
    found = [convert(text) for text in encoded.dictionary.to_pylist()]
    values = pa.array([None if value is MISFIT else value for value in found], to)
    misfits = pa.array([value is MISFIT for value in found], pa.bool_())
    return values.take(encoded.indices), mask_of(misfits.take(encoded.indices))


@functools.cache
def _rules() -> tuple[Any, Any]:
    """Return the times between which pyarrow's and Spark's time zone data agree.

    Early times are local mean times, and the data may end in 2037. pyarrow imports pandas for its first scalar: not
    before.
    """
    return tuple(pa.scalar(datetime(year, 1, 1), _LOCAL) for year in (1900, 2037))


def _in_zone(local: Any, zone: tzinfo) -> tuple[Any, Mask]:
    """Convert local times to UTC. Return them, and the mask of times where pyarrow may differ from Spark."""
    if not isinstance(zone, ZoneInfo):
        offset = pa.scalar(zone.utcoffset(None) or timedelta(), pa.duration("us"))
        return pc.subtract(local, offset), np.zeros(len(local), dtype=np.bool_)
    since, until = _rules()
    unsure = pc.or_(pc.less(local, since), pc.greater_equal(local, until))
    sure = pc.if_else(unsure, pa.scalar(None, _LOCAL), local)
    times = pc.assume_timezone(sure, zone.key, ambiguous="earliest", nonexistent="latest")
    skipped = pc.not_equal(pc.local_timestamp(times), local)  # Such a time does not exist: clocks are set forward.
    return times.cast(_UTC).cast(_LOCAL), mask_of(unsure) | mask_of(skipped)


def _where_plain(array: Any, form: str, to: Any) -> tuple[Any, Mask]:
    """Convert texts that match `form` to a type. Return them, with nulls for others, and the mask of the others."""
    plain = pc.match_substring_regex(array, form)
    return pc.if_else(plain, array, pa.scalar(None, pa.string())).cast(to), mask_of(pc.invert(plain))


def mask_of(array: Any) -> Mask:
    """Return an Arrow array of booleans as a mask. Nulls are False."""
    mask: Mask = pc.fill_null(array, False).to_numpy(zero_copy_only=False)
    return mask
