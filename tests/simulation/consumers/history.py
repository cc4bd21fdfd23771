"""The events of a run that I8 to I10 concern: plain values, so that the checker can be tested alone."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple


class Fate(enum.Enum):
    """A producer's decision about a message."""

    OPEN = "open"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    ABANDONED = "abandoned"
    """Its producer went away without a decision."""


@dataclass(slots=True, eq=False)
class Sent:
    """A message of a producer. `number` orders the messages of one producer."""

    id: str
    journal: str
    producer: str
    number: int
    key: str
    amount: int
    fate: Fate = Fate.OPEN


class Entry(NamedTuple):
    """A message's effect in a store, made by the transaction `token`."""

    id: str
    journal: str
    producer: str
    clock: int
    key: str
    amount: int
    token: str


@dataclass(slots=True)
class Book:
    """The application's state of a shard in its store: counts and sums, and the entries that prove them."""

    sums: dict[str, list[int]] = field(default_factory=dict)
    """By key: the count and the sum."""
    entries: list[Entry] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    """All committed transactions, in order."""


@dataclass(slots=True, eq=False)
class Owner:
    """One store object: a process's ownership of a shard. Times are virtual seconds, infinite if it never happened."""

    number: int
    shard: str
    process: str
    opened: float
    restored: float = float("inf")
    found: tuple[str, ...] = ()
    """The tokens that it restored."""
    confirmed: list[str] = field(default_factory=list)
    """The tokens that its store confirmed as committed."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A call of `consume_message`, whatever the outcome of its transaction."""

    owner: int
    shard: str
    id: str


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """An ACK that a consumer was about to append. `licensed` if its transaction was then known to be committed."""

    process: str
    journal: str
    content: bytes
    at: float
    licensed: bool


@dataclass(slots=True)
class Record:
    sent: dict[str, Sent] = field(default_factory=dict)
    owners: list[Owner] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    acknowledgements: list[Acknowledgement] = field(default_factory=list)
    intents: dict[tuple[str, bytes], None] = field(default_factory=dict)
    """By journal: the ACK intents of checkpoints that are known to be committed."""


@dataclass(slots=True)
class FinalShard:
    name: str
    sources: tuple[str, ...]
    book: Book
