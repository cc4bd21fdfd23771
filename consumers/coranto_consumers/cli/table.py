"""`coranto table run|status|check`: write messages to a table, without code."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coranto.cli.connect import Endpoint, connect, find_cluster, with_client
from coranto.cli.copy_status import CopyStatus, SourcePart, print_status
from coranto.cli.output import Output, note
from coranto.errors import InvalidInput
from coranto.extras import with_install_advice
from coranto.process.memory import tune_memory

if TYPE_CHECKING:
    from coranto_consumers.tables.spec import TableSpec

app = typer.Typer(help="Tables without code: messages become rows, each once.", no_args_is_help=True)

NOT_SOUND = 1
"""The exit code of a check that finds errors."""

File = Annotated[Path, typer.Argument(metavar="FILE", help="File of the table, in YAML.", show_default=False)]


@app.command("run")
def run(
    file: File,
    once: Annotated[bool, typer.Option("--once", help="Exit when all current messages are in the table.")] = False,
    accept_changes: Annotated[
        str,
        typer.Option(
            "--accept-changes",
            help="The code that confirms a changed input or store. The error message has it.",
            show_default=False,
        ),
    ] = "",
    endpoint: Endpoint = None,
) -> None:
    """Write the messages of journals or a stream to a table, each once, until Ctrl-C or SIGTERM.

    The table's store keeps the position, so the command may be interrupted and restarted at any time. If it is started
    twice, the later process continues, and the earlier one exits.
    """
    spec = _spec(file)
    from coranto_consumers.outputs.identity import checked_codes
    from coranto_consumers.stopping import StopOnSignals
    from coranto_consumers.tables import RunOptions, run_table

    tune_memory()
    config = find_cluster(endpoint)
    checked_codes(accept_changes)
    until = "until all is read" if once else "until it is stopped"
    note(f"{spec.name}: from {spec.input} to table {spec.table} ({spec.mode}, runner {spec.runner}), {until}")
    with StopOnSignals() as stop:
        done = run_table(config, spec, RunOptions(once, stop, stop.wait, accept_changes=accept_changes))
    typer.echo(f"{spec.name}: {done.messages} messages in {done.transactions} transactions")


@app.command("status")
def status(
    file: File,
    output: Annotated[Output, typer.Option("--output", "-o", help="Output format.")] = Output.TABLE,
    endpoint: Endpoint = None,
) -> None:
    """Show a table's progress: the position in each journal, the unread bytes, the rows and the last commit.

    `coranto consumer lag` shows the unread messages of each journal, and their age.
    """
    spec = _spec(file)
    from coranto_consumers.tables.state import progress_of

    found = with_client(endpoint, lambda client: progress_of(client, spec))
    parts = [SourcePart(each.journal, each.position, each.behind, each.problem) for each in found.journals]
    copy = CopyStatus(spec.name, str(spec.input), f"table {spec.table}", found.rows, parts, "bytes")
    last = None if found.last_commit is None else datetime.fromtimestamp(found.last_commit, UTC).isoformat()
    more = {"messages_behind": found.messages_behind, "last_commit": last}
    print_status(copy, output, more, f"{found.messages_behind:,} messages behind", f"last commit: {last or 'none'}")


@app.command("check")
def check(file: File, endpoint: Endpoint = None) -> None:
    """Compare a file with its journals, its type and its table, and the table with its journals. Changes nothing.

    Exits with code 1 if `run` would refuse the table, or if the audit of the consumer finds errors. With `mode: append`
    and without a filter, the table must have as many rows as there are committed messages.
    """
    spec = _spec(file)
    from coranto_consumers.tables.running import examine
    from coranto_consumers.tables.state import audit_table, describe, expectation_of, stored_progress

    with connect(endpoint) as client:
        layout, target = examine(client, spec)
        state = target.compare()
    is_ready = True
    for line in describe(layout, state):
        is_ready &= not line.is_problem
        typer.echo(f"{spec.name}: {line.text}")
    if not is_ready:
        sys.exit(NOT_SOUND)
    if not state.exists or not stored_progress(spec).offsets:
        typer.echo(f"{spec.name}: no message is committed yet, so there is nothing to audit")
        return
    for expectation in expectation_of(spec):
        typer.echo(f"{spec.name}: the audit expects {expectation}")
    report = with_client(endpoint, lambda client: audit_table(client, spec))
    from coranto.cli.reports import print_report

    print_report(report, as_json=False)
    if not report.sound:
        sys.exit(NOT_SOUND)


def _spec(file: Path) -> TableSpec:
    """Read the file of a table. Raises InvalidInput, which names the file, and MissingExtra.

    Call it before other imports of `tables`, which would not explain a missing extra.
    """
    try:
        from coranto_consumers.tables import read_table
    except ModuleNotFoundError as error:
        raise with_install_advice(error) from error
    try:
        return read_table(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{file} is not UTF-8: {error}") from error
    except InvalidInput as error:
        raise InvalidInput(f"{file}: {error}") from error
