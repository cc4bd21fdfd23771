"""The operator that applies a tree of journal specs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowFailException, BaseOperator

from airflow_coranto.connection import DEFAULT_CONNECTION
from airflow_coranto.failures import airflow_errors
from airflow_coranto.hooks.coranto import CorantoHook
from airflow_coranto.links.report import ReportLink

if TYPE_CHECKING:
    from coranto.reconcile import SpecPlan, SpecStep


class ApplySpecsOperator(BaseOperator):
    """Apply a tree of journal specs, or only plan to.

    `specs` is YAML text (a template), a path below the DAG's folder that ends in .yaml or .yml (its content is a
    template), or a `Path`. Applying is idempotent: only differences are applied, in transactions, so a killed task
    continues when it is retried. `prefix` is put before all names. Journals that the tree does not name are kept,
    except journals of the groups in `prune`, which are deleted. With `plan_only` nothing is changed; with
    `fail_on_drift` as well, the task fails if there are differences.

    Returns `{"digest", "changed", "steps": [{"journal", "action", "differences"}]}` of the applied or planned changes.
    """

    template_fields: Sequence[str] = ("specs", "prefix", "prune", "coranto_conn_id")
    template_ext: Sequence[str] = (".yaml", ".yml")
    template_fields_renderers = {"specs": "yaml"}  # noqa: RUF012  # as in Airflow's own operators
    operator_extra_links = (ReportLink(),)
    ui_color = "#e8f0fe"

    def __init__(
        self,
        *,
        specs: str | Path,
        prefix: str = "",
        prune: Sequence[str] = (),
        plan_only: bool = False,
        fail_on_drift: bool = False,
        coranto_conn_id: str = DEFAULT_CONNECTION,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.specs = specs
        self.prefix = prefix
        self.prune = prune
        self.plan_only = plan_only
        self.fail_on_drift = fail_on_drift
        self.coranto_conn_id = coranto_conn_id

    def execute(self, context: Any) -> dict[str, Any]:
        with airflow_errors():
            plan = self._reconcile()
        xcom_value = {
            "digest": plan.digest,
            "changed": 0 if self.plan_only else len(plan.due),
            "steps": [
                {"journal": step.name, "action": step.action.value, "differences": list(step.differences)}
                for step in plan.due
            ],
        }
        if self.plan_only and self.fail_on_drift and plan.due:
            context["ti"].xcom_push(key="return_value", value=xcom_value)
            raise AirflowFailException(f"{len(plan.due)} journals are not as the tree says: {_names(plan.due)}")
        return xcom_value

    def _reconcile(self) -> SpecPlan:
        from coranto.client import JournalClient
        from coranto.client.groups import JournalGroup
        from coranto.client.loop import run_reporting
        from coranto.reconcile import tree_reconciler

        config = CorantoHook(self.coranto_conn_id).client_config()
        text = self.specs.read_text(encoding="utf-8") if isinstance(self.specs, Path) else self.specs
        prune = [JournalGroup(name) for name in self.prune]

        async def work(report: Callable[[Sequence[SpecStep]], None]) -> SpecPlan:
            async with JournalClient.of(config) as client:
                reconciler = tree_reconciler(client, text, prefix=self.prefix, prune=prune)
                plan = await reconciler.plan()
                return plan if self.plan_only else await reconciler.apply(plan, report)

        def show(steps: Sequence[SpecStep]) -> None:
            self.log.info("Applied %d specs: %s", len(steps), _names(steps))

        return run_reporting(work, show)


def _names(steps: Sequence[SpecStep]) -> str:
    shown = ", ".join(f"{step.name} ({step.action.value})" for step in steps[:20])
    return f"{shown} and {len(steps) - 20} more" if len(steps) > 20 else shown
