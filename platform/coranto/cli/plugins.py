"""The commands that higher-level packages add by the entry point group `coranto.commands`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from typing import Final

from coranto.cli.lazy_commands import LazyCommand
from coranto.cli.output import Panel

GROUP: Final = "coranto.commands"

_OURS: Final = {
    "broker": ("Run a broker.", Panel.CLUSTER),
    "consumer": ("Run, audit and recover consumers.", Panel.CONSUMERS),
    "shards": ("Shards of consumers: their specs and their status.", Panel.CONSUMERS),
    "table": ("Tables without code: messages become rows, each once.", Panel.DATA),
    "demo": ("The main job, end to end, on real flights.", Panel.DEMO),
}
"""The help and the panel of this distribution's own plugins."""


def plugin_commands(entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> dict[str, LazyCommand]:
    """Return the commands of all plugins by name. None of them is imported."""
    if entry_points is None:
        entry_points = importlib.metadata.entry_points(group=GROUP)
    found = {}
    for entry in sorted(entry_points, key=lambda each: each.name):
        package = entry.module.partition(".")[0]
        summary, panel = _OURS.get(entry.name, (f"Commands of {package}.", Panel.OTHER))
        distribution = entry.dist.name if entry.dist is not None else package
        found[entry.name] = LazyCommand(entry.value, summary, panel, distribution)
    return found
