"""The capture document of a project: who writes it, what is refused, and who receives it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.api.conftest import Api

PROJECT = "/v1/projects/vision"
CAPTURE = f"{PROJECT}/capture"
DOCUMENT: dict[str, Any] = {
    "overhead_budget": 0.05,
    "collections": {"activations": None, "head": {"include": "head[.]", "tensors": {"every": 10}}},
}
NONE = {"document": None, "changed_by": "", "changed_ns": 0}


def test_an_operator_stores_a_document_that_launches_receive(api: Api) -> None:
    assert api.call("GET", CAPTURE, role="viewer").json() == NONE
    stored = api.call("PUT", CAPTURE, DOCUMENT)
    assert stored.status_code == 200
    answer = stored.json()
    assert answer["document"] == DOCUMENT
    assert answer["changed_by"].startswith("operator, token ")
    assert answer["changed_ns"] > 0
    assert api.call("GET", CAPTURE, role="viewer").json() == answer
    for role in ("recorder", "operator"):
        registered = api.call("POST", f"{PROJECT}/runs", {"run": f"by-{role}"}, role=role)
        assert registered.json()["capture"] == DOCUMENT
    other = api.call("POST", "/v1/projects/other/runs", {"run": "r"})
    assert other.json()["capture"] is None
    assert api.call("DELETE", CAPTURE).json() == NONE
    assert api.call("POST", f"{PROJECT}/runs", {"run": "later"}).json()["capture"] is None
    assert api.call("DELETE", CAPTURE).json() == NONE


@pytest.mark.parametrize("role", ["viewer", "recorder"])
def test_only_operators_write_it(api: Api, role: Any) -> None:
    assert api.call("PUT", CAPTURE, DOCUMENT, role=role).status_code == 403
    assert api.call("DELETE", CAPTURE, role=role).status_code == 403
    assert api.call("GET", CAPTURE).json() == NONE


def test_a_token_of_another_project_does_not_see_it(api: Api) -> None:
    api.call("PUT", CAPTURE, DOCUMENT)
    for method, body in (("GET", None), ("PUT", {}), ("DELETE", None)):
        refused = api.call(method, CAPTURE, body, project="other")
        assert refused.status_code in {403, 404}
        assert "head" not in refused.text
    assert api.call("GET", CAPTURE).json()["document"] == DOCUMENT


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"colections": {}}, "capture document: colections: unknown key"),
        ({"collections": {"a": {"include": "("}}}, "collections.a.include"),
        ({"collections": {"a": {"include": "(" * 4000}}}, "collections.a.include"),
        ({"overhead_budget": 5}, "overhead_budget: 5 is not"),
        (
            {"collections": {f"c{n}": {"include": "x" * 90} for n in range(200)}},
            "more than the limit of 16384",
        ),
    ],
)
def test_an_invalid_document_is_refused(api: Api, body: Any, message: str) -> None:
    refused = api.call("PUT", CAPTURE, body)
    assert refused.status_code == 422
    assert message in refused.text
    assert api.call("GET", CAPTURE).json() == NONE


@pytest.mark.parametrize("body", [[], "text", 7, None])
def test_a_document_is_a_mapping(api: Api, body: Any) -> None:
    assert api.call("PUT", CAPTURE, body).status_code == 422


def test_concurrent_changes_are_not_overwritten(api: Api) -> None:
    api.call("PUT", CAPTURE, DOCUMENT)
    token = f"Bearer {api.token('operator')}"
    headers = {"authorization": token, "content-type": "application/json"}
    etag = api.client.request("GET", CAPTURE, headers=headers).headers["etag"]
    api.call("PUT", CAPTURE, {"gate": False})
    for method in ("PUT", "DELETE"):
        conditional = {**headers, "if-match": etag}
        refused = api.client.request(method, CAPTURE, content="{}", headers=conditional)
        assert refused.status_code == 412
    assert api.call("GET", CAPTURE).json()["document"] == {"gate": False}


def test_an_unknown_project_is_created_and_an_invalid_name_is_refused(api: Api) -> None:
    assert api.call("PUT", "/v1/projects/new/capture", DOCUMENT).status_code == 200
    assert api.call("GET", "/v1/projects/new", role="viewer").status_code == 200
    assert api.call("PUT", "/v1/projects/..x%20y/capture", DOCUMENT).status_code in {404, 422}


def test_an_archived_project_keeps_its_document(api: Api) -> None:
    api.call("PUT", CAPTURE, DOCUMENT)
    api.call("PATCH", PROJECT, {"archived": True}, role="admin")
    assert api.call("PUT", CAPTURE, {}).status_code == 409
    assert api.call("GET", CAPTURE).json()["document"] == DOCUMENT


@pytest.mark.parametrize(
    "document",
    [
        {"\ud800": 1},
        {"collections": {"e": {"include": "\ud800", "tensors": {"every": 1}}}},
        {"collections": {"e": {"modules": ["\udfff"], "tensors": {"every": 1}}}},
    ],
)
def test_an_unpaired_surrogate_is_refused(api: Api, document: dict[str, Any]) -> None:
    refused = api.call("PUT", CAPTURE, document)
    assert (refused.status_code, "unpaired surrogate" in refused.json()["detail"]) == (422, True)
    assert api.call("GET", CAPTURE).json() == NONE
    emoji = {"collections": {"e": {"modules": ["\U0001f600"], "tensors": {"every": 1}}}}
    assert api.call("PUT", CAPTURE, emoji).json()["document"] == emoji
