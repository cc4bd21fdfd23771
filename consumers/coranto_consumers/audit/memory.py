"""The memory of a consumer's audits: how far its checkpoints were, and states that were proven right.

It shows losses that the store alone cannot show, such as a checkpoint that was set back. It also spares replays: a
state that an audit has proven is where the next one begins. So it must not be kept in the consumer's own store: a
backup of that store would restore the memory together with the old checkpoint.
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
    """A place that keeps one text for each name. `url` belongs to its fragment store; empty for other places."""

    url: str

    async def load(self, name: str) -> bytes | None:
        """Return the content that was saved last, or None. Raises CorantoError when the place cannot be reached."""
        ...

    async def save(self, name: str, content: bytes) -> None:
        """Keep `content`. Raises CorantoError when the place cannot be reached."""
        ...


def _number(value: object) -> Number:
    """Return a number that JSON keeps as text, to keep it exact."""
    number = Decimal(str(value))
    return int(number) if number == number.to_integral_value() else number


_Exact = Annotated[
    int | Decimal, pydantic.BeforeValidator(_number), pydantic.PlainSerializer(lambda value: str(value), str)
]


@dataclass(frozen=True, slots=True)
class KnownSource:
    """One source of a shard. `read_through` is the largest offset that was seen in its checkpoints.

    `proven` is a state of the source that an audit has proven, as the bytes of a checkpoint in base 64; empty without
    one. `messages` and `totals` are those below it. `gone` says that the journal's end was accepted. `journal_id` is
    the journal's id, empty if unknown. `lost` are spans [begin, end) whose loss was accepted before they were read.
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
        """Return True if the proven state is that at an offset."""
        try:
            proven = self.proven_source(journal)
        except CorruptData:
            return False
        return proven is not None and proven.read_through == offset


def proven_text(journal: str, source: Source) -> str:
    """Return the text of `KnownSource.proven`."""
    return base64.b64encode(Checkpoint({journal: source}).to_bytes()).decode()


@dataclass(frozen=True, slots=True)
class KnownShard:
    """A shard as an audit saw it.

    `record` is the proven checkpoint without its sources and acknowledgements, as bytes in base 64: its identity of the
    consumer and its last batch. It is empty if unknown.
    """

    fence: int
    sources: Mapping[str, KnownSource] = field(default_factory=dict)
    record: str = ""

    def proven_checkpoint(self) -> Checkpoint:
        """Return the checkpoint of the proven sources, without acknowledgements, which were found in their journals.

        Sources that no audit has proven are left out. Raises CorruptData.
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
        """Return it as it was when it was proven, whatever later audits have seen."""
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
    """Return the text of `KnownShard.record`."""
    return base64.b64encode(replace(checkpoint, sources={}, ack_intents={}).to_bytes()).decode()


@dataclass(frozen=True, slots=True)
class Known:
    """Earlier audits' knowledge of a consumer. `allowances` are differences of expectations that were accepted."""

    shards: Mapping[str, KnownShard] = field(default_factory=dict)
    allowances: Mapping[str, _Exact] = field(default_factory=dict)
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        return _KNOWN.dump_json(self)

    @classmethod
    def from_bytes(cls, content: bytes) -> Known:
        """Return the knowledge in saved content. Raises CorruptData for other content."""
        try:
            known = _KNOWN.validate_json(content)
        except pydantic.ValidationError as error:
            raise CorruptData(f"the memory of audits is not readable: {error.errors()[0]['msg']}") from None
        if known.format > FORMAT:
            raise CorruptData(f"the memory of audits has format {known.format}; this version reads up to {FORMAT}")
        return known


_KNOWN: Final = pydantic.TypeAdapter(Known)
