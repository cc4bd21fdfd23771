"""Encoded responses: right, and without a trace in the encoder's memory of those before."""

from __future__ import annotations

import gc
from typing import Any

from coranto import labels
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.fast_path import CommittedAppend
from coranto_broker.handlers.append_answers import Answers
from coranto_broker.replication.resolver import Resolution
from tests.broker.memory import grown


def resolution(revision: int) -> Resolution:
    nothing: Any = None
    header = pb.Header(process_id=pb.ProcessSpec.ID(zone="a", suffix="b"), etcd=pb.Header.Etcd(revision=revision))
    return Resolution(pb.OK, nothing, header.process_id, header, nothing, (), nothing, nothing)


def committed(found: Resolution, number: int, registers: pb.LabelSet) -> CommittedAppend:
    fragment = Fragment("a/journal", 7, 20 + number, sum_of(b"all"), Codec.GZIP)
    return CommittedAppend(found, fragment, 10, sum_of(b"x" * number), registers, 3)


def test_a_response_names_the_committed_range() -> None:
    answers = Answers()
    for number in range(3):
        found, registers = resolution(number), labels.label_set(count=str(number))
        response = pb.AppendResponse.FromString(answers.encode(committed(found, number, registers)))
        assert response.header == found.header
        assert response.registers == registers
        assert (response.commit.journal, response.commit.begin, response.commit.end) == ("a/journal", 10, 20 + number)
        assert response.commit.compression_codec == pb.GZIP
        assert Fragment.from_wire(response.commit).sum == sum_of(b"x" * number)
        assert (response.status, response.total_chunks, response.delayed_chunks) == (pb.OK, 3, 0)


def test_a_header_is_forgotten_with_its_resolution() -> None:
    answers = Answers()
    first, second = resolution(1), resolution(2)
    answers.encode(committed(first, 1, pb.LabelSet()))
    answers.encode(committed(second, 1, pb.LabelSet()))
    del first
    gc.collect()
    assert len(answers._headers) == 1, "that of the second is the journal's now"
    del second
    gc.collect()
    assert answers._headers == {}


def test_responses_leave_no_memory_behind() -> None:
    answers, found = Answers(), resolution(1)
    registers = [labels.label_set({f"writer-{n}-{k:03}": "x" * 40 for k in range(64)}) for n in range(2)]

    def answer() -> None:
        for number in range(4000):
            answers.encode(committed(found, number, registers[number % 2]))

    assert grown(answer) < 8 << 20, "of 4,000 responses of 4 KiB"
