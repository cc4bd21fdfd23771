"""Atomic commits of several tables of a SQL catalog, in one transaction of its database."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pyiceberg.catalog.sql import IcebergTables, SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import StagedTable, Table, Transaction
from pyiceberg.table.update import AssertTableUUID
from sqlalchemy import update
from sqlalchemy.orm import Session


def has_snapshot(transaction: Transaction) -> bool:
    """Return True if a transaction has made a snapshot."""
    return transaction.table_metadata.current_snapshot_id != transaction._table.metadata.current_snapshot_id


def remove_manifests(transactions: Iterable[Transaction]) -> None:
    """Remove the manifests of transactions that can never commit."""
    for transaction in transactions:
        for producer in transaction._snapshot_producers:
            producer._clean_all_uncommitted()


def commit_tables(catalog: SqlCatalog, transactions: Sequence[Transaction]) -> None:
    """Commit transactions of different tables, all or none.

    Each transaction requires that its table's current snapshot has not changed. Raises CommitFailedException if one has
    (nothing was committed, and the manifests are removed). After any other error the outcome is unknown.
    """
    if len(transactions) == 1:
        transactions[0].commit_transaction()
        return
    staged: list[tuple[Table, StagedTable]] = []
    try:
        # In a fixed order, so that two owners cannot deadlock.
        for each in sorted(transactions, key=lambda each: each._table.name()):
            table = catalog.load_table(each._table.name())
            requirements = (*each._requirements, AssertTableUUID(uuid=each._table.metadata.table_uuid))
            new = catalog._update_and_stage_table(table, table.name(), requirements, each._updates)
            catalog._write_metadata(new.metadata, new.io, new.metadata_location)
            staged.append((table, new))
        _swap(catalog, staged)
    except CommitFailedException:
        remove_manifests(transactions)
        raise
    for table, new in staged:
        catalog._delete_old_metadata(new.io, table.metadata, new.metadata)  # Files that cannot be deleted are logged.


def _swap(catalog: SqlCatalog, staged: Iterable[tuple[Table, StagedTable]]) -> None:
    """Point the catalog to the new metadata of all tables, if it still points to the old metadata of each."""
    with Session(catalog.engine) as session:
        for table, new in staged:
            *namespace, name = table.name()
            swapped: Any = session.execute(
                update(IcebergTables)
                .where(
                    IcebergTables.catalog_name == catalog.name,
                    IcebergTables.table_namespace == ".".join(namespace),
                    IcebergTables.table_name == name,
                    IcebergTables.metadata_location == table.metadata_location,
                )
                .values(metadata_location=new.metadata_location, previous_metadata_location=table.metadata_location)
            )
            if swapped.rowcount != 1:
                raise CommitFailedException(f"Table has been updated by another process: {'.'.join(table.name())}")
        session.commit()
