"""`coranto journals apply` against a fake broker."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest

from coranto.specs.journal_tree import parse_tree
from coranto.testing.command_line import CommandLine, RemoteBroker
from coranto.testing.fake_broker import CallPoint
from coranto.wire import protocol_pb2 as pb
from tests.platform.cli.journals.conftest import create

TREE = """
name: orders/
replication: 1
fragment: {length: 4194304, compression_codec: ZSTANDARD, stores: ["file:///"], refresh_interval: 30s}
children: [{name: orders/part-000}, {name: orders/part-001}, {name: orders/part-002}]
"""


def applied(remote: RemoteBroker) -> list[int]:
    """Return the sizes of the requested transactions."""
    return [len(request.changes) for request in remote.fake.requests if isinstance(request, pb.ApplyRequest)]


def test_specs_are_applied_in_several_transactions_which_continue_after_an_interruption(
    run: CommandLine, remote: RemoteBroker
) -> None:
    remote.fake.at(CallPoint.APPLY, None, grpc.StatusCode.INVALID_ARGUMENT)
    result = run("apply", "--specs", "-", "--max-txn-size", "2", input=TREE.encode())
    assert (result.code, result.output) == (1, "create orders/part-000\ncreate orders/part-001\n")
    assert "The first 2 of 3 changes were applied. Apply again to continue" in result.errors
    again = run("apply", "--specs", "-", "--max-txn-size", "2", input=TREE.encode())
    assert (again.code, again.output.count("unchanged"), again.output.count("create")) == (0, 2, 1)
    assert applied(remote) == [2, 1, 1]


def test_a_tree_of_more_changes_than_a_transaction_holds_is_applied(run: CommandLine, remote: RemoteBroker) -> None:
    children = ", ".join(f"{{name: orders/part-{number:03}}}" for number in range(300))
    tree = TREE[: TREE.index("children")] + f"children: [{children}]\n"
    plan = run("apply", "--specs", "-", "--dry-run", input=tree.encode()).output.splitlines()
    assert plan[0] == "transaction 1 of 3: 100 journals"
    assert plan.index("transaction 3 of 3: 100 journals") == 202
    assert len(remote.fake.journals) == 0
    result = run("apply", "--specs", "-", input=tree.encode())
    assert (result.code, result.output.count("create orders/part-")) == (0, 300), result.errors
    assert applied(remote) == [100, 100, 100]


def test_drift_is_found_shown_and_repaired(run: CommandLine, remote: RemoteBroker) -> None:
    words = ("apply", "--specs", "-", "--update", "--prune", "name:prefix=orders/")
    assert run(*words, input=TREE.encode()).code == 0
    assert run(*words, "--check", input=TREE.encode()).code == 0
    remote.fake.journals["orders/part-001"].spec.replication = 3
    create(remote, "orders/left")
    create(remote, "other/one")
    drifted = run(*words, "--check", input=TREE.encode())
    assert drifted.code == 1
    assert drifted.output.splitlines() == [
        "unchanged orders/part-000",
        "unchanged orders/part-002",
        "would update orders/part-001",
        "  replication: 3 → 1",
        "would delete orders/left (the document does not name it)",
    ]
    assert "2 journals are not as the input says" in drifted.errors
    assert applied(remote) == [3]
    repaired = run(*words, input=TREE.encode())
    assert repaired.output.splitlines()[2:] == [
        "update orders/part-001",
        "delete orders/left (the document does not name it)",
    ]
    assert sorted(remote.fake.journals) == ["orders/part-000", "orders/part-001", "orders/part-002", "other/one"]


def test_without_update_an_existing_journal_requires_its_revision(run: CommandLine, remote: RemoteBroker) -> None:
    assert run("apply", "--specs", "-", input=TREE.encode()).code == 0
    result = run("apply", "--specs", "-", input=TREE.replace("replication: 1", "replication: 2").encode())
    assert (result.code, result.output) == (1, "")
    assert "orders/part-000 exists already, at revision" in result.errors


def test_specs_without_a_suspension_keep_the_present_one(run: CommandLine, remote: RemoteBroker) -> None:
    assert run("apply", "--specs", "-", input=TREE.encode()).code == 0
    suspended = pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.FULL, offset=77)
    spec = remote.fake.journals["orders/part-000"].spec
    spec.suspend.CopyFrom(suspended)
    assert run("apply", "--specs", "-", input=TREE.encode()).output.count("unchanged") == 3
    changed = TREE.replace("{name: orders/part-000}", "{name: orders/part-000, revision: -1, replication: 2}")
    assert "update orders/part-000" in run("apply", "--specs", "-", input=changed.encode()).output
    spec = remote.fake.journals["orders/part-000"].spec
    assert (spec.replication, spec.suspend) == (2, suspended)
    moved = changed.replace("revision: -1", "revision: -1, suspend: {level: PARTIAL, offset: 99}")
    run("apply", "--specs", "-", input=moved.encode())
    assert remote.fake.journals["orders/part-000"].spec.suspend.offset == 99


SPECS = """
name: orders/
replication: 1
labels: [{name: content-type, value: application/x-ndjson}]
fragment: {length: 4194304, compression_codec: ZSTANDARD, stores: ["file:///"], refresh_interval: 30s}
children: [{name: orders/part-000}, {name: orders/part-001}]
"""


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    path = tmp_path / "journals.yaml"
    path.write_text(SPECS)
    return path


def test_journals_are_applied_and_listed(run: CommandLine, remote: RemoteBroker, specs: Path) -> None:
    assert run("list").output.split() == ["JOURNAL", "REPLICAS", "PRIMARY", "FRAGMENTS", "STORE", "LABELS"]
    dry = run("apply", "--specs", str(specs), "--dry-run")
    assert (dry.code, dry.output) == (0, "would create orders/part-000\nwould create orders/part-001\n")
    assert remote.fake.journals == {}
    assert run("apply", "--specs", "-", input=SPECS.encode()).output.count("create ") == 2
    assert set(remote.fake.journals) == {"orders/part-000", "orders/part-001"}
    remote.write("orders/part-001", b"four")
    table = run("list", "-l", "name=orders/part-001", "--heads").output.splitlines()
    assert table[1].split() == [
        "orders/part-001",
        "1/1",
        "fake-broker",
        "4.0",
        "MiB",
        "zstandard",
        "file:///",
        "content-type=application/x-ndjson",
        "4",
    ]
    assert len(table) == 2


def test_listed_yaml_can_be_applied(run: CommandLine, remote: RemoteBroker, specs: Path) -> None:
    run("apply", "--specs", str(specs))
    listed = run("list", "-o", "yaml").output
    changes = parse_tree(listed)
    assert [change.expect_mod_revision for change in changes] == [2, 2]
    changed = listed.replace("length: 4194304", "length: 1048576")
    assert run("apply", "--specs", "-", input=changed.encode()).output.splitlines() == [
        "update orders/part-000",
        "update orders/part-001",
    ]
    assert remote.fake.journals["orders/part-000"].spec.fragment.length == 1 << 20


def test_specs_that_exist_already_are_unchanged(run: CommandLine, remote: RemoteBroker, specs: Path) -> None:
    run("apply", "--specs", str(specs))
    again = run("apply", "--specs", str(specs))
    assert (again.code, again.output) == (0, "unchanged orders/part-000\nunchanged orders/part-001\n")
    assert remote.fake.count("Apply") == 1


def test_conflicting_specs_are_explained(run: CommandLine, remote: RemoteBroker, specs: Path) -> None:
    remote.fake.create("orders/part-000")
    result = run("apply", "--specs", str(specs), "--dry-run")
    assert result.code == 1
    assert "orders/part-000 exists already, at revision 2: give that as its `revision`" in result.errors
    absent_deletion = "name: orders/part-009\ndelete: true\nrevision: 7\n"
    result = run("apply", "--specs", "-", input=absent_deletion.encode())
    assert (result.code, result.output) == (0, "absent orders/part-009\n"), "a deletion may be repeated"
    deletion = "name: orders/part-000\ndelete: true\nrevision: 9\n"
    assert "is at revision 2, not 9" in run("apply", "--specs", "-", input=deletion.encode()).errors
    deletion = deletion.replace("9", "2")
    assert run("apply", "--specs", "-", input=deletion.encode()).output == "delete orders/part-000\n"
    assert remote.fake.journals == {}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"name: a/b\xff", r"is not text in UTF-8: .* at byte 9"),
        (b"# \nname: a\0b", r"line 2: this is not YAML: it has the character '\\x00'"),
        (b"[", "line 1: this is not YAML"),
        (b"name: a/b/c\ndelete: true", r"line 1: a/b/c: revision: 0: to delete it, give the revision .*, or -1"),
        (b"", "names no journals"),
    ],
)
def test_unreadable_specs_are_refused(
    run: CommandLine, remote: RemoteBroker, tmp_path: Path, content: bytes, problem: str
) -> None:
    path = tmp_path / "specs.yaml"
    path.write_bytes(content)
    result = run("apply", "--specs", str(path))
    assert result.code == 1
    assert re.fullmatch(rf"coranto: .*{re.escape(str(path))}:? {problem}.*\n", result.errors)
    assert run("apply", "--specs", "-", input=content).code == 1
