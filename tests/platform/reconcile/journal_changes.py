"""Changes of journals' specs, and existing specs, for tests of plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coranto.reconcile import PresentSpec
from coranto.wire import protocol_pb2 as pb

Change = pb.ApplyRequest.Change


def spec(name: str, **fields: Any) -> pb.JournalSpec:
    return pb.JournalSpec(name=name, replication=fields.pop("replication", 1), **fields)


def upsert(name: str, *, revision: int = 0, **fields: Any) -> Change:
    return Change(expect_mod_revision=revision, upsert=spec(name, **fields))


def delete(name: str, revision: int = -1) -> Change:
    return Change(expect_mod_revision=revision, delete=name)


def present(*journals: tuple[str, int] | tuple[str, int, dict[str, Any]]) -> Mapping[str, PresentSpec]:
    return {name: PresentSpec(spec(name, **(rest[0] if rest else {})), revision) for name, revision, *rest in journals}
