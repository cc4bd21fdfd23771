"""The inputs of a consumer's transactions: the content of its journals, limits of size, and read strategies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from pyspark.sql import SparkSession

from coranto.client import ClientConfig, JournalInfo, SyncJournalClient
from coranto.client.config import require_client
from coranto.messages.pruning import Pruning
from coranto_consumers.journals.discovery import ANY_LABELS, ContentExtent, contents, cuts_of, list_journals, routes_of
from coranto_consumers.journals.framings import labels_of
from coranto_consumers.journals.ranges import WORTHWHILE_BYTES, Range
from coranto_consumers.outputs.dead_letters import policy_of
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.application.outputs import Outputs, SparkApplication
from coranto_consumers.spark.committed.sequencing import Sources
from coranto_consumers.spark.inputs.frames import Routes, parse_schema, require_ddl
from coranto_consumers.spark.inputs.input_reader import FoundLong, Input, InputReader
from coranto_consumers.spark.inputs.strategies import ExpectedRows
from coranto_consumers.spark.options.message_types import ResolvedType, resolve_type

_MAX_SKIPPED = 256
SHORTEST_MESSAGE: Final = 64
"""The approximate bytes of a line of JSON that has a UUID and little else."""
_TOLERANCE: Final = 2
"""The most that a transaction may exceed `max_messages`, as a factor."""


class MessageBound:
    """The bytes that a transaction may read to get at most about `max_messages`. If that is None: `max_bytes`.

    The number of messages in a range is known only after it is read, so the plan uses the mean length of earlier
    messages. The first transaction assumes the shortest lines, so that it reads too little rather than too much. If
    messages turn out to be much shorter, the transaction is discarded, and planned again. Otherwise a new mean takes
    effect at the next `apply`, so that the plans of the prefetch and of the next transaction are equal.
    """

    def __init__(self, max_bytes: int, max_messages: int | None) -> None:
        self._max_bytes = max_bytes
        self._max_messages = max_messages
        self._observed: float = SHORTEST_MESSAGE
        self._applied: float = SHORTEST_MESSAGE

    @property
    def max_bytes(self) -> int:
        if self._max_messages is None:
            return self._max_bytes
        return max(1, min(self._max_bytes, int(self._max_messages * self._applied)))

    def observe(self, ranges: Sequence[Range], messages: int) -> bool:
        """Record the number of messages in ranges. Return False if they are too many: plan the transaction again."""
        if self._max_messages is None or not messages:
            return True
        self._observed = sum(each.length for each in ranges) / messages
        # A transaction reads at least one message of each journal.
        if messages > _TOLERANCE * max(self._max_messages, len(ranges)):
            self.apply()
            return False
        return True

    def apply(self) -> None:
        self._applied = self._observed


class OptimisticWrites:
    """Chooses the transactions of one consumer that are read and written by a single Spark job.

    Normally one job reads, and once the committed messages are known, a second job writes their outputs. Usually all
    messages are committed. So a single job may write the outputs of all messages, and the driver checks the ranges'
    summaries afterwards. If some messages are not committed, the rows are never merged, and the transaction is repeated
    with two jobs, at about one and a half times the cost.

    So a single job is chosen only if no producer has an open transaction, the application writes one table and no
    journal, and no attempt has failed recently: after a failure, the next transactions take two jobs, twice as many
    after each further failure. `IcebergStore` does not support it, because it removes unused files only later.
    """

    def __init__(self, is_possible: bool = True) -> None:
        self._skipped = 0
        self._to_skip = 0
        self._is_possible = is_possible

    def is_worthwhile(self, ranges: Iterable[Range], sources: Sources) -> bool:
        """Return True if a single job is worth trying for a transaction over ranges, from the states of sources."""
        ranges = list(ranges)
        return (
            self._is_possible
            and self._skipped >= self._to_skip
            and sum(each.length for each in ranges) > WORTHWHILE_BYTES
            and not any(state.begin >= 0 for each in ranges for state in sources[each.journal].producers.values())
        )

    def allows(self, outputs: Outputs) -> bool:
        """Return True for outputs that a single job can write. Otherwise no further transactions are tried."""
        self._is_possible = not outputs.journals and len(outputs.tables) + len(outputs.sql) == 1
        return self._is_possible

    def record_two_jobs(self, *, wasted: bool) -> None:
        """Record a transaction that took two jobs. It is `wasted` if they followed a failed single job."""
        self._skipped += 1
        if wasted:
            self._skipped, self._to_skip = 0, min(_MAX_SKIPPED, max(1, 2 * self._to_skip))

    def record_one_job(self) -> None:
        self._to_skip = 0


class TransactionInputs:
    """The inputs of one consumer's transactions. The first listing of journals resolves the message type for all."""

    def __init__(
        self,
        application: SparkApplication,
        client: ClientConfig,
        spark: SparkSession | Callable[[], SparkSession],
        options: ConsumerOptions,
        name: str,
        writes_optimistically: bool = False,
    ) -> None:
        require_client(client)
        require_ddl(application.value_schema)
        self.bound = MessageBound(options.max_transaction_bytes, options.max_transaction_messages)
        self.writing = OptimisticWrites(writes_optimistically)
        self._application = application
        self._config = client
        self._spark = spark
        self._options = options
        self._name = name
        self._type: ResolvedType | None = None
        self._reader: InputReader | None = None
        self._routes: Routes = {}

    @property
    def has_session(self) -> bool:
        """True if reading does not start a session."""
        return not callable(self._spark) or self._reader is not None

    def journals(self, client: SyncJournalClient, wanted: str | Sequence[str], field: str) -> tuple[JournalInfo, ...]:
        """List the journals of a selector, or with names. Their labels must fit the input. Raises InvalidInput."""
        if self._options.registry is None:
            return list_journals(client, wanted, field=field, labels=labels_of(self._options.chosen_framing))
        if self._type is None:
            found = list_journals(client, wanted, field=field, labels=ANY_LABELS)
            named: str | None = getattr(self._application, "message_type", None)
            self._type = resolve_type(client, self._options.registry, found, named)
        return list_journals(client, wanted, field=field, labels=self._type.labels)

    def _sources(self, client: SyncJournalClient) -> tuple[JournalInfo, ...]:
        return self.journals(client, self._application.sources, field="application sources")

    def names(self, client: SyncJournalClient) -> set[str]:
        return {each.name for each in self._sources(client)}

    def present(self, client: SyncJournalClient) -> dict[str, ContentExtent]:
        present = contents(client, self._sources(client))
        self._routes = routes_of(present)
        return present

    @contextmanager
    def reading(
        self, client: SyncJournalClient, ranges: Sequence[Range], sources: Sources, begins: Mapping[str, int]
    ) -> Iterator[Input | FoundLong]:
        """Read ranges, within the context. `begins` are the journals' first offsets."""
        reader, cuts = self.reader(), _cuts(client, ranges)
        with reader.read(
            ranges, sources, cuts, Pruning(time.time(), first_offsets=begins), self._options.max_transaction_bytes
        ) as read:
            yield read

    def expect(self, client: SyncJournalClient, ranges: Sequence[Range]) -> ExpectedRows | None:
        """Return the messages of ranges as if all were committed. None if that is impossible."""
        return self.reader().expect(ranges, _cuts(client, ranges))

    def confirm(self, expected: ExpectedRows, sources: Sources, begins: Mapping[str, int]) -> Input | None:
        """Return the input of expected messages that were written. None if not all of them are committed."""
        return self.reader().confirm(expected, sources, Pruning(time.time(), first_offsets=begins))

    def reader(self) -> InputReader:
        """Return the reader of the input. The first call starts the session if needed."""
        if self._reader is None:
            found = self._type
            self._reader = InputReader(
                self._spark() if callable(self._spark) else self._spark,
                self._config,
                parse_schema(self._application.value_schema, None if found is None else found.schema),
                self._options.max_partition_bytes,
                misfits=policy_of(self._options.misfits),
                framing=self._options.chosen_framing if found is None else found.framing,
                name=self._name,
            )
        self._reader.routes = self._routes
        return self._reader


def _cuts(client: SyncJournalClient, ranges: Sequence[Range]) -> dict[str, list[int]]:
    # Small ranges are not split, so the begins of their fragments are not needed.
    return cuts_of(client, [each.journal for each in ranges if each.length > WORTHWHILE_BYTES])
