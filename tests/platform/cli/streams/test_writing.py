"""`coranto streams write`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from coranto.cli.streams import writing
from coranto.client import SyncJournalClient
from coranto.testing.command_line import CommandLine
from tests.platform.cli.streams.conftest import create


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
    in_transaction = run("write", "sales", "--key", "7", "--transaction", input=text)
    assert "committed 9 events in segment" in in_transaction.output
    target = tmp_path / "events"
    assert run("read", "sales", "--position", str(position), "-o", str(target)).code == 0
    assert [json.loads(line)["n"] for line in target.read_bytes().splitlines()] == list(range(9))


def test_repeated_input_with_the_same_id_is_written_once(run: CommandLine, tmp_path: Path) -> None:
    create(run, "readings", "-f", "bytes")
    source = tmp_path / "source"
    source.write_bytes(b"a\tone\nb\ttwo\n")
    write = ("write", "readings", "--tabs", "--writer-id", "probe-1", "-i", str(source))
    assert run(*write).output == "readings: 2 events are durable\n"
    source.write_bytes(b"a\tone\nb\ttwo\na\tthree\n")
    assert run(*write).output == "readings: 3 events are durable, 2 of them already stored\n"
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
def test_input_that_is_not_an_event_is_reported(
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


def test_events_are_appended_on_arrival(run: CommandLine, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create(run, "coming")
    heads: list[int] = []

    def slow_input(source: object, framing: object) -> Iterator[bytes]:
        yield b"{}\n"
        with SyncJournalClient(endpoint) as client:
            for chunk in client.read("coming/segment/00000000", 0, block=True):
                heads.append(chunk.end)
                break

    monkeypatch.setattr(writing, "read_records", slow_input)
    assert run("write", "coming", "-k", "a").output == "coming: 1 event is durable\n"
    assert heads


def test_transactions_are_written_and_completed(run: CommandLine) -> None:
    create(run, "carts")
    write = ("write", "carts", "-k", "a", "--transaction")
    assert "nothing to commit" in run(*write).output
    done = run(*write, "--writer-id", "till", input=b"{}\n")
    assert "carts: committed 1 event in segment 0 at [0, " in done.output
    again = run(*write, "--writer-id", "till", input=b"{}\n")
    assert again.output == done.output.replace("committed", "found")
    late = run(*write, "--expected-offset", "1", input=b"{}\n")
    assert (late.code, late.output) == (1, "")
    assert len(late.errors.splitlines()) == 1, "no log entry besides the error"
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


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("write", "orders"), "--key: choose the routing keys"),
        (("write", "orders", "--tabs", "--key", "k"), "--key: choose the routing keys"),
        (("write", "orders", "--tabs", "--transaction"), "--transaction: a transaction is of one routing key"),
        (
            ("write", "orders", "-k", "a", "--expected-offset", "7"),
            "--expected-offset: is a condition",
        ),
        (("write", "orders", "-k", "a", "--fresh"), "--fresh: is for writers with an id"),
    ],
)
def test_contradictory_options_are_reported(run: CommandLine, words: tuple[str, ...], problem: str) -> None:
    result = run(*words)
    assert (result.code, result.output) == (1, "")
    assert problem in result.errors
