"""The link to a report on a task's page in Airflow's UI."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from airflow.providers.common.compat.sdk import BaseOperatorLink, conf


class ReportLink(BaseOperatorLink):
    """Link to the report, plan or result in the task's XCom."""

    name = "Report"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        base = conf.get("api", "base_url", fallback="").rstrip("/")
        parts = ("dags", ti_key.dag_id, "runs", ti_key.run_id, "tasks", ti_key.task_id)
        path = "/".join(quote(part, safe="") for part in parts)
        mapped = f"/mapped/{ti_key.map_index}" if (ti_key.map_index or 0) >= 0 and ti_key.map_index is not None else ""
        return f"{base}/{path}{mapped}/xcom"
