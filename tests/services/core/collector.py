"""A real OTLP/HTTP collector: takes spans as protobuf, and keeps them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

ANNOUNCEMENT = "POST /v1/projects/{project}/runs/{run}/announcements"
"""The span of a recorder's announcement."""


@dataclass(frozen=True)
class Received:
    """A span as it came."""

    name: str
    kind: str
    trace: str
    span: str
    parent: str
    service: str
    attributes: dict[str, str]
    links: frozenset[str]
    failed: bool
    text: str


@dataclass
class Collector:
    """Where it listens, and what it has."""

    url: str
    spans: list[Received] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def named(self, name: str) -> list[Received]:
        """Spans of a name, in the order in which they came."""
        with self.lock:
            return [span for span in self.spans if span.name == name]

    def take(self, body: bytes) -> None:
        """One export."""
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            of = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {
                        each.key: each.value.string_value or str(each.value.int_value)
                        for each in span.attributes
                    }
                    received = Received(
                        span.name, Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(), span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
                        of["service.name"], attributes, frozenset(link.trace_id.hex() for link in span.links),
                        span.status.code == 2, str(span),
                    )  # fmt: skip
                    with self.lock:
                        self.spans.append(received)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            collector.take(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
