"""`coranto types …`: commands for registries of message types."""

from __future__ import annotations

import typer

from coranto.cli.types import registering, showing

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)

app.command("register")(registering.register)
app.command("check")(registering.check)
app.command("show")(showing.show)
app.command("list")(showing.list_types)
app.command("history")(showing.history)
