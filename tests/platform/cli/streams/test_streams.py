"""`coranto streams …` against brokers in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from coranto.cli.streams import autoscaling, writing
from coranto.client import JournalClient, SyncJournalClient
from coranto.client.loop import LoopThread
from coranto.errors import CorantoError
from coranto.streams.control.autoscale import Scaled
from coranto.streams.control.lifecycle import Streams
from coranto.streams.control.scaling import Merge, ScalingPolicy, Split
from coranto.testing.cluster import STORE_URL, Cluster
from coranto.testing.command_line import CommandLine


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    loop = LoopThread("cluster")
    cluster = Cluster(brokers=1, grpc=True)
    loop.run(cluster.__aenter__())
    try:
        yield loop.run(_endpoint(cluster))
    finally:
        loop.run(cluster.__aexit__(None, None, None))
        loop.stop()


async def _endpoint(cluster: Cluster) -> str:
    return cluster.endpoint.removeprefix("http://")


@pytest.fixture
def run(
    endpoint: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    monkeypatch.setenv("CORANTO_ENDPOINT", endpoint)
    yield CommandLine(capfdbinary.readouterr, "streams")
    structlog.reset_defaults()


def create(run: CommandLine, name: str, *words: str) -> None:
    created = run("create", name, "--store", STORE_URL, *words)
    assert created.code == 0, created.errors


def described(run: CommandLine, name: str) -> dict[str, object]:
    result = run("describe", name, "--heads", "-o", "json")
    assert result.code == 0, result.errors
    found: dict[str, object] = json.loads(result.output)
    return found


def test_from_creation_to_deletion(run: CommandLine) -> None:
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
    assert [json.loads(line)["stream"] for line in run("list", "-o", "json").output.splitlines()] == ["shop/orders"]
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
    gone = run("describe", "shop/orders")
    assert (gone.code, "there is no stream shop/orders" in gone.errors) == (1, True)


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
        (("autoscale", "--policy", "x/1"), "is not a scaling policy"),
        (("autoscale", "--interval", "0"), "--interval: 0 seconds is not an interval"),
        (("write", "orders"), "--key: choose the routing keys"),
        (("write", "orders", "--tabs", "--key", "k"), "--key: choose the routing keys"),
        (("write", "orders", "--tabs", "--transaction"), "--transaction: a transaction is of one routing key"),
        (
            ("write", "orders", "-k", "a", "--expected-offset", "7"),
            "--expected-offset: is a condition",
        ),
        (("write", "orders", "-k", "a", "--fresh"), "--fresh: is for writers with an id"),
        (("read", "orders", "--tail", "--position", "p"), "--tail: reads only new events"),
        (("read", "orders", "--group", "g", "--tail"), "--group: a group knows its position"),
        (
            ("read", "orders", "--position", "nowhere/p"),
            "--position: the folder nowhere for the position does not exist",
        ),
        (("read", "orders"), "there is no stream orders"),
    ],
)
def test_contradictory_options_are_reported(run: CommandLine, words: tuple[str, ...], problem: str) -> None:
    result = run(*words)
    assert (result.code, result.output) == (1, "")
    assert problem in result.errors


def test_an_impossible_change_names_the_possible_ones(run: CommandLine) -> None:
    create(run, "shares", "-s", "3")
    for words, problem in (
        (("scale", "--split", "0:999999999"), "cannot be split into 999999999 at once, only into less than 120"),
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


def test_a_scaling_is_reported(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    create(run, "steady", "-s", "3")

    class Decided:
        """Decides the same at its first step, and fails at the next."""

        def __init__(self, client: JournalClient, names: list[str], *, policy: ScalingPolicy | None) -> None:
            assert (names, policy) == (["steady"], ScalingPolicy.by_bytes(5))
            self._streams = Streams(client)
            self._steps = 0

        async def step(self) -> list[Scaled]:
            self._steps += 1
            if self._steps > 1:
                raise CorantoError("the brokers are gone")
            changes = (Split(0, 2), Merge((1, 2)))
            return [Scaled(await self._streams.scale("steady", changes), changes)]

    monkeypatch.setattr(autoscaling, "Autoscaler", Decided)
    result = run("autoscale", "steady", "--policy", "bytes/5", "--interval", "0.01")
    assert result.output == "steady: split 0 into 2; merged 1 and 2; 3 segments are active now\n"
    assert (result.code, "the brokers are gone" in result.errors) == (1, True)


def test_events_are_written_and_read_by_key(run: CommandLine, tmp_path: Path) -> None:
    create(run, "sales", "-s", "2")
    lines = [{"customer": n % 3, "n": n} for n in range(9)]
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    written = run("write", "sales", "--key-field", "customer", input=text)
    assert written.output == "sales: 9 events are durable\n"
    assert run("scale", "sales", "--split", "0").code == 0
    position = tmp_path / "position"
    first = run("read", "sales", "--position", str(position), "--limit", "4")
    rest = run("read", "sales", "--position", str(position))
    assert len(first.output.splitlines()) == 4
    found = [json.loads(line) for line in (first.output + rest.output).splitlines()]
    for customer in range(3):
        mine = [each["n"] for each in found if each["customer"] == customer]
        assert mine == [customer, customer + 3, customer + 6]
    assert run("read", "sales", "--position", str(position)).output == ""
    at_once = run("write", "sales", "--key", "7", "--transaction", input=text)
    assert "committed 9 events in segment" in at_once.output
    target = tmp_path / "events"
    assert run("read", "sales", "--position", str(position), "-o", str(target)).code == 0
    assert [json.loads(line)["n"] for line in target.read_bytes().splitlines()] == list(range(9))


def test_the_same_input_under_the_same_id_is_written_once(run: CommandLine, tmp_path: Path) -> None:
    create(run, "readings", "-f", "bytes")
    source = tmp_path / "source"
    source.write_bytes(b"a\tone\nb\ttwo\n")
    write = ("write", "readings", "--tabs", "--writer-id", "probe-1", "-i", str(source))
    assert run(*write).output == "readings: 2 events are durable\n"
    source.write_bytes(b"a\tone\nb\ttwo\na\tthree\n")
    assert run(*write).output == "readings: 3 events are durable, 2 of which it had already\n"
    assert sorted(run("read", "readings").output.split()) == ["one", "three", "two"]


@pytest.mark.parametrize(
    ("words", "input", "problem"),
    [
        (("--key", "k"), b"{}\nno\n", "line 2 is not JSON"),
        (("--key", "k"), b'{}\n{"_meta":1}\n', "line 2: the parent of 'uuid'"),
        (("--key", "k"), b'{"much":Infinity}\n', "line 1: message cannot be written as JSON"),
        (("--key", "k"), b"[1]\n", "line 1 is not a JSON object"),
        (("--tabs",), b"{}\n", "line 1 has no tab"),
        (("--key-field", "id"), b'{"id":true}\n', "line 1 has no text or number 'id'"),
    ],
)
def test_input_that_is_no_event_is_reported(
    run: CommandLine, words: tuple[str, ...], input: bytes, problem: str
) -> None:
    name = f"bad/{words[0].strip('-')}-{len(input)}"
    create(run, name)
    result = run("write", name, *words, input=input)
    assert result.code == 1
    assert problem in result.errors


def test_content_before_a_failure_is_written(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    create(run, "interrupted")
    result = run("write", "interrupted", "-k", "a", input=b"{}\n{}\nno\n")
    assert (result.code, "of 2 events that were read, 2 are durable" in result.errors) == (1, True)

    def interrupted(source: object, framing: object) -> Iterator[bytes]:
        yield b'{"n":3}\n'
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "read_records", interrupted)
    result = run("write", "interrupted", "-k", "a")
    assert (result.code, "of 1 event that were read, 1 are durable" in result.errors) == (130, True)
    assert len(run("read", "interrupted").output.splitlines()) == 3


def test_events_are_appended_as_they_come(run: CommandLine, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create(run, "coming")
    heads: list[int] = []

    def coming(source: object, framing: object) -> Iterator[bytes]:
        yield b"{}\n"
        with SyncJournalClient(endpoint) as client:
            for chunk in client.read("coming/segment/00000000", 0, block=True):
                heads.append(chunk.end)
                break

    monkeypatch.setattr(writing, "read_records", coming)
    assert run("write", "coming", "-k", "a").output == "coming: 1 event is durable\n"
    assert heads


def test_transactions_of_the_command_line(run: CommandLine) -> None:
    create(run, "carts")
    write = ("write", "carts", "-k", "a", "--transaction")
    assert "nothing to commit" in run(*write).output
    done = run(*write, "--writer-id", "till", input=b"{}\n")
    assert "carts: committed 1 event in segment 0 at [0, " in done.output
    again = run(*write, "--writer-id", "till", input=b"{}\n")
    assert again.output == done.output.replace("committed", "found")
    late = run(*write, "--expected-offset", "1", input=b"{}\n")
    assert (late.code, late.output) == (1, "")
    assert len(late.errors.splitlines()) == 1, "no log beside the error"
    assert "not at 1; nothing was written" in late.errors
    assert run("truncate", "carts", "--to-end").code == 0
    assert run("scale", "carts", "--split", "0").code == 0
    assert run("truncate", "carts", "--to-end").code == 0
    forgotten = run(*write, "--writer-id", "other", input=b"{}\n")
    assert (forgotten.code, "if that is settled, add --fresh" in forgotten.errors) == (1, True)
    assert run(*write, "--writer-id", "other", "--fresh", input=b"{}\n").code == 0
    assert run("seal", "carts").code == 0
    sealed = run(*write, input=b"{}\n")
    assert sealed.errors == "coranto: stream carts is sealed: it takes no more events. Write to another stream\n"
    assert run("read", "carts", "--tail").output == "", "nothing will be written any more"


def test_positions_that_are_none_are_reported(run: CommandLine, tmp_path: Path) -> None:
    create(run, "places")
    position = tmp_path / "position"
    for content, problem in (("x", "Invalid JSON"), ("[]", "an object"), ('{"0":{"offset":-5}}', "not negative")):
        position.write_text(content)
        result = run("read", "places", "--position", str(position))
        assert (result.code, result.output) == (1, "")
        assert f"--position: {position}: " in result.errors
        assert problem in result.errors
        assert "Delete the file to begin at the beginning" in result.errors
        assert "pydantic" not in result.errors


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


def test_a_group_shares_a_stream(run: CommandLine) -> None:
    create(run, "shared")
    assert run("write", "shared", "-k", "a", input=b'{"n":1}\n{"n":2}\n{"n":3}\n').code == 0
    first = run("read", "shared", "--group", "billing", "--limit", "2")
    assert "shared has a new group billing" in first.errors
    assert run("seal", "shared").code == 0
    rest = run("read", "shared", "--group", "billing")
    assert (rest.code, rest.errors) == (0, "")
    found = [json.loads(line)["n"] for line in (first.output + rest.output).splitlines()]
    assert found == [1, 2, 3]
    assert run("read", "shared", "--group", "billing").output == ""
