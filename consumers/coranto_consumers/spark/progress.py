"""The progress of a running consumer, and hooks that can interrupt it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection

from coranto_consumers.spark.losses import LostContent


class Step(enum.Enum):
    """The steps of a consumer, in order. Those from PLANNED on repeat for each transaction."""

    FENCED = "the fence is raised and the checkpoint restored"
    RECOVERED = "the checkpoint's acknowledgements are appended again, and stale staged rows are deleted"
    PLANNED = "the transaction's ranges are planned"
    SEQUENCED = "its messages are read, and those that are committed are known"
    STAGED = "its rows are staged"
    PUBLISHED = "its messages are in their journals, pending"
    MERGED = "staged rows are merged, in a SQL transaction that is still open"
    COMMITTED = "the SQL transaction has committed"
    ACKNOWLEDGED = "acknowledgements are appended: published messages are committed"


class Hooks:
    """Hooks that a consumer calls while it runs. An exception from a hook ends the consumer there, as a crash would."""

    def reached(self, step: Step) -> None:
        """Called when the consumer has just completed `step`."""

    def commit(self, connection: Connection) -> None:
        """Commit the SQL transaction."""
        connection.commit()


@dataclass(frozen=True, slots=True)
class ConsumeReport:
    """The progress of a run so far."""

    transactions: int
    messages: int
    """Committed content messages that were processed."""
    rows: int
    """Messages that were read, including duplicates, acknowledgements, and pending or rolled back messages."""
    published: int
    """Messages that were published and acknowledged."""
    offsets: Mapping[str, int]
    """Offsets through which each source journal is processed, as in the committed checkpoint."""
    heads: Mapping[str, int]
    """Write heads of the source journals. During a run: the heads to catch up with. At its end: the latest heads."""
    replayed_intents: int
    """The number of journals to which acknowledgements of the restored checkpoint were appended again."""
    fence: int
    misfits: int = 0
    """Messages among the processed that do not fit the application's columns: dead letters, or nulls."""
    lost: tuple[LostContent, ...] = ()
    """Content of the sources that is gone, and was passed by."""

    @property
    def lag_bytes(self) -> int:
        """The bytes of content up to `heads` that are not processed yet."""
        return sum(max(0, head - self.offsets.get(journal, 0)) for journal, head in self.heads.items())
