"""Of several rule configs with the same name, one is evaluated; the others are shown as overridden."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.api.conftest import Api
from tests.services.driving import Driven
from tests.services.recording import PROJECT, Recording, nan_from
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.db.models import RunRow
from watchstep_services.runs import rule_configs
from watchstep_services.runs.registration import register

HOOKS = [{"webhook": "https://chat.example.com/"}]
REQUESTED = RuleConfig.model_validate({"rule": "non_finite_values", "name": "mine", "actions": HOOKS})
INTENDED = RuleConfig.model_validate(
    {"rule": "non_finite_values", "name": "mine", "params": {"only_nan": True}, "actions": HOOKS}
)


@pytest.mark.parametrize("first", ["recorder", "operator"])
def test_an_operators_rule_overrides_a_recorders_of_the_same_name(
    driven: Driven, folder_store: Store, first: str
) -> None:
    recording = Recording(folder_store).begin()
    orders: dict[str, list[Any]] = {"recorder": [REQUESTED], "operator": [INTENDED]}
    for origin in (first, *(orders.keys() - {first}), "recorder"):
        run_id = register(driven.service, PROJECT, "run-1", tuple(orders[origin]), origin)  # type: ignore[arg-type]
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
    driven.settle(run_id)
    posts = [action for action in driven.actions(run_id) if action.kind == "webhook"]
    fired = [event for event in driven.events(run_id) if event["type"] == "io.watchstep.alert.firing"]
    assert len(posts) == 1
    assert [event["data"]["rule_config"]["name"] for event in fired].count("mine") == 1


def test_a_firing_recorders_rule_ends_when_an_operators_overrides_it(
    driven: Driven, folder_store: Store
) -> None:
    recording = Recording(folder_store).begin()
    run_id = driven.register(rules=[REQUESTED])
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
    driven.settle(run_id)
    with driven.service.database.write() as session:
        rule_configs.put_one(session, session.get_one(RunRow, run_id), INTENDED)
    driven.announce(run_id, recording.write(1, 8, 12, nan_from(0)))
    driven.settle(run_id)
    ends = [
        event["data"] for event in driven.events(run_id) if event["type"] == "io.watchstep.alert.resolved"
    ]
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
