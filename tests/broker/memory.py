"""The memory of this process, including that of libraries in C."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from pathlib import Path


def resident() -> int:
    """Bytes of this process that are in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def grown(work: Callable[[], object]) -> int:
    """Bytes by which work that was done once before has the process grow."""
    work()
    before = resident()
    work()
    return resident() - before
