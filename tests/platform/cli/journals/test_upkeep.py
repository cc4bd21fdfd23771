"""`coranto journals suspend`, `reset-head` and `store-health` against a fake broker."""

from __future__ import annotations

from pathlib import Path

from coranto.testing.command_line import CommandLine, RemoteBroker
from coranto.testing.fake_broker import CallPoint
from coranto.wire import protocol_pb2 as pb
from tests.platform.cli.journals.conftest import persist


def test_idle_journals_are_suspended(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...], tmp_path: Path
) -> None:
    persist(remote, parts[1], b"content", tmp_path, 0)
    remote.write(parts[2], b"recent")
    assert run("suspend", "-l", "name:prefix=parts/").output.splitlines() == [
        f"{parts[0]}: suspended (FULL)",
        f"{parts[1]}: suspended (PARTIAL)",
        f"{parts[2]}: not idle; left as it is",
    ]
    assert run("suspend", *parts, "--force").output.splitlines() == [
        f"{parts[0]}: suspended (FULL)",
        f"{parts[1]}: suspended (PARTIAL)",
        f"{parts[2]}: suspended (FULL)",
    ]


def test_heads_are_reset(run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...]) -> None:
    remote.write(parts[0], b"well")
    remote.fake.journals[parts[1]].index_end = 1000
    remote.fake.journals[parts[2]].spec.suspend.level = pb.JournalSpec.Suspend.FULL
    assert "INDEX_HAS_GREATER_OFFSET" in run("append", parts[1], input=b"content\n").errors
    assert run("reset-head", "-l", "name:prefix=parts/").output.splitlines() == [
        f"{parts[0]}: healthy, at 4",
        f"{parts[1]}: reset to 1000",
        f"{parts[2]}: suspended; left as it is",
    ]
    assert "[1000, 1008)" in run("append", parts[1], input=b"content\n").output


def test_a_reset_is_retried_after_a_concurrent_append(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...]
) -> None:
    remote.fake.journals[parts[1]].index_end = 1000
    remote.fake.at(CallPoint.APPEND_BEGUN, None, pb.WRONG_APPEND_OFFSET)
    assert run("reset-head", parts[1]).output == f"{parts[1]}: reset to 1000\n"


def test_a_failure_of_one_journal_does_not_stop_the_others(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...]
) -> None:
    remote.fake.at(CallPoint.APPEND_BEGUN, pb.NOT_ALLOWED)
    result = run("reset-head", *parts)
    assert result.code == 1
    assert result.output.count("healthy") == 2
    assert result.errors.count("\n") == 1
    assert "NOT_ALLOWED" in result.errors


def test_stores_are_checked(run: CommandLine, remote: RemoteBroker) -> None:
    remote.fake.at(CallPoint.STORE_HEALTH, None, pb.FRAGMENT_STORE_UNHEALTHY)
    result = run("store-health", "s3://one/", "s3://two/", "--check-delete-prefix", "probe/")
    assert result.output == "s3://one/: healthy\ns3://two/: unhealthy: asked for, of s3://two/\n"
    assert result.code == 1
    assert result.errors.startswith("coranto: unhealthy: s3://two/.")
    assert remote.fake.requests[-1].check_delete_prefix == "probe/"
    assert "check_delete_prefix" in run("store-health", "s3://one/", "--check-delete-prefix", "../x").errors
