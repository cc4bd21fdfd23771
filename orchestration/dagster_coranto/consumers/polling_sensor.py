"""A sensor that runs a consumer, one run at a time, while there is new content."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import dagster as dg
from pydantic import BaseModel

from coranto.client.groups import JournalGroup
from coranto.client.positions import JournalPosition, grown_bytes, present_positions
from coranto.errors import ClusterError, Unavailable
from coranto.telemetry import amount
from dagster_coranto.instance.heartbeat import PRESUMED_DEAD_SECONDS
from dagster_coranto.instance.requests import FollowUp, digest_of, unused_run_key
from dagster_coranto.instance.underway import NamedJob, Target, runs_under_way
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.typed import initialize_resource

_PLAIN_JOURNALS = 100


class JournalPollingSensorCursor(BaseModel, frozen=True):
    """The positions of journals at the last requested run, by name (`JournalPosition.json_value`).

    If there are many journals, `packed` has their compressed positions. `run_key` is the key of the requested run, and
    `failures` counts the consecutive failed runs before it.
    """

    positions: Mapping[str, list[int | str]]
    packed: str = ""
    run_key: str = ""
    failures: int = 0

    @staticmethod
    def of(positions: Mapping[str, JournalPosition]) -> JournalPollingSensorCursor:
        return JournalPollingSensorCursor(
            positions={journal: at.json_value for journal, at in sorted(positions.items())}
        )

    @staticmethod
    def parse(text: str | None) -> JournalPollingSensorCursor:
        """Return the cursor of a tick. It is empty at the first tick."""
        if not text:
            return JournalPollingSensorCursor(positions={})
        cursor = JournalPollingSensorCursor.model_validate_json(text)
        if not cursor.packed:
            return cursor
        positions = json.loads(zlib.decompress(base64.b64decode(cursor.packed)))
        return JournalPollingSensorCursor(positions=positions, run_key=cursor.run_key, failures=cursor.failures)

    def to_text(self) -> str:
        """Return the text for `parse`. It goes to Dagster's database, so positions of many journals are compressed."""
        if len(self.positions) <= _PLAIN_JOURNALS:
            return self.model_dump_json()
        packed = base64.b64encode(zlib.compress(json.dumps(self.positions, separators=(",", ":")).encode())).decode()
        return self.model_copy(update={"positions": {}, "packed": packed}).model_dump_json()

    def moved(self, since: JournalPollingSensorCursor) -> bool:
        """Return True if any journal has grown, or was created since and has content."""
        return self.grown_bytes(since) > 0

    def grown_bytes(self, since: JournalPollingSensorCursor) -> int:
        """Return the growth of journals in bytes, including journals that were created since."""
        return grown_bytes(self.journals, since.journals)

    @property
    def journals(self) -> dict[str, JournalPosition]:
        """The positions by name."""
        return {journal: JournalPosition.from_json(at) for journal, at in self.positions.items()}

    @property
    def digest(self) -> str:
        """A digest, equal for equal heads of the same journals."""
        return digest_of(json.dumps(self.positions, sort_keys=True))


def build_journal_polling_sensor(
    *,
    journals: JournalResource,
    group: JournalGroup | Sequence[JournalGroup],
    job: NamedJob | None = None,
    target: dg.AssetSelection | None = None,
    name: str | None = None,
    minimum_interval_seconds: int = 30,
    default_sensor_status: dg.DefaultSensorStatus | None = None,
    presumed_dead_seconds: float = PRESUMED_DEAD_SECONDS,
    tags: Mapping[str, str] | None = None,
) -> dg.SensorDefinition:
    """Return a sensor that requests a run of `job` (or of the assets of `target`) when journals have grown.

    `group` is the group, or the groups, that the consumer reads. At most one run is under way at a time: while any run
    of the consumer's assets is queued or started, however launched, new content waits, and the next run processes all
    of it. Failed runs are retried after a backoff that doubles with each failure, up to half an hour. A run that was
    deleted or never created is requested again immediately. "Reset cursor" also requests a run, if the journals have
    content. After a canceled run, the next run starts when journals grow. A run that has had no heartbeat for
    `presumed_dead_seconds` since its last one is marked as failed.

    While the cluster does not answer, ticks are skipped. `tags` are tags of the runs.
    """
    groups = [group] if isinstance(group, JournalGroup) else list(group)
    names = ", ".join(f"{each.name}/…" for each in groups)
    sensor_name = name or f"{groups[0].name.replace('/', '_').replace('-', '_')}__polling_sensor"

    @dg.sensor(
        name=sensor_name,
        job=cast(dg.JobDefinition | None, job),
        target=target,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_sensor_status or dg.DefaultSensorStatus.RUNNING,
        description=f"Requests a run when journals {names} have grown, one at a time.",
    )
    def polling_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        resource = initialize_resource(journals)
        before = JournalPollingSensorCursor.parse(context.cursor)
        try:
            now = _present(resource, groups, before)
        except (ClusterError, Unavailable) as error:
            return dg.SkipReason(f"The cluster does not answer: {error}")
        grown = now.grown_bytes(before)
        if (repository := context.repository_def) is not None:
            under_way = runs_under_way(
                context.instance,
                repository,
                Target.of(repository, job, target),
                presumed_dead_seconds=presumed_dead_seconds,
                warn=context.log.warning,
            )
            if under_way:
                first = under_way[0]
                waiting = f"{amount(grown, 'bytes')} wait for it to end" if grown else "no content waits"
                return dg.SkipReason(f"Run {first.run_id} is under way ({first.status.value.lower()}); {waiting}.")
        last = FollowUp.of(context.instance, sensor_name, before.run_key, before.failures, minimum_interval_seconds)
        if last.seconds:
            return dg.SkipReason(last.skip_reason)
        if not last.failures and not grown and (last.run is not None or not before.run_key):
            return dg.SkipReason(f"None of {len(now.positions)} journals {names} has grown.")
        run_key = unused_run_key(context.instance, sensor_name, now.digest)
        following = JournalPollingSensorCursor(positions=now.positions, run_key=run_key, failures=last.failures)
        shown = ", ".join(resource.group(each).name for each in groups)
        request = dg.RunRequest(run_key=run_key, tags={"coranto/group": shown, **(tags or {})})
        return dg.SensorResult(run_requests=[request], cursor=following.to_text())

    return polling_sensor


def _present(
    resource: JournalResource, groups: Iterable[JournalGroup], before: JournalPollingSensorCursor
) -> JournalPollingSensorCursor:
    """Return the current positions. A journal with an unknown head keeps its last position."""
    found: dict[str, JournalPosition] = {}
    for heads in map(resource.heads, groups):
        found |= present_positions(heads, before.journals)
    return JournalPollingSensorCursor.of(found)
