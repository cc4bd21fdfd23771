"""Dead letters: messages that do not fit an application, stored in the transaction of its outputs.

SQLAlchemy is imported only to define a table: consumer options are also read in processes without a store.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from coranto.errors import InvalidInput

if TYPE_CHECKING:
    from sqlalchemy import MetaData, Table

COLUMNS: Final = ("journal", "offset", "line")


class MisfitPolicy(enum.Enum):
    """A consumer's handling of messages that do not fit its application's columns, or whose UUID cannot be read, and
    of messages whose rows the store rejects.
    """

    FAIL = "fail"
    """The first misfit ends the run. Its transaction is not committed."""
    NULLS = "nulls"
    """The application gets them, with nulls for values that do not fit or are rejected. Like FAIL if a column must not
    be null."""
    DEAD_LETTERS = "dead letters"
    """The application does not get them. The transaction stores them unchanged."""


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The destination of dead letters: a table, or journals.

    A table has the columns `journal`, `offset` and `line` (bytes), as in `dead_letter_table`. Journals are a
    label selector or a list of names, and get messages `{"journal": …, "offset": …, "line": …}`, with the line in
    base64.
    """

    table: Table | None = None
    journals: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        if (self.table is None) == (not self.journals):
            raise InvalidInput("name either a table or journals", field="dead letters")
        if self.table is not None and (missing := sorted(set(COLUMNS) - set(self.table.c.keys()))):
            raise InvalidInput(
                f"table {self.table.name} has no column {missing[0]!r}; dead_letter_table makes one that has all",
                field="dead letters",
            )


def policy_of(misfits: MisfitPolicy | DeadLetters) -> MisfitPolicy:
    """Return the policy in a consumer's option. Raises InvalidInput for dead letters without a destination."""
    if misfits is MisfitPolicy.DEAD_LETTERS:
        raise InvalidInput("say where: DeadLetters(table=…) or DeadLetters(journals=…)", field="misfits")
    return MisfitPolicy.DEAD_LETTERS if isinstance(misfits, DeadLetters) else misfits


def dead_letter_table(name: str, metadata: MetaData | None = None, *, by_window: bool = False) -> Table:
    """Return the definition of a table for dead letters. A `WindowConsumer` needs `by_window`."""
    from sqlalchemy import BigInteger, Column, LargeBinary, MetaData, String, Table

    from coranto_consumers.stores.windows import WINDOW_COLUMN

    return Table(
        name,
        metadata if metadata is not None else MetaData(),
        Column("journal", String(512), primary_key=True),
        Column("offset", BigInteger, primary_key=True),
        Column("line", LargeBinary, nullable=False),
        *([Column(WINDOW_COLUMN, BigInteger, nullable=False)] if by_window else []),
    )
