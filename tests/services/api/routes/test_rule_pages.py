"""The page about the rules of a project: rule configs with their health, the check while one is written, and the catalogue."""

from __future__ import annotations

from typing import Any

from tests.services.api.conftest import Api
from tests.services.recording import PROJECT, Recording, nan_from
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig

TABLE = f"/v1/projects/{PROJECT}/rule-table"
CHECKS = f"/v1/projects/{PROJECT}/rule-checks"
RULE = f"/v1/projects/{PROJECT}/rules"


def table(api: Api, **arguments: Any) -> dict[tuple[str, str], dict[str, Any]]:
    answer = api.call("GET", TABLE, **arguments)
    assert answer.status_code == 200, answer.text
    return {(rule["origin"], rule["name"]): rule for rule in answer.json()["rules"]}


def test_rules_of_owner_project_and_runs_with_their_health(api: Api, folder_store: Store) -> None:
    driven = api.driven
    mine = RuleConfig.model_validate(
        {"rule": "class_imbalance", "name": "mine", "actions": [{"webhook": "https://chat.example.com/key"}]}
    )
    run_id = driven.register("a", [mine])
    driven.announce(run_id, Recording(folder_store, run="a").begin().write(0, 0, 7, nan_from(5)))
    driven.settle(run_id)
    rules = table(api)
    assert api.call("GET", TABLE).json()["runs"] == 1
    owners = {config.name for config in driven.service.owner_rules}
    assert {name for origin, name in rules if origin == "owner"} == owners
    fired = [rule for rule in rules.values() if rule["alerts_total"]]
    assert {rule["rule"] for rule in fired} == {"non_finite_values"}
    assert (fired[0]["alerts"][0]["run"], fired[0]["health"]["ok"]) == ("a", 1)
    recorded = rules["recorder", "mine"]
    assert (recorded["set_for"], recorded["health"]["no_data"]) == (["a"], 1)
    assert recorded["unhealthy"][0] == {"run": "a", "health": "no_data", "problem": ""}
    assert recorded["config"]["actions"][0]["url"].endswith("/key")
    assert recorded["parameters"]["ratio"] == 10.0
    shown = table(api, role="viewer")["recorder", "mine"]["config"]["actions"][0]["url"]
    assert "key" not in shown


def test_a_rule_of_the_project_replaces_the_owners(api: Api) -> None:
    name = api.driven.service.owner_rules[0].name
    body = {"rule": "dead_relu", "params": {"share": 0.5}, "actions": [{"notify": "nobody"}]}
    assert api.call("PUT", f"{RULE}/{name}", body).status_code == 200
    rules = table(api)
    assert ("owner", name) not in rules
    rule = rules["project", name]
    assert (rule["replaces_owner"], rule["parameters"]["share"], rule["parameters"]["steps"]) == (
        True,
        0.5,
        3,
    )
    assert "nobody" in rule["warnings"][0]
    assert rule["health"] == {"ok": 0, "no_data": 0, "error": 0}


def test_other_projects_and_numbers_of_runs(api: Api) -> None:
    assert api.call("GET", TABLE, project="other", role="viewer").status_code == 403
    assert api.call("GET", f"{TABLE}?runs=51").status_code == 422
    assert api.call("GET", "/v1/projects/nothing-yet/rule-table").json()["runs"] == 0


def check(api: Api, text: str, name: str = "") -> dict[str, Any]:
    answer = api.call("POST", CHECKS, {"text": text, "name": name})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_a_check_lists_every_error_with_its_line(api: Api) -> None:
    text = "rule: vanishing_gradient\nparams:\n  threshold: -1\n  nothing: 2\nfor: {steps: 0}\n"
    result = check(api, text)
    assert (result["config"], result["parameters"]) == (None, None)
    assert result["data"]["params"] == {"threshold": -1, "nothing": 2}
    assert [(remark["line"], remark["place"]) for remark in result["remarks"]] == [
        (3, "params.threshold"),
        (4, "params.nothing"),
        (5, "for.steps"),
    ]


def test_a_check_returns_the_whole_config(api: Api) -> None:
    result = check(api, '{"rule": "vanishing_gradient", "for": {"steps": 20000}}', "mine")
    assert (result["config"]["name"], result["parameters"]["threshold"]) == ("mine", 1e-7)
    assert [(remark["level"], remark["place"]) for remark in result["remarks"]] == [("warning", "for.steps")]
    assert "name" not in result["data"]


def test_texts_that_are_no_rule_config(api: Api) -> None:
    for text in (
        "",
        "- a",
        "a: [",
        "a: b: c",
        "&a [*a]",
        "[" * 5000,
        "rule: vanishing_gradient\nname: other",
    ):
        result = check(api, text, "mine")
        assert result["config"] is None
        assert [remark["level"] for remark in result["remarks"]].count("error") >= 1, text
    assert check(api, "rule: overfit\nfrom: 2020-01-01\nx: .nan")["data"] is None
    assert api.call("POST", CHECKS, {"text": "rule: overfit"}, role="viewer").status_code == 403
    assert api.call("POST", CHECKS, {"text": "x" * 100_001}).status_code == 422


def test_a_rule_is_created_only_if_there_is_none(api: Api) -> None:
    token = api.token("operator")
    headers = {
        "authorization": f"Bearer {token}",
        "content-type": "application/json",
        "if-none-match": "*",
    }
    content = '{"rule": "overfit"}'
    statuses = [
        api.client.request("PUT", f"{RULE}/fresh", content=content, headers=headers).status_code
        for _ in range(2)
    ]
    assert statuses == [200, 412]


def test_the_catalogue_says_what_rules_are_about(api: Api) -> None:
    rules = {rule["name"]: rule for rule in api.call("GET", "/v1/rules").json()["rules"]}
    assert (rules["vanishing_gradient"]["group"], rules["vanishing_gradient"]["default"]) == (
        "gradients",
        "warning",
    )
    assert (rules["all_zero"]["default"], rules["sql"]["group"]) == ("off", "custom")
    assert rules["all_zero"]["why_off"]
    assert not [
        name for name, rule in rules.items() if rule["group"] != "custom" and not rule["usual_causes"]
    ]
    shown = api.call("GET", "/v1/rules/vanishing_gradient").json()
    assert shown["what_to_try"]
    assert shown["usual_causes"] == rules["vanishing_gradient"]["usual_causes"]
