"""The parts of `apply` and `edit` that are common to journals and shards."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from coranto.coordination.etcd import MAX_TXN_OPS
from coranto.errors import CorantoError, InvalidInput
from coranto.labels import parse_selector
from coranto.reconcile import SpecAccess, SpecChange, SpecKind, SpecPlan, SpecReconciler, SpecStep, at_any_revision
from coranto.reconcile.reconciler import BATCH_CHANGES
from coranto.telemetry import progress

ChangesT = TypeVar("ChangesT", bound=Sequence[SpecChange])

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the changes, with their order and fields; do nothing.")]
Check = Annotated[
    bool, typer.Option("--check", help="Like --dry-run, and fail if anything would be done: specs have drifted.")
]
Update = Annotated[
    bool,
    typer.Option(
        "--update", help="Update existing specs that have no `revision` in the document. Otherwise these must be new."
    ),
]
Prune = Annotated[
    str | None,
    typer.Option(
        "--prune",
        metavar="SELECTOR",
        help="Also delete specs that this selects and the document does not name, such as `name:prefix=shop/`.",
        show_default=False,
    ),
]
MaxTxnSize = Annotated[
    int,
    typer.Option(
        "--max-txn-size",
        min=0,
        max=MAX_TXN_OPS,
        help=f"Maximum number of changes in one transaction, up to {MAX_TXN_OPS}. 0 means {BATCH_CHANGES}.",
    ),
]


@dataclass(frozen=True, slots=True)
class ApplyOptions:
    """The options of an `apply`."""

    dry_run: bool = False
    check: bool = False
    update: bool = False
    prune: str | None = None
    max_txn_size: int = 0
    quiet_if_unchanged: bool = False


def read_document(path: str, parse: Callable[[str], ChangesT], plural: str, place: str) -> ChangesT:
    """Return the changes in a file, or in the input for `-`. Raises InvalidInput, which names the file.

    `place` is the field of a document that lists its specs.
    """
    content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    source = source_name(path)
    try:
        changes = parse(content.decode())
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{source} is not text in UTF-8: {error.reason} at byte {error.start}") from error
    except InvalidInput as error:
        raise InvalidInput(f"{source}: {error}") from error
    if not changes:
        raise InvalidInput(f"{source} names no {plural}; list them under `{place}:`", field="--specs")
    return changes


def source_name(path: str) -> str:
    """Return the name of a document in messages."""
    return "the input" if path == "-" else path


async def reconcile(
    kind: SpecKind,
    specs: SpecAccess,
    changes: Sequence[SpecChange],
    source: str,
    options: ApplyOptions,
    before: Callable[[SpecPlan], Awaitable[None]] | None = None,
) -> None:
    """Apply changes, or show the plan, and print the result. `before` may raise an error about the plan first.

    Raises EtcdTransactionFailed for conflicts with current specs, if possible before anything is applied, and
    CorantoError for drift in a check.
    """
    reconciler = SpecReconciler(
        kind,
        specs,
        at_any_revision(changes) if options.update else changes,
        source=source,
        prune=parse_selector(options.prune) if options.prune is not None else None,
        size=options.max_txn_size,
    )
    plan = await reconciler.plan()
    if not options.quiet_if_unchanged:
        for step in plan.steps:
            if not step.due:
                typer.echo(f"{step.action.value} {step.name}")
    reconciler.check(plan)
    if before is not None:
        await before(plan)
    if options.dry_run or options.check:
        _show(plan, reconciler.size)
        if options.check and plan.due:
            count = len(plan.due)
            raise CorantoError(
                f"{count} {f'{kind.plural} are' if count > 1 else f'{kind.noun} is'} not as {source} says"
            )
        return
    with progress(f"Applying {source}", len(plan.due), unit=kind.plural) as report:

        def applied(steps: Sequence[SpecStep]) -> None:
            for step in steps:
                typer.echo(_described(step))
            report.advance(len(steps))

        await reconciler.apply(plan, applied)


def _show(plan: SpecPlan, size: int) -> None:
    transactions = plan.transactions(size)
    for number, steps in enumerate(transactions, 1):
        if len(transactions) > 1:
            typer.echo(f"transaction {number} of {len(transactions)}: {len(steps)} {plan.kind.plural}")
        for step in steps:
            typer.echo(f"would {_described(step)}")
            for difference in step.differences:
                typer.echo(f"  {difference}")


def _described(step: SpecStep) -> str:
    reason = " (the document does not name it)" if step.pruned else ""
    return f"{step.action.value} {step.name}{reason}"
