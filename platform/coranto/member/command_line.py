"""Commands whose options are the settings of a member."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn

import structlog
import typer

from coranto.errors import CorantoError
from coranto.member.configuration import FILE_VARIABLE, Configuration, load, render
from coranto.member.settings import MemberSettings
from coranto.telemetry import configure_logging
from coranto.tracing import export

_log = structlog.get_logger(__name__)

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def with_settings(kind: type[MemberSettings], action: Callable[..., None]) -> Callable[..., None]:
    """Return a command for `action(configuration, …)`.

    Its options are `--config`, one for each setting that is not secret, and the further parameters of `action`.
    """
    own = list(inspect.signature(action, eval_str=True).parameters.values())[1:]

    def command(config: Path | None, **flags: Any) -> None:
        given = {each.name: flags.pop(each.name) for each in own}
        try:
            configuration = load(kind, {name: value for name, value in flags.items() if value is not None}, config)
        except CorantoError as error:
            raise typer.BadParameter(str(error)) from error
        action(configuration, **given)

    text = f"TOML or YAML file of settings; also ${kind.variable(FILE_VARIABLE)}."
    options: dict[str, Any] = {"config": Annotated[Path | None, typer.Option("--config", help=text)]}
    for name, field in kind.model_fields.items():
        if name not in kind.secrets():
            flag = f"--{name.replace('_', '-')}"
            declaration = f"{flag}/--no-{flag[2:]}" if field.annotation is bool else flag
            option = typer.Option(declaration, help=field.description, show_default=False)
            options[name] = Annotated[field.annotation | None, option]  # type: ignore[operator]
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own] + [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]
    # typer reads the options from the signature, and their types from the annotations.
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = action.__doc__
    return command


def run_member(
    configuration: Configuration[Any],
    run: Callable[[], Coroutine[Any, Any, int]],
    *,
    loop_factory: LoopFactory | None = None,
) -> NoReturn:
    """Run a member with logs as configured, and exit with the code that its coroutine returns; 1 after a CorantoError.

    `run` is called before there is an event loop, so that it may load user code.
    """
    settings = configuration.settings
    try:
        configure_logging(settings.log_level, json_lines=settings.log_json)
        if settings.traces:
            export(settings.command.replace(" ", "-"), f"{settings.zone}#{settings.id}" if settings.id else "")
    except CorantoError as error:
        raise typer.BadParameter(str(error)) from error
    for warning in configuration.warnings:
        _log.warning("settings.suspicious", problem=warning)
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            code = runner.run(run())
    except CorantoError as error:
        _log.error("member.cannot_run", command=settings.command, error=str(error))
        code = 1
    sys.exit(code)


def show_settings(configuration: Configuration[Any]) -> None:
    """Print the settings in effect, as a configuration file, and where each comes from. Secrets are not shown."""
    typer.echo(render(configuration))
    for warning in configuration.warnings:
        typer.echo(warning, err=True)
