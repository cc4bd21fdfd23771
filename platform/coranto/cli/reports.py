"""Print the report of an audit."""

from __future__ import annotations

import typer

from coranto.audit import Report, Severity
from coranto.cli.output import printable
from coranto.telemetry import amount

_COLOURS = {Severity.ERROR: typer.colors.RED, Severity.WARNING: typer.colors.YELLOW}


def print_report(report: Report, *, as_json: bool, err: bool = False) -> None:
    """Print a report: its JSON, or its findings, the extent of the audit, and a summary. `err`: to standard error."""
    if as_json:
        typer.echo(report.to_json(indent=2), err=err)
        return
    for each in report.findings:
        word = typer.style(f"{each.severity:<8}{each.kind}", fg=_COLOURS.get(each.severity))
        typer.echo(f"{word}  {printable(str(each))}", err=err)
    for coverage in report.coverage:
        left = f", {_count(coverage.left_out, coverage.unit)} left out ({coverage.reason})" if coverage.left_out else ""
        examined = _count(coverage.examined, coverage.unit)
        typer.echo(f"{printable(coverage.check)}: {examined} examined{left}", err=err)
    typer.echo(report.summary, err=err)


def _count(count: int, unit: str) -> str:
    return amount(count, unit) if unit == "bytes" else f"{count} {unit}"
