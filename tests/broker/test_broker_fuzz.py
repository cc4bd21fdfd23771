"""Hostile streams at the gRPC boundary of a broker process: right status, nothing changed, nothing leaked.

A failing case prints its seed; `CORANTO_FUZZ_SEED=<seed>` runs that one, `CORANTO_FUZZ_CASES=<n>` more of each.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError, Message

from coranto import labels
from coranto.errors import InvalidInput
from coranto.specs import validate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.settings import BrokerSettings
from coranto_broker.testing import RawClient, create, eventually
from coranto_broker.testing_process import BrokerChild

pytestmark = [pytest.mark.system, pytest.mark.integration]

J, OTHER = "test/journal", "test/other"
CASES = int(os.environ.get("CORANTO_FUZZ_CASES", "150"))
SEEDS = (
    [int(given)] if (given := os.environ.get("CORANTO_FUZZ_SEED")) else [1, 2, random.SystemRandom().getrandbits(32)]
)
MAX_MESSAGE = 4 << 20
MakeSpec = Callable[..., pb.JournalSpec]
Code = grpc.StatusCode

REQUESTS: dict[str, type[Message]] = {
    "List": pb.ListRequest,
    "Apply": pb.ApplyRequest,
    "Read": pb.ReadRequest,
    "Append": pb.AppendRequest,
    "Replicate": pb.ReplicateRequest,
    "ListFragments": pb.FragmentsRequest,
    "FragmentStoreHealth": pb.FragmentStoreHealthRequest,
}
REFUSALS = {
    Code.INVALID_ARGUMENT,  # What a message says, or the order of messages, is not valid.
    Code.RESOURCE_EXHAUSTED,  # A message or the metadata is too long.
    Code.UNIMPLEMENTED,  # Too few or too many messages for a method that takes one: gRPC again.
    Code.ABORTED,  # Content came too slowly.
}
SILENT_SECONDS = 0.2
"""What answers nothing in this time is a stream that waits, as a blocking read does; it is cancelled then."""


@dataclass(frozen=True)
class Case:
    """A stream to send: messages as bytes, and whether it is then closed or left half open."""

    method: str
    messages: tuple[bytes, ...]
    closed: bool = True
    metadata: tuple[tuple[str, str | bytes], ...] = ()

    def __str__(self) -> str:
        shown = [message[:200].hex() + ("…" if len(message) > 200 else "") for message in self.messages]
        return f"{self.method} {shown} closed={self.closed} metadata={[(n, len(v)) for n, v in self.metadata]}"


@dataclass(frozen=True)
class Outcome:
    """How a stream ended; `code` is None when it had to be cancelled, or the client cannot tell."""

    code: grpc.StatusCode | None
    details: str
    responses: tuple[bytes, ...]


class Cases:
    """Streams out of a seed: well-formed ones, mutated in what they say, in their bytes, or in their order."""

    def __init__(self, seed: int, header: pb.Header) -> None:
        self._rng = random.Random(seed)
        self._header = header

    def next(self) -> Case:
        rng = self._rng
        method = rng.choice(["Append"] * 4 + ["Replicate"] * 2 + list(REQUESTS))
        messages = [message.SerializeToString() for message in getattr(self, f"_{method.lower()}")()]
        for _ in range(rng.choice([0, 1, 1, 2, 4])):
            messages = self._reordered(messages) if rng.random() < 0.5 else self._mutated(messages)
        metadata: tuple[tuple[str, str | bytes], ...] = ()
        if rng.random() < 0.1:
            metadata = (("x-noise-bin", rng.randbytes(rng.choice([10, 5000, 100_000]))), ("authorization", "Bearer x"))
        return Case(method, tuple(messages), closed=rng.random() < 0.85, metadata=metadata)

    def _reordered(self, messages: list[bytes]) -> list[bytes]:
        """Drop, repeat, swap or add whole messages."""
        rng = self._rng
        result = list(messages)
        match rng.randrange(5):
            case 0 if result:
                del result[rng.randrange(len(result))]
            case 1 if result:
                result.insert(rng.randrange(len(result) + 1), rng.choice(result))
            case 2:
                rng.shuffle(result)
            case 3:
                result.append(pb.AppendRequest(content=b"after the end").SerializeToString())
            case _:
                result.append(b"")
        return result

    def _mutated(self, messages: list[bytes]) -> list[bytes]:
        """Change the bytes of one message."""
        rng = self._rng
        if not messages:
            return [rng.randbytes(rng.randrange(40))]
        result = list(messages)
        index = rng.randrange(len(result))
        data = bytearray(result[index])
        match rng.randrange(7):
            case 0 if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1 if data:
                del data[rng.randrange(len(data)) :]
            case 2:
                begin = rng.randrange(len(data) + 1)
                data[begin:begin] = rng.randbytes(rng.randrange(1, 20))
            case 3:
                data = bytearray(rng.randbytes(rng.randrange(60)))
            case 4:
                # A string that is not UTF-8, as `journal` of most requests.
                data += bytes([0x12, 4]) + b"\xff\xfe\xfd\xfc"
            case 5 if rng.random() < 0.2:
                data += bytes([0x22]) + _varint(MAX_MESSAGE) + bytes(MAX_MESSAGE)
            case _:
                data += b"\x0b" * rng.randrange(1, 200)  # Groups that begin and never end.
        result[index] = bytes(data)
        return result

    def _journal(self) -> str:
        return self._rng.choice(
            [J, J, J, OTHER, "no/such/journal", "", "x", "a//b", "/a/b/c", "has space/j", "é" * 400]
        )

    def _labels(self) -> pb.LabelSet:
        rng = self._rng
        names = ["aa", "bb", "", "has space", "é", "x" * 100]
        count = rng.choice([0, 1, 1, 2, 50])
        return pb.LabelSet(labels=[pb.Label(name=rng.choice(names), value=rng.choice(["", "1"])) for _ in range(count)])

    def _number(self) -> int:
        return self._rng.choice([0, 0, 0, 1, 5, -1, -2, 1 << 40, (1 << 63) - 1, -(1 << 63)])

    def _append(self) -> list[Message]:
        rng = self._rng
        first = pb.AppendRequest(journal=self._journal(), offset=self._number())
        if rng.random() < 0.3:
            first.check_registers.include.CopyFrom(self._labels())
        if rng.random() < 0.3:
            first.union_registers.CopyFrom(self._labels())
        if rng.random() < 0.2:
            first.header.CopyFrom(self._some_header())
        contents = [pb.AppendRequest(content=rng.randbytes(rng.choice([1, 10, 3000]))) for _ in range(rng.randrange(3))]
        return [first, *contents, pb.AppendRequest()]

    def _replicate(self) -> list[Message]:
        rng = self._rng
        begin = rng.choice([0, 6, 10])
        proposal = pb.Fragment(journal=self._journal(), begin=begin, end=max(begin, self._number()))
        proposal.compression_codec = rng.choice([pb.NONE, pb.GZIP, pb.INVALID])
        first = pb.ReplicateRequest(proposal=proposal, acknowledge=True, deprecated_journal=proposal.journal)
        first.header.CopyFrom(self._some_header())
        first.registers.CopyFrom(self._labels())
        delta = pb.ReplicateRequest(content=b"never", content_delta=self._number())
        return [first, delta, pb.ReplicateRequest(proposal=proposal, acknowledge=True)][: rng.randrange(4)]

    def _read(self) -> list[Message]:
        rng = self._rng
        request = pb.ReadRequest(journal=self._journal(), offset=self._number(), block=rng.random() < 0.3)
        request.end_offset, request.begin_mod_time = self._number(), self._number()
        request.metadata_only, request.do_not_proxy = rng.random() < 0.3, rng.random() < 0.3
        if rng.random() < 0.1:
            request.min_etcd_revision = self._number()
        return [request]

    def _list(self) -> list[Message]:
        request = pb.ListRequest(watch=self._rng.random() < 0.3)
        request.selector.include.CopyFrom(self._labels())
        request.selector.exclude.CopyFrom(self._labels())
        return [request]

    def _apply(self) -> list[Message]:
        """Changes of other journals than those that are looked at."""
        rng = self._rng
        spec = pb.JournalSpec(
            name=rng.choice(["fuzz/journal", "fuzz//journal", "", "é"]), replication=self._number() % 7
        )
        spec.labels.CopyFrom(self._labels())
        spec.fragment.length = self._number()
        spec.fragment.compression_codec = rng.choice([pb.NONE, pb.SNAPPY, pb.INVALID])
        spec.fragment.refresh_interval.seconds = rng.choice([0, 1, 300, -5])
        spec.fragment.stores.extend(rng.choice([[], ["file:///frags/"], ["nonsense://"], ["s3://b"], ["file:///x"]]))
        spec.flags = rng.choice([0, 1, 4, 99])
        change = pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=rng.choice([0, 7, -1, -2]))
        if rng.random() < 0.2:
            change = pb.ApplyRequest.Change(delete="fuzz/journal", expect_mod_revision=rng.choice([0, 7, -1]))
        return [pb.ApplyRequest(changes=[change] * rng.choice([1, 1, 2, 200]))]

    def _listfragments(self) -> list[Message]:
        request = pb.FragmentsRequest(journal=self._journal(), page_limit=self._number() % 5000 - 100)
        request.begin_mod_time, request.end_mod_time, request.next_page_token = (self._number() for _ in range(3))
        request.signatureTTL.seconds = self._rng.choice([0, 5, -5])
        return [request]

    def _fragmentstorehealth(self) -> list[Message]:
        stores = ["file:///frags/", "file:///../up/", "nonsense", "", "s3://bucket/", "file:///a?b=c"]
        return [pb.FragmentStoreHealthRequest(fragment_store=self._rng.choice(stores))]

    def _some_header(self) -> pb.Header:
        header = pb.Header()
        header.CopyFrom(self._header)
        match self._rng.randrange(4):
            case 0:
                header.etcd.cluster_id += 1
            case 1:
                header.process_id.CopyFrom(pb.ProcessSpec.ID(zone="else", suffix="where"))
            case 2:
                header.Clear()
            case _:
                header.route.CopyFrom(pb.Route(primary=-1))
        return header


def _varint(value: int) -> bytes:
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*result, value])


def committed_by(case: Case) -> bytes | None:
    """What an append stream commits to J if its preconditions hold; None when it is not a whole, valid append."""
    requests = []
    for data in case.messages:
        try:
            requests.append(pb.AppendRequest.FromString(data))
        except DecodeError:
            return None
    if case.method != "Append" or not case.closed or len(requests) < 2:
        return None
    first, *contents, last = requests
    try:
        validate(first)
    except InvalidInput:
        return None
    whole = first.journal.partition(";")[0] == J and last == pb.AppendRequest()
    only_content = all(each == pb.AppendRequest(content=each.content) and each.content for each in contents)
    return b"".join(each.content for each in contents) if whole and only_content else None


class Target:
    """The broker under fire, and what its journal must hold."""

    def __init__(self, child: BrokerChild, client: RawClient, endpoint: str) -> None:
        self.child = child
        self.client = client
        self.content = b""
        self.registers = pb.LabelSet()
        self._channel = grpc.aio.insecure_channel(
            endpoint.removeprefix("http://"),
            options=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)],
        )

    async def close(self) -> None:
        await self._channel.close()
        await self.client.close()

    def open(self, case: Case) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        method = self._channel.stream_stream(f"/protocol.Journal/{case.method}")
        call: grpc.aio.StreamStreamCall[bytes, bytes] = method(metadata=case.metadata or None)
        return call

    async def send(self, case: Case) -> Outcome:
        """Send a stream, and return how it ended, or was ended after a while."""
        call = self.open(case)
        responses: list[bytes] = []

        async def read() -> None:
            while (response := await call.read()) is not grpc.aio.EOF:
                responses.append(response)

        async def write() -> None:
            for message in case.messages:
                await call.write(message)
            if case.closed:
                await call.done_writing()

        reading = asyncio.gather(read(), write(), return_exceptions=True)
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                await asyncio.shield(reading)
                code: grpc.StatusCode | None = await call.code()
        except TimeoutError:
            call.cancel()
            code = None
        await reading
        details = await call.details() or ""
        if code is Code.INTERNAL and details == "Internal error from Core":
            code = None  # gRPC's client, when it still sends to a call that the broker has ended already.
        return Outcome(code, details, tuple(responses))

    async def check_content(self) -> None:
        """The journal is as it was, and takes an append at once."""
        assert await self.client.content(J) == self.content
        async with asyncio.timeout(20):
            barrier = await self.client.append(J)
        assert (barrier.status, barrier.commit.begin) == (pb.OK, len(self.content))
        assert barrier.registers == self.registers

    async def at_rest(self) -> dict[str, float]:
        """Metrics once no call is under way."""

        def rests() -> bool:
            return not any(value for name, value in self.child.metrics().items() if name.startswith("coranto_calls{"))

        await eventually(rests, 30)
        return self.child.metrics()


@pytest.fixture
async def target(broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path) -> AsyncIterator[Target]:
    child = BrokerChild(broker_settings.model_copy(update={"metrics_port": 0}), tmp_path / "broker.log")
    child.start()
    try:
        client = await child.client()
        target = Target(child, client, str((await child.ready())["endpoint"]))
        for name in (J, OTHER):
            await create(client, spec(name))
        registers = labels.label_set(owner="me")
        assert (await client.append(J, b"before", union_registers=registers)).status == pb.OK
        target.content, target.registers = b"before", registers
        yield target
        await target.close()
        assert child.process.poll() is None
    finally:
        child.close()


@pytest.mark.parametrize("seed", SEEDS)
async def test_fuzzed_streams_are_refused_and_change_nothing(target: Target, seed: int) -> None:
    header = (await target.client.listing())[0].header
    cases = Cases(seed, header)
    before = await target.at_rest()
    refused = 0
    for number in range(CASES):
        case = cases.next()
        where = f"CORANTO_FUZZ_SEED={seed}, case {number}: {case}"
        outcome = await target.send(case)
        assert outcome.code in REFUSALS | {Code.OK, None}, f"{where}: {outcome.code} {outcome.details}"
        refused += outcome.code in REFUSALS
        for response in outcome.responses if case.method == "Append" and outcome.code is Code.OK else ():
            answer = pb.AppendResponse.FromString(response)
            if answer.status == pb.OK and answer.commit.end > answer.commit.begin and answer.commit.journal == J:
                content = committed_by(case)
                assert content, f"{where}: committed what is not a valid append"
                assert answer.commit.begin == len(target.content), where
                target.content += content
                target.registers = answer.registers
        if number % 25 == 24:
            try:
                await target.check_content()
            except AssertionError as error:
                raise AssertionError(f"after {where}") from error
    assert refused > CASES / 4
    await target.check_content()
    await none_leaked(target, before)
    assert "Traceback" not in target.child.log(), target.child.log()


async def test_a_thousand_half_open_streams_hold_nothing_once_they_are_gone(target: Target) -> None:
    before = await target.at_rest()
    append = pb.AppendRequest(journal=OTHER).SerializeToString()
    read = pb.ReadRequest(journal=J, offset=6, block=True).SerializeToString()
    kinds = [
        Case("Append", ()),
        Case("Append", (append,)),
        Case("Append", (append, pb.AppendRequest(content=b"x" * 1000).SerializeToString())),
        Case("Replicate", ()),
        Case("Read", (read,)),
    ]
    calls = []
    for case in kinds * 250:
        call = target.open(case)
        for message in case.messages:
            await call.write(message)
        if case.method == "Read":
            await call.done_writing()
        calls.append(call)
    await eventually(
        lambda: sum(v for name, v in target.child.metrics().items() if name.startswith("coranto_calls{")) > 1000, 30
    )
    # Another journal is served meanwhile, and memory is bounded.
    assert (await target.client.append(J, b", more")).status == pb.OK
    target.content += b", more"
    during = target.child.metrics()
    assert during["process_resident_memory_bytes"] < before["process_resident_memory_bytes"] + (200 << 20)
    for call in calls:
        call.cancel()
    await asyncio.gather(*(call.code() for call in calls))
    await none_leaked(target, before)
    await target.check_content()
    assert (await target.client.append(OTHER, b"first")).commit.begin == 0


async def test_connections_that_are_not_grpc(target: Target) -> None:
    before = await target.at_rest()
    address = str((await target.child.ready())["endpoint"]).removeprefix("http://")
    host, _, port = address.rpartition(":")
    rng = random.Random(7)
    connections = []
    for number in range(200):
        reader, writer = await asyncio.open_connection(host, int(port))
        if number % 2:
            writer.write(
                rng.choice([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b""]) + rng.randbytes(200)
            )
        connections.append((reader, writer))
    await target.check_content()
    for _, writer in connections:
        writer.transport.abort()
    await none_leaked(target, before)


async def none_leaked(target: Target, before: dict[str, float]) -> None:
    """Tasks and files are as many as before, and memory is not much more."""
    after = await target.at_rest()

    def settled() -> bool:
        nonlocal after
        after = target.child.metrics()
        # Journals that a valid change happened to create have tasks and files of their own.
        spare = 5 + 4 * (after["coranto_journals"] - before["coranto_journals"])
        return all(after[name] <= before[name] + spare for name in ("coranto_tasks", "process_open_fds"))

    try:
        await eventually(settled, 20)
    except TimeoutError:
        kept = {name: (before[name], after[name]) for name in ("coranto_tasks", "process_open_fds")}
        raise AssertionError(f"leaked: {kept}") from None
    grown = after["process_resident_memory_bytes"] - before["process_resident_memory_bytes"]
    assert grown < 100 << 20, f"{grown / (1 << 20):.0f} MiB more memory is in use than before"
