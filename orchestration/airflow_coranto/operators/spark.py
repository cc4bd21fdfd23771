"""The operator that runs a Spark consumer until it has caught up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowFailException, BaseOperator

from airflow_coranto.connection import DEFAULT_CONNECTION
from airflow_coranto.failures import TaskLog, airflow_errors
from airflow_coranto.hooks.coranto import CorantoHook
from airflow_coranto.lineage import declare, emit_growth, lineage, positions_after, positions_in
from airflow_coranto.links.report import ReportLink
from airflow_coranto.store import checked_store_url, store_url_of_connection
from coranto.offsets import vector_to_json
from coranto_consumers.spark.application.consumer_options import ConsumerOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from airflow_coranto.lineage import Positions
    from coranto.client import SyncJournalClient
    from coranto_consumers.spark.application.outputs import SparkApplication
    from coranto_consumers.spark.consumer.progress import ConsumeReport
    from coranto_consumers.spark.consumer.spark_consumer import SparkConsumer


class SparkConsumerOperator(BaseOperator):
    """Run a Spark consumer until it reaches the heads that its journals had at the start of the task.

    `application` is `module:name` of a class or function that creates the application from `application_kwargs`, or the
    function itself. The module is imported only when the task runs. The store is the Airflow connection `store_conn_id`
    or `store_url`, which must hold no password and may name an Iceberg table (`iceberg://CATALOG/namespace.table`).
    `master` and `spark_conf` are Spark's. `options` are the options of `SparkConsumer`: `ConsumerOptions`, or plain
    values for `ConsumerOptions.of`, such as `{"misfits": "nulls"}`.

    The store alone keeps the offsets, under a fence. A task that is killed, retried, cleared or run again continues at
    the last commit; nothing is lost or repeated. If two instances run, the later one continues, and the earlier one
    fails and is not retried. So only one instance of this task runs at a time, unless you set `max_active_tis_per_dag`.

    With `wait_for`, the name of the group that the application reads, the task first waits in the triggerer for new
    content, and checks every `wait_interval` seconds.

    `inputs` and `outputs` are the groups that the application reads and publishes to. Their assets
    `journal://CLUSTER/GROUP` are the task's inlets and outlets, unless you give these. `cluster` is the name in their
    URIs, by default the connection's id. Give `outlets=[]` if a DAG watches such an asset: otherwise it starts twice.

    Returns `{"transactions", "messages", "published", "misfits", "lost", "lag_bytes", "offsets", "heads", "fence"}`.
    `messages` is the number of committed messages that were processed, `misfits` the number that do not fit. `lost`
    lists missing content that was skipped. The task's log warns about both.
    """

    template_fields: Sequence[str] = (
        "application_kwargs",
        "store_conn_id",
        "store_url",
        "spark_conf",
        "wait_for",
        "coranto_conn_id",
    )
    operator_extra_links = (ReportLink(),)
    ui_color = "#fff4e5"

    def __init__(
        self,
        *,
        application: str | Callable[..., SparkApplication],
        application_kwargs: Mapping[str, Any] | None = None,
        store_conn_id: str = "",
        store_url: str = "",
        master: str = "local[2]",
        spark_conf: Mapping[str, str] | None = None,
        options: ConsumerOptions | Mapping[str, Any] | None = None,
        wait_for: str = "",
        wait_interval: float = 5.0,
        inputs: Sequence[str] = (),
        outputs: Sequence[str] = (),
        cluster: str = "",
        coranto_conn_id: str = DEFAULT_CONNECTION,
        **kwargs: Any,
    ) -> None:
        self.cluster = cluster or coranto_conn_id
        kwargs.setdefault("max_active_tis_per_dag", 1)
        declare(kwargs, self.cluster, inlets=inputs, outlets=outputs)
        super().__init__(**kwargs)
        if store_url and "{{" not in store_url:  # Airflow stores and shows the rendered URL.
            checked_store_url(store_url)
        self.application = application
        self.application_kwargs = dict(application_kwargs or {})
        self.store_conn_id = store_conn_id
        self.store_url = store_url
        self.master = master
        self.spark_conf = dict(spark_conf or {})
        self.options = options or {}
        if not isinstance(self.options, ConsumerOptions):  # A framing may need a file that only workers have.
            ConsumerOptions.of({name: value for name, value in self.options.items() if name != "framing"})
        self.wait_for = wait_for
        self.wait_interval = wait_interval
        self.inputs = inputs
        self.outputs = outputs
        self.coranto_conn_id = coranto_conn_id
        self._session: SparkSession | None = None

    def execute(self, context: Any) -> dict[str, Any]:
        with airflow_errors():
            if self.wait_for:
                self._wait()
            return self._consume(context)

    def execute_complete(self, context: Any, event: Mapping[str, Any]) -> dict[str, Any]:
        """Consume the new content. Airflow calls this after the wait."""
        if "error" in event and not event.get("recreated"):  # The consumer's options cover that case.
            raise AirflowFailException(event["error"])
        with airflow_errors():
            return self._consume(context)

    def on_kill(self) -> None:
        """Stop Spark's work. Uncommitted messages will be consumed again."""
        if self._session is not None:
            self._session.stop()

    def _wait(self) -> None:
        """Wait in the triggerer for content beyond the committed checkpoint."""
        from airflow_coranto.triggers.journal import JournalOffsetTrigger
        from coranto_consumers.stores.reading import read_checkpoint

        stored = read_checkpoint(self._store(), self._application().name)
        beyond = vector_to_json(stored.checkpoint.offsets) if stored is not None else {}
        trigger = JournalOffsetTrigger(self.wait_for, self.coranto_conn_id, beyond=beyond, interval=self.wait_interval)
        self.defer(trigger=trigger, method_name="execute_complete")

    def _consume(self, context: Any) -> dict[str, Any]:
        from coranto_consumers.spark.consumer.progress import show_progress

        before = self._output_positions(lambda client: positions_in(client, self.outputs))
        with show_progress(TaskLog(self.log)) as show:
            try:
                report = self._consumer(show).run_until_caught_up()
            finally:
                if self._session is not None:
                    self._session.stop()
        after = self._output_positions(lambda client: positions_after(client, before))
        emit_growth(context, self.outlets, self.cluster, before, after)
        self.log.info("Consumed %d messages in %d transactions", report.messages, report.transactions)
        if report.misfits:
            self.log.warning("%d messages do not fit the application's columns", report.misfits)
        for lost in report.lost:
            self.log.warning("Content was gone before it was read, and was skipped: %s", lost)
        return {
            "transactions": report.transactions,
            "messages": report.messages,
            "published": report.published,
            "misfits": report.misfits,
            "lost": [str(each) for each in report.lost],
            "lag_bytes": report.lag_bytes,
            "offsets": vector_to_json(report.offsets),
            "heads": vector_to_json(report.heads),
            "fence": report.fence,
        }

    def _output_positions(self, ask: Callable[[SyncJournalClient], Positions]) -> Positions:
        if not self.outputs:
            return {}
        with CorantoHook(self.coranto_conn_id).get_conn() as client:
            return ask(client)

    def _consumer(self, show: Callable[[ConsumeReport], None]) -> SparkConsumer:
        from coranto_consumers.spark.consumer.spark_consumer import SparkConsumer

        store = self._store()
        return SparkConsumer(
            self._application(),
            CorantoHook(self.coranto_conn_id).client_config(),
            store,
            self._start_session,
            self._options(),
            on_progress=show,
        )

    def _options(self) -> ConsumerOptions:
        return self.options if isinstance(self.options, ConsumerOptions) else ConsumerOptions.of(self.options)

    def _start_session(self) -> SparkSession:
        from coranto_consumers.spark.session.sessions import new_session, running_session

        found = running_session()
        if found is not None:  # The process that runs this task still needs it.
            return found
        self._session = new_session(
            f"airflow {self.dag_id} {self.task_id}", master=self.master, settings=self.spark_conf
        )
        return self._session

    def _application(self) -> SparkApplication:
        from coranto_consumers.loading import load_target

        made: SparkApplication
        if callable(self.application):
            made = self.application(**self.application_kwargs)
        else:
            made = load_target(self.application, **self.application_kwargs)
        return made

    def _store(self) -> str:
        if self.store_conn_id:
            return store_url_of_connection(self.store_conn_id)
        return checked_store_url(self.store_url)

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        return lineage(self.coranto_conn_id, inputs=self.inputs, outputs=self.outputs)
