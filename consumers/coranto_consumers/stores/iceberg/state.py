"""The state of an owner, stored as a property of a table.

The commit that changes rows also sets the property. The state is not in the summary of a snapshot, because it would be
lost when snapshots expire, and the table's metadata would have a copy for each snapshot.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from pyiceberg.table import Table

from coranto.errors import CorruptData
from coranto.messages.checkpoints import Checkpoint
from coranto_consumers.stores.json_file import checkpoint_from_json, checkpoint_to_json

PREFIX: Final = "coranto.shard."
SWEPT_OWNERS: Final = 3
"""The number of earlier owners whose uncommitted files each new owner removes."""


class SnapshotId(NamedTuple):
    """A snapshot of a table, and its sequence number."""

    snapshot: int
    sequence: int


@dataclass(frozen=True, slots=True)
class ShardState:
    """A shard's state in a table. `snapshot` and `sequence` identify the snapshot that was committed with the state.

    `files` is the prefix of the names of the owner's files, and `committed` is the number of its last transaction.
    `left` has the names of files that earlier owners may have left behind. A name that ends with a slash is a folder.
    `last` is the folder of the last transaction with files. `tables` has each table's last snapshot with files.
    """

    fence: int = 0
    checkpoint: Checkpoint = Checkpoint()  # noqa: RUF009
    snapshot: int = 0
    sequence: int = 0
    files: str = ""
    committed: int = 0
    left: tuple[str, ...] = ()
    last: str = ""
    tables: Mapping[str, SnapshotId] = field(default_factory=dict)

    @property
    def uncommitted(self) -> tuple[str, ...]:
        """The names of files that may exist, and can never be committed after a later owner has raised the fence."""
        own = (file_name(self.files, self.committed + 1),) if self.files else ()
        return (*self.left, *own)[-SWEPT_OWNERS:]


def file_name(prefix: str, number: int) -> str:
    """Return the name of an owner's folder for a transaction, or of its file: earlier versions wrote single files."""
    return f"{prefix}{number}/" if prefix.endswith("/") else f"{prefix}-{number}.parquet"


def digest_of(shard: str) -> str:
    """Return a digest of a shard's name, for names of properties and files."""
    return hashlib.sha256(shard.encode()).hexdigest()[:16]


def key_of(shard: str) -> str:
    """Return the name of the property with a shard's state."""
    return PREFIX + digest_of(shard)


def encode(shard: str, state: ShardState) -> str:
    """Return the property value for a state."""
    return json.dumps(
        {
            "shard": shard,
            "fence": state.fence,
            "snapshot": state.snapshot,
            "sequence": state.sequence,
            "checkpoint": checkpoint_to_json(state.checkpoint),
            "files": state.files,
            "committed": state.committed,
            "left": list(state.left),
            "last": state.last,
            "tables": {name: list(each) for name, each in state.tables.items()},
        },
        separators=(",", ":"),
    )


def names_in(table: Table) -> set[str]:
    """Return the names of the shards with a readable state in a table."""
    found = set()
    for key, value in table.properties.items():
        if key.startswith(PREFIX):
            try:
                found.add(str(json.loads(value)["shard"]))
            except (ValueError, KeyError, TypeError):
                continue
    return found


def state_of(table: Table, shard: str) -> ShardState:
    """Return a shard's state in a table. Raises CorruptData if the table lost commits that the state includes."""
    value = table.properties.get(key_of(shard))
    if value is None:
        return ShardState()
    state = decode(shard, value)
    require_history(table, SnapshotId(state.snapshot, state.sequence), shard)
    return state


def decode(shard: str, value: str) -> ShardState:
    """Parse a property's value. Raises CorruptData."""
    try:
        document: Any = json.loads(value)
        return ShardState(
            int(document["fence"]),
            checkpoint_from_json(document["checkpoint"]),
            int(document["snapshot"]),
            int(document["sequence"]),
            str(document.get("files", "")),
            int(document.get("committed", 0)),
            tuple(map(str, document.get("left", ()))),
            str(document.get("last", "")),
            {str(name): SnapshotId(*map(int, each)) for name, each in document.get("tables", {}).items()},
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptData(f"{key_of(shard)} is not a shard's state: {error}; restore the table's properties") from error


def require_history(table: Table, known: SnapshotId, shard: str) -> None:
    """Raise CorruptData if a table was rolled back to before a snapshot that a shard's checkpoint includes."""
    if _was_rolled_back(table, known):
        raise CorruptData(
            f"{'.'.join(table.name())} was rolled back behind the checkpoint of {shard}, whose rows are gone. Roll it "
            f"forward to snapshot {known.snapshot} or one that follows it, or delete the property "
            f"{key_of(shard)} and the shard's rows to consume everything again"
        )


def _was_rolled_back(table: Table, known: SnapshotId) -> bool:
    """Return True if the table's history lacks a known snapshot. Returns False if the history has expired."""
    snapshot = table.current_snapshot()
    if snapshot is None:
        return True
    while snapshot.snapshot_id != known.snapshot:
        if (snapshot.sequence_number or 0) <= known.sequence:
            return True
        before = snapshot.parent_snapshot_id
        parent = table.snapshot_by_id(before) if before is not None else None
        if parent is None:  # The parent has expired: each sequence number has a snapshot.
            return False
        snapshot = parent
    return False
