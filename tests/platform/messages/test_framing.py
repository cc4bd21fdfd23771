"""JSON lines and fixed frames: written content, and messages read from arbitrary chunks."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages.framing import Envelope, IncompleteTail, JsonLines, JsonObject, iter_messages
from tests.platform.messages.texts import PRODUCER, cut, uuid_text

LINES = JsonLines()


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
json_messages = st.dictionaries(st.text().filter(lambda key: key != "_meta"), json_values, max_size=4)


@dataclass(frozen=True)
class Piece:
    offset: int
    content: bytes


def test_the_line_of_a_message_is_compact_and_begins_with_the_uuid() -> None:
    message = {"tail": "N1", "delay": 3.5, "von": "Köln\n"}
    line = LINES.marshal(message, uuid_text(16))
    assert line == f'{{"_meta":{{"uuid":"{uuid_text(16)}"}},"tail":"N1","delay":3.5,"von":"Köln\\n"}}\n'.encode()
    assert message == {"tail": "N1", "delay": 3.5, "von": "Köln\n"}
    assert LINES.marshal({}, uuid_text(16)) == LINES.acknowledgement(uuid_text(16))
    assert LINES.acknowledgement(UUID(uuid_text(16))) == f'{{"_meta":{{"uuid":"{uuid_text(16)}"}}}}\n'.encode()


def test_an_existing_parent_is_copied_not_changed() -> None:
    message = {"a": 1, "_meta": {"uuid": "old", "origin": "x"}}
    line = LINES.marshal(message, uuid_text(16))
    assert json.loads(line) == {"a": 1, "_meta": {"uuid": uuid_text(16), "origin": "x"}}
    assert line.startswith(LINES.uuid_prefix)
    assert message == {"a": 1, "_meta": {"uuid": "old", "origin": "x"}}
    assert json.loads(LINES.marshal({"_meta": None}, uuid_text(16))) == {"_meta": {"uuid": uuid_text(16)}}


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ([1], "JSON object"),
        ("text", "JSON object"),
        ({"x": float("nan")}, "JSON"),
        ({"x": object()}, "JSON"),
        ({"x": "\ud800"}, "JSON"),
        ({"_meta": "text"}, "must be an object"),
        ({"_meta": 0}, "must be an object"),
    ],
)
def test_values_that_json_cannot_hold_are_refused(message: Any, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        LINES.marshal(message, uuid_text(16))


@pytest.mark.parametrize("pointer", ["", "/", "uuid", "_meta/uuid"])
def test_pointers_to_impossible_places_are_refused(pointer: str) -> None:
    with pytest.raises(InvalidInput, match="JSON pointer"):
        JsonLines(pointer)


@pytest.mark.parametrize("pointer", ["/uuid", "/a/b/c", "/a~1b/~0c", '/qu"ote'])
@given(message=st.dictionaries(st.text(), json_values, max_size=3))
def test_any_pointer_round_trips(pointer: str, message: dict[str, Any]) -> None:
    framing = JsonLines(pointer)
    for key in ("a", "a/b"):
        message.pop(key, None)
    line = framing.marshal(message, uuid_text(320, 1))
    (read,) = iter_messages(framing, "j", [line], 0)
    assert (read.producer, read.clock, read.flags) == (PRODUCER, 320, 1)
    assert {**read.message, pointer[1:].split("/")[0]: 0}.keys() >= message.keys()


@given(st.lists(json_messages, max_size=6), st.lists(st.integers(0, 5000), max_size=8), st.integers(0, 2**40))
def test_messages_round_trip_in_any_chunks_with_their_offsets(
    messages: list[dict[str, Any]], cuts: list[int], begin: int
) -> None:
    lines = [LINES.marshal(message, uuid_text(160 * (n + 1), n % 3)) for n, message in enumerate(messages)]
    content = b"".join(lines)
    tails: list[IncompleteTail] = []
    read = list(iter_messages(LINES, "a/b", cut(content, cuts), begin, tails.append))
    assert [(e.journal, e.clock, e.flags) for e in read] == [
        ("a/b", 160 * (n + 1), n % 3) for n in range(len(messages))
    ]
    assert [content[e.begin - begin : e.end - begin] for e in read] == lines
    assert [e.content + b"\n" for e in read] == lines
    for envelope, message in zip(read, messages, strict=True):
        assert envelope.message == {"_meta": {"uuid": envelope.uuid}, **message}
    assert tails == []


def test_a_cut_off_line_is_reported_and_not_delivered() -> None:
    line = LINES.marshal({"a": 1}, uuid_text(16))
    tails: list[IncompleteTail] = []
    read = list(iter_messages(LINES, "j", [line, line[:20], line[20:30]], 100, tails.append))
    assert [e.begin for e in read] == [100]
    assert tails == [IncompleteTail("j", 100 + len(line), 30)]


@pytest.mark.parametrize(
    "line",
    [
        f'{{ "_meta" : {{ "uuid" : "{uuid_text(48, 1)}" }}, "a": 1}}',
        f'{{"a":1,"_meta":{{"uuid":"{uuid_text(48, 1)}"}}}}',
        f'{{"_meta":{{"origin":"x","uuid":"{uuid_text(48, 1)}"}},"a":1}}\r',
        '{"_meta":{"uuid":"' + uuid_text(48, 1).replace("-", "\\u002d") + '"}}',
    ],
)
def test_lines_of_other_writers_are_read_by_parsing(line: str) -> None:
    (read,) = iter_messages(LINES, "j", [line.encode() + b"\n"], 0)
    assert (read.producer, read.clock, read.flags) == (PRODUCER, 48, 1)


@pytest.mark.parametrize("line", ['{"a":1}', "{}", '{"_meta":{}}', '{"_meta":null}', '{"_meta":{"uuid":null}}'])
def test_a_line_without_a_uuid_has_clock_zero_unless_one_is_required(line: str) -> None:
    content = line.encode() + b"\n"
    (read,) = iter_messages(LINES, "j", [content], 0)
    assert (read.producer, read.clock, read.flags) == (bytes(6), 0, 0)
    with pytest.raises(CorruptMessage, match="journal j at offset 7: there is no UUID at /_meta/uuid"):
        list(iter_messages(JsonLines(require_uuid=True), "j", [content], 7))


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[1,2]",
        '"text"',
        '{"_meta":{"uuid":7}}',
        '{"_meta":"text"}',
        '{"_meta":{"uuid":"not-a-uuid"}}',
        f'{{"_meta":{{"uuid":"{uuid_text(48)[:-1]}x"}}}}',
        '{"_meta":{"uuid":"83fc2f81-cc5f-41e9-8002-010203040506"}}',
        '{"_meta":{"uuid":"\udcff"}}',
        "[" * 100_000,
    ],
)
def test_corrupt_lines_are_reported_by_offset_and_can_be_skipped(line: str) -> None:
    good = LINES.marshal({"a": 1}, uuid_text(16))
    bad = line.encode("utf-8", "surrogateescape") + b"\n"
    decoder = LINES.decoder("j", 1000)
    read: list[Envelope[JsonObject]] = []
    with pytest.raises(CorruptMessage) as caught:
        read.extend(decoder.feed(good + bad + good + good[:5]))
    assert (caught.value.journal, caught.value.offset) == ("j", 1000 + len(good))
    assert [e.begin for e in read] == [1000]
    after = 1000 + len(good) + len(bad)
    assert decoder.offset == after
    read = [*decoder.feed(b""), *decoder.feed(good[5:])]
    assert [(e.begin, e.end) for e in read] == [
        (after, after + len(good)),
        (after + len(good), after + 2 * len(good)),
    ]


def test_a_payload_that_is_not_json_is_corrupt_when_it_is_decoded() -> None:
    line = LINES.uuid_prefix + uuid_text(16).encode() + b'"},oops\n'
    (read,) = iter_messages(LINES, "j", [line], 55)
    with pytest.raises(CorruptMessage, match="journal j at offset 55: not a line of JSON"):
        _ = read.message


def test_holes_between_chunks() -> None:
    line = LINES.marshal({"a": 1}, uuid_text(16))
    size = len(line)
    decoder = LINES.decoder("j", 0)
    assert [e.begin for e in decoder.feed(line, 0)] == [0]
    assert [e.begin for e in decoder.feed(line, 1000)] == [1000]
    with pytest.raises(InvalidInput, match="was fed before"):
        list(decoder.feed(line, 1000))
    assert list(decoder.feed(line[:10])) == []
    with pytest.raises(CorruptMessage, match="content continues at offset 5000") as caught:
        list(decoder.feed(line, 5000))
    assert caught.value.offset == 1000 + size
    assert [e.begin for e in decoder.feed(b"")] == [5000]
    assert decoder.finish() is None


def test_pieces_with_offsets_are_accepted() -> None:
    line = LINES.marshal({"a": 1}, uuid_text(16))
    pieces = [Piece(10, line[:4]), Piece(14, line[4:] + line)]
    assert [e.begin for e in iter_messages(LINES, "j", pieces, 10)] == [10, 10 + len(line)]


def test_framing_and_envelope_pickle() -> None:
    (envelope,) = iter_messages(JsonLines("/u"), "j", [JsonLines("/u").marshal({"a": 1}, uuid_text(16))], 0)
    copy: Envelope[JsonObject] = pickle.loads(pickle.dumps(envelope))
    assert copy[:7] == envelope[:7]
    assert copy.message == envelope.message
    assert JsonLines("/u").marshal({}, "x") == pickle.loads(pickle.dumps(JsonLines("/u"))).marshal({}, "x")


def test_messages_can_be_imported_without_numpy_and_pyarrow() -> None:
    code = "import sys; sys.modules.update(numpy=None, pyarrow=None); import coranto.messages"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_mappings_that_are_not_dicts_are_refused() -> None:
    class Frozen(Mapping[str, Any]):
        def __getitem__(self, key: str) -> Any:
            raise KeyError(key)

        def __iter__(self) -> Any:
            return iter(())

        def __len__(self) -> int:
            return 0

    with pytest.raises(InvalidInput, match="cannot be written as JSON"):
        LINES.marshal(Frozen(), uuid_text(16))
