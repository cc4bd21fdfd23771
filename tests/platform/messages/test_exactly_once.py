"""Publishers that fail, repeat and roll back, and readers of each kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate

from hypothesis import example, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from coranto.errors import Unavailable
from coranto.messages.batches import line_batch
from coranto.messages.columnar_sequencer import ColumnarSequencer
from coranto.messages.framing import Envelope, JsonLines, JsonObject, iter_messages
from coranto.messages.publisher import SyncPublisher
from coranto.messages.reading import ReadCommitted
from coranto.messages.sequencer import QueueOutcome, ReplayRange, Sequencer, read_committed
from coranto.messages.transactions import TransactionBuilder
from coranto.messages.uuids import ProducerClock, ProducerId, successor

LINES = JsonLines()
JOURNALS = ("a", "b")


class UnreliableJournals:
    """Appends that are applied once or twice, answered or not, or applied much later."""

    def __init__(self, faults: list[str]) -> None:
        self.content: dict[str, bytearray] = defaultdict(bytearray)
        self.faults = iter(faults)
        self.late: list[tuple[str, bytes]] = []

    def append(self, journal: str, content: bytes) -> None:
        fault = next(self.faults, "")
        if fault == "refused":
            raise Unavailable("refused")
        if fault == "late":
            self.late.append((journal, content))
            raise Unavailable("timed out")
        self.content[journal] += content
        if fault == "twice":
            self.content[journal] += content
        if fault == "unknown":
            raise Unavailable("connection lost")

    def apply_late_appends(self) -> None:
        for journal, content in self.late:
            self.content[journal] += content
        self.late.clear()


class Application:
    """A publisher of numbered messages that records the messages to be read."""

    def __init__(self, number: int, journals: UnreliableJournals, max_batch_bytes: int = 150) -> None:
        self.journals = journals
        self.wall = 1_700_000_000_000_000_000
        self.publisher: SyncPublisher[JsonObject] = SyncPublisher(
            journals.append,
            producer=ProducerId(bytes([1, 0, 0, 0, 0, number])),
            clock=ProducerClock(lambda: self.wall),
            framing=LINES,
            max_batch_bytes=max_batch_bytes,
        )
        self.count = 0
        self.number = number
        self.open: dict[str, list[str]] = defaultdict(list)
        self.committed: dict[str, list[list[str]]] = defaultdict(list)
        """The messages of each transaction, by journal."""

    def wrote(self, producer: ProducerId) -> bool:
        """Return True for each producer that the publisher may have had."""
        mine = ProducerId(bytes([1, 0, 0, 0, 0, self.number]))
        return producer in accumulate(range(100), lambda each, _: successor(each), initial=mine)

    def add(self, journal: str) -> None:
        self.count += 1
        name = f"{self.number}/{self.count}"
        self.open[journal].append(name)
        try:
            self.publisher.add(journal, {"name": name})
        except Unavailable:
            return  # It is queued and appended later.

    def commit(self) -> None:
        self._retry(lambda: self.publisher.prepare())
        for journal, names in self.open.items():
            self.committed[journal].append(names)
        self.open.clear()
        self._retry(lambda: self.publisher.acknowledge())

    def roll_back(self) -> None:
        self._retry(lambda: self.publisher.rollback())
        self.open.clear()

    def _retry(self, action: object) -> None:
        assert callable(action)
        while True:
            try:
                action()
            except Unavailable:
                continue
            return


faults = st.lists(st.sampled_from(["", "", "twice", "unknown", "refused", "late"]), max_size=40)
scripts = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(["add", "add", "add", "commit", "roll back", "land"]), st.booleans()),
    max_size=40,
)


LATE = [(0, "add", False), (0, "commit", False), *[(0, "add", False)] * 5, (0, "land", False), (0, "commit", False)]
"""A script whose late second append is an acknowledgement that arrives during the next transaction."""


@given(scripts, faults, st.integers(1, 10))
@example(LATE, ["", "late"], 10)
def test_each_committed_message_is_read_once_and_in_order(
    script: list[tuple[int, str, bool]], trouble: list[str], ring_size: int
) -> None:
    journals = UnreliableJournals(trouble)
    applications = [Application(number, journals) for number in range(2)]
    for number, action, first in script:
        if action == "add":
            applications[number].add(JOURNALS[first])
        elif action == "commit":
            applications[number].commit()
        elif action == "roll back":
            applications[number].roll_back()
        else:
            journals.apply_late_appends()
    applications[0].commit()
    applications[1].roll_back()
    journals.apply_late_appends()
    for application in applications:
        application.add("a")
        application.commit()

    for journal in ("a", "b"):
        content = bytes(journals.content[journal])

        def read(begin: int, end: int, journal: str = journal, content: bytes = content) -> list[Envelope[JsonObject]]:
            return list(iter_messages(LINES, journal, [content[begin:end]], begin))

        def read_columns(wanted: ReplayRange, content: bytes = content) -> Iterator[object]:
            yield line_batch(LINES, wanted.journal, content[wanted.begin : wanted.end], wanted.begin)[0]

        sequencer: Sequencer[JsonObject] = Sequencer(ring_size=ring_size)
        messages = list(read_committed(read(0, len(content)), sequencer, lambda wanted: read(wanted.begin, wanted.end)))
        # Each transaction is complete and read once, in the order of its publisher.
        transactions: dict[Application, list[list[str]]] = defaultdict(list)
        for one in ReadCommitted(lambda begin, end, read=read: read(begin, end or 2**40), journal).transactions():
            [writer] = [application for application in applications if application.wrote(one.producer)]
            transactions[writer].append([message.message["name"] for message in one.messages])
        for application in applications:
            assert transactions[application] == application.committed[journal]
            by_message = [message.message["name"] for message in messages if application.wrote(message.producer)]
            assert by_message == [name for names in application.committed[journal] for name in names]
        columns = ColumnarSequencer(read_columns, ring_rows=ring_size)
        by_column: list[int] = []
        at = 0
        while at < len(content):
            end = content.find(b"\n", at + 300) + 1 or len(content)
            committed = columns.feed(line_batch(LINES, journal, content[at:end], at)[0])
            by_column += committed.column("offset").to_pylist()
            at = end
        assert by_column == [message.begin for message in messages]
        assert columns.checkpoint() == sequencer.checkpoint()


def test_a_rollback_after_one_that_reached_no_journal_resets_no_clocks() -> None:
    """The first message was dropped before it was appended. Readers see only later ones."""
    for dropped in (1, 3):
        for outside in (False, True):
            builder = TransactionBuilder(ProducerId(b"\x01adaad"), ProducerClock(lambda: 0), LINES)
            content = b""
            for number in range(dropped + 1):
                if outside and not number:
                    builder.add_outside("a", {})
                builder.add("a", {})
                if number == dropped:
                    content += builder.take("a", 1 << 20)
                content += builder.rollback_intents().get("a", b"")
                builder.finish()
            sequencer: Sequencer[JsonObject] = Sequencer()
            outcomes = [sequencer.queue(envelope) for envelope in iter_messages(LINES, "a", [content], 0)]
            assert outcomes == [QueueOutcome.CONTINUE_BEGIN, QueueOutcome.ACK_ROLLBACK]
            with capture_logs() as logs:
                columns = ColumnarSequencer(lambda journal, begin, end: iter(()))
                columns.feed(line_batch(LINES, "a", content, 0)[0])
            assert not [each for each in logs if each["event"] == "producer.reset"]


def test_a_reliable_rollback_resets_no_clocks() -> None:
    journals = UnreliableJournals([])
    application = Application(1, journals, max_batch_bytes=1)
    application.add("a")
    application.roll_back()
    application.add("a")
    application.commit()
    application.add("a")
    application.roll_back()
    sequencer: Sequencer[JsonObject] = Sequencer()
    outcomes = []
    for envelope in iter_messages(LINES, "a", [bytes(journals.content["a"])], 0):
        outcomes.append(sequencer.queue(envelope))
        while sequencer.step() is not None:
            pass
    assert outcomes == [
        QueueOutcome.CONTINUE_BEGIN,
        QueueOutcome.ACK_ROLLBACK,
        QueueOutcome.CONTINUE_BEGIN,
        QueueOutcome.ACK_COMMIT_RING,
        QueueOutcome.CONTINUE_BEGIN,
        QueueOutcome.ACK_ROLLBACK,
    ]
