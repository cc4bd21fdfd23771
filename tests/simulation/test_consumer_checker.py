"""The checker of exactly-once semantics: a sound run passes, and each violation has its name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coranto.messages import Flags, JsonLines, ProducerId, format_uuid
from tests.simulation.consumers.checker import check, committed_of
from tests.simulation.consumers.history import (
    Acknowledgement,
    Book,
    Delivery,
    Entry,
    Fate,
    FinalShard,
    Owner,
    Record,
    Sent,
)

IN, OUT, SHARD = "in/0", "out/0", "sql-0"
ADA, BOB, CONSUMER = (ProducerId(bytes([1, 0, 0, 0, 0, n])) for n in (1, 2, 3))
CLOCK = 1 << 62


def line(producer: ProducerId, clock: int, flags: Flags, **message: object) -> bytes:
    uuid = format_uuid(producer, CLOCK + clock, flags)
    return JsonLines().acknowledgement(uuid) if flags == Flags.ACK_TXN else JsonLines().marshal(message, uuid)


def sent(id: str, producer: ProducerId, clock: int, flags: Flags) -> bytes:
    return line(producer, clock, flags, id=id, key="ant", amount=int(id[1:]))


def published(id: str, clock: int) -> bytes:
    return line(CONSUMER, clock, Flags.CONTINUE_TXN, shard=SHARD, of=id, key="ant", total=0)


def acknowledgement(clock: int) -> bytes:
    return line(CONSUMER, clock, Flags.ACK_TXN)


class Run:
    """A run of two producers and two owners.

    Ada commits m1 and m2 together. Bob publishes m3 alone, then m4, which he rolls back. The second owner takes over
    after the only transaction of the first.
    """

    def __init__(self) -> None:
        self.input = [
            sent("m1", ADA, 1, Flags.CONTINUE_TXN),
            sent("m3", BOB, 1, Flags.OUTSIDE_TXN),
            sent("m2", ADA, 2, Flags.CONTINUE_TXN),
            sent("m2", ADA, 2, Flags.CONTINUE_TXN),
            sent("m4", BOB, 2, Flags.CONTINUE_TXN),
            line(BOB, 1, Flags.ACK_TXN),
            line(ADA, 3, Flags.ACK_TXN),
        ]
        self.output = [published("m3", 1), acknowledgement(2), published("m1", 3), published("m2", 4)]
        self.output += [acknowledgement(2), published("m1", 3), published("m2", 4), acknowledgement(5)]
        self.entries = [
            Entry("m3", IN, BOB.hex(), CLOCK + 1, "ant", 3, "0.0"),
            Entry("m1", IN, ADA.hex(), CLOCK + 1, "ant", 1, "1.0"),
            Entry("m2", IN, ADA.hex(), CLOCK + 2, "ant", 2, "1.0"),
        ]
        self.sums = {"ant": [3, 6]}
        self.tokens = ["0.0", "1.0"]
        self.record = Record(
            sent={
                id: Sent(id, IN, producer.hex(), number, "ant", number, fate)
                for number, (id, producer, fate) in enumerate(
                    (
                        ("m1", ADA, Fate.COMMITTED),
                        ("m2", ADA, Fate.COMMITTED),
                        ("m3", BOB, Fate.COMMITTED),
                        ("m4", BOB, Fate.ROLLED_BACK),
                    )
                )
            },
            owners=[
                Owner(0, SHARD, "consumer-0.1", 1.0, 1.5, (), ["0.0"]),
                Owner(1, SHARD, "consumer-1.1", 2.0, 2.5, ("0.0",), ["1.0"]),
            ],
            deliveries=[Delivery(0, SHARD, "m3"), Delivery(1, SHARD, "m1"), Delivery(1, SHARD, "m2")],
            acknowledgements=[Acknowledgement("consumer-0.1", OUT, acknowledgement(2), 1.9, licensed=True)],
            intents={(OUT, acknowledgement(2)): None, (OUT, acknowledgement(5)): None},
        )

    def anomalies(self) -> list[str]:
        book = Book(self.sums, self.entries, self.tokens)
        inputs, outputs = {IN: b"".join(self.input)}, {OUT: b"".join(self.output)}
        return [each.name for each in check(self.record, inputs, outputs, [FinalShard(SHARD, (IN,), book)])]

    # -- Violations ----------------------------------------------------------------------------------------------------

    def takes_back_the_commit(self) -> None:
        self.record.sent["m3"].fate = Fate.ROLLED_BACK

    def loses_a_message(self) -> None:
        self.entries.pop()
        self.sums = {"ant": [2, 4]}

    def counts_twice(self) -> None:
        self.entries.append(self.entries[-1])
        self.sums = {"ant": [4, 8]}

    def delivers_rolled_back_messages(self) -> None:
        self.record.deliveries.append(Delivery(0, SHARD, "m4"))

    def swaps_messages(self) -> None:
        self.entries[1:] = self.entries[:0:-1]

    def miscounts(self) -> None:
        self.sums["ant"][1] += 1

    def forgets_a_commit(self) -> None:
        self.record.owners[0].confirmed.append("0.1")

    def commits_twice(self) -> None:
        self.tokens.append("1.0")

    def restores_another_state(self) -> None:
        self.record.owners[1].found = ("0.7",)

    def commits_as_a_zombie(self) -> None:
        self.tokens.append("0.1")

    def acknowledges_early(self) -> None:
        early = Acknowledgement("consumer-1.1", OUT, acknowledgement(5), 2.6, licensed=False)
        self.record.acknowledgements.append(early)

    def acknowledges_what_did_not_commit(self) -> None:
        del self.record.intents[OUT, acknowledgement(5)]

    def never_acknowledges(self) -> None:
        self.record.intents[OUT, acknowledgement(9)] = None

    def loses_an_output(self) -> None:
        self.output.pop()

    def publishes_twice(self) -> None:
        self.output += [published("m2", 6), acknowledgement(7)]

    def publishes_unknown_messages(self) -> None:
        self.output += [published("m4", 6), acknowledgement(7)]

    def publishes_in_another_order(self) -> None:
        self.output = [published("m3", 1), published("m2", 2), published("m1", 3), acknowledgement(5)]


def test_a_sound_run_has_no_anomalies() -> None:
    assert Run().anomalies() == []


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (Run.takes_back_the_commit, "wrong-fate"),
        (Run.loses_a_message, "lost-message"),
        (Run.counts_twice, "duplicate-delivery"),
        (Run.delivers_rolled_back_messages, "aborted-delivery"),
        (Run.swaps_messages, "out-of-order"),
        (Run.miscounts, "wrong-sum"),
        (Run.forgets_a_commit, "lost-commit"),
        (Run.commits_twice, "duplicate-commit"),
        (Run.restores_another_state, "diverged-restore"),
        (Run.commits_as_a_zombie, "zombie-commit"),
        (Run.acknowledges_early, "early-ack"),
        (Run.acknowledges_what_did_not_commit, "stray-ack"),
        (Run.never_acknowledges, "missing-ack"),
        (Run.loses_an_output, "lost-output"),
        (Run.publishes_twice, "duplicate-output"),
        (Run.publishes_unknown_messages, "output-of-nothing"),
        (Run.publishes_in_another_order, "output-out-of-order"),
    ],
)
def test_each_anomaly_is_found(wrong: Callable[[Run], None], name: str) -> None:
    run = Run()
    wrong(run)
    assert name in run.anomalies()


def test_a_concurrent_restore_does_not_count_as_a_later_one() -> None:
    run = Run()
    run.record.owners[1].opened = 1.2  # Before the restore of the other one. Only the store knows their order.
    run.tokens.append("0.1")
    assert "zombie-commit" not in run.anomalies()


def test_committed_messages_follow_the_rules() -> None:
    content = b"".join(Run().input)
    assert [each.message["id"] for each in committed_of(IN, content)] == ["m3", "m1", "m2"]
    late = content + sent("m4", BOB, 2, Flags.CONTINUE_TXN) + line(BOB, 2, Flags.ACK_TXN)
    assert [each.message["id"] for each in committed_of(IN, late)] == ["m3", "m1", "m2", "m4"]
    reset = content + line(BOB, 0, Flags.ACK_TXN) + sent("m5", BOB, 1, Flags.OUTSIDE_TXN)
    assert [each.message["id"] for each in committed_of(IN, reset)] == ["m3", "m1", "m2", "m5"]
