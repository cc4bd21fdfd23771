"""Groups that import a command when it is used, so that it does not wait for the imports of other commands."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import Default

from coranto.errors import CorantoError, MissingExtra
from coranto.extras import with_install_advice

_EXTRAS: Final = {
    "coranto_broker": "broker",
    "coranto_consumers": "consumers",
    "pyspark_coranto": "spark",
    "dagster_coranto": "dagster",
}
"""The extras that install the requirements of this distribution's packages."""


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command that is imported when it is used: a function, or a `typer.Typer` of commands."""

    home: str
    """`module:name`."""
    help: str = ""
    """The text in listings, and the help of a group. Without it, a listing imports the command."""
    panel: str | None = None
    """The part of a listing that shows the command."""
    distribution: str = ""
    """The package to install with `pip`, for other distributions."""


def lazy_group(commands: Mapping[str, LazyCommand]) -> type[TyperGroup]:
    """Return the class of a group that has these commands by name, listed before its other ones.

    Using a command that cannot be imported raises CorantoError with the package to install.
    """

    class LazyGroup(TyperGroup):
        _is_listing = False

        def list_commands(self, ctx: Any) -> list[str]:
            return [*commands, *(name for name in super().list_commands(ctx) if name not in commands)]

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name in commands and cmd_name not in self.commands:
                command = commands[cmd_name]
                if self._is_listing and command.help:
                    return TyperCommand(cmd_name, help=command.help, rich_help_panel=command.panel)
                self.commands[cmd_name] = _load(ctx, cmd_name, command)
            return super().get_command(ctx, cmd_name)

        def format_help(self, ctx: Any, formatter: Any) -> None:
            self._is_listing = True
            try:
                super().format_help(ctx, formatter)
            finally:
                self._is_listing = False

    return LazyGroup


def _load(ctx: Any, name: str, command: LazyCommand) -> Any:
    module, _, attribute = command.home.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise _missing(f"{ctx.command_path} {name}", command, error) from error
    group = typer.Typer(add_completion=False)
    group.callback()(lambda: None)  # With a callback, a group of one command stays a group.
    if isinstance(found, typer.Typer):
        group.add_typer(found, name=name, help=command.help or Default(None), rich_help_panel=command.panel)
    elif callable(found):
        group.command(name, rich_help_panel=command.panel)(found)
    else:
        path = f"{ctx.command_path} {name}"
        raise CorantoError(f"{command.home} of `{path}` is neither a function nor a typer.Typer; fix or uninstall it")
    made: Any = typer.main.get_command(group)
    return made.commands[name]


def _missing(path: str, command: LazyCommand, error: ImportError) -> CorantoError:
    if isinstance(error, ModuleNotFoundError):
        error = with_install_advice(error)
    if isinstance(error, MissingExtra):
        return CorantoError(f"`{path}` cannot be loaded: {error}")
    package = command.home.partition(":")[0].partition(".")[0]
    extra = _EXTRAS.get(package)
    wanted = f"coranto[{extra}]" if extra else command.distribution or package
    return CorantoError(f"`{path}` cannot be loaded ({error}). Install its requirements: pip install '{wanted}'")
