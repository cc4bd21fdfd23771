"""Validation of every message: good ones pass, and errors name the path of the wrong field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from coranto.errors import InvalidInput
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.labels import label_selector, label_set
from coranto.specs.validation import (
    effective_replication,
    may_read,
    may_write,
    routes_equivalent,
    validate,
    validate_broker_spec,
    validate_endpoint,
    validate_header,
    validate_journal_spec,
    validate_route,
)
from coranto.wire import protocol_pb2 as pb

# ------------------------------------------------------------------------------------------------------ good messages


def fragment() -> pb.Fragment:
    return Fragment("a/journal", 100, 105, sum_of(b"hello"), Codec.GZIP).to_wire()


def spec() -> pb.JournalSpec:
    return pb.JournalSpec(
        name="a/journal",
        replication=3,
        labels=label_set({"content-type": "application/x-ndjson", "region": "eu"}),
        fragment=pb.JournalSpec.Fragment(
            length=1 << 20,
            compression_codec=pb.GZIP,
            stores=["file:///fragments/", "s3://bucket/?region=eu-west-1"],
            refresh_interval=Duration(seconds=300),
            retention=Duration(seconds=-1),
            flush_interval=Duration(seconds=60),
            path_postfix_template='date={{ .Spool.FirstAppendTime.Format "2006-01-02" }}',
        ),
        flags=pb.JournalSpec.O_RDWR,
        max_append_rate=1000,
        suspend=pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.PARTIAL, offset=5),
    )


def route() -> pb.Route:
    return pb.Route(
        members=[
            pb.ProcessSpec.ID(zone="a", suffix="broker-1"),
            pb.ProcessSpec.ID(zone="b", suffix="broker-0"),
            pb.ProcessSpec.ID(zone="b", suffix="broker-1"),
        ],
        primary=1,
        endpoints=["http://host:80", "", "unix://host/path"],
    )


def header() -> pb.Header:
    return pb.Header(
        process_id=pb.ProcessSpec.ID(zone="a", suffix="broker-1"),
        route=route(),
        etcd=pb.Header.Etcd(cluster_id=1, member_id=2, revision=3, raft_term=4),
    )


def broker_spec() -> pb.BrokerSpec:
    return pb.BrokerSpec(
        process_spec=pb.ProcessSpec(id=pb.ProcessSpec.ID(zone="a", suffix="broker-1"), endpoint="http://host:1"),
        journal_limit=1024,
    )


def read_request() -> pb.ReadRequest:
    return pb.ReadRequest(header=header(), journal="a/journal;reader", offset=5, end_offset=5)


def read_metadata() -> pb.ReadResponse:
    return pb.ReadResponse(
        header=header(), offset=104, write_head=105, fragment=fragment(), fragment_url="file:///x", status=pb.OK
    )


def append_request() -> pb.AppendRequest:
    return pb.AppendRequest(
        header=header(),
        journal="a/journal;writer",
        offset=7,
        check_registers=label_selector(include={"author": "me"}),
        union_registers=label_set({"author": "you"}),
        subtract_registers=label_set({"author": "me"}),
        suspend=pb.AppendRequest.SUSPEND_KEEP,
    )


def append_response() -> pb.AppendResponse:
    return pb.AppendResponse(header=header(), commit=fragment(), registers=pb.LabelSet())


def proposal() -> pb.ReplicateRequest:
    return pb.ReplicateRequest(
        header=header(), proposal=fragment(), acknowledge=True, registers=pb.LabelSet(), deprecated_journal="a/journal"
    )


def mismatch() -> pb.ReplicateResponse:
    return pb.ReplicateResponse(status=pb.PROPOSAL_MISMATCH, fragment=fragment(), registers=pb.LabelSet())


def upsert() -> pb.ApplyRequest:
    return pb.ApplyRequest(changes=[pb.ApplyRequest.Change(upsert=spec(), expect_mod_revision=0)])


def delete() -> pb.ApplyRequest:
    return pb.ApplyRequest(changes=[pb.ApplyRequest.Change(delete="a/journal", expect_mod_revision=1)])


def list_response() -> pb.ListResponse:
    return pb.ListResponse(
        header=header(), journals=[pb.ListResponse.Journal(spec=spec(), mod_revision=3, route=route())]
    )


def fragments_request() -> pb.FragmentsRequest:
    return pb.FragmentsRequest(
        header=header(),
        journal="a/journal",
        begin_mod_time=5,
        end_mod_time=5,
        page_limit=10_000,
        signatureTTL=Duration(nanos=1),
    )


def fragments_response() -> pb.FragmentsResponse:
    return pb.FragmentsResponse(header=header(), fragments=[pb.FragmentsResponse._Fragment(spec=fragment())])


def health_request() -> pb.FragmentStoreHealthRequest:
    return pb.FragmentStoreHealthRequest(fragment_store="file:///x/", check_delete=True, check_delete_prefix="a/b/")


GOOD: list[Callable[[], Message]] = [
    fragment,
    spec,
    route,
    header,
    broker_spec,
    read_request,
    read_metadata,
    append_request,
    append_response,
    proposal,
    mismatch,
    upsert,
    delete,
    list_response,
    fragments_request,
    fragments_response,
    health_request,
    lambda: pb.Route(primary=-1),
    lambda: pb.ReadRequest(journal="a/journal", offset=-1),
    lambda: pb.ReadRequest(journal="a/journal", offset=-1, end_offset=10),
    lambda: pb.ReadResponse(offset=5, content=b"x"),
    lambda: pb.ReadResponse(status=pb.OFFSET_NOT_YET_AVAILABLE, header=header(), offset=5, write_head=5),
    lambda: pb.ReadResponse(header=header()),
    lambda: pb.AppendRequest(journal="a/journal"),
    lambda: pb.AppendRequest(content=b"x"),
    pb.AppendRequest,
    lambda: pb.AppendResponse(status=pb.JOURNAL_NOT_FOUND, header=header()),
    lambda: pb.AppendResponse(status=pb.REGISTER_MISMATCH, header=header(), registers=pb.LabelSet()),
    lambda: pb.ReplicateRequest(content=b"x", content_delta=5),
    lambda: pb.ReplicateRequest(proposal=fragment()),
    lambda: pb.ReplicateRequest(proposal=fragment(), content=b"x", content_delta=5, readable=7),
    pb.ReplicateResponse,
    lambda: pb.ReplicateResponse(header=header()),
    lambda: pb.ReplicateResponse(status=pb.WRONG_ROUTE, header=header()),
    pb.ListRequest,
    lambda: pb.ListRequest(selector=label_selector(include={"prefix": "a/"}), watch=True, watch_resume=header()),
    lambda: pb.ListResponse(header=header()),
    lambda: pb.ApplyRequest(changes=[pb.ApplyRequest.Change(delete="a/journal", expect_mod_revision=-1)]),
    lambda: pb.ApplyRequest(changes=[pb.ApplyRequest.Change(upsert=spec(), expect_mod_revision=-1)]),
    pb.ApplyRequest,
    lambda: pb.ApplyResponse(header=header()),
    lambda: pb.FragmentStoreHealthRequest(fragment_store="gs://bucket/"),
    lambda: pb.FragmentStoreHealthResponse(header=header(), store_health_error="it is broken"),
    lambda: label_set({"aa": "b"}),
    lambda: label_selector(include={"aa:prefix": "b"}),
]


@pytest.mark.parametrize("make", GOOD)
def test_valid_messages_pass(make: Callable[[], Message]) -> None:
    message = make()
    before = message.SerializeToString()
    validate(message)
    assert message.SerializeToString() == before


def test_every_message_of_the_protocol_has_rules() -> None:
    """They are the requests and responses of every RPC."""
    service = pb.DESCRIPTOR.services_by_name["Journal"]
    kinds = {each for method in service.methods for each in (method.input_type.name, method.output_type.name)}
    assert kinds <= {make().DESCRIPTOR.name for make in GOOD}


# ------------------------------------------------------------------------------------------------------- bad messages


def put(path: str, value: Any) -> Callable[[Any], None]:
    """Return a change of one field: `a.b[1].c`. A message or list is copied; None clears."""

    def change(message: Any) -> None:
        *parents, last = path.split(".")
        for part in parents:
            name, _, index = part.partition("[")
            message = getattr(message, name)
            message = message[int(index[:-1])] if index else message
        if value is None:
            message.ClearField(last)
        elif isinstance(value, Message):
            getattr(message, last).CopyFrom(value)
        elif isinstance(value, list):
            message.ClearField(last)
            getattr(message, last).extend(value)
        else:
            setattr(message, last, value)

    return change


def unsorted() -> pb.LabelSet:
    return pb.LabelSet(labels=[pb.Label(name="bb"), pb.Label(name="aa")])


LONG = "x" * 513
ID = pb.ProcessSpec.ID

SPEC_CASES: list[tuple[str, Any, str]] = [
    ("name", "abc", "name"),
    ("name", LONG, "name"),
    ("name", "a/journal;meta", "name"),
    ("replication", 0, "replication"),
    ("replication", 6, "replication"),
    ("labels", unsorted(), "labels.labels[1]"),
    ("labels", label_set({"name": "a/journal"}), "labels"),
    ("labels", label_set({"prefix": "a/"}), "labels"),
    ("labels", label_set({"content-type": "a/b/c"}), "labels"),
    ("labels.labels[0].prefix", True, "labels.labels[0].prefix"),
    ("fragment.length", 1023, "fragment.length"),
    ("fragment.length", (1 << 34) + 1, "fragment.length"),
    ("fragment.compression_codec", 0, "fragment.compression_codec"),
    ("fragment.compression_codec", 99, "fragment.compression_codec"),
    ("fragment.compression_codec", pb.GZIP_OFFLOAD_DECOMPRESSION, "fragment.compression_codec"),
    ("fragment.stores", ["file:///a/", "file:///b"], "fragment.stores[1]"),
    ("fragment.stores", ["nowhere"], "fragment.stores[0]"),
    ("fragment.refresh_interval", Duration(nanos=999_999_999), "fragment.refresh_interval"),
    ("fragment.refresh_interval", Duration(seconds=86_400, nanos=1), "fragment.refresh_interval"),
    ("fragment.flush_interval", Duration(seconds=59), "fragment.flush_interval"),
    ("fragment.flush_interval", Duration(seconds=-60), "fragment.flush_interval"),
    ("flags", 3, "flags"),
    ("flags", 8, "flags"),
    ("max_append_rate", -1, "max_append_rate"),
    ("suspend.level", 3, "suspend.level"),
    ("suspend.offset", -1, "suspend.offset"),
]
STRICT_SPEC_CASES: list[tuple[str, Any, str]] = [
    ("fragment.stores", ["s3://b/?turbo=1"], "fragment.stores[0]"),
    ("fragment.path_postfix_template", "{{ if .Name }}", "fragment.path_postfix_template"),
]
HEADER_CASES: list[tuple[str, Any, str]] = [
    ("process_id", ID(zone="", suffix="broker-1"), "process_id.zone"),
    ("process_id", ID(zone="a", suffix="b"), "process_id.suffix"),
    ("etcd", None, "etcd.cluster_id"),
    ("etcd.cluster_id", 0, "etcd.cluster_id"),
    ("etcd.member_id", 0, "etcd.member_id"),
    ("etcd.revision", 0, "etcd.revision"),
    ("etcd.revision", -1, "etcd.revision"),
    ("etcd.raft_term", 0, "etcd.raft_term"),
    ("route", None, "route.primary"),
]
ROUTE_CASES: list[tuple[str, Any, str]] = [
    ("members[1].zone", "", "members[1].zone"),
    ("members[2].suffix", "abc", "members[2].suffix"),
    ("members[2].suffix", "broker-0", "members[2]"),
    ("members[2].zone", "a", "members[2]"),
    ("primary", 3, "primary"),
    ("primary", -2, "primary"),
    ("members", [], "primary"),
    ("endpoints", ["http://host"], "endpoints"),
    ("endpoints", ["", "not a url", ""], "endpoints[1]"),
    ("endpoints", ["", "", "/just/a/path"], "endpoints[2]"),
]
FRAGMENT_CASES: list[tuple[str, Any, str]] = [
    ("journal", "abc", "journal"),
    ("begin", 106, "begin"),
    ("compression_codec", 0, "compression_codec"),
    ("path_postfix", "/a", "path_postfix"),
]


def nested(make: Callable[[], Message], parent: str, cases: list[tuple[str, Any, str]]) -> list[Any]:
    return [(make, f"{parent}.{path}", value, f"{parent}.{field}") for path, value, field in cases]


def at_top(make: Callable[[], Message], cases: list[tuple[str, Any, str]]) -> list[Any]:
    return [(make, *case) for case in cases]


BAD: list[Any] = [
    *at_top(spec, SPEC_CASES + STRICT_SPEC_CASES),
    *at_top(route, ROUTE_CASES),
    *at_top(header, HEADER_CASES),
    *at_top(fragment, FRAGMENT_CASES),
    *nested(header, "route", ROUTE_CASES),
    *nested(upsert, "changes[0].upsert", SPEC_CASES + STRICT_SPEC_CASES),
    *nested(list_response, "journals[0].spec", SPEC_CASES),
    *nested(list_response, "journals[0].route", ROUTE_CASES),
    *[
        case
        for make in (
            *(read_request, read_metadata, append_request, append_response, proposal),
            *(list_response, fragments_request, fragments_response),
        )
        for case in nested(make, "header", HEADER_CASES)
    ],
    *nested(read_metadata, "fragment", FRAGMENT_CASES),
    *nested(append_response, "commit", FRAGMENT_CASES),
    *nested(proposal, "proposal", FRAGMENT_CASES),
    *nested(mismatch, "fragment", FRAGMENT_CASES),
    *nested(fragments_response, "fragments[0].spec", FRAGMENT_CASES),
    *at_top(
        broker_spec,
        [
            ("process_spec", None, "process_spec.id.zone"),
            ("process_spec.id.suffix", "abc", "process_spec.id.suffix"),
            ("process_spec.endpoint", "", "process_spec.endpoint"),
            ("process_spec.endpoint", "host:80", "process_spec.endpoint"),
            ("process_spec.endpoint", "http://host:port", "process_spec.endpoint"),
            ("journal_limit", (1 << 17) + 1, "journal_limit"),
        ],
    ),
    *at_top(
        read_request,
        [
            ("journal", "", "journal"),
            ("journal", "a/journal;", "journal metadata"),
            ("offset", -2, "offset"),
            ("end_offset", 4, "end_offset"),
            ("end_offset", -1, "end_offset"),
        ],
    ),
    *at_top(
        read_metadata,
        [
            ("offset", 99, "offset"),
            ("offset", 105, "offset"),
            ("write_head", 104, "write_head"),
            ("write_head", -1, "write_head"),
            ("fragment", None, "offset"),
            ("content", b"x", "header"),
        ],
    ),
    (lambda: pb.ReadResponse(content=b"x"), "status", pb.NOT_ALLOWED, "status"),
    (lambda: pb.ReadResponse(content=b"x"), "write_head", 5, "write_head"),
    (lambda: pb.ReadResponse(content=b"x"), "fragment", fragment(), "fragment"),
    (lambda: pb.ReadResponse(content=b"x"), "fragment_url", "file:///x", "fragment_url"),
    (lambda: pb.ReadResponse(header=header()), "fragment_url", "file:///x", "fragment_url"),
    *at_top(
        append_request,
        [
            ("journal", "abc", "journal"),
            ("offset", -1, "offset"),
            ("content", b"x", "content"),
            ("check_registers", pb.LabelSelector(include=unsorted()), "check_registers.include.labels[1]"),
            ("union_registers", unsorted(), "union_registers.labels[1]"),
            ("subtract_registers", unsorted(), "subtract_registers.labels[1]"),
            ("suspend", 5, "suspend"),
            ("at_start", True, "offset"),
        ],
    ),
    *at_top(
        lambda: pb.AppendRequest(content=b"x"),
        [
            ("header", header(), "header"),
            ("do_not_proxy", True, "do_not_proxy"),
            ("offset", 1, "offset"),
            ("check_registers", pb.LabelSelector(), "check_registers"),
            ("union_registers", pb.LabelSet(), "union_registers"),
            ("subtract_registers", pb.LabelSet(), "subtract_registers"),
            ("suspend", pb.AppendRequest.SUSPEND_NOW, "suspend"),
            ("at_start", True, "at_start"),
        ],
    ),
    *at_top(
        append_response,
        [
            ("header", None, "header.route.primary"),
            ("commit", None, "commit"),
            ("registers", None, "registers"),
            ("registers", unsorted(), "registers.labels[1]"),
        ],
    ),
    (
        lambda: pb.AppendResponse(status=pb.REGISTER_MISMATCH, header=header(), registers=pb.LabelSet()),
        "registers",
        None,
        "registers",
    ),
    *at_top(
        proposal,
        [
            ("acknowledge", False, "acknowledge"),
            ("content", b"x", "content"),
            ("content_delta", 1, "content_delta"),
            ("registers", unsorted(), "registers.labels[1]"),
            ("deprecated_journal", "another/one", "deprecated_journal"),
        ],
    ),
    *at_top(
        lambda: pb.ReplicateRequest(proposal=fragment(), content=b"x"),
        [("content_delta", -1, "content_delta")],
    ),
    *at_top(lambda: pb.ReplicateRequest(proposal=fragment()), [("content_delta", 1, "content_delta")]),
    *at_top(
        lambda: pb.ReplicateRequest(content=b"x"),
        [
            ("content", b"", ""),
            ("content_delta", -1, "content_delta"),
            ("header", header(), "header"),
            ("registers", pb.LabelSet(), "registers"),
            ("acknowledge", True, "acknowledge"),
            ("deprecated_journal", "a/journal", "deprecated_journal"),
        ],
    ),
    *at_top(
        mismatch,
        [
            ("fragment", None, "fragment"),
            ("registers", None, "registers"),
            ("registers", unsorted(), "registers.labels[1]"),
            ("status", pb.OK, "fragment"),
            ("status", pb.WRONG_ROUTE, "header"),
        ],
    ),
    (pb.ReplicateResponse, "registers", pb.LabelSet(), "registers"),
    *at_top(
        pb.ListRequest,
        [
            ("selector", pb.LabelSelector(exclude=unsorted()), "selector.exclude.labels[1]"),
            ("selector", label_selector(include={"prefix": "a"}), "selector"),
            ("selector", label_selector(exclude={"prefix": "a"}), "selector"),
            ("watch_resume", pb.Header(), "watch_resume.route.primary"),
        ],
    ),
    (list_response, "journals[0].mod_revision", 0, "journals[0].mod_revision"),
    *at_top(
        upsert,
        [
            ("changes[0].delete", "a/journal", "changes[0]"),
            ("changes[0].upsert", None, "changes[0]"),
            ("changes[0].expect_mod_revision", -2, "changes[0].expect_mod_revision"),
        ],
    ),
    *at_top(
        delete,
        [
            ("changes[0].delete", "abc", "changes[0].delete"),
            ("changes[0].expect_mod_revision", 0, "changes[0].expect_mod_revision"),
            ("changes[0].expect_mod_revision", -2, "changes[0].expect_mod_revision"),
        ],
    ),
    (lambda: pb.ApplyResponse(header=header()), "header", None, "header.route.primary"),
    *at_top(
        fragments_request,
        [
            ("journal", "", "journal"),
            ("end_mod_time", 4, "end_mod_time"),
            ("next_page_token", -1, "next_page_token"),
            ("page_limit", -1, "page_limit"),
            ("page_limit", 10_001, "page_limit"),
            ("signatureTTL", Duration(), "signatureTTL"),
        ],
    ),
    *at_top(
        health_request,
        [
            ("fragment_store", "file:///x", "fragment_store"),
            ("check_delete", False, "check_delete_prefix"),
            ("check_delete_prefix", "a/b", "check_delete_prefix"),
            ("check_delete_prefix", "/a/", "check_delete_prefix"),
            ("check_delete_prefix", "../a/", "check_delete_prefix"),
            ("check_delete_prefix", "a//b/", "check_delete_prefix"),
            ("check_delete_prefix", "/", "check_delete_prefix"),
        ],
    ),
    (lambda: pb.FragmentStoreHealthResponse(header=header()), "header", None, "header.route.primary"),
]


@pytest.mark.parametrize(("make", "path", "value", "field"), BAD)
def test_invalid_messages_are_refused(make: Callable[[], Message], path: str, value: Any, field: str) -> None:
    message = make()
    put(path, value)(message)
    with pytest.raises(InvalidInput) as caught:
        validate(message)
    name = message.DESCRIPTOR.name
    assert caught.value.field == (f"{name}.{field}" if field else name)
    assert str(caught.value).startswith(caught.value.field + ": ")
    assert len(caught.value.message) > 5


@pytest.mark.parametrize(("path", "value", "field"), STRICT_SPEC_CASES)
def test_listings_accept_fields_of_newer_brokers(path: str, value: Any, field: str) -> None:
    message = list_response()
    put(f"journals[0].spec.{path}", value)(message)
    validate(message)
    with pytest.raises(InvalidInput) as caught:
        validate_journal_spec(message.journals[0].spec)
    assert caught.value.field == f"JournalSpec.{field}"


def test_unknown_statuses_are_accepted() -> None:
    validate(pb.ApplyResponse(status=99, header=header()))  # type: ignore[arg-type]


def test_messages_without_rules_are_refused() -> None:
    with pytest.raises(TypeError, match="no rules for Duration"):
        validate(Duration())


def test_the_named_functions_apply_the_same_rules() -> None:
    for check, make in (
        (validate_journal_spec, spec),
        (validate_broker_spec, broker_spec),
        (validate_route, route),
        (validate_header, header),
    ):
        check(make())  # type: ignore[operator]
        with pytest.raises(InvalidInput):
            check(make().__class__(**({"primary": 5} if make is route else {})))  # type: ignore[operator]


@pytest.mark.parametrize("endpoint", ["http://host", "https://host:443/path?query", "unix://host/a/socket"])
def test_endpoints_are_accepted(endpoint: str) -> None:
    validate_endpoint(endpoint)


# ------------------------------------------------------------------------------------------------ meaning of fields


@pytest.mark.parametrize(
    ("flags", "read", "write"),
    [
        (pb.JournalSpec.NOT_SPECIFIED, True, True),
        (pb.JournalSpec.O_RDONLY, True, False),
        (pb.JournalSpec.O_WRONLY, False, True),
        (pb.JournalSpec.O_RDWR, True, True),
    ],
)
def test_flags_determine_read_and_write_access(flags: int, read: bool, write: bool) -> None:
    assert may_read(pb.JournalSpec(flags=flags)) is read
    assert may_write(pb.JournalSpec(flags=flags)) is write


@pytest.mark.parametrize(
    ("level", "replication", "cap", "expected"),
    [
        ("NONE", 3, 9, 3),
        ("NONE", 3, 2, 2),
        ("PARTIAL", 3, 9, 1),
        ("FULL", 3, 9, 0),
    ],
)
def test_effective_replication_is_capped_and_suspended(level: str, replication: int, cap: int, expected: int) -> None:
    found = pb.JournalSpec(replication=replication)
    assert effective_replication(found, cap) == (min(replication, cap))
    found.suspend.level = pb.JournalSpec.Suspend.Level.Value(level)
    assert effective_replication(found, cap) == expected


def test_equivalent_routes_differ_only_in_endpoints() -> None:
    left, right = route(), route()
    right.ClearField("endpoints")
    assert routes_equivalent(left, right)
    right.primary = 2
    assert not routes_equivalent(left, right)
    right = route()
    del right.members[2]
    assert not routes_equivalent(left, right)
    right = route()
    right.members[2].suffix = "broker-2"
    assert not routes_equivalent(left, right)
