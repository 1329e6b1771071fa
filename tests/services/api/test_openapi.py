"""The document is valid and complete: whoever makes a client from it needs nothing else."""

from __future__ import annotations

from typing import Any

import jsonschema
from openapi_spec_validator import validate

from tests.services.api.conftest import Api
from watchstep_services.api.openapi import operations
from watchstep_services.api.problem_types import PREFIX, TYPES

JSON = "application/json"


def test_the_document_is_valid_and_complete(api: Api) -> None:
    document = api.client.get("/openapi.json").json()
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


def test_every_example_is_one(api: Api) -> None:
    document = api.client.get("/openapi.json").json()
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
    held: dict[str, Any], document: dict[str, Any], at: tuple[str, ...], *, needed: bool = False
) -> int:
    schema = {**held["schema"], "components": document["components"]}
    named = [value["value"] for value in held.get("examples", {}).values()] if "examples" in held else []
    given = [*named, *([held["example"]] if "example" in held else [])]
    given += held["schema"].get("examples", [])
    assert given or not needed, at
    for value in given:
        try:
            jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
        except jsonschema.ValidationError as error:
            raise AssertionError(f"{at}: {error.message[:300]}") from None
    return len(given)


def test_problems_tell_their_types(api: Api) -> None:
    for path, status in (("/v1/nothing", 404), ("/v1/projects/vision/runs?limit=0", 422)):
        answer = api.call("GET", path).json()
        assert answer["type"].removeprefix(PREFIX) in TYPES
        assert TYPES[answer["type"].removeprefix(PREFIX)].status == status == answer["status"]
    assert api.client.get("/v1/projects/vision/runs").json()["type"] == f"{PREFIX}no-token"


def test_rules_tell_their_parameters(api: Api) -> None:
    names = [rule["name"] for rule in api.call("GET", "/v1/rules").json()["rules"]]
    assert "nan_or_inf" in names
    for name in names:
        rule = api.call("GET", f"/v1/rules/{name}").json()
        assert rule["summary"]
        assert rule["parameters"]["type"] == "object"
        assert rule["parameters"]["additionalProperties"] is False


def test_what_makes_something_takes_an_idempotency_key(api: Api) -> None:
    for path, held in api.client.get("/openapi.json").json()["paths"].items():
        said = held.get("post", {})
        if {"201", "202"} & set(said.get("responses", {})):
            assert "Idempotency-Key" in [named["name"] for named in said["parameters"]], path
