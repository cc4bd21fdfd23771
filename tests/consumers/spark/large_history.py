"""Histories of journals of any size: interleaved transactions, rollbacks, open transactions and duplicates.

Whole batches are generated together, so that ten million messages take about a minute.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coranto.messages.columnar_stamps import stamped_lines
from coranto.messages.framing import JsonLines
from coranto.messages.uuids import CLOCK_TICK, Flags, ProducerId, format_uuid, new_producer_id

FRAMING = JsonLines()
_WRITERS = 6
_REMEMBERED = 8
"""The number of recent batches that may be repeated."""


def texts_of(first: int, count: int) -> Any:
    """Return the messages from `first` on as an Arrow array of texts with a number, a key and a value."""
    numbers = np.arange(first, first + count, dtype=np.int64)
    return pc.binary_join_element_wise(
        '{"n":',
        pa.array(numbers).cast(pa.string()),
        ',"k":"k',
        pa.array(numbers * 7919 % 97).cast(pa.string()),
        '","v":',
        pa.array(numbers % 1000 / 4).cast(pa.string()),
        "}",
        "",
    )


@dataclass
class _Writer:
    producer: ProducerId
    clock: int
    last_ack: int
    is_open: bool = False

    def stamp(self, first: int, count: int, flags: Flags) -> bytes:
        begin, self.clock = self.clock + CLOCK_TICK, self.clock + CLOCK_TICK * count
        lines = stamped_lines(texts_of(first, count), FRAMING, self.producer, begin, flags, checked=True)
        return _content(lines)

    def commit(self) -> bytes:
        self.clock += CLOCK_TICK
        self.last_ack, self.is_open = self.clock, False
        return self._acknowledgement(self.clock)

    def roll_back(self) -> bytes:
        self.is_open = False
        return self._acknowledgement(self.last_ack)

    def _acknowledgement(self, clock: int) -> bytes:
        return FRAMING.acknowledgement(format_uuid(self.producer, clock, Flags.ACK_TXN))


class History:
    """The history of one journal with `count` messages from `first` on. Equal seeds make equal histories.

    Most writers use transactions. They commit three quarters of these, roll some back, and leave some open for
    good. Any batch may be repeated, immediately or later. Some messages are in no transaction, and some have no
    UUID.
    """

    def __init__(self, seed: int, first: int, count: int, clock: int, batch: int = 400) -> None:
        self._rng = random.Random(seed)
        self._next, self._end = first, first + count
        self._clock = clock
        self._batch = batch
        self._writers = [self._new_writer() for _ in range(_WRITERS)]
        self._outside = self._new_writer()
        self._earlier: list[bytes] = []

    def appends(self) -> Iterator[bytes]:
        """Yield the journal's content, in parts of whole lines."""
        while self._next < self._end:
            content = self._turn()
            yield content
            if self._rng.random() < 0.08:
                yield content  # An append that was repeated because its outcome was unknown.
            self._earlier = [*self._earlier[1 - _REMEMBERED :], content] if content else self._earlier
        for writer in self._writers[: _WRITERS // 2]:
            if writer.is_open:
                yield writer.commit()

    def _turn(self) -> bytes:
        kind = self._rng.choices(["transaction", "outside", "bare", "late"], [80, 8, 4, 8])[0]
        if kind == "outside":
            return self._outside.stamp(*self._numbers(), Flags.OUTSIDE_TXN)
        if kind == "bare":
            return _content(pc.binary_join_element_wise(texts_of(*self._numbers()), "\n", "").cast(pa.binary()))
        if kind == "late" and self._earlier:
            return self._messages_again()
        at = self._rng.randrange(_WRITERS)
        writer = self._writers[at]
        if not writer.is_open or self._rng.random() < 0.6:
            writer.is_open = True
            return writer.stamp(*self._numbers(), Flags.CONTINUE_TXN)
        end = self._rng.choices(["commit", "roll back", "never"], [75, 17, 8])[0]
        if end == "commit":
            return writer.commit()
        if end == "roll back":
            return writer.roll_back()
        self._writers[at] = self._new_writer()
        return b""

    def _messages_again(self) -> bytes:
        """Return messages of an earlier batch. Acknowledgements are repeated immediately only, like appends."""
        lines = self._rng.choice(self._earlier).splitlines(keepends=True)
        begin = self._rng.randrange(len(lines))
        again = lines[begin : begin + self._batch // 4]
        return b"".join(line for line in again if b'"n":' in line and line.startswith(FRAMING.uuid_prefix))

    def _numbers(self) -> tuple[int, int]:
        count = min(self._rng.randint(1, 2 * self._batch), self._end - self._next)
        first, self._next = self._next, self._next + count
        return first, count

    def _new_writer(self) -> _Writer:
        last_ack = self._clock + CLOCK_TICK - 1  # A roll-back before the first commit is just before the first message.
        return _Writer(new_producer_id(self._rng.randbytes), self._clock, last_ack)


def _content(lines: Any) -> bytes:
    _, borders, data = lines.buffers()
    ends = np.frombuffer(borders, dtype=np.int32)[lines.offset : lines.offset + len(lines) + 1]
    content: bytes = data.slice(int(ends[0]), int(ends[-1] - ends[0])).to_pybytes()
    return content
