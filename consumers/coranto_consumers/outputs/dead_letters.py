"""Dead letters: messages that do not fit an application, kept with its outputs in the same transaction.

SQLAlchemy is imported only to make a table: options of consumers are read where there is no store.
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
    """The first one ends the run, before anything of it is committed."""
    NULLS = "nulls"
    """The application gets them, with nulls for what does not fit, or is rejected. Where that must not be null, it is
    as with FAIL."""
    DEAD_LETTERS = "dead letters"
    """The application does not get them. The transaction keeps them as they are."""


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The place of dead letters: a table, or journals.

    A table has the columns `journal`, `offset` and `line` (bytes), as `dead_letter_table` makes it. Journals are a
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
    """Return the policy that an option of a consumer means. Raises InvalidInput if it does not say where they go."""
    if misfits is MisfitPolicy.DEAD_LETTERS:
        raise InvalidInput("say where: DeadLetters(table=…) or DeadLetters(journals=…)", field="misfits")
    return MisfitPolicy.DEAD_LETTERS if isinstance(misfits, DeadLetters) else misfits


def dead_letter_table(name: str, metadata: MetaData | None = None, *, by_window: bool = False) -> Table:
    """Return the definition of a table for dead letters; `by_window`, for a `WindowConsumer`'s."""
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
