"""What rules need recorders to capture: stated in the control document, and what a recorder cannot capture is said in the rule's health."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.announcing import announcing
from tests.services.api.conftest import Api
from tests.services.driving import Driven
from tests.services.recording import Recording
from watchstep.errors import NotFoundError
from watchstep.format.capture_needs import CaptureNeed
from watchstep.format.control import ControlDocument
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.db.models import ActionRow, RuleConfigRow, RunRow
from watchstep_services.dispatch.dispatch import dispatch, due_actions
from watchstep_services.runs.rule_configs import apply_owner_rules
from watchstep_services.runs.rule_health import no_data_reason

RUN = "/v1/projects/vision/runs/run-1"
ELEMENTS: dict[str, Any] = {
    "rule": "similar_across_runs",
    "params": {"run": "good", "elementwise": True, "every": 50},
}
NEED = CaptureNeed("elements", ("weights", "biases"), (), 50, ("train",))


def on_store(store: Store) -> ControlDocument:
    return ControlDocument.decode(store.get("control.json"))


def document(driven: Driven, run_id: int = 1) -> ControlDocument:
    return ControlDocument.from_data(driven.run(run_id).control)


def mirrored(driven: Driven) -> list[str]:
    """Do what is due; what came of it."""
    tried = [dispatch(driven.service, action) for action in due_actions(driven.service)]
    return [attempt.result for attempt in tried if attempt is not None]


@pytest.fixture
def recording(api: Api, folder_store: Store) -> Recording:
    begun = Recording(folder_store).begin()
    run_id = api.driven.register()
    api.driven.announce(run_id, begun.write(0, 0, 9))
    api.driven.settle(run_id)
    return begun


def test_a_rule_that_needs_nothing_changes_no_document(api: Api, recording: Recording) -> None:
    assert api.call("PUT", f"{RUN}/rules/mine", {"rule": "loss_spike"}).status_code == 200
    assert document(api.driven) == ControlDocument()
    assert mirrored(api.driven) == []
    with pytest.raises(NotFoundError):
        recording.store.get("control.json")


def test_a_rule_that_is_put_and_removed_changes_the_document_once(api: Api, recording: Recording) -> None:
    assert api.call("PUT", f"{RUN}/rules/elements", ELEMENTS).status_code == 200
    assert document(api.driven) == ControlDocument(version=1, needs=(NEED,))
    assert mirrored(api.driven) == ["done"]
    assert on_store(recording.store) == document(api.driven)
    # The same again, and a rule without needs: nothing to write.
    assert api.call("PUT", f"{RUN}/rules/elements", ELEMENTS).status_code == 200
    assert api.call("PUT", f"{RUN}/rules/mine", {"rule": "loss_spike"}).status_code == 200
    assert (document(api.driven).version, mirrored(api.driven)) == (1, [])
    denser = {**ELEMENTS, "params": {**ELEMENTS["params"], "every": 5}}
    api.call("PUT", f"{RUN}/rules/elements", denser)
    assert [need.every for need in document(api.driven).needs] == [5]
    assert api.call("DELETE", f"{RUN}/rules/mine").status_code == 204
    assert document(api.driven).version == 2
    assert api.call("DELETE", f"{RUN}/rules/elements").status_code == 204
    assert document(api.driven) == ControlDocument(version=3)
    assert mirrored(api.driven) == ["done", "done"]
    assert on_store(recording.store) == ControlDocument(version=3)


def test_answers_to_recorders_have_the_whole_document(api: Api, recording: Recording) -> None:
    """Recorders that announce their segments read the document from the answers, and not from the store."""
    api.call("PUT", f"{RUN}/rules/elements", ELEMENTS)
    assert api.call("POST", f"{RUN}/control/snapshots", {}).status_code == 202
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
