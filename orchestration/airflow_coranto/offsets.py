"""A trigger's positions in journals, and the events that it derives from them. Does not import Airflow."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from coranto.errors import InvalidInput, JournalRecreated
from coranto.journal_ids import is_same
from coranto.offsets import id_of, vector_of_json, vector_to_json

if TYPE_CHECKING:
    from coranto.client.positions import JournalPosition

MARK: Final = "coranto_watcher"
"""The key in an event's payload for the name of its watcher's variable."""
StoredPositions = dict[str, list[int | str]]
"""Stored positions by journal: the journal's create revision in etcd, its head, and its id if known."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """The last stored event of a watcher, in its variable."""

    event: str
    """The event's id; before the first event, an id of the initial state."""
    positions: StoredPositions
    """The positions after the event."""
    since: Mapping[str, int] = field(default_factory=dict)
    """The offsets where the event's new content begins."""
    grown: int = 0
    """The number of new bytes."""

    def to_json(self) -> str:
        """Return the text of the variable."""
        return json.dumps(
            {
                "event": self.event,
                "positions": self.positions,
                "since": vector_to_json(self.since),
                "bytes": self.grown,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> StoredEvent:
        """Parse the text of a variable. Early versions stored only the positions. Raises InvalidInput."""
        try:
            stored = json.loads(text)
            early = not isinstance(stored.get("positions"), dict)
            positions = to_stored(from_stored(stored if early else stored["positions"]))
            if early:
                return cls("", positions)
            since = vector_of_json(stored["since"], "since")
            return cls(str(stored["event"]), positions, since, int(stored["bytes"]))
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise InvalidInput(
                "this is not a watcher's state; delete the variable, and the watcher begins at the current heads",
                field="positions",
            ) from error


def to_stored(positions: Mapping[str, JournalPosition]) -> StoredPositions:
    """Return positions in their stored form."""
    return {journal: at.json_value for journal, at in positions.items()}


def from_stored(stored: Mapping[str, Any]) -> dict[str, JournalPosition]:
    """Return positions from their stored form. Raises InvalidInput."""
    from coranto.client.positions import JournalPosition

    try:
        return {str(journal): JournalPosition.from_json(at) for journal, at in stored.items()}
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise InvalidInput("these are not positions of journals", field="positions") from error


def variable_name(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the name of the Airflow variable that keeps a watcher's positions.

    It contains the watcher's `name` if given. Otherwise it contains a hash of all arguments except `committed`, so that
    a watcher keeps its position when `committed` changes.
    """
    if name:
        return f"{MARK}.{name}"
    deciding = {key: value for key, value in arguments.items() if key != "committed"}
    digest = hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:12]
    return f"{MARK}.{re.sub(r'[^A-Za-z0-9._-]', '_', str(arguments.get('group', '')))}.{digest}"


def watcher_payload(extra: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the payload of a watcher's new event from the extra of an asset event; None for other events.

    A reconciled event is not new. The variable's name always starts with `MARK`, so events of other programs cannot
    change other variables.
    """
    payload = (extra or {}).get("payload")
    if not isinstance(payload, Mapping):
        return None
    variable, positions = payload.get(MARK), payload.get("positions")
    if not isinstance(variable, str) or not variable.startswith(f"{MARK}.") or not isinstance(positions, Mapping):
        return None
    whole = all(
        isinstance(at, list) and [type(each) for each in at] in ([int, int], [int, int, str])
        for at in positions.values()
    )
    has_growth = _is_vector(payload.get("since")) and isinstance(payload.get("bytes"), int)
    is_new = isinstance(payload.get("event"), str) and isinstance(payload.get("after"), str)
    return payload if whole and has_growth and is_new else None


def _is_vector(raw: object) -> bool:
    try:
        vector_of_json(raw, "since")
    except InvalidInput:
        return False
    return True


def event_of(
    group: str,
    variable: str,
    after: str,
    before: Mapping[str, JournalPosition],
    now: Mapping[str, JournalPosition],
    grown: int,
) -> dict[str, Any]:
    """Return the payload of an event for journals that have grown from `before` to `now`, by `grown` bytes.

    `after` is the id of the watcher's previous event.
    """
    from coranto.client.positions import begins_of, heads_of

    return {
        "group": group,
        "bytes": grown,
        "since": vector_to_json(begins_of(now, before)),
        "heads": vector_to_json(heads_of(now)),
        "positions": to_stored(now),
        "event": new_event_id(),
        "after": after,
        MARK: variable,
    }


def positions_at(beyond: Mapping[str, int], now: Mapping[str, JournalPosition]) -> dict[str, JournalPosition]:
    """Return the positions at offsets, for the journals that exist."""
    from coranto.client.positions import JournalPosition

    return {
        journal: JournalPosition(at, now[journal].create_revision, id_of(at))
        for journal, at in beyond.items()
        if journal in now
    }


def require_same(beyond: Mapping[str, int], now: Mapping[str, JournalPosition]) -> None:
    """Raise JournalRecreated if an offset has the id of an earlier journal."""
    for journal, offset in beyond.items():
        at, known = now.get(journal), id_of(offset)
        if at is not None and not is_same(known, offset, at.journal_id):
            raise JournalRecreated(
                journal,
                offset,
                known,
                at.journal_id,
                at.head,
                "Remove it from `beyond` to wait beyond offset 0 of the present journal.",
            )


def growth(now: Mapping[str, JournalPosition], before: Mapping[str, JournalPosition]) -> dict[str, Any]:
    """Return the result of a wait: the heads, and the bytes that were added."""
    from coranto.client.positions import grown_bytes, heads_of

    return {"heads": vector_to_json(heads_of(now)), "bytes": grown_bytes(now, before)}


def new_event_id() -> str:
    """Return a unique event id."""
    return uuid.uuid4().hex


def reconcile_event(payload: Mapping[str, Any], stored: StoredEvent | None) -> tuple[dict[str, Any], StoredEvent]:
    """Return the payload to store after the last stored event, and the watcher's next state.

    An event's `after` is the last event that its watcher knows. If another event was stored since, two watchers are
    active, for example because a triggerer was wrongly considered dead. Then the event reports only growth beyond the
    stored event, possibly none, so that no byte is in two events.
    """
    event = payload["event"]
    if stored is not None and stored.event == event:  # Another asset has the same watcher.
        return _with(payload, stored), stored
    positions = {name: list(at) for name, at in payload["positions"].items()}
    announced = StoredEvent(event, positions, vector_of_json(payload["since"], "since"), payload["bytes"])
    if stored is None or stored.event == payload["after"]:
        return _with(payload, announced), announced
    from coranto.client.positions import begins_of, grown_bytes

    before, now = from_stored(stored.positions), from_stored(positions)
    latest = dict(before)
    for journal, at in now.items():
        known = before.get(journal, at)
        latest[journal] = max(at, known, key=lambda each: (each.create_revision, each.head))
    moved = StoredEvent(event, to_stored(latest), begins_of(latest, before), grown_bytes(latest, before))
    return _with(payload, moved), moved


def _with(payload: Mapping[str, Any], stored: StoredEvent) -> dict[str, Any]:
    """Return the payload to store. It has no `after`, which only new events have."""
    kept = {name: value for name, value in payload.items() if name != "after"}
    from coranto.client.positions import heads_of

    heads = vector_to_json(heads_of(from_stored(stored.positions)))
    positions = {"since": vector_to_json(stored.since), "heads": heads, "positions": stored.positions}
    return {**kept, **positions, "bytes": stored.grown}
