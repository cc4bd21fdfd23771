"""Messages given as texts keep every value as written."""

import json
from decimal import Decimal

import pytest

from coranto.errors import InvalidInput
from coranto.messages.framing import JsonLines, iter_messages
from coranto.messages.json_text import JsonTexts

UUID = "38824d70-e5e9-11f1-8000-f351621e4e49"
PRECISE = "12345678901234567890.123456789012345678"


def exact(line: bytes) -> object:
    return json.loads(line, parse_float=Decimal)


@pytest.mark.parametrize("pointer", ["/_meta/uuid", "/id", "/a/b/c", None])
@pytest.mark.parametrize(
    "text",
    [
        "{}",
        " { } ",
        f'{{"dec": {PRECISE}, "many": 1e400, "big": 99999999999999999999999}}',
        '{\n "n": 1,\r\n "text": "two\\nlines \\u2028 \\ud800"\n}\n',
        f'{{"_meta": {{"kept": {PRECISE}, "uuid": "other"}}, "n": 1}}',
        f'{{"\\u005fmeta": {{"kept": {PRECISE}}}, "n": 1}}',
        f'{{"a": {{"b": {{"kept": {PRECISE}}}, "x": 1.10}}, "id": 7}}',
        '{"a": null, "_meta": null, "n": 0.1000}',
    ],
)
def test_a_text_becomes_one_line_with_its_uuid_and_unchanged_values(text, pointer):
    lines = JsonLines(pointer)
    line = JsonTexts(lines).marshal(text, UUID)

    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    expected = exact(text.encode())
    if pointer is not None:
        *parents, last = pointer[1:].split("/")
        place = expected
        for name in parents:
            place[name] = place.get(name) or {}
            place = place[name]
        place[last] = UUID
    assert exact(line) == expected
    for number in (PRECISE, "1e400", "1.10", "0.1000"):
        assert (number in text) == (number.encode() in line)
    [envelope] = iter_messages(lines, "j", [line], 0)
    assert envelope.uuid == UUID if pointer else envelope.clock == 0
    assert line.startswith(lines.uuid_prefix), "readers find the UUID without parsing the line"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"a": 1', "is not JSON"),
        ('{"a": "line\nbreak"}', "is not JSON"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"_meta": 3}', "is not JSON"),
        ('{"a": "\ud800"}', "is not JSON"),
    ],
)
def test_other_texts_are_refused(text, problem):
    with pytest.raises(InvalidInput, match=problem):
        JsonTexts().marshal(text, UUID)


def test_texts_are_read_as_written():
    framing = JsonTexts()
    content = framing.marshal(f'{{"n": {PRECISE}}}', UUID) + framing.acknowledgement(UUID)
    first, ack = iter_messages(framing, "j", [content], 0)
    assert PRECISE in first.message
    assert ack.content + b"\n" == JsonLines().acknowledgement(UUID)
    with pytest.raises(InvalidInput, match="not a line of JSON"):
        framing.unmarshal(b"\xff")
