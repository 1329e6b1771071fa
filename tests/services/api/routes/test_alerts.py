"""The page of an alert, and its changes."""

from __future__ import annotations

import functools
import shlex
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.event_files import accumulated
from tests.sdk.format.blocks import Row, tensor
from tests.services.api.conftest import Api
from tests.services.recording import LAYERS, LOSS, NAN, PROJECT, Recording, exploding_from, nan_from
from watchstep import CaptureConfig, Hook, open_run
from watchstep.capture.mirror import service_alerts
from watchstep.format.documents import Checkpoint
from watchstep.format.layout import BundleKey, SamplesKey, SnapshotKey, TraceKey
from watchstep.store.store import Store
from watchstep_rules.backtest.backtest import Replayed
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.registry import RULES
from watchstep_services.api.queries.alert_evidence import AlertWindow, read_evidence_lines
from watchstep_services.api.queries.step_objects import commands_for
from watchstep_services.api.schemas.alert_page import AlertFinding, RecordedObject
from watchstep_services.core.settings import load_settings
from watchstep_services.db.models import RuleConfigRow
from watchstep_services.dispatch.dispatch import dispatch
from watchstep_services.evaluation.backtests import judge_next, read_progress, request_backtest
from watchstep_services.serve.embedded import EmbeddedService

RUN = "/v1/projects/vision/runs/run-1"
GRADIENT = "second.weight:gradient"
PATH = f"/v1/projects/{PROJECT}/runs/run-1/alert-changes"


def fingerprint(api: Api, name: str) -> str:
    alerts = api.get(f"{RUN}/alerts")["alerts"]
    return str(next(alert["fingerprint"] for alert in alerts if alert["name"] == name))


def page(api: Api, name: str, **parameters: Any) -> Any:
    return api.get(f"{RUN}/alerts/{fingerprint(api, name)}/page", **parameters)


def evaluated(api: Api, recording: Recording, *keys: Any) -> int:
    run_id = api.driven.register()
    api.driven.judge(run_id, *keys)
    return run_id


@pytest.fixture
def exploding(api: Api) -> Api:
    """A gradient that explodes at step 200, at which the learning rate had just risen."""
    recording = api.driven.recording().begin()
    value = exploding_from(200)
    rate = tensor("optimizer:learning_rate/0", "metrics", role="metric", shape=())
    keys = []
    for seq in range(3):
        first, last = seq * 100, seq * 100 + 99
        rows = [
            Row(step, info, [value(step, info.name)])
            for step in range(first, last + 1)
            for info in (LOSS, *LAYERS)
        ]
        rows += [Row(step, rate, [new]) for step, new in ((0, 0.01), (198, 1.0)) if first <= step <= last]
        rows.sort(key=lambda row: row.step)
        keys.append(recording.write_rows(seq, rows))
    evaluated(api, recording, *keys)
    return api


@pytest.mark.ci
def test_the_evidence_has_the_measured_figure_and_the_threshold_at_each_finding(exploding: Api) -> None:
    answer = page(exploding, "exploding_gradient", before=50, after=10)
    series = answer["series"]
    assert (series["first"], series["last"]) == (150, 212)
    first = series["lines"][0]
    assert (first["tensor"], first["measures_value"]) == (GRADIENT, True)
    assert first["step"] == list(range(150, 213))
    assert first["mean"][first["step"].index(202)] == answer["finding"]["value"] == 1e6
    assert first["time_ns"][0] == 150_000_000
    assert series["lines"][1]["tensor"] == "loss"
    thresholds = {point["step"]: point["threshold"] for point in series["findings"]}
    assert list(thresholds)[:3] == [200, 201, 202]
    assert answer["finding"]["threshold"] == thresholds[202]
    assert all(250 < threshold < 350 for threshold in thresholds.values())
    assert (series["fixed_threshold"], series["fixed_parameter"]) == (None, "")


def test_a_long_window_is_binned(exploding: Api) -> None:
    line = page(exploding, "exploding_gradient", before=1000, points=5)["series"]["lines"][0]
    assert len(line["step"]) <= 5
    assert max(line["max"]) == 1e6


def test_deviations_episodes_and_the_state(exploding: Api) -> None:
    answer = page(exploding, "exploding_gradient")
    assert GRADIENT in {entry["tensor"] for entry in answer["deviations"]["deviations"]}
    (episode,) = answer["episodes"]
    assert (episode["since_step"], episode["step"], episode["attempt"]) == (200, 202, "a1")
    assert answer["alert"]["phase"] == "resolved"
    assert episode["resolved_step"] == answer["alert"]["step"]
    assert answer["incident"]["alerts"]


def test_other_alerts_of_the_run_are_listed(api: Api) -> None:
    recording = api.driven.recording().begin()
    exploding, bad_loss = exploding_from(200), nan_from(230)
    key = recording.write(
        0, 0, 259, lambda step, name: (bad_loss if name == "loss" else exploding)(step, name)
    )
    evaluated(api, recording, key)
    answer = page(api, "non_finite_values")
    (other,) = answer["others"]
    assert (other["name"], other["phase"], other["step"]) == ("exploding_gradient", "resolved", 200)
    assert other["fingerprint"] == fingerprint(api, "exploding_gradient")
    (back,) = page(api, "exploding_gradient")["others"]
    assert back["fingerprint"] == answer["alert"]["fingerprint"]


@pytest.mark.ci
def test_what_happened_before_includes_the_learning_rate(exploding: Api) -> None:
    saved = Checkpoint("/checkpoints/150.pt", 150, "a1", 0, 10)
    store = exploding.driven.recording().store
    store.put(saved.key, saved.encode())
    before = page(exploding, "exploding_gradient")["before"]
    change = next(entry for entry in before if entry["kind"] == "hyperparameter")
    assert (change["step"], change["before"], change["after"]) == (198, pytest.approx(0.01), 1.0)
    assert change["title"] == "optimizer:learning_rate/0 rose from 0.01 to 1"
    checkpoint = next(entry for entry in before if entry["kind"] == "checkpoint")
    assert (checkpoint["step"], "/checkpoints/150.pt" in checkpoint["title"]) == (150, True)
    assert not any(
        entry["kind"] == "hyperparameter"
        for entry in page(exploding, "exploding_gradient", before=1)["before"]
    )


@pytest.mark.ci
def test_the_rule_is_documented_with_its_parameters(exploding: Api) -> None:
    rule = page(exploding, "exploding_gradient")["rule"]
    assert rule["parameters"]["growth"] == 100.0
    assert "growth" in rule["parameter_schema"]["properties"]
    texts = rule["documentation"]
    assert texts["summary"].endswith(".")
    assert texts["description"].startswith("Fires when")
    assert texts["usual_causes"]
    assert texts["what_to_try"]


@pytest.mark.parametrize("name", sorted(RULES))
def test_each_rule_has_texts_for_the_page(name: str) -> None:
    rule = RULES[name]
    assert rule.summary
    assert (type(rule).__doc__ or "").strip()
    assert rule.usual_causes
    assert rule.what_to_try


def test_actions_are_shown_with_each_attempt(api: Api) -> None:
    recording = api.driven.recording().begin()
    run_id = evaluated(api, recording, recording.write(0, 0, 9, nan_from(5)))
    stop = api.driven.actions(run_id, "stop")[0]
    dispatch(api.driven.service, stop.id)
    answer = page(api, "non_finite_values")
    (action,) = [action for action in answer["actions"] if action["kind"] == "stop"]
    assert action["tries"][0]["number"] == 1
    assert answer["stop"]["fingerprint"] == answer["alert"]["fingerprint"]
    assert (answer["finding"]["tensor"], answer["finding"]["step"]) == ("loss", 5)
    assert answer["finding"]["value_text"]


def test_the_answer_to_whether_an_alert_was_right_is_shown_and_used_by_backtests(exploding: Api) -> None:
    api, name = exploding, "exploding_gradient"
    at = f"{RUN}/alerts/{fingerprint(api, name)}"
    assert api.get(at)["was_right"] == ""
    assert api.status("PUT", f"{at}/was-right", {"answer": "maybe"}) == 422
    assert api.status("PUT", f"{at}/was-right", {"answer": "no"}) == 200
    listed = api.get(f"{RUN}/alerts")["alerts"]
    assert {alert["was_right"] for alert in listed if alert["name"] == name} == {"no"}
    assert page(api, name)["alert"]["was_right"] == "no"
    rules = [RuleConfig(rule=name)]
    number = request_backtest(api.driven.service, PROJECT, ["run-1"], rules, [])
    judge_next(api.driven.service, number)
    (result,) = read_progress(api.driven.service, PROJECT, number).results
    assert isinstance(result, Replayed)
    assert result.was_right == {name: "no"}
    assert api.status("PUT", f"{at}/was-right", {"answer": ""}) == 200
    assert api.get(at)["was_right"] == ""


def test_acknowledgement_and_silence_are_shown(api: Api) -> None:
    recording = api.driven.recording().begin()
    evaluated(api, recording, recording.write(0, 0, 9, nan_from(5)))
    at = f"{RUN}/alerts/{fingerprint(api, 'non_finite_values')}"
    assert api.status("PUT", f"{at}/acknowledgement", {"comment": "looking"}) == 200
    silence = {"matchers": ["rule=non_finite_values"], "reason": "known", "duration_seconds": 60}
    assert api.status("POST", "/v1/projects/vision/silences", silence) == 201
    answer = api.get(f"{at}/page")
    assert answer["acknowledgement"]["comment"] == "looking"
    assert answer["silence"]["reason"] == "known"


def test_objects_of_the_step_are_listed_with_commands(exploding: Api) -> None:
    store = exploding.driven.recording().store
    for key in (
        SnapshotKey("a1", 0, 202, "train"),
        TraceKey("a1", 0, 200, 203),
        SamplesKey("a1", 0, 1, 202, 202),
        BundleKey("a1", 0, 202, "alert"),
        SnapshotKey("a2", 0, 202, "train"),
        SnapshotKey("a1", 0, 5, "train"),
    ):
        store.put(key.path, b"x")
    store.put("tensors/a1/anything", b"x")
    answer = page(exploding, "exploding_gradient")
    assert [part["kind"] for part in answer["objects"]] == [
        "bundle",
        "samples",
        "snapshot",
        "trace",
        "snapshot",
    ]
    assert [part["first"] for part in answer["objects"]] == [202, 202, 202, 200, 5]
    commands = [command["text"] for command in answer["commands"]]
    run = shlex.quote(str(store.location))
    for expected in (
        f"watchstep samples {run} --step 202",
        f"watchstep trace {run} --step 202",
        f"watchstep replay {run} --program train.py --step 202 --worker 0",
    ):
        assert expected in commands
    assert f"run.tensor({GRADIENT!r}).value(202)" in commands[-1]


def test_the_loss_beside_the_evidence_is_that_of_the_alerts_worker(tmp_path: Path) -> None:
    def loss_of(rank: int, step: int, _name: str) -> float:
        return 10.0 * rank + step

    recording = Recording(Store.open(str(tmp_path))).begin(world_size=2)
    for rank in (0, 1):
        recording.write(0, 0, 2, functools.partial(loss_of, rank), worker=rank)
    run = open_run(recording.store.location)
    for worker, shown, values in (
        (0, 0, [0.0, 1.0, 2.0]),
        (1, 1, [10.0, 11.0, 12.0]),
        (5, 0, [0.0, 1.0, 2.0]),
    ):
        fields: dict[str, Any] = {"worker": worker, "tensor": "", "step": 1, "value": None, "mode": "train"}
        finding = AlertFinding.model_construct(**fields)
        lines = read_evidence_lines(run, finding, AlertWindow(0, 2, 1, 100))
        assert [(line.worker, list(line.mean)) for line in lines if line.tensor == LOSS.name] == [
            (shown, values)
        ]


def test_the_bundle_of_the_alerts_worker_is_computed_again() -> None:
    bundles = [
        RecordedObject(kind="bundle", path=f"b{worker}", attempt="a1", worker=worker, first=5, last=5)
        for worker in (0, 1)
    ]
    for worker, shown in ((0, 0), (1, 1), (7, 0)):
        texts = [command.text for command in commands_for("run", "loss", "mean", 5, worker, bundles)]
        assert f"watchstep replay run --program train.py --step 5 --worker {shown}" in texts


def test_python_lines_work(exploding: Api) -> None:
    command = page(exploding, "exploding_gradient")["commands"][-1]
    assert command["language"] == "python"
    exec(compile(command["text"], "page", "exec"), {})


@pytest.mark.ci
def test_names_are_quoted(api: Api) -> None:
    name = "'; rm -rf / #\n<b>:gradient"
    hostile = tensor(name, "losses", role="loss", shape=())
    recording = api.driven.recording().begin()
    rows = [Row(step, hostile, [1.0 if step < 5 else float("nan")]) for step in range(10)]
    evaluated(api, recording, recording.write_rows(0, rows))
    answer = page(api, "non_finite_values")
    assert answer["finding"]["tensor"] == name
    lines = {line["figure"]: line for line in answer["series"]["lines"] if line["tensor"] == name}
    assert lines["mean"]["nonfinite"] == [0] * 5 + [1] * 5
    exec(compile(answer["commands"][-1]["text"], "page", "exec"), {})


def test_the_page_survives_a_deleted_store_and_rule_config(exploding: Api, folder_store: Store) -> None:
    at = f"{RUN}/alerts/{fingerprint(exploding, 'exploding_gradient')}/page"
    service = exploding.driven.service
    with service.database.write() as session:
        for row in session.query(RuleConfigRow).filter_by(name="exploding_gradient"):
            row.origin, row.data = "retired-owner", {"rule": "gone", "name": "exploding_gradient"}
    shutil.rmtree(Path(folder_store.location) / "vision" / "run-1")
    answer = exploding.get(at)
    assert (answer["rule"]["origin"], answer["rule"]["parameters"]) == ("", {})
    assert answer["series"]["lines"] == []
    assert answer["series"]["findings"]
    assert answer["deviations"]["problem"] or answer["deviations"]["deviations"] == []


def test_a_reload_reads_no_statistics(exploding: Api) -> None:
    path = f"{RUN}/alerts/{fingerprint(exploding, 'exploding_gradient')}/page"
    conditional = {"if-none-match": exploding.call("GET", path).headers["etag"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "watchstep_services.api.routes.alert_page.read_evidence_lines",
            lambda *_: pytest.fail("read again"),
        )
        assert exploding.status("GET", path, headers=conditional) == 304
    assert exploding.status("GET", f"{path}?before=20", headers=conditional) == 200


@pytest.mark.ci
def test_an_unknown_alert_has_no_page(exploding: Api) -> None:
    answer = exploding.call("GET", f"{RUN}/alerts/{'0' * 32}/page", role="viewer")
    assert answer.status_code == 404


@pytest.fixture
def recording(folder_store: Store) -> Recording:
    return Recording(folder_store).begin()


def changes(api: Api, query: str) -> tuple[list[tuple[str, str, int]], int]:
    """(name, phase, step) of each change, and the position after them."""
    answer = api.call("GET", f"{PATH}?{query}", role="recorder", project=PROJECT)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return [(alert["name"], alert["phase"], alert["step"]) for alert in found["alerts"]], found["after"]


def test_a_recorder_reads_each_change_of_its_attempt_once(api: Api, recording: Recording) -> None:
    run_id = api.driven.register()
    assert changes(api, "attempt=a1") == ([], 0)
    api.driven.judge(run_id, recording.write(0, 0, 19, nan_from(7)))
    alerts, after = changes(api, "attempt=a1")
    assert alerts == [("non_finite_values", "firing", 7)]
    assert changes(api, f"attempt=a1&after={after}") == ([], after)
    assert changes(api, "attempt=a2") == ([], after)
    # An alert that fires and resolves within one evaluation has two changes.
    api.driven.judge(run_id, recording.write(1, 20, 39, lambda step, _: NAN if step == 30 else 1.0))
    later, last = changes(api, f"attempt=a1&after={after}")
    assert later == [
        ("non_finite_values", "resolved", 20),
        ("non_finite_values", "firing", 30),
        ("non_finite_values", "resolved", 31),
    ]
    assert changes(api, "attempt=a1") == ([*alerts, *later], last)


def test_others_than_its_recorder_may_not_read_them(api: Api, recording: Recording) -> None:
    api.driven.register()
    refused = api.call("GET", f"{PATH}?attempt=a1", role="recorder", project="other")
    assert refused.status_code in {403, 404}
    assert api.status("GET", f"{PATH}?attempt=a1", role="viewer") == 403
    assert api.status("GET", f"{PATH}?attempt=..", role="recorder") == 422
    missing = PATH.replace("run-1", "run-2")
    assert api.status("GET", f"{missing}?attempt=a1", role="recorder") == 404


def test_a_registration_has_the_address_of_the_page(api: Api) -> None:
    body = {"run": "a b"}
    assert api.status("POST", f"/v1/projects/{PROJECT}/runs", body) == 422
    assert api.call("POST", f"/v1/projects/{PROJECT}/runs", {"run": "r"}).json()["page_url"] == ""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def texts(folder: Path, name: str) -> list[str]:
    if not folder.exists():
        return []
    events = accumulated(folder)
    tag = f"watchstep/{name}/text_summary"
    if tag not in events.Tags()["tensors"]:
        return []
    return [event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)]


@pytest.mark.ci
def test_a_mirror_has_the_services_alerts_and_a_link_to_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_alerts, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(service_alerts, "_INTERVAL_SECONDS", 0.1)
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n  - rule: non_finite_values\n    severity: critical\n")
    settings = load_settings(
        home=tmp_path / "home",
        store=str(tmp_path / "store"),
        port=free_port(),
        public_url="https://watchstep.test/",
    )
    config = CaptureConfig(overhead_budget=None, system=None)
    live = tmp_path / "live" / "watchstep"
    with EmbeddedService(settings) as service:
        monkeypatch.setenv("WATCHSTEP_SERVICE", f"http://127.0.0.1:{settings.port}")
        monkeypatch.setenv("WATCHSTEP_TOKEN", service.recorder_token)
        mirror = f"tensorboard:{live.parent}"
        with Hook(tmp_path / "store", run="r", rules=rules, config=config, mirror=mirror) as hook:
            for step in range(10):
                hook.log(loss=float("nan") if step == 7 else 1.0)
                hook.step()
            wait_for(lambda: any("non_finite_values" in text for text in texts(live, "alerts")))
            wait_for(lambda: any("watchstep.test" in text for text in texts(live, "run")))
    assert hook.health["faults"] == {}
    alert = texts(live, "alerts")[0]
    assert alert.startswith("critical non_finite_values: firing at step 7: ")
    assert "https://watchstep.test/projects/default/runs/r/alerts/" in alert
    assert "https://watchstep.test/projects/default/runs/r" in texts(live, "run")[-1]
