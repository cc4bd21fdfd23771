"""The forms of `coranto status`: lines, JSON, and a screen on a terminal."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from coranto.checkup import Condition, Examination
from coranto.checkup.status.values import BrokerState, ClusterSnapshot, ConsumerState, StatusChange, StatusReport
from coranto.cli.status import document
from coranto.cli.status_screen import plain_lines, screen, summary
from coranto.testing import SyncCluster
from coranto.testing.command_line import CommandLine

COMMAND = [sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main())"]

LOOK = StatusReport(
    1_000.0,
    0.25,
    ClusterSnapshot(1_000.0, "c1", 7, 2, {"z#0": "0.2.0"}, {}),
    (BrokerState("127.0.0.1:1", "z#0", "0.2.0", 0.1, 3),),
    (
        Examination("store s3://x/", Condition.PROBLEM, "the bucket is gone\x1b[31m", "make it"),
        *(Examination(f"warned {number}", Condition.WARNING, "soon", "do it") for number in range(200)),
        Examination("versions", Condition.OK, "all brokers and this client have 0.2.0"),
        Examination("etcd", Condition.NOT_EXAMINED, "not named", "give --etcd"),
    ),
    3,
    1,
    (),
    (
        ConsumerState("sums", "sqlite:///x", 2_000_000, 2, "in/a", 1),
        ConsumerState("mine", "h:1", None, problem="failed"),
    ),
    (),
)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncCluster]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("CORANTO_DATA", "CORANTO_ETCD", "CORANTO_BROKER_ETCD", "CORANTO_CONSUMER", "CORANTO_STORE_URL"):
        monkeypatch.delenv(name, raising=False)
    with SyncCluster(brokers=2, lease_seconds=60) as cluster:
        cluster.create("first/0")
        monkeypatch.setenv("CORANTO_ENDPOINT", cluster.endpoint)
        yield cluster


def test_plain_lines_have_all_parts_and_control_no_terminal() -> None:
    lines = list(plain_lines(LOOK))
    assert lines[0].startswith("UNHEALTHY: 1 problem, 200 warnings; 3 journals; cluster c1; 1970-01-01 00:16:40Z")
    assert [line.partition(":")[0] for line in lines if line[:1].isupper()][1:] == [
        "UNHEALTHY",
        "BEHIND",
        "CHANGED",
        "CLUSTER",
    ]
    assert "\x1b" not in "".join(lines)
    assert "  and 102 more; --output json shows all" in lines
    assert "  1.9 MiB  sums  2 journals  most in in/a, without 1 journal whose heads are unknown  sqlite:///x" in lines
    assert "  unknown  mine  0 journals  failed  h:1" in lines
    assert "  unknown  etcd: not named. give --etcd" in lines


def test_changes_are_shown_with_their_times() -> None:
    look = dataclasses.replace(LOOK, compared_with=900.0, changes=(StatusChange(900.0, 1_000.0, "broker z#1 is new"),))
    assert "  1970-01-01 00:15:00Z to 00:16:40Z  broker z#1 is new" in list(plain_lines(look))
    assert "CHANGED: nothing since 1970-01-01 00:15:00Z" in list(plain_lines(dataclasses.replace(look, changes=())))


def test_without_a_listing_changes_are_unknown_and_earlier_ones_are_kept() -> None:
    unknown = dataclasses.replace(LOOK, snapshot=None)
    assert "CHANGED: unknown, because no broker lists the journals" in list(plain_lines(unknown))
    changed = dataclasses.replace(unknown, changes=(StatusChange(900.0, 1_000.0, "broker z#1 is new"),))
    assert "CHANGED" in list(plain_lines(changed))
    assert any("CHANGED: this is the first" in line for line in plain_lines(LOOK))


@pytest.mark.parametrize("height", [24, 50])
def test_a_screen_fits_the_terminal(height: int) -> None:
    changes = tuple(StatusChange(0.0, 1_000.0, f"change {number}") for number in range(50))
    look = dataclasses.replace(LOOK, compared_with=0.0, changes=changes, consumers=LOOK.consumers * 30)
    console = Console(file=StringIO(), force_terminal=True, width=160, height=height)
    console.print(screen(look, height))
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert shown.count("\n") <= height
    assert "change 0" in shown
    assert "\x1b[31m\x1b" not in shown
    assert "the bucket is gone" in shown


def test_a_document_is_json_and_has_no_snapshot() -> None:
    found = json.loads(json.dumps(document(LOOK)))
    assert (found["healthy"], found["cluster"], found["revision"]) == (False, "c1", 7)
    assert "snapshot" not in found
    assert found["consumers"][0]["behind"] == 2_000_000
    unknown = document(dataclasses.replace(LOOK, snapshot=None))
    assert (unknown["cluster"], unknown["revision"]) == (None, None)
    assert "cluster unknown" in summary(dataclasses.replace(LOOK, snapshot=None))


def test_a_watch_prints_lines_for_changes(small: SyncCluster, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    run = CommandLine(capfdbinary.readouterr)
    first = run("status")
    assert (first.code, first.errors) == (0, "")
    small.create("second/0")
    watched = run("status", "--watch", "--count", "2", "--interval", "0.1")
    assert watched.code == 0, watched.output
    assert "1 journal created: second/0" in watched.output
    lines = watched.output.splitlines()
    assert lines[-1].startswith("healthy: 0 problems"), "the second snapshot has no change"
    documents = run("status", "--watch", "--count", "2", "--interval", "0.1", "--output", "json").output.splitlines()
    assert [json.loads(each)["journals"] for each in documents] == [2, 2]


def test_a_state_that_cannot_be_saved_is_a_warning(
    small: SyncCluster, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "state").write_text("A file.")
    done = CommandLine(capfdbinary.readouterr)("status")
    assert done.code == 0
    assert "the next status cannot show changes" in done.errors


def test_a_watch_ends_with_an_interrupt(small: SyncCluster) -> None:
    words = [*COMMAND, "status", "--watch", "--interval", "60", "--output", "json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["healthy"], "each snapshot is printed immediately"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert b"Traceback" not in process.stderr.read()


def test_a_watch_refreshes_one_screen_of_a_terminal(small: SyncCluster) -> None:
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    words = [*COMMAND, "status", "--watch", "--count", "2", "--interval", "0.1"]
    with subprocess.Popen(words, env=environment, stdout=follower, stderr=subprocess.PIPE) as process:
        os.close(follower)
        shown = b""
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:  # The terminal closes when its program ends.
                break
            if not part:
                break
            shown += part
        assert process.wait(timeout=60) == 0, process.stderr and process.stderr.read()
    os.close(leader)
    assert shown.count(b"\x1b[?1049h") == 1, "it uses one screen of its own"
    assert shown.count(b"\x1b[?1049l") == 1, "and restores the previous one"
    assert shown.count(b"healthy: 0 problems") == 2
