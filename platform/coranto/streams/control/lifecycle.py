"""Creating streams, changing their segments, and deleting them.

Every change is one Apply, conditioned on nothing having changed since the stream was read. So of several concurrent
changes, one wins. Any process can finish the remaining steps (`Streams.resume`), and repeat them:

1. The gate of multi-key transactions is closed, and all decided transactions are carried out (`decisions.py`).
2. The Apply makes the predecessors read-only and creates their successors. From here on the change has happened.
3. An empty append to each predecessor, at a broker that knows of the Apply, returns its final offset: nothing can be
   appended after it (`docs/protocol.md`).
4. A second Apply records the final offsets. Readers wait for them before they continue with the successors.
5. The gate is opened.

The spec of the journal `<stream>/transactions` is part of every Apply that changes segments. So if a process closes the
gate and is then overtaken or presumed dead, its Apply is refused. That journal has no retention: a decision that is
not carried out yet stays valid, however long that takes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.duration_pb2 import Duration

from coranto import labels
from coranto.client.client import JournalClient
from coranto.client.values import JournalInfo
from coranto.effects import Clock, Entropy, SystemClock
from coranto.errors import (
    CorruptData,
    InvalidInput,
    JournalNotFound,
    StreamChanged,
    StreamExists,
    StreamNotFound,
)
from coranto.forks import drop_forks, fork_of
from coranto.forks.dropping import drops_of
from coranto.fragments.forks import holds_of, is_label
from coranto.messages.framing import Framing
from coranto.messages.uuids import ProducerClock
from coranto.names import nests
from coranto.streams.control.applying import apply_changes, try_changes
from coranto.streams.control.decisions import Decisions
from coranto.streams.control.scaling import MAX_CHANGES, Change, ScalingPolicy, format_policy, transition
from coranto.streams.control.segment_ends import end_of, final_offset
from coranto.streams.control.segment_specs import owner_of, part_spec, segment_change, touch_change, without_retention
from coranto.streams.control.transaction_ends import drop_undecided, open_lanes
from coranto.streams.control.truncating import batched, check_cut, truncation
from coranto.streams.control.view import StreamView, not_found, view_of
from coranto.streams.model.events import JsonEvents, format_of
from coranto.streams.model.keys import KeyRange
from coranto.streams.model.registers import MAX_WRITERS
from coranto.streams.model.stream import (
    EPOCH_LABEL,
    MAX_WRITERS_LABEL,
    SCALING_LABEL,
    STREAM_LABEL,
    Segment,
    Stream,
    StreamCut,
    dead_letters_journal,
    decode,
    decode_all,
    marks_journal,
    segment_journal,
    segments_selector,
    spec_of,
    transactions_journal,
    validate_stream,
)
from coranto.wire import protocol_pb2 as pb

_CONCURRENCY = 16
_ATTEMPTS = 20


def default_template(*, replication: int = 1, stores: Sequence[str] = ("file:///",)) -> pb.JournalSpec:
    """Return a spec for a stream's journals: fragments of 64 MiB, compressed with Zstandard, persisted to `stores`."""
    spec = pb.JournalSpec(replication=replication)
    spec.fragment.length = 1 << 26
    spec.fragment.compression_codec = pb.ZSTANDARD
    spec.fragment.stores.extend(stores)
    spec.fragment.refresh_interval.CopyFrom(Duration(seconds=30))
    return spec


class Streams:
    """The streams of a cluster. Safe for many tasks, and for several processes at the same time.

    A cancelled call that only reads leaves nothing behind. After a cancelled change of segments, `resume` finishes the
    change or leaves the stream as it was. After a cancelled `delete`, call `delete` again.
    """

    def __init__(self, client: JournalClient, *, clock: Clock | None = None, entropy: Entropy = os.urandom) -> None:
        self._client = client
        self._clock: Clock = clock or SystemClock()
        self._entropy = entropy

    # -- Reading ---------------------------------------------------------------------------------------------------

    async def describe(self, name: str) -> Stream:
        """Return the stream as brokers know it. Raises StreamNotFound, and CorruptData if its labels are invalid."""
        try:
            return decode(await self._client.list(segments_selector(validate_stream(name))))
        except StreamNotFound:
            raise not_found(name) from None

    async def list(self, invalid: dict[str, CorruptData] | None = None) -> tuple[Stream, ...]:
        """Return all streams, in the order of their names.

        Raises CorruptData for a stream with invalid labels. If `invalid` is given, the stream is left out instead, and
        its error is added to `invalid` by name. Such streams occur because any user who may apply a journal can give
        it the labels of a stream.
        """
        listing = await self._client.list(labels.label_selector(include={STREAM_LABEL: ""}))
        return decode_all(listing, invalid=invalid)

    async def heads(self, stream: Stream, segments: Iterable[Segment] | None = None) -> dict[int, int]:
        """Return the write heads of segments (by default all), by number. Segments that are gone are left out."""
        found: dict[int, int] = {}
        limit = asyncio.Semaphore(_CONCURRENCY)

        async def look(segment: Segment) -> None:
            async with limit:
                try:
                    found[segment.number] = await self._client.head(segment.journal)
                except JournalNotFound:
                    return

        await asyncio.gather(*map(look, stream.segments.values() if segments is None else segments))
        return dict(sorted(found.items()))

    # -- Creating and deleting -------------------------------------------------------------------------------------

    async def create(
        self,
        name: str,
        segments: int = 1,
        *,
        template: pb.JournalSpec | None = None,
        content_type: str = labels.JSON_LINES,
        policy: ScalingPolicy | None = None,
        max_writers: int | None = None,
    ) -> Stream:
        """Create a stream whose segments share the key space evenly. Returns it once it can be written to.

        `template` is the spec of its journals, except for names, flags and a stream's labels. `content_type` is its
        event format's type. `policy` is stored for `coranto streams autoscale`. `max_writers` is the number of writers
        whose state a segment keeps, at most MAX_WRITERS. Raises StreamExists and InvalidInput. After a cancellation,
        the stream may have been created.
        """
        validate_stream(name)
        if not 1 <= segments <= MAX_CHANGES:
            raise InvalidInput(
                f"{segments} is not between 1 and {MAX_CHANGES}; scale it further later", field="segments"
            )
        if max_writers is not None and not 1 <= max_writers <= MAX_WRITERS:
            raise InvalidInput(
                f"a segment cannot keep the state of {max_writers} writers; give between 1 and {MAX_WRITERS}",
                field="max_writers",
            )
        spec = pb.JournalSpec()
        spec.CopyFrom(template or default_template())
        common = labels.with_value(spec.labels, labels.CONTENT_TYPE, content_type)
        if policy is not None:
            common = labels.with_value(common, SCALING_LABEL, format_policy(policy))
        if max_writers is not None:
            common = labels.with_value(common, MAX_WRITERS_LABEL, str(max_writers))
        spec.labels.CopyFrom(common)
        ranges = KeyRange.FULL.split(segments)
        made = [Segment(number, 0, segment_journal(name, number), keys) for number, keys in enumerate(ranges)]
        specs = [spec_of(name, segment, spec) for segment in made]
        specs.append(without_retention(part_spec(name, transactions_journal(name), spec, {EPOCH_LABEL: "0"})))
        specs.append(part_spec(name, marks_journal(name), spec))  # Marks are needed as long as events are.
        changes = [pb.ApplyRequest.Change(upsert=each) for each in specs]
        applied = await apply_changes(self._client, changes, self._clock)
        if applied is None:
            raise StreamExists(f"there is a stream {name}, or journals that it would have; choose another name")
        stream = Stream(name, {each.number: each for each in made})
        occupied = [number for number, head in (await self.heads(stream)).items() if head]
        if occupied:
            if applied.is_exact:
                undo = [
                    pb.ApplyRequest.Change(delete=each.name, expect_mod_revision=applied.revision) for each in specs
                ]
                await try_changes(self._client, undo)
            raise StreamExists(
                f"there is content of an earlier stream {name} (segment {occupied[0]}) in the fragment stores: remove "
                "that content, or choose another name"
            )
        return await self.describe(name)

    async def ensure_part(
        self,
        name: str,
        journal: str,
        *,
        content_type: str = labels.JSON_LINES,
        more: Mapping[str, str] | None = None,
        unlimited_retention: bool = False,
    ) -> None:
        """Create another journal of a stream, with a spec like its segments', unless the journal exists.

        `more` are further labels. With `unlimited_retention`, the journal's content is never removed, because all of it
        may be needed. Raises StreamNotFound, and InvalidInput if its name nests with another of the stream's journals.
        """
        for _ in range(_ATTEMPTS):
            view = await view_of(self._client, name)
            if journal in view.infos:
                return
            # Coranto's brokers refuse this too, but Gazette's do not.
            if other := next((each for each in view.infos if nests(each, journal)), None):
                raise InvalidInput(
                    f"the journal {journal} would nest with {other}, so that one folder in the fragment stores "
                    "contains the other; choose another name, without a '/'",
                    field="name",
                )
            newest = max(view.stream.segments.values(), key=lambda each: each.number)
            spec = part_spec(name, journal, view.of(newest).spec, {labels.CONTENT_TYPE: content_type, **(more or {})})
            if unlimited_retention:
                without_retention(spec)
            if await try_changes(self._client, [pb.ApplyRequest.Change(upsert=spec)]):
                return
        raise StreamChanged(f"stream {name} was changed by others {_ATTEMPTS} times during this call; try again")

    async def delete(self, name: str) -> None:
        """Delete a stream's journals, whatever their state. Their fragments in fragment stores are kept.

        The journals of an incomplete fork are deleted, too. After an interruption, call it again to finish. Raises
        StreamNotFound if the stream has no journals, and InvalidInput if a segment has forks, which need its content.
        """
        prefix = f"{validate_stream(name)}/"
        gone = False
        for _ in range(_ATTEMPTS):
            listing = await self._client.list(labels.label_selector(include=[("name:prefix", prefix)]))
            mine = [info for info in listing.journals if owner_of(info) == name or _is_begun(info, name)]
            if not mine:
                if not gone:
                    raise not_found(name)
                return
            gone = True
            await self._require_unshared(mine)
            if forks := [info.name for info in mine if fork_of(info.spec) is not None]:
                await drop_forks(self._client, forks[: MAX_CHANGES // 2])
                continue
            batch = [pb.ApplyRequest.Change(delete=info.name, expect_mod_revision=info.mod_revision) for info in mine]
            await try_changes(self._client, batch[:MAX_CHANGES])
        raise StreamChanged(f"stream {name} changed {_ATTEMPTS} times while it was being deleted; delete it again")

    async def _require_unshared(self, infos: Sequence[JournalInfo]) -> None:
        """Raise InvalidInput if other journals share the fragments of these journals."""
        for info in (await self._sharing(infos)).values():
            what = f"the stream {owner_of(info)}" if owner_of(info) else f"the journal {info.name}"
            raise InvalidInput(f"{what} was forked from it and shares its fragments; delete the fork first")

    async def _sharing(self, infos: Iterable[JournalInfo]) -> dict[str, JournalInfo]:
        """Return the journals that share fragments with forks, each with one of these forks."""
        holding = {info.name: holds_of(info.spec).keys() for info in infos}
        held = sorted({fork for forks in holding.values() for fork in forks} - holding.keys())
        if not held:
            return {}
        listing = await self._client.list(labels.label_selector(include=[("name", fork) for fork in held]))
        present = {info.name: info for info in listing.journals}
        return {name: present[fork] for name, forks in holding.items() for fork in forks if fork in present}

    # -- Changing segments -----------------------------------------------------------------------------------------

    async def scale(self, name: str, changes: Sequence[Change]) -> Stream:
        """Split and merge segments. Returns the stream once the predecessors are sealed.

        Raises StreamChanged if another process changed the stream during the call, StreamSealed, StreamNotFound and
        InvalidInput. After an interruption or cancellation, `resume` finishes the change if it has happened, or leaves
        the stream as it was.
        """
        view = await view_of(self._client, name)
        planned = transition(view.stream, changes)
        sealed = [segment_change(view.of(each), replace(each, sealing=True), name) for each in planned.predecessors]
        created = [
            pb.ApplyRequest.Change(upsert=spec_of(name, each, _parent(view, each)), expect_mod_revision=0)
            for each in planned.successors
        ]
        return await self._carry_out(view, [*sealed, *created], planned.epoch)

    async def seal(self, name: str) -> Stream:
        """Seal a stream, so that it takes no more events. Returns it once the final offsets of its segments are known.

        A sealed stream is left as it is. Raises StreamChanged and StreamNotFound.
        """
        while True:
            view = await view_of(self._client, name)
            active = view.stream.active()[:MAX_CHANGES]
            if not active:
                return await self.resume(name)
            ended = [replace(each, sealing=True, end_of_stream=True) for each in active]
            changes = [segment_change(view.of(each), each, name) for each in ended]
            await self._carry_out(view, changes, view.stream.epoch)

    async def _carry_out(self, view: StreamView, changes: Sequence[pb.ApplyRequest.Change], epoch: int) -> Stream:
        name = view.stream.name
        decisions = Decisions(self._client, name, self._entropy)
        token = None
        if view.transactions is not None:
            gate = await decisions.close()
            token = gate.token
            await decisions.finish(gate)
            changes = [*changes, touch_change(view.transactions, {EPOCH_LABEL: str(epoch)})]
        applied = await apply_changes(self._client, changes, self._clock)
        if applied is None:
            now = await self.resume(name)
            raise StreamChanged(
                f"another process changed stream {name}, which is at epoch {now.epoch} now. Nothing of this "
                "change was applied: look at its segments, and try again"
            )
        found = (await self._finish(name)).stream
        # Another process may have recorded the final offsets. All brokers reach that revision.
        revision = max(applied.revision, *(each.mod_revision for each in found.segments.values()))
        if token is not None and not await decisions.open(token, revision, found.cluster):
            return await self.resume(name)
        return await self.describe(name)

    async def resume(self, name: str) -> Stream:
        """Finish interrupted changes of the stream's segments and interrupted multi-key transactions. Idempotent.

        If the process that makes a change is still running: a change that was applied stays valid, and a change that
        was not applied yet is refused. Raises StreamNotFound. Raises IndexHasGreaterOffset if the content of a segment
        that is being sealed was lost, so that its final offset is unknown (see `coranto journals reset-head`). Raises
        StreamChanged if others keep changing the stream.
        """
        decisions = Decisions(self._client, name, self._entropy)
        for _ in range(_ATTEMPTS):
            view = await self._finish(name)
            if view.transactions is None:
                return view.stream
            gate = await decisions.gate()
            await decisions.finish(gate)
            if gate.is_open or gate.token is None:
                return view.stream
            # Make the Apply of the process that closed the gate fail, unless it has happened.
            if not await try_changes(self._client, [touch_change(view.transactions, {})]):
                continue
            if await decisions.open(gate.token, self._client.applied_revision):
                return await self.describe(name)
        raise StreamChanged(f"stream {name} was changed by others {_ATTEMPTS} times during this call; try again")

    async def drop_lanes(self, name: str, format: Framing[Any] | None = None) -> int:
        """Remove registers of dead multi-key writers from the segments. Returns the number of lanes.

        All transactions that are open during the call start again. `format` is the format of events, by default the
        format of the stream's content type. Raises the errors of `resume`.
        """
        view = await self._finish(name)
        if view.transactions is None:
            return 0
        events = format or format_of(view.stream.content_type)
        formats = {each.journal: events for each in view.stream.active()}
        if (letters := dead_letters_journal(name)) in view.infos:
            formats[letters] = JsonEvents()
        # These transactions read the gate before it is closed below. After that, each is decided or never will be.
        found = await asyncio.gather(*(open_lanes(self._client, each) for each in formats))
        decisions = Decisions(self._client, name, self._entropy)
        gate = await decisions.close()
        await decisions.finish(gate)
        ticks = ProducerClock(lambda: int(self._clock.now() * 1e9))
        dropped = await asyncio.gather(
            *(
                drop_undecided(self._client, journal, uses, formats[journal], ticks)
                for journal, uses in zip(formats, found, strict=True)
            )
        )
        if await try_changes(self._client, [touch_change(view.transactions, {})]):
            await decisions.open(gate.token, self._client.applied_revision)
        await self.resume(name)
        return sum(dropped)

    async def cut(self, name: str) -> tuple[Stream, dict[int, int]]:
        """Return the stream, and ends of its segments such that no transaction is partly readable before them.

        All decided multi-key transactions are completed first. Open ones start again. Raises the errors of `resume`.
        """
        decisions = Decisions(self._client, name, self._entropy)
        for _ in range(_ATTEMPTS):
            view = await self._finish(name)
            gate = None
            if view.transactions is not None:
                gate = await decisions.close()
                await decisions.finish(gate)
                view = await view_of(self._client, name)
            limit = asyncio.Semaphore(_CONCURRENCY)

            async def ended(segment: Segment, limit: asyncio.Semaphore = limit) -> int:
                async with limit:
                    known = segment.sealed_at
                    return await end_of(self._client, segment.journal, 0) if known is None else known

            segments = view.stream.segments
            ends = dict(zip(segments, await asyncio.gather(*map(ended, segments.values())), strict=True))
            if gate is None or view.transactions is None:
                return view.stream, ends
            # Both succeed only if the gate stayed closed and the segments unchanged.
            if await try_changes(self._client, [touch_change(view.transactions, {})]) and await decisions.open(
                gate.token, self._client.applied_revision
            ):
                if not view.stream.unfinished():
                    return view.stream, ends
            else:
                await self.resume(name)
        raise StreamChanged(f"stream {name} was changed by others {_ATTEMPTS} times during this call; try again")

    async def _finish(self, name: str) -> StreamView:
        """Determine the final offsets of segments that are being sealed, and record them."""
        for _ in range(_ATTEMPTS):
            view = await view_of(self._client, name)
            unfinished = view.stream.unfinished()[:MAX_CHANGES]
            if not unfinished:
                return view
            limit = asyncio.Semaphore(_CONCURRENCY)

            async def ended(segment: Segment, revision: int, limit: asyncio.Semaphore = limit) -> Segment:
                async with limit:
                    return replace(segment, sealed_at=await final_offset(self._client, segment.journal, revision))

            found = await asyncio.gather(*(ended(each, view.stream.revision) for each in unfinished))
            await try_changes(self._client, [segment_change(view.of(each), each, name) for each in found])
        raise StreamChanged(f"stream {name} was changed by others {_ATTEMPTS} times during this call; try again")

    # -- Truncating ------------------------------------------------------------------------------------------------

    async def truncate(self, name: str, cut: StreamCut) -> Stream:
        """Truncate the stream at a cut, so that readers begin there. Segments wholly before it are deleted.

        A segment that a fork shares cannot be deleted. It stays, with the segments that succeed it, until the stream is
        truncated again without that fork, but it is no longer read. Truncation never moves back: a segment that already
        begins after the cut is not changed. Fragments in stores are not removed. Raises InvalidInput if this is not a
        cut of the stream, StreamChanged and StreamNotFound. After a cancellation, only some segments may be truncated;
        call it again.
        """
        view = await view_of(self._client, name)
        if view.stream.unfinished() and any(holds_of(info.spec) for info in view.infos.values()):
            view = await self._finish(name)
        stream = view.stream
        gone = check_cut(stream, cut)
        heads = await self.heads(stream, [stream.segments[number] for number in cut])
        for number, offset in cut.items():
            sealed_at = stream.segments[number].sealed_at
            end = heads.get(number, 0) if sealed_at is None else sealed_at
            if not 0 <= offset <= end:
                raise InvalidInput(f"offset {offset} is not in segment {number}, which ends at {end}", field="cut")
        sharing = await self._sharing(view.infos.values())
        shared = {number for number in gone if stream.segments[number].journal in sharing}
        deleted, later = truncation(stream, cut, gone, shared)
        forks = [each.journal for each in deleted if fork_of(view.of(each).spec) is not None]
        released = await drops_of(self._client, forks) if forks else {}
        groups = [
            released.get(each.journal)
            or [pb.ApplyRequest.Change(delete=each.journal, expect_mod_revision=each.mod_revision)]
            for each in deleted
        ]
        groups += [[segment_change(view.of(stream.segments[each.number]), each, name)] for each in later]
        for batch in batched(groups, MAX_CHANGES):
            if await apply_changes(self._client, batch, self._clock) is None:
                raise StreamChanged(f"another process changed stream {name}; check it, and truncate it again")
        return await self.describe(name)


# --------------------------------------------------------------------------------------------------------------- specs


def _is_begun(info: JournalInfo, stream: str) -> bool:
    """Return True for a fork that has not become a segment of the stream yet."""
    return info.name.startswith(f"{stream}/segment/") and not owner_of(info) and fork_of(info.spec) is not None


def _parent(view: StreamView, segment: Segment) -> pb.JournalSpec:
    """Return the template of a new segment's spec: its newest predecessor's spec, without a suspension."""
    spec = pb.JournalSpec()
    spec.CopyFrom(view.infos[segment_journal(view.stream.name, max(segment.predecessors))].spec)
    spec.ClearField("suspend")
    # A successor is not a fork, and has no forks.
    spec.labels.CopyFrom(labels.label_set(pair for pair in labels.as_pairs(spec.labels) if not is_label(pair[0])))
    return spec
