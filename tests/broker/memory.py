"""The memory of this process, including libraries in C."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from pathlib import Path


def resident() -> int:
    """Return the resident bytes of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def grown(work: Callable[[], object]) -> int:
    """Return the growth in bytes of this process by repeated work."""
    work()
    before = resident()
    work()
    return resident() - before
