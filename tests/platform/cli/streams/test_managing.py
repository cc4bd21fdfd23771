"""Commands that create, change and delete streams."""

from __future__ import annotations

import json

import pytest

from coranto.testing.cluster import STORE_URL
from coranto.testing.command_line import CommandLine
from tests.platform.cli.streams.conftest import create


def described(run: CommandLine, name: str) -> dict[str, object]:
    result = run("describe", name, "--heads", "-o", "json")
    assert result.code == 0, result.errors
    found: dict[str, object] = json.loads(result.output)
    return found


def test_a_stream_is_created_changed_and_deleted(run: CommandLine) -> None:
    assert run("create", "shop/orders", "-s", "2", "--store", STORE_URL, "--scale", "bytes/1000").output == (
        "created shop/orders with 2 segments\n"
    )
    again = run("create", "shop/orders")
    assert (again.code, "choose another name" in again.errors) == (1, True)
    assert run("scale", "shop/orders", "--split", "1:2").code == 0
    merged = run("scale", "shop/orders", "--merge", "0,2")
    assert [" ".join(line.split()) for line in merged.output.splitlines()] == [
        "SEGMENT EPOCH KEYS BEGIN END STATE PREDECESSORS",
        "0 0 [0, 0.5) 0 0 (0 B) succeeded by 4 -",
        "1 0 [0.5, 1) 0 0 (0 B) succeeded by 2, 3 -",
        "2 1 [0.5, 0.75) 0 0 (0 B) succeeded by 4 1",
        "3 1 [0.75, 1) 0 - active 1",
        "4 2 [0, 0.75) 0 - active 0, 2",
    ]
    rows = run("list").output.splitlines()
    (row,) = [line for line in rows if line.startswith("shop/orders ")]
    assert " ".join(row.split()) == "shop/orders 2 of 5 2 application/x-ndjson bytes/1000.0/2/1/64 open"
    listed = [json.loads(line)["stream"] for line in run("list", "-o", "json").output.splitlines()]
    assert listed.count("shop/orders") == 1  # Other tests share the cluster.
    assert run("truncate", "shop/orders", "--to-end").code == 0
    found = described(run, "shop/orders")
    assert [each["number"] for each in found["segments"]] == [3, 4]  # type: ignore[attr-defined]
    assert run("truncate", "shop/orders", "--at", "3=0", "--at", "4=0").code == 0
    assert run("resume", "shop/orders").code == 0
    sealed = run("seal", "shop/orders")
    assert (sealed.code, sealed.output.count("sealed")) == (0, 2)
    assert described(run, "shop/orders")["sealed"] is True
    refused = run("scale", "shop/orders", "--split", "3")
    assert (refused.code, "is sealed" in refused.errors) == (1, True)
    unsure = run("delete", "shop/orders")
    assert (unsure.code, "confirm with --yes" in unsure.errors) == (1, True)
    assert run("delete", "shop/orders", "--yes").output == "deleted shop/orders\n"
    missing = run("describe", "shop/orders")
    assert (missing.code, "there is no stream shop/orders" in missing.errors) == (1, True)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("create", "orders", "--codec", "zip"), "--codec: 'zip' is not one of NONE, GZIP"),
        (("create", "orders", "--scale", "often"), "is not a scaling policy"),
        (("scale", "orders", "--split", "x"), "--split: 'x' is not a number"),
        (("scale", "orders", "--split", "1:-2"), "--split: '-2' is not a number"),
        (("scale", "orders", "--merge", "1,,2"), "--merge: '' is not a number"),
        (("truncate", "orders"), "--at: say where"),
        (("truncate", "orders", "--at", "1=0", "--to-end"), "--at: say where"),
        (("truncate", "orders", "--at", "1"), "--at: '1' has no offset; write SEGMENT=OFFSET"),
        (("truncate", "orders", "--at", "1="), "--at: '' is not a number"),
        (("truncate", "orders", "--at", "1=0", "--at", "1=5"), "--at: names a segment twice: 1=0, 1=5"),
        (("create", "orders", "--store", "nope"), "--store: 'nope' must begin with one of"),
        (("create", "orders", "--fragment-bytes", "0"), "--fragment-bytes: 0 bytes is not between"),
        (("create", "orders", "--scale", "bytes/0"), "--scale: 'bytes/0': 0 per second is not a rate"),
        (("create", "my orders"), "stream: 'my orders' has the character ' '"),
        (("describe", "orders", "--heads", "-o", "map"), "--heads: a map has no place"),
    ],
)
def test_contradictory_options_are_reported(run: CommandLine, words: tuple[str, ...], problem: str) -> None:
    result = run(*words)
    assert (result.code, result.output) == (1, "")
    assert problem in result.errors


def test_an_unsupported_change_is_refused_with_the_supported_ones(run: CommandLine) -> None:
    create(run, "shares", "-s", "3")
    for words, problem in (
        (("scale", "--split", "0:999999999"), "cannot be split into 999999999 in one change, only into less than 120"),
        (("scale", "--split", "0:119", "--split", "1"), "scale in several steps"),
        (("scale", "--split", "0", "--merge", "0,1"), "segment 0 is in more than one change; name each segment once"),
        (("scale", "--merge", "0,2"), "segments 0, 2: the ranges [0, 0.333333) and [0.666667, 1) are not adjacent"),
        (
            ("truncate", "--at", "0=0"),
            "it lacks the keys [0.333333, 1); name the segments that have them",
        ),
    ):
        result = run(words[0], "shares", *words[1:])
        assert (result.code, result.output) == (1, "")
        assert problem in result.errors
    assert run("scale", "shares", "--split", "0").code == 0
    assert [" ".join(line.split()) for line in run("describe", "shares", "-o", "map").output.splitlines()] == [
        "KEYS EPOCH 0 1",
        "[0, 0.166667) 0 3",
        "[0.166667, 0.333333) 0 4",
        "[0.333333, 0.666667) 1 1",
        "[0.666667, 1) 2 2",
    ]
    both = run("truncate", "shares", "--at", "0=0", "--at", "3=0", "--at", "1=0", "--at", "2=0")
    assert "it has both segment 0 and a successor of it; name one of them" in both.errors


@pytest.mark.parametrize("format", ["json", "bytes"])
def test_a_stream_is_not_truncated_within_an_event(run: CommandLine, format: str) -> None:
    name = f"cut/{format}"
    create(run, name, "-f", format)
    assert run("write", name, "-k", "a", input=b'{"n":1}\n{"n":2}\n').code == 0
    (segment,) = described(run, name)["segments"]  # type: ignore[misc]
    half = segment["head"] // 2
    within = run("truncate", name, "--at", f"0={half - 1}")
    assert (within.code, f"--at: 0={half - 1}: no event begins there in {name}/segment" in within.errors) == (1, True)
    assert run("truncate", name, "--at", f"0={half}").code == 0
    assert run("read", name).output.endswith('"n":2}\n')
    assert run("truncate", name, "--at", f"0={2 * half}").code == 0
    assert run("read", name).output == ""
