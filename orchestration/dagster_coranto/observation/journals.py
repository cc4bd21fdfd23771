"""A sensor that reports the state of journals, including writes by programs outside Dagster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import gmtime, strftime, time
from typing import Any

import dagster as dg
from pydantic import BaseModel

from coranto.client.groups import JournalGroup
from coranto.client.heads import Heads, JournalHead
from coranto.errors import ClusterError, SqlStoreError, Unavailable
from dagster_coranto.instance.tags import VERSION_TAG, growth_tags, last_tags
from dagster_coranto.observation.consumers import OffsetsSource
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.typed import initialize_resource
from dagster_coranto.translation.metadata import (
    SHOWN_JOURNALS,
    GroupMetadataSet,
    JournalRow,
    offsets_metadata,
    table,
    vector_version,
)
from dagster_coranto.translation.metadata_set import NAMESPACE
from dagster_coranto.translation.translator import DagsterJournalTranslator, build_group_spec

_COLUMNS = {
    "journal": "string",
    "head": "int",
    "stored_bytes": "int",
    "unstored_bytes": "int",
    "last_append": "string",
}


class ReportedGroupState(BaseModel, frozen=True):
    """The last event about a group: its time in seconds since 1970, and the reported state."""

    at: float
    version: str
    head: int
    state: str = ""


class JournalObservationSensorCursor(BaseModel, frozen=True):
    """The last event about each group, by the group's name."""

    groups: Mapping[str, ReportedGroupState]

    @staticmethod
    def parse(text: str | None) -> JournalObservationSensorCursor:
        """Return the cursor of a tick. It is empty at the first tick."""
        cursor = JournalObservationSensorCursor
        return cursor.model_validate_json(text) if text else cursor(groups={})

    def to_text(self) -> str:
        """Return the text for `parse`."""
        return self.model_dump_json()


def build_journal_observation_sensor(
    *,
    journals: JournalResource,
    groups: Sequence[JournalGroup],
    consumers: Mapping[str, OffsetsSource] | None = None,
    name: str = "journal_observation_sensor",
    minimum_interval_seconds: int = 30,
    report_seconds: float = 60.0,
    dagster_journal_translator: DagsterJournalTranslator | None = None,
    default_sensor_status: dg.DefaultSensorStatus | None = None,
) -> dg.SensorDefinition:
    """Return a sensor that reports the state of groups of journals, including writes by programs outside Dagster.

    A group that has grown gets a materialisation, so that freshness policies and automation conditions downstream see
    it. A group whose lag or stored bytes have changed, but not its heads, gets an observation. Each group gets at most
    one event in `report_seconds`, and none if nothing has changed or a run has already reported the same heads. Dagster
    keeps events forever, so their size is limited for any number of journals.

    `consumers` are names of consumers with their stores, or selectors of shards with their consumer processes. Their
    lag behind each group is reported. Metadata: GroupMetadataSet, and `dagster-coranto/lag_bytes/NAME` for each
    consumer. The data version is a digest of the heads. While the cluster does not answer, ticks are skipped.
    """
    keys = {group.name: build_group_spec(group, dagster_journal_translator).key for group in groups}

    @dg.sensor(
        name=name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_sensor_status or dg.DefaultSensorStatus.RUNNING,
        description="Reports heads, growth, lag and stored bytes of journals, from all their writers.",
    )
    def observation_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        resource = initialize_resource(journals)
        stores = {consumer: initialize_resource(store) for consumer, store in (consumers or {}).items()}
        seen = dict(JournalObservationSensorCursor.parse(context.cursor).groups)
        events: list[dg.AssetMaterialization | dg.AssetObservation] = []
        due = [group for group in groups if _is_due(seen.get(group.name), report_seconds)]
        if not due:
            return dg.SkipReason(f"All groups were reported less than {report_seconds:g} s ago.")
        try:
            offsets = {consumer: store.offsets(consumer) for consumer, store in stores.items()}
            for group in due:
                found = ObservedGroup.of(resource.heads(group), offsets)
                before = seen.get(group.name)
                event = found.event(keys[group.name], before, last_tags(context.instance, keys[group.name]))
                if event is not None:
                    events.append(event)
                seen[group.name] = found.next_state(before, reported=event is not None)
        except (ClusterError, Unavailable, SqlStoreError) as error:
            if not events:
                return dg.SkipReason(f"Cluster or store does not answer: {error}")
            context.log.warning(f"Cluster or store does not answer: {error}")
        if not events:
            return dg.SensorResult(
                skip_reason=f"Nothing has changed in {len(due)} groups.",
                cursor=JournalObservationSensorCursor(groups=seen).to_text(),
            )
        return dg.SensorResult(asset_events=events, cursor=JournalObservationSensorCursor(groups=seen).to_text())

    return observation_sensor


@dataclass(frozen=True, slots=True)
class ObservedGroup:
    """The state of a group of journals: heads, and consumers' lags in bytes by name."""

    heads: tuple[JournalHead, ...]
    unknown: int
    lags: Mapping[str, int]

    @staticmethod
    def of(heads: Heads, offsets: Mapping[str, Mapping[str, int] | None]) -> ObservedGroup:
        known = tuple(each for each in heads if each.known)
        # A consumer that has never committed lags by all content.
        lags = {consumer: _lag(known, at or {}) for consumer, at in offsets.items()}
        return ObservedGroup(heads=known, unknown=len(heads.unknown), lags=lags)

    @property
    def vector(self) -> dict[str, int]:
        return {each.journal: each.offset for each in self.heads}

    @property
    def version(self) -> str:
        return vector_version(self.vector).value

    @property
    def head(self) -> int:
        """The sum of the heads."""
        return sum(each.head for each in self.heads)

    @property
    def unstored(self) -> int:
        return sum(each.unpersisted_bytes for each in self.heads)

    @property
    def other_state(self) -> str:
        """The reported state besides the heads."""
        return repr((self.unknown, self.unstored, sorted(self.lags.items())))

    def event(
        self, key: dg.AssetKey, before: ReportedGroupState | None, last: Mapping[str, str]
    ) -> dg.AssetMaterialization | dg.AssetObservation | None:
        """Return the event about the changes since the last event; None without changes.

        `last` are the tags of the asset's last materialisation, which may be by a run. Growth is not reported while a
        head is unknown.
        """
        moved = self.version != last.get(VERSION_TAG) and (before is None or self.version != before.version)
        grown = moved and self.head > 0 and not self.unknown
        if not grown and before is not None and self.other_state == before.state:
            return None
        metadata = dict(self.metadata(before))
        if grown:
            return dg.AssetMaterialization(key, metadata=metadata, tags=growth_tags(self.version, last))
        return dg.AssetObservation(key, metadata=metadata, tags={VERSION_TAG: self.version})

    def next_state(self, before: ReportedGroupState | None, *, reported: bool) -> ReportedGroupState:
        """Return the entry for the next tick. It keeps the last heads that were all known."""
        at = time() if reported or before is None else before.at
        if self.unknown and before is not None:
            return ReportedGroupState(at=at, version=before.version, head=before.head, state=self.other_state)
        return ReportedGroupState(at=at, version=self.version, head=self.head, state=self.other_state)

    def metadata(self, before: ReportedGroupState | None) -> Iterator[tuple[str, Any]]:
        last = max((each.last_append_time for each in self.heads), default=0.0)
        rows: list[JournalRow] = [
            {
                "journal": each.journal,
                "head": each.head,
                "stored_bytes": each.head - each.begin - each.unpersisted_bytes,
                "unstored_bytes": each.unpersisted_bytes,
                # `table` sums up the numbers of the other rows.
                "last_append": _text(each.last_append_time) if place < SHOWN_JOURNALS else None,
            }
            for place, each in enumerate(sorted(self.heads, key=lambda each: each.last_append_time, reverse=True))
        ]
        yield from dict(
            GroupMetadataSet(
                head=self.head,
                bytes=None if before is None else max(0, self.head - before.head),
                heads=offsets_metadata(self.vector),
                journals=table(rows, _COLUMNS),
                journal_count=len(self.heads),
                unknown_journals=self.unknown or None,
                stored_bytes=sum(each.head - each.begin for each in self.heads) - self.unstored,
                unstored_bytes=self.unstored,
                last_append=dg.MetadataValue.timestamp(last) if last else None,
            )
        ).items()
        for consumer, lag in sorted(self.lags.items()):
            yield f"{NAMESPACE}/lag_bytes/{consumer}", lag


def _lag(heads: Sequence[JournalHead], offsets: Mapping[str, int]) -> int:
    return sum(max(0, each.head - offsets.get(each.journal, each.begin)) for each in heads)


def _is_due(seen: ReportedGroupState | None, report_seconds: float) -> bool:
    return seen is None or not 0 <= time() - seen.at < report_seconds  # A future time means a corrected clock.


def _text(seconds: float) -> str:
    return strftime("%Y-%m-%d %H:%M:%S UTC", gmtime(seconds)) if seconds else "unknown"
