"""The screen of `coranto status`: the same parts on a terminal, and as plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coranto.cli.output import printable
from coranto.telemetry import amount

if TYPE_CHECKING:
    from coranto.checkup.status.values import ConsumerState, StatusChange, StatusReport

_FIXED_LINES: Final = 16
"""The number of lines of a screen that do not depend on the numbers of problems, consumers and changes."""
_CELL: Final = 40
"""The maximum width of a cell in `_lines`, except for the last cell of a row."""
_STYLES: Final = {"problem": "bold red", "warning": "yellow", "ok": "green"}


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the screen: a title, and rows. A title without rows is a line."""

    title: str
    rows: Sequence[Sequence[str]] = ()


def summary(report: StatusReport) -> str:
    """Return one line with the health of the cluster."""
    from coranto.checkup import Condition

    problems, warnings = len(report.of(Condition.PROBLEM)), len(report.of(Condition.WARNING))
    word = "healthy" if report.is_healthy else "UNHEALTHY"
    cluster = f"cluster {report.snapshot.cluster}" if report.snapshot is not None else "cluster unknown"
    return (
        f"{word}: {_count(problems, 'problem')}, {_count(warnings, 'warning')}; {_count(report.journals, 'journal')}; "
        f"{cluster}; {_time(report.at)}, took {report.seconds:.1f} s"
    )


def screen(report: StatusReport, height: int = 0) -> RenderableType:
    """Return the screen for a terminal of `height` lines; with 0, its length is not limited by the terminal."""
    style = "bold green" if report.is_healthy else "bold red"
    shown: list[RenderableType] = [Text(printable(summary(report)), style)]
    for part in _parts(report, max(3, (height - _FIXED_LINES) // 4) if height else 20):
        shown.append(Text(f"\n{part.title}", "bold"))
        if part.rows:
            shown.append(_lines(part.rows) if height else _table(part.rows))
    return Group(*shown)


def _table(rows: Sequence[Sequence[str]]) -> Table:
    """Return rows that wrap, so that they are complete."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(Text(printable(cell), _STYLES.get(cell, "")) for cell in row))
    return table


def _lines(rows: Sequence[Sequence[str]]) -> Group:
    """Return a line for each row, cut at the terminal's width: a row that wraps would push others off the screen."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [
        max((len(row[column]) for row in cells if column < len(row) - 1), default=0)
        for column in range(max(map(len, cells)))
    ]
    shown = []
    for row in cells:
        line = Text(no_wrap=True, overflow="ellipsis")
        for column, cell in enumerate(row):
            is_last = column == len(row) - 1
            line.append(cell if is_last else f"{cell[:_CELL]:{min(widths[column], _CELL)}}  ", _STYLES.get(cell, ""))
        shown.append(line)
    return Group(*shown)


def plain_lines(report: StatusReport) -> Iterator[str]:
    """Yield the screen as lines without any control character."""
    yield printable(summary(report))
    for part in _parts(report, 100):
        yield ""
        yield part.title
        for row in part.rows:
            yield "  " + "  ".join(printable(cell) for cell in row if cell)


def _parts(report: StatusReport, most: int) -> Iterator[_Part]:
    from coranto.checkup import Condition

    bad = [*report.of(Condition.PROBLEM), *report.of(Condition.WARNING)]
    rows = [(each.condition.value, each.subject, f"{each.found.rstrip('.')}. To do: {each.advice}") for each in bad]
    yield _Part("UNHEALTHY" if rows else "UNHEALTHY: none", _limited(rows, most))
    behind = [_consumer(each) for each in report.consumers]
    yield _Part("BEHIND" if behind else "BEHIND: no consumer is known", _limited(behind, most))
    yield _changed(report, most)
    yield _Part("CLUSTER", list(_cluster(report)))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _limited(rows: Sequence[Sequence[str]], most: int) -> list[Sequence[str]]:
    if len(rows) <= most:
        return list(rows)
    return [*rows[: most - 1], (f"and {len(rows) - most + 1} more; --output json shows all",)]


def _consumer(state: ConsumerState) -> tuple[str, ...]:
    behind = "unknown" if state.behind is None else amount(state.behind, "bytes")
    where = f"most in {state.most_behind}" if state.most_behind else ""
    if state.unknown:
        where += f"{', ' if where else ''}without {_count(state.unknown, 'journal')} whose heads are unknown"
    return behind, state.name, _count(state.journals, "journal"), where, state.problem, state.home


def _changed(report: StatusReport, most: int) -> _Part:
    if report.changes:
        return _Part("CHANGED", _limited([_change(each) for each in report.changes], most))
    if report.snapshot is None:
        return _Part("CHANGED: unknown, because no broker lists the journals")
    if report.compared_with is None:
        return _Part("CHANGED: this is the first status of this user, so there is nothing to compare with")
    return _Part(f"CHANGED: nothing since {_time(report.compared_with)}")


def _change(change: StatusChange) -> tuple[str, str]:
    return f"{_time(change.since)} to {_clock(change.at)}", change.text


def _cluster(report: StatusReport) -> Iterator[tuple[str, str]]:
    from coranto.checkup import Condition

    answering = [each for each in report.brokers if not each.problem]
    differences = [abs(each.clock_difference) for each in answering if each.clock_difference is not None]
    clocks = f", clocks within {max(differences):.1f} s of this machine's" if differences else ""
    yield "brokers", f"{len(answering)} of {len(report.brokers)} answer{clocks}"
    yield "journals", f"{report.journals:,}, {report.suspended:,} of them suspended"
    good = report.of(Condition.OK)
    versions = [each.found for each in good if each.subject == "versions"]
    if versions:
        yield "versions", versions[0]
    etcd = [f"{each.subject}: {each.found}" for each in good if "etcd" in each.subject]
    if etcd:
        yield "etcd", "; ".join(etcd)
    stores = [each for each in good if each.subject.startswith("store ")]
    if stores:
        yield "stores", f"{len(stores)} healthy"
    for audit in report.audits:
        yield "last audit", f"{_time(audit.at) if audit.at is not None else 'none'} in {audit.store}"
    for each in report.of(Condition.NOT_EXAMINED):
        yield "unknown", f"{each.subject}: {each.found}. {each.advice}"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%SZ")
