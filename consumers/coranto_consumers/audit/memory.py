"""Memory of a consumer's audits: the offsets of its checkpoints, and proven states.

It shows losses that the store alone cannot show, such as a checkpoint that was set back. It also shortens replays,
which start from the last proven state. Do not keep it in the consumer's own store: a backup of that store would restore
the memory together with the old checkpoint.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Annotated, Final, Protocol

import pydantic

from coranto.errors import CorruptData
from coranto.messages import Checkpoint, Source
from coranto_consumers.audit.expectations import Number

FORMAT: Final = 1


class Memory(Protocol):
    """Storage for one document per name. `url` is the URL of its fragment store; empty for other storage."""

    url: str

    async def load(self, name: str) -> bytes | None:
        """Return the last saved content, or None. Raises CorantoError if the storage is unreachable."""
        ...

    async def save(self, name: str, content: bytes) -> None:
        """Save `content`. Raises CorantoError if the storage is unreachable."""
        ...


def _number(value: object) -> Number:
    """Parse a number. JSON has it as text, which is exact."""
    number = Decimal(str(value))
    return int(number) if number == number.to_integral_value() else number


_Exact = Annotated[
    int | Decimal, pydantic.BeforeValidator(_number), pydantic.PlainSerializer(lambda value: str(value), str)
]


@dataclass(frozen=True, slots=True)
class KnownSource:
    """One source of a shard. `read_through` is its offset in the checkpoint that was last found sound, or accepted.

    `proven` is a proven state of the source, as the bytes of a checkpoint in base 64; empty if there is none.
    `messages` and `totals` count the messages below it. `gone` is True if the loss of the journal was accepted.
    `journal_id` is the journal's id, empty if unknown. `lost` has the unread spans [begin, end) whose loss was
    accepted.
    """

    read_through: int
    create_revision: int
    proven: str = ""
    messages: int = 0
    totals: Mapping[str, _Exact] = field(default_factory=dict)
    totals_complete: bool = False
    gone: bool = False
    journal_id: str = ""
    lost: list[tuple[int, int]] = field(default_factory=list)

    def proven_source(self, journal: str) -> Source | None:
        """Return the proven state, or None. Raises CorruptData."""
        if not self.proven:
            return None
        return _checkpoint(self.proven).sources.get(journal)

    def proves(self, journal: str, offset: int) -> bool:
        """Return True if the proven state is at `offset`."""
        try:
            proven = self.proven_source(journal)
        except CorruptData:
            return False
        return proven is not None and proven.read_through == offset


def proven_text(journal: str, source: Source) -> str:
    """Encode a state as `KnownSource.proven`."""
    return base64.b64encode(Checkpoint({journal: source}).to_bytes()).decode()


@dataclass(frozen=True, slots=True)
class KnownShard:
    """The state of a shard in the last audit that found it sound, or accepted it.

    `record` is the proven checkpoint without its sources and acknowledgements, as bytes in base 64: the consumer's
    identity and its last batch. It is empty if unknown.
    """

    fence: int
    sources: Mapping[str, KnownSource] = field(default_factory=dict)
    record: str = ""

    def proven_checkpoint(self) -> Checkpoint:
        """Return a checkpoint with the proven sources. Raises CorruptData.

        It has no acknowledgements, because the audit found them in their journals. Unproven sources are omitted.
        """
        sources: dict[str, Source] = {}
        for journal, known in self.sources.items():
            proven = known.proven_source(journal)
            if known.gone:
                proven = Source(known.read_through, journal_id=known.journal_id)
            if proven is not None:
                sources[journal] = proven
        return replace(_checkpoint(self.record), sources=sources)

    def restored_to_proven(self) -> KnownShard:
        """Return the shard with the offsets of its proven state, without the progress that later audits recorded."""
        checkpoint = self.proven_checkpoint()
        sources = {
            journal: replace(self.sources[journal], read_through=source.read_through)
            for journal, source in checkpoint.sources.items()
        }
        return replace(self, sources=sources)


def _checkpoint(text: str) -> Checkpoint:
    try:
        return Checkpoint.from_bytes(base64.b64decode(text))
    except ValueError as error:
        raise CorruptData(f"the memory of audits has a text that is not a checkpoint: {error}") from None


def record_of(checkpoint: Checkpoint) -> str:
    """Encode a checkpoint as `KnownShard.record`."""
    return base64.b64encode(replace(checkpoint, sources={}, ack_intents={}).to_bytes()).decode()


@dataclass(frozen=True, slots=True)
class Known:
    """The results of a consumer's earlier audits. `allowances` are the accepted differences, by expectation."""

    shards: Mapping[str, KnownShard] = field(default_factory=dict)
    allowances: Mapping[str, _Exact] = field(default_factory=dict)
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        return _KNOWN.dump_json(self)

    @classmethod
    def from_bytes(cls, content: bytes) -> Known:
        """Decode saved content. Raises CorruptData if it is malformed, or of a later format."""
        try:
            known = _KNOWN.validate_json(content)
        except pydantic.ValidationError as error:
            raise CorruptData(f"the memory of audits is not readable: {error.errors()[0]['msg']}") from None
        if known.format > FORMAT:
            raise CorruptData(f"the memory of audits has format {known.format}; this version reads up to {FORMAT}")
        return known


_KNOWN: Final = pydantic.TypeAdapter(Known)
