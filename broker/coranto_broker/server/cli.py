"""The commands `coranto broker …` and `python -m coranto_broker …`. `coranto_broker.settings` defines their options."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer

from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.layout import Layout, MemberId
from coranto.effects import LocalDisk, SystemClock
from coranto.errors import CorantoError
from coranto.member.command_line import run_member, show_settings, with_settings
from coranto.member.configuration import Configuration
from coranto.process.dirlock import DirectoryLock
from coranto.security.server import etcd_tls
from coranto_broker.recovery.adoption import Adoption
from coranto_broker.server import set_aside_cli
from coranto_broker.server.process import loop_factory, run
from coranto_broker.settings import BrokerSettings

app = typer.Typer(no_args_is_help=True, help="Run a journal broker.")


@app.callback()
def broker() -> None:
    """Run a journal broker."""


def serve(configuration: Configuration[BrokerSettings]) -> None:
    """Serve journals until stopped. Settings without an option come from the environment (CORANTO_BROKER_<NAME>), then
    from the file. Set token keys in CORANTO_BROKER_AUTH_KEYS: other users of the machine can see options.
    """
    run_member(configuration, lambda: run(configuration.settings), loop_factory=loop_factory())


def adopt(configuration: Configuration[BrokerSettings]) -> None:
    """Adopt an etcd that was restored from a backup, or emptied, with a broker's data directory. Takes the options of
    `serve`. No broker at the prefix may be running. Run this for every broker, then `finish-adoption`.
    """
    settings = configuration.settings

    async def gather(adoption: Adoption) -> str:
        with DirectoryLock(settings.data_dir):
            member = MemberId(settings.zone, settings.id)
            found = await adoption.gather(member, settings.data_dir, LocalDisk(), SystemClock())
        summary = f"{member} wrote {found.records} in-sync records to etcd, and restored {found.brought_back} spools"
        if found.late:
            return f"{summary}. The other brokers have finished before: start it"
        others = ", ".join(found.cluster.missing((), ())) or "the ones with data directories that are not gathered yet"
        return f"{summary}. So far: {', '.join(found.cluster.gathered)}. Continue with {others}, then finish-adoption"

    _adopt(settings, gather)


Without = Annotated[
    list[str],
    typer.Option(
        "--without",
        help="A broker, as zone#id, whose data directory is lost, with all content that only it had. Repeatable.",
        show_default=False,
    ),
]


def finish_adoption(configuration: Configuration[BrokerSettings], without: Without = []) -> None:  # noqa: B006  It is never changed.
    """Let brokers serve again, once `adopt` has been run for every one of them."""

    async def finish(adoption: Adoption) -> str:
        cluster = await adoption.finish(without)
        return f"brokers may start: {', '.join(cluster.gathered)} have adopted this etcd"

    _adopt(configuration.settings, finish)


def _adopt(settings: BrokerSettings, work: Callable[[Adoption], Awaitable[str]]) -> None:
    async def run_it() -> str:
        async with EtcdCoordinator(settings.etcd, tls=etcd_tls(settings)) as coordinator:
            return await work(Adoption(coordinator, Layout(settings.etcd_prefix), os.urandom))

    try:
        typer.echo(asyncio.run(run_it()))
    except (CorantoError, OSError) as error:
        typer.echo(str(error), err=True)
        sys.exit(1)


app.command("serve")(with_settings(BrokerSettings, serve))
app.command("settings")(with_settings(BrokerSettings, show_settings))
app.add_typer(set_aside_cli.app, name="set-aside")
app.command("adopt")(with_settings(BrokerSettings, adopt))
app.command("finish-adoption")(with_settings(BrokerSettings, finish_adoption))
