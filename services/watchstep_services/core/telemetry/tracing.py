"""Traces from a recorder's announcement to the stop that followed: OpenTelemetry, where it is installed and asked for.

A trace is carried from one process to the next as W3C's ``traceparent``: in the announcement's header, and from then on in
rows of the database, which outlive every message. Without ``OTEL_EXPORTER_OTLP_ENDPOINT`` nothing is imported, kept or sent.

Spans of HTTP requests follow OpenTelemetry's semantic conventions, with the attributes of these. All other attributes have the
prefix ``watchstep.``.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Span, Tracer, TracerProvider

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
TRACEPARENT = "traceparent"
MAX_LINKS = 32

SpanKind = Literal["internal", "server", "client"]
Attributes = Mapping[str, str | int]

ERROR_TYPE = "error.type"
HTTP_METHODS = frozenset(
    {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "QUERY"}
)
"""Methods that a span names; every other is `_OTHER`."""

_FORM = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}")
_current: ContextVar[str] = ContextVar("watchstep_traceparent", default="")
_lock = threading.Lock()
_started: tuple[int, TracerProvider] | None = None

_log = logging.getLogger(__name__)


def wanted() -> bool:
    """Whether traces are asked for, and can be made."""
    return any(os.environ.get(name) for name in ENDPOINTS) and _sdk_found()


def start(role: str) -> None:
    """Begin to send this process's spans, if that is wanted. Safe to repeat; call it after a fork, never before.

    Args:
        role: api, worker, scheduler or serve; ``service.name`` is ``watchstep-<role>`` unless ``OTEL_SERVICE_NAME`` says.
    """
    global _started  # noqa: PLW0603 - one per process, as are the environment and the connection behind it
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return
    if not _sdk_found():
        _log.warning(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, and nothing is traced: install watchstep[telemetry]"
        )
        return
    with _lock:
        if _started is None or _started[0] != os.getpid():
            _started = (os.getpid(), _provider(role))


def stop() -> None:
    """Send what was not sent yet, and end."""
    global _started
    with _lock:
        started, _started = _started, None
    if started is not None and started[0] == os.getpid():
        started[1].shutdown()


def checked(traceparent: str | None) -> str:
    """A ``traceparent`` that came from outside; empty where it is none, or nothing is traced."""
    return traceparent if traceparent and _tracer() is not None and _FORM.fullmatch(traceparent) else ""


def current() -> str:
    """The ``traceparent`` of what is being done; empty for none."""
    return _current.get()


def current_trace_id() -> str:
    """The trace of what is being done, 32 digits; empty for none."""
    return _current.get()[3:35]


@dataclass(frozen=True)
class RequestSpan:
    """What makes a span that of an HTTP request.

    Attributes:
        kind: server for a request that is answered, client for one that is sent.
        attributes: of OpenTelemetry's semantic conventions.
    """

    kind: Literal["server", "client"]
    attributes: Attributes


@contextmanager
def span(
    name: str,
    parent: str = "",
    attributes: Attributes | None = None,
    *,
    request: RequestSpan | None = None,
    links: Sequence[str] = (),
    began_ns: int | None = None,
) -> Iterator[Spanned]:
    """A span around a block; all that is done in it belongs to it. Costs nothing where nothing is traced.

    Args:
        name: of few values.
        parent: a ``traceparent``; what is being done now, where empty.
        attributes: of Watchstep, named without the prefix; of any value.
        request: of an HTTP request; None for internal work.
        links: other traces that led here.
        began_ns: where it began before the block, nanoseconds since the epoch.
    """
    tracer = _tracer()
    if tracer is None:
        yield Spanned(None)
        return
    kind: SpanKind = "internal" if request is None else request.kind
    given = {**(request.attributes if request else {}), **_named(attributes or {})}
    open_span = _begin(tracer, name, parent or current(), (kind, given), (links, began_ns or time.time_ns()))
    spanned = Spanned(open_span, kind)
    token = _current.set(_written(open_span))
    try:
        yield spanned
    except BaseException as error:
        spanned.raised(error)
        raise
    finally:
        _current.reset(token)
        if not spanned.dropped:
            open_span.end()


class Spanned:
    """Attributes and status of the span of a block."""

    def __init__(self, span: Span | None, kind: SpanKind = "internal") -> None:
        self._span = span
        self._kind = kind
        self._failed = False
        self.dropped = False

    def annotate(self, **attributes: str | int) -> None:
        """Add attributes of Watchstep."""
        if self._span is not None:
            self._span.set_attributes(_named(attributes))

    def describe(self, conventional: Attributes, name: str = "") -> None:
        """Add attributes of OpenTelemetry's semantic conventions, and rename the span if a name is given."""
        if self._span is not None:
            self._span.set_attributes(dict(conventional))
            if name:
                self._span.update_name(name)

    def fail(self, error_type: str, message: str = "") -> None:
        """Mark it as failed.

        Args:
            error_type: of few values: the name of an exception, a status, or a result.
            message: the status's description.
        """
        self._failed = True
        if self._span is not None:
            self._span.set_attributes({ERROR_TYPE: error_type})
            _fail(self._span, message)

    def raised(self, error: BaseException) -> None:
        """Mark it as failed by an exception. The span of a sent request keeps no message, which may quote the other side."""
        if self._span is None or (self._kind == "client" and self._failed):
            return
        message = ""
        if self._kind != "client":
            self._span.record_exception(error)
            message = f"{type(error).__name__}: {error}"
        self.fail(_qualified(type(error)), message)

    def drop(self) -> None:
        """Nothing worth telling happened: it is not sent."""
        self.dropped = True


def _sdk_found() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter") is not None
    except ModuleNotFoundError:
        return False


def _provider(role: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    import watchstep

    named = os.environ.get("OTEL_SERVICE_NAME") or f"watchstep-{role}"
    resource = Resource.create({"service.name": named, "service.version": watchstep.__version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _tracer() -> Tracer | None:
    started = _started
    if started is None or started[0] != os.getpid():
        return None
    tracer: Any = started[1].get_tracer("watchstep")
    return tracer  # type: ignore[no-any-return]


def _begin(
    tracer: Tracer,
    name: str,
    parent: str,
    described: tuple[SpanKind, Attributes],
    more: tuple[Sequence[str], int],
) -> Span:
    from opentelemetry import trace

    kind, attributes = described
    links, began_ns = more
    open_span: Any = tracer.start_span(
        name,
        context=_context(parent),
        kind=trace.SpanKind[kind.upper()],
        attributes=attributes,
        links=[
            trace.Link(trace.get_current_span(_context(link)).get_span_context())
            for link in list(dict.fromkeys(links))[:MAX_LINKS]
            if _FORM.fullmatch(link)
        ],
        start_time=began_ns,
    )
    return open_span  # type: ignore[no-any-return]


def _context(traceparent: str) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    # Not what some library made current, but what was handed over.
    return TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent}, Context())


def _written(open_span: Span) -> str:
    context = open_span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _named(attributes: Attributes) -> dict[str, str | int]:
    return {f"watchstep.{name}": value for name, value in attributes.items()}


def _qualified(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _fail(open_span: Span, why: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    open_span.set_status(Status(StatusCode.ERROR, why[:500]))
