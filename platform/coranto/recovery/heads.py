"""Journals that reject appends because their stores end after their brokers' content (INDEX_HAS_GREATER_OFFSET)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from coranto.client import JournalClient, JournalInfo, Suspend
from coranto.errors import CorantoError, IndexHasGreaterOffset, JournalSuspended, NotAllowed, WrongAppendOffset
from coranto.recovery.diagnosing import diagnose_all
from coranto.recovery.plan import Diagnosis, RecoveryStep, Remark, StepKind

_ATTEMPTS: Final = 5
_RACE_SECONDS: Final = 0.2
LISTING_SECONDS: Final = 330.0
"""The time in seconds to wait for brokers to list a store again. By default they list it every 5 minutes."""


async def reset_head(client: JournalClient, journal: str) -> str:
    """Let a journal continue after content that its brokers do not know, and return a short description.

    A healthy journal is left as it is. Raises the client's errors.
    """
    for attempt in range(_ATTEMPTS):
        if attempt:
            # Another append was faster, or the head came from a broker with an outdated index.
            await asyncio.sleep(_RACE_SECONDS * attempt)
        try:
            head = (await client.append(journal, b"", suspend=Suspend.KEEP)).end
            return f"healthy, at {head}"
        except IndexHasGreaterOffset:
            head = await client.head(journal)
        try:
            await client.append(journal, b"", offset=head, at_start=not head, suspend=Suspend.KEEP)
            return f"reset to {head}"
        except (WrongAppendOffset, IndexHasGreaterOffset):
            continue
    raise CorantoError(f"the head of {journal} moved {_ATTEMPTS} times during this call; run reset-head again")


class HeadDoctor:
    """Finds journals that wait for `reset-head`. It probes them with empty appends, which change nothing."""

    def __init__(self, client: JournalClient, journals: Sequence[JournalInfo]) -> None:
        self._client = client
        self._journals = journals

    async def diagnose(self) -> Diagnosis:
        return await diagnose_all(self._diagnose, self._journals)

    async def _diagnose(self, info: JournalInfo) -> Diagnosis:
        name = info.name
        try:
            await self._client.append(name, b"", suspend=Suspend.KEEP)
        except (JournalSuspended, NotAllowed):
            return Diagnosis()
        except IndexHasGreaterOffset:
            return Diagnosis([reset_step(name, await self._client.head(name))])
        except CorantoError as error:
            return Diagnosis(remarks=[Remark(name, f"accepts no appends now: {error}")])
        return Diagnosis()

    async def act(self, step: RecoveryStep) -> str:
        """Reset the head, after brokers know the content below it, which an earlier step may have just restored."""
        head = int(str(step.facts["head"]))
        known = await self._client.head(step.subject)
        waited = 0.0
        while known < head:
            if waited >= LISTING_SECONDS:
                raise CorantoError(
                    f"brokers have not listed the content of {step.subject} up to {head} yet, and know it up to "
                    f"{known}; plan again after its next refresh interval"
                )
            await asyncio.sleep(_RACE_SECONDS)
            waited += _RACE_SECONDS
            known = await self._client.head(step.subject)
        return await reset_head(self._client, step.subject)


def reset_step(journal: str, head: int) -> RecoveryStep:
    """Return the step that lets a journal continue at `head`, where its store ends, at least after earlier steps."""
    return RecoveryStep(
        StepKind.RESET_HEAD,
        journal,
        f"let {journal} continue at {head}, where its store ends",
        loses=f"acknowledged content above {head} that only lost brokers held, and registers that only they held. "
        "Approve this only if none of them can come back with its data directory",
        facts={"head": head},
    )
