"""`coranto shards …`: commands for shards, their status and their specs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from coranto import labels
from coranto.cli.connect import RETRY_TIMEOUT, Endpoint, find_cluster
from coranto.cli.journals.editing import edit_until_applied
from coranto.cli.numbers import with_numbers
from coranto.cli.output import Format, note, print_json, print_table
from coranto.cli.reconciling import (
    ApplyOptions,
    Check,
    DryRun,
    MaxTxnSize,
    Prune,
    Update,
    read_document,
    reconcile,
    source_name,
)
from coranto.client import ClientConfig, JournalClient
from coranto.client.loop import run_blocking
from coranto.errors import CorantoError, InvalidInput
from coranto.reconcile import SpecAction, SpecPlan
from coranto.reconcile.reconciler import BATCH_CHANGES
from coranto.telemetry import amount
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.cli.arguments import Consumer
from coranto_consumers.recoverylog import Player, RecoveredFiles
from coranto_consumers.recoverylog.pruning import Pruned, ShardHints, prune_logs
from coranto_consumers.runtime.client import ShardClient
from coranto_consumers.runtime.discovery import find_consumer
from coranto_consumers.runtime.reconcile import SHARDS, ShardSpecs
from coranto_consumers.runtime.shard_set import parse_shards, render_shards
from coranto_consumers.runtime.specs import most_advanced, recovery_log

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True)

CONSUMER_TIMEOUT = 15.0
"""Seconds that a command waits for a consumer that was just started."""

_HEAD = "# Edit the specs of shards, and save. Shards that are left out stay as they are; `delete: true` deletes.\n"

Selector = Annotated[
    str,
    typer.Option("--selector", "-l", help="Which shards, such as `app=sums` or `id=sums-001`.", show_default=False),
]


@app.command("list")
def list_shards(
    selector: Selector = "",
    output: Annotated[Format, typer.Option("--output", "-o", help="`yaml` is what `apply` reads.")] = Format.TABLE,
    lag: Annotated[bool, typer.Option("--lag", help="Also show the lag of shards (one request for each).")] = False,
    consumer: Consumer = None,
    endpoint: Endpoint = None,
) -> None:
    """List shards. The lag of a source is the size of its content that no completed transaction has read yet."""

    async def work(client: ShardClient) -> None:
        shards = await client.list(selector)
        if output is Format.YAML:
            typer.echo(render_shards([(shard.spec, shard.mod_revision) for shard in shards]), nl=False)
        elif output is Format.JSON:
            print_json(pc.ListResponse(shards=shards))
        else:
            columns = ["SHARD", "STATUS", "PRIMARY", "SOURCES", "LABELS"]
            rows = [_row(shard) for shard in shards]
            if lag:
                columns.append("LAG")
                async with JournalClient.of(find_cluster(endpoint)) as journals:
                    lags = await asyncio.gather(*(_lag(client, journals, shard) for shard in shards))
                rows = [[*row, found] for row, found in zip(rows, lags, strict=True)]
            print_table(columns, rows)

    with_consumer(consumer, work)


@app.command("apply")
@with_numbers(changes=BATCH_CHANGES)
def apply(
    specs: Annotated[str, typer.Option("--specs", help="File with shard specs as YAML, or - for standard input.")],
    dry_run: DryRun = False,
    check: Check = False,
    update: Update = False,
    prune: Prune = None,
    max_txn_size: MaxTxnSize = 0,
    consumer: Consumer = None,
    endpoint: Endpoint = None,
) -> None:
    """Create, update and delete shards from YAML.

    A shard's `revision` is its expected revision: 0 or none creates the shard, -1 accepts any revision. The source
    journals of shards must exist.

    Up to {changes} changes are one transaction: all or none. More changes take several, deletions last. After an
    interruption, apply the same document again: it continues with the rest.
    """
    changes = read_document(specs, parse_shards, SHARDS.plural, "shards")
    options = ApplyOptions(dry_run, check, update, prune, max_txn_size)
    with_consumer(consumer, lambda client: _apply(client, changes, endpoint, source_name(specs), options))


@app.command("edit")
def edit(selector: Selector = "", consumer: Consumer = None, endpoint: Endpoint = None) -> None:
    """Edit the specs of shards in $CORANTO_EDITOR, $EDITOR or vi, and apply the saved text.

    Rejected text is opened again with the reason on top. Nothing happens if the text is unchanged or empty.
    """

    async def fetch(client: ShardClient) -> Sequence[pc.ListResponse.Shard]:
        return await client.list(selector)

    shards = with_consumer(consumer, fetch)
    if not shards:
        raise InvalidInput(f"no shard matches {selector!r}; `coranto shards list` shows all", field="--selector")

    def apply_saved(saved: str) -> None:
        changes = parse_shards(saved)
        with_consumer(consumer, lambda client: _apply(client, changes, endpoint, "the edit", ApplyOptions()))

    text = render_shards([(shard.spec, shard.mod_revision) for shard in shards])
    edit_until_applied(_HEAD + text, apply_saved, "coranto-shards-")


@app.command("unassign")
def unassign(
    shards: Annotated[list[str] | None, typer.Argument(metavar="[SHARD]...", show_default=False)] = None,
    selector: Annotated[
        str | None, typer.Option("--selector", "-l", help="Shards by labels. Empty: all.", show_default=False)
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only unassign failed shards.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")] = False,
    consumer: Consumer = None,
) -> None:
    """Unassign shards from the processes that run them, or where they failed.

    They are reassigned, and restart from their checkpoints.
    """
    if bool(shards) == (selector is not None):
        raise typer.BadParameter("name shards, or select some with --selector", param_hint="SHARD")

    async def work(client: ShardClient) -> list[str]:
        chosen = shards or [shard.spec.id for shard in await client.list(selector or "")]
        done: list[str] = []
        for begin in range(0, len(chosen), 32):
            done += await client.unassign(chosen[begin : begin + 32], only_failed=failed, dry_run=dry_run)
        return done

    for shard in with_consumer(consumer, work):
        typer.echo(f"{'would unassign' if dry_run else 'unassigned'} {shard}")


@app.command("prune")
def prune(
    selector: Annotated[
        str,
        typer.Option(
            "--selector", "-l", help="Which shards. Include all that have ever recorded into the same logs. Empty: all."
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and do nothing.")] = False,
    consumer: Consumer = None,
    endpoint: Endpoint = None,
) -> None:
    """Remove fragments of recovery logs that no hints reference, neither a primary's nor a backup's.

    Nothing of a log is removed until all of its shards have stored all of their hints. This process deletes the
    fragments, with its own credentials for the stores.
    """

    async def work(client: ShardClient) -> list[Pruned]:
        found = [
            ShardHints(shard.spec.id, recovery_log(shard.spec), await client.hints(shard.spec.id))
            for shard in await client.list(selector)
            if shard.spec.recovery_log_prefix
        ]
        async with JournalClient.of(find_cluster(endpoint)) as journals:
            return await prune_logs(journals, found, dry_run=dry_run)

    word = "would remove" if dry_run else "removed"
    for pruned in with_consumer(consumer, work):
        if pruned.kept:
            typer.echo(f"{pruned.log}: {word} nothing, because {pruned.kept}")
        else:
            size = amount(pruned.removed_bytes, "bytes")
            typer.echo(f"{pruned.log}: {word} {len(pruned.removed)} fragments with {size}; {pruned.remaining} remain")


@app.command("recover")
def recover(
    shard: Annotated[str, typer.Argument(metavar="SHARD", help="The shard.", show_default=False)],
    folder: Annotated[Path, typer.Option("--dir", help="New or empty folder for the files.")],
    consumer: Consumer = None,
    endpoint: Endpoint = None,
) -> None:
    """Rebuild the files of a shard's store from its recovery log. The shard does not change."""
    if folder.exists() and any(folder.iterdir()):
        raise InvalidInput(f"{folder} is not empty; name a new or an empty folder", field="--dir")

    async def work(client: ShardClient) -> RecoveredFiles:
        listed = [each.spec for each in await client.list(f"id={shard}")]
        log = recovery_log(listed[0]) if listed else ""
        if not log:
            raise InvalidInput(
                f"there is no shard {shard} with a recovery log; `coranto shards list -o yaml` shows which have one",
                field="SHARD",
            )
        hints = (await client.hints(shard)).pick(log)
        async with JournalClient.of(find_cluster(endpoint)) as journals:
            async with Player(journals, hints, folder) as player:
                return await player.finish()

    recovery = with_consumer(consumer, work)
    typer.echo(f"recovered {amount(recovery.recovered_bytes, 'bytes')} of {recovery.log} into {folder}")


async def _apply(
    client: ShardClient,
    changes: Sequence[pc.ApplyRequest.Change],
    endpoint: str | None,
    source: str,
    options: ApplyOptions,
) -> None:
    async def check_sources(plan: SpecPlan) -> None:
        await _check_sources([step.spec for step in plan.due if step.action is not SpecAction.DELETE], endpoint)

    await reconcile(SHARDS, ShardSpecs(client), changes, source, options, check_sources)


async def _check_sources(specs: Sequence[pc.ShardSpec], endpoint: str | None) -> None:
    """Raise InvalidInput for a shard with a source journal that does not exist."""
    wanted = {source.journal: spec.id for spec in specs for source in spec.sources}
    if not wanted:
        return
    async with JournalClient.of(find_cluster(endpoint)) as journals:
        selector = labels.label_selector(include=[(labels.NAME, journal) for journal in wanted])
        found = (await journals.list(selector)).names
    for journal in sorted(wanted.keys() - set(found)):
        raise InvalidInput(f"shard {wanted[journal]} is to read {journal}, which does not exist; create it first")


async def _lag(client: ShardClient, journals: JournalClient, shard: pc.ListResponse.Shard) -> str:
    """Return the lag of each source in bytes, or "unknown"."""
    if shard.route.primary < 0 or most_advanced(shard.status).code != pc.ReplicaStatus.PRIMARY:
        return "unknown"
    try:
        read = (await client.stat(shard.spec.id)).read_through
        heads = [await journals.head(source.journal) for source in shard.spec.sources]
    except CorantoError as error:
        note(str(error))
        return "unknown"
    pairs = zip(shard.spec.sources, heads, strict=True)
    return ", ".join(f"{source.journal}: {max(0, head - read.get(source.journal, 0))}" for source, head in pairs)


def _row(shard: pc.ListResponse.Shard) -> list[str]:
    spec, route = shard.spec, shard.route
    status = most_advanced(shard.status)
    word = "disabled" if spec.disable else pc.ReplicaStatus.Code.Name(status.code).lower()
    return [
        spec.id,
        f"{word}: {status.errors[0]}" if status.errors else word,
        route.members[route.primary].suffix if route.primary >= 0 else "none",
        ", ".join(source.journal for source in spec.sources),
        ", ".join(f"{name}={value}" for name, value in labels.as_pairs(spec.labels)),
    ]


def with_consumer(consumer: str | None, work: Callable[[ShardClient], Awaitable[T]]) -> T:
    """Run `work` with a client of the consumer."""

    async def run() -> T:
        async with consumer_client(consumer) as client:
            return await work(client)

    return run_blocking(run())


@contextlib.asynccontextmanager
async def consumer_client(consumer: str | None) -> AsyncIterator[ShardClient]:
    """Yield a client of the consumer with a process at an address, or of the cluster's only consumer."""
    endpoint = consumer or await find_consumer(timeout=CONSUMER_TIMEOUT, waiting=_report_waiting)
    async with ShardClient(ClientConfig.from_environment(endpoint, retry_timeout=RETRY_TIMEOUT)) as client:
        yield client


def _report_waiting() -> None:
    note(f"no consumer answers on this cluster yet; waiting {CONSUMER_TIMEOUT:g} s for one to start")
