"""Lines left by an append without a final newline: how readers divide them, and that all readers agree."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from coranto.errors import CorruptMessage
from coranto.messages import Flags, JsonLines, ProducerClock, ReadCommitted, ReadUncommitted, TypedLines
from coranto.messages.batches import UNREADABLE, line_batch
from coranto.messages.columnar import producer_number
from coranto.messages.framing import Envelope
from coranto.messages.torn_lines import MAX_DIVIDED_BYTES
from coranto.messages.uuids import ProducerId, format_uuid

LINES = JsonLines()
PRODUCER = ProducerId(bytes.fromhex("010203040506"))


def uuid_at(clock: int, flags: Flags = Flags.OUTSIDE_TXN) -> str:
    return format_uuid(PRODUCER, clock << 4, flags)


def line(clock: int, flags: Flags = Flags.OUTSIDE_TXN, **fields: Any) -> bytes:
    return LINES.marshal({"n": clock, **fields}, uuid_at(clock, flags))


def read(
    content: bytes, framing: Any = LINES, piece: int = 1 << 20
) -> tuple[list[Envelope[Any]], list[CorruptMessage]]:
    """Return all messages and errors of the decoder of single messages."""
    corrupt: list[CorruptMessage] = []
    chunks = [content[at : at + piece] for at in range(0, len(content), piece)]
    found = list(ReadUncommitted(framing, "j", chunks, 100, on_corrupt=corrupt.append))
    # `ReadUncommitted` begins at offset 100.
    return found, corrupt


def columns(content: bytes, framing: JsonLines | None = None) -> list[tuple[int, int, int, int, bytes, bool]]:
    batch, consumed = line_batch(framing or JsonLines(tolerant=True), "j", content, 100)
    assert consumed == content.rfind(b"\n") + 1
    rows = batch.to_pydict()
    unreadable = rows.get(UNREADABLE, [False] * batch.num_rows)
    picked = (rows[name] for name in ("offset", "end", "producer", "clock", "content"))
    return list(zip(*picked, unreadable, strict=True))


TORN: list[bytes] = [
    b'{"customer":"to',
    b'{"customer":"tor\\',
    b'{"customer":"torn","tags":["{}","\\"{',
    b'{"a":{"b":1},"c":{"d":2}',
    b"customer,torn",
    b"{",
    b"}",
    b'{"_meta":',
    b'{"_meta":{"uuid":"',
    line(7)[:-2],
    line(7, text='quotes \\" and {')[:-4],
    b"\xff\xfe{",
]


@pytest.mark.parametrize("torn", TORN, ids=repr)
@pytest.mark.parametrize(
    "after",
    [
        line(9),
        line(9, text='a "quoted" text, braces }{ and \\ backslashes \\\\'),
        line(9, nested={"a": [{"b": {}}, {}]}),
        b'{"n":9,"_meta":{"uuid":"%s","x":1}}\n' % uuid_at(9).encode(),
        LINES.acknowledgement(uuid_at(9, Flags.ACK_TXN)),
    ],
    ids=repr,
)
def test_the_message_after_a_torn_piece_is_read(torn: bytes, after: bytes) -> None:
    content = line(1) + torn + after + line(10)
    for piece in (1 << 20, 7, 1):
        found, corrupt = read(content, piece=piece)
        assert [each.clock >> 4 for each in found] == [1, 9, 10]
        assert found[1].content + b"\n" == after
        assert (found[1].begin, found[1].end) == (100 + len(line(1) + torn), 100 + len(line(1) + torn + after))
        [error] = corrupt
        assert error.offset == 100 + len(line(1))
        assert f"the next one begins at offset {found[1].begin}" in str(error)
    # Reading from the message's offset finds it, too.
    [again, _], none = read(content[found[1].begin - 100 :])
    assert (again.clock, none) == (found[1].clock, [])
    with pytest.raises(CorruptMessage) as raised:
        line_batch(LINES, "j", content, 100)
    assert str(raised.value) == str(error)


@pytest.mark.parametrize("torn", [each for each in TORN if b"uuid" not in each], ids=repr)
def test_the_message_may_have_any_format(torn: bytes) -> None:
    spaced = b' {"n": 9,\t"_meta": {"x": 1, "uuid": "%s"} } \r\n' % uuid_at(9).encode()
    found, [error] = read(torn + spaced + line(10))
    assert [each.clock >> 4 for each in found] == [9, 10]
    assert error.offset == 100


def test_whole_objects_on_a_line_are_separate_messages() -> None:
    plain = b'{"customer":"torn"}'
    content = plain + line(1)[:-1] + b" " + plain + line(2)
    found, corrupt = read(content)
    assert not corrupt
    assert [each.clock >> 4 for each in found] == [0, 1, 0, 2]
    assert found[0].message == {"customer": "torn"}
    # Typed messages are divided in the same way.
    typed, corrupt = read(content, TypedLines(dict))
    assert [each.message for each in typed] == [each.message for each in found]
    # If UUIDs are required, only the messages without one are corrupt.
    found, corrupt = read(content, JsonLines(require_uuid=True))
    assert [each.clock >> 4 for each in found] == [1, 2]
    assert [each.offset for each in corrupt] == [100, 100 + content.index(b" ") + 1]


@pytest.mark.parametrize(
    "whole",
    [
        # An object may contain a message as a value or as a text.
        LINES.marshal({"original": json.loads(line(3))}, uuid_at(5)),
        LINES.marshal({"original": line(3).decode()}, uuid_at(5)),
        LINES.marshal({"all": [json.loads(line(3)), {"_meta": {"uuid": uuid_at(4)}}]}, uuid_at(5)),
    ],
)
def test_an_object_is_never_divided(whole: bytes) -> None:
    content = line(1) + whole + line(6)
    found, corrupt = read(content)
    assert ([each.clock >> 4 for each in found], corrupt) == ([1, 5, 6], [])
    assert [clock >> 4 for _, _, _, clock, _, _ in columns(content)] == [1, 5, 6]
    # Also after a torn piece, which may be the beginning of such an object.
    for cut in (len(whole) // 2, len(whole) - 2):
        content = whole[:cut] + whole
        found, corrupt = read(content)
        assert ([each.clock >> 4 for each in found], [each.offset for each in corrupt]) == ([5], [100])


@pytest.mark.parametrize(
    "broken",
    [
        b'{"customer":"torn"{"customer":"no uuid"}\n',
        b'{"a":1,"b":{"c":2}\n',
        b'{"a":1},\n',
        b"}}}}\n",
        b"{}}\n",
        b'{"a":1}{"b":2}x\n',
        b'x{"_meta":{"uuid":"not one"}}\n',
        b'x{"_meta":{"uuid":"%s"}\n' % uuid_at(1).encode(),
        b'x"{"_meta":{"uuid":"%s"}}"}\n' % uuid_at(1).encode(),
        line(2)[:-2] + b'{"customer":"no uuid"}\n',
    ],
    ids=repr,
)
def test_a_line_without_proof_of_a_message_is_not_divided(broken: bytes) -> None:
    content = line(1) + broken + line(3)
    found, _ = read(content, JsonLines(tolerant=True))
    assert [each.content + b"\n" for each in found] == [line(1), broken, line(3)]
    assert [(begin, end) for begin, end, *_ in columns(content)] == [(each.begin, each.end) for each in found]


def test_lines_without_a_place_for_uuids_are_not_divided() -> None:
    content = b'{"customer":"to' + line(1)
    found, corrupt = read(content, JsonLines(None))
    assert ([each.content + b"\n" for each in found], corrupt) == ([content], [])
    assert len(columns(content, JsonLines(None))) == 1


@pytest.mark.parametrize(
    "filler", [b"{", b"}", b'"', b"\\", b'{"_meta":{"uuid":"', b"{}", b'"\\"}', b'{"a":'], ids=repr
)
def test_hostile_lines_take_time_proportional_to_their_length(filler: bytes) -> None:
    content = filler * (100_000 // len(filler)) + line(1)
    found, _ = read(content, JsonLines(tolerant=True))
    assert found[-1].content + b"\n" == line(1) or len(found) == 1
    longest = b"x" * MAX_DIVIDED_BYTES + line(1)
    assert len(read(longest, JsonLines(tolerant=True))[0]) == 1


def test_a_torn_piece_does_not_hide_an_acknowledgement() -> None:
    clock = ProducerClock(lambda: 1 << 60)
    pending = [LINES.marshal({"n": n}, format_uuid(PRODUCER, clock.tick(), Flags.CONTINUE_TXN)) for n in range(3)]
    ack = LINES.acknowledgement(format_uuid(PRODUCER, clock.tick(), Flags.ACK_TXN))
    for torn in (b'{"customer":"torn"}', b'{"customer":"to', pending[2][:-2]):
        content = b"".join(pending) + torn + ack

        def uncommitted(begin: int, end: int | None, content: bytes = content) -> ReadUncommitted[Any]:
            return ReadUncommitted(LINES, "j", [content[begin:end]], begin, on_corrupt=lambda error: None)

        committed = [each.message for each in ReadCommitted(uncommitted, "j")]
        assert [each["n"] for each in committed if "n" in each] == [0, 1, 2]
        rows = columns(content)
        assert rows[-1][3] == clock.last


@pytest.mark.parametrize("seed", range(40))
def test_single_message_and_columnar_readers_agree(seed: int) -> None:
    random_ = random.Random(seed)
    content = b""
    for clock in range(1, 200):
        if random_.random() < 0.15:
            content += random_.choice([*TORN, b'{"customer":"torn"}', b'{"a":1}{"b":2}', b" ", line(clock)[:-1]])
        content += random_.choice([line(clock), b'{"n": %d}\n' % clock, LINES.marshal({}, uuid_at(clock))])
    single, none = read(content, JsonLines(tolerant=True), piece=random_.randrange(1, 3000))
    assert not none
    expected = [
        (each.begin, each.end, producer_number(each.producer), each.clock, each.content.removesuffix(b"\n"))
        for each in single
    ]
    found = columns(content)
    assert [(*each[:4], each[4].removesuffix(b"\n")) for each in found] == expected
    assert expected[0][0] == 100
    assert all(before[1] == after[0] for before, after in pairwise(expected))
    assert expected[-1][1] == 100 + len(content)
    # With a strict framing, unreadable lines are corrupt, and all others are the same.
    strict, corrupt = read(content)
    assert sorted([each.begin for each in strict] + [each.offset for each in corrupt]) == [each[0] for each in expected]
    assert [each.offset for each in corrupt] == [each[0] for each in found if each[5]]
