"""The interface of sources: what an ingest reads rows from.

A source has named *splits*, such as the partitions of a topic, the files of a folder, or the log of a database. Each
split has positions that only increase. A position is any JSON value; only the source knows its order. A source gives
*reads*: rows of one split that follow a position, and the position after them. From the same position it gives the same
rows again, in the same order. Rows that the other system has removed are lost, and a read counts them.

The engine commits a read as a whole, in one transaction of the stream together with the position. So a read is the
place for what must not be divided, such as a transaction of a database or the body of a request.

The engine asks the source for the next read of any split, not for each split in turn, because there may be thousands of
splits, and rows of partitions, replication connections or requests arrive in their own order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from coranto.types.kinds import TypeField

Position: TypeAlias = Any
"""A position in a split: a JSON value."""
Positions: TypeAlias = Mapping[str, Position]
"""The positions of splits, by name. A split that is not there is read from its beginning."""


class SourceRow(NamedTuple):
    """A row that becomes one event.

    `key` is the routing key. `fields` are the event's fields, and `text` is their JSON without a newline, if the source
    has it. `meta` is JSON of more fields for `_meta`, without braces: where the row comes from. A deletion may lack
    fields that its message type demands.
    """

    key: str
    fields: Mapping[str, Any]
    text: bytes | None = None
    meta: bytes = b""
    is_deletion: bool = False


class Poison(NamedTuple):
    """A row that cannot become an event. `place` names it within its split, and `problem` says why."""

    place: str
    problem: str
    key: bytes | None = None
    value: bytes | None = None


class Read(NamedTuple):
    """Rows of one split, and the position after them. `lost` is the number of rows before them that are gone.

    The rows are read before the next call of the source. So a source can make each as it is read: rows that are held
    together take memory, and time of Python's garbage collector.
    """

    split: str
    rows: Iterable[SourceRow | Poison]
    position: Position
    lost: int = 0


class RowSource(Protocol):
    """A source of rows. One task uses it. After `close` it may be opened again, at other positions."""

    async def open(self, after: Positions, *, follow: bool) -> str:
        """Begin to read after positions. Returns the identity of the other system.

        Unless it is to `follow`, it reads the rows that are there now. Raises InvalidInput for settings that cannot
        work, SourceChanged if the rows that are there do not fit the positions, and Unavailable.
        """
        ...

    async def read(self, max_bytes: int) -> Sequence[Read] | None:
        """Return the reads that have come, of about `max_bytes` bytes. None means that no more will come.

        Waits a part of a second for something, and returns nothing if nothing has come. Raises as `open` does.
        """
        ...

    async def fields(self) -> tuple[TypeField, ...] | None:
        """Return the fields that hold all rows that were read, or None if the rows have no schema.

        The same tuple is returned until there are more. Raises InvalidInput for a schema that no fields hold, and
        Unavailable.
        """
        ...

    async def confirm(self) -> None:
        """Check the source after a batch was read, and before it is committed. Raises SourceChanged and Unavailable."""
        ...

    async def committed(self, positions: Positions) -> None:
        """Note that everything before these positions is committed to the stream."""
        ...

    async def lag(self, positions: Positions) -> Mapping[str, int]:
        """Return how much of each split is behind a position, in rows or bytes. Works without `open`.

        Raises Unavailable.
        """
        ...

    async def retained(self) -> int | None:
        """Return the bytes that the other system keeps for this ingest. Works without `open`.

        None if the other system keeps rows whether they are read or not. Raises Unavailable.
        """
        ...

    async def close(self) -> None:
        """Stop reading."""
        ...
