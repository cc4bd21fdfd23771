"""`coranto streams …`: commands for streams, their segments, and their events."""

from __future__ import annotations

import typer

from coranto.cli.streams import autoscaling, forking, managing, reading, writing

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)

app.command("create")(managing.create)
app.command("list")(managing.list_streams)
app.command("describe")(managing.describe)
app.command("scale")(managing.scale)
app.command("seal")(managing.seal)
app.command("truncate")(managing.truncate)
app.command("delete")(managing.delete)
app.command("resume")(managing.resume)
app.command("fork")(forking.fork)
app.command("autoscale")(autoscaling.autoscale)
app.command("write")(writing.write)
app.command("read")(reading.read)
