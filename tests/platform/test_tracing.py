"""Spans of OpenTelemetry: none without a provider, and the SDK configured by the environment for processes."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import coranto.tracing
from coranto.client import JournalClient
from coranto.errors import InvalidInput, Unavailable
from coranto.testing import Cluster, SyncCluster
from coranto.tracing import Tracer, TraceSpan, carried, export, tracer
from tests.spans import Spans, recorded_spans

CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

BLOCKED = """
import asyncio, importlib.abc, sys

asked = []

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {package!r} or name.startswith({package!r} + "."):
            asked.append(name)
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""
USE = """
import coranto_consumers.runtime.primary, coranto_consumers.spark.consumer.progress
from coranto.client.publishing import publisher
from coranto.messages import JsonLines
from coranto.testing import Cluster, SyncCluster

async def main():
    async with Cluster(brokers=3) as cluster:
        await cluster.create("test/journal", replication=3)
        client = cluster.client()
        await client.append("test/journal", b"{}\\n")
        async with publisher(client, JsonLines()) as publishing:
            await publishing.publish("test/journal", {"a": 1})
        async for chunk in client.read("test/journal", 0, end_offset=3):
            print(len(chunk.content))

asyncio.run(main())
print(asked, [name for name in sys.modules if name.startswith("opentelemetry")])
"""


@pytest.fixture
def spans() -> Iterator[Spans]:
    with recorded_spans() as spans:
        yield spans


def the_tracer() -> Tracer:
    found = tracer()
    assert found is not None
    return found


def program(source: str, package: str) -> subprocess.CompletedProcess[str]:
    """Run a program that cannot import a package."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKED.format(package=package) + source], capture_output=True, text=True, timeout=240
    )


def test_opentelemetry_is_not_imported_without_a_provider() -> None:
    found = program(USE, "opentelemetry")
    assert found.stdout.splitlines() == ["3", "[] []"], found.stderr


async def test_an_append_without_traces_calls_no_function_of_the_tracing_module() -> None:
    """A function of the module that ran for each append would be listed here."""
    calls: list[str] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename == coranto.tracing.__file__:
            calls.append(frame.f_code.co_name)

    async def use(client: JournalClient) -> None:
        await asyncio.gather(*(client.append("test/journal", b"x") for _ in range(100)))
        async with client.appender("test/journal") as append:
            await append.write(b"y" * 300_000)
            await append.commit()

    async def profiled(brokers: int) -> list[str]:
        async with Cluster(brokers=brokers) as cluster:
            await cluster.create("test/journal", replication=brokers)
            client = cluster.client()
            await client.append("test/journal", b"x")
            calls.clear()
            sys.setprofile(profile)
            try:
                await use(client)
            finally:
                sys.setprofile(None)
            return sorted(set(calls))

    for brokers in (1, 3):
        assert set(await profiled(brokers)) <= {"carried"}, "only separate calls may carry metadata"
    with recorded_spans():
        assert {"span", "continued", "end"} <= set(await profiled(3))


def test_blocking_calls_are_inside_the_span_of_their_thread(spans: Spans) -> None:
    with SyncCluster(brokers=1) as cluster:
        cluster.create("test/journal")
        client = cluster.client()
        with trace.get_tracer("user").start_as_current_span("user"):
            client.append("test/journal", b"x")
            with client.appender("test/journal") as append:
                append.write(b"y")
                append.commit()
            with contextlib.suppress(KeyError), client.appender("test/journal") as append:
                append.write(b"z")
                raise KeyError
            assert b"".join(chunk.content for chunk in client.read("test/journal", 0, end_offset=2)) == b"xy"
    (user,) = spans.named("user")
    inside = spans.within(user)
    assert [span.name.partition(" ")[0] for span in inside] == ["append", "append", "append", "read"]
    assert [span.attributes.get("coranto.begin") for span in inside] == [0, 1, None, 0]
    assert [span.attributes.get("error.type") for span in inside] == [None, None, "KeyError", None]


def test_there_is_a_tracer_only_with_a_provider_that_is_not_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracer() is None
    with recorded_spans():
        assert tracer() is not None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider())
    assert tracer() is None
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert tracer() is None


def test_errors_are_recorded_without_texts_that_may_quote_rows(spans: Spans) -> None:
    def ended(error: BaseException, **given: str) -> tuple[str, str | None, object]:
        with pytest.raises(type(error)), the_tracer().span(given.pop("operation", "read"), "a/b", **given):
            raise error
        span = spans.all[-1]
        return span.status.status_code.name, span.status.description, span.attributes.get("error.type")

    assert ended(Unavailable("no broker")) == ("ERROR", "no broker", "Unavailable")
    assert ended(ValueError("a secret")) == ("ERROR", "", "ValueError")
    assert ended(Unavailable("a secret"), consumer="sums") == ("ERROR", "", "Unavailable")
    assert ended(Unavailable("a secret"), operation="publish") == ("ERROR", "", "Unavailable")
    assert ended(asyncio.CancelledError()) == ("UNSET", None, None)
    assert spans.all[-1].attributes["coranto.status"] == "cancelled"
    assert not any(span.events for span in spans.all)


def test_only_a_valid_context_of_a_sampled_caller_is_continued(spans: Spans) -> None:
    for refused in ("", "x", CONTEXT[:-2] + "00", CONTEXT.replace("0af7", "xxxx"), f"00-{'0' * 32}-{'0' * 16}-01"):
        assert the_tracer().continued("read", "a/b", refused) is None
    assert the_tracer().continued("read", "a/b", CONTEXT + "-" + "x" * 10_000) is None
    found = the_tracer().continued("read", "a/b", CONTEXT)
    assert isinstance(found, TraceSpan)
    assert found.traceparent.split("-")[1] == CONTEXT.split("-")[1]
    found.end()
    found.end(Unavailable("too late"))
    assert spans.all[0].parent.span_id == 0xB7AD6B7169203331
    assert spans.all[0].status.is_unset
    assert carried(None, None) is None
    assert carried((("authorization", "x"),), found) == (("authorization", "x"), ("traceparent", found.traceparent))


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "the exporter zipkin is not installed"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "the exporter otlp_proto_grpc is not installed"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"}, "the exporter otlp with smoke is not installed"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "-1"}, "the exporter otlp_proto_http cannot start: max_queue_size must be"),
    ],
)
def test_an_invalid_export_setting_is_explained(
    environment: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match=problem) as found:
        export("coranto-broker")
    assert found.value.field == "traces"
    assert tracer() is None


def test_a_missing_sdk_is_reported() -> None:
    found = program("from coranto.tracing import export\nexport('coranto-broker')", "opentelemetry.sdk")
    assert "traces: opentelemetry.sdk is not installed" in found.stderr
    command = "import sys; sys.argv = ['x', 'serve', '--traces']; from coranto_broker.server.cli import app; app()"
    found = program(command, "opentelemetry.sdk")
    assert (found.returncode, "pip install 'coranto[traces]'" in found.stderr) == (2, True), found.stderr


@pytest.mark.parametrize("name", ["OTEL_SDK_DISABLED=true", "OTEL_TRACES_EXPORTER=none"])
def test_the_environment_turns_the_export_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*name.split("="))
    export("coranto-broker")
    assert tracer() is None


def test_a_provider_of_the_program_is_kept(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    export("coranto-broker")
    assert trace.get_tracer_provider() is spans.provider
