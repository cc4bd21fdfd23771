"""`coranto consumer recover plan` and `apply`: a consumer's store and shards, from damage to a verified repair."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from coranto.audit import Depth, Report, run_checks
from coranto.cli.connect import PATIENCE, Endpoint, with_client
from coranto.cli.output import Format
from coranto.cli.recover import Approved, PlanFormat, carry_out_loudly, show_plan, show_recovery
from coranto.client import ClientConfig, JournalClient
from coranto.recovery import Doctor, Plan, Recovery, make_plan
from coranto_consumers.audit import ConsumerCheck
from coranto_consumers.cli.audit import ConsumerName, Etcd, Expected, Prefix, Remembered, Store, consumer_check
from coranto_consumers.recovery import ShardDoctor, StoreDoctor
from coranto_consumers.runtime.client import ShardClient
from coranto_consumers.stores.sql import SqlStore

app = typer.Typer(no_args_is_help=True, help="Find damage of a consumer, plan its repair, carry an approved plan out.")

Process = Annotated[
    str | None,
    typer.Option(
        "--consumer", help="Also failed shards: any process of the consumer, as host:port.", show_default=False
    ),
]


@dataclass(frozen=True, slots=True)
class _Scope:
    """The options that `plan` and `apply` share."""

    name: str
    store: str
    expect: Sequence[str]
    memory: str | None
    process: str | None
    prefix: str | None
    etcd: str | None

    @contextlib.asynccontextmanager
    async def opened(self, client: JournalClient) -> AsyncIterator[list[Doctor]]:
        checks = {accept: await self._check(client, accept=accept) for accept in (False, True)}
        doctors: list[Doctor] = [StoreDoctor(client, SqlStore(self.store), lambda accept: checks[accept])]
        async with contextlib.AsyncExitStack() as exits:
            if self.process is not None:
                config = ClientConfig.from_environment(self.process, patience=PATIENCE)
                doctors.append(ShardDoctor(await exits.enter_async_context(ShardClient(config))))
            yield doctors

    async def verify(self, client: JournalClient) -> Report:
        return await run_checks(f"consumer {self.name}", [await self._check(client)], depth=Depth.DEEP)

    async def _check(self, client: JournalClient, *, accept: bool = False) -> ConsumerCheck:
        return await consumer_check(
            client,
            self.name,
            self.store,
            self.expect,
            self.memory,
            accept=accept,
            prefix=self.prefix,
            etcd=self.etcd,
        )


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
    """Find damage, and print what can be done, in what order, what is lost for good, and the plan's hash.

    Mends nothing. Give --memory and --expect as to `audit`. Ends with code 1 if there is something to approve.
    """
    scope = _Scope(name, store, expect or (), memory, consumer, prefix, etcd)

    async def work(client: JournalClient) -> Plan:
        async with scope.opened(client) as doctors:
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
    """Carry out the plan of this hash, and verify the result. Give the same options as to `plan`.

    If the damage has changed since, nothing is done and the present plan is printed. An interrupted recovery is safe:
    make a plan of what is left.
    """
    scope = _Scope(name, store, expect or (), memory, consumer, prefix, etcd)

    async def work(client: JournalClient) -> Recovery:
        async with scope.opened(client) as doctors:
            return await carry_out_loudly(doctors, approve, lambda: scope.verify(client))

    show_recovery(with_client(endpoint, work))
