"""The pure part of reading: the effect of each response, and invalid responses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coranto.client.read_progress import Located, ReadProgress, ReadStatus
from coranto.client.values import Chunk
from coranto.errors import CorruptData, CorruptFragment, JournalNotFound, OffsetJump
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.wire import protocol_pb2 as pb

NAME = "test/journal"
CONTENT = b"0123456789"
PROCESS = pb.ProcessSpec.ID(zone="local", suffix="broker-0")
HEADER = pb.Header(
    process_id=PROCESS,
    route=pb.Route(members=[PROCESS], primary=0, endpoints=["http://127.0.0.1:1"]),
    etcd=pb.Header.Etcd(cluster_id=1, member_id=2, revision=3, raft_term=4),
)


def fragment(begin: int, end: int, sum: bytes | None = None) -> pb.Fragment:
    return Fragment(NAME, begin, end, sum or sum_of(CONTENT[begin:end]), Codec.NONE).to_wire()


def metadata(offset: int, begin: int, end: int, *, head: int = 10, first: bool = True) -> pb.ReadResponse:
    return pb.ReadResponse(
        header=HEADER if first else None, offset=offset, write_head=head, fragment=fragment(begin, end)
    )


def content(begin: int, end: int) -> pb.ReadResponse:
    return pb.ReadResponse(offset=begin, content=CONTENT[begin:end])


def test_content_follows_metadata() -> None:
    progress = ReadProgress(NAME, 2, 8)
    assert progress.accept(metadata(2, 0, 5)) == Located(Fragment.from_wire(fragment(0, 5)), "")
    assert progress.accept(content(2, 4)) == Chunk(2, b"23", 10)
    assert progress.accept(content(4, 5)) == Chunk(4, b"4", 10)
    progress.accept(metadata(5, 5, 10, first=False))
    assert not progress.finished
    chunk = progress.accept(content(5, 8))
    assert isinstance(chunk, Chunk)
    assert chunk.end == progress.offset == 8
    assert progress.finished


def test_the_head_and_unavailable_content_are_distinguished() -> None:
    progress = ReadProgress(NAME, 4)
    not_yet = pb.ReadResponse(status=pb.OFFSET_NOT_YET_AVAILABLE, header=HEADER, offset=4, write_head=4)
    assert progress.accept(not_yet) is ReadStatus.AT_HEAD
    not_yet.write_head = 9
    assert progress.accept(not_yet) is ReadStatus.NOT_YET
    assert progress.write_head == 9


def test_a_status_is_an_error() -> None:
    with pytest.raises(JournalNotFound) as caught:
        ReadProgress(NAME, 0).accept(pb.ReadResponse(status=pb.JOURNAL_NOT_FOUND, header=HEADER))
    assert caught.value.header == HEADER


def test_a_jump_continues_or_fails() -> None:
    progress = ReadProgress(NAME, 1)
    progress.accept(metadata(4, 4, 10))
    assert progress.accept(content(4, 6)) == Chunk(4, b"45", 10)
    with pytest.raises(OffsetJump) as caught:
        ReadProgress(NAME, 1, fail_on_jump=True).accept(metadata(4, 4, 10))
    assert (caught.value.expected, caught.value.actual) == (1, 4)


def test_a_jump_beyond_the_end_finishes() -> None:
    progress = ReadProgress(NAME, 1, 3)
    progress.accept(metadata(4, 4, 10))
    assert progress.finished


def _no_header(response: pb.ReadResponse) -> None:
    response.ClearField("header")


def _no_etcd(response: pb.ReadResponse) -> None:
    response.header.ClearField("etcd")


def _backwards(response: pb.ReadResponse) -> None:
    response.offset = 1


def _outside_its_fragment(response: pb.ReadResponse) -> None:
    response.offset = 5


def _head_below_fragment(response: pb.ReadResponse) -> None:
    response.write_head = 4


def _no_codec(response: pb.ReadResponse) -> None:
    response.fragment.compression_codec = pb.INVALID


def _offset_of_nothing(response: pb.ReadResponse) -> None:
    response.ClearField("fragment")


@pytest.mark.parametrize(
    "damage",
    [
        _no_header,
        _no_etcd,
        _backwards,
        _outside_its_fragment,
        _head_below_fragment,
        _no_codec,
        _offset_of_nothing,
    ],
)
def test_metadata_that_breaks_the_protocol_is_refused(damage: Callable[[pb.ReadResponse], None]) -> None:
    response = metadata(2, 0, 5)
    damage(response)
    with pytest.raises(CorruptData, match="protocol"):
        ReadProgress(NAME, 2).accept(response)


def _skipping(response: pb.ReadResponse) -> None:
    response.offset = 3


def _repeating(response: pb.ReadResponse) -> None:
    response.offset = 1


def _with_a_write_head(response: pb.ReadResponse) -> None:
    response.write_head = 10


def _with_a_status(response: pb.ReadResponse) -> None:
    response.status = pb.NOT_ALLOWED


def _with_a_url(response: pb.ReadResponse) -> None:
    response.fragment_url = "file:///a"


def _beyond_the_end(response: pb.ReadResponse) -> None:
    response.content = CONTENT[2:9]


@pytest.mark.parametrize(
    "damage", [_skipping, _repeating, _with_a_write_head, _with_a_status, _with_a_url, _beyond_the_end]
)
def test_content_that_breaks_the_protocol_is_refused(damage: Callable[[pb.ReadResponse], None]) -> None:
    progress = ReadProgress(NAME, 2, 8)
    progress.accept(metadata(2, 0, 10))
    response = content(2, 4)
    damage(response)
    with pytest.raises(CorruptData, match="protocol"):
        progress.accept(response)


def test_content_before_metadata_is_refused_in_each_call() -> None:
    progress = ReadProgress(NAME, 2)
    with pytest.raises(CorruptData, match="metadata"):
        progress.accept(content(2, 4))
    progress.accept(metadata(2, 0, 10))
    progress.connected()
    with pytest.raises(CorruptData, match="metadata"):
        progress.accept(content(2, 4))


def test_a_fragment_that_is_read_completely_is_verified() -> None:
    progress = ReadProgress(NAME, 0)
    response = metadata(0, 0, 5)
    response.fragment.sum.part2 ^= 1
    progress.accept(response)
    progress.accept(content(0, 4))
    with pytest.raises(CorruptFragment, match="SHA-1"):
        progress.accept(content(4, 5))


def test_a_fragment_that_grows_is_verified_each_time() -> None:
    progress = ReadProgress(NAME, 0)
    progress.accept(metadata(0, 0, 3, head=3))
    progress.accept(content(0, 3))
    progress.accept(metadata(3, 0, 7, head=7, first=False))
    progress.accept(content(3, 7))
    grown = metadata(7, 0, 10, first=False)
    grown.fragment.sum.part1 ^= 1
    progress.accept(grown)
    with pytest.raises(CorruptFragment):
        progress.accept(content(7, 10))


def test_a_fragment_that_is_read_from_its_middle_is_not_verified() -> None:
    progress = ReadProgress(NAME, 1)
    response = metadata(1, 0, 5)
    response.fragment.sum.part2 ^= 1
    progress.accept(response)
    assert progress.accept(content(1, 5)) == Chunk(1, b"1234", 10)
