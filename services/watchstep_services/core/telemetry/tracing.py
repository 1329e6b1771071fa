"""Traces from a recorder's announcement to the stop that followed: OpenTelemetry, where it is installed and asked for.

A trace is carried from one process to the next as W3C's ``traceparent``: in the announcement's header, and from then on in
rows of the database, which outlive every message. Without ``OTEL_EXPORTER_OTLP_ENDPOINT`` nothing is imported, kept or sent.
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Span, Tracer, TracerProvider

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
TRACEPARENT = "traceparent"
MAX_LINKS = 32

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
        held, _started = _started, None
    if held is not None and held[0] == os.getpid():
        held[1].shutdown()


def checked(traceparent: str | None) -> str:
    """A ``traceparent`` that came from outside; empty where it is none, or nothing is traced."""
    return traceparent if traceparent and _tracer() is not None and _FORM.fullmatch(traceparent) else ""


def current() -> str:
    """The ``traceparent`` of what is being done; empty for none."""
    return _current.get()


def current_trace_id() -> str:
    """The trace of what is being done, 32 digits; empty for none."""
    return _current.get()[3:35]


@contextmanager
def span(
    name: str,
    parent: str = "",
    attributes: Mapping[str, str | int] | None = None,
    *,
    links: Sequence[str] = (),
    began_ns: int | None = None,
) -> Iterator[Spanned]:
    """A span around a block; all that is done in it belongs to it. Costs nothing where nothing is traced.

    Args:
        name: of few values.
        parent: a ``traceparent``; what is being done now, where empty.
        attributes: of any value.
        links: other traces that led here.
        began_ns: where it began before the block, nanoseconds since the epoch.
    """
    tracer = _tracer()
    if tracer is None:
        yield Spanned(None)
        return
    held = _begin(tracer, name, parent or current(), attributes or {}, (links, began_ns or time.time_ns()))
    spanned = Spanned(held)
    token = _current.set(_written(held))
    try:
        yield spanned
    except BaseException as error:
        held.record_exception(error)
        _fail(held, f"{type(error).__name__}: {error}")
        raise
    finally:
        _current.reset(token)
        if not spanned.dropped:
            held.end()


class Spanned:
    """What a block may say of its span."""

    def __init__(self, held: Span | None) -> None:
        self._held = held
        self.dropped = False

    def say(self, **attributes: str | int) -> None:
        """Add attributes."""
        if self._held is not None:
            self._held.set_attributes(_named(attributes))

    def fail(self, why: str) -> None:
        """Mark it as failed."""
        if self._held is not None:
            _fail(self._held, why)

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
    held = _started
    if held is None or held[0] != os.getpid():
        return None
    tracer: Any = held[1].get_tracer("watchstep")
    return tracer  # type: ignore[no-any-return]


def _begin(
    tracer: Tracer,
    name: str,
    parent: str,
    attributes: Mapping[str, str | int],
    more: tuple[Sequence[str], int],
) -> Span:
    from opentelemetry import trace

    links, began_ns = more
    held: Any = tracer.start_span(
        name,
        context=_context(parent),
        kind=trace.SpanKind.INTERNAL,
        attributes=_named(attributes),
        links=[
            trace.Link(trace.get_current_span(_context(link)).get_span_context())
            for link in list(dict.fromkeys(links))[:MAX_LINKS]
            if _FORM.fullmatch(link)
        ],
        start_time=began_ns,
    )
    return held  # type: ignore[no-any-return]


def _context(traceparent: str) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    # Not what some library made current, but what was handed over.
    return TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent}, Context())


def _written(held: Span) -> str:
    context = held.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _named(attributes: Mapping[str, str | int]) -> dict[str, str | int]:
    return {f"watchstep.{name}": value for name, value in attributes.items()}


def _fail(held: Span, why: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    held.set_status(Status(StatusCode.ERROR, why[:500]))
