"""Assets of compacted journals: old messages as Parquet files in the fragment stores (`coranto.lake.compaction`)."""

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Unpack

import dagster as dg

from coranto.client import ClientConfig, JournalClient
from coranto.client.groups import JournalGroup
from coranto.client.loop import run_blocking
from coranto.errors import JournalNotFound
from coranto.telemetry import progress
from dagster_coranto.instance.log import DagsterLog
from dagster_coranto.instance.pool_slot import PoolSlot
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.typed import resource_of
from dagster_coranto.translation.metadata import JournalRow, offsets_metadata, table, vector_version
from dagster_coranto.translation.options import AssetOptions, op_options, spec_options, with_options
from dagster_coranto.translation.translator import DagsterJournalTranslator, build_group_spec

if TYPE_CHECKING:
    import pyarrow as pa

    from coranto.lake.manifest import Manifest

DEFAULT_AGE: Final = timedelta(days=1)
_FILE_BYTES: Final = 128 << 20
_COLUMNS: Final = {"journal": "string", "compacted_through": "int", "stored_through": "int", "new_rows": "int"}


def build_compaction_asset(
    group: JournalGroup,
    schema: "pa.Schema | Mapping[str, str] | None" = None,
    *,
    older_than: timedelta = DEFAULT_AGE,
    file_bytes: int = _FILE_BYTES,
    partial: bool = False,
    misfits: str = "error",
    dagster_journal_translator: DagsterJournalTranslator | None = None,
    resource_key: str = "journals",
    **options: Unpack[AssetOptions],
) -> dg.AssetsDefinition:
    """Return an asset for Parquet files with the committed messages of a group's old fragments, in their stores.

    Each run adds the files for fragments that were stored more than `older_than` ago. The arguments are as in
    `CompactionOptions` and `scan`. Retention should exceed `older_than` plus the time between runs: the run fails if
    content was deleted before it was compacted. The asset's key is the group's key and `compacted`. Runs wait for each
    other in the pool `coranto_NAME`, with the asset's name; `pool` adds another pool. Metadata: the number of new files
    and rows, and for each journal the offset through which it is compacted. The data version is the digest of these
    offsets.

    Needs the extra `lake`.
    """
    source = build_group_spec(group, dagster_journal_translator)
    spec = dg.AssetSpec([*source.key.path, "compacted"], deps=[source.key], group_name=source.group_name)
    spec = with_options(spec, {"kinds": {"parquet"}})
    spec = with_options(spec, spec_options(options))
    spec = with_options(spec, {"description": f"Committed messages of {group.name}/…, as Parquet files."})
    name = spec.key.to_python_identifier()

    @dg.multi_asset(name=name, specs=[spec], required_resource_keys={resource_key}, **op_options(options))
    def compacted_journals(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        from coranto.lake.compaction import CompactionOptions, compact, compacted_files
        from coranto.lake.scanning import ScanMisfits

        resource = resource_of(context.resources, resource_key, JournalResource)
        config, actual = resource.client_config(), resource.group(group)
        with PoolSlot(context.instance, context.run.run_id, f"coranto_{name}", context.log.info):
            manifest = run_blocking(_manifest(config, actual))
            chosen = CompactionOptions(
                time.time() - older_than.total_seconds(),
                schema,
                file_bytes,
                partial,
                ScanMisfits(misfits),
                file_root=config.file_root,
            )
            rows = dict.fromkeys((part.journal for part in manifest.journals), 0)
            files = 0
            with progress("Compacting", unit="rows", log=DagsterLog(context.log)) as bar:
                for each in compact(manifest, chosen):
                    files += 1
                    rows[each.journal] += each.rows or 0
                    bar.advance(each.rows or 0)
        there = compacted_files(manifest, config.file_root)
        through = {journal: spans[-1].end for journal, spans in there.items() if spans}
        shown: list[JournalRow] = [
            {
                "journal": part.journal,
                "compacted_through": through.get(part.journal, part.begin),
                "stored_through": part.end,
                "new_rows": rows[part.journal],
            }
            for part in manifest.journals
        ]
        return dg.MaterializeResult(
            data_version=vector_version(through),
            metadata={
                "coranto/files_added": files,
                "coranto/rows_added": sum(rows.values()),
                "coranto/files": sum(map(len, there.values())),
                "coranto/compacted_through": offsets_metadata(through),
                "coranto/journals": table(shown, _COLUMNS),
            },
        )

    return compacted_journals


async def _manifest(config: ClientConfig, group: JournalGroup) -> "Manifest":
    from coranto.lake.listing import ManifestOptions, make_manifest

    async with JournalClient.of(config) as client:
        listing = await client.list(group.selector)
        if not listing.journals:
            raise JournalNotFound(f"no journal {group.name}/… exists; create one (`coranto journals apply`)")
        options = ManifestOptions(file_root=config.file_root)
        return await make_manifest(client, listing.journals, options, selector=group.selector_text)
