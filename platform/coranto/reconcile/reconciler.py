"""Application of a document's changes, in as many transactions as necessary."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from coranto.coordination.etcd import MAX_TXN_OPS
from coranto.errors import ApplyOutcomeUnknown, CorantoError, EtcdTransactionFailed, Unavailable
from coranto.reconcile.kinds import SpecAccess, SpecChange, SpecKind
from coranto.reconcile.plan import SpecPlan, SpecStep, make_plan
from coranto.wire import protocol_pb2 as pb

BATCH_CHANGES: Final = 100
"""The default number of changes in a transaction. Brokers add their own conditions."""
_ATTEMPTS: Final = 5
"""Maximum consecutive attempts without success."""
_PAUSE: Final = 0.05
"""Seconds before the second attempt, while brokers receive other processes' changes. Doubles with each attempt."""
_SHOWN_CONFLICTS: Final = 10


class SpecReconciler:
    """Makes the specs of one kind match a document.

    `source` is the document's name in errors. Every change expects the revision that it was compared at. After a
    conflict or a lost answer, specs are compared again. A document of more changes than `size` (0: BATCH_CHANGES) takes
    several transactions; after an interruption, applying it again continues with the rest.
    """

    def __init__(
        self,
        kind: SpecKind,
        specs: SpecAccess,
        wanted: Iterable[SpecChange],
        *,
        source: str,
        prune: pb.LabelSelector | None = None,
        size: int = 0,
    ) -> None:
        self._kind = kind
        self._specs = specs
        self._wanted = tuple(wanted)
        self._source = source
        self._prune = prune
        self.size = min(size or BATCH_CHANGES, MAX_TXN_OPS)
        self._done: dict[str, SpecStep] = {}

    async def plan(self) -> SpecPlan:
        """Compare the document with the present specs, without changing any. Raises InvalidInput."""
        return make_plan(self._kind, self._wanted, await self._specs.present(), prune=self._prune)

    def check(self, plan: SpecPlan) -> None:
        """Raise EtcdTransactionFailed for a plan that has conflicts."""
        if not plan.conflicts:
            return
        shown, more = plan.conflicts[:_SHOWN_CONFLICTS], len(plan.conflicts) - _SHOWN_CONFLICTS
        detail = "; ".join([*shown, *([f"and {more} more"] if more > 0 else [])])
        raise EtcdTransactionFailed(f"apply of {self._source}", detail=detail)

    async def apply(
        self, plan: SpecPlan, on_applied: Callable[[Sequence[SpecStep]], None] = lambda _: None
    ) -> SpecPlan:
        """Apply a plan of this reconciler, and return the steps that were done or not needed.

        Calls `on_applied` with the steps of each transaction. Raises EtcdTransactionFailed for a conflict; a conflict
        in the given plan is raised before any change. Later errors report the number of applied changes.
        """
        failures = 0
        while True:
            try:
                self.check(plan)
                failed = await self._apply_transactions(plan, on_applied)
                if failed is None:
                    return self._result(plan)
                batch, error, progressed = failed
                failures = 1 if progressed else failures + 1
                if failures == _ATTEMPTS:
                    raise error
                await asyncio.sleep(_PAUSE * 2 ** (failures - 1))
                plan = await self.plan()
                self._record_done(batch, plan, on_applied)
            except CorantoError as error:
                if not self._done:
                    raise
                total = len(self._done.keys() | {step.name for step in plan.due})
                raise CorantoError(
                    f"{error} The first {len(self._done)} of {total} changes were applied. "
                    "Apply again to continue with the others."
                ) from error

    async def _apply_transactions(
        self, plan: SpecPlan, on_applied: Callable[[Sequence[SpecStep]], None]
    ) -> tuple[Sequence[SpecStep], CorantoError, bool] | None:
        """Apply the plan's transactions. Returns the failed one, its error, and True if any succeeded before it."""
        progressed = False
        for batch in plan.transactions(self.size):
            try:
                await self._specs.apply([step.change for step in batch])
            except (EtcdTransactionFailed, ApplyOutcomeUnknown, Unavailable) as error:
                return batch, error, progressed
            progressed = True
            self._done.update((step.name, step) for step in batch)
            on_applied(batch)
        return None

    def _record_done(
        self,
        batch: Sequence[SpecStep],
        plan: SpecPlan,
        on_applied: Callable[[Sequence[SpecStep]], None],
    ) -> None:
        """Record the steps of a failed transaction that the new plan no longer needs as done.

        The transaction's answer was lost, or another process made the same changes.
        """
        needed = {step.name for step in plan.due}
        done = [step for step in batch if step.name not in needed]
        self._done.update((step.name, step) for step in done)
        if done:
            on_applied(done)

    def _result(self, plan: SpecPlan) -> SpecPlan:
        named = {step.name for step in plan.steps}
        steps = [self._done.get(step.name, step) for step in plan.steps]
        steps += [step for step in self._done.values() if step.name not in named]
        return SpecPlan(self._kind, tuple(steps), (), plan.digest)
