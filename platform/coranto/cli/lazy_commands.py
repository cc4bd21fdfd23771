"""Groups of commands that are imported when they are named, so that a command does not wait for what others need."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup


def lazy_group(homes: Mapping[str, str]) -> type[TyperGroup]:
    """Return the class of a group with commands that are imported at their first use, listed before its others.

    `homes` maps their names to `module:name`, where a function or a `typer.Typer` is. The help of the group imports
    all of them.
    """

    class LazyGroup(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return [*homes, *(name for name in super().list_commands(ctx) if name not in homes)]

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name in homes and cmd_name not in self.commands:
                self.commands[cmd_name] = _load(cmd_name, homes[cmd_name])
            return super().get_command(ctx, cmd_name)

    return LazyGroup


def _load(name: str, home: str) -> Any:
    module, _, attribute = home.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    group = typer.Typer(add_completion=False)
    group.callback()(lambda: None)  # With a callback, a group of one command stays a group.
    if isinstance(found, typer.Typer):
        group.add_typer(found, name=name)
    else:
        group.command(name)(found)
    made: Any = typer.main.get_command(group)
    return made.commands[name]
