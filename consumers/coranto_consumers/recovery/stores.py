"""A consumer's store: staged rows, acknowledgements, and checkpoints that were changed or deleted.

`coranto_consumers.recovery.proofs` decides which checkpoint the tables agree with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from coranto.audit import Finding, Kind, SubjectKind
from coranto.client import JournalClient
from coranto.errors import CorantoError, JournalNotFound
from coranto.recovery import Diagnosis, Loss, RecoveryStep, Remark, StepKind
from coranto.security.tokens import shows
from coranto_consumers.audit.check import ConsumerCheck
from coranto_consumers.recovery.mended import MendedStore
from coranto_consumers.recovery.proofs import Diagnosed, loss_of, offsets_of, proven, proven_checkpoint, taken

_CHECKPOINT: Final = frozenset(
    {
        Kind.CHECKPOINT_GONE,
        Kind.CHECKPOINT_UNREADABLE,
        Kind.CHECKPOINT_SET_BACK,
        Kind.CHECKPOINT_AHEAD,
        Kind.CHECKPOINT_DIFFERS,
    }
)
"""The kinds of findings about checkpoints that are not the ones that the consumer wrote last."""
_LOSSES: Final = frozenset(
    {
        Kind.JOURNAL_GONE,
        Kind.JOURNAL_RECREATED,
        Kind.UNREAD_CONTENT_GONE,
        Kind.EXPECTATION_FAILED,
        *_CHECKPOINT,
    }
)


class StoreDoctor:
    """Finds damage between a consumer's store and its journals, by its audit, and mends what can be mended.

    Every change raises the fence first, so a process of the consumer that still runs cannot commit in between. That
    process stops or starts anew, as after any change of owner.
    """

    def __init__(self, client: JournalClient, store: MendedStore, new_check: Callable[[bool], ConsumerCheck]) -> None:
        """`new_check` returns the audit; its argument says that the present state is to be accepted."""
        self._client = client
        self._store = store
        self._new_check = new_check

    async def diagnose(self) -> Diagnosis:
        check = self._new_check(False)
        found = (await check.run()).findings
        diagnosed = Diagnosed(found, check.known, check.sound)
        steps: list[RecoveryStep] = []
        losses: list[Loss] = []
        remarks: list[Remark] = []
        damaged = frozenset(
            each.subject.name for each in found if each.kind in _CHECKPOINT and each.subject.kind is SubjectKind.SHARD
        )
        restored = proven(check, diagnosed, damaged)
        if not restored and self._store.shows_present_tables:
            restored = taken(check, diagnosed, damaged)
        steps += restored
        mended = {step.subject for step in restored}
        for each in found:
            name = each.subject.name
            if each.kind is Kind.ROWS_LEFT_STAGED:
                steps.append(
                    RecoveryStep(
                        StepKind.DELETE_STAGED_ROWS,
                        name,
                        f"delete {each.facts['rows']} rows that fence {each.facts['fence']} left in "
                        f"{each.facts['table']}",
                        facts={"table": each.facts["table"], "fence": each.facts["fence"]},
                    )
                )
            elif each.kind is Kind.ACKNOWLEDGEMENT_MISSING and each.facts.get("appended") is False:
                steps.append(
                    RecoveryStep(
                        StepKind.APPEND_ACKNOWLEDGEMENTS,
                        name,
                        f"raise its fence, and append the acknowledgement of its checkpoint to {each.facts['journal']}",
                        facts={"journal": each.facts["journal"], "clock": each.facts["clock"]},
                    )
                )
            elif each.kind in _LOSSES and self._is_mended(each, mended, damaged):
                continue
            elif each.kind in _LOSSES or each.kind is Kind.ACKNOWLEDGEMENT_MISSING:
                losses.append(loss_of(each))
            elif each.is_error:
                remarks.append(Remark(name, each.message))
        takes = any(step.kind is StepKind.TAKE_CHECKPOINT for step in restored)
        if (losses or takes) and check.remembers:
            steps.append(
                RecoveryStep(
                    StepKind.ACCEPT_LOSS,
                    check.consumer,
                    "take the present state of its store for right, so that audits report only what is new",
                    loses="the differences above are not reported again",
                )
            )
        if damaged - mended:
            remarks.append(
                Remark(
                    check.consumer,
                    "no audit has proven a checkpoint that its tables agree with, and neither is that shown of the "
                    "present one. If the whole database was just restored from a backup, its tables and checkpoints "
                    "are of one moment: accept that, and the consumer continues from there. Otherwise restore the "
                    "whole database from a backup, or let a consumer of another name process the journals again into "
                    "other tables",
                )
            )
        return Diagnosis(steps, losses, remarks)

    @staticmethod
    def _is_mended(finding: Finding, mended: set[str], damaged: frozenset[str]) -> bool:
        """Return True if restoring checkpoints also mends this finding."""
        if finding.kind is Kind.EXPECTATION_FAILED:
            return bool(mended) and damaged <= mended
        return finding.kind in _CHECKPOINT and finding.subject.name in mended

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
                await self._new_check(True).run()
                return "accepted"
            case _:
                raise CorantoError(f"{step.kind.value} is no step for a store")

    async def _append(self, step: RecoveryStep) -> str:
        """Do what a start of the consumer does: raise the fence, and append the checkpoint's acknowledgements."""
        fence, checkpoint = await asyncio.to_thread(self._store.raise_fence, step.subject)
        appended = []
        for journal, content in sorted(checkpoint.ack_intents.items()):
            if content:
                try:
                    await self._client.append(journal, content, retry_unknown=True)
                except JournalNotFound:
                    if not shows(self._client.config.auth, journal):
                        raise  # The token may hide it.
                    continue
                appended.append(journal)
        return f"appended to {', '.join(appended)} under fence {fence}"

    async def _restore(self, step: RecoveryStep) -> str:
        check = self._new_check(False)
        known = (await check.load()).shards.get(step.subject)
        checkpoint = None if known is None else proven_checkpoint(known)
        if known is None or checkpoint is None:
            raise CorantoError(f"no audit remembers a proven checkpoint of {step.subject} any more")
        fence = await asyncio.to_thread(self._store.write_checkpoint, step.subject, known.fence, checkpoint)
        return f"wrote it back under fence {fence}"

    async def _take(self, step: RecoveryStep) -> str:
        known = int(str(step.facts["known_fence"]))
        present = await asyncio.to_thread(self._store.raise_fence, step.subject)
        offsets = offsets_of(present.checkpoint)
        if offsets != step.facts["offsets"]:
            raise CorantoError(f"the checkpoint of {step.subject} is now {', '.join(offsets)}, so plan again")
        fence = await asyncio.to_thread(self._store.write_checkpoint, step.subject, known, present.checkpoint)
        return f"it continues there under fence {fence}"
