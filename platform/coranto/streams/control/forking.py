"""Forks of streams: all segments, sealed ones too, at one cut that tears no transaction (`model/fork_cut.py`).

1. The gate of multi-key transactions is closed, and decided transactions are completed. The segments' ends are read,
   and the gate is opened (`Streams.cut`). Nothing is decided in between. So each transaction is wholly below these
   ends, or its acknowledgements are in no segment.
2. For an earlier moment, the stream is read, and the cut is lowered until it tears nothing.
3. The segments' journals are forked, all in one change of etcd. The forks belong to no stream yet.
4. The new stream's journals of decisions and of marks are created. They must be empty.
5. One more change gives the forks the labels of the new stream, and seals those that are sealed in it.

Registers are not copied. So writers start over in the fork: it has no writer ids, no fences, and no transactions in
progress. Transactions on several keys that were open at the cut are never acknowledged there, because no writer has
their producer ids; readers skip them. Time marks and reader groups are not copied.

After a crash the same call continues: the offsets of the forks define the cut.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coranto import labels
from coranto.client.client import JournalClient
from coranto.client.values import JournalInfo, Listing
from coranto.effects import Entropy
from coranto.errors import EtcdTransactionFailed, InvalidInput, StreamChanged, StreamExists
from coranto.forks import Fork, fork_journals, fork_of
from coranto.forks.dropping import drops_of
from coranto.streams.control.fork_units import torn_units
from coranto.streams.control.lifecycle import Streams
from coranto.streams.control.scaling import MAX_CHANGES
from coranto.streams.control.segment_specs import part_spec, without_retention
from coranto.streams.model.events import format_of
from coranto.streams.model.fork_cut import consistent_cut, fork_segments
from coranto.streams.model.stream import (
    EPOCH_LABEL,
    MAX_WRITERS_LABEL,
    SCALING_LABEL,
    STREAM_LABEL,
    Segment,
    Stream,
    decode,
    marks_journal,
    segment_journal,
    spec_of,
    transactions_journal,
    validate_stream,
)
from coranto.telemetry import ProgressReport
from coranto.wire import protocol_pb2 as pb

_ATTEMPTS: Final = 20
MAX_SEGMENTS: Final = 40
"""Maximum segments of a stream to fork. One change forks them all, so a crash leaves all of the forks or none."""


@dataclass(frozen=True, slots=True)
class ForkedStream:
    """A forked stream, and the offsets where its segments diverge from their sources."""

    stream: Stream
    cut: Mapping[int, int]


async def fork_stream(
    client: JournalClient,
    source: str,
    name: str,
    *,
    ends: Mapping[str, int] | None = None,
    new_labels: pb.LabelSet | None = None,
    entropy: Entropy = os.urandom,
    progress: ProgressReport | None = None,
) -> ForkedStream:
    """Create the stream `name`, which has the events of `source` up to a cut, and diverges there.

    By default, the cut is at the current ends of the segments. With `ends`, offsets by segment journal, it is the last
    cut at or below them that keeps each transaction whole; the stream is read to find it. A segment that `ends` does
    not name had no content. `new_labels` are further labels of the new segments. `progress` counts bytes that are read
    or copied.

    Call it again after a crash or cancellation: it continues, and returns a complete fork as it is. Raises StreamExists
    if `name` is another stream, or if stores have decisions or marks of an earlier stream `name`; StreamNotFound;
    ContentGone; JournalRecreated for offsets with the ids of earlier journals; InvalidInput for offsets outside of the
    segments and for a stream of more than 40 segments; StreamChanged if others keep changing the stream; and errors of
    the client.
    """
    validate_stream(name)
    await client.require_same(ends or {})
    streams = Streams(client, entropy=entropy)
    present = await _forks_in(client, source, name)
    if present and all(labels.value_of(info.spec.labels, STREAM_LABEL) for info, _ in present.values()):
        return ForkedStream(
            await streams.describe(name), {number: fork.offset for number, (_, fork) in present.items()}
        )
    stream, heads = await streams.cut(source)
    if len(stream.segments) > MAX_SEGMENTS:
        raise InvalidInput(
            f"has {len(stream.segments)} segments, and at most {MAX_SEGMENTS} can be forked; truncate it first, so "
            "that old ones are deleted",
            field=f"stream {source}",
        )
    if present:
        cut = {number: fork.offset for number, (_, fork) in present.items()}
    elif ends is None:
        cut = consistent_cut(stream, heads)
    else:
        wanted = {number: ends.get(segment.journal, 0) for number, segment in stream.segments.items()}
        if beyond := sorted(number for number, at in wanted.items() if at > heads[number]):
            raise InvalidInput(
                f"segment {beyond[0]} ends at {heads[beyond[0]]}, before {wanted[beyond[0]]}", field=f"stream {source}"
            )
        events = format_of(stream.content_type)
        if progress is not None:
            progress.expect(sum(heads.values()))
        units = await torn_units(client, stream, heads, wanted, events, entropy, progress)
        cut = consistent_cut(stream, wanted, units)
    segments = fork_segments(stream, name, cut)
    wanted_forks = {segment_journal(source, number): (segment_journal(name, number), at) for number, at in cut.items()}
    await _fork_all(client, dict(wanted_forks), progress)
    await _become_stream(client, name, stream, segments, new_labels)
    return ForkedStream(await streams.describe(name), cut)


async def _fork_all(
    client: JournalClient, wanted: Mapping[str, tuple[str, int | None]], progress: ProgressReport | None
) -> None:
    """Fork journals, even if others change their specs: content below the cut never changes."""
    for attempt in range(_ATTEMPTS):
        try:
            await fork_journals(client, wanted, progress=progress)
        except EtcdTransactionFailed:
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            return


async def drop_forked_stream(client: JournalClient, name: str) -> None:
    """Delete a stream's journals as `Streams.delete` does, and let the source's retention remove content of forks."""
    await Streams(client).delete(name)


async def _forks_in(client: JournalClient, source: str, name: str) -> dict[int, tuple[JournalInfo, Fork]]:
    """Return the forks that are or will be segments of `name`. Raises StreamExists if it has other journals."""
    listing = await client.list(labels.label_selector(include=[("name:prefix", f"{name}/")]))
    found: dict[int, tuple[JournalInfo, Fork]] = {}
    for info in listing.journals:
        fork = fork_of(info.spec)
        number = info.name.removeprefix(f"{name}/segment/")
        if fork is not None and number.isdecimal() and fork.source == segment_journal(source, int(number)):
            found[int(number)] = info, fork
        elif info.name.startswith(f"{name}/segment/") and not _succeeds(info):
            raise StreamExists(f"there is a stream {name}, or journals that it would have; choose another name")
    if not found and listing.journals:
        raise StreamExists(f"there are journals below {name}/; choose another name")
    return found


def _succeeds(info: JournalInfo) -> bool:
    """Return True for a segment that was created in the fork by scaling: it succeeds other segments."""
    return bool(labels.value_of(info.spec.labels, EPOCH_LABEL, "0") != "0")


async def _become_stream(
    client: JournalClient, name: str, source: Stream, segments: Mapping[int, Segment], new_labels: pb.LabelSet | None
) -> None:
    """Turn forked journals into a stream, in one change."""
    listing = await client.list(labels.label_selector(include=[("name:prefix", f"{name}/segment/")]))
    infos = {info.name: info for info in listing.journals}
    if missing := [each.journal for each in segments.values() if each.journal not in infos]:
        raise StreamChanged(f"{missing[0]} was dropped while stream {name} was forked; delete {name}, and fork again")
    changes, specs = [], []
    for segment in segments.values():
        info = infos[segment.journal]
        spec = spec_of(name, segment, info.spec)
        if source.max_writers is not None:
            spec.labels.CopyFrom(labels.with_value(spec.labels, MAX_WRITERS_LABEL, str(source.max_writers)))
        if source.scaling:
            spec.labels.CopyFrom(labels.with_value(spec.labels, SCALING_LABEL, source.scaling))
        if new_labels is not None:
            spec.labels.CopyFrom(labels.union(spec.labels, new_labels))
        specs.append(spec)
        changes.append(pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=info.mod_revision))
    decode(Listing(listing.header, tuple(JournalInfo(spec, 0, 0, pb.Route()) for spec in specs)))
    newest = specs[-1]
    epoch = str(max(segment.epoch for segment in segments.values()))
    parts = [
        without_retention(part_spec(name, transactions_journal(name), newest, {EPOCH_LABEL: epoch})),
        part_spec(name, marks_journal(name), newest),
    ]
    await _add_parts(client, name, parts, [infos[segment.journal] for segment in segments.values()])
    assert len(changes) <= MAX_CHANGES
    await client.apply(changes)


async def _add_parts(
    client: JournalClient, name: str, parts: Sequence[pb.JournalSpec], forks: Sequence[JournalInfo]
) -> None:
    """Create a stream's journals other than segments. If stores have content of theirs, drop them and the forks.

    Raises StreamExists then, because old decisions and marks would apply to the fork.
    """
    selector = labels.label_selector(include=[(labels.NAME, part.name) for part in parts])
    present = {info.name for info in (await client.list(selector)).journals}  # Created by an earlier call.
    if missing := [part for part in parts if part.name not in present]:
        await client.apply([pb.ApplyRequest.Change(upsert=part, expect_mod_revision=0) for part in missing])
    for part in parts:
        if await client.head(part.name):
            await _drop(client, name, (await client.list(selector)).journals, forks)
            raise StreamExists(
                f"there is content of an earlier stream {name} ({part.name}) in the fragment stores, so the fork was "
                "dropped: remove that content, or choose another name"
            )


async def _drop(client: JournalClient, name: str, parts: Sequence[JournalInfo], forks: Sequence[JournalInfo]) -> None:
    """Drop forks that do not form a stream yet. Raises StreamChanged if another call has made them a stream."""
    groups = await drops_of(client, [fork.name for fork in forks])
    changes = [each for group in groups.values() for each in group]
    seen = {fork.name: fork.mod_revision for fork in forks}
    for each in changes:
        if each.delete:
            each.expect_mod_revision = seen[each.delete]
    changes += [pb.ApplyRequest.Change(delete=each.name, expect_mod_revision=each.mod_revision) for each in parts]
    try:
        await client.apply(changes)
    except EtcdTransactionFailed:
        raise StreamChanged(f"another process forks the stream {name} too; check it, and fork it again") from None
