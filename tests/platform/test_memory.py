"""Freed memory is kept where the C library can be told to."""

from __future__ import annotations

import platform
import resource

from coranto.memory import keep_freed_memory


def test_large_blocks_are_reused_without_new_pages() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
    if not keep_freed_memory():
        return
    size, rounds = 1 << 20, 64
    bytearray(size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        bytearray(size)  # Touches all of it.
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < rounds * size // resource.getpagesize() // 4
