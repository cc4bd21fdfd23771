"""Hints in etcd, in Gazette's layout, with the log's owner.

These keys are below the hint prefix of a shard's spec:

* `<shard>.primary`: the hints that the owner stored last,
* `<shard>.backup.0` to `.backup.N-1`: the hints that owners recovered when they took over, the latest first. Each of
  them led to a store that was opened, so they can serve for disaster recovery,
* `<shard>.author`: the `Ownership` of the log. Only Coranto has this key; Gazette ignores it.

Writes are guarded by the process's assignment to the shard: a process that lost the assignment changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import structlog

from coranto.coordination.etcd import (
    Compare,
    CompareTarget,
    Coordinator,
    Delete,
    KeyValue,
    Op,
    Put,
    absent,
    unmodified,
)
from coranto.coordination.layout import FOLDERS
from coranto.errors import CorruptData, Fenced, InvalidInput, TxnOutcomeUnknown, Unavailable
from coranto_consumers.recoverylog.authority import Handoff, Ownership, not_owner_error
from coranto_consumers.recoverylog.hints import Hints
from coranto_consumers.recoverylog.operations import Author

_ATTEMPTS = 5

_log = structlog.get_logger(__name__)


def require_no_cluster_keys(prefix: str) -> None:
    """Raise InvalidInput for a hint prefix that holds keys of a cluster of brokers or consumers."""
    if found := sorted(FOLDERS.intersection(prefix.split("/"))):
        raise InvalidInput(
            f"{prefix!r} leads into {found[0]!r}, where a cluster keeps its specs, processes and assignments: choose a "
            "place of its own, such as /gazette/hints/app",
            field="hint_prefix",
        )


@dataclass(frozen=True, slots=True)
class HintKeys:
    """The keys of one shard. `prefix` is the hint prefix of its spec: absolute, without a trailing slash."""

    prefix: str
    shard: str
    backups: int = 2

    def __post_init__(self) -> None:
        if not self.prefix.startswith("/") or self.prefix.endswith("/") or "//" in self.prefix:
            raise InvalidInput(
                f"{self.prefix!r} is not an absolute path without a trailing slash; write it as /hints/app",
                field="hint_prefix",
            )
        require_no_cluster_keys(self.prefix)
        if not self.shard:
            raise InvalidInput("hints are kept for a shard; give its id", field="shard")
        if self.backups < 0:
            raise InvalidInput(f"{self.backups} is negative; give 0 or more", field="hint_backups")

    @property
    def primary(self) -> str:
        return f"{self.prefix}/{self.shard}.primary"

    @property
    def backup(self) -> list[str]:
        """The keys of backups, the latest first."""
        return [f"{self.prefix}/{self.shard}.backup.{number}" for number in range(self.backups)]

    @property
    def author(self) -> str:
        return f"{self.prefix}/{self.shard}.author"


@dataclass(frozen=True, slots=True)
class StoredHints:
    """All hints of a shard. None for missing hints."""

    primary: Hints | None
    backups: tuple[Hints | None, ...]

    def pick(self, log: str) -> Hints:
        """Return the hints to recover `log` from: the primary hints, else the latest backup, else the whole log."""
        return next((hints for hints in (self.primary, *self.backups) if hints is not None), Hints(log))

    @property
    def present(self) -> list[Hints]:
        """The hints that are not missing."""
        return [hints for hints in (self.primary, *self.backups) if hints is not None]


class HintStore:
    """Reads and writes the hints of a shard. `guard` is this process's assignment; None when nothing is assigned.

    Each change is one etcd transaction. After a cancelled call, the change may or may not have been applied.
    """

    def __init__(self, coordinator: Coordinator, keys: HintKeys, *, guard: KeyValue | None = None) -> None:
        self._coordinator = coordinator
        self.keys = keys
        self._guard = _guard(guard)

    def reassigned(self, guard: KeyValue) -> None:
        """Use another assignment of the process, for example after a promotion."""
        self._guard = _guard(guard)

    async def fetch(self) -> StoredHints:
        """Return all hints, as of one etcd revision. Raises CorruptData for hints that cannot be read."""
        found = await self._read([self.keys.primary, *self.keys.backup])
        decoded = [None if kv is None else self._decode(kv) for kv in found]
        return StoredHints(decoded[0], tuple(decoded[1:]))

    async def store_recorded(self, hints: Hints) -> bool:
        """Store the owner's hints as the primary hints. Return True if they were stored.

        They are not stored while etcd is unreachable, which is harmless. Hints without files are not stored either:
        they lead to the log's beginning, which may be pruned, and the earlier hints still lead to the log's end.
        Raises Fenced when the process has lost its assignment.
        """
        if not hints.live_fnodes and not hints.properties:
            return False
        try:
            result = await self._coordinator.txn(self._guard, [Put(self.keys.primary, hints.to_json())])
        except (Unavailable, TxnOutcomeUnknown) as error:
            _log.warning("hints.not_stored", key=self.keys.primary, reason=str(error))
            return False
        if not result.succeeded:
            raise self._unassigned()
        return True

    async def store_recovered(self, hints: Hints) -> None:
        """Store the recovered hints as the latest backup. Earlier backups shift by one, and the oldest is dropped.

        Call it once the store has been opened. Hints without files are not stored. Raises Fenced when the process has
        lost its assignment.
        """
        if not hints.live_fnodes and not hints.properties:
            return
        for attempt in range(_ATTEMPTS):
            present = await self._read(self.keys.backup)
            compares, ops = self._rotation(hints.to_json(), present)
            try:
                result = await self._coordinator.txn([*self._guard, *compares], ops)
            except TxnOutcomeUnknown:
                if attempt + 1 == _ATTEMPTS:
                    raise
                continue
            if result.succeeded:
                return
            await self._check_assigned()
        raise Unavailable(f"{self.keys.primary}: the backups of hints changed {_ATTEMPTS} times in a row; try again")

    def _rotation(self, value: bytes, present: Sequence[KeyValue | None]) -> tuple[list[Compare], list[Op]]:
        compares: list[Compare] = []
        ops: list[Op] = []
        for key, kv in zip(self.keys.backup, present, strict=True):
            if kv is not None and kv.value == value:
                break  # Already stored, for example by a transaction whose outcome was unknown.
            ops.append(Put(key, value))
            if kv is None:
                compares.append(absent(key))
                break
            compares.append(unmodified(kv))
            value = kv.value
        return compares, ops

    async def remove(self) -> None:
        """Delete all keys of the shard, its owner included. For a shard that is deleted."""
        keys = [self.keys.primary, *self.keys.backup, self.keys.author]
        await self._coordinator.txn([], [Delete(key) for key in keys])

    async def _read(self, keys: list[str]) -> tuple[KeyValue | None, ...]:
        if not keys:
            return ()
        # A transaction that cannot succeed reads several keys at one revision.
        never = Compare(self.keys.primary, CompareTarget.VERSION, -1)
        return (await self._coordinator.txn([never], [], otherwise=keys)).found

    def _decode(self, kv: KeyValue) -> Hints:
        try:
            return Hints.from_bytes(kv.value)
        except CorruptData as error:
            raise CorruptData(f"{kv.key}: {error}") from error

    async def _check_assigned(self) -> None:
        if self._guard and not (await self._coordinator.txn(self._guard, [])).succeeded:
            raise self._unassigned()

    def _unassigned(self) -> Fenced:
        return Fenced(f"shard {self.keys.shard} is not assigned to this process any more; stop it")


class EtcdAuthority:
    """The `Authority` of a shard's log: a key next to its hints."""

    def __init__(self, coordinator: Coordinator, keys: HintKeys, log: str, *, guard: KeyValue | None = None) -> None:
        self._coordinator = coordinator
        self._keys = keys
        self._log = log
        self._guard = _guard(guard)

    def reassigned(self, guard: KeyValue) -> None:
        """Use another assignment of the process, for example after a promotion."""
        self._guard = _guard(guard)

    async def claim(self, author: Author) -> None:
        for attempt in range(_ATTEMPTS):
            _, kv = await self._coordinator.get(self._keys.author)
            # The last owner's handoff is kept until ours is in the log, because the player checks it.
            last = None if kv is None else _decode(kv).handoff
            expected = absent(self._keys.author) if kv is None else unmodified(kv)
            try:
                result = await self._coordinator.txn(
                    [*self._guard, expected], [Put(self._keys.author, _encode(Ownership(author, last)))]
                )
            except TxnOutcomeUnknown:
                if attempt + 1 == _ATTEMPTS:
                    raise
                continue
            if result.succeeded:
                return
            if self._guard and not (await self._coordinator.txn(self._guard, [])).succeeded:
                raise Fenced(
                    f"shard {self._keys.shard} is not assigned to this process any more, so it does not take over "
                    f"{self._log}; stop it"
                )
        raise Unavailable(f"{self._keys.author} changed {_ATTEMPTS} times in a row; try again")

    async def confirm(self, handoff: Handoff) -> None:
        for attempt in range(_ATTEMPTS):
            _, kv = await self._coordinator.get(self._keys.author)
            owner = None if kv is None else _decode(kv)
            if kv is None or owner is None or owner.author != handoff.author:
                raise not_owner_error(self._log, handoff.author, owner)
            if owner.handoff == handoff:
                return
            try:
                put = Put(self._keys.author, _encode(Ownership(handoff.author, handoff)))
                await self._coordinator.txn([unmodified(kv)], [put])
            except TxnOutcomeUnknown:
                if attempt + 1 == _ATTEMPTS:
                    raise
        raise Unavailable(f"{self._keys.author} changed {_ATTEMPTS} times in a row; try again")

    async def current(self) -> Ownership | None:
        _, kv = await self._coordinator.get(self._keys.author)
        return None if kv is None else _decode(kv)


def _guard(assignment: KeyValue | None) -> list[Compare]:
    if assignment is None:
        return []
    return [Compare(assignment.key, CompareTarget.CREATE_REVISION, assignment.create_revision)]


def _encode(ownership: Ownership) -> bytes:
    handoff = None if ownership.handoff is None else asdict(ownership.handoff)
    return json.dumps({"author": ownership.author, "handoff": handoff}, separators=(",", ":")).encode()


def _decode(kv: KeyValue) -> Ownership:
    try:
        document = json.loads(kv.value)
        handoff = document["handoff"]
        return Ownership(Author(int(document["author"])), None if handoff is None else Handoff(**handoff))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptData(
            f"{kv.key} does not name the owner of a recovery log: {error}; "
            "delete the key once no process writes to the log"
        ) from error
