"""`IcebergStore`: tables of an Iceberg catalog as the store of a Spark consumer, or of `exactly_once`.

::

    catalog = SqlCatalog("lake", uri="postgresql+psycopg://…", warehouse="s3://lake/")
    SparkConsumer(application, client, IcebergStore(catalog, "shop.orders"), spark).run_until_caught_up()

Tasks write Parquet files, and one commit of the catalog adds them together with the checkpoint, under the fence
(`stores/iceberg/owner.py`). The driver merges rows with keys: it rewrites the files that have these keys.

Each transaction has its own folder in each table's data location. After the commit, files in the folder that the commit
did not add are removed: staged files, and files of losing attempts. The next commit and the next owner check the folder
again, because a hung attempt may still write.
"""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import structlog
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table as IcebergTable
from pyiceberg.table import Transaction
from sqlalchemy import Table

from coranto.errors import CommitOutcomeUnknown, InvalidInput
from coranto.messages.checkpoints import Checkpoint
from coranto_consumers.spark.application.outputs import Outputs, TableOutput
from coranto_consumers.spark.inputs.strategies import ExpectedRows
from coranto_consumers.spark.outputs.staging import CARRIED_TO_APPEND, CARRIED_TO_MERGE, require_deletes
from coranto_consumers.spark.outputs.stores import Merged, OutputStore
from coranto_consumers.spark.outputs.tasks import FILES, WriteFilesTask
from coranto_consumers.spark.session.sessions import described
from coranto_consumers.stores.fencing import Restored
from coranto_consumers.stores.iceberg.catalogs import FAILURES, failure
from coranto_consumers.stores.iceberg.changes import append, merge_rows, overwrite_partitions, require_partitioning
from coranto_consumers.stores.iceberg.files import sweep
from coranto_consumers.stores.iceberg.owner import Change, IcebergOwner
from coranto_consumers.stores.iceberg.state import state_of
from coranto_consumers.stores.iceberg.tables import find_or_create, plan_for, require_target
from coranto_consumers.stores.iceberg.urls import IcebergHome
from coranto_consumers.stores.iceberg.writing import FileWriter
from coranto_consumers.stores.merge import MergePlan

_log = structlog.get_logger(__name__)
_SWEPT_TRANSACTIONS: Final = 2
"""The number of recent transactions whose folders are checked after a commit."""


@dataclass(frozen=True, slots=True)
class Written:
    """Rows of an output: in uncommitted files, in staged files, or carried to the driver."""

    table: str
    plan: MergePlan
    overwrite: bool
    writer: FileWriter
    files: tuple[DataFile, ...]
    staged: tuple[str, ...]
    carried: tuple[bytes, ...]

    def rows_here(self) -> list[pa.RecordBatch]:
        return [batch for each in self.carried for batch in pa.ipc.open_stream(pa.BufferReader(each))]


@dataclass(slots=True)
class _Transaction:
    """The folder of a transaction, and the files in it that the commit adds, by table."""

    folder: str
    named: dict[str, set[str]] = field(default_factory=dict)


class IcebergStore(OutputStore[Written]):
    """Tables of a pyiceberg catalog, with a consumer's checkpoint in one of them, its *home*.

    Tables are named `namespace.name`. Tables given as SQLAlchemy definitions are created if absent, in `namespace` if
    they have no schema, and partitioned by the columns in `Table.info["partition_by"]`. The catalog must be pyiceberg's
    SQL catalog on PostgreSQL or SQLite, where all tables of a transaction commit in one transaction of the database; or
    pyiceberg's REST catalog, where the home must be the only table. Other writers may append to the tables, compact
    them and expire their snapshots.

    Use an instance in one driver only, for one consumer at a time.
    """

    def __init__(
        self, catalog: Catalog, home: Table | str, *, namespace: str = "default", relaxed_durability: bool = False
    ) -> None:
        """`relaxed_durability` accepts a catalog that may lose commits in a crash. Raises InvalidInput."""
        self._namespace = namespace
        self._home = home
        self._owner = IcebergOwner(catalog, self._name_of(home), relaxed_durability=relaxed_durability)
        self._recent: deque[_Transaction] = deque(maxlen=_SWEPT_TRANSACTIONS)

    @classmethod
    def at(cls, url: str) -> IcebergStore:
        """Return the store at a URL such as iceberg://lake/shop.orders. Its home must exist.

        pyiceberg's settings define the catalog `lake`. Tables without a schema are in the home's namespace. Raises
        InvalidInput, and SqlStoreError if the catalog does not answer.
        """
        home = IcebergHome.at(url)
        return cls(home.catalog, home.table, namespace=home.table.rpartition(".")[0])

    @property
    def name(self) -> str:
        return f"iceberg {self._owner.catalog.name}/{self._owner.home}"

    @property
    def location(self) -> str:
        return self._owner.location

    def read(self, shard: str) -> Restored | None:
        with self._explained(f"the checkpoint of {shard} could not be read"):
            table = self.load(self._home)
        state = None if table is None else state_of(table, shard)
        return None if state is None or not state.fence else Restored(state.fence, state.checkpoint)

    def compare(self, outputs: Outputs) -> None:
        for each in outputs.sql:
            self.prepare(each.sql)
        for output in outputs.tables:
            table, plan = self._planned(output)
            require_target(table, output.table if isinstance(output.table, Table) else None, plan)

    def raise_fence(self, shard: str) -> Restored:
        if not shard:
            raise InvalidInput("a consumer needs a name; it is the identity that fences it; give one", field="shard")
        with self._explained(f"the fence of {shard} could not be raised"):
            self._owner.require_durability()
            self._find(self._home)
            before = self._owner.raise_fence(shard)
        self._recent.clear()
        return Restored(before.fence + 1, before.checkpoint)

    def resume(self, shard: str, fence: int) -> Checkpoint:
        with self._explained(f"the checkpoint of {shard} could not be read again"):
            return self._owner.resume()

    def sweep(self, shard: str, fence: int) -> None:
        with self._explained("files of earlier owners could not be removed"):
            self._owner.sweep()

    def write(self, output: TableOutput, shard: str, fence: int, expected: ExpectedRows | None = None) -> Written:
        table, plan = self._planned(output)
        name = self._name_of(output.table)
        with self._explained(f"rows for {name} could not be written"):
            self._owner.register_table(name)
        writer = FileWriter.of(table, self._owner.name_of(self._owner.next_number))
        merged = bool(plan.keys)
        task = WriteFilesTask(writer, CARRIED_TO_MERGE if merged else CARRIED_TO_APPEND, merged)
        with described(output.rows.sparkSession, f"{shard}: writes rows for table {name}"):
            won = output.rows.mapInArrow(task, FILES).collect()
        files = tuple(file for row in won if row.files is not None for file in pickle.loads(bytes(row.files)))
        staged = tuple(place for row in won for place in row.staged or ())
        carried = tuple(bytes(row.carried) for row in won if row.carried is not None)
        return Written(name, plan, output.overwrite, writer, files, staged, carried)

    def _planned(self, output: TableOutput) -> tuple[IcebergTable, MergePlan]:
        """Return the table of an output, created if absent, and the merge plan for its rows. Raises InvalidInput."""
        name = self._name_of(output.table)
        require_deletes(output, name)
        with self._explained(f"table {name} could not be read"):
            table = self._find(output.table)
        definition = output.table if isinstance(output.table, Table) else None
        plan = plan_for(table, definition, output.rows.columns, output.keys, output.merge, output.delete)
        if output.overwrite and (plan.keys or table.spec().is_unpartitioned()):
            problem = "has keys, which replace rows" if plan.keys else "is not partitioned"
            raise InvalidInput(f"{problem}: leave out overwrite=True", field=f"table {name}")
        return table, plan

    def commit(
        self, shard: str, fence: int, written: Sequence[Written], checkpoint: Checkpoint, merged: Merged
    ) -> None:
        by_table: defaultdict[str, list[Written]] = defaultdict(list)
        for each in written:
            if each.files or each.staged or each.carried:
                by_table[each.table].append(each)
        number = self._owner.next_number
        done = _Transaction(self._owner.name_of(number))
        with self._explained(f"the commit of {shard} could not be made"):
            changes = {name: self._change(name, outputs, done) for name, outputs in by_table.items()}
            try:
                self._owner.commit(checkpoint, changes, number, merged)
            except CommitOutcomeUnknown as error:
                self._owner.resolve(number, error)
        self._recent.append(done)
        self._sweep_losers()

    def load(self, table: Table | str) -> IcebergTable | None:
        """Load a table. None if absent. A name without a namespace is in the store's namespace."""
        name = f"{self._namespace}.{table}" if isinstance(table, str) and "." not in table else self._name_of(table)
        try:
            return self._owner.catalog.load_table(name)
        except NoSuchTableError:
            return None

    def _change(self, name: str, outputs: Sequence[Written], done: _Transaction) -> Change:
        """Return the change of a table. It records the files that it adds in `done`."""
        first = outputs[0]
        if len(outputs) > 1 and any(each.overwrite or each.plan.keys for each in outputs):
            raise InvalidInput(
                "several outputs write this table, and one of them merges or overwrites: make one output of them",
                field=f"table {name}",
            )
        if first.plan.keys:

            def parts() -> Iterator[pa.Table]:
                yield from first.writer.read(first.staged)
                if rows := first.rows_here():
                    yield pa.Table.from_batches(rows)

            def merge(transaction: Transaction, summary: Mapping[str, str]) -> None:
                files = merge_rows(transaction, summary, first.plan, parts, first.writer)
                done.named[name] = {file.file_path for file in files}

            return merge
        # The carried rows of all tasks are written once, before the first attempt.
        files = [file for each in outputs for file in (*each.files, *each.writer.write(each.rows_here()))]
        done.named[name] = {file.file_path for file in files}
        add = overwrite_partitions if first.overwrite else append

        def change(transaction: Transaction, summary: Mapping[str, str]) -> None:
            for each in outputs:
                require_partitioning(transaction, each.writer)
            add(transaction, summary, files, first.writer)

        return change

    def _sweep_losers(self) -> None:
        """Remove files in folders of recent transactions that the commits did not add. The next owner does so, too."""
        for transaction in self._recent:
            named = set[str]().union(*transaction.named.values())  # Tables may share their location and folder.
            for name in transaction.named:
                try:
                    sweep(self._owner.load(name), transaction.folder, named)
                except (*FAILURES, ValueError, InvalidInput) as error:
                    _log.warning("iceberg.sweep_failed", table=name, folder=transaction.folder, error=str(error))

    def _find(self, table: Table | str) -> IcebergTable:
        name = self._name_of(table)
        if isinstance(table, str) and name == self._owner.home:
            table = self._home  # The home may have been given as a definition.
        return find_or_create(self._owner.catalog, name, None if isinstance(table, str) else table)

    def _name_of(self, table: Table | str) -> str:
        name = table if isinstance(table, str) else f"{table.schema or self._namespace}.{table.name}"
        if "." not in name.strip("."):
            raise InvalidInput(f"{name!r} has no namespace; name the table like shop.orders", field="table")
        return name

    @contextmanager
    def _explained(self, problem: str) -> Iterator[None]:
        """Convert failures of the catalog or of files to errors of the store."""
        try:
            yield
        except FAILURES as error:
            raise failure(f"store {self.name}: {problem}", error) from error
