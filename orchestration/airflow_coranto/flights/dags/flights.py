"""The flights job: apply specs, publish, consume, audit; and a DAG that starts when alerts are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param, task

from airflow_coranto.assets.journal import journal_asset
from airflow_coranto.hooks.coranto import CorantoHook
from airflow_coranto.operators.audit import AuditOperator
from airflow_coranto.operators.spark import SparkConsumerOperator
from airflow_coranto.operators.specs import ApplySpecsOperator
from coranto_flights.names import TREE

PREFIX = "airflow/"
"""The prefix of all journals, which separates them from the demo under Dagster."""
RETRY = {"retries": 3, "retry_delay": timedelta(seconds=1)}


def key_of(flight: Any) -> bytes:
    """Return the mapping key of a flight (see `partition_key`)."""
    from coranto_flights.data import partition_key

    return partition_key(flight)


with DAG("flights", schedule=None, params={"limit": Param(0, type="integer", minimum=0)}, default_args=RETRY):
    specs = ApplySpecsOperator(task_id="apply_specs", specs=TREE, prefix=PREFIX)

    @task.journal_publish(group=f"{PREFIX}flights/events", key=key_of)
    def publish_flights(params: Any = None) -> Iterator[dict[str, Any]]:
        """Yield the flights that left New York in 2013, or the first `limit` of them."""
        from coranto_flights.data import iter_flights, load_flights

        yield from iter_flights(load_flights(params["limit"]))

    consumer = SparkConsumerOperator(
        task_id="consume_flights",
        application="coranto_flights.application:CarrierDelays",
        application_kwargs={"prefix": PREFIX, "table": "carrier_delays_airflow"},
        store_conn_id="flights_store",
        options={"max_transaction_bytes": 8 << 20},
        inputs=[f"{PREFIX}flights/events"],
        outputs=[f"{PREFIX}flights/alerts"],
        outlets=[],  # The asset below is watched, which adds its events.
    )
    audit = AuditOperator(task_id="audit", group=f"{PREFIX}flights", depth="deep")
    specs >> publish_flights() >> consumer >> audit


ALERTS = journal_asset(f"{PREFIX}flights/alerts", watch=True, earliest=True)

with DAG("flight_alerts", schedule=[ALERTS], default_args=RETRY):

    @task
    def count_alerts(triggering_asset_events: Any = None) -> dict[str, Any]:
        """Return the bytes of new alerts in this run's asset events, and the number of alerts per carrier so far."""
        from coranto.client.committed import committed_messages
        from coranto.messages import JsonLines

        grown = sum(event.extra["payload"]["bytes"] for event in triggering_asset_events[ALERTS])
        with CorantoHook().get_conn() as client:
            journals = client.list(f"name:prefix={PREFIX}flights/alerts/").names
            carriers = Counter(
                envelope.message["carrier"]
                for journal in journals
                for envelope in committed_messages(client, journal, JsonLines())
            )
        return {"new_bytes": grown, "alerts": carriers.total(), "carriers": dict(carriers.most_common())}

    count_alerts()
