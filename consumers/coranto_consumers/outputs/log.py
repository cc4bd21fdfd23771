"""The record of committed outputs in a SQL store, by which an output counts once, however often its step is tried."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import Column, Integer, MetaData, String, Table, Text, delete, insert, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

if TYPE_CHECKING:
    from coranto_consumers.stores.sql import SqlStore

OUTPUTS = Table(
    "coranto_outputs",
    MetaData(),
    Column("output", String(255), primary_key=True),
    Column("asset", String(255), nullable=False),
    Column("messages", Integer, nullable=False),
    Column("intents", Text, nullable=False),
)


@dataclass(frozen=True, slots=True)
class CommittedOutput:
    """An output that counts: its number of messages, and the acknowledgements that make them visible, by journal."""

    messages: int
    intents: Mapping[str, bytes]


class OutputLog:
    """The outputs in one store. Each is committed once, by one of the attempts to write it."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        store.create_tables(OUTPUTS)

    def find(self, output: str) -> CommittedOutput | None:
        """Return a committed output. Raises SqlStoreError."""
        try:
            with self._store.engine.connect() as connection:
                row = connection.execute(select(OUTPUTS).where(OUTPUTS.c.output == output)).one_or_none()
        except SQLAlchemyError as error:
            raise self._store.failure("outputs could not be read", error) from error
        if row is None:
            return None
        intents = {journal: base64.b64decode(content) for journal, content in json.loads(row.intents).items()}
        return CommittedOutput(row.messages, intents)

    def commit(self, output: str, asset: str, made: CommittedOutput) -> bool:
        """Commit an output, and return whether this attempt did. Another one may have been quicker.

        If the outcome is unknown, SqlStoreError is raised; try the output again then, and it is found if it committed.
        """
        intents = {journal: base64.b64encode(content).decode() for journal, content in made.intents.items()}
        values = {"output": output, "asset": asset, "messages": made.messages, "intents": json.dumps(intents)}
        try:
            with self._store.engine.begin() as connection:
                connection.execute(insert(OUTPUTS).values(**values))
        except IntegrityError:
            return False
        except SQLAlchemyError as error:
            raise self._store.failure("an output could not be committed", error) from error
        return True

    def forget(self, output: str) -> None:
        """Forget an output, so that it can be written anew. Its messages stay."""
        with self._store.engine.begin() as connection:
            connection.execute(delete(OUTPUTS).where(OUTPUTS.c.output == output))
