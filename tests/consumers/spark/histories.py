"""Journals in memory with histories of producers, and their committed messages by a plain reader."""

from hypothesis import strategies as st

from coranto.messages.framing import iter_messages
from coranto.messages.sequencer import Sequencer
from coranto.messages.sequencer import read_committed as read_message_by_message
from coranto.messages.uuids import Flags, ProducerId, clock_from_ns, format_uuid
from tests.consumers.spark.folding import FRAMING, NOW

PRODUCERS = [ProducerId(bytes([1, 0, 0, 0, 0, n])) for n in range(3)]


@st.composite
def histories(draw) -> bytes:
    """A journal of a few producers: transactions, single messages, duplicates, rollbacks, resets and bare lines."""
    rng = draw(st.randoms(use_true_random=False))
    # One clock is centuries slow, one is correct, and one is years fast.
    clocks = dict(zip(PRODUCERS, (1000, clock_from_ns(NOW * 10**9), clock_from_ns(2 * NOW * 10**9)), strict=True))
    lines: list[bytes] = []
    for n in range(draw(st.integers(0, 40))):
        producer = rng.choice(PRODUCERS)
        kind = rng.choices(["continue", "ack", "outside", "again", "rollback", "none", "past"], [8, 4, 3, 4, 1, 1, 1])[
            0
        ]
        if kind == "again" and lines:
            begin = rng.randrange(len(lines))
            lines += lines[begin : begin + rng.randint(1, 4)]
            continue
        if kind == "none":
            lines.append(b'{"n":%d}\n' % n)
            continue
        clocks[producer] += rng.choice([1, 160])
        clock = clocks[producer]
        flags = {"ack": Flags.ACK_TXN, "rollback": Flags.ACK_TXN, "outside": Flags.OUTSIDE_TXN}.get(
            kind, Flags.CONTINUE_TXN
        )
        if kind in ("rollback", "past"):
            clock = max(1, clock - rng.choice([1, 160, 500]))
        uuid = format_uuid(producer, clock, flags)
        body = {"n": n, "pad": "x" * rng.randint(0, 30)}
        lines.append(FRAMING.acknowledgement(uuid) if flags is Flags.ACK_TXN else FRAMING.marshal(body, uuid))
    return b"".join(lines)


def expected(journal: str, content: bytes) -> list[int]:
    """Return offsets of committed content, read message by message, in order of delivery."""

    def replay(wanted):
        return iter_messages(FRAMING, journal, [content[wanted.begin : wanted.end]], wanted.begin)

    envelopes = iter_messages(FRAMING, journal, [content], 0)
    sequencer = Sequencer()
    return [envelope.begin for envelope in read_message_by_message(envelopes, sequencer, replay)]
