"""The reconciler of specs in Dagster: runs that apply a document, checks of drift, and plans as metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

import dagster as dg

from coranto.client.loop import run_blocking, run_reporting
from coranto.errors import CorantoError, InvalidInput
from coranto.reconcile import SpecAction, SpecPlan, SpecReconciler, SpecStep
from coranto.telemetry import progress
from coranto.wire import protocol_pb2 as pb
from dagster_coranto.instance.log import DagsterLog
from dagster_coranto.translation.metadata import JournalRow, namespaced, table, verbatim

SpecsText = str | Path | Callable[[], str]
"""A document: the path of a file, a text, or a function that returns the text."""

OpenReconciler = Callable[[], AbstractAsyncContextManager[SpecReconciler]]
"""Opens a connection, and yields the reconciler of a document."""

_LOGGED: Final = 100
"""The maximum number of specs that a run logs individually. Larger runs log each transaction instead."""
_WORDS: Final = {
    SpecAction.CREATE: "created",
    SpecAction.UPDATE: "changed",
    SpecAction.DELETE: "deleted",
    SpecAction.NONE: "unchanged",
    SpecAction.GONE: "absent",
}
_SHOWN: Final[dict[str, dict[str, Callable[[Any], str]]]] = {
    "journal": {
        "replication": lambda spec: str(spec.replication),
        "codec": lambda spec: pb.CompressionCodec.Name(spec.fragment.compression_codec),
        "fragment_length": lambda spec: str(spec.fragment.length),
        "stores": lambda spec: ", ".join(spec.fragment.stores),
    },
    "shard": {
        "sources": lambda spec: ", ".join(source.journal for source in spec.sources),
        "hot_standbys": lambda spec: str(spec.hot_standbys),
        "disabled": lambda spec: str(spec.disable),
    },
}
"""The columns of a plan's table, by kind, with functions that format them from a spec."""


def text_of(specs: SpecsText) -> str:
    """Return a document's text."""
    if callable(specs):
        return specs()
    return specs.read_text() if isinstance(specs, Path) else specs


def compare(open_reconciler: OpenReconciler) -> SpecPlan:
    """Return the plan for a document, and change nothing."""

    async def work() -> SpecPlan:
        async with open_reconciler() as reconciler:
            return await reconciler.plan()

    return run_blocking(work())


def apply(log: dg.DagsterLogManager, open_reconciler: OpenReconciler) -> SpecPlan:
    """Apply a document, and return the steps. Logs each change and the progress."""

    async def work(report: Callable[[SpecPlan | Sequence[SpecStep]], None]) -> SpecPlan:
        async with open_reconciler() as reconciler:
            plan = await reconciler.plan()
            report(plan)
            return await reconciler.apply(plan, report)

    with progress("Applying specs", unit="specs", log=DagsterLog(log)) as bar:
        due = 0

        def show(report: SpecPlan | Sequence[SpecStep]) -> None:
            nonlocal due
            if isinstance(report, SpecPlan):
                due = len(report.due)
                bar.expect(due)
                return
            bar.advance(len(report))
            if due > _LOGGED:
                log.info(f"applied {len(report)} specs, from {report[0].name} to {report[-1].name}")
                return
            for step in report:
                log.info(f"{step.name}: {_WORDS[step.action]} {'; '.join(step.differences)}".rstrip())

        return run_reporting(work, show)


def apply_result(plan: SpecPlan) -> dg.MaterializeResult[None]:
    """Return the result of a run that applied a document. The data version is the document's digest."""
    return dg.MaterializeResult(data_version=dg.DataVersion(plan.digest), metadata=plan_metadata(plan))


def check_drift(open_reconciler: OpenReconciler, *, blocking: bool = False) -> dg.AssetCheckResult:
    """Return the result of a check: it warns if applying the document would change anything.

    Dagster stops downstream assets only for errors, so drift is an error for a `blocking` check. If the cluster does
    not answer, the check fails with an error, because nothing was compared. Raises InvalidInput for an invalid
    document.
    """
    try:
        plan = compare(open_reconciler)
    except InvalidInput:
        raise
    except CorantoError as error:
        return dg.AssetCheckResult(
            passed=False,
            severity=dg.AssetCheckSeverity.ERROR,
            description="nothing could be compared with the document",
            metadata=namespaced({"problem": verbatim([f"- {error}"])}),
        )
    pruned = sum(step.pruned for step in plan.due)
    drifted, named = len(plan.due) - pruned, len(plan.steps) - pruned
    specs = plan.kind.plural
    parts = [f"{drifted} of {named} {specs} are not as the document says"] if drifted else []
    parts += [f"{_are(pruned, plan)} not in the document"] if pruned else []
    return dg.AssetCheckResult(
        passed=not plan.due and not plan.conflicts,
        severity=dg.AssetCheckSeverity.ERROR if blocking else dg.AssetCheckSeverity.WARN,
        description="; ".join([*parts, *plan.conflicts]) or f"{_are(named, plan)} as the document says",
        metadata=plan_metadata(plan),
    )


def _are(count: int, plan: SpecPlan) -> str:
    return f"1 {plan.kind.noun} is" if count == 1 else f"{count} {plan.kind.plural} are"


def plan_metadata(plan: SpecPlan) -> dict[str, Any]:
    """Return a plan as metadata: counts, and a table, changed specs first."""
    fields = _SHOWN[plan.kind.noun]
    columns = dict.fromkeys((plan.kind.noun, "change", *fields, "differences"), "string")

    def row(step: SpecStep) -> JournalRow:
        fields_shown = {name: shown(step.spec) if step.spec is not None else None for name, shown in fields.items()}
        named = {plan.kind.noun: step.name, "change": _WORDS[step.action]}
        return {**named, **fields_shown, "differences": "; ".join(step.differences)}

    counts = {word: plan.count(action) for action, word in _WORDS.items() if action is not SpecAction.GONE}
    steps = sorted(plan.steps, key=lambda step: not step.due)
    return namespaced({**counts, plan.kind.plural: table([row(step) for step in steps], columns)})
