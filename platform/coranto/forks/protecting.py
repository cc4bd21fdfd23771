"""Protection of new forks: wait until no removal of their shared content is in progress.

Once the primaries of the sources know the holds, they begin no removal of shared content. Earlier plans of removals
contain none of it, because a fork shares only young content (`coranto.forks.choosing`). Only if some of it is no longer
young at that time, a removal may be in progress. Then wait until it must have ended, and check the content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from coranto.client.heads import JournalHead
from coranto.client.values import JournalInfo
from coranto.effects import Clock
from coranto.errors import CorantoError, InvalidInput, Unavailable
from coranto.forks.choosing import SharedSpan, is_safe, margin_seconds, missing
from coranto.forks.filling import end_of
from coranto.fragments.cover_set import CoverSet
from coranto.fragments.forks import Fork
from coranto.fragments.fragment import Fragment
from coranto.labels import NAME, label_selector
from coranto.wire import protocol_pb2 as pb

if TYPE_CHECKING:
    from coranto.client import JournalClient

REMOVAL_SECONDS: Final = 60.0
"""The maximum duration of a removal that was in progress when its broker learned of a hold."""
_KNOWN_SECONDS: Final = 60.0
_RECHECK_SECONDS: Final = 0.2


class ContentRemoved(CorantoError):
    """Content that a new fork shares is gone."""


@dataclass(slots=True)
class PendingFork:
    """A fork that is being made. The source's hold is in etcd since `revision` or before.

    `shared` are the fragments that it shares; None if an earlier call created it.
    """

    source: JournalInfo
    fork: Fork
    spec: pb.JournalSpec
    revision: int
    shared: Sequence[Fragment] | None = None


async def latest_time(client: JournalClient, clock: Clock, source: str) -> float:
    """Return the later of our and the broker's time. By the earlier one, a fragment could seem younger than it is."""
    heads = await client.heads(label_selector(include={NAME: source}))
    return max(clock.now(), heads.broker_time)


class Protection:
    """Waits until the shared content of forks is protected."""

    def __init__(self, client: JournalClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock

    async def wait(self, pending: Sequence[PendingFork]) -> None:
        """Wait until no removal of shared content is in progress.

        Raises ContentRemoved if shared content is gone already, and Unavailable if primaries do not report their state.
        """
        sharing = [each for each in pending if each.fork.shares]
        if sharing:
            revisions = {each.source.name: each.revision for each in sharing}
            await self._wait_known({**revisions, **{each.fork.name: 0 for each in sharing}})
        for each in sharing:
            await self._examine(each)

    async def _examine(self, pending: PendingFork) -> None:
        fork, source = pending.fork, pending.source.spec
        await end_of(self._client, self._clock, fork)  # Now a broker serves it, and the client knows its route.
        now = await latest_time(self._client, self._clock, source.name)
        listed = [info.fragment for info in await self._client.fragments(fork.name) if info.persisted]
        wanted = pending.shared if pending.shared is not None else listed
        old = [each for each in wanted if not is_safe(source, each, now, margin_seconds(source) / 2)]
        if old:
            await self._clock.sleep(REMOVAL_SECONDS)
        covered = CoverSet(listed)
        gone = [each.begin for each in wanted if not covered.covers(each.begin, each.end)]
        gone += [fork.begin] if not covered.covers(fork.begin, fork.begin + 1) else []
        # A resumed call does not know the original fragments, so compare with the current ones of the source, too.
        of_source = [info.fragment for info in await self._client.fragments(source.name)]
        at = missing(of_source, listed, SharedSpan(fork.begin, fork.shared_end))
        gone += [at] if at is not None else []
        gone += [each.begin for each in old if not await self._is_there(fork.name, each)]
        if gone:
            raise ContentRemoved(f"retention has removed content of {source.name} at {min(gone)} while it was forked")

    async def _wait_known(self, revisions: Mapping[str, int]) -> None:
        """Wait until the primaries of journals know their specs as of these revisions or later, and support forks."""
        selector = label_selector(include=[(NAME, name) for name in revisions])
        until = self._clock.monotonic() + _KNOWN_SECONDS
        while True:
            answers = (await self._client.heads(selector)).by_name
            behind = [
                name
                for name, least in revisions.items()
                if name not in answers or not _is_protected(answers[name], least)
            ]
            if not behind:
                return
            for name in behind:
                require_rules(answers.get(name))
            if self._clock.monotonic() >= until:
                problem = (answers[behind[0]].problem if behind[0] in answers else "") or "another broker answered"
                raise Unavailable(
                    f"the primary of {behind[0]} does not report whether it knows the fork ({problem}). Fork it again "
                    "to continue"
                )
            await self._clock.sleep(_RECHECK_SECONDS)

    async def _is_there(self, journal: str, fragment: Fragment) -> bool:
        try:
            await self._client.read_all(journal, fragment.begin, fragment.begin + 1)
        except CorantoError:
            return False
        return True


def require_rules(head: JournalHead | None) -> None:
    """Raise InvalidInput if a primary that does not support forks has answered. None: no answer."""
    asked_alone = head is not None and head.status == pb.OK and not head.broker
    if head is not None and not head.keeps_forks and (head.is_primary or head.ask_alone or asked_alone):
        raise InvalidInput(
            f"the primary of {head.journal} is a broker of Gazette or of an earlier version, which would remove "
            "content that a fork shares. Upgrade all brokers, and fork it again then",
            field="source",
        )


def _is_protected(head: JournalHead, revision: int) -> bool:
    """Return True if the primary reports support of forks, and knows the spec as of `revision` or later.

    A journal that is suspended has no primary.
    """
    is_authoritative = head.status == pb.SUSPENDED or (head.status == pb.OK and head.is_primary)
    return is_authoritative and head.keeps_forks and head.mod_revision >= revision
