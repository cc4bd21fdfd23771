"""OpenLineage of operators: the groups that a task reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_coranto.assets import lineage_dataset
from airflow_coranto.hook import CorantoHook


def lineage(conn_id: str, *, inputs: Sequence[str] = (), outputs: Sequence[str] = ()) -> Any:
    """Return the lineage of a task between groups of journals. Only OpenLineage's provider calls this."""
    from airflow.providers.openlineage.extractors import OperatorLineage

    cluster = CorantoHook(conn_id).cluster_name()
    return OperatorLineage(
        inputs=[lineage_dataset(group, cluster) for group in inputs],
        outputs=[lineage_dataset(group, cluster) for group in outputs],
    )
