"""Dropping forks, and finding the forks of a journal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coranto import labels
from coranto.errors import EtcdTransactionFailed, InvalidInput, JournalNotFound
from coranto.forks.choosing import without_hold
from coranto.fragments.forks import Fork, fork_of
from coranto.wire import protocol_pb2 as pb

if TYPE_CHECKING:
    from coranto.client import JournalClient
    from coranto.client.values import JournalInfo

_ATTEMPTS = 8


async def drop_fork(client: JournalClient, name: str) -> None:
    """Delete a fork, and let its source's retention remove content that only the fork kept.

    Files of the fork's own fragments stay in their stores, as for any deleted journal. If the fork is already gone
    and a journal still keeps content for it, only that hold is removed. Raises JournalNotFound if there is neither, and
    InvalidInput for a journal that is not a fork or that has forks of its own.
    """
    await drop_forks(client, [name])


async def drop_forks(client: JournalClient, names: Sequence[str]) -> None:
    """Delete several forks as `drop_fork` does, in one change, including forks of each other. The limit is 60."""
    for attempt in range(_ATTEMPTS):
        changes = _changes(await _concerned(client, names), names)
        try:
            await client.apply(changes)
        except EtcdTransactionFailed:
            if attempt == _ATTEMPTS - 1:
                raise
            continue  # Another process changed one of them.
        return


async def drops_of(client: JournalClient, names: Sequence[str]) -> dict[str, list[pb.ApplyRequest.Change]]:
    """Return the changes that drop each of these forks; one fork's changes must be in one Apply."""
    infos = await _concerned(client, names)
    return {name: _changes(infos, [name]) for name in names}


async def _concerned(client: JournalClient, names: Sequence[str]) -> dict[str, JournalInfo]:
    """Return these journals, and all journals that keep content for any fork."""
    named = await client.list(labels.label_selector(include=[(labels.NAME, name) for name in names]))
    holding = await client.list(labels.label_selector(include={labels.FORK_HOLD: ""}))
    return {info.name: info for info in (*holding.journals, *named.journals)}


def _changes(infos: dict[str, JournalInfo], names: Sequence[str]) -> list[pb.ApplyRequest.Change]:
    dropped = set(names)
    released: dict[str, pb.JournalSpec] = {}
    changes: list[pb.ApplyRequest.Change] = []
    for name in sorted(dropped):
        holders = [info for info in infos.values() if _holds(info, name) and info.name not in dropped]
        info = infos.get(name)
        if info is None and not holders:
            raise JournalNotFound(f"fork {name}")
        if info is not None:
            if fork_of(info.spec) is None:
                raise InvalidInput(f"{name} is not a fork; delete it by `coranto journals edit`", field="name")
            changes.append(pb.ApplyRequest.Change(delete=name, expect_mod_revision=info.mod_revision))
        for holder in holders:
            released[holder.name] = without_hold(released.get(holder.name, holder.spec), name)
    for holder_name, spec in sorted(released.items()):
        changes.append(pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=infos[holder_name].mod_revision))
    return changes


def _holds(info: JournalInfo, name: str) -> bool:
    values = labels.values_of(info.spec.labels, labels.FORK_HOLD)
    return any(value.partition("/")[2] == name for value in values)


async def forks_of(client: JournalClient, source: str) -> tuple[Fork, ...]:
    """Return the forks of a journal, in the order of their names. Raises InvalidInput for invalid labels of forks."""
    listing = await client.list(labels.label_selector(include={labels.FORK_OF: source}))
    return tuple(fork for info in listing.journals if (fork := fork_of(info.spec)) is not None)
