"""`coranto consumer recover plan` and `apply`: plan, repair and verify a consumer's store and shards."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated

import typer

from coranto.audit import Depth, Report, run_checks
from coranto.cli.connect import RETRY_TIMEOUT, Endpoint, with_client
from coranto.cli.output import Format
from coranto.cli.recover import Approved, PlanFormat, carry_out_and_print, show_plan, show_recovery
from coranto.client import ClientConfig, JournalClient
from coranto.recovery import Doctor, Plan, Recovery, make_plan
from coranto_consumers.cli.arguments import ConsumerName, Store
from coranto_consumers.cli.audit import AuditTarget, Etcd, Expected, Prefix, Remembered
from coranto_consumers.recovery import ShardDoctor, StoreDoctor, repairable_store
from coranto_consumers.runtime.client import ShardClient

app = typer.Typer(
    no_args_is_help=True, help="Find a consumer's damage, plan its repair, and carry out an approved plan."
)

Process = Annotated[
    str | None,
    typer.Option(
        "--consumer", help="Repair failed shards, too: any process of the consumer, as host:port.", show_default=False
    ),
]


@contextlib.asynccontextmanager
async def _doctors(
    client: JournalClient, target: AuditTarget, store: str, process: str | None
) -> AsyncIterator[list[Doctor]]:
    checks = {accept: await target.check(client, accept=accept) for accept in (False, True)}
    doctors: list[Doctor] = [StoreDoctor(client, repairable_store(store), lambda accept: checks[accept])]
    async with contextlib.AsyncExitStack() as exits:
        if process is not None:
            config = ClientConfig.from_environment(process, retry_timeout=RETRY_TIMEOUT)
            doctors.append(ShardDoctor(await exits.enter_async_context(ShardClient(config))))
        yield doctors


@app.command("plan")
def plan(
    name: ConsumerName,
    store: Store,
    expect: Expected = None,
    memory: Remembered = None,
    consumer: Process = None,
    prefix: Prefix = None,
    etcd: Etcd = None,
    output: PlanFormat = Format.TABLE,
    endpoint: Endpoint = None,
) -> None:
    """Find damage, and print the steps in order, permanent losses, and the plan's hash.

    Repairs nothing. Give --memory and --expect as for `audit`. Exits with code 1 if there is something to approve.
    """
    target = AuditTarget(name, store, expect or (), memory, prefix, etcd)

    async def work(client: JournalClient) -> Plan:
        async with _doctors(client, target, store, consumer) as doctors:
            return await make_plan(doctors)

    show_plan(with_client(endpoint, work), as_json=output is Format.JSON)


@app.command("apply")
def apply(
    name: ConsumerName,
    store: Store,
    approve: Approved,
    expect: Expected = None,
    memory: Remembered = None,
    consumer: Process = None,
    prefix: Prefix = None,
    etcd: Etcd = None,
    endpoint: Endpoint = None,
) -> None:
    """Carry out the plan with this hash, and verify the result. Give the same options as for `plan`.

    If the damage has changed since, nothing is done and the current plan is printed. An interrupted recovery is safe:
    make a plan of the remaining steps.
    """
    target = AuditTarget(name, store, expect or (), memory, prefix, etcd)

    async def work(client: JournalClient) -> Recovery:
        async def verify() -> Report:
            return await run_checks(f"consumer {name}", [await target.check(client)], depth=Depth.DEEP)

        async with _doctors(client, target, store, consumer) as doctors:
            return await carry_out_and_print(doctors, approve, verify)

    show_recovery(with_client(endpoint, work))
