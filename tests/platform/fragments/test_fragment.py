"""Fragments: their names, and their wire form."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto.fragments.fragment import (
    MAX_OFFSET,
    ZERO_SUM,
    Codec,
    Fragment,
    parse_content_path,
    sum_from_wire,
    sum_of,
    sum_words,
)
from coranto.wire import protocol_pb2 as pb

POSTFIXES = st.sampled_from(["", "date=2013-01-01", "a=1/b=2", "é/100%"])


@st.composite
def fragments(draw: st.DrawFn) -> Fragment:
    begin = draw(st.integers(0, MAX_OFFSET))
    return Fragment(
        journal=draw(st.sampled_from(["a/journal", "é/漢=1"])),
        begin=begin,
        end=draw(st.integers(begin, MAX_OFFSET)),
        sum=draw(st.binary(min_size=20, max_size=20)),
        codec=draw(st.sampled_from(Codec)),
        backing_store=draw(st.sampled_from(["", "file:///store/"])),
        mod_time=draw(st.integers(0, 2**40)),
        path_postfix=draw(POSTFIXES),
    )


def test_a_content_name_matches_a_known_example() -> None:
    fragment = Fragment("a/journal", 1234567890, 2**63 - 1, bytes(range(1, 21)), Codec.GZIP, path_postfix="a=1/b=2")
    name = "00000000499602d2-7fffffffffffffff-0102030405060708090a0b0c0d0e0f1011121314.gz"
    assert fragment.content_name == name
    assert fragment.content_path == f"a/journal/a=1/b=2/{name}"
    assert fragment.length == 2**63 - 1 - 1234567890


def test_a_sum_matches_a_known_example() -> None:
    assert sum_words(sum_of(b"foobar")) == (0x8843D7F92416211D, 0xE9EBB963FF4CE281, 0x25932878)


def test_the_sum_of_empty_content_is_zero_and_not_a_hash() -> None:
    assert sum_of(b"") == ZERO_SUM
    assert sum_words(ZERO_SUM) == (0, 0, 0)
    assert sum_of(b"x") == hashlib.sha1(b"x").digest()


@given(st.binary(min_size=20, max_size=20))
def test_sum_round_trip(digest: bytes) -> None:
    part1, part2, part3 = sum_words(digest)
    assert sum_from_wire(pb.SHA1Sum(part1=part1, part2=part2, part3=part3)) == digest


@given(fragments())
def test_wire_round_trip(fragment: Fragment) -> None:
    assert Fragment.from_wire(pb.Fragment.FromString(fragment.to_wire().SerializeToString())) == fragment


@given(fragments(), fragments(), st.data())
def test_a_fragment_recognizes_its_own_wire_message(fragment: Fragment, other: Fragment, data: st.DataObject) -> None:
    wire = fragment.to_wire()
    assert fragment.is_wire(wire)
    name = data.draw(st.sampled_from([each.name for each in wire.DESCRIPTOR.fields]))
    theirs = other.to_wire()
    same = getattr(wire, name) == getattr(theirs, name)
    wire.ClearField(name)
    if name == "sum":
        wire.sum.CopyFrom(theirs.sum)
    else:
        setattr(wire, name, getattr(theirs, name))
    assert fragment.is_wire(wire) == same


@given(fragments())
def test_content_path_round_trip(fragment: Fragment) -> None:
    relative = fragment.content_path.removeprefix(fragment.journal + "/")
    parsed = parse_content_path(
        fragment.journal, relative, backing_store=fragment.backing_store, mod_time=fragment.mod_time
    )
    assert parsed == fragment


SUM = "0102030405060708090a0b0c0d0e0f1011121314"


@pytest.mark.parametrize(
    ("extension", "codec"),
    [
        (".raw", Codec.NONE),
        (".gz", Codec.GZIP),
        (".GZIP", Codec.GZIP),
        (".zst", Codec.ZSTANDARD),
        (".zstandard", Codec.ZSTANDARD),
        (".sz", Codec.SNAPPY),
        (".Snappy", Codec.SNAPPY),
        ("", Codec.GZIP_OFFLOAD_DECOMPRESSION),
        (".gzod", Codec.GZIP_OFFLOAD_DECOMPRESSION),
    ],
)
def test_codecs_have_the_extensions_of_their_files(extension: str, codec: Codec) -> None:
    assert parse_content_path("a/journal", f"0-A-{SUM}{extension}") == Fragment(
        "a/journal", 0, 10, bytes.fromhex(SUM), codec
    )


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("README", "content name"),
        ("", "content name"),
        (f"0-1-2-{SUM}.raw", "content name"),
        (f"0-{SUM}.raw", "content name"),
        (f"x-1-{SUM}.raw", "begin"),
        (f"0-+1-{SUM}.raw", "end"),
        (f"-1-{SUM}.raw", "begin"),
        (f"0-00000000000000001-{SUM}.raw", "end"),
        (f"0-8000000000000000-{SUM}.raw", "begin"),
        (f"2-1-{SUM}.raw", "begin"),
        (f"0-1-{SUM[:-2]}.raw", "sum"),
        (f"0-1-{SUM}00.raw", "sum"),
        (f"0-1-{SUM[:-1]}g.raw", "sum"),
        (f"0-1-{SUM}.lz4", "extension"),
        (f"0-1-{SUM}.raw.gz", "extension"),
        (f"a b/0-1-{SUM}.raw", "path_postfix"),
        (f"../0-1-{SUM}.raw", "path_postfix"),
        (f"/0-1-{SUM}.raw/", "content name"),
    ],
)
def test_file_names_of_other_forms_are_refused(path: str, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_content_path("a/journal", path)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"journal": "x"}, "journal"),
        ({"begin": 11}, "begin"),
        ({"begin": -1}, "begin"),
        ({"compression_codec": 0}, "compression_codec"),
        ({"compression_codec": 6}, "compression_codec"),
        ({"path_postfix": "/x"}, "path_postfix"),
    ],
)
def test_invalid_wire_fragments_are_refused(change: dict[str, object], field: str) -> None:
    message = Fragment("a/journal", 5, 10, sum_of(b"hello"), Codec.NONE).to_wire()
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(InvalidInput) as caught:
        Fragment.from_wire(message)
    assert caught.value.field == field


def test_a_fragment_without_a_sum_is_refused() -> None:
    with pytest.raises(InvalidInput, match="20 bytes"):
        Fragment("a/journal", 0, 1, b"short", Codec.NONE).validated()


def test_codec_numbers_equal_the_wire_enumeration() -> None:
    for codec in Codec:
        assert codec.value == pb.CompressionCodec.Value(codec.name)
    assert {codec.value for codec in Codec} == set(pb.CompressionCodec.values()) - {pb.INVALID}
