"""The other examples of docs/airflow.md, parsed as DAGs."""

from __future__ import annotations

import re
from pathlib import Path

from airflow.sdk import DAG

PAGE = Path(__file__).parents[4] / "docs" / "airflow.md"


def test_the_examples_are_dags() -> None:
    found: dict[str, DAG] = {}
    for example in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        names: dict[str, object] = {"__name__": "example"}
        dags: list[DAG] = []
        entered = DAG.__enter__

        def enter(self: DAG, entered: object = entered, dags: list[DAG] = dags) -> DAG:
            dags.append(self)
            return entered(self)  # type: ignore[operator, no-any-return]

        DAG.__enter__ = enter  # type: ignore[method-assign]
        try:
            exec(compile(example, PAGE, "exec"), names)
        finally:
            DAG.__enter__ = entered  # type: ignore[method-assign]
        found |= {dag.dag_id: dag for dag in dags}
    assert set(found) == {"flights", "flight_alerts", "recovery", "on_orders"}
    assert set(found["flights"].task_ids) == {"apply_specs", "publish_flights", "consume_flights", "audit"}
    assert set(found["recovery"].task_ids) == {"recovery.plan", "recovery.approve", "recovery.recover"}
