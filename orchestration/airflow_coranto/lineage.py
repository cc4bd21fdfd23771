"""Lineage of operators: the groups that a task reads and writes, as Airflow's inlets and outlets and in OpenLineage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_coranto.assets.journal import journal_asset, lineage_dataset
from airflow_coranto.hooks.coranto import CorantoHook

if TYPE_CHECKING:
    from coranto.client import SyncJournalClient
    from coranto.client.positions import JournalPosition

    Positions = Mapping[str, Mapping[str, JournalPosition]]


def declare(
    arguments: dict[str, Any], cluster: str, *, inlets: Sequence[str] = (), outlets: Sequence[str] = ()
) -> None:
    """Add the assets of groups to an operator's arguments `inlets` and `outlets`, unless these are given.

    Airflow reads them when it parses the DAG. So a group that is a template has no asset.
    """
    for name, groups in (("inlets", inlets), ("outlets", outlets)):
        if arguments.get(name) is None:
            arguments[name] = [journal_asset(group, cluster=cluster) for group in groups if "{{" not in group]


def positions_in(client: SyncJournalClient, groups: Sequence[str]) -> Positions:
    """Return the present positions of the journals of groups. Raises the client's errors."""
    from coranto.client.groups import JournalGroup
    from coranto.client.positions import positions_of

    return {group: positions_of(client.heads(JournalGroup(group).selector)) for group in groups}


def tell_growth(context: Any, outlets: Sequence[Any] | None, cluster: str, before: Positions, after: Positions) -> None:
    """Give the events of a task's outlets the payload that a watcher's events have: offsets before and after it."""
    from coranto.client.positions import begins_of, grown_bytes, heads_of
    from coranto.offsets import vector_to_json

    events = context.get("outlet_events")
    for group, now in after.items():
        asset = journal_asset(group, cluster=cluster)
        if events is not None and asset in (outlets or ()):
            since = before[group]
            vectors = {"since": vector_to_json(begins_of(now, since)), "heads": vector_to_json(heads_of(now))}
            events[asset].extra = {"payload": {"group": group, "bytes": grown_bytes(now, since), **vectors}}


def lineage(coranto_conn_id: str, *, inputs: Sequence[str] = (), outputs: Sequence[str] = ()) -> Any:
    """Return the lineage of a task between groups of journals. Only OpenLineage's provider calls this."""
    from airflow.providers.openlineage.extractors import OperatorLineage

    cluster = CorantoHook(coranto_conn_id).cluster_name()
    return OperatorLineage(
        inputs=[lineage_dataset(group, cluster) for group in inputs],
        outputs=[lineage_dataset(group, cluster) for group in outputs],
    )
