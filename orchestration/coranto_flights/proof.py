"""The proof of the main job. It compares the consumer's results with results computed from the CSV file.

The checks do not rely on the pipeline. They read the table from the SQL store, and compare each cell with pandas over
the CSV. They read alerts from their journal with a read-committed reader, and audit journals down to the bytes of their
fragments.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import sqlalchemy as sa

from coranto.audit import JournalAudit, audit_journal
from coranto.client import ClientConfig, JournalClient, SyncJournalClient
from coranto.client.committed import committed_messages
from coranto.fragments.stores import StoreRegistry
from coranto.messages import JsonLines
from coranto_consumers.stores.sql import SqlStore
from coranto_flights.data import ALERT_COLUMNS, expected_alerts, expected_carrier_delays

if TYPE_CHECKING:
    from collections.abc import Hashable

KEY = ["carrier", "year", "month"]
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class CheckedClaim:
    """The result of checking a claim. `detail` describes the comparison or the difference."""

    claim: str
    holds: bool
    detail: str


def prove(
    config: ClientConfig, store_url: str, flights: pd.DataFrame, *, prefix: str = "", table: str = "carrier_delays"
) -> list[CheckedClaim]:
    """Check the results of one pass over the flights. Raises only if the cluster or the store does not answer."""
    return [
        prove_table(store_url, table, flights),
        prove_alerts(config, prefix, flights),
        coverage(asyncio.run(_audits(config, prefix))),
    ]


def prove_table(store_url: str, table: str, flights: pd.DataFrame) -> CheckedClaim:
    """Check that every cell of the table equals the same aggregation with pandas."""
    claim = f"every cell of {table} equals pandas over the CSV"
    expected = expected_carrier_delays(flights).set_index(KEY).sort_index()
    with SqlStore(store_url).engine.connect() as connection:
        if not sa.inspect(connection).has_table(table):
            return CheckedClaim(claim, False, "the table does not exist")
        columns: list[sa.ColumnClause[object]] = [sa.column(name) for name in (*KEY, *map(str, expected.columns))]
        rows = connection.execute(sa.select(*columns).select_from(sa.table(table))).mappings().all()
    actual = {tuple(row[name] for name in KEY): row for row in rows}
    problems = differing_cells(expected, actual)
    if len(actual) != len(rows):
        problems.append(f"{len(rows) - len(actual)} keys occur more than once")
    if problems:
        return CheckedClaim(claim, False, _first(problems))
    return CheckedClaim(claim, True, f"{len(expected)} rows × {len(expected.columns)} columns")


def differing_cells(expected: pd.DataFrame, actual: dict[tuple[Hashable, ...], sa.RowMapping]) -> list[str]:
    """Return a line for each differing cell, missing row and surplus row of `actual`. `expected` is indexed by KEY."""
    problems = [f"row {key} should not be there" for key in actual.keys() - set(expected.index)]
    for key, row in zip(expected.index, expected.to_dict("records"), strict=True):
        found = actual.get(key)
        if found is None:
            problems.append(f"row {key} is missing")
            continue
        for column, value in row.items():
            if not same(value, found[str(column)]):
                problems.append(f"{column} of {key} is {found[str(column)]!r}, should be {value!r}")
    return problems


def same(expected: Any, actual: Any) -> bool:
    """Return True if cells are equal: both absent, or equal numbers (to 12 significant digits)."""
    absent = bool(pd.isna(expected))
    if absent or actual is None:
        return absent and actual is None
    wanted, found = float(expected), float(actual)
    return abs(wanted - found) <= 1e-12 * max(1.0, abs(wanted))


async def _audits(config: ClientConfig, prefix: str) -> list[JournalAudit]:
    async with JournalClient.of(config) as client:
        stores = StoreRegistry(config.file_root)
        listing = await client.list(f"name:prefix={prefix}flights/")
        return [await audit_journal(client, stores, journal.name, first_offset=0) for journal in listing.journals]


def prove_alerts(config: ClientConfig, prefix: str, flights: pd.DataFrame) -> CheckedClaim:
    """Check that a read-committed reader of the alerts yields exactly the expected flights, each once."""
    claim = "a read-committed reader of flights/alerts yields each expected flight once"
    found: Counter[tuple[object, ...]] = Counter()
    with SyncJournalClient.of(config) as client:
        for journal in client.list(f"name:prefix={prefix}flights/alerts/").journals:
            for envelope in committed_messages(client, journal.name, JsonLines()):
                message = envelope.message
                found[tuple(message.get(column) for column in ALERT_COLUMNS)] += 1
    expected = Counter(
        tuple(None if pd.isna(value) else value for value in row)
        for row in expected_alerts(flights).astype(object).itertuples(index=False, name=None)
    )
    problems = [f"missing: {row}" for row in (expected - found)]
    problems += [f"surplus, {count} times: {row}" for row, count in (found - expected).items()]
    if problems:
        return CheckedClaim(claim, False, _first(problems))
    return CheckedClaim(claim, True, f"{found.total()} alerts")


def coverage(audits: Sequence[JournalAudit]) -> CheckedClaim:
    """Check that persisted fragments and live spools cover every journal from 0 to its head, with matching SHA-1s."""
    claim = "fragments and spools cover every journal from 0 to its head, with matching SHA-1s"
    problems = [problem for audit in audits for problem in audit.problems]
    if not audits:
        problems = ["there are no journals"]
    if problems:
        return CheckedClaim(claim, False, _first(problems))
    total = sum(audit.head for audit in audits)
    persisted = sum(1 for audit in audits for item in audit.fragments if item.fragment.backing_store)
    live = sum(audit.live_bytes for audit in audits)
    return CheckedClaim(
        claim, True, f"{len(audits)} journals, {total:,} bytes, {persisted} persisted fragments, {live:,} bytes live"
    )


def _first(problems: Sequence[str]) -> str:
    shown = "; ".join(problems[:_SHOWN])
    more = len(problems) - _SHOWN
    return f"{shown}; and {more} more" if more > 0 else shown
