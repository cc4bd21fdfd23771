"""The commands `coranto broker …` and `python -m coranto_broker …`. Their options are `coranto_broker.settings`."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer

from coranto.coordination.etcd import EtcdCoordinator
from coranto.coordination.layout import Layout, MemberId
from coranto.effects import LocalDisk, SystemClock
from coranto.errors import CorantoError
from coranto.process.dirlock import DirectoryLock
from coranto.security.server import etcd_tls
from coranto.telemetry import configure_logging
from coranto_broker.recovery.adoption import Adoption
from coranto_broker.server import set_aside_cli
from coranto_broker.server.configuration import FILE_VARIABLE, Configuration, load, render
from coranto_broker.server.process import loop_factory, run
from coranto_broker.settings import SECRETS, BrokerSettings

app = typer.Typer(no_args_is_help=True, help="Run a journal broker.")


@app.callback()
def broker() -> None:
    """Run a journal broker."""


def _with_settings(action: Callable[..., None], **more: Any) -> Callable[..., None]:
    """Return a command for `action` with `--config`, an option for each setting that is not secret, and `more` options.

    `action` gets the `more` options by name.
    """

    def command(config: Path | None, **flags: Any) -> None:
        given = {name: flags.pop(name) for name in more}
        try:
            configuration = load({name: value for name, value in flags.items() if value is not None}, config)
        except CorantoError as error:
            raise typer.BadParameter(str(error)) from error
        action(configuration, **given)

    file = typer.Option("--config", help=f"TOML or YAML file of settings; also ${FILE_VARIABLE}.", show_default=False)
    annotations: dict[str, Any] = {"config": Annotated[Path | None, file]}
    for name, field in BrokerSettings.model_fields.items():
        if name in SECRETS:
            continue
        flag = f"--{name.replace('_', '-')}"
        declaration = f"{flag}/--no-{flag[2:]}" if field.annotation is bool else flag
        option = typer.Option(declaration, help=field.description, show_default=False)
        annotations[name] = Annotated[field.annotation | None, option]  # type: ignore[operator]
    annotations |= more
    # typer reads the options from the signature, and their types from the annotations.
    command.__annotations__ = annotations
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=[] if name in more else None, annotation=annotation
            )
            for name, annotation in annotations.items()
        ]
    )
    command.__doc__ = action.__doc__
    return command


def serve(configuration: Configuration) -> None:
    """Serve journals until told to stop. What no option says comes from the environment (CORANTO_BROKER_<NAME>), then
    from the file. Keys of tokens are no option, as others could see them: CORANTO_BROKER_AUTH_KEYS.
    """
    settings = configuration.settings
    try:
        configure_logging(settings.log_level, json_lines=settings.log_json)
    except CorantoError as error:
        raise typer.BadParameter(str(error)) from error
    for warning in configuration.warnings:
        structlog.get_logger(__name__).warning(warning)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            code = runner.run(run(settings))
    except CorantoError as error:
        structlog.get_logger(__name__).error("broker cannot run", error=str(error))
        code = 1
    sys.exit(code)


def settings(configuration: Configuration) -> None:
    """Print the settings in effect, as a configuration file, and where each comes from. Secrets are not shown."""
    typer.echo(render(configuration))
    for warning in configuration.warnings:
        typer.echo(warning, err=True)


def adopt(configuration: Configuration) -> None:
    """Take up an etcd that was restored from a backup, or emptied, with a broker's data directory. The broker is given
    as to `serve`, and must not run, nor any other at the prefix. Do this for every broker, then `finish-adoption`.
    """
    settings = configuration.settings

    async def gather(adoption: Adoption) -> str:
        with DirectoryLock(settings.data_dir):
            member = MemberId(settings.zone, settings.id)
            found = await adoption.gather(member, settings.data_dir, LocalDisk(), SystemClock())
        told = f"{member} told etcd of {found.records} in-sync records; {found.brought_back} spools were brought back"
        if found.late:
            return f"{told}. The other brokers have finished before: start it"
        others = ", ".join(found.cluster.missing((), ())) or "those whose data directories were not taken up yet"
        return f"{told}. So far: {', '.join(found.cluster.gathered)}. Go on with {others}, then finish-adoption"

    _adopt(settings, gather)


def finish_adoption(configuration: Configuration, without: list[str]) -> None:
    """Let brokers serve again, once `adopt` has been run for every one of them."""

    async def finish(adoption: Adoption) -> str:
        cluster = await adoption.finish(without)
        return f"brokers may start: {', '.join(cluster.gathered)} have taken up this etcd"

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


_WITHOUT = Annotated[
    list[str],
    typer.Option(
        "--without",
        help="A broker, as zone#id, whose data directory is gone for good. What only it had is lost. May be repeated.",
        show_default=False,
    ),
]
app.command("serve")(_with_settings(serve))
app.command("settings")(_with_settings(settings))
app.add_typer(set_aside_cli.app, name="set-aside")
app.command("adopt")(_with_settings(adopt))
app.command("finish-adoption")(_with_settings(finish_adoption, without=_WITHOUT))
