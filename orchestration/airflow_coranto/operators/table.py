"""The operator that writes messages of journals to a table, each once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowException, BaseOperator

from airflow_coranto.connection import DEFAULT_CONNECTION
from airflow_coranto.failures import TaskLog, airflow_errors
from airflow_coranto.hooks.coranto import CorantoHook
from airflow_coranto.lineage import declare, lineage
from airflow_coranto.links.report import ReportLink

if TYPE_CHECKING:
    from coranto.client import ClientConfig
    from coranto_consumers.tables.runs import TableReport
    from coranto_consumers.tables.spec import TableSpec
    from coranto_consumers.tables.state import TableProgress


class TableOperator(BaseOperator):
    """Write the existing messages to a table, as `coranto table run --once` does. Each message is written once.

    `table` is the file of the command: YAML text (a template), a path below the DAG's folder that ends in .yaml or .yml
    (its content is a template), or a `Path`. `${NAME}` in it is a variable of the worker's environment; use it for
    passwords, because Airflow shows rendered templates. The table's store keeps its position, under a fence. So the
    task may be killed, retried and cleared: no message is written again. If two instances run, the later one continues,
    and the earlier one fails and is not retried. So only one instance of this task runs at a time, unless you set
    `max_active_tis_per_dag`. With `accept_changes`, the code in a ConsumerChanged error, it continues with another
    input or store under the same name.

    `stream` is the stream, or the folder of journals, in the file. If given, its asset `journal://CLUSTER/STREAM` is
    the task's inlet, unless you give `inlets`. `cluster` is the name in its URI, by default the connection's id.

    An unavailable store or broker is retried for ten minutes. A message that cannot be a row, or a table that lacks
    columns, fails the task without retries. A terminated task completes its transaction, and fails, so that a retry
    continues there.

    Returns `{"messages", "transactions", "rows", "bytes_behind", "messages_behind", "last_commit", "offsets"}`.
    `messages` and `transactions` are of this try. `last_commit` is the time, in Unix seconds, when the last transaction
    in the table was committed in its journal.
    """

    template_fields: Sequence[str] = ("table", "stream", "coranto_conn_id")
    template_ext: Sequence[str] = (".yaml", ".yml")
    template_fields_renderers = {"table": "yaml"}  # noqa: RUF012  # as in Airflow's own operators
    operator_extra_links = (ReportLink(),)
    ui_color = "#fff4e5"

    def __init__(
        self,
        *,
        table: str | Path,
        stream: str = "",
        accept_changes: str = "",
        cluster: str = "",
        coranto_conn_id: str = DEFAULT_CONNECTION,
        **kwargs: Any,
    ) -> None:
        self.cluster = cluster or coranto_conn_id
        kwargs.setdefault("max_active_tis_per_dag", 1)
        declare(kwargs, self.cluster, inlets=[stream] if stream else [])
        super().__init__(**kwargs)
        self.table = table
        self.stream = stream
        self.accept_changes = accept_changes
        self.coranto_conn_id = coranto_conn_id
        self._is_killed = False

    def execute(self, context: Any) -> dict[str, Any]:
        from coranto.offsets import vector_to_json

        with airflow_errors():
            spec, config = self._spec(), CorantoHook(self.coranto_conn_id).client_config()
            report = self._run(config, spec)
            found = self._progress(config, spec)
        self.log.info(
            "Wrote %d messages to table %s in %d transactions", report.messages, spec.table, report.transactions
        )
        if self._is_killed:
            raise AirflowException(
                f"the task was terminated: {report.messages} messages are committed, and a retry continues after them"
            )
        return {
            "messages": report.messages,
            "transactions": report.transactions,
            "rows": found.rows,
            "bytes_behind": found.bytes_behind,
            "messages_behind": found.messages_behind,
            "last_commit": found.last_commit,
            "offsets": vector_to_json(found.offsets),
        }

    def on_kill(self) -> None:
        """Stop the run after the current transaction."""
        self._is_killed = True

    def _spec(self) -> TableSpec:
        """Parse the file. Raises InvalidInput, with the line."""
        from coranto.errors import InvalidInput
        from coranto_consumers.tables.spec import read_table

        spec = read_table(self.table.read_text(encoding="utf-8") if isinstance(self.table, Path) else self.table)
        if self.stream and self.stream != spec.input.folder:
            raise InvalidInput(
                f"the task names {self.stream}, and the file of the table {spec.input}: give both the same name",
                field="stream",
            )
        return spec

    def _run(self, config: ClientConfig, spec: TableSpec) -> TableReport:
        from coranto.telemetry import progress
        from coranto_consumers.tables import RunOptions, run_table

        seen = 0
        with progress("Writing", unit="messages", log=TaskLog(self.log)) as bar:

            def show(report: TableReport) -> None:
                nonlocal seen
                bar.advance(report.messages - seen)
                seen = report.messages

            options = RunOptions(
                once=True, stop=lambda: self._is_killed, on_progress=show, accept_changes=self.accept_changes
            )
            report = run_table(config, spec, options)
            show(report)
        return report

    def _progress(self, config: ClientConfig, spec: TableSpec) -> TableProgress:
        from coranto.client import JournalClient
        from coranto.client.loop import run_blocking
        from coranto_consumers.tables.state import progress_of

        async def ask() -> TableProgress:
            async with JournalClient.of(config) as client:
                return await progress_of(client, spec)

        return run_blocking(ask())

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        return lineage(self.coranto_conn_id, inputs=[self.stream] if self.stream else [])
