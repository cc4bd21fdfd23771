"""Encoded responses to appends: correct, and without memory of earlier ones."""

from __future__ import annotations

from typing import Any

from coranto import labels
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.specs.durability import Durability
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.queue import ALONE
from coranto_broker.append.queued_append import AppendOutcome
from coranto_broker.replication.resolver import Resolution
from tests.broker.memory import grown


def resolution(revision: int) -> Resolution:
    nothing: Any = None
    header = pb.Header(process_id=pb.ProcessSpec.ID(zone="a", suffix="b"), etcd=pb.Header.Etcd(revision=revision))
    return Resolution(pb.OK, nothing, header.process_id, header, nothing, (), nothing, nothing)


def committed(found: Resolution, number: int, registers: pb.LabelSet) -> AppendOutcome:
    fragment = Fragment("a/journal", 7, 20 + number, sum_of(b"all"), Codec.GZIP)
    digest = sum_of(b"x" * number)
    return AppendOutcome(found, pb.OK, registers, fragment, 10, fragment.end, digest, 3, 0, ALONE)


def test_a_response_names_the_committed_range() -> None:
    for number in range(3):
        found, registers = resolution(number), labels.label_set(count=str(number))
        response = pb.AppendResponse.FromString(committed(found, number, registers).encode())
        assert response.header == found.header
        assert response.registers == registers
        assert (response.commit.journal, response.commit.begin, response.commit.end) == ("a/journal", 10, 20 + number)
        assert response.commit.compression_codec == pb.GZIP
        assert Fragment.from_wire(response.commit).sum == sum_of(b"x" * number)
        assert (response.status, response.total_chunks, response.delayed_chunks) == (pb.OK, 3, 0)


def test_responses_leak_no_memory() -> None:
    found = resolution(1)
    registers = [labels.label_set({f"writer-{n}-{k:03}": "x" * 40 for k in range(64)}) for n in range(2)]

    def answer() -> None:
        for number in range(4000):
            committed(found, number, registers[number % 2]).encode()

    assert grown(answer) < 8 << 20, "of 4,000 responses of 4 KiB"


def test_a_response_says_why_an_append_is_refused() -> None:
    found, registers = resolution(1), labels.label_set(author="me")
    for status, shown in ((pb.REGISTER_MISMATCH, registers), (pb.NOT_ALLOWED, pb.LabelSet())):
        outcome = AppendOutcome(found, status, registers, reason="torn")
        response = pb.AppendResponse.FromString(outcome.encode())
        assert (response.status, response.header) == (status, found.header)
        assert (response.registers, response.store_health_error) == (shown, "torn")
        assert not response.HasField("commit")


def test_a_response_reports_durability_and_delay() -> None:
    found = resolution(1)
    outcome = committed(found, 0, pb.LabelSet())._replace(
        durability=Durability(3, 2, 2, 1), stored_end=7, delayed_chunks=2
    )
    response = pb.AppendResponse.FromString(outcome.encode())
    assert response.durability == pb.Durability(replicas=3, zones=2, synced_replicas=2, synced_zones=1, stored_end=7)
    assert response.delayed_chunks == 2
