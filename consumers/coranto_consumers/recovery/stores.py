"""Recovery of a consumer's store: staged rows, acknowledgements, and checkpoints that were changed or deleted.

`coranto_consumers.recovery.proofs` decides which checkpoint the tables agree with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from coranto.audit import Fact, Finding, Kind, SubjectKind
from coranto.client import JournalClient
from coranto.errors import CorantoError, JournalNotFound
from coranto.messages import Checkpoint
from coranto.recovery import Diagnosis, Loss, RecoveryStep, Remark, StepKind
from coranto.security.tokens import shows
from coranto_consumers.audit.check import ConsumerCheck
from coranto_consumers.recovery.losses import CHECKPOINT, LOSSES, can_be_accepted, is_unsettled, loss_of
from coranto_consumers.recovery.proofs import Diagnosed, accept_steps, evident_fence, offsets_of, restore_steps
from coranto_consumers.recovery.repairable import RepairableStore


class StoreDoctor:
    """Finds contradictions between a consumer's store and its journals with an audit, and repairs them if possible.

    Every change of a checkpoint raises the fence, so a running process of the consumer cannot commit in between. That
    process stops or restarts, as after any change of owner.
    """

    def __init__(
        self, client: JournalClient, store: RepairableStore, new_check: Callable[[bool], ConsumerCheck]
    ) -> None:
        """`new_check` returns the audit. Its argument is True to accept the current state."""
        self._client = client
        self._store = store
        self._new_check = new_check
        self._approved: list[Loss] = []

    async def diagnose(self) -> Diagnosis:
        check = self._new_check(False)
        found = (await check.run()).findings
        diagnosed = Diagnosed(found, check.known, check.sound)
        steps: list[RecoveryStep] = []
        losses: list[Loss] = []
        remarks: list[Remark] = []
        damaged = frozenset(
            each.subject.name for each in found if each.kind in CHECKPOINT and each.subject.kind is SubjectKind.SHARD
        )
        restored = restore_steps(check, diagnosed, damaged)
        if not restored and self._store.shows_present_tables:
            restored = accept_steps(check, diagnosed, damaged)
        steps += restored
        repaired = {step.subject for step in restored}
        lost = [each for each in found if self._is_loss(each)]
        self._approved = [loss_of(each) for each in lost]
        remaining = [each for each in lost if not self._is_repaired(each, repaired, damaged)]
        for each in found:
            name = each.subject.name
            if each.kind is Kind.ROWS_LEFT_STAGED:
                facts = each.facts
                steps.append(_delete_step(name, str(facts["table"]), facts["fence"], facts["rows"]))
            elif each.kind is Kind.ACKNOWLEDGEMENT_MISSING and not self._is_loss(each):
                steps.append(
                    RecoveryStep(
                        StepKind.APPEND_ACKNOWLEDGEMENTS,
                        name,
                        f"raise its fence, and append the acknowledgement of its checkpoint to {each.facts['journal']}",
                        facts={"journal": each.facts["journal"], "clock": each.facts["clock"]},
                    )
                )
            elif each in remaining:
                losses.append(loss_of(each))
            elif each.is_error and each not in lost and not self._is_repaired(each, repaired, damaged):
                remarks.append(Remark(name, each.message))
        # A step that raises a fence makes all currently staged rows stale.
        left = {(step.subject, step.facts["table"]) for step in steps if step.kind is StepKind.DELETE_STAGED_ROWS}
        steps += [
            _delete_step(name, each.table, each.fence, each.rows)
            for name in sorted(repaired)
            for each in check.staged.get(name, ())
            if (name, each.table) not in left
        ]
        takes = any(step.kind is StepKind.TAKE_CHECKPOINT for step in restored)
        if check.remembers and (takes or any(map(can_be_accepted, remaining))):
            steps.append(_accept_step(check.consumer, remaining))
        if damaged - repaired:
            remarks.append(_without_proof(check.consumer, remaining))
        return Diagnosis(steps, losses, remarks)

    @staticmethod
    def _is_loss(finding: Finding) -> bool:
        """Return True for a loss. An acknowledgement that was never appended is not lost: recovery appends it."""
        missing = finding.kind is Kind.ACKNOWLEDGEMENT_MISSING and finding.facts.get("appended") is False
        return finding.is_error and finding.kind in LOSSES and not missing

    @staticmethod
    def _is_repaired(finding: Finding, repaired: set[str], damaged: frozenset[str]) -> bool:
        """Return True if restoring checkpoints also repairs this finding."""
        if (
            finding.kind in (Kind.EXPECTATION_FAILED, Kind.NOT_EXAMINED)
            and finding.subject.kind is not SubjectKind.SHARD
        ):
            return bool(repaired) and damaged <= repaired
        return finding.kind in CHECKPOINT and finding.subject.name in repaired

    async def act(self, step: RecoveryStep) -> str:
        match step.kind:
            case StepKind.DELETE_STAGED_ROWS:
                deleted = await asyncio.to_thread(self._store.delete_staged, step.subject, str(step.facts["table"]))
                return f"deleted {deleted} rows"
            case StepKind.APPEND_ACKNOWLEDGEMENTS:
                return await self._append(step)
            case StepKind.RESTORE_CHECKPOINT:
                return await self._restore(step)
            case StepKind.TAKE_CHECKPOINT:
                return await self._take(step)
            case StepKind.ACCEPT_LOSS:
                return await self._accept(step)
            case _:
                raise CorantoError(f"{step.kind.value} is not a step for a store")

    async def _append(self, step: RecoveryStep) -> str:
        fence, checkpoint = await asyncio.to_thread(self._store.raise_fence, step.subject)
        return f"appended to {', '.join(await self._acknowledge(checkpoint))} under fence {fence}"

    async def _acknowledge(self, checkpoint: Checkpoint) -> list[str]:
        """Append a checkpoint's acknowledgements, as a starting consumer does. Return the journals."""
        appended = []
        for journal, content in sorted(checkpoint.ack_intents.items()):
            if content:
                try:
                    await self._client.append(journal, content, retry_unknown=True)
                except JournalNotFound:
                    if not shows(self._client.config.auth, journal):
                        raise  # The token may hide the journal.
                    continue
                appended.append(journal)
        return appended

    async def _restore(self, step: RecoveryStep) -> str:
        check = self._new_check(False)
        known = await check.load()
        shard = known.shards.get(step.subject)
        if shard is None:
            raise CorantoError(f"no audit remembers a proven checkpoint of {step.subject} any more; plan again")
        checkpoint, fence = shard.proven_checkpoint(), int(str(step.facts["known_fence"]))
        if offsets_of(checkpoint) != step.facts["offsets"]:
            raise CorantoError(f"another checkpoint of {step.subject} was proven since, so plan again")
        fence = await asyncio.to_thread(self._store.write_checkpoint, step.subject, fence, checkpoint)
        if (back := shard.restored_to_proven()) != shard:  # A cheap audit has remembered the wrong checkpoint.
            await check.keep(replace(known, shards={**known.shards, step.subject: back}))
        return f"wrote it back under fence {fence}"

    async def _take(self, step: RecoveryStep) -> str:
        known = int(str(step.facts["known_fence"]))
        present = await asyncio.to_thread(self._store.raise_fence, step.subject)
        offsets = offsets_of(present.checkpoint)
        if offsets != step.facts["offsets"]:
            raise CorantoError(f"the checkpoint of {step.subject} is now {', '.join(offsets)}, so plan again")
        return f"it continues there under fence {await self._settle(step.subject, known, present.checkpoint)}"

    async def _settle(self, shard: str, known: int, checkpoint: Checkpoint) -> int:
        """Append a checkpoint's acknowledgements, write it under a fence above `known`, and return the new fence.

        It is written without the acknowledgements: their journals may have later ones, which would contradict it.
        """
        await self._acknowledge(checkpoint)
        settled = replace(checkpoint, ack_intents={})
        return await asyncio.to_thread(self._store.write_checkpoint, shard, known, settled)

    async def _accept(self, step: RecoveryStep) -> str:
        """Accept the current state in audits. Raises CorantoError if more was lost since the plan was approved."""
        check = self._new_check(False)
        found = [each for each in (await check.run()).findings if self._is_loss(each)]
        more = [each for each in found if loss_of(each) not in self._approved]
        if more:
            raise CorantoError(f"more was lost since the plan was approved, so plan again: {more[0]}")
        for shard in sorted({each.subject.name for each in found if is_unsettled(each)}):
            present = await asyncio.to_thread(self._store.raise_fence, shard)
            await self._settle(shard, evident_fence(found, shard), present.checkpoint)
        await self._new_check(True).run()
        return "accepted"


def _delete_step(shard: str, table: str, fence: Fact, rows: Fact) -> RecoveryStep:
    return RecoveryStep(
        StepKind.DELETE_STAGED_ROWS,
        shard,
        f"delete {rows} rows that fence {fence} left in {table}",
        facts={"table": table, "fence": fence},
    )


def _accept_step(consumer: str, lost: Sequence[Finding]) -> RecoveryStep:
    unsettled = sorted({each.subject.name for each in lost if is_unsettled(each)})
    text = f"let {', '.join(unsettled)} continue under a fence above all that audits know, and " if unsettled else ""
    return RecoveryStep(
        StepKind.ACCEPT_LOSS,
        consumer,
        f"{text}accept the current state of its store as correct, so that audits report only new findings",
        loses="the differences above are not reported again",
        facts={"unsettled": unsettled} if unsettled else {},
    )


def _without_proof(consumer: str, lost: Sequence[Finding]) -> Remark:
    advice = (
        "restore the whole database from a backup, or let a consumer of another name process the journals again into "
        "other tables"
    )
    if all(can_be_accepted(each) for each in lost):
        advice = (
            "if the whole database was just restored from a backup, its tables and checkpoints are of one moment: "
            f"accept that, and the consumer continues from there. Otherwise {advice}"
        )
    return Remark(
        consumer,
        "no audit has proven a checkpoint that its tables agree with and that it could continue from, and neither is "
        f"that shown of the present one: {advice}",
    )
