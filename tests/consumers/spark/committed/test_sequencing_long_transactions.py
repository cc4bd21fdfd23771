"""A transaction that was open over much content is delivered in bounded parts, in commit order."""

from coranto.messages.checkpoints import Checkpoint, Source
from coranto.messages.uuids import Flags, format_uuid
from coranto_consumers.spark.committed.sequencing import LongTransactions
from tests.consumers.spark.folding import FRAMING, Memory, transaction
from tests.consumers.spark.histories import PRODUCERS, expected

LONG, SHORT, LOST = PRODUCERS
BOUND = 2_000


def line(producer, clock: int, flags: Flags = Flags.CONTINUE_TXN) -> bytes:
    uuid = format_uuid(producer, clock, flags)
    return FRAMING.acknowledgement(uuid) if flags is Flags.ACK_TXN else FRAMING.marshal({"n": clock}, uuid)


def history(end: list[bytes]) -> bytes:
    """Return content with a long and an open transaction among short ones, and the content that ends the long one."""
    lines = []
    for n in range(100, 200):
        lines += [line(LONG, n), line(SHORT, n, Flags.OUTSIDE_TXN)]
        lines += [line(LONG, n - 1)] if n % 7 == 0 else []  # A repeated append.
        lines += [line(LOST, n)] if n % 10 == 0 else []
    return b"".join([*lines, *end])


def delivered(content: bytes, *, restores: bool = False) -> list[list[int]]:
    """Return the offsets that each transaction delivers, in order."""
    memory = Memory({"j": content}, 500)
    sources, long, found = {"j": Source()}, LongTransactions(), []
    while sources["j"].read_through < len(content):
        sources, now = transaction(memory, sources, {"j": len(content)}, BOUND, 3, long)
        found.append([offset for _, offset in now])
        if restores:
            sources, long = dict(Checkpoint.from_bytes(Checkpoint(sources).to_bytes()).sources), LongTransactions()
    return found


END = [
    line(SHORT, 300, Flags.OUTSIDE_TXN),
    line(LONG, 400, Flags.ACK_TXN),
    line(LONG, 401, Flags.OUTSIDE_TXN),
    line(SHORT, 402, Flags.OUTSIDE_TXN),
]


def test_each_message_is_delivered_once_in_commit_order():
    content = history(END)
    for restores in (False, True):
        found = delivered(content, restores=restores)

        flat = [offset for each in found for offset in each]
        assert sorted(flat) == sorted(expected("j", content))
        assert max(map(len, found)) < 2 * BOUND // 70
        of_long = [
            n
            for n, each in enumerate(found)
            if any(content.startswith(line(LONG, 100 + i), at) for at in each for i in range(100))
        ]
        assert len(of_long) > 5, "it is delivered in parts"
        # Messages committed before the long transaction are delivered before it, later ones after it.
        last_before, behind = content.index(END[0]), content.index(END[2])
        assert last_before in [offset for each in found[: of_long[0]] for offset in each]
        assert set(found[-1]) >= {behind, content.index(END[3])}


def test_rolled_back_messages_are_not_delivered():
    rolled_back = [line(LONG, 99, Flags.ACK_TXN), line(SHORT, 300, Flags.OUTSIDE_TXN)]
    content = history(rolled_back)
    flat = [offset for each in delivered(content) for offset in each]
    assert sorted(flat) == sorted(expected("j", content))
    assert len(flat) == 101


def test_an_acknowledgement_of_the_first_half_delivers_only_that_half():
    content = history([line(LONG, 150, Flags.ACK_TXN), line(SHORT, 300, Flags.OUTSIDE_TXN)])
    for restores in (False, True):
        flat = [offset for each in delivered(content, restores=restores) for offset in each]
        assert sorted(flat) == sorted(expected("j", content))
        assert len(flat) == 101 + 51


def test_two_long_transactions_are_delivered_one_after_the_other():
    ends = [line(LOST, 400, Flags.ACK_TXN), line(SHORT, 300, Flags.OUTSIDE_TXN), line(LONG, 400, Flags.ACK_TXN)]
    content = history(ends)
    flat = [offset for each in delivered(content) for offset in each]
    assert sorted(flat) == sorted(expected("j", content))
    firsts = [flat.index(content.index(each)) for each in (line(LOST, 100), ends[1], line(LONG, 100))]
    assert firsts == sorted(firsts)
