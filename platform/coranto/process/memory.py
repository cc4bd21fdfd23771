"""How a process that moves much content treats memory that it has freed."""

from __future__ import annotations

import ctypes
import gc

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for these are M_TRIM_THRESHOLD and M_MMAP_THRESHOLD.
KEPT_BYTES = 64 << 20
_LARGE_BYTES = 16 << 20
GARBAGE_OBJECTS = 5_000


def keep_freed_memory() -> bool:
    """Keep up to KEPT_BYTES of freed memory for what is allocated next. False where the C library is not glibc.

    Messages of some hundred KiB are allocated and freed all the time. By default glibc gives each of them back to the
    system, or not, as chance arranged the heap; and if it does, touching fresh pages for the next takes longer than all
    that is done with its content.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES))


def spare_garbage_collection() -> None:
    """Look for cyclic garbage less often, and never again in what there is now: for a process that has started.

    Under load hundreds of calls are alive, so that Python would look through them all every few calls. What they leave
    behind is freed at once, but for rare cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, *gc.get_threshold()[1:])
