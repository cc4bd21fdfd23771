"""`coranto journals apply`: makes journals match a tree of specs."""

from __future__ import annotations

from typing import Annotated

import typer

from coranto.cli.connect import Endpoint, with_client
from coranto.cli.numbers import with_numbers
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
from coranto.client import JournalClient
from coranto.reconcile import JOURNALS, JournalSpecs
from coranto.reconcile.reconciler import BATCH_CHANGES
from coranto.specs.journal_tree import parse_tree


@with_numbers(changes=BATCH_CHANGES)
def apply(
    specs: Annotated[str, typer.Option("--specs", help="File with a YAML tree of journal specs, or - for input.")],
    dry_run: DryRun = False,
    check: Check = False,
    update: Update = False,
    prune: Prune = None,
    max_txn_size: MaxTxnSize = 0,
    endpoint: Endpoint = None,
) -> None:
    """Create, update and delete journals to match a YAML tree.

    A journal must be at the `revision` that the tree gives: 0 or none creates the journal, -1 accepts any revision. A
    suspended journal stays suspended, and keeps its resume offset, unless the tree gives its `suspend`.

    Up to {changes} changes are one transaction: all or none. More take several, deletions last. After an interruption,
    apply the same tree again: it continues with the rest.
    """
    changes = read_document(specs, parse_tree, JOURNALS.plural, "children")
    options = ApplyOptions(dry_run, check, update, prune, max_txn_size)

    async def work(client: JournalClient) -> None:
        await reconcile(JOURNALS, JournalSpecs(client), changes, source_name(specs), options)

    with_client(endpoint, work)
