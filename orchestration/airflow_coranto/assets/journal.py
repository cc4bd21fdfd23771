"""Groups of journals as Airflow assets: `journal://CLUSTER/GROUP`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from airflow.providers.common.compat.sdk import Asset

from airflow_coranto.connection import DEFAULT_CONNECTION
from coranto.errors import InvalidInput
from coranto.names import validate_journal

if TYPE_CHECKING:
    from urllib.parse import SplitResult

SCHEME = "journal"


def journal_asset(
    group: str,
    *,
    cluster: str = DEFAULT_CONNECTION,
    name: str | None = None,
    watch: bool = False,
    coranto_conn_id: str = DEFAULT_CONNECTION,
    **trigger: Any,
) -> Asset:
    """Return the asset of the journals `group/…` of a cluster.

    `cluster` is the cluster's common name: `cluster` in the connection's extra, by default the connection's id. With
    `watch`, a JournalOffsetTrigger adds an event to the asset when messages of any program are committed in the
    journals, and DAGs scheduled on the asset start. The trigger takes `coranto_conn_id` and the further arguments.
    Operators that publish to the group have the asset as an outlet, which also adds an event. Give them `outlets=[]` if
    the journals are watched, so that each publication counts once.
    """
    from airflow.sdk import AssetWatcher

    uri = journal_uri(group, cluster)
    if not watch:
        if trigger:
            raise InvalidInput(f"{', '.join(trigger)} is for a watcher; give watch=True", field="journal_asset")
        return Asset(name=name or uri, uri=uri)
    from airflow_coranto.triggers.journal import JournalOffsetTrigger

    watcher = AssetWatcher(name=f"growth of {group}", trigger=JournalOffsetTrigger(group, coranto_conn_id, **trigger))
    return Asset(name=name or uri, uri=uri, watchers=[watcher])


def journal_uri(group: str, cluster: str = DEFAULT_CONNECTION) -> str:
    """Return the URI of the journals `group/…`. Raises InvalidInput for an invalid name."""
    if group.endswith("/"):
        raise InvalidInput(f"{group!r} ends with a slash; name the group without it", field="group")
    validate_journal(f"{group}/any")
    return f"{SCHEME}://{cluster}/{group}"


def sanitize_uri(uri: SplitResult) -> SplitResult:
    """Check a `journal://` URI, for Airflow. Raises ValueError."""
    if not uri.netloc or not uri.path.strip("/"):
        raise ValueError("a journal's URI is journal://CLUSTER/GROUP, such as journal://prod/flights/events")
    if "@" in uri.netloc:
        raise ValueError("a journal's URI names a cluster, without user and password")
    if uri.query:
        raise ValueError("a journal's URI has no query")
    journal_uri(uri.path.strip("/"), uri.netloc)
    return uri


def to_openlineage(asset: Any, lineage_context: Any) -> Any:
    """Return an asset's OpenLineage dataset, with the namespace `journal://CLUSTER` and the group as its name."""
    parsed = urlsplit(asset.uri)
    return lineage_dataset(parsed.path.strip("/"), parsed.netloc)


def lineage_dataset(group: str, cluster: str) -> Any:
    """Return the OpenLineage dataset of the journals `group/…`."""
    from airflow.providers.common.compat.openlineage.facet import Dataset

    return Dataset(namespace=f"{SCHEME}://{cluster}", name=group)
