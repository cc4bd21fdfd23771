"""`coranto journals suspend`, `reset-head` and `store-health`: operators' commands for idle and stuck journals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer

from coranto.cli.connect import Endpoint, with_client
from coranto.cli.journals.selection import Names, Selector, chosen, select
from coranto.cli.output import printable
from coranto.client import JournalClient, JournalInfo, Suspend
from coranto.errors import CorantoError, JournalSuspended, StoreUnhealthy
from coranto.labels import label_selector
from coranto.recovery.heads import reset_head as reset_one
from coranto.telemetry import progress
from coranto.wire import protocol_pb2 as pb

_CONCURRENCY = 16


def suspend(
    names: Names = None,
    selector: Selector = None,
    force: Annotated[
        bool,
        typer.Option("--force", "-f", help="Also suspend journals that are not idle."),
    ] = False,
    endpoint: Endpoint = None,
) -> None:
    """Suspend idle journals, so that one broker holds them, or none when they have no content.

    A journal is idle when all of its content has been in its store for its flush interval (or a day). The next append
    wakes it. Specs that are applied to a suspended journal must keep its `suspend`, as `edit` does.
    """
    selection = chosen(names, selector)
    mode = Suspend.NOW if force else Suspend.IF_FLUSHED

    async def one(client: JournalClient, info: JournalInfo) -> str:
        if info.is_asleep:
            return "suspended"
        try:
            await client.append(info.name, b"", suspend=mode)
        except JournalSuspended:
            return "suspended"
        return "not idle; left as it is"

    async def work(client: JournalClient) -> None:
        found = await select(client, selection)
        said = await _for_each(client, found, "Suspending", one)
        levels = {info.name: info.spec.suspend.level for info in (await _again(client, found))}
        for name, text in said:
            level = levels.get(name, pb.JournalSpec.Suspend.NONE)
            typer.echo(f"{name}: {text}{f' ({pb.JournalSpec.Suspend.Level.Name(level)})' if level else ''}")

    with_client(endpoint, work)


def reset_head(names: Names = None, selector: Selector = None, endpoint: Endpoint = None) -> None:
    """Let journals continue at the end of stored content that their brokers do not know (INDEX_HAS_GREATER_OFFSET).

    Do this only when every broker that may hold content beyond the store is gone for good. Registers that only those
    brokers held stay lost. Healthy journals are left as they are.
    """
    selection = chosen(names, selector)

    async def work(client: JournalClient) -> None:
        for name, text in await _for_each(client, await select(client, selection), "Resetting heads", _reset):
            typer.echo(f"{name}: {text}")

    with_client(endpoint, work)


async def _reset(client: JournalClient, info: JournalInfo) -> str:
    return "suspended; left as it is" if info.is_asleep else await reset_one(client, info.name)


def store_health(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="Fragment stores, such as s3://bucket/path/.")],
    check_delete: Annotated[bool, typer.Option("--check-delete", help="Also write a file and remove it.")] = False,
    check_delete_prefix: Annotated[
        str,
        typer.Option(
            "--check-delete-prefix", help="The same, in this folder of the store (`a/b/`).", show_default=False
        ),
    ] = "",
    endpoint: Endpoint = None,
) -> None:
    """Have a broker check that it can use fragment stores: write, read, list, sign, and optionally remove."""

    async def work(client: JournalClient) -> None:
        unhealthy = []
        for url in urls:
            try:
                await client.store_health(
                    url, check_delete=check_delete or bool(check_delete_prefix), check_delete_prefix=check_delete_prefix
                )
            except StoreUnhealthy as error:
                unhealthy.append(url)
                typer.echo(f"{url}: unhealthy: {printable(' '.join(error.detail.split()))}")
            else:
                typer.echo(f"{url}: healthy")
        if unhealthy:
            raise CorantoError(f"unhealthy: {', '.join(unhealthy)}. Repair the store, or the brokers' access to it.")

    with_client(endpoint, work)


async def _again(client: JournalClient, journals: tuple[JournalInfo, ...]) -> tuple[JournalInfo, ...]:
    names = [("name", info.name) for info in journals]
    return (await client.list(label_selector(include=names))).journals


async def _for_each(
    client: JournalClient,
    journals: tuple[JournalInfo, ...],
    title: str,
    work: Callable[[JournalClient, JournalInfo], Awaitable[str]],
) -> list[tuple[str, str]]:
    """Run `work` for each journal, several concurrently, and return names and results.

    Raises the first failure, after all were tried and the other results were printed.
    """
    limit = asyncio.Semaphore(_CONCURRENCY)
    with progress(title, len(journals), unit="journals") as report:

        async def one(info: JournalInfo) -> tuple[str, str]:
            async with limit:
                try:
                    return info.name, await work(client, info)
                finally:
                    report.advance()

        outcomes = await asyncio.gather(*map(one, journals), return_exceptions=True)
    said = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if failures:
        for name, text in said:
            typer.echo(f"{name}: {text}")
        raise failures[0]
    return said
