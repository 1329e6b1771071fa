"""Python rules in the service: only operators may add them, and their isolation is shown."""

from __future__ import annotations

from tests.rules.custom.programs import ATTACK, LOUD
from tests.services.api.conftest import Api
from tests.services.recording import PROJECT, Recording, exploding_from
from watchstep_rules.custom.sandbox.confinement import Isolation
from watchstep_services.runs.registration import discover_runs

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


def test_an_operators_rule_is_evaluated_and_one_that_ends_its_process_affects_no_other(api: Api) -> None:
    recording = Recording(api.driven.service.stores.open(api.driven.service.settings.store)).begin()
    assert api.call("POST", RUNS, {"run": "run-1", "attempt": "a1", "rules": [ENDS, RULE]}).status_code == 200
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
