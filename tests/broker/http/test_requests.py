"""The meaning of addresses, arguments and Range headers of HTTP requests."""

from __future__ import annotations

import contextlib
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto import labels
from coranto.errors import InvalidInput
from coranto.wire import protocol_pb2 as pb
from coranto_broker.http.requests import append_request, read_request
from coranto_broker.http.statuses import HINTS, STATUSES


@pytest.mark.parametrize(
    ("target", "ranges", "expected"),
    [
        ("/journal/name", [], {}),
        ("/journal/name?block=true", [], {"block": True}),
        ("/journal/name?offset=123&block=true", [], {"offset": 123, "block": True}),
        ("/journal/name?offset=-1", [], {"offset": -1}),
        (
            "/journal/name?offset=1&end_offset=9&begin_mod_time=5",
            [],
            {"offset": 1, "end_offset": 9, "begin_mod_time": 5},
        ),
        ("/journal/name?block", [], {"block": True}),
        ("/journal/name", ["bytes=5-"], {"offset": 5}),
        ("/journal/name?block=1", ["bytes=5-9"], {"offset": 5, "end_offset": 10, "block": True}),
        ("/journal/name", ["bytes=0-0"], {"end_offset": 1}),
        ("/journal%2Fname?", [], {}),
    ],
)
def test_reads(target: str, ranges: list[str], expected: dict[str, object]) -> None:
    wanted = pb.ReadRequest(journal="journal/name", **expected)  # type: ignore[arg-type]
    assert read_request(target, ranges, metadata_only=False) == wanted
    wanted.metadata_only = True
    assert read_request(target, ranges, metadata_only=True) == wanted


@pytest.mark.parametrize(
    ("target", "ranges", "problem"),
    [
        ("/journal/name?offset=-2", [], "offset"),
        ("/journal//name", [], "clean path"),
        ("/journal/../name", [], "clean path"),
        ("/", [], "journal"),
        ("journal/name", [], "not the path"),
        ("/journal/name?block=foobar", [], "expected true or false"),
        ("/journal/name?offset=foobar", [], "offset='foobar' cannot be understood: expected a whole number"),
        ("/journal/name?offset=1_0", [], "expected a whole number"),
        ("/journal/name?offset=%D9%A3", [], "expected a whole number"),
        ("/journal/name", ["bytes=\u0663-"], "is not bytes="),
        ("/journal/name?offset=99999999999999999999", [], "64 bits"),
        ("/journal/name?offset=" + "9" * 10_000, [], "offset"),
        ("/journal/name?extra=1", [], "no argument 'extra'; known are begin_mod_time, block"),
        ("/journal/name?offset=1&offset=2", [], "given twice"),
        ("/journal/name?" + "block=1&" * 20, [], "fields"),
        ("/journal/name%ff", [], "cannot be understood"),
        ("/journal/name?offset=5&end_offset=5", [], "nothing from 5 to 5"),
        ("/journal/name?offset=5", ["bytes=1-2"], "not by both"),
        ("/journal/name", ["bytes=-5"], "offset=-1"),
        ("/journal/name", ["bytes=1-2,4-5"], "not bytes="),
        ("/journal/name", ["bytes=1-2", "bytes=1-2"], "not bytes="),
        ("/journal/name", ["bytes=9-2"], "ends before it begins"),
        ("/journal/name", ["items=1-2"], "not bytes="),
        ("/journal/name", ["bytes=" + "9" * 30 + "-"], "not bytes="),
    ],
)
def test_reads_that_are_refused(target: str, ranges: list[str], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        read_request(target, ranges, metadata_only=False)


def test_appends() -> None:
    assert append_request("/journal/name") == pb.AppendRequest(journal="journal/name")
    target = "/journal/name?offset=5&check_registers=aa%3Db&union_registers=cc%3Dd,ee%3D&subtract_registers=aa=b"
    request = append_request(target)
    assert request.offset == 5
    assert labels.format_selector(request.check_registers) == "aa=b"
    assert request.union_registers == labels.label_set(cc="d", ee="")
    assert request.subtract_registers == labels.label_set(aa="b")


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("/journal//name", "clean path"),
        ("/journal/name?extra=1", "no argument 'extra'"),
        ("/journal/name?block=1", "no argument 'block'"),
        ("/journal/name?offset=-5", "offset"),
        ("/journal/name?union_registers=aa", "'aa' is not name=value"),
        ("/journal/name?check_registers=%3D%3D", "check_registers"),
    ],
)
def test_appends_that_are_refused(target: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        append_request(target)


@given(st.text(max_size=40), st.lists(st.text(max_size=30), max_size=2), st.booleans())
def test_any_request_is_parsed_or_refused(text: str, ranges: list[str], encoded: bool) -> None:
    target = "/" + (quote(text, safe="/?&=") if encoded else text)
    for parse in (lambda: read_request(target, ranges, metadata_only=False), lambda: append_request(target)):
        with contextlib.suppress(InvalidInput):
            assert parse().journal


def test_every_status_has_an_answer() -> None:
    assert sorted(STATUSES) == sorted(pb.Status.values())
    assert set(HINTS) < set(STATUSES)
