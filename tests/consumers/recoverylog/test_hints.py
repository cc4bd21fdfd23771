"""Hints of recovery logs: encodings and contradictions."""

from __future__ import annotations

import pytest

from coranto.errors import CorruptData, InvalidInput
from coranto_consumers.recoverylog import Fsm, Hints, LiveFnode, LogSegment
from coranto_consumers.recoverylog.operations import (
    Author,
    Fnode,
    SetProperty,
)
from tests.consumers.recoverylog.histories import LOG, live, segment


@pytest.mark.parametrize(
    "hints",
    [
        Hints(""),
        Hints(LOG, (LiveFnode(Fnode(1), ()),)),
        Hints(LOG, (LiveFnode(Fnode(2), (segment(100, 1, 5, 0),)),)),
        Hints(LOG, (live(segment(100, 5, 5, 50)), live(segment(100, 4, 4, 40)))),
        Hints(LOG, (live(segment(100, 1, 5, 0)), live(segment(200, 4, 4, 40)))),
        Hints("other/log", (live(segment(100, 1, 5, 0)),)),
    ],
)
def test_contradictory_hints_are_refused(hints: Hints) -> None:
    with pytest.raises(InvalidInput):
        Fsm(hints)
    with pytest.raises(CorruptData):
        Hints.from_bytes(hints.to_json() if hints.log != "other/log" else hints.to_wire().SerializeToString()[2:])


HINTS = Hints(
    LOG,
    (
        LiveFnode(
            Fnode(5),
            (
                LogSegment(Author(0xFFFFFFFF), 5, 0, 0, 8, 1 << 40, "old/log"),
                LogSegment(Author(7), 9, 100, 11, 10, 0, LOG),
            ),
        ),
    ),
    (SetProperty("/IDENTITY", "ü"),),
)


def test_hints_in_json_have_the_format_of_gazette() -> None:
    assert HINTS.to_json() == (
        b'{"log":"a/log","live_nodes":[{"fnode":5,"segments":['
        b'{"author":4294967295,"first_seq_no":5,"last_seq_no":8,"last_offset":1099511627776,"log":"old/log"},'
        b'{"author":7,"first_seq_no":9,"first_offset":100,"first_checksum":11,"last_seq_no":10}]}],'
        b'"properties":[{"path":"/IDENTITY","content":"\\u00fc"}]}'
    )


@pytest.mark.parametrize("content", [HINTS.to_json(), HINTS.to_wire().SerializeToString()])
def test_hints_are_read_from_either_encoding(content: bytes) -> None:
    assert Hints.from_bytes(content) == HINTS


def test_empty_hints_written_by_go_are_read() -> None:
    assert Hints.from_bytes(b'{"log":"a/log","live_nodes":null,"properties":null}') == Hints(LOG)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xff",
        b'{"log":5}',
        b'{"log":"a/log","live_nodes":[{"fnode":1,"segments":[{"author":-1}]}]}',
        b'{"log":"a/log","live_nodes":[{"fnode":1,"segments":[{"strange":1}]}]}',
        b'{"log":"a/log","live_nodes":[5]}',
    ],
)
def test_invalid_hints_are_refused(content: bytes) -> None:
    with pytest.raises(CorruptData):
        Hints.from_bytes(content)
