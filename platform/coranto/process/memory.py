"""Memory settings for processes with a high throughput."""

from __future__ import annotations

import ctypes
import gc

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for these are M_TRIM_THRESHOLD and M_MMAP_THRESHOLD.
KEPT_BYTES = 64 << 20
_LARGE_BYTES = 16 << 20
GARBAGE_OBJECTS = 5_000


def keep_freed_memory() -> bool:
    """Keep up to KEPT_BYTES of freed memory for later allocations. Return False if the C library is not glibc.

    Messages of some hundred KiB are allocated and freed all the time. By default glibc may return each one's memory to
    the system, depending on the accidental layout of the heap. Then page faults for the next message take longer than
    all the work on its content.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES))


def tune_memory() -> None:
    """Apply both settings of this module. Call it at the end of the process's startup."""
    keep_freed_memory()
    reduce_garbage_collection()


def reduce_garbage_collection() -> None:
    """Collect cyclic garbage less often, and never scan existing objects. Call it at the end of the process's startup.

    Under load hundreds of calls are alive, and Python would scan their objects every few calls. Apart from rare cycles,
    these objects are freed immediately, without a scan.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, *gc.get_threshold()[1:])
