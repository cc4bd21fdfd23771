"""Validation of messages: specs, routes, headers, and the requests and responses of every RPC.

`validate(message)` checks any of them. Every check raises `InvalidInput`, whose `field` is the path to the bad value,
beginning with the message's name: `JournalSpec.fragment.length`. For a message that only carries content, validation
checks only that other fields are absent, because it runs for every chunk of every append.

Some messages are part of a stream. This module checks single messages; the owner of the stream checks their order. So
an empty `AppendRequest`, which commits, is valid here, and the continuations and terminators of a watched listing are
not passed to `validate` at all.

Other brokers may use values that this version doesn't know. In received messages some of these are accepted: statuses
(which become an error later), and store arguments and path templates of listed specs. Specs to be applied are checked
completely.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final
from urllib.parse import urlsplit

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from coranto import labels
from coranto.errors import InvalidInput
from coranto.fragments.fragment import Codec, validate_wire_fragment
from coranto.fragments.postfix import PostfixTemplate
from coranto.fragments.store_urls import parse_store_url
from coranto.names import MAX_JOURNAL_BYTES, validate_journal, validate_path, validate_process_id
from coranto.specs.durability import validate_durability
from coranto.wire import protocol_pb2 as pb

MAX_REPLICATION: Final = 5
"""The maximum number of replicas that a spec may request."""
DEFAULT_REPLICATION_CAP: Final = 9
"""The default replication limit of a cluster."""
MIN_FRAGMENT_BYTES: Final = 1 << 10
MAX_FRAGMENT_BYTES: Final = 1 << 34
MIN_REFRESH_SECONDS: Final = 1
MAX_REFRESH_SECONDS: Final = 24 * 3600
MIN_FLUSH_SECONDS: Final = 60
MAX_JOURNAL_LIMIT: Final = 1 << 17
MAX_FRAGMENTS_PAGE: Final = 10_000
MAX_LABELS: Final = 1024
"""The maximum number of labels of a spec to be applied."""
MAX_STORES: Final = 32
"""The maximum number of stores of a spec to be applied."""
MAX_SPEC_BYTES: Final = 256 << 10
"""The maximum size in bytes of a spec to be applied. Every broker holds all specs in memory."""
MAX_SELECTOR_LABELS: Final = 1 << 14
"""The maximum number of labels on each side of a request's selector."""
MAX_SIGNATURE_SECONDS: Final = 366 * 24 * 3600
ANY_REVISION: Final = -1
"""The expected revision of a change that applies to any current revision."""


# ------------------------------------------------------------------------------------------------ semantics of specs


def may_read(spec: pb.JournalSpec) -> bool:
    """Return True if the journal's flags allow reading. Unspecified flags allow everything."""
    return spec.flags in (pb.JournalSpec.NOT_SPECIFIED, pb.JournalSpec.O_RDONLY, pb.JournalSpec.O_RDWR)


def may_write(spec: pb.JournalSpec) -> bool:
    """Return True if the journal's flags allow appending content. Unspecified flags allow everything."""
    return spec.flags in (pb.JournalSpec.NOT_SPECIFIED, pb.JournalSpec.O_WRONLY, pb.JournalSpec.O_RDWR)


def effective_replication(spec: pb.JournalSpec, cap: int = DEFAULT_REPLICATION_CAP) -> int:
    """Return the number of brokers that should hold the journal: fewer if it is suspended, and never above `cap`."""
    if spec.suspend.level == pb.JournalSpec.Suspend.FULL:
        return 0
    if spec.suspend.level == pb.JournalSpec.Suspend.PARTIAL:
        return min(1, cap)
    return min(spec.replication, cap)


def routes_equivalent(left: pb.Route, right: pb.Route) -> bool:
    """Return True if two routes have the same members and the same primary. Endpoints are not compared."""
    return left.primary == right.primary and list(left.members) == list(right.members)


def duration_seconds(duration: Duration) -> float:
    """Return a duration in seconds, exact to the nanosecond up to a few months."""
    return duration.seconds + duration.nanos / 1_000_000_000


# ------------------------------------------------------------------------------------------------- public validation


def validate(message: Message) -> None:
    """Check a spec, route, header, fragment, or a request or response of any RPC.

    A single spec is checked like a spec to be applied. Raises InvalidInput, and TypeError for a type of message that
    has no rules.
    """
    check = _CHECKS.get(type(message))
    if check is None:
        raise TypeError(f"there are no rules for {type(message).__name__}")
    try:
        check(message)
    except InvalidInput as err:
        raise err.within(message.DESCRIPTOR.full_name.partition(".")[2]) from None


def validate_append_response(response: pb.AppendResponse, *, registers: bool = True) -> None:
    """Check the response to an append. Without `registers` the registers, which may be many labels, are not checked."""
    try:
        (_append_response if registers else _append_response_but_registers)(response)
    except InvalidInput as err:
        raise err.within("AppendResponse") from None


def validate_journal_spec(spec: pb.JournalSpec) -> None:
    """Check a journal spec. Raises InvalidInput."""
    validate(spec)


def validate_broker_spec(spec: pb.BrokerSpec) -> None:
    """Check a broker spec. Raises InvalidInput."""
    validate(spec)


def validate_route(route: pb.Route) -> None:
    """Check a route. Raises InvalidInput."""
    validate(route)


def validate_header(header: pb.Header) -> None:
    """Check a header. Raises InvalidInput."""
    validate(header)


def validate_endpoint(endpoint: str) -> None:
    """Check an endpoint: an absolute URL with a host, of http, https or `unix://host/path`. Raises InvalidInput."""
    try:
        parts = urlsplit(endpoint)
        host, _ = parts.netloc, parts.port
    except ValueError as err:
        raise InvalidInput(f"{endpoint!r} is not a URL: {err}", field="endpoint") from err
    if not parts.scheme or not host:
        raise InvalidInput(f"{endpoint!r} is not a URL with a host; write http://host:port", field="endpoint")


# --------------------------------------------------------------------------------------------------- parts of checks


def _within(field: str, check: Callable[..., object], value: object) -> None:
    """Check a part of a message. The fields of its errors begin with `field`."""
    try:
        check(value)
    except InvalidInput as err:
        raise err.within(field) from None


def _each(field: str, check: Callable[..., object], values: Any) -> None:
    for index, value in enumerate(values):
        _within(f"{field}[{index}]", check, value)


def _optional(message: Message, field: str, check: Callable[..., object]) -> None:
    if message.HasField(field):
        _within(field, check, getattr(message, field))


def _absent(message: Any, *fields: str, why: str) -> None:
    for field in fields:
        value = getattr(message, field)
        if message.HasField(field) if isinstance(value, Message) else bool(value):
            raise InvalidInput(f"must not be set {why}", field=field)


def _at_least(field: str, value: float, minimum: float) -> None:
    if value < minimum:
        raise InvalidInput(f"{value:g} is less than {minimum:g}; give at least that", field=field)


def _between(field: str, value: float, minimum: float, maximum: float, unit: str = "") -> None:
    if not minimum <= value <= maximum:
        raise InvalidInput(f"{value}{unit} is not between {minimum}{unit} and {maximum}{unit}", field=field)


def _one_of(field: str, value: int, allowed: Any) -> None:
    if value not in allowed.values():
        names = ", ".join(f"{name} ({number})" for name, number in allowed.items())
        raise InvalidInput(f"{value} is not one of {names}", field=field)


@lru_cache(maxsize=4096)
def _named_journal(name: str) -> None:
    """Check the journal name of a read or append, which may carry metadata."""
    validate_journal(name, allow_metadata=True)


def _label_set(found: pb.LabelSet) -> None:
    labels.validate_label_set(found)


# ------------------------------------------------------------------------------------------------------------- specs


def _journal_spec(spec: pb.JournalSpec) -> None:
    _received_spec(spec)
    for index, url in enumerate(spec.fragment.stores):
        _url(f"fragment.stores[{index}]", url)
    if spec.fragment.path_postfix_template:
        try:
            PostfixTemplate(spec.fragment.path_postfix_template)
        except InvalidInput as err:
            raise err.within("fragment") from None


def _url(field: str, url: str, *, check_options: bool = True) -> str:
    """Check a store's URL, and return its scheme."""
    try:
        return parse_store_url(url, check_options=check_options).scheme
    except InvalidInput as err:
        raise InvalidInput(err.message, field=field) from None


def _received_spec(spec: pb.JournalSpec) -> None:
    validate_journal(spec.name, kind="name")
    _between("replication", spec.replication, 1, MAX_REPLICATION)
    _within("labels", labels.validate_journal_labels, spec.labels)
    _within("fragment", _fragment_spec, spec.fragment)
    _one_of("flags", spec.flags, pb.JournalSpec.Flag)
    _at_least("max_append_rate", spec.max_append_rate, 0)
    _one_of("suspend.level", spec.suspend.level, pb.JournalSpec.Suspend.Level)
    _at_least("suspend.offset", spec.suspend.offset, 0)


def _fragment_spec(fragment: pb.JournalSpec.Fragment) -> None:
    _between("length", fragment.length, MIN_FRAGMENT_BYTES, MAX_FRAGMENT_BYTES, " bytes")
    codec = Codec.from_wire(fragment.compression_codec)
    for index, url in enumerate(fragment.stores):
        scheme = _url(f"stores[{index}]", url, check_options=False)
        if index == 0 and scheme == "file" and codec is Codec.GZIP_OFFLOAD_DECOMPRESSION:
            raise InvalidInput(
                f"{codec.name} needs a store that decompresses, and {url!r} doesn't; use GZIP",
                field="compression_codec",
            )
    refresh = duration_seconds(fragment.refresh_interval)
    _between("refresh_interval", refresh, MIN_REFRESH_SECONDS, MAX_REFRESH_SECONDS, " s")
    flush = duration_seconds(fragment.flush_interval)
    if flush and flush < MIN_FLUSH_SECONDS:
        raise InvalidInput(f"{flush} s is neither 0 nor at least {MIN_FLUSH_SECONDS} s", field="flush_interval")


def _bounded_spec(spec: pb.JournalSpec) -> None:
    """Check the size and the durability demand of a spec to be applied. Specs that are already in etcd are exempt."""
    _between("labels", len(spec.labels.labels), 0, MAX_LABELS, " labels")
    _between("fragment.stores", len(spec.fragment.stores), 0, MAX_STORES, " stores")
    if spec.ByteSize() > MAX_SPEC_BYTES:
        raise InvalidInput(f"the spec has {spec.ByteSize()} bytes; it may have {MAX_SPEC_BYTES}")
    validate_durability(spec)


def _selector(selector: pb.LabelSelector) -> None:
    for side in ("include", "exclude"):
        _between(side, len(getattr(selector, side).labels), 0, MAX_SELECTOR_LABELS, " labels")
    labels.validate_selector(selector)


def _process_spec(spec: pb.ProcessSpec) -> None:
    _within("id", validate_process_id, spec.id)
    validate_endpoint(spec.endpoint)


def _broker_spec(spec: pb.BrokerSpec) -> None:
    _within("process_spec", _process_spec, spec.process_spec)
    _between("journal_limit", spec.journal_limit, 0, MAX_JOURNAL_LIMIT)


def _route(route: pb.Route) -> None:
    _each("members", validate_process_id, route.members)
    order = [(member.zone, member.suffix) for member in route.members]
    for index in range(1, len(order)):
        if order[index - 1] >= order[index]:
            raise InvalidInput(
                f"{'/'.join(order[index])} doesn't sort after {'/'.join(order[index - 1])}; "
                "members must be unique and sorted by zone, then suffix",
                field=f"members[{index}]",
            )
    if not -1 <= route.primary < len(order):
        raise InvalidInput(
            f"{route.primary} is not an index of {len(order)} members; use -1 for a route without a primary",
            field="primary",
        )
    if len(route.endpoints) not in (0, len(order)):
        raise InvalidInput(
            f"there are {len(route.endpoints)} for {len(order)} members; give one for each or none", field="endpoints"
        )
    for index, endpoint in enumerate(route.endpoints):
        if endpoint:
            try:
                validate_endpoint(endpoint)
            except InvalidInput as err:
                raise InvalidInput(err.message, field=f"endpoints[{index}]") from None


def _header(header: pb.Header) -> None:
    """Check a header. Results are cached, because nearly all responses of a broker have the same header."""
    _header_of(header.SerializeToString())


@lru_cache(maxsize=256)
def _header_of(serialized: bytes) -> None:
    header = pb.Header.FromString(serialized)
    if header.process_id.zone or header.process_id.suffix:
        _within("process_id", validate_process_id, header.process_id)
    _within("route", _route, header.route)
    etcd = header.etcd
    for field in ("cluster_id", "member_id", "raft_term"):
        if not getattr(etcd, field):
            raise InvalidInput("must not be 0", field=f"etcd.{field}")
    _at_least("etcd.revision", etcd.revision, 1)


# ---------------------------------------------------------------------------------------------------- read and append


def _read_request(request: pb.ReadRequest) -> None:
    _optional(request, "header", _header)
    _named_journal(request.journal)
    _at_least("offset", request.offset, -1)
    if request.end_offset and request.end_offset < max(request.offset, 0):
        raise InvalidInput(
            f"{request.end_offset} is neither 0 nor at least the offset {request.offset}", field="end_offset"
        )
    if request.HasField("content_sum") and not 0 <= request.offset < request.end_offset:
        raise InvalidInput("needs the offsets of content, from offset to end_offset", field="content_sum")


def _read_response(response: pb.ReadResponse) -> None:
    if response.content:
        _absent(
            response, "status", "header", "write_head", "fragment", "fragment_url", "journal_id", why="with content"
        )
        return
    _optional(response, "header", _header)
    _at_least("write_head", response.write_head, 0)
    if not response.HasField("fragment"):
        if response.status == pb.OK:
            _absent(response, "offset", why="without content or a fragment")
        _absent(response, "fragment_url", why="without a fragment")
        return
    fragment = response.fragment
    _within("fragment", validate_wire_fragment, fragment)
    if not fragment.begin <= response.offset < fragment.end:
        raise InvalidInput(
            f"{response.offset} is not within the fragment's [{fragment.begin}, {fragment.end})", field="offset"
        )
    _at_least("write_head", response.write_head, fragment.end)


def _append_request(request: pb.AppendRequest) -> None:
    if not request.journal:
        if (
            request.HasField("header")
            or request.do_not_proxy
            or request.offset
            or request.suspend
            or request.HasField("check_registers")
            or request.HasField("union_registers")
            or request.HasField("subtract_registers")
            or request.HasField("durability")
            or request.at_start
        ):
            _absent(
                request,
                *("header", "do_not_proxy", "offset", "check_registers", "union_registers", "subtract_registers"),
                *("suspend", "durability", "at_start"),
                why="without a journal: only the first message of an append has parameters",
            )
        return
    if len(request.ListFields()) == 1:  # Only the journal is set: the usual case.
        _named_journal(request.journal)
        return
    _optional(request, "header", _header)
    _named_journal(request.journal)
    _at_least("offset", request.offset, 0)
    if request.at_start and request.offset:
        _absent(request, "offset", why="with at_start: that append begins at 0")
    if request.content:
        _absent(request, "content", why="with a journal: content follows in separate messages")
    _optional(request, "check_registers", _selector)
    _optional(request, "union_registers", _label_set)
    _optional(request, "subtract_registers", _label_set)
    if request.HasField("durability"):
        _at_least("durability.since", request.durability.since, 0)
    if request.suspend:  # 0 is valid.
        _one_of("suspend", request.suspend, pb.AppendRequest.Suspend)


def _append_response(response: pb.AppendResponse) -> None:
    _append_response_but_registers(response)
    _optional(response, "registers", _label_set)


def _append_response_but_registers(response: pb.AppendResponse) -> None:
    _within("header", _header, response.header)
    if response.status == pb.OK and not response.HasField("commit"):
        raise InvalidInput("must be set when the status is OK", field="commit")
    if response.status in (pb.OK, pb.REGISTER_MISMATCH) and not response.HasField("registers"):
        raise InvalidInput("must be set, even if empty, when the status is OK or REGISTER_MISMATCH", field="registers")
    _optional(response, "commit", validate_wire_fragment)


# ---------------------------------------------------------------------------------------------------------- replicate


def _replicate_request(request: pb.ReplicateRequest) -> None:
    if request.HasField("proposal"):
        if request.HasField("header"):
            _within("header", _header, request.header)
            if not request.acknowledge:
                raise InvalidInput("must be set with a header", field="acknowledge")
        _within("proposal", validate_wire_fragment, request.proposal)
        # Absent registers count as empty.
        _within("registers", _label_set, request.registers)
        if request.HasField("header"):
            _absent(request, "content", "content_delta", why="with a proposal with a header")
        elif request.content:
            _at_least("content_delta", request.content_delta, 0)
        else:
            _absent(request, "content_delta", why="without content")
        _at_least("readable", request.readable, 0)
        if request.ask and not request.acknowledge:
            raise InvalidInput("must be set with ask", field="acknowledge")
        if request.deprecated_journal not in ("", request.proposal.journal):
            raise InvalidInput(
                f"{request.deprecated_journal!r} is not the proposal's journal {request.proposal.journal!r}",
                field="deprecated_journal",
            )
        return
    if not request.content:
        if not request.HasField("readable"):
            raise InvalidInput("is neither a proposal nor content")
        _at_least("readable", request.readable, 0)
        _absent(request, "content_delta", why="without content")
    else:
        _at_least("content_delta", request.content_delta, 0)
        _absent(request, "readable", why="with content")
    if request.HasField("header") or request.HasField("registers") or request.acknowledge or request.deprecated_journal:
        _absent(request, "header", "registers", "acknowledge", "deprecated_journal", why="without a proposal")


def _replicate_response(response: pb.ReplicateResponse) -> None:
    # A replica's first acknowledgement has a header too, with any status.
    if response.status == pb.WRONG_ROUTE and not response.HasField("header"):
        raise InvalidInput("must be set when the status is WRONG_ROUTE", field="header")
    _optional(response, "header", _header)
    if response.status != pb.PROPOSAL_MISMATCH:
        _absent(response, "fragment", "registers", why="unless the status is PROPOSAL_MISMATCH")
        return
    for field in ("fragment", "registers"):
        if not response.HasField(field):
            raise InvalidInput("must be set when the status is PROPOSAL_MISMATCH", field=field)
    _within("fragment", validate_wire_fragment, response.fragment)
    _within("registers", _label_set, response.registers)


# ------------------------------------------------------------------------------------------------------ list and apply


def _list_request(request: pb.ListRequest) -> None:
    _within("selector", _selector, request.selector)
    labels.rewrite_legacy_prefix(request.selector)
    _optional(request, "watch_resume", _header)


def _list_response(response: pb.ListResponse) -> None:
    _within("header", _header, response.header)
    _each("journals", _listed_journal, response.journals)


def _listed_journal(journal: pb.ListResponse.Journal) -> None:
    _within("spec", _received_spec, journal.spec)
    _at_least("mod_revision", journal.mod_revision, 1)
    _within("route", _route, journal.route)


def _apply_request(request: pb.ApplyRequest) -> None:
    _each("changes", _change, request.changes)


def _change(change: pb.ApplyRequest.Change) -> None:
    if change.HasField("upsert") == bool(change.delete):
        raise InvalidInput("must have exactly one of upsert and delete")
    if change.delete:
        validate_journal(change.delete, kind="delete")
        if change.expect_mod_revision != ANY_REVISION:
            _at_least("expect_mod_revision", change.expect_mod_revision, 1)
        return
    _within("upsert", _bounded_spec, change.upsert)
    _within("upsert", _journal_spec, change.upsert)
    if change.expect_mod_revision != ANY_REVISION:
        _at_least("expect_mod_revision", change.expect_mod_revision, 0)


def _header_only(response: pb.ApplyResponse | pb.FragmentStoreHealthResponse) -> None:
    _within("header", _header, response.header)


# ------------------------------------------------------------------------------------------------ fragments and stores


def _fragments_request(request: pb.FragmentsRequest) -> None:
    _optional(request, "header", _header)
    _named_journal(request.journal)
    if request.end_mod_time and request.end_mod_time < request.begin_mod_time:
        raise InvalidInput(
            f"{request.end_mod_time} is before begin_mod_time {request.begin_mod_time}", field="end_mod_time"
        )
    _at_least("next_page_token", request.next_page_token, 0)
    _between("page_limit", request.page_limit, 0, MAX_FRAGMENTS_PAGE)
    if not request.HasField("signatureTTL"):
        return
    seconds = duration_seconds(request.signatureTTL)
    if seconds <= 0:
        raise InvalidInput("must be longer than 0 s", field="signatureTTL")
    if seconds > MAX_SIGNATURE_SECONDS:
        raise InvalidInput(f"{seconds:g} s is more than {MAX_SIGNATURE_SECONDS} s", field="signatureTTL")


def _fragments_response(response: pb.FragmentsResponse) -> None:
    _within("header", _header, response.header)
    for index, fragment in enumerate(response.fragments):
        _within(f"fragments[{index}].spec", validate_wire_fragment, fragment.spec)


def _store_health_request(request: pb.FragmentStoreHealthRequest) -> None:
    _url("fragment_store", request.fragment_store)
    prefix = request.check_delete_prefix
    if not prefix:
        return
    if not request.check_delete:
        raise InvalidInput("must not be set without check_delete", field="check_delete_prefix")
    if not prefix.endswith("/"):
        raise InvalidInput(f"{prefix!r} must end in '/'", field="check_delete_prefix")
    validate_path("check_delete_prefix", prefix[:-1], 1, MAX_JOURNAL_BYTES)


_CHECKS: dict[type[Message], Callable[[Any], None]] = {
    pb.AppendRequest: _append_request,
    pb.AppendResponse: _append_response,
    pb.ReadRequest: _read_request,
    pb.ReadResponse: _read_response,
    pb.ReplicateRequest: _replicate_request,
    pb.ReplicateResponse: _replicate_response,
    pb.ListRequest: _list_request,
    pb.ListResponse: _list_response,
    pb.ListResponse.Journal: _listed_journal,
    pb.ApplyRequest: _apply_request,
    pb.ApplyRequest.Change: _change,
    pb.ApplyResponse: _header_only,
    pb.FragmentsRequest: _fragments_request,
    pb.FragmentsResponse: _fragments_response,
    pb.FragmentStoreHealthRequest: _store_health_request,
    pb.FragmentStoreHealthResponse: _header_only,
    pb.JournalSpec: _journal_spec,
    pb.ProcessSpec: _process_spec,
    pb.BrokerSpec: _broker_spec,
    pb.Route: _route,
    pb.Header: _header,
    pb.Fragment: validate_wire_fragment,
    pb.LabelSet: _label_set,
    pb.LabelSelector: _selector,
}
