"""What a running consumer tells, and where it can be interrupted."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection


class Step(enum.Enum):
    """Steps of a consumer, in order. The last ones repeat for each transaction."""

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
    """Called by a consumer as it goes. An exception from a hook ends the consumer there, as a crash would."""

    def reached(self, step: Step) -> None:
        """The consumer has just completed `step`."""

    def commit(self, connection: Connection) -> None:
        """Commits the SQL transaction."""
        connection.commit()


@dataclass(frozen=True, slots=True)
class ConsumeReport:
    """What a run has done so far."""

    transactions: int
    messages: int
    """Committed content messages that were processed."""
    rows: int
    """Messages that were read, with duplicates, acknowledgements and what is pending or rolled back."""
    published: int
    """Messages that were published and acknowledged."""
    offsets: Mapping[str, int]
    """Offsets through which each source journal is processed, as committed."""
    heads: Mapping[str, int]
    """Write heads of the source journals: while running, those to catch up with; at the end, the latest."""
    replayed_intents: int
    """Journals to which acknowledgements of the restored checkpoint were appended again."""
    fence: int

    @property
    def lag_bytes(self) -> int:
        """Bytes of content up to `heads` that are not processed."""
        return sum(max(0, head - self.offsets.get(journal, 0)) for journal, head in self.heads.items())
