"""OpenTelemetry spans, for programs that have set a tracer provider. Other programs do not import OpenTelemetry.

Clients, brokers and consumers get a `Tracer` when they are created. If it is None, tracing costs only a comparison. A
broker continues the traces of its callers, and starts a trace only for a stored fragment. So the caller's sampler
decides, and a call outside a sampled span carries no context.

Attribute names follow OpenTelemetry's messaging conventions, or begin with `coranto.`. No attribute has content.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Iterable
from contextlib import AbstractContextManager
from importlib.metadata import EntryPoint, entry_points
from types import TracebackType
from typing import Any, Final, TypeVar

from coranto.errors import CorantoError, InvalidInput

KEY: Final = "traceparent"
"""The key of a span's context in the metadata of a call, as W3C's Trace Context names it."""

_MAX_CONTEXT: Final = 256
_TYPES: Final = {"append": "send", "publish": "send", "read": "receive", "transaction": "process"}
"""The operation types of the messaging conventions, by operation."""

T = TypeVar("T")

_OTLP: Final = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
"""The names of OTLP's exporters, by protocol."""
_INSTALL: Final = "pip install 'coranto[traces]'"


class TraceSpan:
    """An open span. A `with` block ends it, with the block's error if there is one."""

    __slots__ = ("_api", "_hides_errors", "_span", "traceparent")

    def __init__(self, api: Any, span: Any, *, hides_errors: bool = False) -> None:
        """`api` is the module `opentelemetry.trace`. With `hides_errors`, only the types of errors are recorded."""
        self._api = api
        self._span = span
        self._hides_errors = hides_errors
        context = span.get_span_context()
        self.traceparent = (
            f"00-{context.trace_id:032x}-{context.span_id:016x}-01" if context.trace_flags.sampled else ""
        )
        """The context for other processes; empty if the span is not sampled."""

    def __enter__(self) -> TraceSpan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(error)

    def current(self) -> AbstractContextManager[object]:
        """Return a context manager. Spans that begin within it are children of this span."""
        found: AbstractContextManager[object] = self._api.use_span(
            self._span, record_exception=False, set_status_on_exception=False
        )
        return found

    async def around(self, work: Awaitable[T]) -> T:
        """Await work within `current`."""
        with self.current():
            return await work

    def link(self, other: TraceSpan) -> None:
        """Link to a span that this one depends on. Does nothing once this one has ended."""
        if self._span.is_recording():
            self._span.add_link(other._span.get_span_context())

    def note(self, **facts: bool | int | float | str) -> None:
        """Set attributes, whose names get the prefix `coranto.`. Does nothing once the span has ended."""
        if self._span.is_recording():
            self._span.set_attributes({f"coranto.{name}": value for name, value in facts.items()})

    def end(
        self, error: BaseException | None = None, *, at: int | None = None, **facts: bool | int | float | str
    ) -> None:
        """End the span, at a time in nanoseconds if given. Does nothing once it has ended.

        An error is recorded by its type and, if it is Coranto's, its text. A cancellation is not an error.
        """
        if not self._span.is_recording():
            return
        self.note(**facts)
        if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            self.note(status="cancelled")
        elif error is not None:
            self._span.set_attribute("error.type", type(error).__qualname__)
            text = error.public_text if isinstance(error, CorantoError) and not self._hides_errors else ""
            self._span.set_status(self._api.Status(self._api.StatusCode.ERROR, text))
        self._span.end(at)


class Tracer:
    """Begins spans."""

    def __init__(self, api: Any, tracer: Any) -> None:
        """`api` is the module `opentelemetry.trace`, and `tracer` one of its tracers."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = api
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    def span(
        self,
        operation: str,
        journal: str = "",
        kind: str = "INTERNAL",
        *,
        consumer: str = "",
        within: TraceSpan | None = None,
        is_root: bool = False,
        links: Iterable[TraceSpan] = (),
        begun: int | None = None,
        **facts: bool | int | float | str,
    ) -> TraceSpan:
        """Begin a span of an operation on a journal, or of a consumer.

        Its parent is `within`, or by default the current span unless `is_root`. `kind` is a SpanKind of OpenTelemetry.
        `begun` is its start time in nanoseconds; by default now. Error texts of consumers and publishers are not
        recorded, because they may quote values of rows.
        """
        api = self._api
        context = None
        if within is not None or is_root:
            context = api.set_span_in_context(api.INVALID_SPAN if within is None else within._span)
        span = self._tracer.start_span(
            f"{operation} {journal or consumer}",
            context,
            api.SpanKind[kind],
            _attributes(operation, journal, consumer, facts),
            [api.Link(each._span.get_span_context()) for each in links],
            begun,
        )
        return TraceSpan(api, span, hides_errors=bool(consumer) or operation == "publish")

    def continued(self, operation: str, journal: str, traceparent: str) -> TraceSpan | None:
        """Begin the server's span of a call. None without a valid context, or if the caller's span is not sampled."""
        if not traceparent or len(traceparent) > _MAX_CONTEXT:
            return None
        context = self._propagator.extract({KEY: traceparent})
        if not self._api.get_current_span(context).get_span_context().trace_flags.sampled:
            return None
        kind, attributes = self._api.SpanKind.SERVER, _attributes(operation, journal, "", {})
        return TraceSpan(self._api, self._tracer.start_span(f"{operation} {journal}", context, kind, attributes))


def _attributes(
    operation: str, journal: str, consumer: str, facts: dict[str, bool | int | float | str]
) -> dict[str, bool | int | float | str]:
    found: dict[str, bool | int | float | str] = {"messaging.system": "coranto", "messaging.operation.name": operation}
    if operation in _TYPES:
        found["messaging.operation.type"] = _TYPES[operation]
    if journal:
        found["messaging.destination.name"] = journal
    if consumer:
        found["messaging.consumer.group.name"] = consumer
    return found | {f"coranto.{name}": value for name, value in facts.items()}


def tracer() -> Tracer | None:
    """Return a tracer if this program has set a tracer provider that is not disabled. Imports nothing otherwise."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None or isinstance(api.get_tracer_provider(), api.ProxyTracerProvider):
        return None
    found = api.get_tracer("coranto")
    return None if isinstance(found, api.NoOpTracer) else Tracer(api, found)


def carried(metadata: tuple[tuple[str, str], ...] | None, span: TraceSpan | None) -> tuple[tuple[str, str], ...] | None:
    """Return the metadata of a call with the context of a sampled span."""
    if span is None or not span.traceparent:
        return metadata
    return (*(metadata or ()), (KEY, span.traceparent))


def carried_by(call: Any) -> str:
    """Return the context in the metadata of a received call; empty without one."""
    found = (value for name, value in call.invocation_metadata() or () if name == KEY)
    value = next(found, "")
    return value if isinstance(value, str) else ""


def export(service: str, instance: str = "") -> None:
    """Set the SDK's tracer provider, with the exporters, sampler and resource of the OTEL_* environment variables.

    Defaults: the resource has `service` and `instance`, and the exporter is `otlp`. Does nothing if a provider
    is set, or the environment disables traces. Raises InvalidInput if a package is missing or an exporter cannot start.
    """
    names = [each.strip() for each in os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",")]
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_disabled or names == ["none"] or tracer() is not None:
        return
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"{error.name} is not installed; it comes with an extra: {_INSTALL}", field="traces"
        ) from error
    facts = {"service.name": service} | ({"service.instance.id": instance} if instance else {})
    provider = TracerProvider(resource=Resource.create(facts).merge(OTELResourceDetector().detect()))
    for name in names:
        found = _exporter(name)
        try:
            provider.add_span_processor(BatchSpanProcessor(found.load()()))
        except Exception as error:
            raise InvalidInput(f"the exporter {found.name} cannot start: {error}", field="traces") from error
    trace.set_tracer_provider(provider)


def _exporter(name: str) -> EntryPoint:
    """Return the exporter of a name in OTEL_TRACES_EXPORTER. Raises InvalidInput if it is not installed."""
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    names = [name]
    if name == "otlp":
        names = [each for key, each in _OTLP.items() if protocol in (None, key)]
    installed = {each.name: each for each in entry_points(group="opentelemetry_traces_exporter")}
    for each in names:
        if each in installed:
            return installed[each]
    wanted = " or ".join(names) or f"{name} with {protocol}"
    raise InvalidInput(f"the exporter {wanted} is not installed. For OTLP over HTTP: {_INSTALL}", field="traces")
