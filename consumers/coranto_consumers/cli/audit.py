"""`coranto consumer audit`: compare a consumer's store with its journals."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coranto.audit import Depth, Report, run_checks
from coranto.cli.connect import Endpoint, with_client
from coranto.cli.output import Format
from coranto.cli.reports import print_report
from coranto.client import JournalClient
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.layout import Layout
from coranto.errors import InvalidInput
from coranto.fragments.stores import StoreRegistry
from coranto.messages.framing import Framing
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.audit import (
    ConsumerCheck,
    RecoveredEvidence,
    SqlEvidence,
    framing_of,
    memory_at,
    parse_expectation,
)
from coranto_consumers.audit.sources import FramingOf
from coranto_consumers.cli.arguments import ConsumerName, StoreOrNone
from coranto_consumers.cli.loading import default_prefix, load_application
from coranto_consumers.runtime.columns import framing_in
from coranto_consumers.stores.reading import ICEBERG
from coranto_consumers.stores.sql import SqlStore

if TYPE_CHECKING:
    from coranto_consumers.audit.iceberg import IcebergEvidence

NOT_SOUND = 1
"""The exit code of an audit that finds errors."""

Remembered = Annotated[
    str | None,
    typer.Option(
        "--memory",
        envvar="CORANTO_AUDIT_MEMORY",
        help="Store URL or folder with the results of earlier audits. Without it, a checkpoint that was set back may "
        "not be noticed.",
        show_default=False,
    ),
]
Expected = Annotated[
    list[str] | None,
    typer.Option(
        "--expect",
        help="`SELECT COUNT(*) FROM t == messages`, or `SELECT SUM(c) FROM t == sum(/c)`. May be given several times.",
        show_default=False,
    ),
]
Prefix = Annotated[
    str | None, typer.Option("--etcd-prefix", help="Prefix of the keys of module:App's shards.", show_default=False)
]
Etcd = Annotated[
    str | None,
    typer.Option(
        "--etcd",
        envvar="CORANTO_CONSUMER_ETCD",
        help="etcd with the specs of module:App's shards. Default: the cluster of `coranto up`.",
        show_default=False,
    ),
]


def audit(
    name: ConsumerName,
    store: StoreOrNone = None,
    recovered: Annotated[
        Path | None,
        typer.Option(
            "--recovered",
            help="Instead of --store: the files of one shard, as `coranto shards recover` rebuilt them from its log.",
            show_default=False,
        ),
    ] = None,
    expect: Expected = None,
    memory: Remembered = None,
    cheap: Annotated[bool, typer.Option("--cheap", help="Do not replay sources. Finds less.")] = False,
    accept: Annotated[
        bool, typer.Option("--accept", help="Report the findings, and accept the current state from now on.")
    ] = False,
    prefix: Prefix = None,
    etcd: Etcd = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="`json` is a report for programs.")] = Format.TABLE,
    endpoint: Endpoint = None,
) -> None:
    """Compare a consumer's checkpoints, fences and tables with its journals. Exits with code 1 if it finds errors.

    It replays the sources up to the checkpoint, from the end of the last audit in --memory or from their beginnings.
    It changes nothing in the store, and the consumer may be running.
    """
    if output is Format.YAML:
        raise InvalidInput("a report is printed as `table` or `json`", field="--output")
    chosen = recovered or store
    if chosen is None:
        raise InvalidInput("name the consumer's store, or --recovered files of a shard", field="--store")
    target = AuditTarget(name, chosen, expect or (), memory, prefix, etcd)

    async def work(client: JournalClient) -> Report:
        check = await target.check(client, deep=not cheap, accept=accept)
        return await run_checks(f"consumer {name}", [check], depth=Depth.CHEAP if cheap else Depth.DEEP)

    report = with_client(endpoint, work)
    print_report(report, as_json=output is Format.JSON)
    if not report.sound:
        sys.exit(NOT_SOUND)


@dataclass(frozen=True, slots=True)
class AuditTarget:
    """The consumer to audit, and the options of the command. `store` is a URL, or a folder of recovered files."""

    name: str
    store: str | Path
    expect: Sequence[str]
    memory: str | None
    prefix: str | None
    etcd: str | None

    async def check(self, client: JournalClient, *, deep: bool = True, accept: bool = False) -> ConsumerCheck:
        """Return the check of this consumer. Raises InvalidInput for invalid options, and if no shard exists."""
        expectations = [parse_expectation(each) for each in self.expect]
        shards = [self.name]
        framings: FramingOf = framing_of
        min_offsets: dict[str, dict[str, int]] = {}
        evidence = _evidence(self.store)
        if ":" in self.name and not isinstance(evidence, RecoveredEvidence):
            application = load_application(self.name)

            def framings(journal: pb.JournalSpec) -> Framing[Any]:
                return framing_in(application.new_message(journal))

            layout = Layout(self.prefix or default_prefix(self.name))
            min_offsets = await _min_offsets(layout, self.etcd)
            shards = sorted({*min_offsets, *await asyncio.to_thread(evidence.names, layout.items)})
            if not shards:
                raise InvalidInput(f"{evidence.name} and etcd have no shards below {layout.items}", field="NAME")
        return ConsumerCheck(
            self.name,
            client,
            evidence,
            shards,
            framing_of=framings,
            min_offsets=min_offsets,
            expectations=expectations,
            memory=memory_at(self.memory, StoreRegistry(client.config.file_root)) if self.memory is not None else None,
            deep=deep,
            accept=accept,
        )


def _evidence(store: str | Path) -> RecoveredEvidence | SqlEvidence | IcebergEvidence:
    if isinstance(store, Path):
        return RecoveredEvidence(store)
    if store.startswith(ICEBERG):
        from coranto_consumers.audit.iceberg import IcebergEvidence  # Needs the extra `lake`.
        from coranto_consumers.stores.iceberg.urls import IcebergHome

        return IcebergEvidence(IcebergHome.at(store))
    return SqlEvidence(SqlStore(store))


async def _min_offsets(layout: Layout, etcd: str | None) -> dict[str, dict[str, int]]:
    """Return the begin offsets in shards' specs, by full name. Shards with recovery logs are left out."""
    async with EtcdCoordinator(etcd or _local_etcd()) as coordinator:
        specs = [pc.ShardSpec.FromString(kv.value) for kv in (await coordinator.range(layout.items)).kvs]
    return {
        layout.item_key(spec.id): {source.journal: source.min_offset for source in spec.sources}
        for spec in specs
        if not spec.recovery_log_prefix
    }


def _local_etcd() -> str:
    from coranto.cluster import locate

    return locate().etcd
