"""The freshness of a stream that an ingest writes: how long rows wait in the source."""

from time import time
from typing import Final

import dagster as dg

from coranto.errors import ClusterError, CorantoError
from dagster_coranto.ingests.assets import INGESTS
from dagster_coranto.ingests.definition import IngestState
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.typed import resource_of
from dagster_coranto.translation.metadata import namespaced

FRESH: Final = "is_fresh"
FRESH_SECONDS: Final = 900.0


def build_ingest_check(
    ingest: dg.AssetsDefinition, *, fresh_seconds: float = FRESH_SECONDS, resource_key: str = "journals"
) -> dg.AssetChecksDefinition:
    """Return the check `is_fresh` of an ingest's asset: it fails if rows wait in the source, and the stream is stale.

    A stream is stale if `fresh_seconds` have passed since the last materialisation. If the source has no more rows, it
    is never stale. A source or broker that does not answer fails the check. Run it on a schedule, or let the sensor of
    `build_ingest_sensor` evaluate it.
    """
    definition = INGESTS.of(ingest)

    @dg.asset_check(
        name=FRESH,
        asset=definition.key,
        required_resource_keys={resource_key},
        description=f"Rows wait in the source for {fresh_seconds:.0f} s at most.",
    )
    def is_fresh(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        try:
            state = definition.state(resource_of(context.resources, resource_key, JournalResource))
        except (CorantoError, ClusterError) as error:
            return dg.AssetCheckResult(passed=False, description=f"The lag is unknown: {error}")
        passed, description = evaluate_freshness(context.instance, definition.key, state, fresh_seconds)
        return dg.AssetCheckResult(passed=passed, description=description, metadata=namespaced({"lag": state.lag}))

    return is_fresh


def evaluate_freshness(
    instance: dg.DagsterInstance, key: dg.AssetKey, state: IngestState, fresh_seconds: float
) -> tuple[bool, str]:
    """Return True if a stream is fresh, and the reason."""
    if not state.lag:
        return True, "The source has no more rows."
    last = instance.get_latest_materialization_event(key)
    if last is None:
        return False, f"{state.lag} rows or bytes wait, and the stream was never materialised."
    age = time() - last.timestamp
    return age <= fresh_seconds, f"{state.lag} rows or bytes wait. The last materialisation was {age:.0f} s ago."
