"""Traces of appends, reads and stored fragments: from the client through real brokers to the exporter."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from coranto.client import JournalClient
from coranto.client.append.service import AppendService
from coranto.client.publishing import publisher
from coranto.errors import CorantoError, RegisterMismatch
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_selector, label_set
from coranto.messages import JsonLines
from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.process import BrokerChild
from tests.broker.running import GRACE_SECONDS, eventually
from tests.spans import Receiver, Spans, recorded_spans

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]


@pytest.fixture
def spans() -> Iterator[Spans]:
    with recorded_spans() as spans:
        yield spans


@contextlib.asynccontextmanager
async def cluster(settings: BrokerSettings, folder: Path, count: int) -> AsyncIterator[list[BrokerProcess]]:
    async with contextlib.AsyncExitStack() as stack:
        brokers = []
        for number in range(count):
            own = {"id": f"broker-{number}", "data_dir": folder / f"data-{number}"}
            brokers.append(await stack.enter_async_context(BrokerProcess(settings.model_copy(update=own))))
            brokers[-1].grace_seconds = GRACE_SECONDS
        yield brokers


async def created(client: JournalClient, spec: pb.JournalSpec, replication: int = 1) -> None:
    """Create a journal, and make its first append, so that its route is known."""
    spec.replication = replication
    await client.apply([pb.ApplyRequest.Change(upsert=spec)])
    await client.append(spec.name, b"")


def facts(span: Any) -> dict[str, Any]:
    return {key.removeprefix("coranto."): value for key, value in span.attributes.items()}


def trees(spans: Spans, name: str) -> list[tuple[Any, ...]]:
    return [spans.tree(span) for span in spans.named(name) if span.parent is None]


async def appended(client: JournalClient, spans: Spans, expected: tuple[Any, ...]) -> bool:
    """Append, and return True if the trace is as expected. The first appends may need more steps."""
    await client.append(J, b"x")
    return trees(spans, f"append {J}")[-1] == expected


ALONE = (f"append {J} CLIENT", (f"append {J} SERVER",))
PROPOSED = (f"append {J} CLIENT", (f"append {J} SERVER", (f"commit {J} INTERNAL",)))
FORWARDED = (f"append {J} CLIENT", (f"append {J} SERVER", (f"append {J} SERVER",)))
REPLICA = (f"replicate {J} SERVER",)
PROXIED = (f"read {J} CLIENT", (f"read {J} SERVER", (f"read {J} SERVER",)))
REPLICATED = (f"append {J} CLIENT", (f"append {J} SERVER", (f"commit {J} INTERNAL", REPLICA, REPLICA)))


@pytest.mark.parametrize("size", [5, 300_000], ids=["small", "streamed"])
@pytest.mark.parametrize("over_a_stream", [True, False], ids=["stream", "call"])
async def test_an_append_is_one_trace_from_the_client_to_its_replicas(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path, spans: Spans, over_a_stream: bool, size: int
) -> None:
    async with cluster(broker_settings, tmp_path, 3) as brokers:
        async with JournalClient(brokers[0].endpoint, append_streams=over_a_stream) as client:
            await created(client, spec(J), 3)
            await client.append(J, b"x")
            # The spans of replicas may end after the answer.
            await eventually(lambda: len(spans.named(f"replicate {J}")) == 2 * len(spans.named(f"commit {J}")) > 0)
            spans.exporter.clear()
            result = await client.append(J, b"y" * size)

            def ended() -> bool:
                return len(spans.named(f"replicate {J}")) == 2 and bool(spans.named(f"append {J}"))

            await eventually(ended)
    (found,) = trees(spans, f"append {J}")
    assert found == REPLICATED  # The first append was forwarded; since then the client knows the primary.
    place = {"begin": result.begin, "end": result.end, "bytes": size}
    server, client_span = spans.named(f"append {J}")
    assert facts(client_span) == {
        "messaging.system": "coranto",
        "messaging.operation.name": "append",
        "messaging.operation.type": "send",
        "messaging.destination.name": J,
        "attempts": 1,
        **place,
    }
    assert place.items() <= facts(server).items()
    (commit,) = spans.named(f"commit {J}")
    assert facts(commit)["replicas"] == 3
    assert facts(commit)["appends"] == 1
    assert [facts(each)["end"] for each in (commit, *spans.named(f"replicate {J}"))] == [result.end] * 3
    assert [link.context.span_id for link in server.links] == [commit.context.span_id]


async def test_appends_of_a_batch_are_linked_with_their_proposal(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path, spans: Spans
) -> None:
    async with cluster(broker_settings, tmp_path, 2) as brokers:
        async with JournalClient(brokers[0].endpoint) as client:
            await created(client, spec(J), 2)
            await client.append(J, b"x")
            spans.exporter.clear()
            results = await asyncio.gather(*(client.append(J, b"y") for _ in range(50)))
    commits = {span.context.span_id: span for span in spans.named(f"commit {J}")}
    servers = [span for span in spans.named(f"append {J}") if span.kind is trace.SpanKind.SERVER]
    assert len(servers) == len({span.context.trace_id for span in servers}) == 50
    assert sum(facts(span)["appends"] for span in commits.values()) == 50
    assert len(commits) < 50, "no appends were committed together"
    for span in servers:
        (link,) = span.links
        commit = commits[link.context.span_id]
        others = {other.context.span_id for other in commit.links} | {commit.parent.span_id}
        assert span.context.span_id in others
    assert sorted(facts(span)["begin"] for span in servers) == sorted(result.begin for result in results)


async def test_one_replica_commits_without_a_proposal(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path, spans: Spans
) -> None:
    async with cluster(broker_settings, tmp_path, 1) as brokers, JournalClient(brokers[0].endpoint) as client:
        await created(client, spec(J))
        await eventually(lambda: appended(client, spans, ALONE))
        spans.exporter.clear()
        async with client.appender(J) as append:
            await append.write(b"a" * 300_000)
            await append.commit()
        assert trees(spans, f"append {J}") == [PROPOSED]
        async with client.appender(J) as append:
            await append.write(b"a")
        assert facts(spans.named(f"append {J}")[-1])["status"] == "rolled back"


async def test_a_forwarded_append_stays_in_its_trace(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path, spans: Spans
) -> None:
    async with cluster(broker_settings, tmp_path, 2) as brokers:
        async with JournalClient(brokers[0].endpoint) as client:
            await created(client, spec(J))
            route = (await client.list()).journals[0].route
            (other,) = [each for each in brokers if each.endpoint != route.endpoints[0]]
        for streams in (True, False):
            async with JournalClient(other.endpoint, append_streams=streams, route_cache=0) as client:
                await eventually(lambda: appended(client, spans, FORWARDED))
                forwarded = [facts(span)["status"] for span in spans.named(f"append {J}") if "status" in facts(span)]
                assert sorted(forwarded[-2:]) == ["OK", "forwarded"]
                async for _ in client.read(J, 0, end_offset=2):
                    pass
                await eventually(lambda: PROXIED in trees(spans, f"read {J}"))


async def test_refusals_and_errors_are_recorded(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path, spans: Spans
) -> None:
    async with cluster(broker_settings, tmp_path, 1) as brokers, JournalClient(brokers[0].endpoint) as client:
        await created(client, spec(J))
        await client.append(J, b"x", union_registers=label_set([("author", "this")]))
        spans.exporter.clear()
        with pytest.raises(RegisterMismatch):
            await client.append(J, b"x", check_registers=label_selector(include={"author": "other"}))
        server, client_span = spans.named(f"append {J}")
        assert facts(server)["status"] == "REGISTER_MISMATCH"
        assert client_span.status.status_code is trace.StatusCode.ERROR
        assert client_span.attributes["error.type"] == "RegisterMismatch"
        context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        async with grpc.aio.insecure_channel(brokers[0].endpoint.removeprefix("http://")) as channel:
            call: Any = pb_grpc.JournalStub(channel).Append(metadata=(("traceparent", context),))
            await call.write(pb.AppendRequest(journal=J))
            await call.write(pb.AppendRequest(journal=J, content=b"with parameters"))
            with pytest.raises(grpc.aio.AioRpcError):
                await call
        invalid = spans.named(f"append {J}")[-1]
        assert (invalid.attributes["error.type"], f"{invalid.parent.span_id:x}") == ("InvalidInput", "b7ad6b7169203331")
        with pytest.raises(CorantoError):
            await client.append("test/none", b"x", retry_timeout=0)
        server, client_span = spans.named("append test/none")
        assert facts(server)["status"] == "JOURNAL_NOT_FOUND"
        assert client_span.attributes["error.type"] == "JournalNotFound"


async def test_reads_publishers_and_stored_fragments(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path, spans: Spans
) -> None:
    async with cluster(broker_settings, tmp_path, 1) as brokers, JournalClient(brokers[0].endpoint) as client:
        journal = spec(J, stores=("file:///fragments/",), labels=label_set([(CONTENT_TYPE, JSON_LINES)]))
        journal.fragment.length = 1 << 10
        await created(client, journal)
        with trace.get_tracer("user").start_as_current_span("user"):
            async with publisher(client, JsonLines()) as publishing:
                for number in range(100):
                    await publishing.add(J, {"secret": number})
                await publishing.commit()
        async with AppendService(client) as service:
            for _ in range(3):
                await service.append(J, b"{}\n")
        (user,) = spans.named("user")
        assert {each.name for each in spans.within(user)} == {f"publish {J}"}
        for each in spans.within(user):
            assert spans.tree(each) == (f"publish {J} PRODUCER", ALONE) or spans.tree(each)[1][0] == PROPOSED[0]
        joined = [each for each in spans.named(f"publish {J}") if each.parent is None]
        assert len(joined) == 3
        assert [len(each.links) for each in joined] == [0, 1, 1]
        head = await client.head(J)
        content = await client.read_all(J, 0, head)
        assert len(content) == head
        await eventually(lambda: any(each.kind is trace.SpanKind.SERVER for each in spans.named(f"read {J}")))
        read = next(each for each in spans.named(f"read {J}") if each.kind is trace.SpanKind.CLIENT)
        assert {"begin": 0, "end": head}.items() <= facts(read).items()
        await eventually(lambda: spans.named(f"persist {J}"))
        stored = spans.named(f"persist {J}")[0]
        assert stored.parent is None
        assert facts(stored)["begin"] == 0
        assert facts(stored)["bytes"] == facts(stored)["end"] > 0
    assert not any("secret" in str(span.to_json()) for span in spans.all)


@pytest.mark.parametrize("over_a_stream", [True, False], ids=["stream", "call"])
async def test_an_unsampled_caller_sends_no_context(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path, over_a_stream: bool
) -> None:
    with recorded_spans() as of_broker:
        async with cluster(broker_settings, tmp_path, 1) as brokers:
            with recorded_spans(ALWAYS_OFF) as of_client:
                async with JournalClient(brokers[0].endpoint, append_streams=over_a_stream) as client:
                    await created(client, spec(J))
                    await client.append(J, b"x")
                    assert await client.read_all(J, 0, 1) == b"x"
        assert not of_broker.all
        assert not of_client.all


async def test_the_gateway_continues_the_trace_of_a_request(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path, spans: Spans
) -> None:
    context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    settings = broker_settings.model_copy(update={"http_port": 0})

    def call(url: str, method: str, content: bytes | None, traceparent: str) -> None:
        request = urllib.request.Request(url, content, {"traceparent": traceparent}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()

    async with cluster(settings, tmp_path, 1) as brokers, JournalClient(brokers[0].endpoint) as client:
        await created(client, spec(J))
        spans.exporter.clear()
        url = f"{brokers[0].http_endpoint}/{J}"
        for method, content, target in (("PUT", b"x", url), ("GET", None, f"{url}?offset=0&end_offset=1")):
            for hostile in (context, "00-0-1-01", "x" * 1000, context[:-2] + "00", context.replace("-", "_")):
                await asyncio.to_thread(call, target, method, content, hostile)
    found = [
        (each.name, f"{each.context.trace_id:x}", f"{each.parent.span_id:x}")
        for each in spans.all
        if each.kind is trace.SpanKind.SERVER
    ]
    assert all(each.status.is_unset for each in spans.all)
    assert found == [
        (f"{each} {J}", "af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331") for each in ("append", "read")
    ]


async def test_broker_processes_export_to_a_collector(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over frames, as for frequent appends and their replication."""
    with Receiver() as receiver, contextlib.ExitStack() as ends:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        children = []
        for number in range(3):
            own = {"id": f"broker-{number}", "data_dir": tmp_path / f"data-{number}", "traces": True, "metrics_port": 0}
            child = BrokerChild(broker_settings.model_copy(update=own), tmp_path / f"{number}.log")
            ends.callback(child.close)
            child.start()
            children.append(child)
        endpoints = [(await child.ready())["endpoint"] for child in children]
        async with JournalClient(endpoints[0]) as client:
            await created(client, spec(J), 3)

            def over_frames() -> bool:
                return client._dispatcher.to_primary(J).connection.append_streams.over_frames

            def replicating() -> float:
                return sum(child.metrics()['coranto_frame_connections{method="Replicate"}'] for child in children)

            async def moved() -> bool:
                for _ in range(20):
                    await client.append(J, b"x")
                return over_frames() and await asyncio.to_thread(replicating) == 2

            await eventually(moved)
            spans.exporter.clear()
            await client.append(J, b"y")
        (mine,) = spans.named(f"append {J}")

        def received() -> list[tuple[str, str, Any]]:
            trace_id = mine.context.trace_id.to_bytes(16)
            return [each for each in receiver.received if each[2].trace_id == trace_id]

        await eventually(lambda: len(received()) == 4)
    by_name: dict[str, list[Any]] = {}
    for service, instance, span in received():
        assert service == "coranto-broker"
        by_name.setdefault(span.name, []).append((instance, span))
    ((primary, server),) = by_name[f"append {J}"]
    ((proposer, commit),) = by_name[f"commit {J}"]
    assert (primary, server.span_id) == (proposer, commit.parent_span_id)
    assert server.parent_span_id == mine.context.span_id.to_bytes(8)
    replicas = by_name[f"replicate {J}"]
    assert {span.parent_span_id for _, span in replicas} == {commit.span_id}
    assert {instance for instance, _ in replicas} | {primary} == {f"local#broker-{number}" for number in range(3)}
    assert not [json.loads(line) for child in children for line in child.log().splitlines() if '"error"' in line]
