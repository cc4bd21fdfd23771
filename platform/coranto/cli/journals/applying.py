"""`coranto journals apply`: makes journals match a tree of specs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from coranto.cli.connect import Endpoint, connect
from coranto.client import JournalInfo, SyncJournalClient
from coranto.errors import CorantoError, EtcdTransactionFailed, InvalidInput, RpcFailed
from coranto.specs.journal_tree import parse_tree
from coranto.telemetry import progress
from coranto.wire import protocol_pb2 as pb

_USUAL_TXN_SIZE = 128
"""etcd's default limit on the changes of one transaction."""

MaxTxnSize = Annotated[
    int,
    typer.Option(
        "--max-txn-size",
        min=0,
        help="Apply in several transactions of so many journals each; 0 is one transaction, all or nothing.",
    ),
]


def apply(
    specs: Annotated[str, typer.Option("--specs", help="File with a YAML tree of journal specs, or - for input.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")] = False,
    max_txn_size: MaxTxnSize = 0,
    endpoint: Endpoint = None,
) -> None:
    """Create, update and delete journals as a YAML tree says, all or none of them.

    A journal must be at the `revision` that the tree gives: 0 or none creates the journal, -1 accepts any revision. A
    suspended journal stays suspended, and keeps the offset at which it goes on, unless the tree gives its `suspend`.
    """
    content = sys.stdin.buffer.read() if specs == "-" else Path(specs).read_bytes()
    try:
        changes = parse_tree(content.decode())
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{specs} is not text in UTF-8: {error.reason} at byte {error.start}") from error
    except InvalidInput as error:
        raise InvalidInput(f"{specs}: {error}") from error
    if not changes:
        raise InvalidInput(f"{specs} names no journals", field="--specs")
    with connect(endpoint) as client:
        apply_changes(client, changes, specs, dry_run=dry_run, max_txn_size=max_txn_size)


def apply_changes(
    client: SyncJournalClient,
    changes: Sequence[pb.ApplyRequest.Change],
    source: str,
    *,
    dry_run: bool = False,
    max_txn_size: int = 0,
    quiet_if_unchanged: bool = False,
) -> None:
    """Apply the changes of `source`, except those without effect, and print the result.

    Raises EtcdTransactionFailed for a conflict with present journals. A conflict that is visible at the start is raised
    before anything is applied.
    """
    present = {info.name: info for info in client.list().journals}
    changes = [_keeping_suspension(change, present) for change in changes]
    due = [change for change in changes if not _is_done(change, present)]
    for change in [] if quiet_if_unchanged else changes:
        if _is_done(change, present):
            typer.echo(f"unchanged {change.upsert.name}")
    conflicts = [problem for change in due if (problem := _conflict(change, present))]
    if conflicts:
        raise EtcdTransactionFailed(f"apply of {source}", detail="; ".join(conflicts))
    if dry_run:
        for change in due:
            typer.echo(f"would {_describe(change, present)}")
        return
    size = max_txn_size or len(due)
    batches = [due[begin : begin + size] for begin in range(0, len(due), size)] if due else []
    done = 0
    with progress(f"Applying {source}", len(due), unit="journals") as report:
        for batch in batches:
            try:
                client.apply(batch)
            except CorantoError as error:
                if done:
                    raise CorantoError(
                        f"{error} Of {len(due)} changes the first {done} were applied before."
                    ) from error
                if isinstance(error, RpcFailed) and len(batch) > _USUAL_TXN_SIZE:
                    raise CorantoError(f"{error} (--max-txn-size {_USUAL_TXN_SIZE} does that)") from error
                raise
            for change in batch:
                typer.echo(_describe(change, present))
            done += len(batch)
            report.advance(len(batch))


def _name(change: pb.ApplyRequest.Change) -> str:
    return change.delete or change.upsert.name


def _keeping_suspension(change: pb.ApplyRequest.Change, present: dict[str, JournalInfo]) -> pb.ApplyRequest.Change:
    """Return the change, with the journal's present `suspend` if the change gives none.

    Brokers keep the offset there at which the journal continues. Without it, an empty journal would begin at offset 0
    again.
    """
    info = present.get(change.upsert.name)
    if change.delete or info is None or change.upsert.HasField("suspend") or not info.spec.HasField("suspend"):
        return change
    kept = pb.ApplyRequest.Change()
    kept.CopyFrom(change)
    kept.upsert.suspend.CopyFrom(info.spec.suspend)
    return kept


def _is_done(change: pb.ApplyRequest.Change, present: dict[str, JournalInfo]) -> bool:
    info = present.get(change.upsert.name)
    return info is not None and not change.delete and info.spec == change.upsert


def _conflict(change: pb.ApplyRequest.Change, present: dict[str, JournalInfo]) -> str:
    """Return the reason why a change cannot be applied, or ""."""
    info = present.get(_name(change))
    actual = info.mod_revision if info else 0
    expected = change.expect_mod_revision
    if change.delete and info is None:
        return f"{change.delete} is to be deleted but does not exist"
    if expected in (-1, actual):
        return ""
    if expected == 0:
        return f"{_name(change)} exists already, at revision {actual}: give that as its `revision` to update it"
    return f"{_name(change)} is at revision {actual or 'none'}, not {expected}"


def _describe(change: pb.ApplyRequest.Change, present: dict[str, JournalInfo]) -> str:
    if change.delete:
        return f"delete {change.delete}"
    return f"{'update' if change.upsert.name in present else 'create'} {change.upsert.name}"
