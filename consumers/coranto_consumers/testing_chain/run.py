"""One run: a chain, its nemesis, and the verdict."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from coranto.telemetry import progress
from coranto_consumers.testing_chain.chain import Chain, ChainOptions
from coranto_consumers.testing_chain.nemesis import Nemesis
from coranto_consumers.testing_chain.verdict import Verdict, conclude


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was done to a chain, and what came of it."""

    verdict: Verdict
    kills: dict[str, int]
    """Processes that were killed, of each kind."""
    harm: dict[str, int]
    """How often there was each kind of it."""
    own_ends: dict[str, list[str]]
    """How processes ended that nobody killed, by name."""

    @property
    def problems(self) -> list[str]:
        return self.verdict.problems

    def __str__(self) -> str:
        lines = [
            "killed " + " and ".join(f"{count} {kind}s" for kind, count in self.kills.items()),
            ", ".join(f"{kind} {count}" for kind, count in sorted(self.harm.items())),
            str(self.verdict),
        ]
        if self.own_ends:
            lines.insert(2, f"ended by themselves: {self.own_ends}")
        return "\n  ".join(lines)


async def run_chain(folder: Path, options: ChainOptions, seconds: float, *, kills: int = 0, alerts: int = 0) -> Outcome:
    """Start a chain in `folder`, do harm for so long, and judge. In the main thread.

    Harm goes on until there were so many kills of each kind, and so many alerts.

    Raises ClusterError when the chain does not get on, during harm or after it.
    """
    async with Chain(folder, options) as chain:
        nemesis = Nemesis(chain)
        with progress("Harming", int(seconds), unit="s") as report:
            harming = asyncio.create_task(nemesis.run(seconds, kills=kills, alerts=alerts))
            try:
                while not harming.done():
                    await asyncio.wait([harming], timeout=1.0)
                    report.advance()
                    killed = ", ".join(f"{count} {kind}s" for kind, count in nemesis.kills.items())
                    numbers = sum(publisher.numbers for publisher in chain.publishers)
                    report.note(f"killed {killed}; {numbers} numbers, {len(chain.alerts)} alerts")
            finally:
                harming.cancel()
                await asyncio.wait([harming])
            harming.result()
        verdict = await conclude(chain)
        own_ends = {place.name: place.own_ends for place in chain.places if place.own_ends}
        return Outcome(verdict, nemesis.kills, dict(nemesis.done), own_ends)
