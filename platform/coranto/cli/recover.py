"""`coranto recover plan` and `coranto recover apply`: from damaged journals to an approved and verified repair."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import typer

from coranto.audit import Report
from coranto.cli.connect import Endpoint, with_client
from coranto.cli.journals.selection import Names, Selector, chosen
from coranto.cli.output import Format, note, print_table, printable
from coranto.client import JournalClient
from coranto.fragments.stores import StoreRegistry
from coranto.recovery import Doctor, JournalDoctor, NotApproved, Plan, Recovery, StepResult, carry_out, make_plan
from coranto.telemetry import ProgressReport, progress

UNFINISHED = 1
"""The exit code of a plan that is not empty, and of an incomplete recovery."""

app = typer.Typer(no_args_is_help=True)

Approved = Annotated[str, typer.Option("--approve", help="The hash of the plan that you have read.")]
PlanFormat = Annotated[Format, typer.Option("--output", "-o", help="`json` is for programs.")]
Memory = Annotated[
    str,
    typer.Option(
        "--memory",
        help="Store with the records of earlier audits. Default: each journal's first store.",
        show_default=False,
    ),
]


@app.command("plan")
def plan(
    names: Names = None,
    selector: Selector = None,
    memory: Memory = "",
    output: PlanFormat = Format.TABLE,
    endpoint: Endpoint = None,
) -> None:
    """Find damage, and print the steps in order, permanent losses, and the plan's hash.

    Repairs nothing. All content of the journals is read. Ends with code 1 if there is something to approve.
    """

    async def work(client: JournalClient) -> Plan:
        with progress("Examining journals", unit="journals") as shown:
            return await make_plan([_doctor(client, names, selector, memory, shown)])

    show_plan(with_client(endpoint, work), as_json=output is Format.JSON)


@app.command("apply")
def apply(
    approve: Approved,
    names: Names = None,
    selector: Selector = None,
    memory: Memory = "",
    endpoint: Endpoint = None,
) -> None:
    """Carry out the plan of this hash, and verify the result. Name the same journals as to `plan`.

    If the damage has changed since, nothing is done and the current plan is printed. An interrupted recovery is safe:
    make a plan of the remaining steps.
    """

    async def work(client: JournalClient) -> Recovery:
        doctor = _doctor(client, names, selector, memory)
        return await carry_out_and_print([doctor], approve, doctor.audit)

    show_recovery(with_client(endpoint, work))


def _doctor(
    client: JournalClient,
    names: list[str] | None,
    selector: str | None,
    memory: str,
    shown: ProgressReport | None = None,
) -> JournalDoctor:
    selection = chosen(names, selector)
    wanted = f"name in ({', '.join(selection.names)})" if selection.names else selection.selector
    return JournalDoctor(client, StoreRegistry(client.config.file_root), wanted, memory=memory, progress=shown)


async def carry_out_and_print(
    doctors: Sequence[Doctor], approve: str, verify: Callable[[], Awaitable[Report]]
) -> Recovery:
    """Carry out a plan, and print each result. If its hash is not `approve`, print the current plan."""
    try:
        return await carry_out(doctors, approve, verify=verify, on_result=_print_result, on_progress=note)
    except NotApproved as error:
        print_plan(error.plan, as_json=False)
        raise


def show_plan(plan: Plan, *, as_json: bool) -> None:
    """Print a plan, and end with code `UNFINISHED` if there is something to approve."""
    print_plan(plan, as_json=as_json)
    if not plan.is_empty:
        sys.exit(UNFINISHED)


def show_recovery(recovery: Recovery) -> None:
    """Print the remaining plan and the audit's result, and end with code `UNFINISHED` if the recovery did not
    succeed."""
    if not recovery.remaining.is_empty or recovery.remaining.remarks:
        note("left:")
        print_plan(recovery.remaining, as_json=False)
    if recovery.report is not None:
        for finding in recovery.report.errors:
            typer.echo(f"{finding.kind.value}: {printable(str(finding))}")
        typer.echo(f"audit: {recovery.report.summary}")
    if not recovery.succeeded:
        sys.exit(UNFINISHED)


def print_plan(plan: Plan, *, as_json: bool) -> None:
    """Print a plan for people or programs."""
    if as_json:
        typer.echo(plan.to_json(indent=2))
        return
    if plan.steps:
        rows = [
            [
                str(number),
                step.kind.value,
                step.subject,
                f"{step.action}. GIVES UP: {step.loses}" if step.loses else step.action,
            ]
            for number, step in enumerate(plan.steps, 1)
        ]
        print_table(["STEP", "KIND", "OF", "WHAT WILL BE DONE"], rows)
    for loss in plan.losses:
        word = "LOST UNLESS YOU ACT" if loss.kept_at else "GONE FOR GOOD"
        typer.echo(f"{word}: {printable(loss.subject)}: {printable(loss.message)}")
    for remark in plan.remarks:
        typer.echo(f"left alone: {printable(remark.subject)}: {printable(remark.message)}")
    typer.echo(plan.summary)
    if not plan.is_empty:
        typer.echo(f"hash: {plan.hash}")


def _print_result(result: StepResult) -> None:
    word = f"FAILED: {result.problem}" if result.problem else result.done
    typer.echo(f"{result.step.kind.value} {printable(result.step.subject)}: {printable(word)}")
