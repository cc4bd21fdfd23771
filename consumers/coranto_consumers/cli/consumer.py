"""`coranto consumer …`: commands for consumers, each imported when it is named."""

from __future__ import annotations

import typer

from coranto.cli.lazy_commands import LazyCommand, lazy_group

_HOMES = {
    "run": "coranto_consumers.cli.running:run",
    "serve": "coranto_consumers.cli.serving:serve_command",
    "settings": "coranto_consumers.cli.serving:settings_command",
    "lag": "coranto_consumers.cli.lag:lag",
    "offsets": "coranto_consumers.cli.offsets:offsets",
    "reset": "coranto_consumers.cli.resetting:reset",
    "skip": "coranto_consumers.cli.resetting:skip",
    "accept-journals": "coranto_consumers.cli.accepting:accept_journals",
    "audit": "coranto_consumers.cli.audit:audit",
    "compare": "coranto_consumers.cli.compare:compare",
    "fork": "coranto_consumers.cli.forking:fork",
    "fork-status": "coranto_consumers.cli.forking:fork_status",
    "promote": "coranto_consumers.cli.forking:promote",
    "drop-fork": "coranto_consumers.cli.forking:drop_fork",
    "recover": "coranto_consumers.cli.recover:app",
}

app = typer.Typer(
    cls=lazy_group({name: LazyCommand(home) for name, home in _HOMES.items()}),
    no_args_is_help=True,
)
app.callback()(lambda: None)  # Without a callback, typer creates no group for a Typer without commands.
