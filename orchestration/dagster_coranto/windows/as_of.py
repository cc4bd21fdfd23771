"""Time travel: DataFrames of the messages that a materialisation has read."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import dagster as dg

from coranto.client import Moment
from coranto.errors import InvalidInput
from coranto.fragments.windows import find
from coranto.offsets import JournalOffset, offset_of_json, vector_to_json
from coranto.telemetry import amount
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.sql_store import SqlStoreResource
from dagster_coranto.resources.typed import initialize_resource
from dagster_coranto.translation.metadata import ConsumerMetadataSet, WindowMetadataSet, vector_version

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class AsOf(Moment):
    """Positions in journals at some moment, and reads of their content with Spark.

    Journals without an end had no content. `ends` and `begins` are the end and begin offsets of the content. A missing
    begin is 0.
    """

    @classmethod
    def clock(cls, journals: JournalResource, selector: str, at: dt.datetime) -> Self:
        """Return the ends of the matching journals at a time, by the times of their messages.

        Raises InvalidInput for a time without a time zone or in the future, and ContentGone if content of that time is
        gone, because its end is then unknown.
        """
        if at.tzinfo is None:
            raise InvalidInput(f"{at} has no time zone, such as datetime.UTC", field="time")
        with initialize_resource(journals).client() as client:
            return cls.offsets(client.moment(selector, at.timestamp()).ends)

    @classmethod
    def run(
        cls, instance: dg.DagsterInstance, asset: dg.AssetKey, run_id: str, *, store: SqlStoreResource | None = None
    ) -> Self:
        """Return the content that a run had read when it last materialised an asset. Raises InvalidInput if it did not.

        If there are more than a hundred journals, the consumer's `store` has the offsets. It keeps the newest ones;
        older ones raise InvalidInput.
        """
        records = instance.get_records_for_run(run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION).records
        found = [
            made
            for record in records
            if (made := record.event_log_entry.asset_materialization) is not None and made.asset_key == asset
        ]
        return cls._latest(reversed(found), store, f"run {run_id} has not materialised {asset.to_user_string()}")

    @classmethod
    def time(
        cls,
        instance: dg.DagsterInstance,
        asset: dg.AssetKey,
        at: dt.datetime,
        *,
        store: SqlStoreResource | None = None,
    ) -> Self:
        """Return the content that had been read at an asset's last materialisation at or before `at`.

        Raises InvalidInput if there is none, and for a time without a time zone. `store` is as for `run`.
        """
        if at.tzinfo is None:
            raise InvalidInput(f"{at} has no time zone, such as datetime.UTC", field="time")
        query = dg.AssetRecordsFilter(asset_key=asset, before_timestamp=at.timestamp() + 1e-6)
        records = instance.fetch_materializations(query, limit=1).records
        found = [made for record in records if (made := record.asset_materialization) is not None]
        return cls._latest(found, store, f"{asset.to_user_string()} was not materialised until {at.isoformat()}")

    @classmethod
    def checkpoint(cls, store: SqlStoreResource, consumer: str) -> Self:
        """Return the content of a consumer's committed checkpoint. Raises InvalidInput if there is none."""
        found = initialize_resource(store).offsets(consumer)
        if found is None:
            raise InvalidInput(f"consumer {consumer!r} has no checkpoint in the store", field="consumer")
        return cls.offsets(found)

    @classmethod
    def window(cls, store: SqlStoreResource, consumer: str, name: str) -> Self:
        """Return the content of a window of a consumer by windows, or of the larger window that it was merged into.

        So assets with the consumer's partitions always read the same bytes for a partition. Raises InvalidInput if
        there is no such window.
        """
        from coranto_consumers.stores.windows import WindowLog

        spans = find(
            [each.window for each in WindowLog(initialize_resource(store).store(), consumer).load()], name
        ).spans
        ends = {journal: JournalOffset(span.end, span.journal_id) for journal, span in spans.items()}
        return cls.offsets(ends, {journal: span.begin for journal, span in spans.items()})

    @classmethod
    def _latest(cls, found: Iterable[dg.AssetMaterialization], store: SqlStoreResource | None, otherwise: str) -> Self:
        made = next(iter(found), None)
        if made is None:
            raise InvalidInput(otherwise, field="as_of")
        return cls._of(made, store)

    @classmethod
    def _of(cls, made: dg.AssetMaterialization, store: SqlStoreResource | None) -> Self:
        ends = _vector(ConsumerMetadataSet.extract(made.metadata).offsets_read)
        begins = _vector(WindowMetadataSet.extract(made.metadata).offsets_from)
        checked = {**{f"{journal}@": at for journal, at in begins.items()}, **ends}
        version = (made.tags or {}).get("dagster/data_version")
        if not ends or version is None:
            raise InvalidInput(
                f"{made.asset_key.to_user_string()} has no offsets in its metadata, unlike tables of consumers; "
                "give a checkpoint or offsets instead",
                field="as_of",
            )
        if version == vector_version(checked).value:
            return cls.offsets(ends, begins)
        if store is None:
            raise InvalidInput(
                "more than a hundred journals were read, and the materialisation shows the first of them; name the "
                "consumer's SQL store, which has the offsets of all: store=SqlStoreResource(…)",
                field="store",
            )
        from coranto_consumers.stores.vectors import MAX_VECTOR_BYTES, VectorLog

        kept = VectorLog(initialize_resource(store).store()).find(version)
        if kept is None:
            raise InvalidInput(
                f"the store has no offsets {version}: it is not the consumer's, or has dropped them, as it keeps "
                f"{amount(MAX_VECTOR_BYTES, 'bytes')} of each consumer's newest offsets; give a checkpoint or offsets",
                field="store",
            )
        return cls.offsets(kept.ends, kept.begins)

    def options(self, journals: JournalResource) -> dict[str, str]:
        """Return options of `format("journal")` that read the committed messages of exactly this content.

        The read fails if content is gone then. Messages of a window whose transactions began before the window are
        left out; materialise the window to have them.
        """
        from coranto_consumers.spark.options.client_options import client_options

        return {
            **client_options(journals.client_config()),
            "assign": json.dumps(sorted(self.ends)),
            "startingOffsets": json.dumps(
                vector_to_json({journal: self.begins.get(journal, 0) for journal in self.ends})
            ),
            "endingOffsets": json.dumps(vector_to_json(self.ends)),
        }

    def read(self, spark: SparkSession, journals: JournalResource, schema: str) -> DataFrame:
        """Return the committed messages of this content. `schema` is as for `format("journal")`."""
        return spark.read.format("journal").options(**self.options(journals)).schema(schema).load()


def _vector(value: Any) -> dict[str, int]:
    data = getattr(value, "data", None)
    return {str(journal): offset_of_json(at) for journal, at in data.items()} if isinstance(data, Mapping) else {}
