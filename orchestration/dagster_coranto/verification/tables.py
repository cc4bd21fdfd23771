"""The audit of a table without code, as a check of its asset."""

from typing import Final

import dagster as dg

from coranto.audit import Report
from coranto.client import JournalClient
from coranto.client.loop import run_blocking
from coranto.errors import CorantoError
from dagster_coranto.consumers.tables import TABLES
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.typed import resource_of
from dagster_coranto.translation.metadata import namespaced, verbatim

_NOTHING: Final = "No message is committed yet."


def build_table_check(table: dg.AssetsDefinition, *, resource_key: str = "journals") -> dg.AssetChecksDefinition:
    """Return the check `audit` of a table's asset, as by `coranto table check`.

    It compares the checkpoint with the journals. A table with `mode: append` and without a filter must have as many
    rows as there are committed messages. It reads the journals from their beginnings. The check also fails if a store
    or broker does not answer, and if the store has lost the position of an asset that was materialised.
    """
    definition = TABLES.of(table)

    @dg.asset_check(
        name="audit",
        asset=definition.asset.key,
        required_resource_keys={resource_key},
        description="The table agrees with its journals.",
    )
    def audit(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        from coranto_consumers.tables.state import audit_table, expectation_of, stored_progress

        async def examine() -> Report:
            async with JournalClient.of(journals.audit_config()) as client:
                return await audit_table(client, spec)

        journals = resource_of(context.resources, resource_key, JournalResource)
        try:
            spec = definition.spec(journals)
            progress = stored_progress(spec)
            if not progress.offsets:
                is_lost = context.instance.get_latest_materialization_event(definition.asset.key) is not None
                description = "The table was written, and its store has no position of it." if is_lost else _NOTHING
                return dg.AssetCheckResult(passed=not is_lost, description=description)
            report = run_blocking(examine())
        except CorantoError as error:
            return dg.AssetCheckResult(passed=False, description=f"The table could not be examined: {error}")
        problems = [*report.errors, *report.warnings]
        return dg.AssetCheckResult(
            passed=not problems,
            severity=dg.AssetCheckSeverity.ERROR if report.errors else dg.AssetCheckSeverity.WARN,
            description=str(problems[0]) if problems else f"{progress.rows or 0:,} rows are sound.",
            metadata=namespaced(
                {
                    "rows": progress.rows or 0,
                    "expected": verbatim(expectation_of(spec) or ["the checkpoint agrees with the journals"]),
                    "findings": verbatim(f"- {each.severity} {each.kind}: {each}" for each in problems),
                }
            ),
        )

    return audit
