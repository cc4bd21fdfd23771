"""The publisher of an application's transactions. It does no I/O: it stages messages, and the shard appends them."""

from __future__ import annotations

from typing import Any

from coranto.messages import Flags, Framing, JsonLines, ProducerClock, ProducerId, format_uuid
from coranto.names import validate_journal

DEFAULT_FRAMING: Framing[Any] = JsonLines()


class ShardPublisher:
    """Publishes messages as part of the current transaction. They commit, or are rolled back, with it.

    Every run of a shard's primary has a producer of its own.
    """

    def __init__(self, producer: ProducerId, clock: ProducerClock) -> None:
        self.producer = producer
        self._clock = clock
        self._staged: list[tuple[str, bytes]] = []
        self._journals: dict[str, Framing[Any]] = {}
        self.staged_bytes = 0

    def publish(self, journal: str, message: Any, framing: Framing[Any] = DEFAULT_FRAMING) -> None:
        """Publish `message` to `journal` if and when this transaction commits.

        Raises InvalidInput for a message that `framing` cannot hold.
        """
        if journal not in self._journals:
            validate_journal(journal)
            self._journals[journal] = framing
        content = framing.marshal(message, format_uuid(self.producer, self._clock.tick(), Flags.CONTINUE_TXN))
        self._staged.append((journal, content))
        self.staged_bytes += len(content)

    def take(self) -> list[tuple[str, bytes]]:
        """Return the content published since the last call, by journal and in order, for the shard to append."""
        staged, self._staged, self.staged_bytes = self._staged, [], 0
        joined: dict[str, list[bytes]] = {}
        for journal, content in staged:
            joined.setdefault(journal, []).append(content)
        return [(journal, b"".join(contents)) for journal, contents in joined.items()]

    def ack_intents(self) -> dict[str, bytes]:
        """End the transaction, and return the acknowledgements that commit its messages, by journal."""
        journals, self._journals = self._journals, {}
        return {
            journal: framing.acknowledgement(format_uuid(self.producer, self._clock.tick(), Flags.ACK_TXN))
            for journal, framing in journals.items()
        }
