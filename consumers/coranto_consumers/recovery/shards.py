"""Recovery of shards that failed, or that no process runs."""

from __future__ import annotations

import asyncio
from typing import Final

from coranto.errors import CorantoError
from coranto.recovery import Diagnosis, RecoveryStep, Remark, StepKind
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.runtime.client import ShardClient
from coranto_consumers.runtime.specs import most_advanced

TIMEOUT_S: Final = 30.0
"""Time in seconds to watch a shard that was unassigned, until it runs or fails again."""
RECHECK_SECONDS: Final = 0.1


class ShardDoctor:
    """Finds failed shards of a running consumer, and lets them be reassigned.

    A shard fails again if the cause is still there, so its steps come after all others.
    """

    def __init__(self, client: ShardClient, selector: str = "") -> None:
        self._client = client
        self._selector = selector

    async def diagnose(self) -> Diagnosis:
        steps: list[RecoveryStep] = []
        remarks: list[Remark] = []
        for shard in await self._client.list(self._selector):
            name = shard.spec.id
            status = most_advanced(shard.status)
            if status.code == pc.ReplicaStatus.FAILED:
                steps.append(
                    RecoveryStep(
                        StepKind.UNASSIGN_SHARD,
                        name,
                        f"take {name} from the process where it failed, so that it starts again",
                    )
                )
                remarks.append(Remark(name, f"it failed: {status.errors[0] if status.errors else 'without a reason'}"))
            elif shard.route.primary < 0 and not shard.spec.disable:
                remarks.append(
                    Remark(
                        name, "no process is its primary: are enough processes of the consumer running, with capacity?"
                    )
                )
            elif status.code != pc.ReplicaStatus.PRIMARY and not shard.spec.disable:
                word = pc.ReplicaStatus.Code.Name(status.code).lower()
                remarks.append(Remark(name, f"its most advanced replica is {word}, and not primary yet"))
        return Diagnosis(steps, (), remarks)

    async def act(self, step: RecoveryStep) -> str:
        done = await self._client.unassign([step.subject], only_failed=True)
        return await self._watch(step.subject) if done else "it has not failed any more"

    async def _watch(self, name: str) -> str:
        """Wait until a shard runs again. Raises CorantoError if it fails again."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    for shard in await self._client.list(f"id={name}"):
                        status = most_advanced(shard.status)
                        if status.code == pc.ReplicaStatus.FAILED:
                            raise CorantoError(f"{name} was unassigned, and failed again: {'; '.join(status.errors)}")
                        if status.code == pc.ReplicaStatus.PRIMARY:
                            return "unassigned, and it runs again"
                    await asyncio.sleep(RECHECK_SECONDS)
        except TimeoutError:
            return "unassigned, and no process has taken it yet"
