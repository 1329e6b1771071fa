"""The API's documents: OpenAPI, from which clients can be generated, its page, and the web page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fastapi import FastAPI
from openapi_spec_validator import validate

from tests.services.api.conftest import Api, Client
from tests.services.api.walking import ask, published_document
from watchstep_services.api import page
from watchstep_services.api.app import create_app
from watchstep_services.api.openapi import ASSETS, operations
from watchstep_services.api.schemas.problems import PREFIX, TYPES

JSON = "application/json"


@pytest.mark.ci
def test_the_document_is_valid_and_complete() -> None:
    document = published_document()
    validate(document)
    names = []
    for path, method, operation in operations(document):
        at = (method, path)
        names.append(operation["operationId"])
        assert operation["summary"], at
        assert operation["description"], at
        assert len(operation["tags"]) == 1, at
        good = {status: answer for status, answer in operation["responses"].items() if status < "300"}
        assert good, at
        for status, answer in good.items():
            assert status == "204" or answer["content"], at
        if "security" in operation:
            assert {"401", "403", "404", "422", "429", "503"} <= operation["responses"].keys(), at
    assert len(set(names)) == len(names)
    assert {tag["name"] for tag in document["tags"]} >= {"runs", "events", "statistics"}


@pytest.mark.ci
def test_the_document_is_generated_and_sent_once(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = api.client.request("GET", "/openapi.json", headers={"accept-encoding": "identity"})
    packed = api.client.request("GET", "/openapi.json", headers={"accept-encoding": "br, gzip;q=0.5"})
    refused = api.client.request("GET", "/openapi.json", headers={"accept-encoding": "gzip;q=0"})
    assert (packed.headers["content-encoding"], packed.json()) == ("gzip", plain.json())
    assert int(packed.headers["content-length"]) * 5 < int(plain.headers["content-length"])
    assert "content-encoding" not in {**plain.headers, **refused.headers}
    assert packed.headers["vary"] == "accept-encoding"
    monkeypatch.setattr(api.client.app, "openapi", lambda: pytest.fail("made anew"))
    for answer in (plain, packed):
        sent = {
            "accept-encoding": answer.request.headers["accept-encoding"],
            "if-none-match": answer.headers["etag"],
        }
        again = api.client.request("GET", "/openapi.json", headers=sent)
        assert (again.status_code, again.content) == (304, b"")
    assert plain.headers["etag"] != packed.headers["etag"]
    assert api.client.get("/openapi.json").json() == plain.json() == published_document()


def test_the_page_loads_nothing_from_other_hosts(api: Api) -> None:
    page = api.client.get("/docs").text
    assert set(re.findall(r"""(?:src|href|url)(?:=|: )["']([^"']+)""", page)) == {"/openapi.json", *ASSETS}
    assert "//" not in re.sub(r"<!--.*?-->", "", page)


@pytest.mark.parametrize("path", ASSETS)
def test_assets_of_the_page_are_served_and_not_sent_again(api: Api, path: str) -> None:
    plain = api.client.request("GET", path, headers={"accept-encoding": "identity"})
    packed = api.client.request("GET", path, headers={"accept-encoding": "gzip"})
    assert plain.headers["content-type"].partition(";")[0] == ASSETS[path]
    assert packed.headers["content-encoding"] == "gzip"
    assert plain.content == packed.content
    again = api.client.request("GET", path, headers={"if-none-match": packed.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_schemas_have_different_names_in_generated_clients() -> None:
    """Generators drop what is no letter and no digit, and the suffixes of a pair `X-Input` and `X-Output`."""
    names = [*published_document()["components"]["schemas"]]
    assert [name for name in names if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", name)] == []
    assert len({name.lower() for name in names}) == len(names)


@pytest.mark.ci
def test_requests_for_the_document_are_limited_by_address(api: Api) -> None:
    app = create_app(api.driven.with_settings(failures_per_minute=3).service)
    answers = [
        ask(app, "GET", place) for place in ("/docs", "/openapi.json", "/docs", "/openapi.json", "/docs")
    ]
    assert [answer.status for answer in answers[:3]] == [200] * 3
    refused = answers[-1]  # the one before passes where a window ends meanwhile
    assert refused.status == 429
    assert 0 < int(refused.headers["retry-after"]) <= 60
    assert {ask(app, "GET", "/healthz").status for _ in range(10)} == {200}
    assert ask(app, "GET", "/v1/rules", api.token("viewer")).status == 200


@pytest.mark.ci
def test_every_example_is_valid() -> None:
    document = published_document()
    shown = 0
    for path, method, operation in operations(document):
        for parameter in operation.get("parameters", ()):
            shown += check(parameter, document, (method, path, parameter["name"]))
        bodies = [operation["requestBody"]] if "requestBody" in operation else []
        for part in (*bodies, *operation["responses"].values()):
            for media, content in part.get("content", {}).items():
                if "json" in media and "schema" in content:
                    shown += check(content, document, (method, path, media), needed=True)
    assert shown > 100


def check(
    described: dict[str, Any], document: dict[str, Any], at: tuple[str, ...], *, needed: bool = False
) -> int:
    schema = {**described["schema"], "components": document["components"]}
    named = (
        [value["value"] for value in described.get("examples", {}).values()]
        if "examples" in described
        else []
    )
    given = [*named, *([described["example"]] if "example" in described else [])]
    given += described["schema"].get("examples", [])
    assert given or not needed, at
    for value in given:
        try:
            jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
        except jsonschema.ValidationError as error:
            raise AssertionError(f"{at}: {error.message[:300]}") from None
    return len(given)


def test_problems_have_types(api: Api) -> None:
    for path, status in (("/v1/nothing", 404), ("/v1/projects/vision/runs?limit=0", 422)):
        answer = api.call("GET", path).json()
        assert answer["type"].removeprefix(PREFIX) in TYPES
        assert TYPES[answer["type"].removeprefix(PREFIX)].status == status == answer["status"]
    assert api.client.get("/v1/projects/vision/runs").json()["type"] == f"{PREFIX}no-token"


@pytest.mark.ci
def test_rules_have_parameter_schemas(api: Api) -> None:
    names = [rule["name"] for rule in api.call("GET", "/v1/rules").json()["rules"]]
    assert "non_finite_values" in names
    for name in names:
        rule = api.call("GET", f"/v1/rules/{name}").json()
        assert rule["summary"]
        assert rule["parameters"]["type"] == "object"
        assert rule["parameters"]["additionalProperties"] is False


def test_every_operation_that_creates_accepts_an_idempotency_key() -> None:
    for path, methods in published_document()["paths"].items():
        post = methods.get("post", {})
        if path.endswith("/announcements"):
            continue  # may be repeated without a key
        if {"201", "202"} & set(post.get("responses", {})):
            assert "Idempotency-Key" in [named["name"] for named in post["parameters"]], path


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
    assert api.status("GET", "/v1/service", role="viewer", project="vision") == 403
