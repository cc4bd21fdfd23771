"""`coranto audit`: audits journals, and verifies signed reports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from typer.core import TyperGroup

from coranto.audit import AuditOptions, Depth, Report, Severity, audit_journals
from coranto.audit.journals import DEFAULT_BUDGET, budget_of
from coranto.audit.signing import REPORT, sign_report, verify_report
from coranto.cli.connect import Endpoint, find_cluster, with_client
from coranto.cli.output import Format, note, print_table
from coranto.cli.reports import print_report
from coranto.cli.selectors import selector_of
from coranto.client import JournalClient
from coranto.fragments.stores import StoreRegistry
from coranto.security.documents import environment_keys
from coranto.telemetry import amount, progress

DEFAULT_COMMAND: Final = "run"


class _AuditGroup(TyperGroup):
    """A group with a default command, so that `coranto audit SELECTOR` needs no `run`."""

    default_command = DEFAULT_COMMAND

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_AuditGroup)


@app.command(DEFAULT_COMMAND)
def run(
    selector: Annotated[
        str,
        typer.Argument(
            help="Journals by labels (`name:prefix=shop/, !draft`), by name, or by a path that ends in `/`. "
            "Default: all journals."
        ),
    ] = "",
    deep: Annotated[bool, typer.Option("--deep", help="Read content too, and compare its SHA-1.")] = False,
    budget: Annotated[
        str,
        typer.Option(
            help="The stored content that a deep audit reads, such as 64M or 2GiB, or `all`. The next one "
            "continues with the content read longest ago."
        ),
    ] = f"{DEFAULT_BUDGET >> 30}GiB",
    output: Annotated[Format, typer.Option("--output", "-o", help="Format of the report.")] = Format.TABLE,
    sign: Annotated[
        bool, typer.Option("--sign", help="Print the report signed with the first key of $CORANTO_AUTH_KEYS.")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Also write the report to this file, signed with --sign.")] = None,
    memory: Annotated[
        str,
        typer.Option(
            envvar="CORANTO_AUDIT_MEMORY",
            help="URL of the store with the records of earlier audits. Default: each journal's first store.",
        ),
    ] = "",
    allow_empty: Annotated[bool, typer.Option("--allow-empty", help="Accept a selector that matches nothing.")] = False,
    accept: Annotated[
        str,
        typer.Option(
            metavar="REASON",
            help="Accept the journals as they are now, for this reason: losses are reported one last time.",
        ),
    ] = "",
    endpoint: Endpoint = None,
) -> None:
    """Audit journals. The exit code is 0 if they are sound, and 1 if not or if they could not be examined."""
    if output is Format.YAML:
        raise typer.BadParameter("a report is a table or JSON", param_hint="--output")
    keys = environment_keys(REPORT) if sign else None
    options = AuditOptions(
        Depth.DEEP if deep else Depth.CHEAP,
        budget_of(budget, "--budget"),
        memory,
        allow_empty=allow_empty,
        accept=accept.strip(),
    )
    stores = StoreRegistry(find_cluster(endpoint).file_root)

    async def audit(client: JournalClient) -> Report:
        with progress("Auditing journals", unit="journals") as shown:
            return await audit_journals(client, stores, selector_of(selector), options, progress=shown)

    report = with_client(endpoint, audit)
    text = sign_report(report, keys) if keys is not None else report.to_json(indent=2)
    if save is not None:
        save.write_text(f"{text}\n")
    if sign and save is None:
        typer.echo(text)
        _show(report, err=True)
    else:
        _show(report, as_json=output is Format.JSON)
    raise typer.Exit(0 if report.sound else 1)


@app.command("verify")
def verify(
    report: Annotated[Path, typer.Argument(help="A file with a signed report; `-` reads standard input.")],
    output: Annotated[Format, typer.Option("--output", "-o", help="Format of the report.")] = Format.TABLE,
) -> None:
    """Verify a signed report with the keys of $CORANTO_AUTH_KEYS, and show it.

    The exit code is 0 if it is genuine and sound, and 1 if not.
    """
    signed = sys.stdin.read() if str(report) == "-" else report.read_text()
    found = verify_report(signed, environment_keys(REPORT))
    _show(found, as_json=output is Format.JSON)
    note("the signature is good")
    raise typer.Exit(0 if found.sound else 1)


def _show(report: Report, *, as_json: bool = False, err: bool = False) -> None:
    """Print a report. For people, a row per journal comes first."""
    if report.subjects and not as_json:
        columns = ["JOURNAL", "FIRST", "STORED TO", "HEAD", "FRAGMENTS", "UNSTORED", "RESULT"]
        print_table(columns, [_row(report, name) for name in report.subjects], Console(stderr=err))
        typer.echo("", err=err)
    print_report(report, as_json=as_json, err=err)


def _row(report: Report, name: str) -> list[str]:
    facts = report.subjects[name]
    severities = [each.severity for each in report.findings if each.subject.name == name]
    worst = next((str(each) for each in (Severity.ERROR, Severity.WARNING) if each in severities), "sound")
    shown = [facts.get(key, "") for key in ("first", "persisted_head", "head", "fragments")]
    live = facts.get("live_bytes", 0)
    unstored = amount(live, "bytes") if isinstance(live, int) else ""
    return [name, *(str(each) for each in shown), unstored, worst]
