"""Lineage of operators: the groups that a task reads and writes, as Airflow's inlets and outlets and in OpenLineage."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_coranto.assets.journal import journal_asset, lineage_dataset
from airflow_coranto.hooks.coranto import CorantoHook

if TYPE_CHECKING:
    from coranto.client import SyncJournalClient
    from coranto.client.heads import Heads
    from coranto.client.positions import JournalPosition

    Positions = Mapping[str, Mapping[str, JournalPosition]]


def declare(
    arguments: dict[str, Any], cluster: str, *, inlets: Sequence[str] = (), outlets: Sequence[str] = ()
) -> None:
    """Add the assets of groups to an operator's arguments `inlets` and `outlets`, unless these are given.

    Airflow reads these arguments when it parses the DAG, before it renders templates. So a group with a template has no
    asset.
    """
    for name, groups in (("inlets", inlets), ("outlets", outlets)):
        if arguments.get(name) is None:
            arguments[name] = [journal_asset(group, cluster=cluster) for group in groups if "{{" not in group]


def positions_in(client: SyncJournalClient, groups: Sequence[str]) -> Positions:
    """Return the positions of the journals of groups, before a task's work.

    Waits for unknown heads, such as heads of new journals, for the client's retry timeout. Then raises Unavailable.
    Raises the client's errors.
    """
    from coranto.client.positions import positions_of

    return {group: positions_of(_heads(client, group).all_known()) for group in groups}


def positions_after(client: SyncJournalClient, before: Positions) -> Positions:
    """Return the positions of the journals of groups, after a task's work.

    Waits as `positions_in` does. A head that is still unknown keeps its earlier position: the work is done, and an
    error would only repeat it. Raises the client's errors.
    """
    from coranto.client.positions import present_positions

    return {group: present_positions(_heads(client, group), known) for group, known in before.items()}


def _heads(client: SyncJournalClient, group: str) -> Heads:
    """Return the heads of a group's journals, as soon as all are known, and at the latest after the retry timeout."""
    from coranto.client.groups import JournalGroup
    from coranto.client.retry import Retry

    selector, retry = JournalGroup(group).selector, Retry(client.config.retry_timeout)
    while True:
        heads = client.heads(selector)
        delay = retry.failed(time.monotonic()) if heads.unknown else None
        if delay is None:
            return heads
        time.sleep(delay)


def emit_growth(context: Any, outlets: Sequence[Any] | None, cluster: str, before: Positions, after: Positions) -> None:
    """Set the payload of a task's outlet events: the offsets before and after the task, as in a watcher's events."""
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
