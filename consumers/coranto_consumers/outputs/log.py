"""The record of committed outputs in a SQL store, which makes an output count once, however often its step is tried.

An output is remembered for `keep_days` after its commit. Then it is forgotten, if its acknowledgements are known
to be in their journals; otherwise it stays until its step is tried again. So the table is bounded by the outputs of
that time. The row with an empty name has the time limit of forgotten outputs: a step of a run that began
before must not publish (`may_be_forgotten`).
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
"""The clocks of the processes that begin runs and write outputs differ by less than this."""
_HORIZON: Final = ""
"""The name of the row that tells up to when outputs were forgotten."""

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
    """An output that counts: its number of messages, and the acknowledgements that make them visible, by journal."""

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
        """Return a committed output. Raises SqlStoreError."""
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
        """Return whether outputs of runs that began at this time (Unix seconds) may have been forgotten.

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
        """Commit an output, and return whether this attempt did. Another one may have been quicker.

        If the outcome is unknown, SqlStoreError is raised; try the output again then, and it is found if it committed.
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
        """Note that the acknowledgements of an output are in their journals, and forget outputs that are old.

        A failure is logged, and the next output does the same again.
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
    """Forget the outputs that were committed before `horizon`, and that they were."""
    old = (OUTPUTS.c.committed < horizon, OUTPUTS.c.acknowledged.is_(True), OUTPUTS.c.output != _HORIZON)
    if connection.execute(select(OUTPUTS.c.output).where(*old).limit(1)).first() is None:
        return
    is_horizon = OUTPUTS.c.output == _HORIZON
    if not connection.execute(select(OUTPUTS.c.output).where(is_horizon)).first():
        row = {"output": _HORIZON, "asset": "", "messages": 0, "intents": "{}", "acknowledged": True}
        connection.execute(insert(OUTPUTS).values(**row, committed=horizon))
    connection.execute(update(OUTPUTS).where(is_horizon, OUTPUTS.c.committed < horizon).values(committed=horizon))
    connection.execute(delete(OUTPUTS).where(*old))
