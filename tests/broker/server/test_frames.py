"""Appends over frames to real brokers: as over gRPC, also with TLS, tokens, kills, exits and hostile clients."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from pydantic import SecretStr

from coranto import labels
from coranto.client import ClientConfig, JournalClient
from coranto.client.append.streams import AppendStreams
from coranto.cluster import processes
from coranto.effects import SystemClock
from coranto.errors import AppendOutcomeUnknown, ClusterError, CorantoError, InvalidInput, Unavailable
from coranto.security.tokens import Capability, Claims, Keys, sign
from coranto.transport.calls import FrameDialer
from coranto.transport.frames import PREFACE, FrameKind, encode_frame
from coranto.wire import protocol_pb2 as pb
from coranto.wire.append_stream_pb2 import AppendAnswers, AppendBatch, StreamedAppend
from coranto.wire.frames_pb2 import FrameEnd, FrameOpening, FramePort
from coranto_broker.server import frames as of_frames
from coranto_broker.server import process as of_process
from coranto_broker.server.frame_listener import SocketListener
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.process import BrokerChild
from tests.broker.running import GRACE_SECONDS, eventually
from tests.platform.security.files import Files, authority

J = "test/journal"
KEY = base64.b64encode(b"\x01" * 32).decode()
MakeSpec = Callable[..., pb.JournalSpec]


def streams_of(client: JournalClient) -> AppendStreams:
    return client._dispatcher.to_primary(J).connection.append_streams


async def move_to_frames(client: JournalClient) -> None:
    """Append empty content until appends go over frames."""

    async def moved() -> bool:
        await client.append(J, b"")
        return streams_of(client).over_frames

    await eventually(moved)


async def created(client: JournalClient, spec: pb.JournalSpec) -> None:
    await client.apply([pb.ApplyRequest.Change(upsert=spec)])
    await client.append(spec.name, b"")


def port_of(process: BrokerProcess) -> FramePort:
    assert process.broker.frames is not None
    return process.broker.frames


async def outcomes(client: JournalClient) -> list[object]:
    """Append in every way, then many concurrently, and return the outcomes."""
    found: list[object] = []
    epoch, author = labels.label_set(epoch="1"), labels.label_set(author="a")
    for content, options in (
        (b"first\n", {}),
        (b"second\n", {"union_registers": epoch}),
        (b"checked\n", {"check_registers": labels.label_selector(include=[("epoch", "1")])}),
        (b"refused\n", {"check_registers": labels.label_selector(include=[("epoch", "2")])}),
        (b"at 3\n", {"offset": 3}),
        (b"without\n", {"subtract_registers": epoch, "union_registers": author}),
        (b"x" * (1 << 16), {}),
        (b"y" * (1 << 20), {}),  # Too large for the stream.
        (b"", {}),
    ):
        try:
            done = await client.append(J, content, retry_timeout=0, **options)
            registers = [(each.name, each.value) for each in done.registers.labels]
            found.append((done.begin, done.end, done.sum, registers, done.durability))
        except CorantoError as error:
            found.append((type(error).__name__, str(error)))
    try:
        await client.append("no/such/journal", b"x", retry_timeout=0)
    except CorantoError as error:
        found.append((type(error).__name__, str(error)))
    many = await asyncio.gather(*(client.append(J, b"%04d\n" % number) for number in range(300)))
    found += [done.begin for done in many]
    found.append(await client.read_all(J, 0, many[-1].end))
    return found


async def test_appends_have_the_same_outcomes_over_frames_and_over_grpc(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path
) -> None:
    found = []
    for port in (0, -1):
        own = {"frame_port": port, "data_dir": tmp_path / f"data{port}"}
        settings = broker_settings.model_copy(
            update={**own, "etcd_prefix": f"{broker_settings.etcd_prefix}/frames{port}"}
        )
        async with BrokerProcess(settings) as process, JournalClient(process.endpoint) as client:
            await created(client, spec(J))
            if port < 0:
                assert process.broker.frames is None
            else:
                await move_to_frames(client)
            found.append([str(each).replace(process.endpoint, "") for each in await outcomes(client)])
            assert streams_of(client).over_frames is (port == 0)
    assert found[0] == found[1]


async def test_frames_need_the_same_certificates_and_tokens_as_grpc(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path
) -> None:
    ours, other = authority(), authority()
    held = {name: Files(tmp_path / name) for name in ("broker", "client", "stranger")}
    held["broker"].issue(ours, ours)
    held["client"].issue(ours, ours)
    held["stranger"].issue(other, ours)
    settings = broker_settings.model_copy(update={**held["broker"].settings, "auth_keys": SecretStr(KEY)})
    keys = Keys.parse(KEY)

    def bearer(seconds: float) -> str:
        now = SystemClock().now()
        return f"Bearer {sign(Claims(Capability.ALL, pb.LabelSelector(), now - 1000, now + seconds), keys)}"

    async with BrokerProcess(settings) as process:
        config = ClientConfig(process.endpoint, tls=held["client"].tls, auth=keys)
        async with JournalClient.of(config) as client:
            await created(client, spec(J))
            await move_to_frames(client)
            outcome = await outcomes(client)
            assert len(outcome) > 300
        port, metadata = port_of(process), (("authorization", bearer(60)),)

        async def first(dialer: FrameDialer, metadata: Any, port: FramePort = port) -> object:
            try:
                call = await dialer.open("AppendStream", port, metadata, AppendAnswers.FromString)
                await call.write(AppendBatch())
                return await asyncio.wait_for(call.read(), 10)
            except grpc.aio.AioRpcError as error:
                return error.code()

        good = FrameDialer("127.0.0.1", held["client"].tls)
        assert isinstance(await first(good, metadata), AppendAnswers)
        assert await first(good, None) is grpc.StatusCode.UNAUTHENTICATED
        assert await first(good, (("authorization", bearer(-900)),)) is grpc.StatusCode.UNAUTHENTICATED
        wrong = FramePort(port=port.port, key=b"another broker's")
        assert await first(good, metadata, wrong) is grpc.StatusCode.FAILED_PRECONDITION
        for refused in (FrameDialer("127.0.0.1", held["stranger"].tls), FrameDialer("127.0.0.1", None)):
            assert await first(refused, metadata) is grpc.StatusCode.UNAVAILABLE

        # Each append of a stream has its own token, which may expire before the stream ends.
        call = await good.open("AppendStream", port, metadata, AppendAnswers.FromString)
        await call.write(AppendBatch())
        await call.read()
        appends = [
            StreamedAppend(id=number, request=pb.AppendRequest(journal=J), content=b"x", authorization=given)
            for number, given in enumerate((bearer(60), bearer(-900), "Bearer garbage", ""))
        ]
        await call.write(AppendBatch(appends=appends))
        codes: dict[int, int] = {}
        while len(codes) < len(appends):
            codes |= {answer.id: answer.code for answer in (await call.read()).answers}
        refusal = grpc.StatusCode.UNAUTHENTICATED.value[0]
        assert codes == {0: 0, 1: refusal, 2: refusal, 3: 0}
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        # A client can use new certificates without delay.
        held["client"].issue(ours, ours)
        assert isinstance(await first(FrameDialer("127.0.0.1", held["client"].tls), metadata), AppendAnswers)


async def test_replication_moves_to_frames_under_load_and_continues_without_a_peer(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path
) -> None:
    """With certificates and tokens: fast appends to a journal, then a peer that breaks its connections."""
    files = Files(tmp_path / "files")
    issuer = authority()
    files.issue(issuer, issuer)
    secured = broker_settings.model_copy(update={**files.settings, "auth_keys": SecretStr(KEY)})
    async with contextlib.AsyncExitStack() as stack:
        brokers = [
            await stack.enter_async_context(
                BrokerProcess(secured.model_copy(update={"id": f"broker-{n}", "data_dir": tmp_path / f"data-{n}"}))
            )
            for n in range(3)
        ]
        for process in brokers:
            process.grace_seconds = GRACE_SECONDS
        config = ClientConfig(brokers[0].endpoint, tls=files.tls, auth=Keys.parse(KEY))
        client = await stack.enter_async_context(JournalClient.of(config))
        replicated = spec(J)
        replicated.replication = 3
        await created(client, replicated)

        def replicating() -> int:
            """Return the number of replications over frames."""
            return sum(process.replications_over_frames for process in brokers)

        content: list[bytes] = []

        async def appended() -> bool:
            content.append(b"<%d>" % len(content))
            await client.append(J, content[-1])
            return sum(len(process.broker.peers._framed) for process in brokers) == 2

        await eventually(appended)
        for _ in range(20):
            await appended()
        assert replicating() == 2
        for process in brokers:  # The connections break, and the peers report no port for some time.
            for call in list(process.broker.peers._framed):
                call.cancel()
        await eventually(lambda: replicating() == 0)
        for _ in range(20):
            content.append(b"<%d>" % len(content))
            await client.append(J, content[-1])
        found = await client.read_all(J, 0, await client.head(J))
        assert [found.count(each) for each in content] == [1] * len(content)
        # The same journal is not moved again soon.
        assert replicating() == 0


async def test_appends_stay_with_grpc_where_frames_are_blocked(broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        refusing = processes.free_port()
        async with BrokerProcess(broker_settings) as process:
            own = port_of(process)
            for port in (silent.getsockname()[1], refusing, int(process.endpoint.rpartition(":")[2])):
                process.broker.frames = FramePort(port=port, key=own.key)
                async with JournalClient(process.endpoint) as client:
                    await created(client, spec(J)) if port == silent.getsockname()[1] else await client.append(J, b"")
                    for _ in range(20):
                        await client.append(J, b"x", retry_timeout=0)
                    assert not streams_of(client).over_frames


class Hostile:
    """A connection with arbitrary frames from the test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.received = b""

    @classmethod
    async def connect(cls, port: int) -> Hostile:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def open(self, introduced: bytes) -> None:
        """Open a call, and wait until the broker has accepted it."""
        self.writer.write(introduced)
        opened = PREFACE + b"".join(encode_frame(FrameKind.OPENED, b""))
        self.received = await self.reader.readexactly(len(opened))
        assert self.received == opened

    def send(self, kind: int, payload: bytes) -> None:
        self.writer.write(len(payload).to_bytes(4, "big") + bytes([kind]) + payload)

    async def output(self) -> str:
        """Return the details of the broker's end of the call, or the empty text if it only closes."""
        received = self.received
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(30):
                while more := await self.reader.read(1 << 16):
                    received += more
        self.writer.close()
        assert received.startswith(PREFACE) or not received
        last = received[len(PREFACE) :]
        while len(last) > 5 and (length := int.from_bytes(last[:4], "big")) + 5 < len(last):
            last = last[5 + length :]
        return FrameEnd.FromString(last[5:]).details if last else ""


async def test_a_hostile_client_is_refused_and_holds_nothing(
    broker: tuple[BrokerProcess, Any], spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = broker
    port = port_of(process)
    opening = FrameOpening(method="AppendStream", key=port.key).SerializeToString()
    introduced = PREFACE + b"".join(encode_frame(FrameKind.OPENING, opening))
    batch = AppendBatch().SerializeToString()
    appends = AppendBatch(appends=[StreamedAppend(id=1)] * 2).SerializeToString()
    monkeypatch.setattr(of_frames, "LINGER_SECONDS", 0.2)
    async with JournalClient(process.endpoint) as client:
        await created(client, spec(J))
        await move_to_frames(client)
        own = process.frame_connections
        assert own == 1
        garbage = await Hostile.connect(port.port)
        garbage.writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert "connect to the gRPC endpoint" in await garbage.output()
        later = await Hostile.connect(port.port)
        later.writer.write(PREFACE[:-1] + b"\x02")
        assert "version 1 of the frame transport, the other version 2" in await later.output()
        for kind, payload, words in (
            (FrameKind.MESSAGE, batch, "the first frame must open a call"),
            (FrameKind.PING, b"", "the first frame must open a call"),
            (FrameKind.OPENING, b"\xff", "the first frame must open a call"),
            (FrameKind.OPENING, b"x" * (1 << 17), "is longer than"),
            (FrameKind.OPENING, FrameOpening(method="AppendStream").SerializeToString(), "not the broker"),
            (FrameKind.OPENING, FrameOpening(method="Apply", key=port.key).SerializeToString(), "not served"),
        ):
            hostile = await Hostile.connect(port.port)
            hostile.writer.write(PREFACE)
            hostile.send(kind, payload)
            assert words in await hostile.output(), words
        for frames, words in (
            ([(FrameKind.MESSAGE, b"\xff\xff")], "not the protobuf"),
            ([(FrameKind.PING, b"")] * 20_000, "pings and pongs"),
            ([(FrameKind.MESSAGE, appends)], "must be empty"),
            ([(FrameKind.MESSAGE, batch), (9, b"")], "is not allowed within a call"),
            ([(FrameKind.MESSAGE, batch), (FrameKind.MESSAGE, b"x" * (5 << 20))], "is longer than"),
        ):
            hostile = await Hostile.connect(port.port)
            await hostile.open(introduced)
            for kind, payload in frames:
                hostile.send(kind, payload)
            assert words in await hostile.output(), words
        # Silent connections are closed, and those above the limit immediately.
        with monkeypatch.context() as patches:
            patches.setattr(of_frames, "OPENING_SECONDS", 0.2)
            patches.setattr(of_frames, "MAX_UNOPENED", 20)
            silent = [await Hostile.connect(port.port) for _ in range(60)]
            assert await asyncio.gather(*(each.output() for each in silent)) == [""] * 60
        # A client that disconnects within a frame leaves nothing behind.
        gone = await Hostile.connect(port.port)
        await gone.open(introduced)
        gone.writer.write(b"\x00\x10\x00\x00\x02half")
        await gone.writer.drain()
        gone.writer.transport.abort()
        await eventually(lambda: process.frame_connections == own)
        assert process.broker.receive_budget.held == 0
        await client.append(J, b"still served", retry_timeout=0)
        assert streams_of(client).over_frames


async def test_a_connection_whose_certificates_cannot_be_loaded_is_closed_and_the_next_one_served() -> None:
    class Contexts:
        def get(self) -> Any:
            raise RuntimeError("unexpected")

    contexts: Any = Contexts()
    listener = SocketListener.bind("127.0.0.1", 0, contexts)
    server = of_frames.FrameServer({}, listener, max_message_bytes=1 << 20)
    port = server.start()
    try:
        for _ in range(2):
            assert await (await Hostile.connect(port.port)).output() == ""
        await eventually(lambda: server.connections == 0)
        assert server._unopened == 0
    finally:
        await server.stop(0.0)


async def test_a_taken_frame_port_is_fatal_and_an_unusable_certificate_is_not(
    broker_settings: BrokerSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = broker_settings.model_copy(update={"frame_port": taken.getsockname()[1]})
        process = BrokerProcess(settings)
        with pytest.raises(ClusterError, match="--frame-port"):
            await process.__aenter__()
        assert not hasattr(process, "membership")  # It has not joined.

    def refuse(*_: object) -> None:
        raise InvalidInput("the certificate cannot be used: EE_KEY_TOO_SMALL")

    monkeypatch.setattr(of_process, "server_contexts", refuse)
    async with BrokerProcess(broker_settings) as process:
        assert process.broker.frames is None
    assert "frames.not_served" in (output := capsys.readouterr().out)
    assert "EE_KEY_TOO_SMALL" in output


async def test_clients_that_append_cannot_exhaust_the_limits_of_replication(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(of_frames, "MAX_HELD_BYTES", 1 << 20)

    async def serve(_: object, context: Any) -> None:
        await asyncio.Event().wait()

    methods = {name: of_frames.FrameMethod(bytes, serve) for name in ("AppendStream", "Replicate")}
    server = of_frames.FrameServer(methods, SocketListener.bind("127.0.0.1", 0, None), max_message_bytes=1 << 20)
    port = server.start()

    async def opened(method: str) -> Hostile:
        hostile = await Hostile.connect(port.port)
        opening = FrameOpening(method=method, key=port.key).SerializeToString()
        await hostile.open(PREFACE + b"".join(encode_frame(FrameKind.OPENING, opening)))
        return hostile

    try:
        holding = [await opened("AppendStream") for _ in range(3)]
        replicating = await opened("Replicate")
        for each in holding:
            each.send(FrameKind.MESSAGE, b"x" * (600 << 10))
        replicating.send(FrameKind.MESSAGE, b"x" * (600 << 10))
        await eventually(lambda: server._budgets["Replicate"].held > 600 << 10 and server.under_way("AppendStream") < 3)
        assert server.under_way("Replicate") == 1
        assert "the connections hold too many unread bytes" in capsys.readouterr().out
    finally:
        await server.stop(0.0)
    for each in (*holding, replicating):
        each.writer.close()
    assert [budget.held for budget in server._budgets.values()] == [0, 0]


async def test_an_exit_answers_every_append_that_it_was_sent(broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    async with BrokerProcess(broker_settings) as process, JournalClient(process.endpoint) as client:
        await created(client, spec(J))
        await move_to_frames(client)
        done: list[str] = []

        async def append(number: int) -> None:
            while True:
                try:
                    await client.append(J, b"x", retry_timeout=0)
                    done.append("committed")
                except AppendOutcomeUnknown:
                    done.append("unknown")
                    return
                except (CorantoError, grpc.aio.AioRpcError):
                    return

        tasks = [asyncio.create_task(append(number)) for number in range(20)]
        await eventually(lambda: len(done) > 200)
        await process.exit_gracefully()
        await asyncio.gather(*tasks)
        assert "unknown" not in done
        # The client has ended its stream as requested.
        await eventually(lambda: process.frame_connections == 0)


@pytest.mark.system
async def test_nothing_acknowledged_over_frames_is_lost_by_kills(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path
) -> None:
    port = processes.free_port()
    settings = broker_settings.model_copy(update={"port": port, "lease_seconds": 120.0})
    child = BrokerChild(settings, tmp_path / "broker.log")
    child.start()
    acknowledged: dict[int, bytes] = {}
    lost: list[bytes] = []
    try:
        for life in range(3):
            await child.ready()
            async with JournalClient(f"127.0.0.1:{port}") as client:
                if life == 0:
                    await created(client, spec(J))
                await move_to_frames(client)
                if life == 2:
                    break
                goal = len(acknowledged) + 300

                async def append(writer: int, client: JournalClient = client, life: int = life) -> None:
                    for number in range(1_000_000):
                        content = b"<%d %d %d>" % (life, writer, number)
                        try:
                            acknowledged[
                                (await client.append(J, content, retry_timeout=0, retry_unknown=False)).begin
                            ] = content
                        except (AppendOutcomeUnknown, Unavailable):
                            lost.append(content)
                            return

                tasks = [asyncio.create_task(append(writer)) for writer in range(16)]
                await eventually(lambda: len(acknowledged) >= goal)  # noqa: B023
                child.end()
                await asyncio.gather(*tasks)
                child.start()
        async with JournalClient(f"127.0.0.1:{port}") as client:
            content = await client.read_all(J, 0, await client.head(J))
    finally:
        child.close()
    for begin, each in acknowledged.items():
        assert content[begin : begin + len(each)] == each
        assert content.count(each) == 1
    assert all(content.count(each) <= 1 for each in lost)
    assert len(lost) <= 2 * 16
