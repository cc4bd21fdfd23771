"""The operator that audits journals."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from airflow.providers.common.compat.sdk import AirflowFailException, BaseOperator

from airflow_coranto.connection import DEFAULT_CONNECTION
from airflow_coranto.failures import TaskLog, airflow_errors
from airflow_coranto.hooks.coranto import CorantoHook
from airflow_coranto.lineage import lineage
from airflow_coranto.links.report import ReportLink
from coranto.errors import InvalidInput

if TYPE_CHECKING:
    from coranto.audit import Check, Report
    from coranto.client import ClientConfig, JournalClient
    from coranto.fragments.stores import StoreRegistry

    MoreChecks = Callable[[JournalClient, StoreRegistry], Sequence[Check]]

_SHOWN: Final = 20
_WHOLE_SUBJECTS: Final = 1000
"""The maximum number of journals with details in the XCom."""
_MAX_FINDINGS: Final = 1000
"""The maximum number of findings in the XCom. The task's log has all findings."""


class AuditOperator(BaseOperator):
    """Audit the journals of a group, as `coranto audit` does, and fail on a finding.

    With the `depth` `cheap` it compares stored content with brokers' answers and with the last audit. `deep` also reads
    content up to `budget`, the least recently read first: a number of bytes, a text such as 64M or `all`, or None for
    all. An empty budget is the command's default. `memory` is the URL of the store with the records of audits, by
    default each journal's first store. `checks` is a function of a client and the stores that returns additional
    checks, such as checks of consumers. A group without journals is a finding, unless `allow_empty`.

    The report is the XCom `report`, also of a failed task; the link "Report" leads to it. A finding that is an error
    fails the task without retries. Warnings do so only with `fail_on_warning`. Returns `{"sound", "summary", "errors",
    "warnings"}`.
    """

    template_fields: Sequence[str] = ("group", "depth", "budget", "memory", "coranto_conn_id")
    operator_extra_links = (ReportLink(),)
    ui_color = "#fce8e6"

    def __init__(
        self,
        *,
        group: str,
        depth: str = "cheap",
        budget: int | str | None = "",
        memory: str = "",
        checks: MoreChecks | None = None,
        allow_empty: bool = False,
        fail_on_warning: bool = False,
        coranto_conn_id: str = DEFAULT_CONNECTION,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if isinstance(budget, int) and budget <= 0:
            raise InvalidInput(f"an audit cannot read {budget} bytes; give at least 1, or None for all", field="budget")
        self.group = group
        self.depth = depth
        self.budget = budget
        self.memory = memory
        self.checks = checks
        self.allow_empty = allow_empty
        self.fail_on_warning = fail_on_warning
        self.coranto_conn_id = coranto_conn_id

    def execute(self, context: Any) -> dict[str, Any]:
        from coranto.client.loop import run_blocking

        with airflow_errors():
            report = run_blocking(self._audit(CorantoHook(self.coranto_conn_id).client_config()))
        context["ti"].xcom_push(key="report", value=report_value(report))
        xcom_value = {
            "sound": report.sound,
            "summary": report.summary,
            "errors": [str(finding) for finding in report.errors[:_SHOWN]],
            "warnings": [str(finding) for finding in report.warnings[:_SHOWN]],
        }
        for finding in report.errors:
            self.log.error("%s: %s", finding.kind, finding)
        for finding in report.warnings:
            self.log.warning("%s: %s", finding.kind, finding)
        if not report.sound or (self.fail_on_warning and report.warnings):
            context["ti"].xcom_push(key="return_value", value=xcom_value)
            worst = [*report.errors, *report.warnings][:3]
            raise AirflowFailException(f"{report.summary}. {'; '.join(map(str, worst))}")
        self.log.info("%s", report.summary)
        return xcom_value

    async def _audit(self, config: ClientConfig) -> Report:
        from coranto.audit import AuditOptions, Depth, audit_journals
        from coranto.audit.journals import DEFAULT_BUDGET, budget_of
        from coranto.client import JournalClient
        from coranto.client.groups import JournalGroup
        from coranto.fragments.stores import StoreRegistry
        from coranto.telemetry import progress

        if self.depth not in set(Depth):
            raise InvalidInput(f"{self.depth!r} is not {' or '.join(Depth)}", field="depth")
        budget = self.budget
        if isinstance(budget, str):
            budget = budget_of(budget, "budget") if budget.strip() else DEFAULT_BUDGET
        options = AuditOptions(Depth(self.depth), budget, self.memory, allow_empty=self.allow_empty)
        stores = StoreRegistry(config.file_root)
        self.log.info("Auditing the journals %s/… of %s (%s)", self.group, config.endpoint, self.depth)
        async with JournalClient.of(config) as client:
            checks = self.checks(client, stores) if self.checks is not None else ()
            selector = JournalGroup(self.group).selector_text
            with progress("Auditing journals", unit="journals", log=TaskLog(self.log)) as shown:
                return await audit_journals(client, stores, selector, options, checks=checks, progress=shown)

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        return lineage(self.coranto_conn_id, inputs=[self.group])


def report_value(report: Report) -> dict[str, Any]:
    """Return a report as an XCom value. Large ones have only the number of journals and the most severe findings."""
    xcom_value: dict[str, Any] = json.loads(report.to_json())
    if len(report.subjects) > _WHOLE_SUBJECTS:
        xcom_value["subjects"] = {"left_out": {"journals": len(report.subjects)}}
    if len(report.findings) > _MAX_FINDINGS:
        xcom_value["findings"] = xcom_value["findings"][:_MAX_FINDINGS]
        xcom_value["findings_left_out"] = len(report.findings) - _MAX_FINDINGS
    return xcom_value
