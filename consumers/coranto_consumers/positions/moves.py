"""Moves of a consumer to other positions: planned from its journals, then committed under a raised fence.

A plan has the state of each journal at its new position (`states.py`), and the repeated or omitted messages. The commit
keeps the rest of the checkpoint. Its acknowledgements stay, and the next start appends them again, so that all earlier
publications of the consumer commit. A record of the move stays in the checkpoint (`SourceReset`): the fenced-off
instance reports it as the reason, and audits treat it as intended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from coranto import labels
from coranto.client import JournalClient, JournalInfo
from coranto.client.heads import JournalHead
from coranto.client.moments import moment_at
from coranto.errors import InvalidInput, JournalRecreated, OffsetJump, Unavailable
from coranto.journal_ids import is_same, latest_id
from coranto.messages import Checkpoint, Framing, Source
from coranto.messages.checkpoints import SourceReset
from coranto.offsets import id_of
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.audit.sources import framing_of
from coranto_consumers.positions.states import JournalWalk
from coranto_consumers.stores.fencing import Restored

EARLIEST, LATEST = "earliest", "latest"
Target: TypeAlias = str | float | Mapping[str, int]
"""`EARLIEST`, `LATEST`, a time in Unix seconds, or offsets by journal."""
FramingOf: TypeAlias = Callable[[pb.JournalSpec], Framing[Any]]
_ADVICE = "Give offsets of the present journal."
_COUNTED_BYTES: Final = 64 << 20
"""The maximum size of a repeated range whose messages are counted. The content is read only for this."""


@dataclass(frozen=True, slots=True)
class Move:
    """The move of a consumer in one journal. `known` is the current state, and `source` the new one."""

    journal: str
    known: Source
    source: Source
    messages: int | None = 0
    """The number of repeated or omitted messages, whose acknowledgements are between the positions. None: there are too
    many to count."""
    is_other_journal: bool = False
    """True if `known` is of an earlier journal with that name, so the repeated or omitted messages are unknown."""
    is_new: bool = False
    """True if the consumer has not read the journal yet: `known` is the beginning of the journal."""

    @property
    def repeats(self) -> bool:
        return not self.is_other_journal and self.source.read_through < self.known.read_through

    @property
    def omits(self) -> bool:
        return not self.is_other_journal and self.source.read_through > self.known.read_through

    @property
    def span(self) -> tuple[int, int]:
        """The offsets [begin, end) that are repeated or omitted."""
        begin, end = sorted((self.known.read_through, self.source.read_through))
        return begin, end


async def plan_moves(
    client: JournalClient,
    checkpoint: Checkpoint,
    target: Target,
    journals: Sequence[str] = (),
    *,
    sources: str = "",
    only_forward: bool = False,
    framing: FramingOf = framing_of,
) -> list[Move]:
    """Return the moves of a checkpoint's journals to a target, sorted by journal.

    `journals` limits the moves, and so do offsets as a target. A journal at its target is omitted, and with
    `only_forward` also a journal beyond its target. Journals that match the label selector `sources` and are not in the
    checkpoint count as read up to their beginning, so that a new consumer can begin anywhere. A move back reads the
    journal from its beginning, to find the state at the offset.

    Raises InvalidInput for journals that the checkpoint does not have or that do not exist, for offsets beyond a
    journal's end, below its content or within a message, and for a move forward from within a transaction;
    JournalRecreated for offsets of an earlier journal, ContentGone for a time before a journal's content, Unavailable,
    and errors of the client.
    """
    new = set((await client.list(sources)).names) - checkpoint.sources.keys() if sources else set()
    wanted = sorted(set(journals) or (set(target) if isinstance(target, Mapping) else {*checkpoint.sources, *new}))
    if strange := sorted(set(wanted) - checkpoint.sources.keys() - new):
        raise InvalidInput(
            f"the consumer does not read {strange[0]}, but "
            f"{', '.join(sorted({*checkpoint.sources, *new})) or 'no journal'}",
            field="journal",
        )
    if not wanted:
        raise InvalidInput(f"no journal matches {sources!r}", field="sources")
    if isinstance(target, Mapping) and (missing := sorted(set(wanted) - target.keys())):
        raise InvalidInput(f"has no offset of {missing[0]}", field="--to")
    selector = labels.label_selector(include=[(labels.NAME, name) for name in wanted])
    infos = {info.name: info for info in (await client.list(selector)).journals}
    heads = (await client.heads(selector)).by_name
    for name in wanted:
        if name not in infos or name not in heads:
            raise InvalidInput(f"there is no journal {name}; leave it out, by naming others", field="journal")
        if not heads[name].known:
            raise Unavailable(f"no broker says where {name} ends: {heads[name].problem or 'try again'}")
    if isinstance(target, float):
        target = dict((await moment_at(client, [infos[name] for name in wanted], target)).ends)
    found = []
    for name in wanted:
        known = checkpoint.sources.get(name)
        one = _JournalMove(client, infos[name], heads[name], known, framing(infos[name].spec))
        move = await one.plan(target if isinstance(target, str) else target[name], only_forward)
        if move is not None:
            found.append(move)
    return found


class _JournalMove:
    """Plans the move in one journal."""

    def __init__(
        self, client: JournalClient, info: JournalInfo, head: JournalHead, known: Source | None, framing: Framing[Any]
    ) -> None:
        self._name = info.name
        self._head = head
        self._walk = JournalWalk(client, framing, info.name)
        self._first = head.head if head.status == pb.SUSPENDED else head.begin
        if labels.value_of(info.spec.labels, labels.STREAM):
            from coranto.streams.model.stream import decode_segment  # Only streams need it.

            self._first = max(self._first, decode_segment(info).begin)
        self._is_new = known is None
        self._known = known = known or Source(self._first, journal_id=head.journal_id)
        self._id = latest_id(known.journal_id, head.journal_id) if known.journal_id else head.journal_id
        self._is_other = not is_same(known.expected_id, known.read_through, head.journal_id)

    async def plan(self, target: str | int, only_forward: bool) -> Move | None:
        at = await self._offset(target)
        known = self._known.read_through
        if not self._is_other and (at == known or (only_forward and at < known)):
            return None
        if self._is_other:
            source = (await self._walk.to(Source(self._first), at)).source if at > self._first else Source(at)
            return Move(self._name, self._known, replace(source, journal_id=self._head.journal_id), 0, True)
        source, messages = await (self._forward(at) if at > known else self._back(at))
        source = replace(source, journal_id=self._id)
        return Move(self._name, self._known, source, messages, is_new=self._is_new)

    async def _offset(self, target: str | int) -> int:
        head, first = self._head.head, self._first
        if target == EARLIEST:
            return first
        if target == LATEST:
            begin = first if self._is_other else max(first, min(self._known.read_through, head))
            return await self._walk.boundary(begin, head)  # The last message may be incomplete.
        assert isinstance(target, int)
        if not is_same(id_of(target), target, self._head.journal_id):
            raise JournalRecreated(self._name, target, id_of(target), self._head.journal_id, head, _ADVICE)
        if target > head and not self._head.is_end:
            raise Unavailable(f"{self._name} may end beyond {head}: a broker with the rest does not answer")
        if target > head:
            raise InvalidInput(f"offset {target} is beyond the end of {self._name}, which is {head}", field="--to")
        if target < first:
            raise InvalidInput(
                f"content of {self._name} below {first} is gone, so it cannot be read from {target}: "
                f"give {first} or more, or {EARLIEST}",
                field="--to",
            )
        return int(target)

    async def _forward(self, at: int) -> tuple[Source, int | None]:
        if await self._walk.in_partial_delivery(self._known, self._first):
            raise InvalidInput(
                f"the consumer has processed a part of a transaction in {self._name}, and to continue from "
                f"{self._known.read_through} to {at} would omit the rest: let it complete that transaction first",
                field="journal",
            )
        if self._known.replay_from >= self._first:
            try:
                found = await self._walk.to(self._known, at)
            except OffsetJump:
                pass  # Retention has just removed pending messages.
            else:
                return found.source, found.messages
        found = await self._walk.to(Source(self._first), at)
        return found.source, found.messages

    async def _back(self, at: int) -> tuple[Source, int | None]:
        state = (await self._walk.to(Source(self._first), at)).source if at > self._first else Source(at)
        if self._known.read_through > self._head.head:
            return state, 0
        if self._known.read_through - at > _COUNTED_BYTES:
            return state, None
        return state, await self._walk.count(state, self._known)


def apply_moves(moves: Sequence[Move], *, at: float | None = None) -> Callable[[Restored], Checkpoint]:
    """Return the function that applies moves to a checkpoint, for `change_checkpoint`. `at` is the time; default: now.

    The function raises InvalidInput if the consumer has since committed in a journal that moves forward, or has another
    checkpoint.
    """
    when = time.time() if at is None else at

    def change(restored: Restored) -> Checkpoint:
        checkpoint = restored.checkpoint
        sources = dict(checkpoint.sources)
        resets = {each.journal: each for each in checkpoint.identity.resets if each.journal in sources}
        for move in moves:
            present = sources.get(move.journal, move.known if move.is_new else None)
            if present is None or not is_same(move.known.journal_id, move.known.read_through, present.journal_id):
                raise InvalidInput(f"the consumer now has another checkpoint of {move.journal}: run this again")
            if present != move.known and not move.repeats:
                raise InvalidInput(
                    f"the consumer has continued in {move.journal} from {move.known.read_through} to "
                    f"{present.read_through}, so nothing was changed: stop it, and run this again"
                )
            sources[move.journal] = move.source
            before = -1 if move.is_other_journal else present.read_through
            resets[move.journal] = SourceReset(move.journal, before, move.source.read_through, restored.fence, when)
        identity = replace(checkpoint.identity, resets=tuple(resets[name] for name in sorted(resets)))
        return replace(checkpoint, sources=sources, identity=identity)

    return change
