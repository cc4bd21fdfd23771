"""A consumer's store: staged rows, acknowledgements, and checkpoints that were changed or deleted.

A checkpoint is restored only with proof: an earlier audit has proven it, and every expectation shows that the tables
hold exactly the messages that it covers. Otherwise the tables and the checkpoint are of different moments, and no
program can tell which messages they have in common.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from coranto.audit import Finding, Kind, SubjectKind
from coranto.client import JournalClient
from coranto.errors import CorantoError, CorruptData, JournalNotFound
from coranto.messages import Checkpoint, Source
from coranto.recovery import Diagnosis, Loss, RecoveryStep, Remark, StepKind
from coranto.security.tokens import shows
from coranto_consumers.audit.check import ConsumerCheck
from coranto_consumers.audit.expectations import Number, agree, number
from coranto_consumers.audit.memory import Known, KnownShard
from coranto_consumers.recovery.mended import MendedStore

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


@dataclass(frozen=True, slots=True)
class _Diagnosed:
    findings: list[Finding]
    known: Known
    sound: Mapping[str, KnownShard]


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
        diagnosed = _Diagnosed(found, check.known, check.sound)
        steps: list[RecoveryStep] = []
        losses: list[Loss] = []
        remarks: list[Remark] = []
        damaged = {
            each.subject.name for each in found if each.kind in _CHECKPOINT and each.subject.kind is SubjectKind.SHARD
        }
        restored = self._restorations(check, diagnosed, damaged)
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
                losses.append(Loss(name, each.message))
            elif each.is_error:
                remarks.append(Remark(name, each.message))
        if losses and check.remembers:
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
                    "no audit has proven a checkpoint that its tables agree with. Restore the whole store from a "
                    "backup, or let a consumer of another name process the journals anew into other tables",
                )
            )
        return Diagnosis(steps, losses, remarks)

    @staticmethod
    def _is_mended(finding: Finding, mended: set[str], damaged: set[str]) -> bool:
        """Return True if restoring checkpoints also mends this finding."""
        if finding.kind is Kind.EXPECTATION_FAILED:
            return bool(damaged) and damaged <= mended
        return finding.kind in _CHECKPOINT and finding.subject.name in mended

    def _restorations(self, check: ConsumerCheck, diagnosed: _Diagnosed, damaged: set[str]) -> list[RecoveryStep]:
        """Return steps that write proven checkpoints back, if the tables agree with them."""
        if not damaged or not check.expectations:
            return []
        shards = {**diagnosed.sound, **{name: diagnosed.known.shards.get(name) for name in damaged}}
        for expectation, value in zip(check.expectations, check.values, strict=True):
            total: Number = diagnosed.known.allowances.get(str(expectation), 0)
            for shard in shards.values():
                if shard is None or not _is_proven(shard, expectation.measure.name):
                    return []
                total += sum(source.totals[expectation.measure.name] for source in shard.sources.values())
            found = None if isinstance(value, Exception) else number(value)
            if found is None or not agree(found, total):
                return []
        steps = []
        for name in sorted(damaged):
            known = diagnosed.known.shards[name]
            offsets = [f"{journal}={source.read_through}" for journal, source in sorted(known.sources.items())]
            steps.append(
                RecoveryStep(
                    StepKind.RESTORE_CHECKPOINT,
                    name,
                    f"write back the checkpoint that an audit has proven ({', '.join(offsets)}) under a higher fence. "
                    "The tables agree with it",
                    facts={"offsets": offsets, "known_fence": known.fence},
                )
            )
        return steps

    async def act(self, step: RecoveryStep) -> str:
        match step.kind:
            case StepKind.DELETE_STAGED_ROWS:
                deleted = await asyncio.to_thread(self._store.delete_staged, step.subject, str(step.facts["table"]))
                return f"deleted {deleted} rows"
            case StepKind.APPEND_ACKNOWLEDGEMENTS:
                return await self._append(step)
            case StepKind.RESTORE_CHECKPOINT:
                return await self._restore(step)
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
        checkpoint = None if known is None else _proven_checkpoint(known)
        if known is None or checkpoint is None:
            raise CorantoError(f"no audit remembers a proven checkpoint of {step.subject} any more")
        fence = await asyncio.to_thread(self._store.write_checkpoint, step.subject, known.fence, checkpoint)
        return f"wrote it back under fence {fence}"


def _is_proven(shard: KnownShard, measure: str) -> bool:
    """Return True if all of a shard's sources are proven, with their totals, at the offsets where they were last
    seen."""
    return all(
        source.totals_complete and measure in source.totals and _is_current(journal, source.read_through, shard)
        for journal, source in shard.sources.items()
    )


def _is_current(journal: str, read_through: int, shard: KnownShard) -> bool:
    try:
        proven = shard.sources[journal].proven_source(journal)
    except (CorruptData, ValueError):
        return False
    return proven is not None and proven.read_through == read_through


def _proven_checkpoint(shard: KnownShard) -> Checkpoint | None:
    """Return the checkpoint of a shard's proven sources. Its acknowledgements were found in their journals."""
    sources: dict[str, Source] = {}
    for journal, known in shard.sources.items():
        proven = known.proven_source(journal)
        if proven is None or proven.read_through != known.read_through:
            return None
        sources[journal] = proven
    return Checkpoint(sources)
