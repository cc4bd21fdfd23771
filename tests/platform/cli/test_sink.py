"""Output of commands. Pipes without a reader must not block the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from coranto.cli.sink import Sink, opened_sink

CONTENT = bytes(range(256)) * 1024  # More than a pipe holds.


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    source, target = os.pipe()
    yield source, target
    for each in (source, target):
        try:
            os.close(each)
        except OSError:
            assert each == source  # A test may have closed that.


async def test_a_pipe_gets_all_content_while_it_is_read(pipe: tuple[int, int]) -> None:
    source, target = pipe

    async def read() -> bytes:
        found = b""
        while len(found) < len(CONTENT):
            found += await asyncio.to_thread(os.read, source, 10_000)
        return found

    sink = Sink(target)
    reading = asyncio.create_task(read())
    for at in range(0, len(CONTENT), 1000):
        await sink.write(CONTENT[at : at + 1000])
    await sink.flush()
    assert await reading == CONTENT


async def test_a_write_to_a_pipe_without_a_reader_can_be_cancelled(pipe: tuple[int, int]) -> None:
    source, target = pipe
    writing = asyncio.create_task(Sink(target).write(CONTENT))
    await asyncio.to_thread(os.read, source, 1)  # The write has started.
    assert not writing.done()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert not asyncio.get_running_loop().remove_writer(target)  # It no longer waits.


async def test_a_pipe_with_a_closed_reader_is_reported(pipe: tuple[int, int]) -> None:
    source, target = pipe
    os.close(source)
    with pytest.raises(BrokenPipeError):
        await Sink(target).write(CONTENT)


async def test_files_take_everything(tmp_path: Path) -> None:
    file = tmp_path / "content"
    with opened_sink(str(file)) as sink:
        await sink.write(b"gathered")
        assert file.read_bytes() == b""
        await sink.flush()
        assert file.read_bytes() == b"gathered"
        await sink.write(CONTENT)
        await sink.flush()
    assert file.read_bytes() == b"gathered" + CONTENT
