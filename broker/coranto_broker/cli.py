"""`coranto broker …` and `python -m coranto_broker …`. The options are the settings: `coranto_broker.settings`."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer

from coranto.errors import CorantoError
from coranto.telemetry import configure_logging
from coranto_broker import set_aside_cli
from coranto_broker.configuration import FILE_VARIABLE, Configuration, load, render
from coranto_broker.server import loop_factory, run
from coranto_broker.settings import SECRETS, BrokerSettings

app = typer.Typer(no_args_is_help=True, help="Run a journal broker.")


@app.callback()
def broker() -> None:
    """Run a journal broker."""


def _with_settings(action: Callable[[Configuration], None]) -> Callable[..., None]:
    """A command with an option for each setting that may be one, and `--config`."""

    def command(config: Path | None, **flags: Any) -> None:
        try:
            configuration = load({name: value for name, value in flags.items() if value is not None}, config)
        except CorantoError as error:
            raise typer.BadParameter(str(error)) from error
        action(configuration)

    file = typer.Option("--config", help=f"TOML or YAML file of settings; also ${FILE_VARIABLE}.", show_default=False)
    annotations: dict[str, Any] = {"config": Annotated[Path | None, file]}
    for name, field in BrokerSettings.model_fields.items():
        if name in SECRETS:
            continue
        flag = f"--{name.replace('_', '-')}"
        declaration = f"{flag}/--no-{flag[2:]}" if field.annotation is bool else flag
        option = typer.Option(declaration, help=field.description, show_default=False)
        annotations[name] = Annotated[field.annotation | None, option]  # type: ignore[operator]
    # typer asks the signature for the options, and the annotations for their types.
    command.__annotations__ = annotations
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
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


app.command("serve")(_with_settings(serve))
app.command("settings")(_with_settings(settings))
app.add_typer(set_aside_cli.app, name="set-aside")
