"""Sources in columns: the framing of messages for Arrow batches, and the batches.

pyarrow takes half a second to import, so only processes that have such sources import it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coranto.errors import InvalidInput
from coranto.messages.framing import DEFAULT_UUID_POINTER, Framing, JsonLines
from coranto_consumers.outputs.dead_letters import DeadLetters, MisfitPolicy, policy_of

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Columns:
    """The framing of a source of JSON lines whose messages `Application.consume_batch` takes.

    Fields of messages become the columns of `schema`: missing ones are null, and other fields are left
    out. `pointer` locates UUIDs, as for `JsonLines`. `misfits` are messages that do not fit the columns, or whose
    UUID cannot be read. By default the first one fails the shard. `MisfitPolicy.NULLS` replaces misfit values by nulls.
    `DeadLetters` stores them unchanged, in the same transaction.
    """

    schema: pa.Schema
    pointer: str | None = DEFAULT_UUID_POINTER
    misfits: MisfitPolicy | DeadLetters = MisfitPolicy.FAIL
    lines: JsonLines = field(init=False)
    """The framing of the lines."""

    def __post_init__(self) -> None:
        if not len(self.schema):
            raise InvalidInput("the columns have no fields; name the messages' fields that you use", field="schema")
        names = self.schema.names
        if len(set(names)) != len(names):
            raise InvalidInput(f"a column is there twice among {', '.join(names)}; rename one", field="schema")
        policy = policy_of(self.misfits)
        if isinstance(self.misfits, DeadLetters) and isinstance(self.misfits.journals, str):
            raise InvalidInput(
                "name the journals of dead letters in a list: a shard does not list them", field="misfits"
            )
        lines = JsonLines(self.pointer, tolerant=policy is not MisfitPolicy.FAIL)
        object.__setattr__(self, "lines", lines)


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """Committed messages of one journal, in order of commit."""

    journal: str
    rows: pa.RecordBatch
    """The columns of the schema, and no others."""
    positions: pa.RecordBatch
    """For each row, the columns `offset` and `end` (where the message is in the journal), `producer`, `clock` and
    `flags` (see `coranto.messages.batches.POSITION`)."""

    def __len__(self) -> int:
        return int(self.rows.num_rows)


def framing_in(source: Framing[Any] | Columns) -> Framing[Any]:
    """Return the framing of the messages of a source, in columns or not."""
    return source.lines if isinstance(source, Columns) else source
