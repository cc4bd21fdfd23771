"""`coranto streams …` against brokers in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from coranto.cli.streams import autoscaling
from coranto.client import JournalClient
from coranto.client.loop import LoopThread
from coranto.errors import CorantoError
from coranto.streams.autoscale import Scaled
from coranto.streams.lifecycle import Streams
from coranto.streams.scaling import Merge, ScalingPolicy, Split
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
    assert (unsure.code, "say so with --yes" in unsure.errors) == (1, True)
    assert run("delete", "shop/orders", "--yes").output == "deleted shop/orders\n"
    gone = run("describe", "shop/orders")
    assert (gone.code, "there is no stream shop/orders" in gone.errors) == (1, True)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("create", "orders", "--codec", "zip"), "--codec: 'zip' is none of NONE, GZIP"),
        (("create", "orders", "--scale", "often"), "is no scaling policy"),
        (("scale", "orders", "--split", "x"), "--split: 'x' is not a number"),
        (("scale", "orders", "--split", "1:-2"), "--split: '-2' is not a number"),
        (("scale", "orders", "--merge", "1,,2"), "--merge: '' is not a number"),
        (("truncate", "orders"), "--at: say where"),
        (("truncate", "orders", "--at", "1=0", "--to-end"), "--at: say where"),
        (("truncate", "orders", "--at", "1"), "--at: '' is not a number"),
        (("autoscale", "--policy", "x/1"), "is no scaling policy"),
        (("autoscale", "--interval", "0"), "--interval: 0 seconds is no interval"),
        (("write", "orders"), "--key: say what routing keys are"),
        (("write", "orders", "--tabs", "--key", "k"), "--key: say what routing keys are"),
        (("write", "orders", "--tabs", "--transaction"), "--transaction: a transaction is of one routing key"),
        (("read", "orders", "--tail", "--position", "p"), "--tail: reads from now on"),
        (("read", "orders"), "there is no stream orders"),
    ],
)
def test_what_makes_no_sense_is_said(run: CommandLine, words: tuple[str, ...], problem: str) -> None:
    result = run(*words)
    assert (result.code, result.output) == (1, "")
    assert problem in result.errors


def test_what_was_scaled_is_told(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
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
        (("--key", "k"), b"[1]\n", "line 1 is not a JSON object"),
        (("--tabs",), b"{}\n", "line 1 has no tab"),
        (("--key-field", "id"), b'{"id":true}\n', "line 1 has no text or number 'id'"),
    ],
)
def test_input_that_is_no_event_is_said(run: CommandLine, words: tuple[str, ...], input: bytes, problem: str) -> None:
    name = f"bad/{words[0].strip('-')}-{len(input)}"
    create(run, name)
    result = run("write", name, *words, input=input)
    assert result.code == 1
    assert problem in result.errors
