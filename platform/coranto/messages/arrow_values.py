"""The buffers of Arrow arrays as numpy arrays, without a copy, for work on whole columns of texts or bytes.

The *value offsets* of an Arrow array are the positions in its data where each value begins, and the end of the last
value. A slice has the offsets of its own values, in the data of the original array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coranto.messages.columnar import Bytes, Int32s


def value_offsets(column: Any) -> Int32s:
    """Return the value offsets of an Arrow array of texts, bytes, lists or maps: one more than the number of values."""
    return np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset : column.offset + len(column) + 1]


def data_of(values: Any) -> Bytes:
    """Return the data that the value offsets of an Arrow array of texts or bytes refer to."""
    data = values.buffers()[2]
    return np.frombuffer(b"" if data is None else data, dtype=np.uint8)


def joined(values: Any) -> Bytes:
    """Return the concatenated texts or bytes of an Arrow array, without values outside of a slice."""
    offsets = value_offsets(values)
    return data_of(values)[offsets[0] : offsets[-1]]
