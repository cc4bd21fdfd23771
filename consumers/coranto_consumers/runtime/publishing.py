"""The publisher of an application's transactions. It does no I/O: it stages messages, and the shard appends them."""

from __future__ import annotations

from typing import Any, Final

from coranto.messages import Flags, Framing, JsonLines, ProducerClock, ProducerId, format_uuid, successor
from coranto.names import validate_journal

JSON_LINES: Final = JsonLines()
DEFAULT_FRAMING: Framing[Any] = JSON_LINES
_PIECE_BYTES: Final = 1 << 20


class ShardPublisher:
    """Publishes messages as part of the current transaction. They commit, or are rolled back, with it.

    Every run of a shard's primary has two producers, and transactions alternate between them. A reader that gets an
    acknowledgement twice drops the pending messages of its producer. So a transaction does not use the producer of the
    previous transaction, whose acknowledgements are still being appended.
    """

    def __init__(self, producer: ProducerId, clock: ProducerClock) -> None:
        self.producer = producer
        """The producer of the current transaction."""
        self._other = successor(producer)
        """The producer of the prior transaction, and of the next one."""
        self._newest = self._other
        self._clock = clock
        self._staged: list[tuple[str, bytes]] = []
        self._journals: dict[str, Framing[Any]] = {}
        self.chosen: set[str] = set()
        """The journals that the application has published to."""
        self.staged_bytes = 0

    def publish(self, journal: str, message: Any, framing: Framing[Any] = DEFAULT_FRAMING) -> None:
        """Publish `message` to `journal` if and when this transaction commits.

        Raises InvalidInput for a message that `framing` cannot hold.
        """
        self.keep(journal, message, framing)
        self.chosen.add(journal)

    def keep(self, journal: str, message: Any, framing: Framing[Any] = DEFAULT_FRAMING) -> None:
        """Publish a message of the runtime itself, such as a dead letter, as `publish` does."""
        if journal not in self._journals:
            validate_journal(journal)
            self._journals[journal] = framing
        content = framing.marshal(message, format_uuid(self.producer, self._clock.tick(), Flags.CONTINUE_TXN))
        self._staged.append((journal, content))
        self.staged_bytes += len(content)

    def publish_table(self, journal: str, table: Any, framing: JsonLines = JSON_LINES) -> None:
        """Publish each row of an Arrow table or batch, or of a DataFrame, as a JSON message, as `publish` does.

        UUIDs are stamped by whole columns (see `coranto.messages.columnar_json`). Raises InvalidInput before
        anything is published.
        """
        from coranto.messages.columnar_json import line_pieces, parts_of, stamped_rows, table_of

        rows = table_of(table)
        if journal not in self._journals:
            validate_journal(journal)
        contents: list[bytes] = []
        for part in parts_of(rows):
            first = self._clock.ticks(part.num_rows)
            lines = stamped_rows(part, framing, self.producer, first, Flags.CONTINUE_TXN)
            contents += line_pieces(lines, _PIECE_BYTES)
        if contents:
            self._journals.setdefault(journal, framing)
            self.chosen.add(journal)
            self._staged += ((journal, content) for content in contents)
            self.staged_bytes += sum(map(len, contents))

    def take(self) -> list[tuple[str, bytes]]:
        """Return the content published since the last call, by journal and in order, for the shard to append."""
        staged, self._staged, self.staged_bytes = self._staged, [], 0
        joined: dict[str, list[bytes]] = {}
        for journal, content in staged:
            joined.setdefault(journal, []).append(content)
        return [(journal, b"".join(contents)) for journal, contents in joined.items()]

    def ack_intents(self) -> dict[str, bytes]:
        """End the transaction, and return the acknowledgements that commit its messages, by journal.

        The previous transaction must be done.
        """
        journals, self._journals = self._journals, {}
        intents = {
            journal: framing.acknowledgement(format_uuid(self.producer, self._clock.tick(), Flags.ACK_TXN))
            for journal, framing in journals.items()
        }
        self.producer, self._other = self._other, self.producer
        return intents

    def replace_prior_producer(self) -> None:
        """Never use the prior transaction's producer again: one of its acknowledgements may be appended once more."""
        self._other = self._newest = successor(self._newest)
