"""No secret is in a response or in the log of the API, for any request and any failure."""

from __future__ import annotations

import io
import logging
import secrets
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from tests.services.api.conftest import Api
from tests.services.api.walking import ask, operations
from watchstep_services.api import lookup
from watchstep_services.core.telemetry import logs


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What the log of a process writes, at the lowest level."""
    stream = io.StringIO()
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    logs.configure("json", "DEBUG", stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)


def test_the_api_and_its_log_contain_no_secret(
    api: Api, written: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operation, good and bad requests, with secrets in the header, the path, the query and the body."""
    planted = secrets.token_urlsafe(32)
    url = f"postgresql://watchstep:{planted}@db/watchstep"
    tokens = [api.token(role) for role in ("viewer", "recorder", "operator", "admin")]
    out: list[str] = []

    def every(*values: str) -> None:
        for operation in operations(api.client.get("/openapi.json").json()):
            for token in (*tokens, f"wst_0123456789abcdef_{planted}"):
                body = {"run": url, "password": planted, "url": url, "role": f"Bearer {planted}"}
                place = operation.at(dict.fromkeys(operation.parameters, url) | {"project": "vision"})
                for target in (
                    place,
                    f"{place}?page_token={quote(url, safe='')}&limit={quote(url, safe='')}",
                ):
                    if operation.method != "DELETE" and "/tokens" not in operation.path:
                        out.append(ask(api.client.app, operation.method, target, token, body).text)
                    else:
                        out.append(ask(api.client.app, operation.method, target, "x" + token).text)

    every()

    def fails(*_arguments: object, **_named: object) -> None:
        raise ZeroDivisionError(f"{url} Authorization: Bearer {planted} {tokens[0]}")

    monkeypatch.setattr(lookup, "run_prefix", fails)
    out.append(ask(api.client.app, "GET", "/v1/projects/vision/runs/run-1/alerts", tokens[0]).text)
    assert "ZeroDivisionError" in written.getvalue()
    output = "\n".join([*out, written.getvalue()])
    for secret in (planted, *(token.split("_", 2)[2] for token in tokens)):
        assert secret not in output
