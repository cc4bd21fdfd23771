"""The transaction builder's phases, and publishers whose appends fail, wait and are cancelled."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import pytest

from coranto.errors import InvalidInput, Unavailable
from coranto.messages.framing import Envelope, JsonLines, JsonObject, iter_messages
from coranto.messages.mapping import ModuloMapping, by_key
from coranto.messages.publisher import Phase, Publisher, SyncPublisher, TransactionBuilder
from coranto.messages.sequencer import Sequencer, read_committed
from coranto.messages.uuids import Flags, ProducerClock, ProducerId

PRODUCER = ProducerId(bytes.fromhex("010203040506"))
LINES = JsonLines()


def make_clock() -> ProducerClock:
    return ProducerClock(lambda: 1_700_000_000_000_000_000)


def make_builder() -> TransactionBuilder[JsonObject]:
    return TransactionBuilder(PRODUCER, make_clock(), LINES)


class Journals:
    """In-memory journals whose appends can fail before or after they are applied."""

    def __init__(self) -> None:
        self.content: dict[str, bytearray] = defaultdict(bytearray)
        self.appends: list[tuple[str, int]] = []
        self.fail_before: set[str] = set()
        self.fail_after: set[str] = set()

    def append(self, journal: str, content: bytes) -> None:
        if journal in self.fail_before:
            raise Unavailable(f"{journal} is away")
        self.content[journal] += content
        self.appends.append((journal, len(content)))
        if journal in self.fail_after:
            raise Unavailable(f"{journal} went away")

    def flags(self, journal: str) -> list[int]:
        return [e.flags for e in iter_messages(LINES, journal, [bytes(self.content[journal])], 0)]

    def clocks(self, journal: str) -> list[int]:
        return [e.clock for e in iter_messages(LINES, journal, [bytes(self.content[journal])], 0)]

    def values(self, journal: str) -> list[object]:
        return [e.message.get("n") for e in iter_messages(LINES, journal, [bytes(self.content[journal])], 0)]


def make_sync(journals: Journals, max_batch_bytes: int = 200) -> SyncPublisher[JsonObject]:
    return SyncPublisher(
        journals.append, producer=PRODUCER, clock=make_clock(), framing=LINES, max_batch_bytes=max_batch_bytes
    )


CONTINUE, ACK, OUTSIDE = Flags.CONTINUE_TXN, Flags.ACK_TXN, Flags.OUTSIDE_TXN


def test_batches_hold_whole_messages_in_order_and_are_bounded() -> None:
    builder = make_builder()
    sizes = [builder.add("a", {"n": n}) for n in range(10)]
    builder.add("b", {"n": "x" * 1000})
    assert builder.pending_bytes("a") == sum(sizes)
    assert builder.pending_bytes("unknown") == 0
    assert builder.pending_journals() == ["a", "b"]
    batches = builder.take_batches(3 * sizes[0])
    assert [(journal, batch.count(b"\n")) for journal, batch in batches] == [
        ("a", 3),
        ("a", 3),
        ("a", 3),
        ("a", 1),
        ("b", 1),
    ]
    assert builder.pending_bytes() == 0
    assert builder.take("a", 100) == b""
    read = [json.loads(line)["n"] for _, batch in batches[:4] for line in batch.splitlines()]
    assert read == list(range(10))


def test_a_transaction_from_first_message_to_acknowledgement() -> None:
    builder = make_builder()
    builder.add("a", {"n": 1})
    builder.add("b", {"n": 2})
    with pytest.raises(InvalidInput, match="bytes are not yet appended to a, b"):
        builder.ack_intents()
    builder.take_batches(1000)
    intents = builder.ack_intents()
    assert list(intents) == ["a", "b"]
    assert builder.phase is Phase.PREPARED
    with pytest.raises(InvalidInput, match="the transaction is prepared"):
        builder.add("a", {"n": 3})
    assert builder.commit() == builder.commit() == intents
    with pytest.raises(InvalidInput, match="the transaction is committing"):
        builder.rollback_intents()
    builder.finish()
    (ack,) = iter_messages(LINES, "a", [intents["a"]], 0)
    assert (ack.producer, ack.flags) == (PRODUCER, ACK)
    builder.add("c", {"n": 4})
    builder.take_batches(1000)
    assert list(builder.ack_intents()) == ["c"]


def test_an_empty_transaction_has_no_intents() -> None:
    builder = make_builder()
    assert builder.ack_intents() == {}
    assert builder.commit() == {}
    builder.finish()
    assert builder.phase is Phase.OPEN


def test_publishing_outside_a_transaction_is_refused_within_one() -> None:
    builder = make_builder()
    builder.add_outside("a", {"n": 1})
    builder.add("b", {"n": 1})
    builder.add_outside("a", {"n": 2})
    with pytest.raises(InvalidInput, match="a transaction has messages for b"):
        builder.add_outside("b", {"n": 2})
    assert [flag for _, batch in builder.take_batches(1000) for flag in flags_of(batch)] == [OUTSIDE, OUTSIDE, CONTINUE]


def flags_of(content: bytes) -> list[int]:
    return [e.flags for e in iter_messages(LINES, "j", [content], 0)]


def clocks_of(content: bytes) -> list[int]:
    return [e.clock for e in iter_messages(LINES, "j", [content], 0)]


def test_rollback_uses_the_last_acknowledged_clock_or_the_first_one_minus_one() -> None:
    builder = make_builder()
    builder.add("a", {"n": 1})
    first = clocks_of(builder.take("a", 1000))[0]
    builder.add("never appended", {"n": 1})
    intents = builder.rollback_intents()
    assert {journal: clocks_of(content) for journal, content in intents.items()} == {"a": [first - 1]}
    assert builder.rollback_intents() == intents
    assert builder.pending_bytes() == 0
    with pytest.raises(InvalidInput, match="rolling back"):
        builder.add("a", {"n": 1})
    builder.finish()

    builder.add("a", {"n": 2})
    builder.take_batches(1000)
    acked = clocks_of(builder.ack_intents()["a"])
    builder.commit()
    builder.finish()
    builder.add("a", {"n": 3})
    builder.take_batches(1000)
    assert clocks_of(builder.rollback_intents()["a"]) == acked
    builder.finish()

    builder.add_outside("a", {"n": 4})
    outside = clocks_of(builder.take("a", 1000))
    builder.add("a", {"n": 5})
    builder.take_batches(1000)
    builder.ack_intents()
    assert clocks_of(builder.rollback_intents()["a"]) == outside


def test_rollback_keeps_messages_outside_the_transaction() -> None:
    builder = make_builder()
    builder.add_outside("a", {"n": 1})
    builder.add("b", {"n": 2})
    builder.rollback_intents()
    builder.finish()
    assert builder.pending_journals() == ["a"]


def test_a_batch_in_doubt_is_sealed_off_by_the_rollback() -> None:
    builder = make_builder()
    builder.add("a", {"n": 1})
    batch = builder.take("a", 1000)
    builder.put_back("a", batch)
    assert builder.pending_bytes() == len(batch)
    intent = builder.rollback_intents()["a"]
    clock = clocks_of(batch)[0]
    below, above = clocks_of(intent)
    assert below < clock < above
    assert flags_of(intent) == [ACK, ACK]


def test_a_sync_publisher_appends_full_batches_and_the_rest_on_commit() -> None:
    journals = Journals()
    publisher = make_sync(journals)
    for n in range(20):
        publisher.add("ab"[n % 2], {"n": n})
    assert journals.appends
    assert all(size <= 200 for _, size in journals.appends)
    kept: list[Mapping[str, bytes]] = []

    def keep(intents: Mapping[str, bytes]) -> None:
        assert set(journals.flags("a") + journals.flags("b")) == {CONTINUE}
        assert journals.values("a") == list(range(0, 20, 2))
        kept.append(intents)

    intents = publisher.commit(keep)
    assert kept == [intents]
    for journal in "ab":
        assert journals.flags(journal) == [CONTINUE] * 10 + [ACK]
        clocks = journals.clocks(journal)
        assert all(before < after for before, after in pairwise(clocks))
        assert bytes(journals.content[journal]).endswith(intents[journal])


def test_sync_publishing_outside_transactions() -> None:
    journals = Journals()
    publisher = make_sync(journals)
    for n in range(5):
        publisher.publish("a", {"n": n})
    publisher.flush()
    assert journals.values("a") == list(range(5))
    assert set(journals.flags("a")) == {OUTSIDE}
    assert publisher.producer == PRODUCER


def test_a_failed_sync_append_is_retried_in_order() -> None:
    journals = Journals()
    publisher = make_sync(journals, max_batch_bytes=1)
    journals.fail_after = {"a"}
    with pytest.raises(Unavailable):
        publisher.add("a", {"n": 1})
    journals.fail_after = set()
    publisher.add("a", {"n": 2})
    publisher.commit()
    assert journals.values("a") == [1, 1, 2, None]


def test_nothing_is_acknowledged_if_intents_cannot_be_stored() -> None:
    journals = Journals()
    publisher = make_sync(journals)
    publisher.add("a", {"n": 1})

    def refuse(intents: Mapping[str, bytes]) -> None:
        raise RuntimeError("store is down")

    with pytest.raises(RuntimeError, match="store is down"):
        publisher.commit(refuse)
    assert journals.flags("a") == [CONTINUE]
    publisher.rollback()
    assert journals.flags("a") == [CONTINUE, ACK]
    before, ack = journals.clocks("a")
    assert ack == before - 1
    publisher.add("a", {"n": 2})
    publisher.commit()
    assert journals.flags("a") == [CONTINUE, ACK, CONTINUE, ACK]


def test_acknowledging_can_be_repeated_after_a_failure() -> None:
    journals = Journals()
    publisher = make_sync(journals)
    publisher.add("a", {"n": 1})
    publisher.add("b", {"n": 2})
    publisher.prepare()
    journals.fail_before = {"b"}
    with pytest.raises(Unavailable):
        publisher.acknowledge()
    journals.fail_before = set()
    publisher.acknowledge()
    assert journals.flags("a") == [CONTINUE, ACK, ACK]
    assert journals.flags("b") == [CONTINUE, ACK]


class LateJournals(Journals):
    """The first acknowledgement's first attempt is unanswered, and arrives when a test calls `arrive`."""

    def __init__(self) -> None:
        super().__init__()
        self._late: dict[str, bytes] = {}

    def append(self, journal: str, content: bytes) -> SimpleNamespace:
        super().append(journal, content)
        [*_, last] = iter_messages(LINES, journal, [content], 0)
        is_late = last.flags == ACK and not self._late
        if is_late:
            self._late[journal] = content
        return SimpleNamespace(may_repeat=is_late)

    def arrive(self) -> None:
        for journal, content in self._late.items():
            self.content[journal] += content

    def committed(self, journal: str) -> list[object]:
        content = bytes(self.content[journal])

        def read(begin: int, end: int) -> Iterator[Envelope[JsonObject]]:
            return iter_messages(LINES, journal, [content[begin:end]], begin)

        found = read_committed(read(0, len(content)), Sequencer(), lambda wanted: read(wanted.begin, wanted.end))
        return [each.message["n"] for each in found]


def test_a_late_repeated_acknowledgement_does_not_affect_the_next_transaction() -> None:
    journals = LateJournals()
    publisher = make_sync(journals)
    publisher.add("a", {"n": 1})
    publisher.commit()
    publisher.add("a", {"n": 2})
    publisher.flush()
    journals.arrive()
    publisher.commit()
    assert journals.committed("a") == [1, 2]


async def test_a_late_repeated_acknowledgement_does_not_affect_an_async_publisher() -> None:
    journals = LateJournals()

    async def append(journal: str, content: bytes) -> SimpleNamespace:
        return journals.append(journal, content)

    async with Publisher(append, producer=PRODUCER, clock=make_clock(), framing=LINES) as publisher:
        await publisher.add("a", {"n": 1})
        await publisher.commit()
        await publisher.add("a", {"n": 2})
        await publisher.flush()
        journals.arrive()
        await publisher.commit()
    assert journals.committed("a") == [1, 2]


def test_a_rollback_by_the_next_producer_drops_only_its_own_messages() -> None:
    journals = LateJournals()
    publisher = make_sync(journals)
    publisher.add("a", {"n": 1})
    publisher.commit()
    publisher.add("a", {"n": 2})
    publisher.flush()
    publisher.rollback()
    journals.arrive()
    publisher.add("a", {"n": 3})
    publisher.commit()
    assert journals.committed("a") == [1, 3]


def test_without_repeated_acknowledgements_the_producer_does_not_change() -> None:
    journals = Journals()
    publisher = make_sync(journals)
    for n in range(3):
        publisher.add("a", {"n": n})
        publisher.commit()
    assert publisher.producer == PRODUCER


def test_a_journal_that_refuses_does_not_delay_other_acknowledgements() -> None:
    journals = Journals()
    publisher = make_sync(journals)
    for journal in ("a", "b", "c"):
        publisher.add(journal, {"n": 1})
    publisher.prepare()
    journals.fail_before = {"a"}
    for times in (1, 2):
        with pytest.raises(Unavailable):
            publisher.acknowledge()
        assert journals.flags("a") == [CONTINUE]
        assert journals.flags("b") == journals.flags("c") == [CONTINUE, *[ACK] * times]


class SlowJournals(Journals):
    """Appends that wait until the gate opens, and record the concurrent ones of each journal."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.active: dict[str, int] = defaultdict(int)
        self.max_concurrent = 0
        self.waiting = asyncio.Event()

    async def append_slowly(self, journal: str, content: bytes) -> None:
        self.active[journal] += 1
        assert self.active[journal] == 1, "appends of one journal must not overlap"
        self.max_concurrent = max(self.max_concurrent, sum(self.active.values()))
        self.waiting.set()
        try:
            await self.gate.wait()
            self.append(journal, content)
        finally:
            self.active[journal] -= 1


def make_async(journals: SlowJournals, batch: int = 200, pending: int = 1 << 20) -> Publisher[JsonObject]:
    return Publisher(
        journals.append_slowly,
        producer=PRODUCER,
        clock=make_clock(),
        framing=LINES,
        max_batch_bytes=batch,
        max_pending_bytes=pending,
    )


async def test_an_async_publisher_appends_to_journals_in_parallel_and_in_order() -> None:
    journals = SlowJournals()
    async with make_async(journals) as publisher:
        for n in range(40):
            await publisher.add("abcd"[n % 4], {"n": n})
        committing = asyncio.create_task(publisher.commit())
        await journals.waiting.wait()
        journals.gate.set()
        intents = await committing
    assert journals.max_concurrent == 4
    assert all(size <= 200 for _, size in journals.appends)
    for index, journal in enumerate("abcd"):
        assert journals.values(journal) == [*range(index, 40, 4), None]
        assert journals.flags(journal) == [CONTINUE] * 10 + [ACK]
        assert all(before < after for before, after in pairwise(journals.clocks(journal)))
        assert bytes(journals.content[journal]).endswith(intents[journal])


async def test_adding_waits_while_too_many_bytes_are_pending() -> None:
    journals = SlowJournals()
    publisher = make_async(journals, batch=10_000, pending=300)

    async def add_all() -> None:
        for n in range(30):
            await publisher.add("abc"[n % 3], {"n": n})

    adding = asyncio.create_task(add_all())
    await journals.waiting.wait()
    assert not adding.done()
    journals.gate.set()
    await adding
    await publisher.rollback()
    assert [journals.flags(journal)[-1] for journal in "abc"] == [ACK] * 3
    await publisher.aclose()


async def test_a_background_failure_is_raised_and_the_batch_is_kept() -> None:
    journals = SlowJournals()
    journals.gate.set()
    journals.fail_before = {"a"}
    async with make_async(journals) as publisher:
        await publisher.publish("a", {"n": 1})
        await publisher.publish("b", {"n": 2})
        with pytest.raises(Unavailable, match="a is away"):
            await publisher.flush()
        assert journals.values("b") == [2]
        journals.fail_before = set()
        await publisher.publish("a", {"n": 3})
    assert journals.values("a") == [1, 3]
    assert publisher.producer == PRODUCER


async def test_async_commit_stores_the_intents_first() -> None:
    journals = SlowJournals()
    journals.gate.set()
    publisher = make_async(journals)
    await publisher.add("a", {"n": 1})

    async def refuse(intents: Mapping[str, bytes]) -> None:
        assert journals.flags("a") == [CONTINUE]
        raise RuntimeError("store is down")

    with pytest.raises(RuntimeError):
        await publisher.commit(refuse)
    assert journals.flags("a") == [CONTINUE]
    journals.fail_before = {"a"}
    with pytest.raises(Unavailable):
        await publisher.rollback()
    journals.fail_before = set()
    await publisher.rollback()
    assert journals.flags("a") == [CONTINUE, ACK]


async def test_leaving_with_an_error_ends_appends_and_a_rollback_seals_them_off() -> None:
    journals = SlowJournals()
    publisher = make_async(journals, batch=1)

    async def fail() -> None:
        async with publisher:
            await publisher.add("a", {"n": 1})
            await journals.waiting.wait()
            raise KeyError("the application's own")

    with pytest.raises(KeyError):
        await fail()
    assert journals.active["a"] == 0
    journals.gate.set()
    await publisher.rollback()
    assert journals.flags("a") == [ACK, ACK]


async def test_a_rollback_follows_appends_in_progress() -> None:
    journals = SlowJournals()
    publisher = make_async(journals, batch=1)
    await publisher.add("a", {"n": 1})
    await journals.waiting.wait()
    rolling_back = asyncio.create_task(publisher.rollback())
    journals.gate.set()
    await rolling_back
    assert journals.flags("a") == [CONTINUE, ACK]


def test_a_publisher_chooses_the_journal_and_returns_the_uuid() -> None:
    journals = Journals()
    publisher = make_sync(journals)
    destination = by_key(lambda message: str(message["n"]).encode(), ModuloMapping(["a", "b"]))
    returned = [publisher.add(destination, {"n": n}) for n in range(8)]
    publisher.commit()
    returned.append(publisher.publish("a", {"n": 9}))
    publisher.flush()
    read = [
        envelope
        for name in ("a", "b")
        for envelope in iter_messages(LINES, name, [bytes(journals.content[name])], 0)
        if envelope.flags != Flags.ACK_TXN
    ]
    assert sorted(envelope.uuid for envelope in read) == sorted(returned)
    assert {envelope.journal for envelope in read} == {"a", "b"}
    assert all(envelope.journal == destination(envelope.message) for envelope in read if envelope.message["n"] != 9)


async def test_an_async_publisher_chooses_the_journal_and_returns_the_uuid() -> None:
    journals = SlowJournals()
    journals.gate.set()
    async with make_async(journals) as publisher:
        uuid = await publisher.publish(lambda message: f"j{message['n']}", {"n": 1})
        assert await publisher.add(lambda message: f"j{message['n']}", {"n": 2}) != uuid
    [envelope] = iter_messages(LINES, "j1", [bytes(journals.content["j1"])], 0)
    assert envelope.uuid == uuid


def test_threads_may_share_a_publisher() -> None:
    """Clocks increase in each journal, for any publishing thread."""
    journals = Journals()
    publisher = make_sync(journals, max_batch_bytes=300)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda n: publisher.publish(f"j{n % 2}", {"n": n}), range(400)))
    publisher.flush()
    numbers: list[int] = []
    for name in ("j0", "j1"):
        read = list(iter_messages(LINES, name, [bytes(journals.content[name])], 0))
        clocks = [envelope.clock for envelope in read]
        assert clocks == sorted(set(clocks))
        numbers += [envelope.message["n"] for envelope in read]
    assert sorted(numbers) == list(range(400))


def test_a_sync_publisher_bounds_pending_bytes_of_all_journals_together() -> None:
    journals = Journals()
    publisher: SyncPublisher[JsonObject] = SyncPublisher(
        journals.append, producer=PRODUCER, clock=make_clock(), framing=LINES, max_pending_bytes=10_000
    )
    names = [f"a/journal-{n:03}" for n in range(100)]
    sent = 0
    for n in range(30):
        for name in names:
            publisher.add(name, {"n": n, "filler": "x" * 100})
            sent += 1
            appended = sum(bytes(content).count(b"\n") for content in journals.content.values())
            assert (sent - appended) * 150 < 10_000 + 200
    publisher.commit()
    assert all(journals.values(name)[:30] == list(range(30)) for name in names)
    assert len(journals.appends) < sent, "messages of one journal are appended together"
