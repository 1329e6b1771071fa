from __future__ import annotations

from openapi_spec_validator import validate

from tests.services.api.conftest import Api


def test_the_document_is_valid_and_complete(api: Api) -> None:
    document = api.client.get("/openapi.json").json()
    validate(document)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], (method, path)
            assert operation["description"], (method, path)
            good = [answer for status, answer in operation["responses"].items() if status.startswith("2")]
            assert len(good) == 1
            assert "$ref" in good[0]["content"]["application/json"]["schema"], (method, path)


def test_rules_tell_their_parameters(api: Api) -> None:
    names = [rule["name"] for rule in api.call("GET", "/v1/rules").json()["rules"]]
    assert "nan_or_inf" in names
    for name in names:
        rule = api.call("GET", f"/v1/rules/{name}").json()
        assert rule["summary"]
        assert rule["parameters"]["type"] == "object"
        assert rule["parameters"]["additionalProperties"] is False
