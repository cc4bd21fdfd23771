"""Hostile streams at the gRPC boundary of a broker process: right status, nothing changed, nothing leaked.

A failing case prints its seed; `CORANTO_FUZZ_SEED=<seed>` runs that one, `CORANTO_FUZZ_CASES=<n>` more of each.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError, Message

from coranto import labels
from coranto.errors import InvalidInput
from coranto.specs.validation import validate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.settings import BrokerSettings
from tests.broker.process import BrokerChild
from tests.broker.running import RawClient, create, eventually

pytestmark = pytest.mark.system

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
    Code.INVALID_ARGUMENT,  # The content of a message, or the order of messages, is invalid.
    Code.RESOURCE_EXHAUSTED,  # A message or the metadata is too long.
    Code.UNIMPLEMENTED,  # Too few or too many messages for a unary method: gRPC again.
    Code.ABORTED,  # Content arrived too slowly.
}
SILENT_SECONDS = 0.2
"""A stream without an answer in this time is waiting, for example a blocking read. The test then cancels it."""


@dataclass(frozen=True)
class Case:
    """A stream to send: messages as bytes, then closed or left half open."""

    method: str
    messages: tuple[bytes, ...]
    closed: bool = True
    metadata: tuple[tuple[str, str | bytes], ...] = ()

    def __str__(self) -> str:
        shown = [message[:200].hex() + ("…" if len(message) > 200 else "") for message in self.messages]
        return f"{self.method} {shown} closed={self.closed} metadata={[(n, len(v)) for n, v in self.metadata]}"


BARRIER = Case("Append", (pb.AppendRequest(journal=J).SerializeToString(), b""))


@dataclass(frozen=True)
class Outcome:
    """The end of a stream. `code` is None if the test cancelled it, or if the client does not know it."""

    code: grpc.StatusCode | None
    details: str
    responses: tuple[bytes, ...]


class Cases:
    """Streams from a seed: valid ones, mutated in their fields, bytes or order."""

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
                data += b"\x0b" * rng.randrange(1, 200)  # Groups without an end.
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
        """Change only journals that the test does not check."""
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
    """Return the content that an append commits to J if its preconditions hold; None if it is not whole or valid.

    It is whole if it says to commit. The broker then waits for its close, and a call that ends counts as closed.
    """
    requests = []
    for data in case.messages:
        try:
            requests.append(pb.AppendRequest.FromString(data))
        except DecodeError:
            return None
    if case.method != "Append" or len(requests) < 2:
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
    """The broker under test, and the expected content of its journal."""

    def __init__(self, children: list[BrokerChild], client: RawClient, endpoint: str) -> None:
        self._children = children
        self._endpoint = endpoint
        self.client = client
        self.content = b""
        self.registers = pb.LabelSet()
        self._channel = grpc.aio.insecure_channel(
            endpoint.removeprefix("http://"),
            options=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)],
        )

    @property
    def log(self) -> str:
        return "".join(child.log() for child in self._children)

    def open_files(self) -> list[str]:
        """Return the open files of all brokers, by the names in the system."""
        found: list[str] = []
        for child in self._children:
            for each in Path(f"/proc/{child.process.pid}/fd").iterdir():
                with suppress(OSError):
                    found.append(str(each.readlink()))
        return found

    def metrics(self) -> dict[str, float]:
        """Return the sums of metrics over all brokers."""
        total: Counter[str] = Counter()
        for child in self._children:
            assert child.process.poll() is None, child.log()
            total.update(child.metrics())
        return dict(total)

    def address(self, kind: str = "endpoint") -> tuple[str, int]:
        """Host and port of the first broker's gRPC (or with `http`, its gateway)."""
        host, _, port = str(self._children[0].events("member.ready")[-1][kind]).removeprefix("http://").rpartition(":")
        return host, int(port)

    async def close(self) -> None:
        await self._channel.close()
        await self.client.close()

    def open(self, case: Case) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        method = self._channel.stream_stream(f"/protocol.Journal/{case.method}")
        call: grpc.aio.StreamStreamCall[bytes, bytes] = method(metadata=case.metadata or None)
        return call

    async def send(self, case: Case) -> Outcome:
        """Send a stream, and return its end. Cancel it after a while."""
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
            reading.cancel()  # A task that waits to send the call's headers does not see the cancellation.
            await asyncio.wait((reading,))
            return Outcome(None, "", tuple(responses))
        details = await call.details() or ""
        if code is Code.INTERNAL and details == "Internal error from Core":
            code = None  # gRPC's client, when it still sends on a call that the broker has ended.
        return Outcome(code, details, tuple(responses))

    async def check_content(self) -> None:
        """Check that the journal is unchanged, and accepts an append without delay."""
        assert await self.client.content(J) == self.content
        async with asyncio.timeout(60):
            barrier = await self.client.append(J)
        assert (barrier.status, barrier.commit.begin) == (pb.OK, len(self.content))
        assert barrier.registers == self.registers

    async def resolve(self, content: bytes | None) -> None:
        """Determine the outcome of an abandoned call that may have committed `content`, once it has ended."""
        if not content:
            return
        await self._barrier()
        await self.at_rest()
        barrier = await self._barrier()
        assert barrier.status == pb.OK
        if barrier.commit.begin > len(self.content):
            self.content += content
            self.registers = barrier.registers

    async def _barrier(self) -> pb.AppendResponse:
        """Append nothing after all that was sent, on the same path, from connection to connection."""
        call = self.open(BARRIER)
        async with asyncio.timeout(60):
            for message in BARRIER.messages:
                await call.write(message)
            await call.done_writing()
            response = await call.read()
        assert isinstance(response, bytes)
        return pb.AppendResponse.FromString(response)

    async def at_rest(self) -> dict[str, float]:
        """Return the metrics once no call is active."""

        def rests() -> bool:
            now = self.metrics()
            calls = {name: value for name, value in now.items() if name.startswith("coranto_calls{")}
            # Pipelines keep a stream to each replica, also without appends. So do forwarding brokers.
            calls.pop('coranto_calls{method="AppendStream"}')
            replicating = calls.pop('coranto_calls{method="Replicate"}')
            return not any(calls.values()) and replicating <= now["coranto_journals"] * (len(self._children) > 1)

        await eventually(rests)
        return self.metrics()


@asynccontextmanager
async def under_fire(settings: BrokerSettings, journals: list[pb.JournalSpec], folder: Path) -> AsyncIterator[Target]:
    """Run as many brokers as the journals have replicas; streams are sent to the first."""
    async with AsyncExitStack() as stack:
        children = []
        for number in range(journals[0].replication):
            own = {"id": f"broker-{number}", "data_dir": folder / f"data-{number}", "metrics_port": 0, "http_port": 0}
            child = BrokerChild(settings.model_copy(update=own), folder / f"broker-{number}.log")
            stack.callback(child.close)
            child.start()
            children.append(child)
        clients = [await child.client() for child in children]
        target = Target(children, clients[0], str((await children[0].ready())["endpoint"]))
        for journal in journals:
            await create(target.client, journal)
        registers = labels.label_set(owner="me")
        assert (await target.client.append(J, b"before", union_registers=registers)).status == pb.OK
        target.content, target.registers = b"before", registers
        yield target
        await target.close()
        for client in clients[1:]:
            await client.close()
        assert all(child.process.poll() is None for child in children)


@pytest.fixture
async def target(broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path) -> AsyncIterator[Target]:
    async with under_fire(broker_settings, [spec(J), spec(OTHER)], tmp_path) as target:
        yield target


# The variable seed is not part of a test's name, so that all processes of one run have the same tests.
@pytest.mark.parametrize("seed", SEEDS, ids=range(len(SEEDS)))
async def test_fuzzed_streams_are_refused_and_change_nothing(target: Target, seed: int) -> None:
    await fuzz(target, seed)


async def test_fuzzed_streams_to_a_broker_that_replicates_and_proxies(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path
) -> None:
    """Of two brokers, with two replicas of each journal: about half of the appends are proxied."""
    journals = [spec(J), spec(OTHER)]
    for journal in journals:
        journal.replication = 2
    async with under_fire(broker_settings, journals, tmp_path) as target:
        await fuzz(target, SEEDS[-1])


async def fuzz(target: Target, seed: int) -> None:
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
        if outcome.code is None:
            await target.resolve(committed_by(case))
        for response in outcome.responses if case.method == "Append" and outcome.code is Code.OK else ():
            answer = pb.AppendResponse.FromString(response)
            if answer.status == pb.OK and answer.commit.end > answer.commit.begin and answer.commit.journal == J:
                content = committed_by(case)
                assert content, f"{where}: committed an invalid append"
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
    assert "Traceback" not in target.log, target.log


async def test_a_thousand_half_open_streams_leave_nothing_after_they_end(target: Target) -> None:
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
    # All but appends, which may have been cut off for being slow.
    waiting = 250 * sum(case.messages == () or case.method == "Read" for case in kinds)
    await eventually(
        lambda: sum(v for name, v in target.metrics().items() if name.startswith("coranto_calls{")) >= waiting
    )
    # Another journal is served, and memory is bounded.
    assert (await target.client.append(J, b", more")).status == pb.OK
    target.content += b", more"
    during = target.metrics()
    assert during["process_resident_memory_bytes"] < before["process_resident_memory_bytes"] + (200 << 20)
    for call in calls:
        call.cancel()
    await asyncio.gather(*(call.code() for call in calls))
    await none_leaked(target, before)
    await target.check_content()
    assert (await target.client.append(OTHER, b"first")).commit.begin == 0


@pytest.mark.parametrize("kind", ["endpoint", "http"])
async def test_connections_with_other_protocols_are_harmless(target: Target, kind: str) -> None:
    before = await target.at_rest()
    host, port = target.address(kind)
    rng = random.Random(7)
    openings = [
        b"",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        f"PUT /{J} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n".encode(),
        f"PUT /{J} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nnever\r\n".encode(),
        f"PUT /{J} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc".encode(),
        f"GET /{J}?offset=6&block=true HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
        f"GET /{J} HTTP/1.1\r\nHost: x\r\nX-Long: {'x' * 100_000}\r\n\r\n".encode(),
    ]
    connections = []
    for number in range(240):
        _, writer = await asyncio.open_connection(host, port)
        noise = rng.randbytes(200) if number % 3 else b""
        writer.write(openings[number % len(openings)] + noise.replace(b"0", b"1"))
        connections.append(writer)
    # Appends are each given up after a second or so: the next connection is served, possibly with a delay.
    assert await target.client.content(J) == target.content
    for writer in connections:
        writer.transport.abort()
    await none_leaked(target, before)
    await target.check_content()
    assert "Traceback" not in target.log, target.log


async def none_leaked(target: Target, before: dict[str, float]) -> None:
    """Check that the numbers of tasks and files are as before, and memory has not grown much."""
    after = await target.at_rest()

    def settled() -> bool:
        nonlocal after
        after = target.metrics()
        # Some files are opened at first use. Journals created by a valid change add tasks and files.
        spare = 15 + 4 * (after["coranto_journals"] - before["coranto_journals"])
        return all(after[name] <= before[name] + spare for name in ("coranto_tasks", "process_open_fds"))

    try:
        await eventually(settled)
    except TimeoutError:
        names = ("coranto_tasks", "process_open_fds", "coranto_journals")
        kept = {name: (before[name], after[name]) for name in names}
        raise AssertionError(f"leaked: {kept}; open are {sorted(target.open_files())}") from None
    grown = after["process_resident_memory_bytes"] - before["process_resident_memory_bytes"]
    assert grown < 100 << 20, f"{grown / (1 << 20):.0f} MiB more memory is in use than before"
