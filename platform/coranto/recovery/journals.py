"""Recovery of the journals of a selector and of their consumers, as orchestrators run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coranto.audit import Check, Report, run_checks
from coranto.client import ClientConfig, JournalClient
from coranto.fragments.stores import StoreRegistry
from coranto.recovery.engine import Doctor, Recovery, carry_out, make_plan
from coranto.recovery.losses import JournalDoctor
from coranto.recovery.plan import Plan

MoreDoctors = Callable[[JournalClient, StoreRegistry], Sequence[Doctor]]
"""Creates further doctors, such as consumers' (`coranto_consumers.recovery`)."""
MoreAudits = Callable[[JournalClient, StoreRegistry], Sequence[Check]]
"""Creates further checks for the audit after a recovery."""


@dataclass(frozen=True, slots=True)
class JournalsRecovery:
    """The recovery of the journals of `selector`.

    `memory` is the URL of the store with the records of audits. `doctors` and `audits` add consumers. Both methods read
    all content of the journals, and raise CorantoError if nothing can be examined.
    """

    config: ClientConfig
    selector: str
    memory: str = ""
    doctors: MoreDoctors | None = None
    audits: MoreAudits | None = None

    async def plan(self) -> Plan:
        """Diagnose, and return the plan. Changes nothing."""
        async with JournalClient.of(self.config) as client:
            _, every = self._doctors(client, self._stores())
            return await make_plan(every)

    async def carry_out(self, approved: str) -> Recovery:
        """Carry out the plan whose hash was approved, then audit. Raises NotApproved if the plan has another hash."""
        async with JournalClient.of(self.config) as client:
            stores = self._stores()
            journals, every = self._doctors(client, stores)

            async def verify() -> Report:
                report = await journals.audit()
                if self.audits is not None and (checks := self.audits(client, stores)):
                    report = report.joined(await run_checks(self.selector, checks))
                return report

            return await carry_out(every, approved, verify=verify)

    def _stores(self) -> StoreRegistry:
        return StoreRegistry(self.config.file_root)

    def _doctors(self, client: JournalClient, stores: StoreRegistry) -> tuple[JournalDoctor, list[Doctor]]:
        journals = JournalDoctor(client, stores, self.selector, memory=self.memory)
        return journals, [journals, *(self.doctors(client, stores) if self.doctors is not None else ())]
