"""The commit log: records are read back, whatever happened to its end."""

from __future__ import annotations

import struct
import zlib

from hypothesis import given
from hypothesis import strategies as st

from coranto import labels
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.wire import protocol_pb2 as pb
from coranto_broker.spool import commit_log
from coranto_broker.spool.in_sync import UNSTAMPED, Stamp
from coranto_broker.spool.spool import CommittedState
from tests.broker.memory import grown

RECORDS = [
    CommittedState(Fragment("a/journal", 7, 7 + n, sum_of(b"x" * n), Codec.GZIP), labels.label_set(count=str(n)), 12.5)
    for n in range(5)
]
ENCODED = [commit_log.encode(42, record) for record in RECORDS]
LOG = b"".join(ENCODED)


def test_the_last_record_counts() -> None:
    found = commit_log.decode(LOG)
    assert (found.last, found.create_revision, found.valid_length) == (RECORDS[-1], 42, len(LOG))
    assert commit_log.decode(b"") == commit_log.LogContent(None, 0, 0)


def test_the_log_records_the_pipelines_that_a_spool_followed() -> None:
    log = LOG + commit_log.encode(42, RECORDS[0], Stamp(9, 7))
    assert commit_log.decode(LOG).stamp == UNSTAMPED
    assert commit_log.decode(log).stamp == Stamp(9, 7)


def test_logs_without_stamps_are_read() -> None:
    message = pb.ReplicateRequest(proposal=RECORDS[3].fragment.to_wire(), registers=RECORDS[3].registers)
    payload = struct.pack("<qd", 42, 12.5) + message.SerializeToString()
    old = struct.pack("<4sII", b"csp1", len(payload), zlib.crc32(payload)) + payload
    found = commit_log.decode(old + old)
    assert found == commit_log.LogContent(RECORDS[3], 42, 2 * len(old), UNSTAMPED, RECORDS[3].fragment.end)
    assert commit_log.decode(old + ENCODED[4]).last == RECORDS[4]


@given(st.integers(0, len(LOG)))
def test_a_log_cut_anywhere_ends_at_its_last_whole_record(cut: int) -> None:
    found = commit_log.decode(LOG[:cut])
    ends = [sum(map(len, ENCODED[: n + 1])) for n in range(len(ENCODED))]
    whole = [record for record, end in zip(RECORDS, ends, strict=True) if end <= cut]
    assert found.last == (whole[-1] if whole else None)
    assert found.valid_length == max([end for end in ends if end <= cut], default=0)


@given(st.integers(0, len(LOG) - 1), st.integers(1, 255))
def test_a_damaged_byte_ends_the_log_before_its_record(position: int, flip: int) -> None:
    damaged = bytearray(LOG)
    damaged[position] ^= flip
    found = commit_log.decode(bytes(damaged))
    assert found.valid_length <= position
    assert found.last in [None, *RECORDS]


@given(st.binary(max_size=200))
def test_garbage_is_not_a_record(data: bytes) -> None:
    assert commit_log.decode(data).last is None


def test_records_leak_no_memory() -> None:
    fragment = RECORDS[0].fragment
    names = [f"writer-{k:03}" for k in range(64)]
    records = [CommittedState(fragment, labels.label_set(dict.fromkeys(names, f"{n}" * 40)), 12.5) for n in range(2)]

    def encode() -> None:
        for number in range(4000):
            commit_log.encode(42, records[number % 2])

    assert grown(encode) < 8 << 20, "of 4,000 records of 4 KiB"
