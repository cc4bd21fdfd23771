"""The interface between the reconciler and a kind of specs.

Changes of all kinds have the same three fields, as in Gazette's protocols: `upsert` (a spec), `delete` (a name) and
`expect_mod_revision`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from coranto.specs.validation import ANY_REVISION
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb

SpecChange = pb.ApplyRequest.Change | pc.ApplyRequest.Change
ChangeT = TypeVar("ChangeT", bound=SpecChange)


@dataclass(frozen=True, slots=True)
class PresentSpec:
    """A spec as etcd has it, and the revision that last changed it."""

    spec: Message
    revision: int


@dataclass(frozen=True, slots=True)
class SpecKind:
    """A kind of specs."""

    noun: str
    """The singular, such as `journal`. The plural adds an s."""
    change: Callable[..., Any]
    """Makes a change."""
    name_of: Callable[[Any], str]
    """Returns the name in a spec."""
    labels_of: Callable[[Any], pb.LabelSet]
    """Returns a spec's labels with its name, for selectors."""
    keep: Callable[[Any, Any], Any]
    """Takes the wanted and the current spec. Returns the wanted one, with the managed parts of the current one."""
    blocking_deletions: Callable[[Sequence[Any], Sequence[Any]], set[str]]
    """Takes deleted and created specs. Returns the names of deleted specs that block the creation of others."""
    deletes_in_transaction: bool
    """True if one transaction may both delete blocking specs and create the blocked ones."""
    prunable: Callable[[Any], bool] = lambda _: True
    """Takes a current spec. Returns False if a program manages the spec, so that pruning must not delete it."""

    @property
    def plural(self) -> str:
        return f"{self.noun}s"


class SpecAccess(Protocol):
    """The specs of one kind in one cluster."""

    async def present(self) -> Mapping[str, PresentSpec]:
        """Return all specs, by name."""
        ...

    async def apply(self, changes: Sequence[Any]) -> None:
        """Make changes in one transaction. Raises EtcdTransactionFailed if a revision is not the expected one."""
        ...


def at_any_revision(changes: Iterable[ChangeT]) -> list[ChangeT]:
    """Return changes with the revision -1 where they have none, so that they may also update existing specs."""
    result = []
    for change in changes:
        copy: Any = type(change)()
        copy.CopyFrom(change)
        copy.expect_mod_revision = change.expect_mod_revision or ANY_REVISION
        result.append(copy)
    return result
