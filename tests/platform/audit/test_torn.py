"""Deep audits find truncated messages in stored content and in spools."""

from __future__ import annotations

import pytest

from coranto.audit import Kind
from coranto.audit.torn import Torn, TornSearch, search
from coranto.labels import CONTENT_TYPE, CSV, FIXED_FRAMES, JSON_LINES, LINES, label_set
from coranto.messages.fixed_frame import encode_frame
from coranto.wire import protocol_pb2 as pb
from tests.platform.audit.conftest import REPLICATIONS, Damaged, J, Play, kinds

NAME = "shop/lines"
LINE = b'{"_meta":{"uuid":"00000009-0000-1000-8000-010203040506"},"text":"%s"}\n' % (b"x" * 200)


@REPLICATIONS
@pytest.mark.parametrize("stored", [True, False])
def test_a_torn_line_is_a_warning_and_not_an_error(play: Play, replication: int, stored: bool) -> None:
    async def story(journal: Damaged) -> None:
        await journal.cluster.create(journal.spec(NAME))
        appends = [LINE * 5, LINE, b'{"customer":"to', LINE, b'{"customer":"torn"}', LINE, b'{"customer"', LINE]
        begins = [(await journal.client.append(NAME, each)).begin for each in appends]
        if stored:
            for _ in range(3):  # All but the last one are in completed fragments.
                await journal.client.append(NAME, LINE * 5)
            await journal.later()
        assert not kinds(await journal.deep(selector=f"name={NAME}"))
        (info,) = (await journal.client.list(f"name={NAME}")).journals
        info.spec.labels.CopyFrom(label_set({CONTENT_TYPE: JSON_LINES}))
        await journal.client.apply([pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)])
        report = await journal.deep(selector=f"name={NAME}")
        (found,) = [each for each in report.findings if each.kind is Kind.MESSAGES_TORN]
        assert (found.facts["count"], found.facts["offsets"]) == (2, [begins[2], begins[6]])
        assert f"first at offset {begins[2]}" in found.message
        assert report.sound
        assert Kind.MESSAGES_TORN not in kinds(await journal.audit(f"name={NAME}"))

    play(replication, story)


@REPLICATIONS
def test_whole_messages_have_no_finding(play: Play, replication: int) -> None:
    async def story(journal: Damaged) -> None:
        spec = journal.spec(NAME)
        spec.labels.CopyFrom(label_set({CONTENT_TYPE: JSON_LINES}))
        await journal.cluster.create(spec)
        for _ in range(10):
            await journal.client.append(NAME, LINE * 3)
        await journal.later()
        assert not kinds(await journal.deep(selector=f"name={NAME}"))

    play(replication, story)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("told", "content", "offsets"),
    [
        ({CONTENT_TYPE: JSON_LINES}, LINE * 3, []),
        ({CONTENT_TYPE: JSON_LINES}, LINE + b"{" + LINE + b"x" + LINE, [len(LINE), 2 * len(LINE) + 1]),
        ({CONTENT_TYPE: JSON_LINES}, LINE + LINE[:-1], [len(LINE)]),
        ({CONTENT_TYPE: JSON_LINES, LINES: "any"}, b'{"a":1}{"b":2}\n', []),
        ({CONTENT_TYPE: CSV}, b"a,b\nc,", [6]),
        ({CONTENT_TYPE: CSV}, b"a,b\n", []),
        ({CONTENT_TYPE: CSV, LINES: "any"}, b"a,b", []),
        ({LINES: "whole"}, b"text", [4]),
        ({CONTENT_TYPE: FIXED_FRAMES}, encode_frame(b"a") + encode_frame(b"b"), []),
        ({CONTENT_TYPE: FIXED_FRAMES}, encode_frame(b"a") + encode_frame(b"b")[:-1], [9]),
        ({CONTENT_TYPE: FIXED_FRAMES}, encode_frame(b"x" * 100)[:-91] + encode_frame(b"a") * 20, [0]),
        ({}, b"anything", []),
    ],
)
async def test_labels_determine_the_framing_of_messages(
    told: dict[str, str], content: bytes, offsets: list[int], size: int
) -> None:
    spec = pb.JournalSpec(name=J, labels=label_set(told))
    whole, parts = Torn(J), Torn(J)
    await search(spec, 100, content, whole)
    looking = TornSearch(spec, 100, parts)
    for at in range(0, len(content), size):
        looking.feed(content[at : at + size])
    looking.finish()
    assert (whole.offsets, parts.offsets) == ([100 + at for at in offsets],) * 2
    assert (whole.count, parts.count) == (len(offsets),) * 2
