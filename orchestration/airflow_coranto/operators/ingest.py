"""The operator that writes rows of Kafka, files and PostgreSQL to a stream, each once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowException, BaseOperator

from airflow_coranto.connection import DEFAULT_CONNECTION
from airflow_coranto.failures import TaskLog, airflow_errors
from airflow_coranto.hooks.coranto import CorantoHook
from airflow_coranto.lineage import declare, emit_growth, lineage, positions_after, positions_in
from airflow_coranto.links.report import ReportLink

if TYPE_CHECKING:
    from coranto.client import ClientConfig
    from coranto.ingest.runs import IngestReport
    from coranto.ingest.spec import IngestSpec


class IngestOperator(BaseOperator):
    """Ingest until the source has no more rows, as `coranto ingest run` does. Each row is written once.

    `ingest` is the file of the command: YAML text (a template), a path below the DAG's folder that ends in .yaml or
    .yml (its content is a template), or a `Path`. `${NAME}` in it is a variable of the worker's environment; use it for
    passwords, because Airflow shows rendered templates. The stream stores the progress of the ingest. So the task may
    be killed, retried, cleared, and run twice at the same time: no row is written again. With `accept_loss` it
    continues even if brokers have lost part of this progress.

    `stream` is the stream in the file. If given, its asset `journal://CLUSTER/STREAM` is the task's outlet, unless you
    give `outlets`. `cluster` is the name in its URI, by default the connection's id.

    An unavailable source or broker is retried for ten minutes. A row that cannot be an event, or a changed source,
    fails the task without retries. A terminated task commits the rows that it has read, and fails, so that a retry
    continues there.

    Returns `{"rows", "dead_letters", "transactions", "lost", "positions"}`. `lost` and `positions` are by split, since
    the start of the ingest; the other values are of this try.
    """

    template_fields: Sequence[str] = ("ingest", "stream", "coranto_conn_id")
    template_ext: Sequence[str] = (".yaml", ".yml")
    template_fields_renderers = {"ingest": "yaml"}  # noqa: RUF012  # as in Airflow's own operators
    operator_extra_links = (ReportLink(),)
    ui_color = "#e6f4ea"

    def __init__(
        self,
        *,
        ingest: str | Path,
        stream: str = "",
        accept_loss: bool = False,
        cluster: str = "",
        coranto_conn_id: str = DEFAULT_CONNECTION,
        **kwargs: Any,
    ) -> None:
        self.cluster = cluster or coranto_conn_id
        declare(kwargs, self.cluster, outlets=[stream] if stream else [])
        super().__init__(**kwargs)
        self.ingest = ingest
        self.stream = stream
        self.accept_loss = accept_loss
        self.coranto_conn_id = coranto_conn_id
        self._is_killed = False

    def execute(self, context: Any) -> dict[str, Any]:
        with airflow_errors():
            spec = self._spec()
            hook, groups = CorantoHook(self.coranto_conn_id), [spec.stream]
            with hook.get_conn() as client:
                before = positions_in(client, groups)
                report = self._run(hook.client_config(), spec)
                after = positions_after(client, before)
        emit_growth(context, self.outlets, self.cluster, before, after)
        self.log.info("Ingested %d rows into %s in %d transactions", report.rows, spec.stream, report.batches)
        if report.dead_letters:
            self.log.warning("%d rows cannot be events, and went to the dead letters", report.dead_letters)
        for split, count in report.progress.lost.items():
            self.log.warning("%d rows of %s were gone before they were read", count, split)
        if self._is_killed:
            raise AirflowException(
                f"the task was terminated: {report.rows} rows are committed, and a retry continues after them"
            )
        return {
            "rows": report.rows,
            "dead_letters": report.dead_letters,
            "transactions": report.batches,
            "lost": dict(report.progress.lost),
            "positions": dict(report.progress.splits),
        }

    def on_kill(self) -> None:
        """Stop the ingest after it has committed the rows that it has read."""
        self._is_killed = True

    def _spec(self) -> IngestSpec:
        """Parse the file. Raises InvalidInput, with the line."""
        from coranto.errors import InvalidInput
        from coranto.ingest.spec import read_spec

        spec = read_spec(self.ingest.read_text(encoding="utf-8") if isinstance(self.ingest, Path) else self.ingest)
        if self.stream and self.stream != spec.stream:
            raise InvalidInput(
                f"the task names {self.stream}, and the file of the ingest {spec.stream}: give both the same name",
                field="stream",
            )
        return spec

    def _run(self, config: ClientConfig, spec: IngestSpec) -> IngestReport:
        from coranto.ingest.blocking import run_ingest
        from coranto.telemetry import progress

        seen = 0
        with progress("Ingesting", unit="rows", log=TaskLog(self.log)) as bar:

            def show(report: IngestReport) -> None:
                nonlocal seen
                bar.advance(report.rows - seen)
                seen = report.rows

            report = run_ingest(
                config, spec, accept_loss=self.accept_loss, on_progress=show, stop=lambda: self._is_killed
            )
            show(report)
        return report

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        return lineage(self.coranto_conn_id, outputs=[self.stream] if self.stream else [])
