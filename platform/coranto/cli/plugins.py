"""Commands of packages above the platform, found by the entry point group `coranto.commands`.

Each entry point is a `typer.Typer`. Only the requested one is imported, so that `coranto journals list` does not wait
for Dagster's import.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

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
    "broker": ("Run a broker.", Panel.CLUSTER),
    "consumer": ("Run, audit and recover consumers.", Panel.CONSUMERS),
    "shards": ("Shards of consumers: their specs and how they are doing.", Panel.CONSUMERS),
    "demo": ("The main job, end to end, on real flights.", Panel.DEMO),
}
"""The help texts of this distribution's own plugins, and their groups in listings."""


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
                app.add_typer(_load(entry), name=entry.name, help=summary, rich_help_panel=panel)
                continue
            except ImportError as error:
                _add_failing(app, entry.name, summary, panel, _missing(entry, error))
        else:
            _add_failing(app, entry.name, summary, panel, f"`coranto {entry.name}` was not loaded")


def _load(entry: importlib.metadata.EntryPoint) -> typer.Typer:
    loaded = entry.load()
    if not isinstance(loaded, typer.Typer):
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
