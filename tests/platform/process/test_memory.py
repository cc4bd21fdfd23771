"""Freed memory is kept if the C library supports it."""

from __future__ import annotations

import gc
import platform
import resource
from collections.abc import Callable

import pytest

from coranto.process.memory import GARBAGE_OBJECTS, keep_freed_memory, reduce_garbage_collection, tune_memory


def test_large_blocks_are_reused_without_new_pages() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
    if not keep_freed_memory():
        return
    size, rounds = 1 << 20, 64
    bytearray(size)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(rounds):
        bytearray(size)  # Writes to all pages.
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < rounds * size // resource.getpagesize() // 4


@pytest.mark.parametrize("settle", [reduce_garbage_collection, tune_memory])
def test_objects_created_at_start_are_excluded_from_garbage_collection(settle: Callable[[], None]) -> None:
    before = gc.get_threshold()
    try:
        settle()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() == (GARBAGE_OBJECTS, *before[1:])
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
