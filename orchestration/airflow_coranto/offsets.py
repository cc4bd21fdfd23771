"""Offsets of journals as a trigger knows them, and the events that it makes of them. Knows no Airflow."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from coranto.errors import InvalidInput

if TYPE_CHECKING:
    from coranto.client.positions import JournalPosition

MARK: Final = "coranto_watcher"
"""The key of an event's payload under which the name of its watcher's variable is."""
Kept = dict[str, list[int]]
"""Positions as they are kept: by journal, the etcd revision that created it and its head."""


def to_kept(positions: Mapping[str, JournalPosition]) -> Kept:
    """Return positions in the form in which they are kept."""
    return {journal: [at.create_revision, at.head] for journal, at in positions.items()}


def from_kept(kept: Mapping[str, Any]) -> dict[str, JournalPosition]:
    """Return positions from the form in which they are kept. Raises InvalidInput for anything else."""
    from coranto.client.positions import JournalPosition

    try:
        return {str(journal): JournalPosition(int(at[1]), int(at[0])) for journal, at in kept.items()}
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise InvalidInput(
            "these are no positions of journals; delete the variable, and the watcher begins at the present heads",
            field="positions",
        ) from error


def variable_name(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the name of the Airflow variable that keeps a watcher's positions.

    It is that of the watcher's own name, if it has one. Otherwise it depends on all arguments.
    """
    if name:
        return f"{MARK}.{name}"
    digest = hashlib.sha256(json.dumps(dict(arguments), sort_keys=True).encode()).hexdigest()[:12]
    return f"{MARK}.{re.sub(r'[^A-Za-z0-9._-]', '_', str(arguments.get('group', '')))}.{digest}"


def kept_positions(extra: Mapping[str, Any] | None) -> tuple[str, Kept] | None:
    """Return a watcher's variable and positions from the extra of an asset event; None for events of others.

    The variable is always that of a watcher, also if another program made the event.
    """
    payload = (extra or {}).get("payload")
    if not isinstance(payload, Mapping):
        return None
    variable, positions = payload.get(MARK), payload.get("positions")
    if not isinstance(variable, str) or not variable.startswith(f"{MARK}.") or not isinstance(positions, Mapping):
        return None
    kept = {str(journal): list(at) for journal, at in positions.items() if isinstance(at, list)}
    whole = len(kept) == len(positions) and all(
        len(at) == 2 and all(isinstance(number, int) for number in at) for at in kept.values()
    )
    return (variable, kept) if whole else None


def event_of(
    group: str, variable: str, before: Mapping[str, JournalPosition], now: Mapping[str, JournalPosition], grown: int
) -> dict[str, Any]:
    """Return the payload of the event that says that journals have grown from one vector of heads to another."""
    from coranto.client.positions import heads_of

    return {
        "group": group,
        "bytes": grown,
        "since": heads_of(before),
        "heads": heads_of(now),
        "positions": to_kept(now),
        MARK: variable,
    }
