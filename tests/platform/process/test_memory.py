"""Freed memory is kept where the C library can be told to."""

from __future__ import annotations

import gc
import platform
import resource
from collections.abc import Callable

import pytest

from coranto.process.memory import GARBAGE_OBJECTS, keep_freed_memory, spare_garbage_collection, tune_memory


def test_large_blocks_are_reused_without_new_pages() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
    if not keep_freed_memory():
        return
    size, rounds = 1 << 20, 64
    bytearray(size)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(rounds):
        bytearray(size)  # Touches all of it.
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < rounds * size // resource.getpagesize() // 4


@pytest.mark.parametrize("settle", [spare_garbage_collection, tune_memory])
def test_objects_made_at_the_start_are_never_garbage_collected_again(settle: Callable[[], None]) -> None:
    before = gc.get_threshold()
    try:
        settle()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() == (GARBAGE_OBJECTS, *before[1:])
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
