"""The status of a copy of rows or messages, which `coranto ingest status` and `coranto table status` print."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import typer

from coranto.cli.output import Output, print_table

_SHOWN: Final = 80
"""The maximum length of a position in a table; JSON has all of it."""


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A part of a source, such as a split or a journal, and its progress."""

    part: str
    position: object
    """None before the first row."""
    behind: int | None
    """The rows or bytes after the position, which are not copied yet; None if unknown."""
    problem: str = ""

    @property
    def cells(self) -> Sequence[str]:
        position = self.position
        text = "-" if position is None else position if isinstance(position, str) else json.dumps(position)
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        return [self.part, shown, "?" if self.behind is None else str(self.behind), self.problem]


@dataclass(frozen=True, slots=True)
class CopyStatus:
    """A named copy from a source to a target. `rows` is None if the target does not exist."""

    name: str
    source: str
    target: str
    rows: int | None
    parts: Sequence[SourcePart]
    unit: str
    """The unit of the parts' `behind`, such as `bytes`."""

    @property
    def behind(self) -> int | None:
        """The sum of all parts; None if one of them is unknown."""
        known = [each.behind for each in self.parts if each.behind is not None]
        return sum(known) if len(known) == len(self.parts) else None


def print_status(status: CopyStatus, output: Output, more: Mapping[str, Any], *remarks: str) -> None:
    """Print a status: a table of the parts and a line with the sums and `remarks`, or JSON, with the fields `more`."""
    if output is Output.JSON:
        parts = [
            {"part": each.part, "position": each.position, "behind": each.behind, "problem": each.problem}
            for each in status.parts
        ]
        sums = {"rows": status.rows, "behind": status.behind, "unit": status.unit}
        facts = {"name": status.name, "source": status.source, "target": status.target, **sums, **more, "parts": parts}
        typer.echo(json.dumps(facts, indent=2))
        return
    print_table(["PART", "POSITION", "BEHIND", "PROBLEM"], [each.cells for each in status.parts])
    rows = f"there is no {status.target} yet" if status.rows is None else f"{status.rows:,} rows in {status.target}"
    behind = "an unknown lag" if status.behind is None else f"{status.behind:,} {status.unit} behind"
    typer.echo(f"{status.name}: {'; '.join([rows, behind, *remarks])}")
