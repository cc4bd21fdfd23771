"""Lifecycle of a forked consumer: it is created, reads the original consumer's input, and is promoted or dropped.

* **Fork.** One transaction of the store copies the checkpoint, and tables with it. Then the journals are forked, at
  their heads or at the checkpoint. So the forks have all content that the copied checkpoint needs, and both consumers
  process the same content up to the fork offsets.
* **Promote.** A consumer with a new name gets the checkpoint for the original journals, if the forked consumer has only
  read content that these have, too. The changed application continues under that name. The forked consumer is retired.
* **Drop.** The consumer is retired, and the forks are deleted.

A retired consumer never runs again. Otherwise, a process that still has the forks as its sources would read them again
from their beginnings, because their offsets are gone.

Each step can be repeated after a crash, and continues with the rest. Forks carry the consumer's name in a label, so
dropping finds them even if the consumer has not read anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from coranto import labels
from coranto.client import JournalClient, JournalInfo, Moment
from coranto.errors import InvalidInput, JournalNotFound, OffsetJump
from coranto.forks import Fork, drop_forks, fork_journals, fork_of
from coranto.messages.checkpoints import Checkpoint
from coranto.streams.control.forking import drop_forked_stream, fork_stream
from coranto_consumers.forks.checkpoints import fork_checkpoint, promote_checkpoint, require_shared
from coranto_consumers.forks.rows import copy_row, drop_tables, look_up, promote_row, retire_row
from coranto_consumers.stores.fencing import Restored
from coranto_consumers.stores.retired import Retired
from coranto_consumers.stores.sql import SqlStore

_COMPARED_BYTES: Final = 64 << 10
CONSUMER_LABEL: Final = "coranto.dev/forked-for"
"""The consumer that a journal was forked for, percent-encoded."""


@dataclass(frozen=True, slots=True)
class ForkedConsumer:
    """A forked consumer: its forks by the names of their sources, and its first checkpoint."""

    name: str
    forks: Mapping[str, Fork]
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class ForkStatus:
    """The progress of a forked consumer: the read offset of each of its forks, and if it can be promoted."""

    name: str
    fence: int
    forks: Sequence[Fork]
    read_through: Mapping[str, int]
    """The read offsets by fork. Unread forks are omitted."""
    problem: str = ""
    """The reason why it cannot be promoted now; empty if it can."""
    behind: Mapping[str, int] = field(default_factory=dict)
    """The unread bytes below the fork offset, by fork. Forks without unread bytes are omitted."""


async def fork_consumer(
    client: JournalClient,
    store: SqlStore,
    name: str,
    new: str,
    *,
    journals: Sequence[str] = (),
    prefix: str = "",
    tables: Mapping[str, str] | None = None,
    from_beginning: bool = False,
    at_checkpoint: bool = False,
    same_labels: bool = False,
) -> ForkedConsumer:
    """Fork the journals that a consumer has read, and copy its checkpoint for the forks to the consumer `new`.

    `journals` names further journals to fork, which the consumer has not read yet. The name of a fork is its journal's
    name below `prefix`, by default `new`. A segment of a stream is forked with its whole stream. Journals are forked at
    their heads, or with `at_checkpoint` at the checkpoint's offsets. `tables` maps tables to the names of their copies,
    which are made in the transaction of the checkpoint. With `from_beginning`, the new consumer has no checkpoint and
    no copies, and reads all of its forks. Journals with a message type are refused without `same_labels`, which gives
    forks all labels of their journals: a consumer that selects by such a label reads both.

    Call it again after an interruption; a cancelled call may have made some of the forks. Raises InvalidInput for a
    consumer without a checkpoint, a new consumer that has another checkpoint or was promoted, tables that cannot be
    copied, and a segment with `at_checkpoint`; JournalNotFound; JournalRecreated for a source that was created again
    since the consumer read it; ContentGone, SqlStoreError and errors of the client.
    """
    if from_beginning and tables:
        raise InvalidInput(
            "a consumer that reads its forks from the beginning counts again all that the rows of a copied table have "
            "counted already; leave this out, and give it tables that are empty",
            field="--table",
        )
    found = await asyncio.to_thread(store.read, name)
    if found is None or not found.checkpoint.sources:
        raise InvalidInput(f"{name!r} has no checkpoint in the store", field="consumer")
    if name == new:
        raise InvalidInput(f"{new!r} is the name of the consumer itself; choose another one", field="--as")
    infos = await _journals(client, sorted({*found.checkpoint.sources, *journals}))
    if not from_beginning:
        await client.require_same(found.checkpoint.offsets)
    if not same_labels:
        _require_no_types(infos.values())
    streams = {
        journal: stream
        for journal, info in infos.items()
        if (stream := labels.value_of(info.spec.labels, labels.STREAM))
    }
    if streams and at_checkpoint:
        raise InvalidInput(
            f"{next(iter(streams))} is a segment of a stream, which is forked where no transaction is torn; leave this "
            "out",
            field="--at-checkpoint",
        )
    below = prefix.strip("/") or new.strip("/")
    names = {journal: f"{below}/{journal}" for journal in infos}  # A segment's name begins with its stream's.
    present = await asyncio.to_thread(look_up, store, new)
    copied = await _copied(store, name, new, names, present, from_beginning, tables or {})
    heads = found.checkpoint if from_beginning else copied
    made = await _journals(client, list(names.values()), missing_ok=True)  # By an earlier call.
    wanted: dict[str, tuple[str, int | None]] = {}
    for journal in infos.keys() - streams.keys():
        read = heads.sources.get(journal if from_beginning else names[journal])
        at = read.read_through if read is not None else 0
        wanted[journal] = (names[journal], at if at_checkpoint and names[journal] not in made else None)
    owner = labels.label_set([(CONSUMER_LABEL, _label_of(new))])
    for stream in sorted(set(streams.values())):
        await fork_stream(client, stream, f"{below}/{stream}", new_labels=owner)
    await fork_journals(
        client,
        dict(sorted(wanted.items())),
        labels={fork: owner for fork, _ in wanted.values()},
        same_labels=same_labels,
    )
    forks = {fork.name: fork for fork in await _forks_for(client, new)}
    if missing := sorted(set(names.values()) - forks.keys()):
        raise JournalNotFound(f"fork {missing[0]} of {new}")
    require_shared(copied, forks)
    return ForkedConsumer(new, {fork.source: fork for fork in forks.values()}, copied)


def _require_no_types(infos: Iterable[JournalInfo]) -> None:
    """Raise InvalidInput for a journal with a message type that a running consumer may select journals by."""
    for info in infos:
        for name, value in labels.as_pairs(info.spec.labels):
            if name in (labels.MESSAGE_TYPE, labels.MESSAGE_SUBTYPE):
                raise InvalidInput(
                    f"has the label {name}={value}, and so has its fork: a consumer that selects journals by it would "
                    "read both. If none does, say that forks may have the same labels (--same-labels)",
                    field=info.name,
                )


async def _copied(
    store: SqlStore,
    name: str,
    new: str,
    names: Mapping[str, str],
    present: Restored | Retired | None,
    from_beginning: bool,
    tables: Mapping[str, str],
) -> Checkpoint:
    """Return the checkpoint of `new`. Copy it unless an earlier call has done so."""
    if isinstance(present, Restored) and (present.checkpoint.sources or from_beginning):
        if set(present.checkpoint.sources) <= set(names.values()):
            return present.checkpoint
        raise InvalidInput(f"{new!r} has a checkpoint already; choose another name", field="--as")

    def renamed(checkpoint: Checkpoint) -> Checkpoint:
        return Checkpoint() if from_beginning else fork_checkpoint(checkpoint, names)

    return await asyncio.to_thread(copy_row, store, name, new, renamed, tables)


async def fork_status(client: JournalClient, store: SqlStore, name: str) -> ForkStatus:
    """Return a forked consumer's progress, and if it can be promoted. Raises InvalidInput if it has no forks."""
    found = await asyncio.to_thread(store.read, name)
    forks = await _forks_for(client, name)
    if found is None or not forks:
        raise InvalidInput(f"{name!r} is not a forked consumer, or its forks are dropped", field="consumer")
    problem = ""
    try:
        promote_checkpoint(found.checkpoint, {fork.name: fork for fork in forks})
    except InvalidInput as error:
        problem = str(error)
    read = found.checkpoint.offsets
    behind = {fork.name: fork.offset - read.get(fork.name, fork.begin) for fork in forks}
    unread = {fork: left for fork, left in behind.items() if left > 0}
    return ForkStatus(name, found.fence, forks, read, problem, unread)


async def promote_consumer(client: JournalClient, store: SqlStore, name: str, new: str) -> Mapping[str, int]:
    """Let the consumer `new` continue with the original journals, at the forked one's position. Returns its offsets.

    The forked consumer is retired in the same transaction: no process can commit or start under its name. The original
    consumer, the forks and all tables stay as they are; the tables belong to `new` from now on. Raises InvalidInput if
    the forked consumer has read other content than the original journals have, or is promoted already, and if the store
    has a consumer `new`; Fenced if it commits during the call, ContentGone if retention has removed the next content,
    SqlStoreError and errors of the client.
    """
    if not new or new == name:
        raise InvalidInput(
            f"{new!r} is not a new name; a process that still reads the forks as {name!r} would continue under it. "
            "Choose another one",
            field="--as",
        )
    found = await asyncio.to_thread(look_up, store, name)
    if isinstance(found, Retired):
        raise found.error(name)
    forks = {fork.name: fork for fork in await _forks_for(client, name)}
    if found is None or not forks:
        raise InvalidInput(f"{name!r} is not a forked consumer, or its forks are dropped", field="consumer")
    checkpoint = promote_checkpoint(found.checkpoint, forks)
    begins = {journal: source.replay_from for journal, source in checkpoint.sources.items()}
    await client.require_content(Moment.offsets(checkpoint.offsets, begins))
    for journal, source in found.checkpoint.sources.items():
        await _require_same_content(client, forks[journal], source.read_through)
    await asyncio.to_thread(promote_row, store, name, found, new, checkpoint)
    return checkpoint.offsets


async def _require_same_content(client: JournalClient, fork: Fork, end: int) -> None:
    """Raise InvalidInput if a fork and its source differ shortly before `end`: the source was recreated since."""
    begin = max(fork.begin, end - _COMPARED_BYTES)
    try:
        ours, theirs = [await client.read_all(journal, begin, end) for journal in (fork.name, fork.source)]
    except OffsetJump:
        return  # Retention has removed this content. The content to read next exists.
    if ours != theirs:
        raise InvalidInput(
            f"has other content before {end} than {fork.source}, which was deleted and created again since it was "
            "forked. Nothing can continue there",
            field=fork.name,
        )


async def drop_consumer(
    client: JournalClient, store: SqlStore, name: str, *, tables: Sequence[str] = ()
) -> Mapping[str, Sequence[str]]:
    """Drop a forked consumer: retire it, delete its forks, and drop the `tables` named.

    Of a consumer that was promoted, only the forks are deleted. Files of the forks' own content stay in their stores,
    as with any deleted journal. Returns the names of deleted journals and of dropped tables. Repeat it after an
    interruption. Raises InvalidInput for a consumer that is not a fork, has read other journals besides its forks, or
    whose forks have forks, and for tables of one that was promoted; SqlStoreError, Fenced if the consumer commits
    during the call, and errors of the client.
    """
    found = await asyncio.to_thread(look_up, store, name)
    row = found if isinstance(found, Restored) else None
    ours = {fork.name for fork in await _forks_for(client, name)}
    read = set(row.checkpoint.sources) if row is not None else set()
    for journal, info in (await _journals(client, sorted(read), missing_ok=True)).items():
        fork = fork_of(info.spec)
        if fork is not None and fork.forming:
            ours.add(journal)  # A fork gets its label when it is complete.
    if not ours and not (isinstance(found, Retired) and tables):
        raise InvalidInput(f"{name!r} is not a forked consumer, or its forks are dropped", field="consumer")
    if isinstance(found, Retired) and found.successor and tables:
        raise InvalidInput(
            f"{name!r} is promoted: its tables belong to {found.successor!r} now; leave this out", field="--table"
        )
    if not read.isdisjoint(ours) and (others := sorted(read - ours)):
        raise InvalidInput(
            f"{name!r} has read {others[0]} besides its forks, so its checkpoint may still be needed. "
            "Drop its forks one by one (coranto journals drop-fork)",
            field="consumer",
        )
    await _require_no_forks(client, ours)
    if not isinstance(found, Retired) and read <= ours:
        await asyncio.to_thread(retire_row, store, name, row)
    gone = sorted(ours)
    listed = await _journals(client, gone, missing_ok=True)
    streams = {labels.value_of(info.spec.labels, labels.STREAM) for info in listed.values()} - {""}
    for stream in sorted(streams):
        await drop_forked_stream(client, stream)
    segments = {journal for journal, info in listed.items() if labels.value_of(info.spec.labels, labels.STREAM)}
    if left := sorted(ours - segments):
        await drop_forks(client, left)
    dropped = await asyncio.to_thread(drop_tables, store, tables) if tables else []
    return {"journals": gone, "tables": dropped}


async def _journals(client: JournalClient, names: Sequence[str], *, missing_ok: bool = False) -> dict[str, JournalInfo]:
    """Return journals by name. Raises JournalNotFound if one is missing, unless `missing_ok`."""
    if not names:
        return {}
    listing = await client.list(labels.label_selector(include=[(labels.NAME, name) for name in names]))
    found = {info.name: info for info in listing.journals}
    if not missing_ok and (missing := sorted(set(names) - found.keys())):
        raise JournalNotFound(f"source {missing[0]} of the consumer")
    return found


async def _require_no_forks(client: JournalClient, names: Collection[str]) -> None:
    """Raise InvalidInput if one of these forks has a fork that is not among them."""
    if not names:
        return
    listing = await client.list(labels.label_selector(include=[(labels.FORK_OF, name) for name in sorted(names)]))
    if others := sorted(info.name for info in listing.journals if info.name not in names):
        raise InvalidInput("is a fork of the consumer's forks; drop it before them", field=others[0])


async def _forks_for(client: JournalClient, consumer: str) -> tuple[Fork, ...]:
    """Return the forks that were made for a consumer, by their label, in the order of their names."""
    listing = await client.list(labels.label_selector(include=[(CONSUMER_LABEL, _label_of(consumer))]))
    found = (fork_of(info.spec) for info in listing.journals)
    return tuple(sorted((fork for fork in found if fork is not None), key=lambda fork: fork.name))


def _label_of(consumer: str) -> str:
    """Return a consumer's name, percent-encoded for the value of a label."""
    return quote(consumer, safe="").replace("~", "%7E")
