"""Journal specs for the reconciler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from coranto import labels
from coranto.client import JournalClient
from coranto.fragments.forks import is_label
from coranto.names import check_prefix, names_above
from coranto.reconcile.kinds import PresentSpec, SpecKind
from coranto.wire import protocol_pb2 as pb


def _keep_state(wanted: pb.JournalSpec, present: pb.JournalSpec) -> pb.JournalSpec:
    """Return the wanted spec, with the current spec's managed parts that the wanted one does not set.

    These are `suspend`, whose offset is needed to resume the journal (otherwise an empty journal would begin at 0
    again), and the labels that link forks and their sources.
    """
    known = [label for label in present.labels.labels if is_label(label.name)]
    forks = known and not any(is_label(label.name) for label in wanted.labels.labels)
    suspended = present.HasField("suspend") and not wanted.HasField("suspend")
    if not forks and not suspended:
        return wanted
    kept = pb.JournalSpec()
    kept.CopyFrom(wanted)
    if suspended:
        kept.suspend.CopyFrom(present.suspend)
    if forks:
        for label in known:
            kept.labels.CopyFrom(labels.add_value(kept.labels, label.name, label.value))
    return kept


def _nesting(deleted: Sequence[pb.JournalSpec], created: Sequence[pb.JournalSpec]) -> set[str]:
    """Return the names of deleted journals that nest with created ones. Brokers refuse names that nest with others."""
    gone, new = {spec.name for spec in deleted}, {spec.name for spec in created}
    above_new = {above for name in new for above in names_above(name)}
    return {name for name in gone if name in above_new or any(above in new for above in names_above(name))}


def _is_of_users(spec: pb.JournalSpec) -> bool:
    """Return False for journals of streams, forks, and journals whose records cannot be recreated."""
    parts = (labels.STREAM, labels.STREAM_PART, labels.FORK_OF)
    part = any(label.name in parts for label in spec.labels.labels)
    return not part and labels.value_of(spec.labels, labels.MANAGED_BY) not in labels.OF_RECORDS


JOURNALS: SpecKind = SpecKind(
    noun="journal",
    change=pb.ApplyRequest.Change,
    name_of=lambda spec: str(spec.name),
    labels_of=lambda spec: labels.with_meta(spec.name, spec.labels),
    keep=_keep_state,
    blocking_deletions=_nesting,
    deletes_in_transaction=False,
    prunable=_is_of_users,
)


class JournalSpecs:
    """The journals of a client's cluster."""

    def __init__(self, client: JournalClient) -> None:
        self._client = client

    async def present(self) -> Mapping[str, PresentSpec]:
        return {info.name: PresentSpec(info.spec, info.mod_revision) for info in (await self._client.list()).journals}

    async def apply(self, changes: Sequence[pb.ApplyRequest.Change]) -> None:
        await self._client.apply(changes)


def under_prefix(changes: Iterable[pb.ApplyRequest.Change], prefix: str) -> list[pb.ApplyRequest.Change]:
    """Return the changes with `prefix`, which is empty or ends with a slash, in front of the journals' names."""
    check_prefix(prefix)
    moved = []
    for change in changes:
        copy = pb.ApplyRequest.Change()
        copy.CopyFrom(change)
        if copy.HasField("upsert"):
            copy.upsert.name = prefix + copy.upsert.name
        if copy.delete:
            copy.delete = prefix + copy.delete
        moved.append(copy)
    return moved
