"""A recorder's operations, and a player that reads them back, on a fake broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from coranto.client import JournalClient
from coranto.errors import CorantoError, InvalidInput, Unavailable
from coranto.testing.fake_broker import Break, CallPoint, FakeBroker
from coranto_consumers.recoverylog import Author, Hints, Recorder, RecoveredFiles, fence_of
from coranto_consumers.recoverylog.decoder import DecodedOperation, LogDecoder, WrittenData
from coranto_consumers.recoverylog.operations import Create, Link, SetProperty, Unlink, Write

if TYPE_CHECKING:
    from .conftest import Owners

LOG, OTHER = "recovery/logs/one", "recovery/logs/two"
ContentOf = Callable[[Path], dict[str, bytes]]


def parse(content: bytes, log: str = LOG) -> list[object]:
    """Return the changes in a log, and the bytes after each write."""
    decoder = LogDecoder(log, 0)
    found: list[object] = []
    for event in decoder.feed(content):
        if isinstance(event, DecodedOperation):
            decoder.accept()
            found.append(event.op.change)
        elif isinstance(event, WrittenData):
            found.append(event.content)
    assert decoder.is_between
    return found


async def test_files_are_recorded(broker: FakeBroker, owners: Owners) -> None:
    directory = await owners.take_over()
    with directory.create("path/to//file") as file:
        file.write(b"hello ")
        file.write(b"world")
        file.write_at(2, b"LL")
    directory.link("path/to/file", "/linked")
    directory.rename("linked", "renamed")
    directory.remove("path/to/file")
    await directory.recorder.barrier()
    assert parse(broker.journals[LOG].content) == [
        None,  # The handoff.
        Create("/path/to/file"),
        Write(2, 0, 6),
        b"hello ",
        Write(2, 6, 5),
        b"world",
        Write(2, 2, 2),
        b"LL",
        Link(2, "/linked"),
        Link(2, "/renamed"),
        Unlink(2, "/linked"),
        Unlink(2, "/path/to/file"),
    ]


async def test_a_rename_replaces_another_file(broker: FakeBroker, owners: Owners) -> None:
    directory = await owners.take_over()
    for name in ("a", "b", "a"):
        directory.create(name).close()
    directory.rename("b", "a")
    await directory.recorder.barrier()
    assert parse(broker.journals[LOG].content)[1:] == [
        Create("/a"),
        Create("/b"),
        Unlink(2, "/a"),
        Create("/a"),
        Unlink(5, "/a"),
        Link(3, "/a"),
        Unlink(3, "/b"),
    ]
    live = (await directory.recorder.hints()).live_fnodes
    assert [node.fnode for node in live] == [3]


async def test_renaming_a_path_to_another_path_of_the_same_file_keeps_both(owners: Owners) -> None:
    directory = await owners.take_over()
    directory.create("a").close()
    directory.link("a", "b")
    directory.rename("a", "b")
    assert directory.exists("a")
    assert directory.exists("b")
    assert directory.path("a").samefile(directory.path("b"))


async def test_a_property_is_set_by_a_rename_and_kept_in_hints(owners: Owners, content_of: ContentOf) -> None:
    directory = await owners.take_over()
    with directory.create("tmp") as file:
        file.write(b"who I am")
    directory.rename("tmp", "IDENTITY")
    hints = await directory.recorder.hints()
    assert hints == Hints(LOG, (), (SetProperty("/IDENTITY", "who I am"),))
    played = await owners.peek()
    assert content_of(played.directory) == {"IDENTITY": b"who I am"}
    with pytest.raises(InvalidInput, match="property"):
        directory.create("IDENTITY")


@pytest.mark.parametrize(
    "operation",
    [
        lambda recorder: recorder.remove("missing"),
        lambda recorder: recorder.link("missing", "b"),
        lambda recorder: recorder.link("a", "a"),
        lambda recorder: recorder.rename("missing", "b"),
        lambda recorder: recorder.write(99, 0, b"x"),
        lambda recorder: recorder.write(2, -1, b"x"),
        lambda recorder: recorder.create("../outside"),
        lambda recorder: recorder.create(""),
        lambda recorder: recorder.create(".fnodes/5"),
        lambda recorder: recorder.create("a/below"),
        lambda recorder: recorder.link("a", "a/below"),
        lambda recorder: recorder.create("deep"),
        lambda recorder: recorder.rename("a", "deep"),
        lambda recorder: recorder.rename("deep/er", "a/below"),
    ],
)
async def test_invalid_operations_are_refused_and_change_nothing(
    operation: Callable[[Recorder], object], owners: Owners, content_of: ContentOf
) -> None:
    directory = await owners.take_over()
    directory.create("a").close()
    directory.create("deep/er").close()
    with pytest.raises(InvalidInput):
        operation(directory.recorder)
    directory.create("b").close()
    await directory.recorder.barrier()
    assert content_of((await owners.peek()).directory) == {"a": b"", "b": b"", "deep/er": b""}


async def test_a_file_may_be_renamed_to_a_path_below_its_old_name(owners: Owners, content_of: ContentOf) -> None:
    directory = await owners.take_over()
    directory.create("a").close()
    directory.recorder.rename("a", "a/b")
    await directory.recorder.barrier()
    assert content_of((await owners.peek()).directory) == {"a/b": b""}


async def test_operations_recorded_together_are_one_append(broker: FakeBroker, owners: Owners) -> None:
    directory = await owners.take_over()
    recorder, journal = directory.recorder, broker.journals[LOG]
    before = broker.count("Append")
    with recorder.together():
        fnode = recorder.create("a")
        recorder.write(fnode, 0, b"x" * (8 << 20))
        recorder.rename("a", "b")
        await asyncio.sleep(0)
        assert broker.count("Append") == before
    head = journal.head
    await recorder.barrier()
    assert broker.count("Append") == before + 1
    assert journal.head > head + (8 << 20)


async def test_an_exception_while_recording_together_ends_the_recorder(broker: FakeBroker, owners: Owners) -> None:
    directory = await owners.take_over()
    head = broker.journals[LOG].head

    def half_way() -> None:
        with directory.recorder.together():
            directory.create("a").close()
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError):
        half_way()
    with pytest.raises(RuntimeError):
        await directory.recorder.barrier()
    with pytest.raises(RuntimeError):
        directory.recorder.create("b")
    assert broker.journals[LOG].head == head


async def test_batches_keep_their_order(broker: FakeBroker, owners: Owners, content_of: ContentOf) -> None:
    directory = await owners.take_over()
    with directory.create("a") as file:
        for number in range(2000):
            file.write(b"%d\n" % number)
            if number % 300 == 0:
                await asyncio.sleep(0)
    await directory.recorder.barrier()
    assert broker.count("Append") < 100
    assert directory.recorder.pending_bytes == 0
    expected = b"".join(b"%d\n" % number for number in range(2000))
    assert content_of((await owners.peek()).directory) == content_of(directory.recorder.directory) == {"a": expected}


async def test_nothing_is_appended_before_the_awaited_appends(broker: FakeBroker, owners: Owners) -> None:
    directory = await owners.take_over()
    recorder, journal = directory.recorder, broker.journals[LOG]
    directory.create("before").close()
    first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    earlier = recorder.barrier()
    recorder.after([first])
    directory.create("after").close()
    later = recorder.barrier()
    await earlier
    assert parse(journal.content)[1:] == [Create("/before")]
    assert not later.done()
    first.set_result(None)
    await later
    assert parse(journal.content)[1:] == [Create("/before"), Create("/after")]


async def test_a_failure_of_an_awaited_append_ends_the_recorder(broker: FakeBroker, owners: Owners) -> None:
    directory = await owners.take_over()
    recorder, head = directory.recorder, broker.journals[LOG].head

    async def fail() -> None:
        raise Unavailable("an append failed")

    recorder.after([fail()])
    directory.create("a").close()
    with pytest.raises(Unavailable, match="an append failed"):
        await recorder.barrier()
    with pytest.raises(Unavailable, match="an append failed"):
        recorder.create("b")
    assert broker.journals[LOG].head == head


async def test_closing_cancels_barriers(broker: FakeBroker, owners: Owners) -> None:
    directory = await owners.take_over()
    broker.at(CallPoint.APPEND_BEGUN, Break.HANG)
    directory.create("a").close()
    waiting = directory.recorder.barrier()
    await asyncio.sleep(0.01)
    also = directory.recorder.barrier()
    await directory.recorder.close()
    assert waiting.cancelled()
    assert also.cancelled()
    with pytest.raises(InvalidInput, match="closed"):
        directory.recorder.create("b")


@pytest.mark.parametrize(
    "point", [CallPoint.APPEND_BEGUN, CallPoint.APPEND_CONTENT, CallPoint.APPEND_HALF_CLOSED, CallPoint.APPEND_APPLIED]
)
async def test_broken_connections_are_retried(
    point: CallPoint, broker: FakeBroker, owners: Owners, content_of: ContentOf
) -> None:
    directory = await owners.take_over()
    broker.at(point, Break.CUT, Break.CUT)
    with directory.create("a") as file:
        file.write(b"content")
    await directory.recorder.barrier()
    with directory.create("b") as file:
        file.write(b"more")
    await directory.recorder.barrier()
    for hints in (Hints(LOG), await directory.recorder.hints()):
        assert content_of((await owners.peek(hints)).directory) == {"a": b"content", "b": b"more"}


async def test_a_permanent_error_ends_the_recorder(broker: FakeBroker, owners: Owners) -> None:
    directory = await owners.take_over()
    broker.at(CallPoint.APPEND_BEGUN, grpc.StatusCode.PERMISSION_DENIED)
    directory.create("a").close()
    with pytest.raises(CorantoError, match="asked for"):
        await directory.recorder.barrier()
    with pytest.raises(CorantoError, match="asked for"):
        directory.recorder.create("b")


async def test_hints_of_a_recorder_rebuild_its_files(owners: Owners, content_of: ContentOf) -> None:
    directory = await owners.take_over()
    for number in range(10):
        with directory.create(f"file-{number}") as file:
            file.write(b"%d" % number * 100)
        await directory.recorder.barrier()
    for number in range(8):
        directory.remove(f"file-{number}")
    hints = await directory.recorder.hints()
    assert [node.fnode for node in hints.live_fnodes] == [18, 20]
    assert hints.live_fnodes[0].segments[0].first_offset > 800
    played = await owners.peek(hints)
    assert content_of(played.directory) == {"file-8": b"8" * 100, "file-9": b"9" * 100}
    assert played.recovered_bytes == 200


async def test_a_fork_continues_in_another_log(broker: FakeBroker, owners: Owners, content_of: ContentOf) -> None:
    first = await owners.take_over()
    with first.create("a") as file:
        file.write(b"from the first log")
    hints = await first.recorder.hints()
    author = Author(0x1234)
    second = await owners.record(await owners.recover(hints, author), log=OTHER)
    assert broker.journals[OTHER].registers == fence_of(author)
    assert parse(broker.journals[OTHER].content, OTHER) == [None]
    with pytest.raises(InvalidInput, match="nothing was written"):
        await second.recorder.hints()
    with second.open("a") as file:
        file.write_at(9, b"FIRST")
    with second.create("b") as file:
        file.write(b"from the second")
    hints = await second.recorder.hints()
    assert hints.log == OTHER
    assert [segment.log for segment in hints.live_segments()] == [LOG, OTHER]
    third = await owners.take_over(Hints.from_bytes(hints.to_json()))
    assert content_of(third.recorder.directory) == {"a": b"from the FIRST log", "b": b"from the second"}
    with third.create("c") as file:
        file.write(b"and on")
    await third.recorder.barrier()
    played = await owners.peek(await third.recorder.hints())
    assert set(content_of(played.directory)) == {"a", "b", "c"}


async def test_recording_needs_a_takeover_of_the_log(client: JournalClient, owners: Owners) -> None:
    recovery: RecoveredFiles = await owners.peek()
    with pytest.raises(InvalidInput, match="not taken over"):
        Recorder(client, recovery)
