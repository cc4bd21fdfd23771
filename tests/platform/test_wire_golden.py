"""Messages byte for byte, on the wire and in etcd.

The vectors were computed by hand from the protobuf encoding and the field numbers, with one field per line. A key is
`field number << 3 | type`: type 0 is a varint, 1 eight bytes, 2 length-delimited, 5 four bytes.
"""

from __future__ import annotations

import hashlib

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from coranto.errors import InvalidInput
from coranto.fragments.fragment import ZERO_SUM, Codec, Fragment
from coranto.specs.validation import validate
from coranto.wire import protocol_pb2 as pb


def golden(*lines: str | bytes) -> bytes:
    """Return bytes from hexadecimal digits, and from literal text."""
    return b"".join(line if isinstance(line, bytes) else bytes.fromhex(line) for line in lines)


def part(key: str, *lines: str | bytes) -> bytes:
    """Return a length-delimited field: its key, its length (less than 128 here, so one byte), and its bytes."""
    value = golden(*lines)
    assert len(value) < 128
    return bytes.fromhex(key) + bytes([len(value)]) + value


def encoded(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


# name=1, value=2
LABEL = golden(part("0a", b"author"), part("12", b"16i"))
# labels=1
LABEL_SET = golden(part("0a", LABEL))
REGISTERS = pb.LabelSet(labels=[pb.Label(name="author", value="16i")])

# zone=1, suffix=2
MEMBER_A = golden(part("0a", b"a"), part("12", b"broker-1"))
MEMBER_B = golden(part("0a", b"b"), part("12", b"broker-2"))
ID_A = pb.ProcessSpec.ID(zone="a", suffix="broker-1")
ID_B = pb.ProcessSpec.ID(zone="b", suffix="broker-2")

# cluster_id=1 (above 2^63, as etcd's are), member_id=2, revision=3 (300), raft_term=4.
ETCD = golden("08 8f 80 80 80 80 80 80 80 80 01", "10 07", "18 ac 02", "20 02")
ETCD_VALUE = pb.Header.Etcd(cluster_id=(1 << 63) | 15, member_id=7, revision=300, raft_term=2)

# SHA-1 of "foobar" is 8843d7f92416211d e9ebb963ff4ce281 25932878. Its parts are read big-endian, and as
# fixed64, fixed64, fixed32 written little-endian.
SUM = golden("09 1d211624f9d74388", "11 81e24cff63b9ebe9", "1d 78289325")

FRAGMENT = golden(
    part("0a", b"a/journal"),
    "10 d2 85 d8 cc 04",  # begin=2: 1234567890
    "18 d8 85 d8 cc 04",  # end=3: 1234567896
    part("22", SUM),  # sum=4
    "28 02",  # compression_codec=5: GZIP
    part("32", b"s3://bkt/pre/"),  # backing_store=6
    "38 80 e2 cf aa 06",  # mod_time=7: 1700000000
    part("42", b"hour=01"),  # path_postfix=8
)
FRAGMENT_VALUE = Fragment(
    journal="a/journal",
    begin=1234567890,
    end=1234567896,
    sum=hashlib.sha1(b"foobar").digest(),
    codec=Codec.GZIP,
    backing_store="s3://bkt/pre/",
    mod_time=1700000000,
    path_postfix="hour=01",
)


class TestAppend:
    def test_the_first_message_has_parameters_and_no_content(self) -> None:
        request = pb.AppendRequest(journal="a/journal", do_not_proxy=True, offset=1234)
        request.check_registers.include.CopyFrom(REGISTERS)
        request.union_registers.CopyFrom(REGISTERS)
        request.suspend = pb.AppendRequest.SUSPEND_KEEP
        vector = golden(
            part("12", b"a/journal"),
            "18 01",  # do_not_proxy=3
            "28 d2 09",  # offset=5: 1234
            part("32", part("0a", LABEL_SET)),  # check_registers=6, include=1
            part("3a", LABEL_SET),  # union_registers=7
            "48 04",  # suspend=9
        )
        assert encoded(request) == vector
        validate(pb.AppendRequest.FromString(vector))

    def test_empty_messages_that_go_writes_are_equivalent_to_absent_ones(self) -> None:
        # Go's code writes an empty `exclude`, because the field is not a pointer there.
        request = pb.AppendRequest.FromString(
            golden(part("12", b"a/journal"), part("32", part("0a", LABEL_SET), "12 00"))
        )
        validate(request)
        assert request.check_registers.include == REGISTERS
        assert not request.check_registers.exclude.labels

    def test_present_registers_are_distinguished_although_empty(self) -> None:
        vector = golden(part("12", b"a/journal"), "3a 00")
        request = pb.AppendRequest.FromString(vector)
        assert request.HasField("union_registers")
        assert not request.HasField("subtract_registers")
        assert encoded(request) == vector

    def test_content_is_sent_without_other_fields(self) -> None:
        assert encoded(pb.AppendRequest(content=b"foobar")) == golden(part("22", b"foobar"))
        mixed = pb.AppendRequest.FromString(golden(part("12", b"a/journal"), part("22", b"foobar")))
        with pytest.raises(InvalidInput, match="content"):
            validate(mixed)

    def test_the_committing_message_is_empty(self) -> None:
        assert encoded(pb.AppendRequest()) == b""
        validate(pb.AppendRequest.FromString(b""))

    def test_a_response_states_that_the_journal_has_no_registers(self) -> None:
        response = pb.AppendResponse(commit=FRAGMENT_VALUE.to_wire())
        response.header.process_id.CopyFrom(ID_A)
        response.header.route.primary = -1
        response.header.etcd.CopyFrom(ETCD_VALUE)
        response.registers.SetInParent()
        header = golden(part("0a", MEMBER_A), part("12", "10 ffffffffffffffffff01"), part("1a", ETCD))
        assert encoded(response) == golden(part("12", header), part("1a", FRAGMENT), "22 00")
        validate(pb.AppendResponse.FromString(encoded(response)))
        absent = golden(part("12", header), part("1a", FRAGMENT))
        with pytest.raises(InvalidInput, match="registers"):
            validate(pb.AppendResponse.FromString(absent))


class TestFragment:
    def test_sums_are_encoded_as_three_integers(self) -> None:
        assert encoded(FRAGMENT_VALUE.to_wire()) == FRAGMENT
        assert Fragment.from_wire(pb.Fragment.FromString(FRAGMENT)) == FRAGMENT_VALUE

    @pytest.mark.parametrize("empty_sum", ["", "22 00"], ids=["absent", "present"])
    def test_an_empty_fragment_has_the_sum_zero(self, empty_sum: str) -> None:
        vector = golden(part("0a", b"a/journal"), "10 ac 02", "18 ac 02", empty_sum, "28 01")
        empty = Fragment.from_wire(pb.Fragment.FromString(vector))
        assert (empty.begin, empty.end, empty.sum, empty.codec) == (300, 300, ZERO_SUM, Codec.NONE)

    def test_a_fragment_without_a_codec_is_refused(self) -> None:
        without = golden(part("0a", b"a/journal"), "10 d2 85 d8 cc 04", "18 d8 85 d8 cc 04", part("22", SUM))
        with pytest.raises(InvalidInput, match="codec"):
            Fragment.from_wire(pb.Fragment.FromString(without))


class TestRoute:
    def test_no_primary_is_minus_one_in_ten_bytes(self) -> None:
        vector = golden("10 ff ff ff ff ff ff ff ff ff 01")
        assert encoded(pb.Route(primary=-1)) == vector
        assert pb.Route.FromString(vector).primary == -1
        validate(pb.Route.FromString(vector))

    def test_an_empty_route_is_invalid_because_it_names_a_primary(self) -> None:
        with pytest.raises(InvalidInput, match="primary"):
            validate(pb.Route.FromString(b""))

    def test_the_first_member_as_primary_needs_no_bytes(self) -> None:
        vector = golden(part("0a", MEMBER_A), part("0a", MEMBER_B), part("1a", b"http://a:8080"), "1a 00")
        route = pb.Route(members=[ID_A, ID_B], endpoints=["http://a:8080", ""])
        assert encoded(route) == vector
        validate(pb.Route.FromString(vector))


class TestReplicate:
    HEADER = golden(part("0a", MEMBER_B), part("12", part("0a", MEMBER_A), part("0a", MEMBER_B)), part("1a", ETCD))

    def test_the_first_message_proposes_and_requests_an_acknowledgement(self) -> None:
        request = pb.ReplicateRequest(
            proposal=FRAGMENT_VALUE.to_wire(), acknowledge=True, deprecated_journal="a/journal"
        )
        request.header.process_id.CopyFrom(ID_B)
        request.header.route.CopyFrom(pb.Route(members=[ID_A, ID_B]))
        request.header.etcd.CopyFrom(ETCD_VALUE)
        request.registers.SetInParent()
        vector = golden(
            part("0a", self.HEADER),  # header=1
            part("12", b"a/journal"),  # deprecated_journal=2
            part("1a", FRAGMENT),  # proposal=3
            "30 01",  # acknowledge=6
            "3a 00",  # registers=7
        )
        assert encoded(request) == vector
        validate(pb.ReplicateRequest.FromString(vector))

    def test_content_has_a_delta(self) -> None:
        first = golden(part("22", b"foobar"))
        assert encoded(pb.ReplicateRequest(content=b"foobar", content_delta=0)) == first
        second = golden(part("22", b"foobar"), "28 06")
        assert encoded(pb.ReplicateRequest(content=b"foobar", content_delta=6)) == second
        validate(pb.ReplicateRequest.FromString(first))
        validate(pb.ReplicateRequest.FromString(second))

    def test_only_the_first_acknowledgement_has_a_header(self) -> None:
        validate(pb.ReplicateResponse.FromString(b""))
        validate(pb.ReplicateResponse.FromString(golden(part("12", self.HEADER))))

    def test_a_mismatch_has_the_fragment_and_registers_of_the_replica(self) -> None:
        response = pb.ReplicateResponse(status=pb.PROPOSAL_MISMATCH, fragment=FRAGMENT_VALUE.to_wire())
        response.registers.SetInParent()
        vector = golden("08 08", part("1a", FRAGMENT), "22 00")
        assert encoded(response) == vector
        validate(pb.ReplicateResponse.FromString(vector))


class TestRead:
    def test_metadata_of_a_fragment_precedes_its_content(self) -> None:
        metadata = pb.ReadResponse(
            offset=1234567891,
            write_head=1234567896,
            fragment=FRAGMENT_VALUE.to_wire(),
            fragment_url="https://bkt/x",
        )
        vector = golden(
            "18 d3 85 d8 cc 04",  # offset=3
            "20 d8 85 d8 cc 04",  # write_head=4
            part("2a", FRAGMENT),  # fragment=5
            part("32", b"https://bkt/x"),  # fragment_url=6
        )
        assert encoded(metadata) == vector
        validate(pb.ReadResponse.FromString(vector))
        chunk = golden("18 d3 85 d8 cc 04", part("3a", b"oobar"))
        assert encoded(pb.ReadResponse(offset=1234567891, content=b"oobar")) == chunk
        validate(pb.ReadResponse.FromString(chunk))

    def test_a_read_from_the_write_head_has_offset_minus_one(self) -> None:
        request = pb.ReadRequest(journal="a/journal", offset=-1, block=True, metadata_only=True)
        vector = golden(part("12", b"a/journal"), "18 ffffffffffffffffff01", "20 01", "30 01")
        assert encoded(request) == vector
        validate(pb.ReadRequest.FromString(vector))


class TestListing:
    SPEC = golden(
        part("0a", b"a/journal"),
        "10 03",  # replication=2
        part("1a", LABEL_SET),  # labels=3
        part(
            "22",  # fragment=4
            "08 80 80 80 80 01",  # length=1: 256 MiB
            "10 02",  # compression_codec=2: GZIP
            part("1a", b"file:///x/"),  # stores=3
            part("22", "08 ac 02"),  # refresh_interval=4: 300 s
            part("32", "08 90 1c", "10 05"),  # flush_interval=6: 3600 s and 5 ns
        ),
        "30 04",  # flags=6: O_RDWR; there is no field 5
        "38 c0 84 3d",  # max_append_rate=7: 1000000
        part("42", "08 02", "10 ac 02"),  # suspend=8: level=1: FULL, offset=2: 300
    )

    def test_a_spec_has_the_form_of_etcd(self) -> None:
        spec = pb.JournalSpec(
            name="a/journal",
            replication=3,
            labels=REGISTERS,
            fragment=pb.JournalSpec.Fragment(
                length=1 << 28,
                compression_codec=pb.GZIP,
                stores=["file:///x/"],
                refresh_interval=Duration(seconds=300),
                flush_interval=Duration(seconds=3600, nanos=5),
            ),
            flags=pb.JournalSpec.O_RDWR,
            max_append_rate=1_000_000,
            suspend=pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.FULL, offset=300),
        )
        assert encoded(spec) == self.SPEC
        validate(pb.JournalSpec.FromString(self.SPEC))

    def test_zero_durations_that_go_writes_are_equivalent_to_absent_ones(self) -> None:
        fragment = golden("08 80 08", "10 01", part("22", "08 ac 02"), "2a 00", "32 00")
        vector = golden(part("0a", b"a/journal"), "10 01", "1a 00", part("22", fragment))
        spec = pb.JournalSpec.FromString(vector)
        validate(spec)
        assert not spec.fragment.flush_interval.ToNanoseconds()

    def test_a_snapshot_of_a_watch_ends_with_an_empty_message(self) -> None:
        assert encoded(pb.ListResponse()) == b""
        # Go's code writes an empty header into it.
        empty = pb.ListResponse.FromString(part("12", "0a 00", "12 00", "1a 00"))
        assert not empty.journals
        assert not empty.header.etcd.revision

    def test_a_change_expects_any_revision_with_minus_one(self) -> None:
        change = pb.ApplyRequest.Change(expect_mod_revision=-1, delete="a/journal")
        vector = golden("08 ffffffffffffffffff01", part("1a", b"a/journal"))
        assert encoded(change) == vector
        validate(pb.ApplyRequest.Change.FromString(vector))
