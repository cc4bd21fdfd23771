"""Sections of a status that higher-level packages add by the entry point group `coranto.status`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from coranto.checkup.results import Examination, absent
from coranto.checkup.status.values import ConsumerState
from coranto.client import JournalClient, JournalInfo
from coranto.client.heads import JournalHead

GROUP: Final = "coranto.status"


@dataclass(frozen=True, slots=True)
class StatusContext:
    """The facts that a section gets from the status."""

    client: JournalClient
    journals: Mapping[str, JournalInfo]
    heads: Mapping[str, JournalHead]
    """The heads that primaries reported."""
    etcd: str
    """etcd's endpoints; empty if they are unknown."""
    consumers: Sequence[str]
    """Consumers that the user named: a process as host:port, or the URL of a store. Without any, the section
    discovers them in etcd."""
    timeout: float
    """The timeout for each server and store, in seconds. A section that takes twice as long is cancelled."""


@dataclass(frozen=True, slots=True)
class SectionResult:
    """The result of a section."""

    consumers: Sequence[ConsumerState] = ()
    examinations: Sequence[Examination] = ()


Section: TypeAlias = Callable[[StatusContext], Awaitable[SectionResult]]


def load_sections(
    entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
) -> tuple[list[Section], list[Examination]]:
    """Import all sections. Return them, and a result for each one that cannot be imported."""
    if entry_points is None:
        entry_points = importlib.metadata.entry_points(group=GROUP)
    sections: list[Section] = []
    failures: list[Examination] = []
    for entry in sorted(entry_points, key=lambda each: each.name):
        try:
            sections.append(entry.load())
        except (ImportError, AttributeError) as error:
            advice = f"install the requirements of {entry.module.partition('.')[0]} to see this part"
            failures.append(absent(entry.name, f"cannot be loaded ({error})", advice))
    return sections, failures
