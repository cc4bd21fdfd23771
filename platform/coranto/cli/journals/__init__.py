"""`coranto journals …`: commands for journals, their specs, their content, and their maintenance."""

from __future__ import annotations

import typer

from coranto.cli.journals import (
    appending,
    applying,
    editing,
    forking,
    fragments,
    listing,
    manifest,
    pruning,
    reading,
    upkeep,
)

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)

app.command("list")(listing.list_journals)
app.command("apply")(applying.apply)
app.command("edit")(editing.edit)
app.command("append")(appending.append)
app.command("read")(reading.read)
app.command("fragments")(fragments.fragments)
app.command("manifest")(manifest.manifest)
app.command("fork")(forking.fork)
app.command("drop-fork")(forking.drop)
app.command("forks")(forking.forks)
app.command("prune")(pruning.prune)
app.command("suspend")(upkeep.suspend)
app.command("reset-head")(upkeep.reset_head)
app.command("store-health")(upkeep.store_health)
