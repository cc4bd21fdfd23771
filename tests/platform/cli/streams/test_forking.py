"""`coranto streams fork`: from the present state, from a file of offsets, and as of a time."""

from __future__ import annotations

import json
import time
from pathlib import Path

from coranto.testing.command_line import CommandLine
from tests.platform.cli.streams.conftest import create


def test_a_stream_is_forked_now_and_as_of_a_time(run: CommandLine, tmp_path: Path) -> None:
    create(run, "shop/orders", "-s", "2")
    written = run("write", "shop/orders", "--tabs", input=b'alice\t{"n": 1}\ncarol\t{"n": 2}\n')
    assert written.code == 0, written.errors
    forked = run("fork", "shop/orders", "what-if")
    assert forked.code == 0, forked.errors
    lines = [line.split() for line in forked.output.splitlines()]
    assert lines[0] == ["SEGMENT", "KEYS", "DIVERGES", "AT", "STATE"]
    assert [line[-1] for line in lines[1:]] == ["active", "active"]
    assert run("write", "what-if", "--tabs", input=b'alice\t{"n": 3}\n').code == 0
    assert sorted(json.loads(line)["n"] for line in run("read", "what-if").output.splitlines()) == [1, 2, 3]
    assert len(run("read", "shop/orders").output.splitlines()) == 2

    head = int(next(line for line in lines if line[0] == "1")[-2])
    offsets = tmp_path / "then.json"
    offsets.write_text(json.dumps({"shop/orders/segment/00000001": head}))
    assert run("fork", "shop/orders", "then", "--as-of", str(offsets)).code == 0
    assert len(run("read", "then").output.splitlines()) == (1 if head else 0)
    early = run("fork", "shop/orders", "early", "--as-of", "1h")
    assert early.code == 0, early.errors
    assert run("read", "early").output == ""
    refused = run("fork", "shop/orders", "future", "--as-of", str(int(time.time()) + 3600))
    assert (refused.code, "in the future" in refused.errors) == (1, True)
    missing = run("fork", "nothing", "what")
    assert (missing.code, "there is no stream nothing" in missing.errors) == (1, True)
    taken = run("fork", "then", "shop/orders")
    assert (taken.code, "choose another name" in taken.errors) == (1, True)
    assert "was forked from it" in run("delete", "shop/orders", "--yes").errors
    for name in ("what-if", "then", "early", "shop/orders"):
        assert run("delete", name, "--yes").output == f"deleted {name}\n"
