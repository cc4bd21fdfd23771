"""`coranto journals prune`: remove persisted fragments that are older than their journal's retention.

Brokers prune automatically, unless configured not to. This command shows planned removals, or removes immediately.
It accesses stores from this process, with its credentials. Brokers notice at their next listing of the store.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated

import typer

from coranto.cli.connect import Endpoint, with_client
from coranto.cli.journals.selection import Names, Selector, chosen, select
from coranto.cli.output import note
from coranto.client import JournalClient, JournalInfo
from coranto.errors import InvalidInput
from coranto.fragments.forks import held_from
from coranto.fragments.fragment import Fragment
from coranto.fragments.retention import expired
from coranto.fragments.stores import StoreRegistry
from coranto.labels import NAME, label_selector
from coranto.specs.validation import duration_seconds
from coranto.telemetry import amount, progress


def prune(
    names: Names = None,
    selector: Selector = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and do nothing.")] = False,
    endpoint: Endpoint = None,
) -> None:
    """Remove persisted fragments that were stored longer ago than their journal's retention.

    Journals without a retention (0 or less) keep everything, and every journal keeps the fragment of its head.
    Only the beginning of a journal is removed: no fragment after a younger one. Of fragments that overlap, brokers
    list only the largest: prune again later for the others. A journal keeps content shared with its forks, and nothing
    more of it is removed once its retention changes.
    """
    selection = chosen(names, selector)

    async def work(client: JournalClient) -> None:
        journals = await select(client, selection)
        old: list[Fragment] = []
        now = time.time()
        with progress("Looking for old fragments", len(journals), unit="journals") as report:
            for info in journals:
                old += await _old_fragments(client, info, now)
                report.advance()
        if not dry_run:
            planned = {info.name: duration_seconds(info.spec.fragment.retention) for info in journals}
            old = await _remove(client, old, planned)
        total = sum(fragment.length for fragment in old)
        for fragment in old:
            typer.echo(f"{'would remove' if dry_run else 'removed'} {fragment.backing_store}{fragment.content_path}")
        typer.echo(
            f"{'would remove' if dry_run else 'removed'} {len(old)} fragments with {amount(total, 'bytes')} of content"
        )

    with_client(endpoint, work)


async def _old_fragments(client: JournalClient, info: JournalInfo, now: float) -> list[Fragment]:
    retention = duration_seconds(info.spec.fragment.retention)
    if retention <= 0:
        note(f"{info.name} has no retention, and keeps everything")
        return []
    if info.is_asleep:
        return []
    listed = [item.fragment for item in await client.fragments(info.name)]
    # Its source removes the fragments that a fork shares.
    return [each for each in expired(listed, retention, now, held_from(info.spec)) if each.journal == info.name]


async def _remove(client: JournalClient, old: list[Fragment], planned: Mapping[str, float]) -> list[Fragment]:
    """Remove the planned fragments in order, so that an interruption leaves no gap.

    Returns the removed fragments. Stops for a journal once its retention changes, or a fork shares its next fragment.
    """
    root = client.config.file_root
    for fragment in old:
        if root is None and fragment.backing_store.startswith("file:"):
            raise InvalidInput(
                f"{fragment.backing_store} is below a folder of the brokers; name that folder in $CORANTO_FILE_ROOT"
            )
    stores, removed, ended = StoreRegistry(root), list[Fragment](), set[str]()
    with progress("Removing fragments", len(old), unit="fragments") as report:
        for fragment in old:
            # The journal may be forked, or its retention lengthened, at any time.
            if fragment.journal not in ended and not await _allows(client, fragment, planned):
                ended.add(fragment.journal)
            if fragment.journal not in ended:
                await stores.get(fragment.backing_store).remove(fragment)
                removed.append(fragment)
            report.advance()
    for name in sorted(ended):
        note(f"{name} now has a fork or another retention, so the rest of it stays")
    return removed


async def _allows(client: JournalClient, fragment: Fragment, planned: Mapping[str, float]) -> bool:
    """Return True if the current spec of its journal still allows the removal of a fragment, by the brokers' rule."""
    listing = await client.list(label_selector(include={NAME: fragment.journal}))
    return any(
        duration_seconds(info.spec.fragment.retention) == planned[info.name] and fragment.end <= held_from(info.spec)
        for info in listing.journals
    )
