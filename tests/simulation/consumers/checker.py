"""Checks of stores and output journals against the promises of exactly-once semantics.

`check` takes the record of a run, the content of its journals, and the books of its shards. Names of anomalies:

=========================  =========================================================================================
wrong-fate                 readers of an input see other messages than its producer committed
lost-message        (I8)   a committed message is missing in a store
duplicate-delivery  (I8)   a message counts twice in a store
aborted-delivery    (I8)   a message that was rolled back, or never committed, was delivered to the application
out-of-order        (I8)   messages of one producer of a journal count in another order than it sent them
wrong-sum           (I9)   sums differ from the sums of the messages in the store
lost-commit         (I9)   a commit that the store confirmed is not in its final state
duplicate-commit    (I9)   a transaction was committed twice
diverged-restore    (I9)   an owner restored a state that is not a prefix of the final state
zombie-commit       (I9)   an owner committed after a later one had restored
early-ack           (I10)  an acknowledgement was written before its transaction was known to be committed
stray-ack           (I10)  an output has an acknowledgement of no committed transaction
missing-ack         (I10)  an output lacks an acknowledgement of a committed transaction
lost-output                a message in a store has no committed message in the output
duplicate-output           a message in a store has several committed messages in the output
output-of-nothing          an output has a committed message for a message that is not in the store
output-out-of-order        outputs of a shard are in another order than its messages
sequencer-disagrees        the runtime's sequencer reads other messages than this module
fold-disagrees             Spark's tasks, which fold many ranges of a journal, read other messages than this module
=========================  =========================================================================================

Committed messages are computed here by an independent implementation of the rules of `coranto.messages.sequencer`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from coranto.messages import Envelope, Flags, JsonLines, Sequencer, iter_messages, read_committed
from coranto.messages.checkpoints import Source
from coranto_consumers.journals.ranges import Range, split
from coranto_consumers.spark.committed.joint_reading import CommittedReader
from tests.consumers.spark.folding import Memory, transaction
from tests.simulation.kit.checker import Anomaly

from .application import output_of
from .history import Fate, FinalShard, Owner, Record

Message = Envelope[Any]

_CHUNK_BYTES = 1000
_RANGES = (2, 7)
_TRANSACTIONS = 5
_SLICES = 4
_LONGEST_LINE = 1000


def check(
    record: Record, inputs: Mapping[str, bytes], outputs: Mapping[str, bytes], shards: Sequence[FinalShard]
) -> list[Anomaly]:
    """Return all anomalies. Every producer must be done, and every shard must have read all committed messages."""
    found: list[Anomaly] = []
    committed: dict[str, list[Message]] = {}
    for journal, content in inputs.items():
        committed[journal] = committed_of(journal, content)
        found += _check_fates(record, journal, committed[journal])
        found += _check_sequencer(journal, content, committed[journal])
        found += _check_folds(journal, content, committed[journal])
    for shard in shards:
        found += _check_deliveries(record, shard, committed)
        found += _check_sums(shard)
        found += _check_ownership(record, shard)
    published = {journal: committed_of(journal, content) for journal, content in outputs.items()}
    for journal, content in outputs.items():
        found += _check_sequencer(journal, content, published[journal])
        found += _check_folds(journal, content, published[journal])
    for shard in shards:
        found += _check_outputs(shard, published)
    found += _check_acknowledgements(record, outputs)
    return found


def committed_of(journal: str, content: bytes) -> list[Message]:
    """Return the committed messages of a journal, in commit order."""
    decided: dict[bytes, int] = {}
    pending: dict[bytes, list[Message]] = {}
    found: list[Message] = []
    for message in _messages(journal, content):
        clock, mine = message.clock, pending.setdefault(message.producer, [])
        last = decided.setdefault(message.producer, clock - 1)
        if message.flags == Flags.CONTINUE_TXN:
            if clock > max([last, *(each.clock for each in mine)]):
                mine.append(message)
            continue
        if message.flags == Flags.ACK_TXN:
            if clock > last:
                found += [each for each in mine if each.clock <= clock]
            decided[message.producer] = clock
        elif clock > last:
            found.append(message)
            decided[message.producer] = clock
        else:
            continue
        mine.clear()
    return found


def _messages(journal: str, content: bytes) -> Iterator[Message]:
    return iter_messages(JsonLines(), journal, [content], 0)


def _check_fates(record: Record, journal: str, committed: Sequence[Message]) -> Iterable[Anomaly]:
    """Check that producers and readers agree on the committed messages."""
    seen = Counter(message.message["id"] for message in committed)
    for sent in record.sent.values():
        if sent.journal == journal and (seen[sent.id] == 1) != (sent.fate is Fate.COMMITTED):
            detail = f"{sent.id} of {sent.producer} was {sent.fate.value}, and readers see it {seen[sent.id]} times"
            yield Anomaly("wrong-fate", journal, detail)


def _check_sequencer(journal: str, content: bytes, expected: Sequence[Message]) -> Iterable[Anomaly]:
    def again(wanted: Any) -> Iterator[Message]:
        return iter_messages(JsonLines(), journal, [content[wanted.begin : wanted.end]], wanted.begin)

    found = list(read_committed(_messages(journal, content), Sequencer(ring_size=8), again))
    if [each.content for each in found] != [each.content for each in expected]:
        yield Anomaly("sequencer-disagrees", journal, f"it reads {len(found)} messages, not {len(expected)}")


def _check_folds(journal: str, content: bytes, expected: Sequence[Message]) -> Iterable[Anomaly]:
    """Check ranges cut at arbitrary offsets: for a source that reads all, and for a consumer's transactions."""
    wanted = sorted(each.begin for each in expected)
    memory = Memory({journal: content}, _CHUNK_BYTES)
    for ranges in _RANGES:
        parts = split(Range(journal, 0, len(content), len(content)), max(1, len(content) // ranges))
        reader = CommittedReader(memory, parts, JsonLines())
        found = [offset for n in range(len(parts)) for lines in reader.read(n) for offset in lines.begins.tolist()]
        if found != wanted:
            yield Anomaly("fold-disagrees", journal, f"{ranges} ranges hold {len(found)} messages, not {len(wanted)}")
    sources, delivered = {journal: Source()}, []
    while sources[journal].read_through < len(content):
        before = sources[journal].read_through
        max_bytes = len(content) // _TRANSACTIONS + _LONGEST_LINE
        sources, offsets = transaction(memory, sources, {journal: len(content)}, max_bytes, _SLICES)
        delivered += [offset for _, offset in offsets]
        if sources[journal].read_through == before:
            yield Anomaly("fold-disagrees", journal, f"a transaction at {before} reads nothing")
            return
    if sorted(delivered) != wanted:
        yield Anomaly("fold-disagrees", journal, f"transactions deliver {len(delivered)} messages, not {len(wanted)}")


def _check_deliveries(record: Record, shard: FinalShard, committed: Mapping[str, Sequence[Message]]) -> list[Anomaly]:
    found: list[Anomaly] = []
    expected = [message.message["id"] for journal in shard.sources for message in committed[journal]]
    counts = Counter(entry.id for entry in shard.book.entries)
    lost = [id for id in expected if not counts[id]]
    if lost:
        found.append(Anomaly("lost-message", shard.name, f"{_few(lost)} of {len(expected)}"))
    twice = [f"{id} ({count} times)" for id, count in counts.items() if count > 1]
    if twice:
        found.append(Anomaly("duplicate-delivery", shard.name, _few(twice)))
    known = set(expected)
    aborted = {each.id for each in record.deliveries if each.shard == shard.name and each.id not in known}
    if aborted:
        fates = [f"{id} ({record.sent[id].fate.value})" if id in record.sent else id for id in sorted(aborted)]
        found.append(Anomaly("aborted-delivery", shard.name, _few(fates)))
    last: dict[tuple[str, str], int] = {}
    for entry in shard.book.entries:
        producer = entry.journal, entry.producer
        if entry.clock <= last.get(producer, -1) and counts[entry.id] == 1:
            found.append(Anomaly("out-of-order", shard.name, f"{entry.id} in {entry.token}"))
        last[producer] = entry.clock
    return found


def _check_sums(shard: FinalShard) -> Iterable[Anomaly]:
    sums: dict[str, list[int]] = {}
    for entry in shard.book.entries:
        count = sums.setdefault(entry.key, [0, 0])
        count[0] += 1
        count[1] += entry.amount
    if sums != shard.book.sums:
        yield Anomaly("wrong-sum", shard.name, f"{shard.book.sums} instead of {sums}")


def _check_ownership(record: Record, shard: FinalShard) -> Iterable[Anomaly]:
    tokens = shard.book.tokens
    owners = [owner for owner in record.owners if owner.shard == shard.name]
    for token, count in Counter(tokens).items():
        if count > 1:
            yield Anomaly("duplicate-commit", shard.name, f"{token} is in the store {count} times")
    for owner in owners:
        lost = [token for token in owner.confirmed if token not in tokens]
        if lost:
            yield Anomaly("lost-commit", shard.name, f"{_few(lost)} by {owner.process}")
        if list(owner.found) != tokens[: len(owner.found)]:
            yield Anomaly("diverged-restore", shard.name, f"{owner.process} found {_few(owner.found[-3:])}")
    by_number = {owner.number: owner for owner in owners}
    for index, token in enumerate(tokens):
        owner = by_number[int(token.partition(".")[0])]
        later = next((each for each in owners if _took_over(each, owner) and len(each.found) <= index), None)
        if later is not None:
            yield Anomaly(
                "zombie-commit",
                shard.name,
                f"{token} by {owner.process}, after {later.process} restored at {later.restored:.3f}",
            )


def _took_over(later: Owner, earlier: Owner) -> bool:
    """Return True if one owner restored its checkpoint after another one had."""
    return earlier.restored < later.opened and later.restored < float("inf")


def _check_outputs(shard: FinalShard, published: Mapping[str, Sequence[Message]]) -> Iterable[Anomaly]:
    journals = list(published)
    for journal, messages in published.items():
        seen = [each.message["of"] for each in messages if each.message["shard"] == shard.name]
        expected = [entry.id for entry in shard.book.entries if output_of(entry.key, journals) == journal]
        counts = Counter(seen)
        known = set(expected)
        if lost := [id for id in expected if not counts[id]]:
            yield Anomaly("lost-output", journal, f"{_few(lost)} of {len(expected)} of {shard.name}")
        if twice := [id for id, count in counts.items() if count > 1]:
            yield Anomaly("duplicate-output", journal, f"{_few(twice)} of {shard.name}")
        if strays := [id for id in seen if id not in known]:
            yield Anomaly("output-of-nothing", journal, f"{_few(strays)} of {shard.name}")
        if seen != expected and sorted(seen) == sorted(expected):
            yield Anomaly("output-out-of-order", journal, f"of {shard.name}")


def _check_acknowledgements(record: Record, outputs: Mapping[str, bytes]) -> Iterable[Anomaly]:
    for each in record.acknowledgements:
        if not each.licensed:
            yield Anomaly("early-ack", each.journal, f"by {each.process} at {each.at:.3f}: {each.content!r}")
    for journal, content in outputs.items():
        written = {each.content + b"\n" for each in _messages(journal, content) if each.flags == Flags.ACK_TXN}
        intents = {intent for name, intent in record.intents if name == journal}
        if strays := written - intents:
            yield Anomaly("stray-ack", journal, f"{_few(sorted(map(repr, strays)))}")
        if missing := intents - written:
            yield Anomaly("missing-ack", journal, f"{_few(sorted(map(repr, missing)))}")


def _few(values: Sequence[str]) -> str:
    more = f" and {len(values) - 6} more" if len(values) > 6 else ""
    return ", ".join(values[:6]) + more
