"""The root of the command line: parts shared by all commands, and the display of failures."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from typing import Final

import typer

from coranto.cli.lazy_commands import LazyCommand, lazy_group
from coranto.cli.output import Panel, printable
from coranto.cli.plugins import plugin_commands
from coranto.errors import CorantoError
from coranto.telemetry import configure_logging

_VERBOSE = "--verbose"
_COMMANDS: Final = {
    "up": LazyCommand(
        "coranto.cli.cluster:up",
        "Run an embedded cluster (etcd and brokers) in the foreground, until Ctrl-C.",
        Panel.CLUSTER,
    ),
    "status": LazyCommand(
        "coranto.cli.status:status",
        "Show the unhealthy parts of a cluster, consumers that are behind, and changes since the last status.",
        Panel.CLUSTER,
    ),
    "doctor": LazyCommand(
        "coranto.cli.doctor:doctor",
        "Examine Python, Java, ports, etcd, stores, brokers and clocks, and say what to do. Exit code 1 if there is a "
        "problem; warnings alone give 0.",
        Panel.CLUSTER,
    ),
    "login": LazyCommand(
        "coranto.cli.login:login",
        "Log in at the OpenID Connect provider $CORANTO_OIDC_ISSUER, for later commands.",
        Panel.CLUSTER,
    ),
    "journals": LazyCommand("coranto.cli.journals:app", "Journals: their specs and their content.", Panel.DATA),
    "streams": LazyCommand(
        "coranto.cli.streams:app", "Streams: events by routing key, in segments that scale.", Panel.DATA
    ),
    "ingest": LazyCommand(
        "coranto.cli.ingest:app",
        "Ingest: rows of Kafka, files and PostgreSQL become events of a stream, each once.",
        Panel.DATA,
    ),
    "types": LazyCommand(
        "coranto.cli.types:app", "Message types: their fields and framings, by name and version.", Panel.DATA
    ),
    "attach-uuids": LazyCommand(
        "coranto.cli.attach_uuids:attach_uuids",
        "Attach a UUID to each line, and write them to standard output.",
        Panel.DATA,
    ),
    "audit": LazyCommand(
        "coranto.cli.audit:app",
        "Compare journals with earlier audits, and with their stores. `coranto audit SELECTOR` stands for "
        "`coranto audit run SELECTOR`.",
        Panel.REPAIR,
    ),
    "recover": LazyCommand(
        "coranto.cli.recover:app",
        "Find damaged journals, plan their repair, and carry out an approved plan.",
        Panel.REPAIR,
    ),
}
"""The commands of this package. Only the command that runs is imported."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for a failure, 2 for wrong usage, 130 when interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verbose = _VERBOSE in _own(words)
    words = [word for word in _own(words) if word != _VERBOSE] + words[len(_own(words)) :]
    configure_logging("debug" if verbose else "warning")
    try:
        _build()(args=words, prog_name="coranto")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0 if done.code is None else 1
    except (CorantoError, OSError) as error:
        _drop_output()
        if verbose:
            traceback.print_exc()
        else:
            typer.secho(f"coranto: {printable(_one_line(error))}", fg=typer.colors.RED, err=True)
        return 1
    return 0


def _build() -> typer.Typer:
    app = typer.Typer(
        name="coranto",
        cls=lazy_group({**_COMMANDS, **plugin_commands(), **_COMMANDS}),  # No plugin replaces these commands.
        help="Journals: replicated, transactional, append-only logs.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        verbose: bool = typer.Option(
            False, _VERBOSE, help="Log in detail, and show tracebacks. Allowed anywhere on the command line."
        ),
        show_version: bool = typer.Option(
            False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ) -> None:
        """Journals: replicated, transactional, append-only logs."""

    app.command("version", rich_help_panel=Panel.OTHER)(version)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def version() -> None:
    """Show the versions of Coranto, Python and gRPC."""
    import grpc

    typer.echo(
        f"coranto {importlib.metadata.version('coranto')} "
        f"(Python {platform.python_version()}, grpcio {grpc.__version__}, {platform.system()})"
    )


def _own(words: list[str]) -> list[str]:
    """Return the words before a `--`, which may be options."""
    return words[: words.index("--")] if "--" in words else words


def _drop_output() -> None:
    """Discard output that cannot be written to standard output, so that Python does not report it again at exit."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    text = " ".join(str(error).split())
    return text or type(error).__name__
