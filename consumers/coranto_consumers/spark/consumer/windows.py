"""`WindowConsumer`: runs an application over one window of offsets, and replaces the window's rows.

A message belongs to the window that commits it: the window with the message's acknowledgement, or, outside of
transactions, with the message itself. So each message is in exactly one window, and all windows together give the
result of a continuous consumer. The states of producers at a window's begin are stored with the windows; if they are
missing, the earlier windows are read once. One SQL transaction claims the window, deletes its rows (column
`coranto_window`), merges the new rows and commits the window's checkpoint. So windows may be materialized any number of
times, and concurrently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from coranto.extras import with_install_advice
from coranto_consumers.spark.committed.sequencing import Sources

try:
    from pyspark.sql import SparkSession
    from sqlalchemy.exc import SQLAlchemyError
except ModuleNotFoundError as error:
    raise with_install_advice(error) from error

from coranto.client import ClientConfig, SyncJournalClient
from coranto.client.retry import RetryPolicy
from coranto.errors import CorruptData, Fenced, InvalidInput
from coranto.fragments.windows import Window, find, positions
from coranto.journal_ids import held_through, same_journal
from coranto.labels import NAME, label_selector
from coranto.messages.checkpoints import Checkpoint, Identity, Source
from coranto.messages.pruning import Pruning
from coranto_consumers.journals.discovery import cuts_of
from coranto_consumers.journals.ranges import Range
from coranto_consumers.outputs.dead_letters import DeadLetters
from coranto_consumers.outputs.identity import IdentityCheck, sources_of
from coranto_consumers.spark.application.consumer_options import WINDOW_OPTIONS, ConsumerOptions
from coranto_consumers.spark.application.outputs import SparkApplication
from coranto_consumers.spark.consumer.outages import Outages
from coranto_consumers.spark.consumer.progress import NOTHING, Hooks, Step
from coranto_consumers.spark.consumer.transaction import ConsumerTransaction, Owner
from coranto_consumers.spark.consumer.transaction_inputs import TransactionInputs
from coranto_consumers.spark.inputs.input_reader import Input, InputReader
from coranto_consumers.spark.outputs.stores import WindowRows
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.stores.staging import delete_shards, delete_stale
from coranto_consumers.stores.windows import WINDOW_COLUMN, KnownWindow, WindowLog, is_merged, shard_of, sources_before


@dataclass(frozen=True, slots=True)
class WindowReport:
    window: Window
    messages: int
    """The messages that the window commits."""
    records_read: int
    """Records that were read: these messages, duplicates, acknowledgements, and pending or rolled back messages."""
    fence: int
    misfits: int = 0
    """Messages of the window that do not fit the application's columns: dead letters, or nulls."""


class WindowConsumer:
    """Materializes windows of offsets through an application.

    The application's outputs must be tables. Their column `coranto_window` (BIGINT NOT NULL) is part of each key; this
    class fills it. `name` is the consumer's name, by default the application's name. Each window has its own fence.
    `store` is a SQLAlchemy URL. Only the options in `WINDOW_OPTIONS` apply. Dead letters must go to a table, made by
    `dead_letter_table(…, by_window=True)`.

    The store records the application's selector of sources, its outputs and the store's location for all windows of
    `name`. If any of them changes under the same name, a run is rejected with ConsumerChanged, which has the code to
    confirm the change (`accept_changes`). Windows that were materialized before the change keep their rows.
    """

    def __init__(
        self,
        application: SparkApplication,
        client: ClientConfig,
        store: str,
        spark: SparkSession | Callable[[], SparkSession],
        options: ConsumerOptions | None = None,
        *,
        name: str | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        options = options or ConsumerOptions()
        options.require_only(
            WINDOW_OPTIONS, "a consumer by windows: a window is read as a whole, and fails if content is gone"
        )
        name = application.name if name is None else name
        misfits = options.misfits
        self._input = TransactionInputs(application, client, spark, options, name)
        if isinstance(misfits, DeadLetters) and (misfits.table is None or WINDOW_COLUMN not in misfits.table.c):
            raise InvalidInput(
                f"dead letters of a window are replaced with its rows: give a table that has {WINDOW_COLUMN}, as "
                "dead_letter_table(…, by_window=True) makes it",
                field="misfits",
            )
        self._misfits = misfits
        self._retry_timeout = options.retry_timeout
        self.name = name
        self._application = application
        self._config = client
        self._hooks = hooks or Hooks()
        self._store = SqlStore(store, commit=self._hooks.commit)
        self.log = WindowLog(self._store, name)
        self._identity = IdentityCheck(name, options.accept_changes)
        self._recorded = Identity()

    def window(self, name: str) -> Window:
        """Return the window `name`, or the larger one it was merged into. Raises InvalidInput and SqlStoreError."""
        return find([each.window for each in self.log.load()], name)

    def materialize(self, name: str) -> WindowReport:
        """Read the window `name`, or the larger window that it was merged into, and replace its rows.

        If two runs of a window overlap, the later one replaces the rows and the earlier one raises Fenced. With
        Dagster's assets, the later run waits instead.

        Raises

        * InvalidInput for an unknown window, and for outputs that cannot be replaced by window,
        * ConsumerChanged when the store records other sources or outputs, or another store,
        * Fenced when another run of the window has started, the window was merged, or another process has changed the
          consumer's record during the run (nothing was committed),
        * CorruptData when a journal was deleted and created again, and OffsetJump when content is gone,
        * the errors of `SparkConsumer.run_until_caught_up` for messages, stores and brokers.
        """
        outages = Outages(self.name, RetryPolicy(self._retry_timeout), self._hooks, lambda progress: None)
        report = outages.run(partial(self._materialize, name, {}), lambda: NOTHING)
        assert report is not None  # There is no `stop`.
        return report

    def _materialize(self, name: str, fences: dict[str, int]) -> WindowReport:
        """Run one attempt. `fences` has the fences that this run's attempts have raised, by shard."""
        known = self.log.load()
        window = find([each.window for each in known], name)
        self._compare(known)
        try:
            return self._replace_rows(known, window, fences)
        except Fenced as error:
            if self.log.identity() != self._recorded:
                raise  # Another process has changed the consumer's record, as the error says.
            raise self._overtaken(window) from error

    def _overtaken(self, window: Window) -> Fenced:
        now = self.window(window.name)
        if now.name != window.name:
            return Fenced(
                f"window {window.name} of {self.name} was merged into {now.name} while this run read it. This run has "
                "committed nothing; materialize the larger one"
            )
        return Fenced(
            f"another run of window {window.name} of {self.name} started after this one and replaces its rows. This "
            "run has committed nothing; wait for the other run, and materialize the window again only if that one fails"
        )

    def _replace_rows(self, known: Sequence[KnownWindow], window: Window, fences: dict[str, int]) -> WindowReport:
        shard = shard_of(self.name, window)
        if shard in fences:
            fence, checkpoint = fences[shard], self._store.resume(shard, fences[shard])
        else:
            fence, checkpoint = self._store.raise_fence(shard)
            fences[shard] = fence
        if checkpoint.sources:
            # The new commit must differ from the previous one, in case its outcome has to be checked.
            with self._store.transaction(shard, fence) as transaction:
                transaction.commit(Checkpoint())
        windows = [each.window for each in known]
        try:  # Delete staged rows of earlier runs of the window, and of windows that were merged since.
            with self._store.engine.begin() as connection:
                delete_stale(self._store, connection, shard, fence)
                delete_shards(self._store, connection, lambda found: is_merged(self.name, found, windows))
        except SQLAlchemyError as error:
            raise self._store.failure("stale staged rows could not be deleted", error) from error
        self._hooks.on_step(Step.FENCED)
        with SyncJournalClient.of(self._config) as client:
            _require_same_journals(client, window, self._input)
            reader = self._input.reader()
            sources = self._sources(reader, client, known, window)
            ranges, cuts, sources, pruning = _plan(client, window, sources)
            self._hooks.on_step(Step.PLANNED)
            letters = self._misfits.table if isinstance(self._misfits, DeadLetters) else None
            if letters is not None:
                self._store.create_tables(letters)
            rows = WindowRows(self._store, window, self.log, self._recorded, letters)
            outputs = self._application.outputs
            owner = Owner(self.name, shard, outputs, rows, self._misfits, self._identity, self._hooks, fence)
            with reader.read(ranges, sources, cuts, pruning) as read:
                assert isinstance(read, Input)  # A window is read as a whole.
                _require_whole(window, read.sources)
                self._hooks.on_step(Step.SEQUENCED)
                done = ConsumerTransaction(owner, NOTHING, lambda: nullcontext(client)).run(read)
                return WindowReport(window, done.messages, done.rows, fence, done.misfits)

    def _compare(self, known: Sequence[KnownWindow]) -> None:
        """Compare this consumer with its record, before it fences off another run. Raises ConsumerChanged."""
        sources, self._recorded = self._application.sources, self.log.identity()
        if self._identity.is_compared and self._recorded == self._identity.record:
            return  # This instance has committed the record.
        done = positions([each.window for each in known if each.materialized is not None])

        def unread() -> set[str]:
            with SyncJournalClient.of(self._config) as client:
                return done.keys() - self._input.names(client)

        checkpoint = Checkpoint({journal: Source(span.end) for journal, span in done.items()}, {}, self._recorded)
        now = Identity(sources_of(sources), store=self._store.location)
        self._identity.restored(checkpoint, now, unread)

    def _sources(
        self, reader: InputReader, client: SyncJournalClient, known: Sequence[KnownWindow], window: Window
    ) -> dict[str, Source]:
        """Return the states of sources at a window's begin. Reads earlier windows whose states are missing."""
        sources, between = sources_before(known, window)
        for each in between:
            _require_same_journals(client, each, self._input)
            ranges, cuts, sources, pruning = _plan(client, each, sources)
            sources = reader.advance(ranges, sources, cuts, pruning)
            _require_whole(each, sources)
            self.log.remember(each, Checkpoint(sources))
        return sources


def _plan(
    client: SyncJournalClient, window: Window, before: Sources
) -> tuple[list[Range], dict[str, list[int]], dict[str, Source], Pruning]:
    """Return a window's ranges, cuts, sources and pruning. Pruning is as of the window's creation, so that each read of
    the window gives the same result."""
    spans = window.spans
    sources = {**{name: Source(span.begin, journal_id=span.journal_id) for name, span in spans.items()}, **before}
    ranges = [
        Range(name, span.begin, span.end, span.end, journal_id=span.journal_id) for name, span in sorted(spans.items())
    ]
    for each in ranges:
        if sources[each.journal].read_through != each.begin:
            raise CorruptData(
                f"window {window.name} begins at {each.begin} of {each.journal}, but the states before it are at "
                f"{sources[each.journal].read_through}"
            )
    cuts = cuts_of(client, [each.journal for each in ranges])
    return ranges, cuts, sources, Pruning(window.created)


def _require_whole(window: Window, sources: Sources) -> None:
    for journal, span in window.spans.items():
        if sources[journal].read_through != span.end:
            raise CorruptData(
                f"window {window.name} ends at {span.end} of {journal}, but its last line ends at "
                f"{sources[journal].read_through}"
            )


def _require_same_journals(client: SyncJournalClient, window: Window, inputs: TransactionInputs) -> None:
    """Raise CorruptData if a journal was recreated, or lost content of the window, since the window was made."""
    inputs.journals(client, sorted(window.spans), field=f"window {window.name}")
    for each in client.heads(label_selector(include=[(NAME, journal) for journal in window.spans])):
        span = window.spans[each.journal]
        if not same_journal(span.revision, span.journal_id, span.end, each.create_revision, each.journal_id):
            held = held_through(span.journal_id, span.end, each.journal_id)
            lost = f"has lost its content from offset {held} on" if held else "was deleted and created again"
            raise CorruptData(f"journal {each.journal} {lost} after window {window.name} was made of it")
