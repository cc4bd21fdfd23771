"""Making forks of journals.

1. One change of etcd creates all forks, and gives their sources the holds by which these keep what is shared. Until a
   fork is complete it is labelled as forming.
2. The primaries of the sources tell that they know the holds. From then on nobody begins to remove what is shared.
3. What the fork cannot share, up to its offset, is appended to it. That is at most the part of a fragment and what was
   not stored yet.
4. The fork's first content is compared with its source's, and one more change completes all forks.

A crash leaves forks that are forming. The same call goes on with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from coranto.client.heads import JournalHead
from coranto.client.values import JournalInfo, Suspend
from coranto.effects import Clock, SystemClock
from coranto.errors import (
    CorantoError,
    CorruptData,
    IndexHasGreaterOffset,
    InvalidInput,
    JournalNotFound,
    JournalSuspended,
    Unavailable,
)
from coranto.forks.borders import require_border
from coranto.forks.choosing import choose, complete, fork_at, holding, is_safe, margin_seconds, new_spec
from coranto.forks.dropping import drop_forks
from coranto.fragments.cover_set import CoverSet
from coranto.fragments.forks import Fork, fork_of
from coranto.fragments.fragment import Fragment
from coranto.labels import CONTENT_TYPE, NAME, RECOVERY_LOG, label_selector, value_of
from coranto.names import validate_journal
from coranto.telemetry import ProgressReport
from coranto.wire import protocol_pb2 as pb

if TYPE_CHECKING:
    from coranto.client import JournalClient

AT_ONCE: Final = 40
"""The most journals that are forked in one change of etcd, which has room for 128 operations."""
REMOVAL_SECONDS: Final = 60.0
"""Time within which a removal that was under way when its broker learned of a hold has ended."""
_KNOWN_SECONDS: Final = 60.0
_LOOK_AGAIN_SECONDS: Final = 0.2
_PIECE_BYTES: Final = 1 << 20


@dataclass(slots=True)
class _Making:
    """A fork that is being made. `shared` are the fragments that it shares; None if an earlier call created it."""

    source: JournalInfo
    fork: Fork
    spec: pb.JournalSpec
    shared: Sequence[Fragment] | None = None


async def fork_journal(
    client: JournalClient,
    source: str,
    name: str,
    *,
    at: int | None = None,
    labels: pb.LabelSet | None = None,
    clock: Clock | None = None,
    progress: ProgressReport | None = None,
) -> Fork:
    """Make the journal `name`, which has the bytes of `source` up to the offset `at` and diverges there.

    By default it diverges at the source's head. Stored fragments are shared: nothing is copied but what is not in a
    whole stored fragment below `at`. The source keeps them until the fork is dropped. `labels` take the place of
    those of the source once the fork is complete. `progress` counts the bytes that are copied.

    Call it again after a crash, a cancellation or a failure: it goes on. If the fork is complete, the call returns it.

    Raises ContentGone if the source's content below `at` is gone, JournalNotFound, InvalidInput for an offset beyond
    the head or within a message and for a name that another journal has, and the client's errors.
    """
    found = await fork_journals(
        client,
        {source: (name, at)},
        labels={name: labels} if labels is not None else None,
        clock=clock,
        progress=progress,
    )
    return found[0]


async def fork_journals(
    client: JournalClient,
    offsets: Mapping[str, tuple[str, int | None]],
    *,
    labels: Mapping[str, pb.LabelSet] | None = None,
    clock: Clock | None = None,
    progress: ProgressReport | None = None,
) -> tuple[Fork, ...]:
    """Make forks of several journals: `offsets` has the name and the offset of the fork of each source.

    Forks of up to 40 journals become complete at once, or none does. `labels` are by the names of forks. For the
    rest this is `fork_journal`.
    """
    times: Clock = clock or SystemClock()
    wanted = list(offsets.items())
    made: list[Fork] = []
    for start in range(0, len(wanted), AT_ONCE):
        batch = _Batch(client, dict(wanted[start : start + AT_ONCE]), labels or {}, times, progress)
        made += await batch.make()
    return tuple(made)


class _Batch:
    """Forks that one change of etcd creates, and another one completes."""

    def __init__(
        self,
        client: JournalClient,
        offsets: Mapping[str, tuple[str, int | None]],
        labels: Mapping[str, pb.LabelSet],
        clock: Clock,
        progress: ProgressReport | None,
    ) -> None:
        self._client = client
        self._offsets = offsets
        self._labels = labels
        self._clock = clock
        self._progress = progress
        self._total = 0
        for name, _ in offsets.values():
            validate_journal(name)
        if len({name for name, _ in offsets.values()}) < len(offsets):
            raise InvalidInput("two forks have the same name; give each a name of its own", field="name")

    async def make(self) -> list[Fork]:
        infos = await self._list()
        making: list[_Making] = []
        done: dict[str, Fork] = {}
        for source, (name, at) in self._offsets.items():
            if source not in infos:
                raise JournalNotFound(f"fork of {source}")
            present = self._present(infos.get(name), source, name, at)
            if present is not None and not present.forming:
                done[name] = present
            elif present is not None:
                making.append(_Making(infos[source], present, infos[name].spec))
            else:
                making.append(await self._choose(infos[source], name, at))
        if making:
            await self._create([each for each in making if each.shared is not None])
            await self._protect(making)
            for each in making:
                await self._fill(each)
            await self._complete(making)
        done |= {each.fork.name: replace(each.fork, forming=False) for each in making}
        return [done[name] for name, _ in self._offsets.values()]

    async def _list(self) -> dict[str, JournalInfo]:
        names = [(NAME, each) for source, (name, _) in self._offsets.items() for each in (source, name)]
        listing = await self._client.list(label_selector(include=names))
        return {info.name: info for info in listing.journals}

    @staticmethod
    def _present(info: JournalInfo | None, source: str, name: str, at: int | None) -> Fork | None:
        """Return the fork if it is there already. Raises InvalidInput if that is another journal."""
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

    async def _choose(self, source: JournalInfo, name: str, at: int | None) -> _Making:
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
        offset = head if at is None else at
        if not 0 <= offset <= head:
            raise InvalidInput(f"{source.name} ends at {head}, so it cannot be forked at {offset}", field="at")
        fragments = [each.fragment for each in await self._client.fragments(source.name)]
        shared = choose(spec, fragments, offset, head, await self._now(source.name))
        if offset != head:
            await require_border(self._client, spec, fragments, shared.begin, offset)
        fork = fork_at(spec, name, offset, shared)
        kept = [
            each for each in fragments if any(each.journal == one.journal and one.takes(each) for one in fork.shares)
        ]
        return _Making(source, fork, new_spec(spec, fork), kept)

    async def _head(self, source: JournalInfo) -> int:
        """Return the end of all committed content. A broker's head may count an append that comes to nothing."""
        try:
            return (await self._client.append(source.name, b"", suspend=Suspend.NO_RESUME)).end
        except JournalSuspended:
            if source.spec.suspend.level == pb.JournalSpec.Suspend.FULL:
                raise InvalidInput(
                    f"{source.name} is suspended and has no content that could be shared; append to it first",
                    field="source",
                ) from None
            return source.spec.suspend.offset

    async def _now(self, source: str) -> float:
        """Return the time by the clock that is ahead: a fragment that seems younger could be removed already."""
        heads = await self._client.heads(label_selector(include={NAME: source}))
        return max(self._clock.now(), heads.broker_time)

    async def _create(self, making: Sequence[_Making]) -> None:
        if not making:
            return
        changes = []
        for each in making:
            changes += [
                pb.ApplyRequest.Change(upsert=each.spec, expect_mod_revision=0),
                pb.ApplyRequest.Change(
                    upsert=holding(each.source.spec, each.fork), expect_mod_revision=each.source.mod_revision
                ),
            ]
        await self._client.apply(changes)

    # -- 2. The holds --------------------------------------------------------------------------------------------------

    async def _protect(self, making: Sequence[_Making]) -> None:
        """Return once nobody removes what is shared. If something is gone, drop the forks and raise Unavailable."""
        await self._wait_known([each.source.name for each in making if each.fork.shares])
        for each in making:
            source, margin = each.source.spec, margin_seconds(each.source.spec) / 2
            if not each.fork.shares:
                continue
            await self._end(each.fork)  # Some broker serves it now, and the client knows which.
            now = await self._now(each.source.name)
            listed = [info.fragment for info in await self._client.fragments(each.fork.name) if info.persisted]
            wanted = each.shared if each.shared is not None else listed
            old = [one for one in wanted if not is_safe(source, one, now, margin)]
            if old:  # Holding took long, or an earlier call began it. Something may be under way.
                await self._clock.sleep(REMOVAL_SECONDS)
            gone = [one for one in wanted if not CoverSet(listed).covers(one.begin, one.end)]
            gone += [one for one in old if not await self._is_there(each.fork.name, one)]
            if gone:
                await drop_forks(self._client, [one.fork.name for one in making])
                raise Unavailable(
                    f"retention has removed {gone[0].content_path} while {each.source.name} was forked: fork it again"
                )

    async def _wait_known(self, sources: Sequence[str]) -> None:
        """Wait until the primaries of sources know all changes of this client."""
        if not sources:
            return
        selector = label_selector(include=[(NAME, name) for name in sources])
        until = self._clock.monotonic() + _KNOWN_SECONDS
        while True:
            told = (await self._client.heads(selector)).by_name
            behind = [name for name in sources if name not in told or not _knows(told[name])]
            if not behind:
                return
            if self._clock.monotonic() >= until:
                problem = (told[behind[0]].problem if behind[0] in told else "") or "another broker answered"
                raise Unavailable(
                    f"the primary of {behind[0]} does not tell whether it knows the fork ({problem}). Fork it again to "
                    "go on"
                )
            await self._clock.sleep(_LOOK_AGAIN_SECONDS)

    async def _is_there(self, journal: str, fragment: Fragment) -> bool:
        try:
            await self._client.read_all(journal, fragment.begin, fragment.begin + 1)
        except CorantoError:
            return False
        return True

    # -- 3. The first content ------------------------------------------------------------------------------------------

    async def _fill(self, making: _Making) -> None:
        """Append what the fork cannot share, from where an earlier call has come."""
        fork, client = making.fork, self._client
        at = await self._end(fork)
        if not fork.shared_end <= at <= fork.offset:
            raise _other_content(fork, f"it ends at {at}, and the fork begins at {fork.shared_end}")
        if self._progress is not None:
            self._total += fork.offset - at
            self._progress.expect(self._total)
        if at == fork.offset:
            return
        reading = client.read(fork.source, at, end_offset=fork.offset, fail_on_jump=True)
        async with contextlib.aclosing(reading) as chunks:
            async for chunk in chunks:
                for start in range(0, len(chunk.content), _PIECE_BYTES):
                    piece = chunk.content[start : start + _PIECE_BYTES]
                    # The offset makes it safe to repeat. At 0 there is no such condition, and no repetition.
                    result = await client.append(fork.name, piece, offset=at)
                    if result.begin != at:
                        raise _other_content(fork, f"others have appended to it at {at}")
                    at = result.end
                    if self._progress is not None:
                        self._progress.advance(len(piece))

    async def _end(self, fork: Fork) -> int:
        """Return the end of all committed content of a fork."""
        try:
            return (await self._client.append(fork.name, b"")).end
        except IndexHasGreaterOffset as error:
            raise _other_content(fork, "a store has fragments of it that no broker knows") from error

    # -- 4. Completion -------------------------------------------------------------------------------------------------

    async def _complete(self, making: Sequence[_Making]) -> None:
        for each in making:
            await self._compare(each.fork)
        present = await self._list()
        changes = []
        for each in making:
            info = present.get(each.fork.name)
            if info is None:
                raise JournalNotFound(f"fork {each.fork.name}, which somebody has dropped meanwhile")
            changes.append(
                pb.ApplyRequest.Change(
                    upsert=complete(info.spec, self._labels.get(each.fork.name)), expect_mod_revision=info.mod_revision
                )
            )
        await self._client.apply(changes)

    async def _compare(self, fork: Fork) -> None:
        """Check that the fork ends at its offset, and that what was appended to it is the source's."""
        head = await self._end(fork)
        if head != fork.offset:
            raise _other_content(fork, f"it ends at {head}, not at {fork.offset}")
        ours, theirs = await asyncio.gather(
            *(self._digest(journal, fork.shared_end, fork.offset) for journal in (fork.name, fork.source))
        )
        if ours != theirs:
            raise _other_content(fork, f"its bytes from {fork.shared_end} on are not those of {fork.source}")

    async def _digest(self, journal: str, begin: int, end: int) -> str:
        digest = hashlib.sha1(usedforsecurity=False)
        if begin == end:
            return digest.hexdigest()
        at = begin
        reading = self._client.read(journal, begin, end_offset=end, fail_on_jump=True)
        async with contextlib.aclosing(reading) as chunks:
            async for chunk in chunks:
                digest.update(chunk.content)
                at = chunk.end
        if at != end:
            raise Unavailable(f"{journal} is read only up to {at} of {end}; fork it again to go on")
        return digest.hexdigest()


def _knows(head: JournalHead) -> bool:
    """Return True if a primary has told this, or if there is none because the journal is suspended."""
    return head.status == pb.SUSPENDED or (head.status == pb.OK and head.is_primary)


def _other_content(fork: Fork, what: str) -> CorruptData:
    return CorruptData(
        f"{fork.name} has other content than a fork of {fork.source}: {what}. Somebody appended to it while it was "
        f"forming, or its folder has fragments of an earlier journal of that name. Drop it (coranto journals drop-fork "
        f"{fork.name}), and choose another name"
    )
