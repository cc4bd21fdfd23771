"""Log of committed outputs in a SQL store, which makes each output count once despite retries of its step.

An output is kept for `keep_days` after its commit, and until its acknowledgements are known to be in their journals.
So the table is bounded by the outputs of that time. The row with an empty name has the time limit of deleted
outputs: a step of a run that began before must not publish (`may_be_forgotten`).
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

if TYPE_CHECKING:
    from coranto_consumers.stores.sql import SqlStore

DEFAULT_KEEP_DAYS: Final = 90
_DAY_SECONDS: Final = 86_400
_MARGIN_SECONDS: Final = _DAY_SECONDS
"""The maximum clock skew between the processes that begin runs and write outputs."""
_HORIZON: Final = ""
"""The name of the row with the time limit of deleted outputs."""

OUTPUTS = Table(
    "coranto_outputs",
    MetaData(),
    Column("output", String(255), primary_key=True),
    Column("asset", String(255), nullable=False),
    Column("messages", Integer, nullable=False),
    Column("intents", Text, nullable=False),
    Column("committed", BigInteger, nullable=False),  # Seconds since 1970.
    Column("acknowledged", Boolean, nullable=False),
    Index("coranto_outputs_committed", "committed"),
)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CommittedOutput:
    """A committed output: its number of messages, and the acknowledgements that commit them, by journal."""

    messages: int
    intents: Mapping[str, bytes]


class OutputLog:
    """The outputs in one store. Each is committed once, by one of the attempts to write it."""

    def __init__(
        self, store: SqlStore, *, keep_days: int = DEFAULT_KEEP_DAYS, wall: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._keep_seconds = keep_days * _DAY_SECONDS
        self._wall = wall
        store.create_tables(OUTPUTS)

    def find(self, output: str) -> CommittedOutput | None:
        """Return a committed output, or None. Raises SqlStoreError."""
        try:
            with self._store.engine.connect() as connection:
                row = connection.execute(
                    select(OUTPUTS.c.messages, OUTPUTS.c.intents).where(OUTPUTS.c.output == output)
                ).one_or_none()
        except SQLAlchemyError as error:
            raise self._store.failure("outputs could not be read", error) from error
        if row is None:
            return None
        intents = {journal: base64.b64decode(content) for journal, content in json.loads(row.intents).items()}
        return CommittedOutput(row.messages, intents)

    def may_be_forgotten(self, began: float) -> bool:
        """Return True if outputs of runs that began at this time (Unix seconds) may have been deleted from the log.

        Raises SqlStoreError.
        """
        try:
            with self._store.engine.connect() as connection:
                query = select(OUTPUTS.c.committed).where(OUTPUTS.c.output == _HORIZON)
                horizon = connection.execute(query).scalar_one_or_none()
        except SQLAlchemyError as error:
            raise self._store.failure("outputs could not be read", error) from error
        return horizon is not None and began < horizon + _MARGIN_SECONDS

    def commit(self, output: str, asset: str, made: CommittedOutput) -> bool:
        """Commit an output. Return False if another attempt has already committed it.

        Raises SqlStoreError if the outcome is unknown. Then retry: `find` returns the output if it was committed.
        """
        intents = {journal: base64.b64encode(content).decode() for journal, content in made.intents.items()}
        values = {
            "output": output,
            "asset": asset,
            "messages": made.messages,
            "intents": json.dumps(intents),
            "committed": int(self._wall()),
            "acknowledged": False,
        }
        try:
            with self._store.engine.begin() as connection:
                connection.execute(insert(OUTPUTS).values(**values))
        except IntegrityError:
            return False
        except SQLAlchemyError as error:
            raise self._store.failure("an output could not be committed", error) from error
        return True

    def acknowledge(self, output: str) -> None:
        """Record that the acknowledgements of an output are in their journals, and delete old outputs.

        A failure is only logged: an unrecorded output stays in the log, and the next output deletes old ones.
        """
        try:
            with self._store.engine.begin() as connection:
                connection.execute(update(OUTPUTS).where(OUTPUTS.c.output == output).values(acknowledged=True))
            with self._store.engine.begin() as connection:
                _forget(connection, int(self._wall() - self._keep_seconds))
        except SQLAlchemyError as error:
            failure = self._store.failure("an output could not be noted as acknowledged", error)
            _log.warning("outputs.not_pruned", output=output, error=str(failure))


def _forget(connection: Connection, horizon: int) -> None:
    """Delete the acknowledged outputs that were committed before `horizon`, and record `horizon`."""
    old = (OUTPUTS.c.committed < horizon, OUTPUTS.c.acknowledged.is_(True), OUTPUTS.c.output != _HORIZON)
    if connection.execute(select(OUTPUTS.c.output).where(*old).limit(1)).first() is None:
        return
    is_horizon = OUTPUTS.c.output == _HORIZON
    if not connection.execute(select(OUTPUTS.c.output).where(is_horizon)).first():
        row = {"output": _HORIZON, "asset": "", "messages": 0, "intents": "{}", "acknowledged": True}
        connection.execute(insert(OUTPUTS).values(**row, committed=horizon))
    connection.execute(update(OUTPUTS).where(is_horizon, OUTPUTS.c.committed < horizon).values(committed=horizon))
    connection.execute(delete(OUTPUTS).where(*old))
