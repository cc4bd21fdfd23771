"""The windows of a consumer, stored in its SQL store.

There, one SQL transaction can both check that a window still exists and replace its rows. So a run of a window that was
merged in the meantime cannot commit, and no row counts twice.

Each window has its own checkpoint and fence, named `<consumer>@<window>`. All windows share the record of the
consumer's identity (`outputs/identity.py`), in a checkpoint named `<consumer>@`. Only a commit that changes the record
writes it, so windows that are materialized concurrently do not wait for each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Double,
    LargeBinary,
    MetaData,
    Row,
    Table,
    delete,
    insert,
    inspect,
    select,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from coranto.errors import CorruptData, Fenced, InvalidInput
from coranto.fragments.windows import Span, Window, check, find
from coranto.messages.checkpoints import Checkpoint, Identity, Source
from coranto_consumers.stores.durability import commit_durably
from coranto_consumers.stores.engines import READS_ONLY
from coranto_consumers.stores.mysql import NAME
from coranto_consumers.stores.sql import CHECKPOINTS, SqlStore, raise_fence_in, row_of

WINDOW_COLUMN: Final = "coranto_window"
"""The column of output tables with the first number of the window that a row comes from."""

WINDOWS = Table(
    "coranto_windows",
    MetaData(),
    Column("consumer", NAME, primary_key=True),
    Column("first_number", BigInteger, primary_key=True, autoincrement=False),
    Column("last_number", BigInteger, nullable=False),
    Column("spans", LargeBinary, nullable=False),
    Column("created", Double, nullable=False),
    Column("sources_after", LargeBinary),
    Column("materialised", Double, key="materialized"),
)


@dataclass(frozen=True, slots=True)
class KnownWindow:
    """A window and its state. `after` has the states of all sources at the window's end; None until they are known.

    `materialized` is the time of the last commit of the window's rows, in seconds since 1970. None if some of the rows
    were never committed.
    """

    window: Window
    after: Checkpoint | None = None
    materialized: float | None = None


class WindowLog:
    """The windows of one consumer."""

    def __init__(self, store: SqlStore, consumer: str) -> None:
        self._store = store
        self._consumer = consumer
        self._place = f"{consumer}@"

    def load(self) -> list[KnownWindow]:
        """Return the windows, oldest first. Raises SqlStoreError, and CorruptData for gaps between windows."""
        try:
            with self._store.engine.connect().execution_options(**{READS_ONLY: True}) as connection:
                if not inspect(connection).has_table(WINDOWS.name):
                    return []
                return self._load(connection)
        except SQLAlchemyError as error:
            raise self._store.failure(f"the windows of {self._consumer} could not be read", error) from error

    def replace(self, before: Sequence[KnownWindow], after: Iterable[Window]) -> list[KnownWindow]:
        """Replace the windows `before`, as they were loaded, by `after`, and return the new ones.

        A window of `after` that covers several of `before` is materialized if all of them are. Raises Fenced, and
        changes nothing, when another process has changed the windows since they were loaded.
        """
        wanted = [_merged(window, before) for window in after]
        check([each.window for each in wanted])
        kept = {each.window.name for each in wanted}
        had = {each.window.name for each in before}
        self._store.create_tables(WINDOWS)
        try:
            with self._store.engine.begin() as connection:
                commit_durably(connection)
                for each in before:
                    if each.window.name not in kept:
                        self._require(connection.execute(delete(WINDOWS).where(*self._is(each.window))).rowcount, each)
                        shard = shard_of(self._consumer, each.window)
                        connection.execute(delete(CHECKPOINTS).where(CHECKPOINTS.c.shard_fqn == shard))
                added = [each for each in wanted if each.window.name not in had]
                if added:
                    connection.execute(insert(WINDOWS), [self._row(each) for each in added])
                if [each.window for each in self._load(connection)] != [each.window for each in wanted]:
                    raise Fenced(f"the windows of {self._consumer} were changed by another process; try again")
        except SQLAlchemyError as error:
            raise self._store.failure(f"the windows of {self._consumer} could not be written", error) from error
        return wanted

    def claim(self, connection: Connection, window: Window, after: Checkpoint, at: float) -> None:
        """Record in an open transaction that a window's rows are materialized. Raises Fenced if the window is gone."""
        values = {"sources_after": after.to_bytes(), "materialized": at}
        changed = connection.execute(update(WINDOWS).where(*self._is(window)).values(values))
        self._require(changed.rowcount, KnownWindow(window))

    def identity(self) -> Identity:
        """Return the record of the consumer's identity. Empty before the first commit. Raises SqlStoreError."""
        found = self._store.read(self._place)
        return Identity() if found is None else found.checkpoint.identity

    def record(self, connection: Connection, now: Identity, before: Identity) -> None:
        """Replace the record `before` by `now` in an open transaction. Raises Fenced if another process changed it."""
        found = row_of(connection, self._place)
        if found is not None and found.checkpoint.identity == now:
            return
        if (known := raise_fence_in(connection, self._place).checkpoint.identity) not in (before, now):
            outputs = [", ".join(sorted(each.outputs)) or "none" for each in (before, known)]
            raise Fenced(
                f"another process has changed the record of {self._consumer}, from outputs {outputs[0]} to "
                f"{outputs[1]}; try again"
            )
        connection.execute(
            update(CHECKPOINTS)
            .where(CHECKPOINTS.c.shard_fqn == self._place)
            .values(checkpoint=Checkpoint(identity=now).to_bytes())
        )

    def remember(self, window: Window, after: Checkpoint) -> None:
        """Store the states of sources at a window's end, unless they are known or the window is gone."""
        try:
            with self._store.engine.begin() as connection:
                connection.execute(
                    update(WINDOWS)
                    .where(*self._is(window), WINDOWS.c.sources_after.is_(None))
                    .values(sources_after=after.to_bytes())
                )
        except SQLAlchemyError as error:
            raise self._store.failure(f"window {window.name} could not be written", error) from error

    def _load(self, connection: Connection) -> list[KnownWindow]:
        rows = connection.execute(
            select(WINDOWS).where(WINDOWS.c.consumer == self._consumer).order_by(WINDOWS.c.first_number)
        ).all()
        found = [_known(row) for row in rows]
        check([each.window for each in found])
        return found

    def _is(self, window: Window) -> tuple[ColumnElement[bool], ...]:
        return (
            WINDOWS.c.consumer == self._consumer,
            WINDOWS.c.first_number == window.first,
            WINDOWS.c.last_number == window.last,
        )

    def _require(self, changed: int, each: KnownWindow) -> None:
        if changed != 1:
            raise Fenced(
                f"window {each.window.name} of {self._consumer} was merged into a larger one; materialize that one"
            )

    def _row(self, each: KnownWindow) -> dict[str, object]:
        spans = {
            name: [span.begin, span.end, span.revision, *([span.journal_id] if span.journal_id else [])]
            for name, span in each.window.spans.items()
        }
        return {
            "consumer": self._consumer,
            "first_number": each.window.first,
            "last_number": each.window.last,
            "spans": json.dumps(spans, separators=(",", ":")).encode(),
            "created": each.window.created,
            "sources_after": None if each.after is None else each.after.to_bytes(),
            "materialized": each.materialized,
        }


def shard_of(consumer: str, window: Window) -> str:
    """Return the name of a window's checkpoint and fence."""
    return f"{consumer}@{window.name}"


def is_merged(consumer: str, shard: str, windows: Sequence[Window]) -> bool:
    """Return True if `shard` belongs to a window of the consumer that was merged into a larger one of `windows`."""
    prefix, _, name = shard.rpartition("@")
    if prefix != consumer:
        return False
    try:
        return find(windows, name).name != name
    except InvalidInput:
        return False  # Not a window, or one that was added after `windows` were loaded.


def sources_before(known: Sequence[KnownWindow], window: Window) -> tuple[dict[str, Source], list[Window]]:
    """Return the last known states of sources at or before a window's begin, and the windows in between."""
    between: list[Window] = []
    for each in reversed([each for each in known if each.window.last < window.first]):
        if each.after is not None:
            return dict(each.after.sources), between
        between.insert(0, each.window)
    return {}, between


def _merged(window: Window, before: Sequence[KnownWindow]) -> KnownWindow:
    parts = [each for each in before if window.first <= each.window.first and each.window.last <= window.last]
    times = [each.materialized for each in parts]
    whole = [at for at in times if at is not None]
    at = max(whole) if parts and len(whole) == len(parts) else None
    return KnownWindow(window, parts[-1].after if parts else None, at)


def _known(row: Row[tuple[object, ...]]) -> KnownWindow:
    try:
        spans = {name: Span(*numbers) for name, numbers in json.loads(bytes(row.spans)).items()}
    except (ValueError, TypeError) as error:
        raise CorruptData(f"window {row.first_number} of {row.consumer} has no spans: {error}") from error
    return KnownWindow(
        Window(int(row.first_number), int(row.last_number), spans, float(row.created)),
        None if row.sources_after is None else Checkpoint.from_bytes(bytes(row.sources_after)),
        None if row.materialized is None else float(row.materialized),
    )
