"""An owner of a shard in an Iceberg catalog: it raises the fence, and commits rows and checkpoint under it.

**Fence.** The *home* is the table that stores the shard's state. Each commit, and each raise of the fence, makes a new
snapshot of the home, and requires that the home's current snapshot is the one whose state was checked. So a commit that
began before the fence was raised fails, however late it arrives. Iceberg's own retries are turned off, because they
would rebuild the commit on the new snapshot. Instead, each attempt checks the fence again.

**Several tables** commit in one transaction of a SQL catalog's database, together with the home. So the home's fence
protects all of them. A REST catalog commits each table by itself: the home must then be the only table.

**Uncommitted files.** An owner's file names are derived from its fence and the numbers of its transactions, which
commit one after the other. So later owners can derive the names of files that were never committed from the state, and
remove these files. Several owners do so, because a hung process may still write files.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Final, TypeVar

import structlog
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, RESTError
from pyiceberg.table import Table, TableProperties, Transaction
from sqlalchemy import make_url

from coranto.client.retry import RetryPolicy
from coranto.errors import CommitOutcomeUnknown, CorruptData, Fenced, InvalidInput, SqlStoreError
from coranto.messages.checkpoints import Checkpoint
from coranto_consumers.stores.fencing import Restored, fenced_off
from coranto_consumers.stores.iceberg.catalogs import commits_of, is_transient
from coranto_consumers.stores.iceberg.files import sweep, sweep_committed
from coranto_consumers.stores.iceberg.multi_table import has_snapshot, remove_manifests
from coranto_consumers.stores.iceberg.state import (
    ShardState,
    SnapshotId,
    digest_of,
    encode,
    file_name,
    key_of,
    require_history,
    state_of,
)
from coranto_consumers.stores.urls import location_of

_ATTEMPTS: Final = 20
_MAX_WAIT: Final = 1.0
_RESOLVING: Final = RetryPolicy(timeout=20.0)

_log = structlog.get_logger(__name__)
T = TypeVar("T")

Change = Callable[[Transaction, Mapping[str, str]], None]
"""Adds snapshots to a table's transaction, with the given properties in their summaries."""


class IcebergOwner:
    """One owner of a shard. Use an instance from one thread only, and call `raise_fence` first."""

    def __init__(
        self,
        catalog: Catalog,
        home: str,
        *,
        relaxed_durability: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`home` is the name of the table with the state.

        Raises InvalidInput for a catalog that may report an applied commit as failed.
        """
        self._commits = commits_of(catalog)
        self.catalog = catalog
        self.home = home
        self._relaxed = relaxed_durability
        self._sleep = sleep
        self.shard = ""
        self.state = ShardState()
        """The last state that this owner committed."""

    @property
    def location(self) -> str:
        """The location of the catalog, without a password, and the home's name."""
        uri = self.catalog.properties.get("uri", "")
        return f"iceberg {location_of(make_url(uri)) if uri else self.catalog.name} {self.home}"

    @property
    def next_number(self) -> int:
        """The number of the next transaction."""
        return self.state.committed + 1

    def name_of(self, number: int) -> str:
        """Return the name of this owner's folder for a transaction."""
        return file_name(self.state.files, number)

    def load(self, name: str = "") -> Table:
        """Load a table, by default the home. Raises InvalidInput if it does not exist."""
        try:
            return self.catalog.load_table(name or self.home)
        except NoSuchTableError:
            raise InvalidInput(f"there is no table {name or self.home}; create it, or give its schema") from None

    def require_durability(self) -> None:
        """Raise InvalidInput for a server that may lose commits, unless relaxed durability is accepted.

        Acknowledgements are appended after a commit, and cannot be undone.
        """
        found = self._commits.risks()
        if found and not self._relaxed:
            raise InvalidInput(
                f"may lose commits: {'; '.join(found)}; or accept that with relaxed_durability=True", field="catalog"
            )
        if found:
            _log.warning("iceberg.relaxed_durability", table=self.home, risks=found)

    def raise_fence(self, shard: str, change: Callable[[int, Checkpoint], Checkpoint] | None = None) -> ShardState:
        """Raise the fence, and return the state before it. On return no earlier owner can commit.

        `change` takes the new fence and the current checkpoint, and returns the checkpoint to commit with the fence.
        Raises CorruptData if a table of the shard was rolled back or is gone, and SqlStoreError.
        """
        self.shard = shard

        def raise_it() -> ShardState:
            table = self.load()
            state = state_of(table, shard)
            for name, known in state.tables.items():
                if name != self.home:
                    self._require_table(name, known)
            raised = self.successor_of(state)
            if change is not None:
                raised = replace(raised, checkpoint=change(raised.fence, state.checkpoint))
            self.raise_to(table, raised)
            return state

        return self.attempt(raise_it)

    def successor_of(self, state: ShardState) -> ShardState:
        """Return the state of the next owner after `state`."""
        # The random part makes names unique even if the home is recreated and fences start over.
        files = f"coranto-{digest_of(self.shard)}-{state.fence + 1}-{uuid.uuid4().hex[:8]}/"
        return ShardState(
            state.fence + 1,
            state.checkpoint,
            files=files,
            left=state.uncommitted,
            last=state.last,
            tables=state.tables,
        )

    def raise_to(self, table: Table, raised: ShardState) -> None:
        """Commit the state of a new owner, if the home has not changed since it was loaded."""
        self.state = replace(self.state, fence=raised.fence)
        self._commit(raised, self._stage({self.home: table}, {}))

    def resume(self) -> Checkpoint:
        """Return the last committed checkpoint, once no pending commit of this owner can be applied any more.

        It makes a new snapshot, so that a commit in flight fails. Raises Fenced when a later owner has raised the
        fence, CorruptData when the home has a lower fence, and CommitOutcomeUnknown.
        """

        def fail_commits() -> None:
            table = self.load()
            if (known := state_of(table, self.shard).fence) < self.state.fence:
                raise CorruptData(
                    f"shard {self.shard} has raised fence {self.state.fence}, and {self.home} has {known}: it lost "
                    "commits. Start the consumer again: it continues from the checkpoint that is there"
                )
            found = self.require_fence(table)
            self._commit(found, self._stage({self.home: table}, {}))

        self.attempt(fail_commits)
        return self.state.checkpoint

    def sweep(self) -> None:
        """Remove uncommitted files of earlier owners. The fence is raised, so no commit can add them any more."""
        known: list[tuple[Table, SnapshotId]] = []
        for name in {self.home, *self.state.tables}:
            try:
                table = self.load(name)
            except InvalidInput:
                continue  # The table was dropped before any commit had rows for it.
            for left in self.state.left:
                sweep(table, left)
            if name in self.state.tables:
                known.append((table, self.state.tables[name]))
        if self.state.last.endswith("/"):
            sweep_committed(self.state.last, known)

    def require_fence(self, table: Table) -> ShardState:
        """Return the state in the home. Raises Fenced if it is another owner's state.

        If the table was recreated or its state deleted, fences start over. File names then distinguish the owners.
        """
        found = state_of(table, self.shard)
        if found.fence != self.state.fence:
            raise fenced_off(self.shard, self.state.fence, Restored(found.fence, found.checkpoint))
        if found.files != self.state.files:
            raise Fenced(
                f"shard {self.shard}: the state in {self.home} was deleted, and a later owner has started over with "
                f"fence {found.fence}, which is this one's, too"
            )
        return found

    def register_table(self, name: str) -> None:
        """Register a table in the state before files are written for it, so that the next owner can remove them.

        Raises InvalidInput for a table that the catalog cannot change in one commit with the home.
        """
        self._require_multi_table(name)
        if name in self.state.tables:
            return

        def note() -> None:
            table = self.load()
            self.require_fence(table)
            noted = replace(self.state, tables={**self.state.tables, name: SnapshotId(0, 0)})
            self._commit(noted, self._stage({self.home: table}, {}))

        self.attempt(note)

    def commit(
        self,
        checkpoint: Checkpoint,
        changes: Mapping[str, Change],
        number: int,
        merged: Callable[[], None] = lambda: None,
    ) -> None:
        """Commit changes of tables, by name, and the checkpoint, as transaction `number`.

        `merged` is called once, before the commit itself. Raises Fenced, SqlStoreError, CorruptData for a table that
        was rolled back (nothing was committed), and CommitOutcomeUnknown; see `resolve`.
        """
        for name in changes:
            self._require_multi_table(name)
        done: list[bool] = []

        def commit() -> None:
            tables = {name: self.load(name) for name in {self.home, *changes}}
            self.require_fence(tables[self.home])
            for name in changes:  # A commit on a table that was rolled back would lose the table's earlier commits.
                if (known := self.state.tables.get(name)) is not None and known.snapshot:
                    require_history(tables[name], known, self.shard)
            state = replace(self.state, checkpoint=checkpoint, committed=number)
            if changes:
                state = replace(state, last=self.name_of(number))
            staged = self._stage(tables, changes)
            if not done:
                done.append(True)
                try:
                    merged()
                except BaseException:
                    remove_manifests(staged.values())
                    raise
            self._commit(state, staged, changes)

        self.attempt(commit)

    def resolve(self, number: int, cause: CommitOutcomeUnknown) -> None:
        """Find out if transaction `number` was committed, and return if it was.

        If it was not, makes a new snapshot, so that a late commit fails. Raises Fenced when a later owner has raised
        the fence, SqlStoreError when nothing was committed, and `cause` when the catalog does not answer.
        """
        for wait in (*_RESOLVING.waits(), None):
            try:
                table = self.load()
                found = self.require_fence(table)
                if found.committed == number:
                    self.state = found
                    return
                self._commit(found, self._stage({self.home: table}, {}))
            except (Fenced, CorruptData, InvalidInput):
                raise
            except Exception as error:
                if wait is None:
                    raise cause from error
                self._sleep(wait)
            else:
                raise SqlStoreError(
                    f"{self.home}: the commit of {self.shard} was not applied: {cause}",
                    retriable=is_transient(cause.__cause__),
                ) from cause

    def _require_multi_table(self, name: str) -> None:
        if name != self.home and not self._commits.supports_multi_table:
            raise InvalidInput(
                f"is not {self.home}, which has the checkpoint, and a REST catalog commits each table by itself: write "
                f"to {self.home} only, or use a SqlCatalog",
                field=f"table {name}",
            )

    def _require_table(self, name: str, known: SnapshotId) -> None:
        if not known.snapshot:
            return
        try:
            table = self.load(name)
        except InvalidInput as error:
            raise CorruptData(f"table {name} is gone, and the checkpoint of {self.shard} includes its rows") from error
        require_history(table, known, self.shard)

    def attempt(self, work: Callable[[], T]) -> T:
        """Call `work`, which loads tables and commits. Retries after conflicts, and finally raises SqlStoreError."""
        wait = 0.01
        for _ in range(_ATTEMPTS):
            try:
                return work()
            except CommitFailedException as error:
                failure = error
            self._sleep(random.uniform(wait / 2, wait))
            wait = min(2 * wait, _MAX_WAIT)
        raise SqlStoreError(
            f"{self.home}: other writers came first {_ATTEMPTS} times: {failure}; have them commit less often"
        ) from failure

    def _stage(self, tables: Mapping[str, Table], changes: Mapping[str, Change]) -> dict[str, Transaction]:
        """Return a transaction for each table that gets a new snapshot. The home always gets one."""
        summary = {"coranto.shard": self.shard, "coranto.fence": str(self.state.fence)}
        staged: dict[str, Transaction] = {}
        try:
            for name, table in tables.items():
                # Changed in this object only: the stored property belongs to the user.
                table.metadata.properties[TableProperties.COMMIT_NUM_RETRIES] = "0"
                staged[name] = transaction = Transaction(table)
                if name in changes:
                    changes[name](transaction, summary)
                if name == self.home and not has_snapshot(transaction):
                    with transaction.update_snapshot(snapshot_properties=summary).fast_append():
                        pass
                if not has_snapshot(transaction):
                    del staged[name]
        except BaseException:
            remove_manifests(staged.values())
            raise
        return staged

    def _commit(self, state: ShardState, staged: Mapping[str, Transaction], changed: Collection[str] = ()) -> None:
        """Commit transactions, with the state in the home.

        Raises CommitFailedException for a conflict with another writer, and CommitOutcomeUnknown if the catalog's
        result is unknown.
        """
        try:
            known = {name: _snapshot_of(name, transaction) for name, transaction in staged.items()}
        except InvalidInput:
            remove_manifests(staged.values())
            raise
        with_files = {name: each for name, each in known.items() if name in changed}
        state = replace(
            state,
            snapshot=known[self.home].snapshot,
            sequence=known[self.home].sequence,
            tables={**state.tables, **with_files},
        )
        staged[self.home].set_properties({key_of(self.shard): encode(self.shard, state)})
        try:
            self._commits.commit(list(staged.values()))
        except CommitFailedException:
            raise
        except Exception as error:
            said = f": {error}" if isinstance(error, RESTError) else ""  # Database errors quote whole statements.
            raise CommitOutcomeUnknown(
                f"{self.home}: the catalog failed while it committed: {type(error).__name__}{said}"
            ) from error
        self.state = state


def _snapshot_of(name: str, transaction: Transaction) -> SnapshotId:
    snapshot = transaction.table_metadata.current_snapshot()
    if snapshot is None or snapshot.sequence_number is None:
        raise InvalidInput(f"{name} has format 1; upgrade it to format 2", field="table")
    return SnapshotId(snapshot.snapshot_id, snapshot.sequence_number)
