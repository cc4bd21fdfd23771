"""Findings about forks and their sources, whose specs must have matching labels. Pure.

The shared fragments are part of each fork's own content, which is examined like any journal's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from coranto.audit.findings import Finding, Kind, Severity, Subject
from coranto.errors import InvalidInput
from coranto.fragments.forks import Fork, fork_of, holds_of, is_held
from coranto.wire import protocol_pb2 as pb


def fork_findings(selected: Iterable[pb.JournalSpec], others: Iterable[pb.JournalSpec]) -> list[Finding]:
    """Return findings about the selected journals. `others` are the other journals that the token covers."""
    chosen = list(selected)
    specs = {spec.name: spec for spec in (*others, *chosen)}
    return [finding for spec in chosen for finding in (*_of_fork(spec, specs), *_of_source(spec, specs))]


def _of_fork(spec: pb.JournalSpec, specs: Mapping[str, pb.JournalSpec]) -> Iterator[Finding]:
    try:
        fork = fork_of(spec)
    except InvalidInput as error:
        text = f"its fork labels cannot be read: {error}. Brokers cannot list its fragments. Restore the labels"
        yield Finding(Kind.FORK_UNHELD, Severity.ERROR, Subject.journal(spec.name), text)
        return
    if fork is None:
        return
    if fork.forming:
        yield Finding(
            Kind.FORK_FORMING,
            Severity.WARNING,
            Subject.journal(spec.name),
            f"it does not have all content of {fork.source} below {fork.offset} yet. If no command is creating it, "
            f"finish it (coranto journals fork {fork.source} {fork.name} --at {fork.offset}), or drop it (coranto "
            f"journals drop-fork {fork.name})",
            {"source": fork.source, "offset": fork.offset},
        )
    if fork.shares and not _is_held(fork, specs.get(fork.source)):
        there = fork.source in specs
        yield Finding(
            Kind.FORK_UNHELD,
            Severity.ERROR,
            Subject.journal(spec.name),
            f"it shares [{fork.begin}, {fork.shared_end}) of {fork.source}, which "
            + ("does not keep that for it" if there else "does not exist any more, or is not covered by the token")
            + f", so that it may be lost. Give {fork.source} the label coranto.dev/fork-hold = {fork.begin}/{fork.name}"
            + ("" if there else " once it exists again"),
            {"source": fork.source, "begin": fork.begin, "end": fork.shared_end},
        )


def _is_held(fork: Fork, source: pb.JournalSpec | None) -> bool:
    try:
        return source is not None and is_held(holds_of(source), fork.name, fork.begin)
    except InvalidInput:
        return False


def _of_source(spec: pb.JournalSpec, specs: Mapping[str, pb.JournalSpec]) -> Iterator[Finding]:
    try:
        holds = holds_of(spec)
    except InvalidInput as error:
        text = f"its holds for forks cannot be read, so that it keeps everything: {error}. Correct the labels"
        yield Finding(Kind.FORK_HOLD_STALE, Severity.WARNING, Subject.journal(spec.name), text)
        return
    for name, begin in sorted(holds.items()):
        if name in specs and _is_fork_of(specs[name], spec.name):
            continue
        yield Finding(
            Kind.FORK_HOLD_STALE,
            Severity.WARNING,
            Subject.journal(spec.name),
            f"it keeps everything from {begin} on for its fork {name}, which does not exist, or is not covered by the "
            f"token. If it is gone, release the content (coranto journals drop-fork {name})",
            {"fork": name, "begin": begin},
        )


def _is_fork_of(spec: pb.JournalSpec, source: str) -> bool:
    try:
        fork = fork_of(spec)
    except InvalidInput:
        return True  # It may be a fork. Its unreadable labels are another finding.
    return fork is not None and fork.source == source
