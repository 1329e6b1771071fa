"""The web page's files: served without a token, under a strict policy, and cached by their hash."""

from __future__ import annotations

import re
from pathlib import Path

from fastapi import FastAPI

from tests.services.api.conftest import Api, Client
from watchstep_services.api import page


def test_each_path_of_the_page_returns_its_document(api: Api) -> None:
    tensor = "/projects/p/runs/r/tensors/fc1.weight%3Agradient"
    for path in ("/", "/admin", "/projects", tensor, f"{tensor}%0A%2F"):
        answer = api.client.request("GET", path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-frame-options"] == "DENY"


def test_assets_are_cached_for_ever_and_the_document_is_revalidated(api: Api) -> None:
    document = api.client.request("GET", "/")
    assets = re.findall(r'(?:src|href)="(/assets/[^"]+)"', document.text)
    assert assets
    for path in assets:
        answer = api.client.request("GET", path)
        assert (answer.status_code, "immutable" in answer.headers["cache-control"]) == (200, True)
        assert answer.headers["content-encoding"] == "gzip"
    tag = {"if-none-match": document.headers["etag"]}
    assert api.client.request("GET", "/", headers=tag).status_code == 304
    assert api.client.request("GET", "/assets/nothing.js").status_code in {401, 404}


def test_an_installation_without_the_page_says_so(tmp_path: Path) -> None:
    app = FastAPI()
    page.install_page(app, tmp_path)
    answer = Client(app).request("GET", "/projects/p")
    assert (answer.status_code, "make page" in answer.text) == (200, True)


def test_the_policy_allows_no_inline_code() -> None:
    assert "unsafe" not in page.POLICY
    assert "require-trusted-types-for 'script'" in page.POLICY


def test_the_caller_is_described(api: Api) -> None:
    described = api.call("GET", "/v1/caller", role="viewer").json()
    assert (described["role"], described["permissions"], described["run"]) == ("viewer", ["read"], None)
    assert api.client.request("GET", "/v1/caller").status_code == 401


def test_the_service_describes_its_queues(api: Api) -> None:
    status = api.call("GET", "/v1/service", role="viewer").json()
    assert status["database"] is True
    assert [queue["name"] for queue in status["queues"]] == ["runs", "actions", "backtests"]
    assert all(queue["oldest_seconds"] >= 0 for queue in status["queues"])
    assert status["projects"] == {}
    assert api.call("GET", "/v1/service", role="viewer", project="vision").status_code == 403
