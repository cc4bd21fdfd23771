"""The root of the command line: parts shared by all commands, and the display of failures."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import traceback
from collections.abc import Sequence

import typer

from coranto.cli.output import Panel, printable
from coranto.cli.plugins import GROUP, add_plugins
from coranto.errors import CorantoError
from coranto.telemetry import configure_logging

_VERBOSE = "--verbose"
_OWN_COMMANDS = [
    importlib.metadata.EntryPoint(name, home, GROUP)
    for name, home in (
        ("up", "coranto.cli.cluster:up"),
        ("doctor", "coranto.cli.doctor:doctor"),
        ("journals", "coranto.cli.journals:app"),
        ("streams", "coranto.cli.streams:app"),
        ("ingest", "coranto.cli.ingest:app"),
        ("types", "coranto.cli.types:app"),
        ("attach-uuids", "coranto.cli.attach_uuids:attach_uuids"),
        ("audit", "coranto.cli.audit:app"),
        ("recover", "coranto.cli.recover:app"),
    )
]
"""The commands of this package. Only those that a command line names are imported."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for a failure, 2 for wrong usage, 130 when interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verbose = _VERBOSE in _own(words)
    words = [word for word in _own(words) if word != _VERBOSE] + words[len(_own(words)) :]
    configure_logging("debug" if verbose else "warning")
    try:
        _build(words)(args=words, prog_name="coranto")
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


def _build(words: Sequence[str]) -> typer.Typer:
    app = typer.Typer(
        name="coranto",
        help="Journals: replicated, transactional, append-only logs.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        verbose: bool = typer.Option(False, _VERBOSE, help="Log in detail, and show tracebacks. May stand anywhere."),
        show_version: bool = typer.Option(
            False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ) -> None:
        """Journals: replicated, transactional, append-only logs."""

    add_plugins(app, words, _OWN_COMMANDS)
    add_plugins(app, words)
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
    """Return the words that may be options: those before a `--`."""
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
