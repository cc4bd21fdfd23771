"""A sensor that requests a run when journals have grown."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import dagster as dg
from dagster._record import record
from dagster._serdes import deserialize_value, serialize_value, whitelist_for_serdes

from coranto.errors import ClusterError, Unavailable
from dagster_coranto.groups import JournalGroup
from dagster_coranto.resource import JournalPosition, JournalResource

_REVISION, _HEAD = 0, 1


@whitelist_for_serdes
@record
class JournalPollingSensorCursor:
    """The positions of journals at the last requested run: by name, the revision that created them and their head."""

    positions: Mapping[str, list[int]]

    @staticmethod
    def of(positions: Mapping[str, JournalPosition]) -> JournalPollingSensorCursor:
        return JournalPollingSensorCursor(
            positions={journal: [at.create_revision, at.head] for journal, at in sorted(positions.items())}
        )

    @staticmethod
    def parse(text: str | None) -> JournalPollingSensorCursor:
        """Return the cursor of a tick. It is empty at the first tick."""
        return deserialize_value(text, JournalPollingSensorCursor) if text else JournalPollingSensorCursor(positions={})

    def moved(self, since: JournalPollingSensorCursor) -> bool:
        """Return whether any journal has grown, or was created since and has content."""
        for journal, at in self.positions.items():
            before = since.positions.get(journal)
            known = before[_HEAD] if before is not None and before[_REVISION] == at[_REVISION] else 0
            if at[_HEAD] > known:
                return True
        return False

    @property
    def run_key(self) -> str:
        """A key that is equal for equal heads of the same journals. Dagster starts only one run per key."""
        return hashlib.sha256(serialize_value(self).encode()).hexdigest()[:32]


def build_journal_polling_sensor(
    *,
    journals: JournalResource,
    group: JournalGroup,
    job: dg.JobDefinition | dg.UnresolvedAssetJobDefinition | None = None,
    target: dg.AssetSelection | None = None,
    name: str | None = None,
    minimum_interval_seconds: int = 30,
    default_sensor_status: dg.DefaultSensorStatus | None = None,
) -> dg.SensorDefinition:
    """Return a sensor that requests a run of `job` (or of the assets of `target`) when a group's journals have grown.

    It compares their heads with its cursor. It also requests a run while an earlier one is in progress; a consumer's
    fence decides between the two. While the cluster does not answer, ticks are skipped.
    """
    sensor_name = name or f"{group.name.replace('/', '_').replace('-', '_')}__polling_sensor"

    @dg.sensor(
        name=sensor_name,
        job=job,
        target=target,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_sensor_status or dg.DefaultSensorStatus.RUNNING,
        description=f"Requests a run when journals {group.name}/… have grown.",
    )
    def polling_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        resource = journals.process_config_and_initialize()
        try:
            positions = resource.positions(group)
        except (ClusterError, Unavailable) as error:
            return dg.SkipReason(f"The cluster does not answer: {error}")
        current = JournalPollingSensorCursor.of(positions)
        if not current.moved(JournalPollingSensorCursor.parse(context.cursor)):
            return dg.SkipReason(f"None of {len(positions)} journals {group.name}/… has grown.")
        request = dg.RunRequest(run_key=current.run_key, tags={"coranto/group": resource.group(group).name})
        return dg.SensorResult(run_requests=[request], cursor=serialize_value(current))

    return polling_sensor
