"""Creation of forks of journals.

1. One etcd transaction creates all forks, and gives their sources the holds that keep shared content. Until a
   fork is complete it is labelled as forming.
2. The primaries of the sources confirm that they know the holds. From then on no removal of shared content begins.
3. Unshared content below the offset is appended to the fork: at most a part of one fragment and the unstored
   content.
4. The fork's initial content is compared with its source's, and one more change completes all forks.

A crash leaves forks that are forming. The same call continues with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from coranto.client.values import JournalInfo, Suspend
from coranto.effects import Clock, SystemClock
from coranto.errors import EtcdTransactionFailed, InvalidInput, JournalNotFound, JournalSuspended, Unavailable
from coranto.forks.boundaries import require_boundary
from coranto.forks.choosing import choose, complete, fork_at, new_spec, with_hold
from coranto.forks.dropping import drop_forks
from coranto.forks.filling import InitialContent
from coranto.forks.protecting import ContentRemoved, PendingFork, Protection, latest_time, require_rules
from coranto.fragments.forks import Fork, counts_in, fork_of
from coranto.labels import CONTENT_TYPE, NAME, RECOVERY_LOG, label_selector, value_of
from coranto.names import validate_journal
from coranto.telemetry import ProgressReport
from coranto.wire import protocol_pb2 as pb

if TYPE_CHECKING:
    from coranto.client import JournalClient

FORK_BATCH: Final = 40
"""The maximum number of journals that are forked in one transaction of etcd, which may have 128 operations."""
_ATTEMPTS: Final = 8
_RECHECK_SECONDS: Final = 0.2


async def fork_journal(
    client: JournalClient,
    source: str,
    name: str,
    *,
    at: int | None = None,
    labels: pb.LabelSet | None = None,
    same_labels: bool = False,
    clock: Clock | None = None,
    progress: ProgressReport | None = None,
) -> Fork:
    """Create the journal `name`, which has the bytes of `source` up to the offset `at` and diverges there.

    By default it diverges at the source's head. Stored fragments are shared: only content outside whole stored
    fragments below `at` is copied. The source keeps them until the fork is dropped. The fork gets the source's labels
    that describe the content, or with `same_labels` all labels, so that selectors by them find both. It gets the
    further `labels` once it is complete. `progress` counts the bytes that are copied.

    Call it again after a crash, a cancellation or a failure: it continues. If the fork is complete, the call returns
    it.

    Raises ContentGone if the source's content below `at` is gone, JournalRecreated if `at` has the id of an earlier
    journal (`JournalOffset`), JournalNotFound, InvalidInput for an offset beyond the head or within a message and for a
    name that another journal has, and the client's errors.
    """
    found = await fork_journals(
        client,
        {source: (name, at)},
        labels={name: labels} if labels is not None else None,
        same_labels=same_labels,
        clock=clock,
        progress=progress,
    )
    return found[0]


async def fork_journals(
    client: JournalClient,
    offsets: Mapping[str, tuple[str, int | None]],
    *,
    labels: Mapping[str, pb.LabelSet] | None = None,
    same_labels: bool = False,
    clock: Clock | None = None,
    progress: ProgressReport | None = None,
) -> tuple[Fork, ...]:
    """Create forks of several journals: `offsets` has the name and the offset of the fork of each source.

    Forks of up to 40 journals become complete together, or none does. `labels` are by the names of forks. See
    `fork_journal` for everything else.
    """
    await client.require_same({source: at or 0 for source, (_, at) in offsets.items()})
    times: Clock = clock or SystemClock()
    # Forks have other ids, so offsets have no ids from here on.
    wanted = [(source, (name, at if at is None else int(at))) for source, (name, at) in offsets.items()]
    made: list[Fork] = []
    for start in range(0, len(wanted), FORK_BATCH):
        batch = _Batch(client, dict(wanted[start : start + FORK_BATCH]), labels or {}, same_labels, times, progress)
        made += await batch.make()
    return tuple(made)


class _Batch:
    """Forks that one etcd transaction creates, and another one completes."""

    def __init__(
        self,
        client: JournalClient,
        offsets: Mapping[str, tuple[str, int | None]],
        labels: Mapping[str, pb.LabelSet],
        same_labels: bool,
        clock: Clock,
        progress: ProgressReport | None,
    ) -> None:
        self._client = client
        self._offsets = offsets
        self._labels = labels
        self._same_labels = same_labels
        self._clock = clock
        self._content = InitialContent(client, clock, progress)
        for name, _ in offsets.values():
            validate_journal(name)
        if len({name for name, _ in offsets.values()}) < len(offsets):
            raise InvalidInput("two forks have the same name; give each a name of its own", field="name")

    async def make(self) -> list[Fork]:
        pending, done = await self._begin()
        if pending:
            await self._protect(pending)
            for each in pending:
                await self._fill(each)
            await self._complete(pending)
        done |= {each.fork.name: replace(each.fork, forming=False) for each in pending}
        return [done[name] for name, _ in self._offsets.values()]

    async def _begin(self) -> tuple[list[PendingFork], dict[str, Fork]]:
        """Create the forks that do not exist. Return the forks to complete, and the complete ones."""
        for attempt in range(_ATTEMPTS):
            pending, done = await self._check_forks()
            try:
                await self._create([each for each in pending if each.shared is not None])
            except EtcdTransactionFailed:
                if attempt == _ATTEMPTS - 1:
                    raise
                await self._clock.sleep(_RECHECK_SECONDS)  # Another process changed or forked a source.
                continue
            return pending, done
        raise AssertionError("the last attempt returns or raises")

    async def _check_forks(self) -> tuple[list[PendingFork], dict[str, Fork]]:
        """Return the forks to create or complete, and the complete ones."""
        infos = await self._list()
        pending: list[PendingFork] = []
        done: dict[str, Fork] = {}
        for source, (name, at) in self._offsets.items():
            if source not in infos:
                raise JournalNotFound(f"fork of {source}")
            present = self._present(infos.get(name), source, name, at)
            if present is not None and not present.forming:
                done[name] = present
            elif present is not None:
                pending.append(PendingFork(infos[source], present, infos[name].spec, infos[source].mod_revision))
            else:
                pending.append(await self._choose(infos[source], name, at))
        return pending, done

    async def _list(self) -> dict[str, JournalInfo]:
        names = [(NAME, each) for source, (name, _) in self._offsets.items() for each in (source, name)]
        listing = await self._client.list(label_selector(include=names))
        return {info.name: info for info in listing.journals}

    @staticmethod
    def _present(info: JournalInfo | None, source: str, name: str, at: int | None) -> Fork | None:
        """Return the fork if it exists. Raises InvalidInput if another journal has its name."""
        if info is None:
            return None
        fork = fork_of(info.spec)
        if fork is None or fork.source != source:
            what = f"a fork of {fork.source}" if fork is not None else "no fork"
            raise InvalidInput(f"{name} exists and is {what}; choose another name", field="name")
        if at is not None and fork.offset != at:
            raise InvalidInput(
                f"{name} exists and diverges from {source} at {fork.offset}, not at {at}; choose another name, or drop "
                f"it first (coranto journals drop-fork {name})",
                field="at",
            )
        return fork

    # -- 1. The specs --------------------------------------------------------------------------------------------------

    async def _choose(self, source: JournalInfo, name: str, at: int | None) -> PendingFork:
        spec = source.spec
        if value_of(spec.labels, CONTENT_TYPE) == RECOVERY_LOG:
            raise InvalidInput(
                f"{source.name} is a recovery log, whose content goes with one shard; fork the journals that the shard "
                "reads",
                field="source",
            )
        if (above := fork_of(spec)) is not None and above.forming:
            raise InvalidInput(f"{source.name} is a fork that is still forming; finish it first", field="source")
        head = await self._head(source)
        answer = (await self._client.heads(label_selector(include={NAME: source.name}))).by_name.get(source.name)
        require_rules(answer)
        offset = head if at is None else at
        if not 0 <= offset <= head:
            raise InvalidInput(f"{source.name} ends at {head}, so it cannot be forked at {offset}", field="at")
        fragments = [each.fragment for each in await self._client.fragments(source.name)]
        if (
            answer is not None and answer.status == pb.OK
        ):  # Brokers let a fork share only fragments stored for the primary.
            stored = answer.persisted_head
            fragments = [each if each.end <= stored else replace(each, backing_store="") for each in fragments]
        shared = choose(spec, fragments, offset, head, await latest_time(self._client, self._clock, source.name))
        if offset != head:
            await require_boundary(self._client, spec, fragments, shared.begin, offset)
        fork = fork_at(spec, name, offset, shared)
        kept = [each for each in fragments if counts_in(fork.shares, each)]
        return PendingFork(source, fork, new_spec(spec, fork, same_labels=self._same_labels), source.mod_revision, kept)

    async def _head(self, source: JournalInfo) -> int:
        """Return the end of all committed content. A broker's head may include an append that never commits."""
        try:
            return (await self._client.append(source.name, b"", suspend=Suspend.NO_RESUME)).end
        except JournalSuspended:
            if source.spec.suspend.level == pb.JournalSpec.Suspend.FULL:
                raise InvalidInput(
                    f"{source.name} is suspended and has no content that could be shared; append to it first",
                    field="source",
                ) from None
            return source.spec.suspend.offset

    async def _create(self, pending: Sequence[PendingFork]) -> None:
        if not pending:
            return
        changes = []
        for each in pending:
            changes += [
                pb.ApplyRequest.Change(upsert=each.spec, expect_mod_revision=0),
                pb.ApplyRequest.Change(
                    upsert=with_hold(each.source.spec, each.fork), expect_mod_revision=each.source.mod_revision
                ),
            ]
        header = await self._client.apply(changes)
        for each in pending:
            each.revision = header.etcd.revision

    # -- 2. The holds --------------------------------------------------------------------------------------------------

    async def _protect(self, pending: Sequence[PendingFork]) -> None:
        """Wait until no removal of shared content is in progress. If content is gone, drop the forks and raise
        Unavailable."""
        try:
            await Protection(self._client, self._clock).wait(pending)
        except ContentRemoved as error:
            await drop_forks(self._client, [each.fork.name for each in pending])
            raise Unavailable(f"{error}, so that the fork was dropped: fork it again") from error

    # -- 3. The initial content ----------------------------------------------------------------------------------------

    async def _fill(self, pending: PendingFork) -> None:
        await self._content.fill(pending.fork)

    # -- 4. Completion -------------------------------------------------------------------------------------------------

    async def _complete(self, pending: Sequence[PendingFork]) -> None:
        for attempt in range(_ATTEMPTS):
            present = await self._list()
            # Another call with the same arguments may have completed them.
            left = [each for each in pending if not _is_complete(present.get(each.fork.name))]
            if not left:
                return
            for each in left:
                await self._content.compare(each.fork)
            try:
                await self._client.apply([self._completion(each, present) for each in left])
            except EtcdTransactionFailed:
                if attempt == _ATTEMPTS - 1:
                    raise
                await self._clock.sleep(_RECHECK_SECONDS)  # The broker that lists may be behind.
                continue
            return

    def _completion(self, pending: PendingFork, present: Mapping[str, JournalInfo]) -> pb.ApplyRequest.Change:
        name = pending.fork.name
        info = present.get(name)
        if info is None:
            raise JournalNotFound(f"fork {name}, which was dropped during this call")
        spec = complete(info.spec, self._labels.get(name))
        return pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=info.mod_revision)


def _is_complete(info: JournalInfo | None) -> bool:
    fork = fork_of(info.spec) if info is not None else None
    return fork is not None and not fork.forming
