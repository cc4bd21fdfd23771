"""Commands that are imported when they are named: our own, and the commands of packages above the platform.

The latter are found by the entry point group `coranto.commands`.

Each entry point is a `typer.Typer`; ours may be functions. Only the requested one is imported, so that `coranto
journals list` does not wait for Dagster's import.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence

import typer

from coranto.cli.output import Panel
from coranto.errors import CorantoError, MissingExtra

GROUP = "coranto.commands"

_EXTRAS = {
    "coranto_broker": "broker",
    "coranto_consumers": "consumers",
    "pyspark_coranto": "spark",
    "dagster_coranto": "dagster",
}
"""The extras of this distribution that install the dependencies of its own plugins."""

_HELP = {
    "up": ("Run an embedded cluster (etcd and brokers) in the foreground, until Ctrl-C.", Panel.CLUSTER),
    "doctor": (
        "Examine Python, Java, ports, etcd, stores, brokers and clocks, and say what to do. Exit code 1 if there is a "
        "problem; warnings alone give 0.",
        Panel.CLUSTER,
    ),
    "journals": ("Journals: their specs and their content.", Panel.DATA),
    "streams": ("Streams: events by routing key, in segments that scale.", Panel.DATA),
    "ingest": ("Ingest: rows of Kafka and files become events of a stream, each once.", Panel.DATA),
    "types": ("Message types: their fields and framings, by name and version.", Panel.DATA),
    "attach-uuids": ("Attach a UUID to each line, and write them to standard output.", Panel.DATA),
    "audit": (
        "Compare journals with what was there before, and with their stores. `coranto audit SELECTOR` stands for "
        "`coranto audit run SELECTOR`.",
        Panel.REPAIR,
    ),
    "recover": ("Find damage of journals, plan its repair, carry an approved plan out.", Panel.REPAIR),
    "broker": ("Run a broker.", Panel.CLUSTER),
    "consumer": ("Run, audit and recover consumers.", Panel.CONSUMERS),
    "shards": ("Shards of consumers: their specs and how they are doing.", Panel.CONSUMERS),
    "demo": ("The main job, end to end, on real flights.", Panel.DEMO),
}
"""The help texts of this distribution's own commands, and their groups in listings."""


def add_plugins(
    app: typer.Typer,
    words: Sequence[str],
    entry_points: Sequence[importlib.metadata.EntryPoint] | None = None,
) -> None:
    """Add all plugins to `app`: with all commands if `words` name them, else only by name and one line of help."""
    if entry_points is None:
        entry_points = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: entry.name)
    for entry in entry_points:
        summary, panel = _HELP.get(entry.name, (f"Commands of {entry.module.partition('.')[0]}.", Panel.OTHER))
        if entry.name in words:
            try:
                loaded = _load(entry)
                if isinstance(loaded, typer.Typer):
                    app.add_typer(loaded, name=entry.name, help=summary, rich_help_panel=panel)
                else:
                    app.command(entry.name, rich_help_panel=panel)(loaded)
                continue
            except ImportError as error:
                _add_failing(app, entry.name, summary, panel, _missing(entry, error))
        else:
            _add_failing(app, entry.name, summary, panel, f"`coranto {entry.name}` was not loaded")


def _load(entry: importlib.metadata.EntryPoint) -> typer.Typer | Callable[..., object]:
    loaded: typer.Typer | Callable[..., object] = entry.load()
    if not callable(loaded):
        raise CorantoError(f"plugin {entry.value} of `coranto {entry.name}` is not a typer.Typer; fix or uninstall it")
    return loaded


def _missing(entry: importlib.metadata.EntryPoint, error: ImportError) -> str:
    if isinstance(error, MissingExtra):
        return f"`coranto {entry.name}` cannot be loaded: {error}"
    package = entry.module.partition(".")[0]
    extra = _EXTRAS.get(package)
    distribution = entry.dist.name if entry.dist is not None else package
    wanted = f"coranto[{extra}]" if extra else distribution
    return f"`coranto {entry.name}` cannot be loaded ({error}). Install its requirements: pip install '{wanted}'"


def _add_failing(app: typer.Typer, name: str, summary: str, panel: Panel, problem: str) -> None:
    def fail() -> None:
        raise CorantoError(problem)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    app.command(name, help=summary, rich_help_panel=panel, context_settings=settings, add_help_option=False)(fail)
