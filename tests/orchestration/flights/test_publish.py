from __future__ import annotations

import random
from collections import Counter

import pandas as pd
import pytest

from coranto.client import SyncJournalClient
from coranto.errors import InvalidInput, RegisterMismatch
from coranto.labels import label_set
from coranto.messages import Flags, JsonLines, iter_messages
from coranto.messages.sequencer import Sequencer, read_committed
from coranto.testing.fake_broker import Break, CallPoint, FakeBroker
from coranto_flights import publish
from coranto_flights.data import IDENTITY, Flight, iter_flights, load_flights
from coranto_flights.publish import FlightsPublisher, FlightsSource, JournalProgress
from dagster_coranto import JournalResource

JOURNALS = [f"flights/events/part-{index:03}" for index in range(4)]


@pytest.fixture(scope="module")
def flights() -> pd.DataFrame:
    return load_flights(1000)


@pytest.fixture
def client(broker: FakeBroker, journals: JournalResource) -> SyncJournalClient:
    for name in JOURNALS:
        broker.create(name)
    return journals.client()


def publisher(client: SyncJournalClient) -> FlightsPublisher:
    return FlightsPublisher(client, JOURNALS, transaction_rows=150, altered=40, rng=random.Random(1))


def committed(broker: FakeBroker) -> list[Flight]:
    """Return the committed messages of all journals."""
    found: list[Flight] = []
    for name in JOURNALS:
        envelopes = iter_messages(JsonLines(), name, [broker.journals[name].content], 0)
        for envelope in read_committed(envelopes, Sequencer(ring_size=1 << 20), lambda _: []):
            message = dict(envelope.message)
            message.pop("_meta")
            found.append(message)
    return found


def keys(flights: list[Flight]) -> Counter[tuple[object, ...]]:
    return Counter(tuple(flight[column] for column in (*IDENTITY, "arr_delay", "tailnum")) for flight in flights)


def raw_count(broker: FakeBroker, flag: Flags) -> int:
    return sum(
        envelope.flags == flag
        for name in JOURNALS
        for envelope in iter_messages(JsonLines(), name, [broker.journals[name].content], 0)
    )


def test_readers_see_each_flight_once_despite_repeated_batches_and_a_rollback(
    broker: FakeBroker, client: SyncJournalClient, flights: pd.DataFrame
) -> None:
    report = publisher(client).publish(flights)
    assert (report.flights, report.transactions, report.rolled_back) == (1000, 7, 40)
    assert report.repeated_batches >= 1
    assert keys(committed(broker)) == keys(list(iter_flights(flights)))
    assert raw_count(broker, Flags.CONTINUE_TXN) > 1040


def test_a_tail_number_stays_in_one_journal(
    broker: FakeBroker, client: SyncJournalClient, flights: pd.DataFrame
) -> None:
    publisher(client).publish(flights)
    journals_of: dict[object, set[str]] = {}
    for name in JOURNALS:
        for envelope in iter_messages(JsonLines(), name, [broker.journals[name].content], 0):
            if tail := envelope.message.get("tailnum"):
                journals_of.setdefault(tail, set()).add(name)
    assert all(len(found) == 1 for found in journals_of.values())
    assert {name for found in journals_of.values() for name in found} == set(JOURNALS)


def test_publishing_again_adds_nothing_and_a_larger_slice_adds_the_rest(
    broker: FakeBroker, client: SyncJournalClient, flights: pd.DataFrame
) -> None:
    publisher(client).publish(flights.head(600))
    heads = {name: broker.journals[name].head for name in JOURNALS}
    assert publisher(client).publish(flights.head(600)).flights == 0
    assert {name: broker.journals[name].head for name in JOURNALS} == heads
    assert publisher(client).publish(flights).flights == 400
    assert keys(committed(broker)) == keys(list(iter_flights(flights)))


class Crash(Exception):
    """The simulated death of the publishing process."""


@pytest.mark.parametrize("survives", [*range(0, 24, 2), 25, 31])
def test_a_second_run_completes_the_publication_after_any_crash(
    broker: FakeBroker,
    client: SyncJournalClient,
    flights: pd.DataFrame,
    monkeypatch: pytest.MonkeyPatch,
    survives: int,
) -> None:
    """The first publisher dies after `survives` appends, which remain."""
    real, left = SyncJournalClient.append, survives + len(JOURNALS)

    def append(self: SyncJournalClient, journal: str, *args: object, **options: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise Crash
        return real(self, journal, *args, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(SyncJournalClient, "append", append)
        try:
            publisher(client).publish(flights)
        except Crash:
            crashed = True
        else:
            crashed = False
    assert crashed is (survives < 28)
    publisher(client).publish(flights)
    assert keys(committed(broker)) == keys(list(iter_flights(flights)))


def test_an_acknowledgement_with_a_lost_answer_counts_once(
    broker: FakeBroker, client: SyncJournalClient, flights: pd.DataFrame
) -> None:
    # After the four barriers: cut connections after applied appends, including acknowledgements.
    broker.at(CallPoint.APPEND_APPLIED, *[None] * 4, *[Break.CUT, None, None] * 8)
    report = publisher(client).publish(flights)
    assert report.flights == 1000
    assert keys(committed(broker)) == keys(list(iter_flights(flights)))


def test_only_one_of_two_concurrent_publishers_succeeds(
    broker: FakeBroker, client: SyncJournalClient, flights: pd.DataFrame
) -> None:
    publisher(client).publish(flights.head(300))
    slow = publisher(client)
    progress = {name: JournalProgress.of(broker.journals[name].registers) for name in JOURNALS}
    publisher(client).publish(flights.head(600))
    stale = iter(progress.values())
    original = JournalProgress.of
    with pytest.MonkeyPatch.context() as patched:
        # The slow publisher read its progress before the other one published.
        patched.setattr(publish.JournalProgress, "of", lambda registers: next(stale, None) or original(registers))
        with pytest.raises(RegisterMismatch):
            slow.publish(flights)
    publisher(client).publish(flights)
    assert keys(committed(broker)) == keys(list(iter_flights(flights)))


def test_journals_with_other_data_are_refused(
    broker: FakeBroker, client: SyncJournalClient, flights: pd.DataFrame
) -> None:
    broker.journals[JOURNALS[2]].registers = label_set({publish.SOURCE: "other.0123456789ab.5", publish.ROWS: "10"})
    with pytest.raises(InvalidInput, match="already hold flights of another file, publisher or number of journals"):
        publisher(client).publish(flights)


def test_another_number_of_journals_is_refused(
    broker: FakeBroker, client: SyncJournalClient, flights: pd.DataFrame
) -> None:
    publisher(client).publish(flights.head(300))
    with pytest.raises(InvalidInput, match="already hold flights"):
        FlightsPublisher(client, JOURNALS[:3]).publish(flights)


def test_a_source_can_be_formatted_and_parsed() -> None:
    source = FlightsSource.fresh("0123456789abcdef")
    assert FlightsSource.parse(str(source)) == source
    with pytest.raises(InvalidInput, match="is not digest"):
        FlightsSource.parse("nonsense")
