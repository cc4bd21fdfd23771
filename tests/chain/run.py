"""One run: a chain, its nemesis, and the verdict."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from coranto.telemetry import progress
from tests.chain.chain import Chain, ChainOptions
from tests.chain.nemesis import ChainNemesis
from tests.chain.verdict import ChainVerdict, conclude


@dataclass(frozen=True, slots=True)
class ChainResult:
    """The harm to a chain, and the result."""

    verdict: ChainVerdict
    kills: dict[str, int]
    """The number of killed processes of each kind."""
    harm: dict[str, int]
    """The number of times that each kind of harm was done."""
    own_ends: dict[str, list[str]]
    """The exits of processes that the nemesis did not kill, by name."""

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


async def run_chain(
    folder: Path, options: ChainOptions, seconds: float, *, kills: int = 0, alerts: int = 0
) -> ChainResult:
    """Start a chain in `folder`, do harm for `seconds`, and check the result. Call it in the main thread.

    Harm continues until there were at least `kills` kills of each kind of process, and `alerts` alerts. Raises
    ClusterError when the chain makes no progress, during harm or after it.
    """
    async with Chain(folder, options) as chain:
        nemesis = ChainNemesis(chain)
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
        return ChainResult(verdict, nemesis.kills, dict(nemesis.done), own_ends)
