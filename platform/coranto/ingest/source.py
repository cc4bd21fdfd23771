"""The interface of sources, where ingests read rows.

A source has named *splits*, such as the partitions of a topic, the files of a folder, or the log of a database. Each
split has positions that only increase. A position is any JSON value; only the source knows its order. A source returns
*reads*: rows of one split that follow a position, and the position after them. From the same position it returns the
same rows again, in the same order. Rows that the other system has removed are lost, and a read counts them.

The engine commits a read as a whole, in one transaction of the stream together with the position. So rows that must not
be divided, such as a transaction of a database or the body of a request, belong in one read.

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
"""The positions of splits, by name. A missing split is read from its beginning."""


class SourceRow(NamedTuple):
    """A row that becomes one event.

    `key` is the routing key. `fields` are the event's fields, and `text` is their JSON without a newline, if the source
    has it. `meta` is JSON, without braces, of further fields for `_meta`: the origin of the row. A deletion may lack
    fields that its message type requires.
    """

    key: str
    fields: Mapping[str, Any]
    text: bytes | None = None
    meta: bytes = b""
    is_deletion: bool = False


class Poison(NamedTuple):
    """A row that cannot become an event. `place` locates the row in its split, and `problem` is the reason."""

    place: str
    problem: str
    key: bytes | None = None
    value: bytes | None = None


class Read(NamedTuple):
    """Rows of one split, and the position after them. `lost` is the number of rows before them that are gone.

    The engine iterates over the rows before it calls the source again. So a source can make them lazily, which saves
    memory and garbage collection.
    """

    split: str
    rows: Iterable[SourceRow | Poison]
    position: Position
    lost: int = 0


class RowSource(Protocol):
    """A source of rows. One task uses it. After `close` it may be opened again, at other positions."""

    async def open(self, after: Positions, *, follow: bool) -> str:
        """Start reading after positions. Returns the identity of the other system.

        Without `follow`, the source ends after the rows that exist now. Raises InvalidInput for invalid settings,
        SourceChanged if the existing rows do not match the positions, and Unavailable.
        """
        ...

    async def read(self, max_bytes: int) -> Sequence[Read] | None:
        """Return the available reads, of about `max_bytes` bytes; None at the end of the source.

        Waits a fraction of a second for a read, and returns no reads if none arrives. Raises the errors of `open`.
        """
        ...

    async def fields(self) -> tuple[TypeField, ...] | None:
        """Return fields for all rows that were read, or None if the rows have no schema.

        Returns the same tuple until there are more fields. Raises InvalidInput for a schema that fields cannot
        represent, and Unavailable.
        """
        ...

    async def confirm(self) -> None:
        """Check the source after a batch was read and before it is committed. Raises SourceChanged and Unavailable."""
        ...

    async def committed(self, positions: Positions) -> None:
        """Record that everything before these positions is committed to the stream."""
        ...

    async def lag(self, positions: Positions) -> Mapping[str, int]:
        """Return the rows or bytes of each split after its position. Works without `open`.

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
