"""The inputs of a consumer's transactions: what its journals contain, and the ways to read ranges of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from coranto.client import SyncJournalClient
from coranto.client.routes import KnownRoute
from coranto.messages.checkpoints import Source
from coranto.messages.pruning import Pruning
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.committed.long_transactions import LongTransaction
from coranto_consumers.spark.consumer.input_settings import InputSettings
from coranto_consumers.spark.consumer.optimistic_writes import OptimisticWrites
from coranto_consumers.spark.consumer.transaction_bounds import MessageBound
from coranto_consumers.spark.inputs.input_reader import FoundLong, Input, InputReader
from coranto_consumers.spark.inputs.strategies import ExpectedRows
from coranto_consumers.spark.journals.discovery import ContentExtent, contents, cuts_of, routes_of
from coranto_consumers.spark.journals.ranges import WORTHWHILE_BYTES, Range
from coranto_consumers.spark.outputs.stores import OutputStore


class TransactionInputs:
    """The inputs of one consumer's transactions. `sources` is the label selector of its journals."""

    def __init__(
        self, settings: InputSettings, sources: str, options: ConsumerOptions, store: OutputStore[Any]
    ) -> None:
        self.bound = MessageBound(options.max_transaction_bytes, options.max_transaction_messages)
        self.writing = OptimisticWrites(store.writes_optimistically)
        self._settings = settings
        self._sources = sources
        self._max_bytes = options.max_transaction_bytes
        self._reader: InputReader | None = None
        self._routes: Mapping[str, KnownRoute] = {}

    @property
    def has_session(self) -> bool:
        """True if reading starts no session."""
        return self._settings.has_session or self._reader is not None

    def names(self, client: SyncJournalClient) -> set[str]:
        return {each.name for each in self._settings.journals(client, self._sources, field="application sources")}

    def present(self, client: SyncJournalClient) -> dict[str, ContentExtent]:
        present = contents(client, self._settings.journals(client, self._sources, field="application sources"))
        self._routes = routes_of(present)
        return present

    def nothing(self) -> Any:
        return self._input_reader().nothing()

    @contextmanager
    def reading(
        self,
        client: SyncJournalClient,
        ranges: Sequence[Range],
        sources: Mapping[str, Source],
        begins: Mapping[str, int],
    ) -> Iterator[Input | FoundLong]:
        """Read ranges, within the context. `begins` are the journals' first offsets."""
        reader, cuts = self._input_reader(), _cuts(client, ranges)
        with reader.read(ranges, sources, cuts, _pruning(begins), self._max_bytes) as read:
            yield read

    def part(self, long: LongTransaction, sources: Mapping[str, Source], head: int) -> AbstractContextManager[Input]:
        """Read the due part of a long transaction, in a journal that ends at `head`."""
        return self._input_reader().read_part(long, sources, head, self._max_bytes)

    def expect(self, client: SyncJournalClient, ranges: Sequence[Range]) -> ExpectedRows | None:
        """Return the messages of ranges as if all were committed. None if that is impossible."""
        return self._input_reader().expect(ranges, _cuts(client, ranges))

    def settle(self, expected: ExpectedRows, sources: Mapping[str, Source], begins: Mapping[str, int]) -> Input | None:
        """Return the input of expected messages that were written. None if not all of them are committed."""
        return self._input_reader().settle(expected, sources, _pruning(begins))

    def _input_reader(self) -> InputReader:
        if self._reader is None:
            self._reader = self._settings.reader()
        self._reader.routes = self._routes
        return self._reader


def _pruning(begins: Mapping[str, int]) -> Pruning:
    return Pruning(time.time(), first_offsets=begins)


def _cuts(client: SyncJournalClient, ranges: Sequence[Range]) -> dict[str, list[int]]:
    # Small ranges are not split, so the begins of their fragments are not needed.
    return cuts_of(client, [each.journal for each in ranges if each.length > WORTHWHILE_BYTES])
