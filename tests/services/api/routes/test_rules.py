"""Rules of projects and runs: pages, overrides, needs, and rules in Python."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rules.custom.programs import ATTACK, LOUD
from tests.services.announcing import announcing
from tests.services.api.conftest import Api
from tests.services.driving import Driven
from tests.services.recording import PROJECT, Recording, exploding_from, nan_from
from watchstep.errors import NotFoundError
from watchstep.format.capture_needs import CaptureNeed
from watchstep.format.control import ControlDocument
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.sandbox.confinement import Isolation
from watchstep_services.db.models import ActionRow, RuleConfigRow, RunRow
from watchstep_services.dispatch.dispatch import dispatch, due_actions
from watchstep_services.runs import rule_configs
from watchstep_services.runs.registration import discover_runs, register
from watchstep_services.runs.rule_configs import apply_owner_rules
from watchstep_services.runs.rule_health import no_data_reason

TABLE = f"/v1/projects/{PROJECT}/rule-table"
CHECKS = f"/v1/projects/{PROJECT}/rule-checks"
RULES = f"/v1/projects/{PROJECT}/rules"
RUN = "/v1/projects/vision/runs/run-1"
ELEMENTS: dict[str, Any] = {
    "rule": "similar_across_runs",
    "params": {"run": "good", "elementwise": True, "every": 50},
}
NEED = CaptureNeed("elements", ("weights", "biases"), (), 50, ("train",))
HOOKS = [{"webhook": "https://chat.example.com/"}]
REQUESTED = RuleConfig.model_validate({"rule": "non_finite_values", "name": "mine", "actions": HOOKS})
INTENDED = RuleConfig.model_validate(
    {"rule": "non_finite_values", "name": "mine", "params": {"only_nan": True}, "actions": HOOKS}
)
RUNS = "/v1/projects/vision/runs"
RULE: dict[str, object] = {
    "rule": "python",
    "name": "loud",
    "params": {"source": LOUD, "class": "Loud", "params": {"threshold": 500.0}},
}
FILE = {"rule": "python", "name": "file", "params": {"file": "/etc/passwd", "class": "Loud"}}
ENDS = {
    "rule": "python",
    "name": "ends",
    "params": {
        "source": ATTACK,
        "class": "Attack",
        "file": "ends.py",
        "params": {"body": "def run(state): os._exit(1)"},
    },
}


def table(api: Api, **arguments: Any) -> dict[tuple[str, str], dict[str, Any]]:
    answer = api.call("GET", TABLE, **arguments)
    assert answer.status_code == 200, answer.text
    return {(rule["origin"], rule["name"]): rule for rule in answer.json()["rules"]}


@pytest.mark.ci
def test_rules_of_owner_project_and_runs_with_their_health(api: Api) -> None:
    driven = api.driven
    mine = RuleConfig.model_validate(
        {"rule": "class_imbalance", "name": "mine", "actions": [{"webhook": "https://chat.example.com/key"}]}
    )
    run_id = driven.register("a", [mine])
    driven.judge(run_id, api.driven.recording(run="a").begin().write(0, 0, 7, nan_from(5)))
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
    assert api.status("PUT", f"{RULES}/{name}", body) == 200
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
    assert api.status("GET", TABLE, project="other", role="viewer") == 403
    assert api.status("GET", f"{TABLE}?runs=51") == 422
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


@pytest.mark.ci
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
    assert api.status("POST", CHECKS, {"text": "rule: overfit"}, role="viewer") == 403
    assert api.status("POST", CHECKS, {"text": "x" * 100_001}) == 422


def test_a_rule_is_created_only_if_there_is_none(api: Api) -> None:
    body, headers = {"rule": "overfit"}, {"if-none-match": "*"}
    assert [api.status("PUT", f"{RULES}/fresh", body, headers=headers) for _ in range(2)] == [200, 412]


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


def on_store(store: Store) -> ControlDocument:
    return ControlDocument.decode(store.get("control.json"))


def document(driven: Driven, run_id: int = 1) -> ControlDocument:
    return ControlDocument.from_data(driven.run(run_id).control)


def mirrored(driven: Driven) -> list[str]:
    """Do what is due; what came of it."""
    tried = [dispatch(driven.service, action) for action in due_actions(driven.service)]
    return [attempt.result for attempt in tried if attempt is not None]


@pytest.fixture
def recording(api: Api) -> Recording:
    begun, _ = api.driven.record(last=9)
    return begun


def test_a_rule_that_needs_nothing_changes_no_document(api: Api, recording: Recording) -> None:
    assert api.status("PUT", f"{RUN}/rules/mine", {"rule": "loss_spike"}) == 200
    assert document(api.driven) == ControlDocument()
    assert mirrored(api.driven) == []
    with pytest.raises(NotFoundError):
        recording.store.get("control.json")


def test_a_rule_that_is_put_and_removed_changes_the_document_once(api: Api, recording: Recording) -> None:
    assert api.status("PUT", f"{RUN}/rules/elements", ELEMENTS) == 200
    assert document(api.driven) == ControlDocument(version=1, needs=(NEED,))
    assert mirrored(api.driven) == ["done"]
    assert on_store(recording.store) == document(api.driven)
    # The same again, and a rule without needs: nothing to write.
    assert api.status("PUT", f"{RUN}/rules/elements", ELEMENTS) == 200
    assert api.status("PUT", f"{RUN}/rules/mine", {"rule": "loss_spike"}) == 200
    assert (document(api.driven).version, mirrored(api.driven)) == (1, [])
    denser = {**ELEMENTS, "params": {**ELEMENTS["params"], "every": 5}}
    api.call("PUT", f"{RUN}/rules/elements", denser)
    assert [need.every for need in document(api.driven).needs] == [5]
    assert api.status("DELETE", f"{RUN}/rules/mine") == 204
    assert document(api.driven).version == 2
    assert api.status("DELETE", f"{RUN}/rules/elements") == 204
    assert document(api.driven) == ControlDocument(version=3)
    assert mirrored(api.driven) == ["done", "done"]
    assert on_store(recording.store) == ControlDocument(version=3)


@pytest.mark.ci
def test_answers_to_recorders_have_the_whole_document(api: Api, recording: Recording) -> None:
    """Recorders that announce their segments read the document from the answers, and not from the store."""
    api.call("PUT", f"{RUN}/rules/elements", ELEMENTS)
    assert api.status("POST", f"{RUN}/control/snapshots", {}) == 202
    key = recording.write(1, 10, 19)
    answers = [
        api.call("GET", f"{RUN}/control").json(),
        api.call("POST", f"{RUN}/announcements", announcing(key), role="recorder").json()["control"],
        api.call("GET", RUN).json()["control"],
    ]
    for answer in answers:
        assert ControlDocument.from_data(answer) == document(api.driven)
    assert document(api.driven).needs == (NEED,)


def test_a_stop_keeps_the_needs_and_a_put_keeps_the_stop(api: Api, recording: Recording) -> None:
    api.call("PUT", f"{RUN}/rules/elements", ELEMENTS)
    api.call("POST", f"{RUN}/stop", {"reason": "no progress"})
    mirrored(api.driven)
    assert on_store(recording.store).tombstone == "no progress"
    assert on_store(recording.store).needs == (NEED,)
    api.call("DELETE", f"{RUN}/rules/elements")
    mirrored(api.driven)
    assert (on_store(recording.store).tombstone, on_store(recording.store).needs) == ("no progress", ())


def test_a_config_that_cannot_be_read_now_keeps_its_needs(api: Api, recording: Recording) -> None:
    api.call("PUT", f"{RUN}/rules/elements", ELEMENTS)
    with api.driven.service.database.write() as session:
        row = session.query(RuleConfigRow).filter_by(name="elements").one()
        row.data = {**row.data, "rule": "of_a_later_version"}
    api.call("PUT", f"{RUN}/rules/mine", {"rule": "loss_spike"})
    assert document(api.driven).needs == (NEED,)


def test_the_needs_of_owners_and_recorders_are_stated_when_a_run_begins(driven: Driven) -> None:
    owners = [RuleConfig.model_validate({**ELEMENTS, "name": "elements"})]
    apply_owner_rules(driven.service.database, owners)  # no run yet
    run_id = driven.register(rules=[RuleConfig.model_validate({**ELEMENTS, "name": "mine"})])
    assert [need.rule for need in document(driven, run_id).needs] == ["mine"]
    apply_owner_rules(driven.service.database, owners)
    assert sorted(need.rule for need in document(driven, run_id).needs) == ["elements", "mine"]
    version = document(driven, run_id).version
    apply_owner_rules(driven.service.database, owners)
    assert document(driven, run_id).version == version
    with driven.service.database.read() as session:
        keys = [row.key for row in session.query(ActionRow).filter_by(run_id=run_id, kind="control")]
    assert sorted(keys) == [f"control:{run_id}:{number}" for number in range(1, version + 1)]
    apply_owner_rules(driven.service.database, [])
    assert [need.rule for need in document(driven, run_id).needs] == ["mine"]


def health(*notes: Any) -> dict[str, Any]:
    return {"recorders": {str(number): {"notes": note} for number, note in enumerate(notes)}}


CONFIG = RuleConfig.model_validate({**ELEMENTS, "name": "elements"})
ACTIVATIONS = RuleConfig(rule="dead_relu")


@pytest.mark.parametrize(
    ("config", "run_health", "reason"),
    [
        (CONFIG, {}, ""),
        (None, health({"capture": "rule elements: weights not recorded"}), ""),
        (CONFIG, health({"capture": "rule elements: weights not recorded"}), "weights not recorded"),
        (
            CONFIG,
            health({"capture": "rule other: weights not recorded; rule element: x; rule elements2: y"}),
            "",
        ),
        (
            CONFIG,
            health(
                {
                    "capture": "rule other: a not recorded; rule elements: no full tensors of updates; and 3 more"
                }
            ),
            "no full tensors of updates",
        ),
        # Each worker reports the same.
        (CONFIG, health(*[{"capture": "rule elements: weights not recorded"}] * 3), "weights not recorded"),
        (CONFIG, health({"activations": "not observed: compiled"}), ""),
        (
            ACTIVATIONS,
            health({"activations": "not observed: 2 of 3 modules are compiled"}),
            "activations not observed: 2 of 3 modules are compiled",
        ),
        (
            ACTIVATIONS,
            health({"activations": "not observed: a", "capture": "rule dead_relu: activations not recorded"}),
            "activations not recorded; activations not observed: a",
        ),
        (
            RuleConfig.model_validate({"rule": "nan_or_inf", "tensors": {"collection": "activations"}}),
            health({"activations": "not observed: a"}),
            "activations not observed: a",
        ),
        # Reports come from recorders, which may write anything.
        (CONFIG, {"recorders": []}, ""),
        (CONFIG, {"recorders": "x"}, ""),
        (CONFIG, {"recorders": {"0": None, "1": [], "2": {"notes": 3}, "3": {"notes": {"capture": 3}}}}, ""),
        (ACTIVATIONS, health({"activations": ["x"]}), "activations ['x']"),
        (ACTIVATIONS, health({"activations": "y" * 1000}), ("activations " + "y" * 1000)[:500]),
    ],
    ids=str,
)
def test_why_a_rule_has_no_data(config: RuleConfig | None, run_health: dict[str, Any], reason: str) -> None:
    assert no_data_reason(run_health, config) == reason


@pytest.mark.usefixtures("recording")
def test_the_api_says_why_a_rule_has_no_data(api: Api) -> None:
    api.call("PUT", f"{RUN}/rules/elements", ELEMENTS)
    with api.driven.service.database.write() as session:
        run = session.get_one(RunRow, 1)
        run.health = {**run.health, **health({"capture": "rule elements: weights, biases not recorded"})}
    rules = {rule["name"]: rule for rule in api.call("GET", f"{RUN}/rules").json()["rules"]}
    assert (rules["elements"]["health"], rules["elements"]["problem"]) == (
        "no_data",
        "weights, biases not recorded",
    )


@pytest.mark.parametrize("first", ["recorder", "operator"])
def test_an_operators_rule_overrides_a_recorders_of_the_same_name(driven: Driven, first: str) -> None:
    recording = driven.recording().begin()
    orders: dict[str, list[Any]] = {"recorder": [REQUESTED], "operator": [INTENDED]}
    for origin in (first, *(orders.keys() - {first}), "recorder"):
        run_id = register(driven.service, PROJECT, "run-1", tuple(orders[origin]), origin)  # type: ignore[arg-type]
    driven.judge(run_id, recording.write(0, 0, 7, nan_from(5)))
    posts = driven.actions(run_id, "webhook")
    fired = driven.events(run_id, "alert.firing")
    assert len(posts) == 1
    assert [event["data"]["rule_config"]["name"] for event in fired].count("mine") == 1


def test_a_firing_recorders_rule_ends_when_an_operators_overrides_it(driven: Driven) -> None:
    recording, run_id = driven.record(nan_from(5), rules=[REQUESTED])
    with driven.service.database.write() as session:
        rule_configs.put_one(session, session.get_one(RunRow, run_id), INTENDED)
    driven.judge(run_id, recording.write(1, 8, 12, nan_from(0)))
    ends = [event["data"] for event in driven.events(run_id, "alert.resolved")]
    assert [end["rule_config"]["name"] for end in ends] == ["mine"]
    assert [action.kind for action in driven.actions(run_id)].count("webhook") in {2, 3}


def test_overridden_rules_are_shown_and_return(api: Api) -> None:
    asks = {"run": "run-1", "rules": [REQUESTED.as_data()]}
    registered = api.call(
        "POST", "/v1/projects/vision/runs", {"run": "run-1", "rules": [INTENDED.as_data()]}
    ).json()
    assert {rule["name"]: rule["overrides"] for rule in registered["rules"]}["mine"] == []
    registered = api.call("POST", "/v1/projects/vision/runs", asks, role="recorder").json()
    (mine,) = [rule for rule in registered["rules"] if rule["name"] == "mine"]
    assert mine["origin"] == "operator"
    (override,) = mine["overrides"]
    assert (override["origin"], override["rule"], override["config"]["params"]) == (
        "recorder",
        "non_finite_values",
        {},
    )
    api.call("DELETE", "/v1/projects/vision/runs/run-1/rules/mine")
    registered = api.call("POST", "/v1/projects/vision/runs", asks, role="recorder").json()
    (mine,) = [rule for rule in registered["rules"] if rule["name"] == "mine"]
    assert (mine["origin"], mine["overrides"]) == ("recorder", [])


@pytest.mark.ci
def test_an_operators_rule_is_evaluated_and_one_that_ends_its_process_affects_no_other(api: Api) -> None:
    recording = Recording(api.driven.service.stores.open(api.driven.service.settings.store)).begin()
    assert api.status("POST", RUNS, {"run": "run-1", "attempt": "a1", "rules": [ENDS, RULE]}) == 200
    api.driven.announce(1, recording.write(0, 0, 9, exploding_from(5)))
    recording.end(worker=0)
    api.driven.settle(1)
    rules = {rule["name"]: rule for rule in api.call("GET", f"{RUNS}/run-1").json()["rules"]}
    assert (rules["ends"]["health"], rules["loud"]["health"]) == ("error", "ok")
    assert "its process ended with 1" in rules["ends"]["problem"]
    assert rules["loud"]["phase"] == "firing"
    assert Isolation.model_validate(rules["loud"]["isolation"]).full
    assert rules["exploding_gradient"]["isolation"] is None


def test_a_recorder_may_not_add_a_python_rule(api: Api) -> None:
    refused = api.call("POST", RUNS, {"run": "run-1", "rules": [RULE]}, role="recorder")
    assert refused.status_code == 422
    assert "a recorder may not upload one" in refused.text


def test_a_file_of_the_services_machine_is_not_read(api: Api) -> None:
    refused = api.call("POST", RUNS, {"run": "run-1", "rules": [FILE]})
    assert refused.status_code == 422
    assert "root:" not in refused.text


def test_a_python_rule_on_the_store_is_refused_and_reported(api: Api) -> None:
    Recording(api.driven.service.stores.open(api.driven.service.settings.store)).begin(rules=[RULE])
    (run_id,) = discover_runs(api.driven.service)
    run = api.driven.run(run_id)
    assert (run.project, run.run) == (PROJECT, "run-1")
    assert "a recorder may not upload one" in run.health["run_document"]
