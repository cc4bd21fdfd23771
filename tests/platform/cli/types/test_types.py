"""`coranto types register|check|show|list|history` with a real broker."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from coranto.testing import SyncCluster
from coranto.testing.command_line import CommandLine
from tests.platform.types.protobufs import F, shop

ORDER = "type: shop.Order\ndescription: Orders.\nfields:\n  id: BIGINT NOT NULL\n  n: INT\n"
WIDER = ORDER.replace("n: INT", "n: BIGINT\n  at: TIMESTAMP")
BROKEN = ORDER.replace("n: INT", "n: STRING\n  at: DATE NOT NULL")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    with SyncCluster(brokers=1) as cluster:
        cluster.create("shop/orders")
        yield cluster


@pytest.fixture
def types(cluster: SyncCluster, run: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CommandLine:
    """Runs `coranto types` with a registry of its own."""
    monkeypatch.setenv("CORANTO_ENDPOINT", cluster.endpoint)
    monkeypatch.setenv("CORANTO_TYPE_REGISTRY", f"types/{tmp_path.name}")
    monkeypatch.chdir(tmp_path)
    return CommandLine(run._captured, "types")


def test_types_are_registered_checked_and_shown(types: CommandLine, tmp_path: Path) -> None:
    for name, text in (("order", ORDER), ("wider", WIDER), ("broken", BROKEN)):
        (tmp_path / f"{name}.yaml").write_text(text)
    missing = types("register", "-f", "order.yaml")
    assert missing.code == 1
    assert "there is no such registry yet" in missing.errors

    created = types("register", "-f", "order.yaml", "--like", "shop/orders")
    assert (created.code, created.output) == (0, "registered shop.Order@1\n")
    assert types("register", "-f", "order.yaml").output == "unchanged: shop.Order@1\n"
    assert types("check", "-f", "order.yaml", "-f", "wider.yaml").output == (
        "unchanged: shop.Order@1\nwould register shop.Order@2\n"
    )
    assert types("register", "-f", "-", input=WIDER.encode()).output == "registered shop.Order@2\n"

    refused = types("check", "-f", "broken.yaml")
    assert (refused.code, refused.output) == (1, "")
    assert [line.split(" in ")[0] for line in refused.errors.splitlines()] == [
        "coranto: shop.Order: n is STRING",
        "coranto: shop.Order: at is NOT NULL",
        "coranto: shop.Order: at is DATE",
    ]
    failed = types("register", "-f", "broken.yaml")
    assert failed.code == 1
    assert "coranto: shop.Order is not BACKWARD compatible with its earlier versions: n is STRING" in failed.errors
    assert types("check", "-f", "broken.yaml", "--compatibility", "none").output == "would register shop.Order@3\n"

    shown = types("show", "shop.Order").output.splitlines()
    assert shown[0] == "shop.Order@2: json uuidPointer=/_meta/uuid"
    assert [line.split() for line in shown[1:]] == [
        ["FIELD", "TYPE"],
        ["id", "BIGINT", "NOT", "NULL"],
        ["n", "BIGINT"],
        ["at", "TIMESTAMP"],
    ]
    document = types("show", "shop.Order@1", "-o", "yaml").output
    assert types("register", "-f", "-", input=document.encode()).output == (
        "unchanged: shop.Order@1 (the latest is shop.Order@2)\n"
    )
    found = json.loads(types("show", "shop.Order@1", "-o", "json").output)
    assert (found["version"], found["fields"]) == (1, {"id": "BIGINT NOT NULL", "n": "INT"})

    listed = types("list").output.splitlines()
    assert listed[0].split() == ["TYPE", "VERSION", "FRAMING", "FIELDS", "REGISTERED"]
    assert listed[1].split()[:4] == ["shop.Order", "2", "json", "3"]
    assert [json.loads(line)["version"] for line in types("list", "-o", "json").output.splitlines()] == [2]
    history = types("history", "shop.Order").output.splitlines()
    assert history[1].endswith("BACKWARD       first version")
    assert history[2].endswith("BACKWARD       n INT became n BIGINT; added at TIMESTAMP")
    assert [
        json.loads(line)["version"] for line in types("history", "shop.Order", "-o", "json").output.splitlines()
    ] == [
        1,
        2,
    ]


def test_definitions_of_one_type_are_checked_in_order(types: CommandLine, tmp_path: Path) -> None:
    for name, text in (("order", ORDER), ("wider", WIDER), ("broken", BROKEN)):
        (tmp_path / f"{name}.yaml").write_text(text)
    files = ("-f", "wider.yaml", "-f", "order.yaml", "-f", "broken.yaml")
    types("register", "-f", "order.yaml", "--like", "shop/orders")
    checked = types("check", *files)
    assert (checked.code, checked.output) == (
        1,
        "would register shop.Order@2\nunchanged: shop.Order@1 (the latest is shop.Order@2)\n",
    )
    assert "does not hold BIGINT of version 2" in checked.errors
    assert types("history", "shop.Order", "-o", "json").output.count("\n") == 1
    done = types("register", *files)
    assert (done.code, done.output) == (
        1,
        "registered shop.Order@2\nunchanged: shop.Order@1 (the latest is shop.Order@2)\n",
    )


def test_descriptors_are_read_from_a_file_next_to_the_document(types: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "definitions"
    folder.mkdir()
    (folder / "shop.pb").write_bytes(shop((2, "n", F.TYPE_INT32)))
    (folder / "order.yaml").write_text("type: shop.Order\nframing: fixed\ndescriptorFile: shop.pb\n")
    done = types("register", "-f", "definitions/order.yaml", "--like", "shop/orders")
    assert done.output == "registered shop.Order@1\n"
    assert types("show", "shop.Order").output.splitlines()[0] == (
        "shop.Order@1: fixed messageType=shop.Order uuidField=uuid"
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("register", "-f", "none.yaml"), "none.yaml: No such file or directory"),
        (("register", "-f", "bad.yaml"), "bad.yaml: line 2: there is no field 'felds' here"),
        (("register", "-f", "latin.yaml"), "latin.yaml: is not UTF-8"),
        (("show", "shop.None"), "has no message type shop.None; it has shop.Order"),
        (("show", "a@b"), "TYPE: 'a@b' has no version after @"),
        (("history", "x"), "has no message type x"),
        (("list", "--registry", "types/none"), "types/none: JOURNAL_NOT_FOUND (there is no such registry yet"),
    ],
)
def test_invalid_input_is_reported(types: CommandLine, tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    (tmp_path / "bad.yaml").write_text("type: a\nfelds: {}\n")
    (tmp_path / "latin.yaml").write_bytes(b"type: \xff\n")
    assert types("register", "-f", "-", "--like", "shop/orders", input=ORDER.encode()).code == 0
    found = types(*words)
    assert found.code == 1
    assert problem in found.errors


def test_problems_of_a_registry_are_reported_with_its_types(types: CommandLine, cluster: SyncCluster) -> None:
    types("register", "-f", "-", "--like", "shop/orders", input=ORDER.encode())
    name = os.environ["CORANTO_TYPE_REGISTRY"]
    cluster.client().append(name, b"\x1b[2Jhello\n")
    future = {
        "registry": 1,
        "type": "shop.Order",
        "version": 2,
        "definition": {"type": "shop.Order", "framing": "avro"},
    }
    cluster.client().append(name, json.dumps(future).encode() + b"\n")
    listed = types("list")
    assert listed.code == 0
    assert listed.output.splitlines()[1].split()[:2] == ["shop.Order", "1"]
    assert "not JSON; passed over" in listed.errors
    assert "version 2 of shop.Order cannot be understood" in listed.errors
    assert "\x1b" not in listed.errors
    cluster.client().append(name, b"junk\n" * 150)
    flooded = types("list").errors
    assert flooded.count("not JSON; passed over") == 10
    assert "141 more lines are no records; passed over" in flooded
    assert types("show", "shop.Order").code == 1
    assert types("show", "shop.Order@1").code == 0
