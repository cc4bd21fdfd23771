"""The operator that publishes rows exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from airflow.providers.common.compat.sdk import BaseOperator

from airflow_coranto.connection import DEFAULT_CONNECTION
from airflow_coranto.failures import TaskLog, airflow_errors
from airflow_coranto.hooks.coranto import CorantoHook
from airflow_coranto.lineage import declare, emit_growth, lineage, positions_after, positions_in
from airflow_coranto.links.report import ReportLink
from airflow_coranto.rows import RowKey, key_function, writer_id_of

Rows = Iterable[Mapping[str, Any]] | Callable[..., Iterable[Mapping[str, Any]]]


class PublishOperator(BaseOperator):
    """Publish rows to the journals of a group, exactly once for each task instance.

    `rows` are JSON-serializable mappings, or a function that returns them. The function gets `op_kwargs` and the
    context entries that its parameters name, as in PythonOperator. Use a function (a generator) for many rows. `key` is
    the column, or a function of a row, whose value chooses the journal: rows of one key stay in order.

    The publication has the name `writer_id`, by default derived from the DAG, the run, the task and the map index. All
    tries of the task use the same name, also after it is cleared or the scheduler loses it. So the rows become visible
    together, once. Later tries add nothing, and do not read their rows. To publish again after clearing, give another
    `edition` (a template; for example a param of the DAG). Two Airflow installations that publish to the same group
    need different `namespace`s.

    `ledger` is the journal that records publications (see `coranto.publication`), by default `GROUP-publications`. It
    is created if it is missing, which requires permission to apply specs. With `accept_lost_ledger` the task publishes
    even if the ledger has lost content: rows may be duplicated.

    The group's asset `journal://CLUSTER/GROUP` is the task's outlet, unless you give `outlets`. DAGs that are scheduled
    on it start when the task has succeeded. Give `outlets=[]` if a DAG watches the asset: otherwise it starts twice.
    `cluster` is the name in its URI, by default the connection's id.

    Returns `{"writer_id", "messages", "published_at", "is_new", "heads"}`.
    """

    template_fields: Sequence[str] = (
        "group",
        "writer_id",
        "namespace",
        "edition",
        "ledger",
        "op_kwargs",
        "coranto_conn_id",
    )
    operator_extra_links = (ReportLink(),)
    ui_color = "#e6f4ea"

    def __init__(
        self,
        *,
        group: str,
        rows: Rows,
        key: RowKey,
        op_kwargs: Mapping[str, Any] | None = None,
        writer_id: str = "",
        namespace: str = "airflow",
        edition: str = "",
        ledger: str = "",
        accept_lost_ledger: bool = False,
        cluster: str = "",
        coranto_conn_id: str = DEFAULT_CONNECTION,
        **kwargs: Any,
    ) -> None:
        self.cluster = cluster or coranto_conn_id
        declare(kwargs, self.cluster, outlets=[group])
        super().__init__(**kwargs)
        self.group = group
        self.rows = rows
        self.key = key
        self.op_kwargs = dict(op_kwargs or {})
        self.writer_id = writer_id
        self.namespace = namespace
        self.edition = edition
        self.ledger = ledger
        self.accept_lost_ledger = accept_lost_ledger
        self.coranto_conn_id = coranto_conn_id

    def execute(self, context: Any) -> dict[str, Any]:
        return self._publish(context, lambda: self._rows(context))

    def _publish(self, context: Any, rows: Callable[[], Iterable[Mapping[str, Any]]]) -> dict[str, Any]:
        from coranto.client.groups import JournalGroup
        from coranto.client.positions import heads_of
        from coranto.messages import JsonLines
        from coranto.offsets import vector_to_json
        from coranto.publication import publish_once
        from coranto.telemetry import progress

        ti = context["ti"]
        with airflow_errors():
            writer_id = self.writer_id or writer_id_of(
                self.namespace, ti.dag_id, ti.run_id, ti.task_id, ti.map_index, self.edition
            )
            group = JournalGroup(self.group)
            hook = CorantoHook(self.coranto_conn_id)
            with hook.get_conn() as client:
                before = positions_in(client, [self.group])
                journals = client.list(group.selector).names
                with progress("Publishing", unit="rows", log=TaskLog(self.log)) as report:
                    done = publish_once(
                        client,
                        journals,
                        _LazyRows(rows),
                        writer_id=writer_id,
                        key=key_function(self.key),
                        framing=JsonLines(),
                        ledger=self.ledger or f"{self.group}-publications",
                        accept_loss=self.accept_lost_ledger,
                        report=report,
                    )
                after = positions_after(client, before)
        emit_growth(context, self.outlets, self.cluster, before, after)
        if done.is_new:
            self.log.info("Published %d rows to %s/… as %s", done.messages, self.group, writer_id)
        else:
            self.log.warning(
                "Added nothing: an earlier try has published %d rows as %s. Give another edition to publish again",
                done.messages,
                writer_id,
            )
        return {
            "writer_id": writer_id,
            "messages": done.messages,
            "published_at": done.time,
            "is_new": done.is_new,
            "heads": vector_to_json(heads_of(after[self.group])),
        }

    def _rows(self, context: Any) -> Iterable[Mapping[str, Any]]:
        if not callable(self.rows):
            return self.rows
        from airflow.providers.common.compat.sdk import determine_kwargs

        return self.rows(**determine_kwargs(self.rows, (), {**context, **self.op_kwargs}))

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        return lineage(self.coranto_conn_id, outputs=[self.group])


class _LazyRows(Iterable[Mapping[str, Any]]):
    """Rows that are produced on iteration, and therefore not for an existing publication."""

    def __init__(self, make: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self._make = make

    def __iter__(self) -> Any:
        return iter(self._make())
