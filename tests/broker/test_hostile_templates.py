"""Texts that are made to keep a reader busy: templates, selectors, addresses, answers of stores, and what else is input.

Time is judged by a process of its own that is killed when it takes too long: what grows faster than its input takes
minutes or years for these, and what does not takes a moment.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
import pytest
from pydantic import SecretStr

import coranto
from coranto import labels
from coranto.auth import Capability, Claims, Keys, sign
from coranto.effects import SystemClock
from coranto.errors import InvalidInput
from coranto.postfix import MAX_DEPTH, MAX_TEMPLATE_BYTES, MAX_WIDTH, PostfixTemplate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.settings import BrokerSettings
from coranto_broker.testing_process import BrokerChild

MakeSpec = Callable[..., pb.JournalSpec]
KEY = base64.b64encode(bytes([1]) * 32).decode()
HANGS = '{{ printf "' + '""' * 24
"""Each pair of quotes may be one text, or the end of one and the begin of another: 2**24 ways to read it."""
SECONDS = 60.0
"""For what takes far less than one on an idle machine."""


# ------------------------------------------------------------------------------------------------------ at a broker


def claims(capability: Capability, selector: str) -> tuple[tuple[str, str], ...]:
    now = SystemClock().now()
    token = sign(Claims(capability, labels.parse_selector(selector), now, now + 600), Keys.parse(KEY))
    return (("authorization", f"Bearer {token}"),)


@pytest.mark.integration
async def test_a_broker_goes_on_whatever_template_it_is_sent(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path
) -> None:
    child = BrokerChild(broker_settings, tmp_path / "log")
    child.start()
    try:
        client = await child.client()
        for template in (HANGS, "{{" + "(" * 1500 + "}}", '{{ printf "%999999999d" 1 }}', "{{" * 100_000):
            change = pb.ApplyRequest.Change(upsert=spec(fragment={"path_postfix_template": template}))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.stub.Apply(pb.ApplyRequest(changes=[change]), timeout=SECONDS)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value.details()
        assert (await client.apply(spec())).status == pb.OK
        await client.close()
    finally:
        child.close()


@pytest.mark.integration
async def test_whoever_may_not_change_a_journal_is_told_so_whatever_the_change_is(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path
) -> None:
    child = BrokerChild(broker_settings.model_copy(update={"auth_keys": SecretStr(KEY)}), tmp_path / "log")
    child.start()
    try:
        client = await child.client()
        for template in (HANGS, "{{ nonsense }}", ""):
            change = pb.ApplyRequest.Change(upsert=spec("team-b/x", fragment={"path_postfix_template": template}))
            change.upsert.replication = 99
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.stub.Apply(
                    pb.ApplyRequest(changes=[change]),
                    metadata=claims(Capability.APPLY, "name:prefix=team-a/"),
                    timeout=SECONDS,
                )
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        await client.close()
    finally:
        child.close()


# -------------------------------------------------------------------------------------------------------- templates


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("x" * (MAX_TEMPLATE_BYTES + 1), f"may have {MAX_TEMPLATE_BYTES}"),
        ("{{" + "(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1) + "}}", f"nested deeper than {MAX_DEPTH}"),
        (f'{{{{ printf "%{MAX_WIDTH + 1}d" 1 }}}}', f"a width above {MAX_WIDTH}"),
        ('{{ printf "%' + "9" * 3000 + 'd" 1 }}', f"a width above {MAX_WIDTH}"),
        ("{{ " + "9" * 3000 + " }}", "more than 18 digits"),
        ("{{/* never closed }}", "not closed with */"),
        ('{{ "never closed }}', 'not closed with "'),
        ("{{ `never closed }}", "not closed with `"),
        ("{{ /* a */ .Name }}", "must be alone"),
        ("{{ .Name", "not closed with }}"),
    ],
)
def test_what_a_template_may_not_ask_for(template: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        PostfixTemplate(template)
    assert problem in str(refused.value)
    assert refused.value.field == "path_postfix_template"


def test_what_a_template_may_ask_for_at_most() -> None:
    deep = "(" * MAX_DEPTH + ".Begin" + ")" * MAX_DEPTH
    for template in (
        "{{" + deep.replace(".Begin", ".Spool.Begin") + "}}",
        f'{{{{ printf "%{MAX_WIDTH}d" 1 }}}}',
        "x" * MAX_TEMPLATE_BYTES,
        "{{/* quotes \" and ends }} do not matter in a comment */}}",
    ):
        PostfixTemplate(template)


# ------------------------------------------------------------------------------------------------- every other input

ATTACKS: Final = textwrap.dedent(
    """
    import itertools, sys
    from datetime import UTC, datetime
    from coranto import journal_tree, labels
    from coranto.durations import parse_duration
    from coranto.errors import CorantoError
    from coranto.fragments import parse_content_path
    from coranto.go_time import format_time
    from coranto.messages import csv_rows
    from coranto.names import validate_journal, validate_token
    from coranto.postfix import PostfixTemplate
    from coranto.store_errors import store_error
    from coranto.store_urls import parse_store_url
    from coranto_broker.http.requests import append_request, read_request
    from coranto_consumers.stores import mysql
    from coranto_consumers.spark import frames

    class Error(Exception):
        pass

    AT = datetime(2024, 1, 2, tzinfo=UTC)
    READERS = {
        "template": PostfixTemplate,
        "selector": labels.parse_selector,
        "duration": parse_duration,
        "store url": parse_store_url,
        "layout": lambda text: format_time(text, AT),
        "store error": lambda text: store_error("get", "x", "s3://b/", Error(text)),
        "journal": validate_journal,
        "token": lambda text: validate_token("token", text, 1, 1 << 30),
        "fragment": lambda text: parse_content_path("a/journal", text),
        "read over http": lambda text: read_request("/" + text, [text], metadata_only=False),
        "append over http": lambda text: append_request("/a?check_registers=" + text),
        "row": lambda text: (csv_rows._ROW.match(text.encode()), csv_rows._BEGIN_OF_ROW.match(text.encode()),
                             [each.end() for each in csv_rows._FIELDS.finditer(text.encode())]),
        "content type": lambda text: labels.validate_journal_labels(labels.label_set({labels.CONTENT_TYPE: text})),
        "statement": mysql._ENDS_TRANSACTION.match,
        "failed task": lambda text: [pattern.search(text) for pattern in
                                     (frames._CORRUPT_MESSAGE, frames._OFFSET_JUMP, frames._INVALID_INPUT)],
        "tree": journal_tree.parse_tree,
    }
    N = int(sys.argv[1])
    PIECES = ['"', '""', '`', "(", ")", "{{", "}}", '{{"', "{{ (", '{{ printf "%', " ", "a", "0", "9", "-", "%", "%0",
              ".", ".0", "/", "//", "/*", "/**/", "*/ /*", "=", "==", ",", "a,", "a in (", "a=", "!", ":", ":prefix",
              "1s", "1.", "Jan", ".9", "<Code>", "<Code>a</Code>", "failed for key ", "failed for key : (code: a", " (code: ",
              "status code: 403 a", "kind: Connect ", 'message: "', "ConnectError(", "CorruptMessage: journal ",
              "InvalidInput: a: ", "bytes=0-", "&", "?", "%2f", "s3://b/?find=", "x=1&", "- a", "a: b", "[", "{", "<<: *a",
              "ANALYZE ", "\\\\", "\\n", "\\t", "é", "\\x00"]
    ENDS = ["", "(", "!", '"', "}}", "x", ")", " (x", "</Code>", "\\n"]
    for name, read in READERS.items():
        size = min(N, 20_000) if name == "tree" else N
        for piece, other, end in [*itertools.product(PIECES, [""], ENDS), *itertools.product(PIECES[:24], PIECES[:24], ["!"])]:
            for text in ((piece + other) * (size // len(piece + other)) + end, other + piece * (size // len(piece)) + end):
                print(name, repr(piece), repr(other), repr(end), flush=True)
                try:
                    read(text)
                except (CorantoError, ValueError, TypeError):
                    pass
    print("done")
    """
).replace("pass\n", "continue\n")


def test_no_reader_of_input_takes_longer_than_in_proportion_to_it() -> None:
    """Whatever is repeated up to a thousand times: with two steps for each pair of characters it would still end, with
    two for each that is added it would not; and longer ones of what tends to be quadratic."""
    for size in (256, 4000):
        try:
            done = subprocess.run(
                [sys.executable, "-c", ATTACKS, str(size)], capture_output=True, text=True, timeout=SECONDS * 4
            )
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"it hangs at {(error.stdout or b'').decode().splitlines()[-1:]}")
        assert done.stdout.endswith("done\n"), done.stderr
