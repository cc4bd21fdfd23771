"""The sealed memory of a consumer's audits: a change made without the key is detected."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace

import pytest
from sqlalchemy import update

from coranto.audit import Kind, Report, Severity
from coranto.audit.sealing import Seal
from coranto.auth import Keys
from coranto_consumers.audit.memory import Known
from coranto_consumers.stores.sql import CHECKPOINTS
from tests.consumers.audit.conftest import Scene

KEYS, OTHERS = (Keys.parse(base64.b64encode(letter * 32).decode()) for letter in (b"k", b"o"))
NAME = "orders"
KeysAre = Callable[[Keys | None], None]


@pytest.fixture
async def audited(scene: Scene, keys_are: KeysAre) -> Scene:
    """A consumer that has consumed and passed an audit with keys."""
    keys_are(KEYS)
    await scene.publish(4)
    await scene.consume()
    assert problems(await scene.audit()) == set()
    return scene


@pytest.fixture
def keys_are(monkeypatch: pytest.MonkeyPatch) -> KeysAre:
    """Set the keys of audits. A client without TLS, as in tests, uses no keys."""
    return lambda keys: monkeypatch.setattr("coranto_consumers.audit.check.Seal.of", lambda auth: Seal(keys))


def problems(report: Report) -> set[Kind]:
    return {each.kind for each in report.findings if each.severity is not Severity.INFO}


def forged(content: bytes) -> bytes:
    """A memory without the shard."""
    known = Known.from_bytes(Seal(KEYS).unseal(content, NAME))
    assert known.shards
    return replace(known, shards={}).to_bytes()


async def test_a_sealed_memory_is_continued_and_proves_a_checkpoint_set_back(audited: Scene) -> None:
    content = audited.memory.kept[NAME]
    assert Known.from_bytes(Seal(KEYS).unseal(content, NAME)).shards["shard-orders"].sources
    again = await audited.audit()
    assert problems(again) == set()
    assert Kind.FIRST_AUDIT not in again.kinds()
    before = audited.store.read("shard-orders")
    assert before is not None
    await audited.publish(4)
    await audited.consume()
    assert problems(await audited.audit()) == set()
    with audited.store.engine.begin() as connection:
        connection.execute(update(CHECKPOINTS).values(checkpoint=before.checkpoint.to_bytes()))
    assert Kind.CHECKPOINT_SET_BACK in problems(await audited.audit())


@pytest.mark.parametrize("way", ["changed", "renamed", "unsigned", "another key"])
async def test_a_memory_without_a_valid_seal_is_refused_and_kept(audited: Scene, way: str) -> None:
    kept = audited.memory.kept
    content, plain = kept[NAME], forged(kept[NAME])
    head, _, signature = content.split(b".")
    planted = {
        "changed": b".".join([head, base64.urlsafe_b64encode(plain).rstrip(b"="), signature]),
        "renamed": Seal(KEYS).seal(plain, "others"),
        "unsigned": plain,
        "another key": Seal(OTHERS).seal(plain, NAME),
    }[way]
    kept[NAME] = planted
    report = await audited.audit()
    assert problems(report) == {Kind.MEMORY_DAMAGED}
    assert not report.sound
    assert kept[NAME] == planted, "an operator must inspect it first"
    assert problems(await audited.audit(accept=True)) == {Kind.MEMORY_DAMAGED}
    assert problems(await audited.audit()) == set()


async def test_an_audit_without_a_key_leaves_a_sealed_memory_alone(audited: Scene, keys_are: KeysAre) -> None:
    content = audited.memory.kept[NAME]
    keys_are(None)
    assert problems(await audited.audit()) == {Kind.MEMORY_UNREACHABLE}
    assert audited.memory.kept[NAME] == content
