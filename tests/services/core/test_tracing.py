"""One trace from an announcement to what it caused, at a real collector; and nothing where nobody asks."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI, Response
from opentelemetry.sdk.trace import TracerProvider

from tests.services.api.walking import ask
from tests.services.channels.http_server import Answering, http_server, reset, stall, status
from tests.services.channels.sending import delivery_context
from tests.services.core.collector import ANNOUNCEMENT, Collector, collecting
from tests.services.recording import PROJECT, Recording, damage_from
from watchstep.capture.service.client import ServiceClient, current_span, new_trace
from watchstep.platform.transport import ServiceAddress
from watchstep.store.store import Store
from watchstep_services.api.middleware.observation import Observed
from watchstep_services.channels.delivery import try_post
from watchstep_services.core.egress import parse_address
from watchstep_services.core.settings import load_settings
from watchstep_services.core.telemetry import logs, tracing
from watchstep_services.serve.embedded import EmbeddedService

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        tracing.start("serve")
        yield running
        tracing.stop()


@pytest.mark.ci
def test_one_trace_from_the_announcement_to_the_stop(collector: Collector, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store", create=True)
    settings = load_settings(
        home=tmp_path / "home", store=store.location, grace_seconds=0.01, silent_seconds=1e6
    )
    recording = Recording(store).begin(on_stop="ignore")
    with EmbeddedService(settings) as service:
        client = ServiceClient(ServiceAddress.checked(service.url, service.recorder_token), PROJECT)
        client.register({"run": "run-1", "attempt": "a1", "rules": []})
        client.announce("run-1", [recording.write(0, 0, 3)], {})
        client.announce("run-1", [recording.write(1, 4, 7, damage_from(6))], {})
        from sqlalchemy import select

        from watchstep_services.db.models import ActionRow

        def over() -> bool:
            with service.database.read() as session:
                states = list(session.execute(select(ActionRow.state).filter_by(kind="stop")).scalars())
            return states == ["done"]

        assert service.wait_until(over, 60)
    tracing.stop()  # what was not sent is sent

    (stopped,) = [
        span for span in collector.named("watchstep.stop") if span.attributes["watchstep.outcome"] == "done"
    ]
    (announced,) = [span for span in collector.named(ANNOUNCEMENT) if span.trace == stopped.trace]
    (evaluated,) = [span for span in collector.named("watchstep.evaluate") if span.trace == stopped.trace]
    assert stopped.parent == evaluated.span
    assert evaluated.parent == announced.span
    assert len(announced.parent) == 16  # the recorder's
    assert {stopped.service, announced.service} == {"watchstep-serve"}
    assert stopped.attributes["watchstep.run"] == "run-1"
    assert (announced.kind, stopped.kind) == ("server", "internal")
    assert announced.attributes["http.route"] == ANNOUNCEMENT.removeprefix("POST ")


def observed(method: str, path: str) -> None:
    """One request to an application with a route that answers, one that refuses and one that fails."""
    app = FastAPI()
    app.add_middleware(Observed)
    app.add_api_route("/v1/projects/{project}/good", lambda project: project)
    app.add_api_route("/v1/projects/{project}/unavailable", lambda project: Response(project, 503))
    app.add_api_route("/v1/projects/{project}/raises", lambda project: {}[project])
    with contextlib.suppress(KeyError):
        ask(app, method, path)


@pytest.mark.parametrize(
    ("method", "path", "name", "status", "error"),
    [
        ("GET", "good", "GET /v1/projects/{project}/good", "200", ""),
        ("GET", "unavailable", "GET /v1/projects/{project}/unavailable", "503", "503"),
        ("GET", "raises", "GET /v1/projects/{project}/raises", "500", "KeyError"),
        ("GET", "nothing", "GET", "404", ""),
        ("BREW", "nothing", "HTTP", "404", ""),
    ],
)
def test_a_request_has_a_server_span_as_the_conventions_say(
    collector: Collector, method: str, path: str, name: str, status: str, error: str
) -> None:
    observed(method, f"/v1/projects/vision/{path}")
    tracing.stop()
    (span,) = collector.spans
    known = method if method == "GET" else "_OTHER"
    expected = {
        "http.request.method": known,
        "url.path": f"/v1/projects/vision/{path}",
        "url.scheme": "http",
        "http.response.status_code": status,
        **({"http.request.method_original": method} if known == "_OTHER" else {}),
        **({"http.route": name.removeprefix("GET ")} if " " in name else {}),
        **({"error.type": error} if error else {}),
    }
    assert (span.name, span.kind, span.attributes, span.failed) == (name, "server", expected, bool(error))


@pytest.mark.parametrize(
    ("answer", "attributes"),
    [
        (status(204), {"http.response.status_code": "204"}),
        (status(410), {"http.response.status_code": "410", "error.type": "410"}),
        (reset, {"error.type": "httpcore.ReadError"}),
        (
            lambda handler: handler.wfile.write(b"SSH-secret\r\n"),
            {"error.type": "httpcore.RemoteProtocolError"},
        ),
    ],
    ids=("sent", "refused", "reset", "no-http"),
)
def test_a_sent_request_has_a_client_span_without_secrets(
    collector: Collector, answer: Answering, attributes: dict[str, str]
) -> None:
    with http_server() as server, tracing.span("watchstep.webhook", PARENT):
        server.answers = [answer]
        try_post(delivery_context(), parse_address(server.url), {}, b"")
    tracing.stop()
    (span,) = collector.named("POST")
    (outer,) = collector.named("watchstep.webhook")
    assert span.attributes == {
        "http.request.method": "POST",
        "server.address": "127.0.0.1",
        "server.port": str(server.port),
        "url.scheme": "http",
        "url.full": f"http://127.0.0.1:{server.port}/REDACTED",
        **attributes,
    }
    assert (span.kind, span.parent, span.failed) == ("client", outer.span, "error.type" in attributes)
    assert "secret" not in span.text
    assert not outer.failed


def test_a_sent_request_that_gets_no_answer_in_time_says_so(collector: Collector) -> None:
    with http_server() as server:
        server.answers = [stall(server)]
        assert try_post(delivery_context(seconds=0.2), parse_address(server.url), {}, b"").result == "error"
    tracing.stop()
    (span,) = collector.named("POST")
    assert (span.attributes["error.type"], span.failed) == ("timeout", True)


def test_a_trace_goes_on_where_the_program_has_one(collector: Collector) -> None:
    with TracerProvider(shutdown_on_exit=False).get_tracer("training").start_as_current_span("epoch") as span:
        context = span.get_span_context()
        assert (
            current_span()
            == f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        )
    assert current_span() == ""
    first, second = new_trace(), new_trace()
    assert first != second
    assert tracing.checked(first) == first
    assert tracing.checked("00-" + "0" * 32 + "-b7ad6b7169203331-01") == ""
    assert tracing.checked("what a stranger sends") == ""


def test_spans_that_fail_and_that_lead_to_several(collector: Collector) -> None:
    other = new_trace()

    def outer_work() -> None:
        assert tracing.current_trace_id() == PARENT[3:35]
        assert logs.current()["trace"] == PARENT[3:35]
        with tracing.span("inner") as inner:
            inner.annotate(more=1)
        with tracing.span("dropped") as dropped:
            dropped.drop()
        raise KeyError(other)

    with pytest.raises(KeyError), tracing.span("outer", PARENT, links=[other, other, "nonsense"]):
        outer_work()
    assert tracing.current() == ""
    tracing.stop()
    (outer,) = collector.named("outer")
    (inner_span,) = collector.named("inner")
    assert (outer.trace, outer.parent, outer.failed) == (PARENT[3:35], PARENT[36:52], True)
    assert outer.attributes["error.type"] == "KeyError"
    assert outer.links == {other[3:35]}
    assert (inner_span.parent, inner_span.attributes["watchstep.more"]) == (outer.span, "1")
    assert not collector.named("dropped")


def test_nothing_is_kept_or_sent_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    tracing.start("api")
    assert not tracing.wanted()
    with tracing.span("name", PARENT) as span:
        span.annotate(more=1)
        span.fail("why")
        assert tracing.current() == ""
    assert tracing.checked(PARENT) == ""


def test_what_is_asked_for_and_not_installed_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("watchstep_services.core.telemetry.tracing._sdk_found", lambda: False)
    with caplog.at_level(logging.WARNING):
        tracing.start("api")
    assert "watchstep[telemetry]" in caplog.text


def test_nothing_is_imported_unless_asked_for() -> None:
    # FastAPI itself loads OpenTelemetry's interface where it is installed; what makes and sends spans is ours to load.
    code = (
        "import sys, watchstep, watchstep_services.cli.main, watchstep_services.core.telemetry.tracing as t; t.start('api'); "
        "sys.exit(any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
