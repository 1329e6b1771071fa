"""The table of runs and the overview of a run: what they show of recordings, also of hostile, missing and restarted ones."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import watchstep
from tests.sdk.format.blocks import Row, tensor
from tests.services.api.conftest import Api
from tests.services.driving import Driven
from tests.services.recording import Value, exploding_from, healthy, nan_from
from watchstep.format.documents import AttemptDocument, encode
from watchstep.format.layout import attempt_document
from watchstep.store.store import Store
from watchstep_rules.engine.judge import RuleMemory
from watchstep_services.db.models import RuleStateRow, RunRow
from watchstep_services.dispatch.dispatch import dispatch

PROJECT = "/v1/projects/vision"
RUN = f"{PROJECT}/runs/run-1"
DAY = 86_400 * 10**9
HOSTILE = "<script>alert(1)</script>\u202e\n"


def judge(api: Api, run: str, value: Value, segments: int = 3) -> int:
    """A run that the service has evaluated, in segments of 100 steps."""
    recording = api.driven.recording(run).begin()
    keys = [recording.write(seq, seq * 100, seq * 100 + 99, value) for seq in range(segments)]
    run_id = api.driven.register(run)
    api.driven.judge(run_id, *keys)
    return run_id


def names(api: Api, **parameters: Any) -> list[str]:
    return [entry["run"] for entry in api.get(f"{PROJECT}/run-table", **parameters)["runs"]]


@pytest.fixture
def three(api: Api) -> Api:
    """One run with a firing alert, one healthy run, and one that has not begun."""
    judge(api, "run-1", nan_from(5), segments=1)
    judge(api, "Run_2", healthy, segments=2)
    api.driven.register("run-3")
    return api


def test_the_table_is_sorted_and_filtered_and_paged_by_the_server(three: Api) -> None:
    assert names(three) == ["run-3", "Run_2", "run-1"]
    assert names(three, order="ascending") == ["run-1", "Run_2", "run-3"]
    assert names(three, sort="step") == ["Run_2", "run-1", "run-3"]
    assert names(three, sort="firing")[0] == "run-1"
    assert names(three, sort="name", order="ascending") == ["Run_2", "run-1", "run-3"]
    assert names(three, search="RUN-") == ["run-3", "run-1"]
    assert names(three, search="n_2") == ["Run_2"]
    assert names(three, search="%") == []
    assert names(three, state="created") == ["run-3"]
    assert names(three, alert="firing") == names(three, rule="non_finite_values") == ["run-1"]
    assert names(three, alert=["pending", "resolved"]) == []
    assert names(three, until="2000-01-01T00:00:00Z") == []
    page = three.get(f"{PROJECT}/run-table", limit=1, offset=1)
    assert (page["total"], page["offset"], [entry["run"] for entry in page["runs"]]) == (3, 1, ["Run_2"])


def test_a_row_has_what_a_person_looks_for(three: Api) -> None:
    first = {entry["run"]: entry for entry in three.get(f"{PROJECT}/run-table")["runs"]}
    assert (first["run-1"]["state"], first["run-1"]["last_step"]) == ("running", 99)
    assert first["run-1"]["alerts"] == {"pending": 0, "firing": 1, "resolved": 0, "notes": 0}
    assert (first["run-3"]["rate"], first["run-3"]["started_ns"], first["run-3"]["attempts"]) == (
        None,
        None,
        0,
    )
    three.driven.recording("run-4").begin(started_ns=1_700_000_000 * 10**9)
    run_id = judge_existing(three, "run-4")
    three.driven.change(RunRow, run_id, state="completed", ended_ns=1_700_000_000 * 10**9 + DAY)
    row = three.get(f"{PROJECT}/run-table", search="run-4")["runs"][0]
    assert row["duration_ns"] == DAY
    assert row["rate"] == {"steps_per_second": pytest.approx(10 / 86400), "kind": "mean"}


def test_a_run_that_is_found_late_ended_when_its_workers_recorded(api: Api) -> None:
    started = 1_700_000_000 * 10**9
    recording = api.driven.recording()
    recording.begin(started_ns=started, world_size=2)
    recording.write(0, 0, 9)
    recording.end(last_step=9, ended_ns=started + DAY)
    run_id = api.driven.register()
    api.driven.discover(run_id)
    api.driven.change(RunRow, run_id, state="completed", ended_ns=started + 9 * DAY)
    (row,) = api.get(f"{PROJECT}/run-table")["runs"]
    assert (row["ended_ns"], row["duration_ns"]) == (
        started + 9 * DAY,
        9 * DAY,
    )  # of one worker nothing is known
    recording.end(last_step=9, worker=1, ended_ns=started + 2 * DAY)
    api.driven.discover(run_id)
    api.driven.change(RunRow, run_id, state="completed", ended_ns=started + 9 * DAY)
    (row,) = api.get(f"{PROJECT}/run-table")["runs"]
    assert (row["ended_ns"], row["duration_ns"]) == (started + 2 * DAY, 2 * DAY)


def judge_existing(api: Api, run: str) -> int:
    key = api.driven.recording(run).write(0, 0, 9)
    run_id = api.driven.register(run)
    api.driven.judge(run_id, key)
    return run_id


def test_health_and_overhead_come_from_the_recorders(api: Api) -> None:
    run_id = api.driven.register()
    reports = {
        "node/w0": {
            "counts": {"dropped_rows": 3, "rows": 9, "faults": 1},
            "faults": {"upload": "OSError: full"},
        },
        "node/w1": {"counts": {}, "overhead": {"share": 0.004, "budget": 0.01}, "max_step": 500},
        "node/w2": {"overhead": {"share": 0.02, "budget": 0.01, "recent_share": 0.008, "steps": 500}},
    }
    api.driven.change(RunRow, run_id, health={"recorders": reports, "missing_segments": 2})
    (row,) = api.get(f"{PROJECT}/run-table")["runs"]
    assert row["overhead"] == {"share": 0.02, "recent_share": 0.008, "budget": 0.01, "steps": 500}
    assert row["max_step"] == 500
    assert row["health"] == {
        "level": "fault",
        "recorders": 3,
        "faults": 1,
        "dropped": 3,
        "problems": ["upload: OSError: full", "missing_segments: 2"],
    }


def test_hostile_reports_are_text(api: Api) -> None:
    run_id = api.driven.register()
    mirrors = {
        "wandb": "https://wandb.example/run/1",
        HOSTILE: "https://other.example/" + quote(HOSTILE),
        "script": "javascript:alert(1)",
        "broken": "http://[",
        "long": "https://x.example/" + "a" * 5000,
        "number": 7,
    }
    reports = {
        HOSTILE: {"counts": {"faults": "many", "dropped_rows": True, "dropped_steps": -4}, "faults": [1]},
        "node/w1": {
            "overhead": {"share": "much"},
            "notes": {HOSTILE: HOSTILE},
            "mirror": {name: {"url": url} for name, url in mirrors.items()},
        },
        "node/w2": "none",
        "node/w3": {"overhead": {"share": -1}, "max_step": 1e300, "counts": {"faults": 10**30}},
    }
    api.driven.change(RunRow, run_id, health={"recorders": reports, HOSTILE: HOSTILE})
    overview = api.get(f"{RUN}/overview")
    assert overview["run"]["overhead"] is None
    assert [link["name"] for link in overview["links"]] == [HOSTILE, "wandb"]
    assert overview["health"]["recorders"][1]["notes"] == {HOSTILE: HOSTILE}
    assert overview["health"]["documents"] == {HOSTILE: HOSTILE}


def test_tags_are_set_and_found(three: Api) -> None:
    path = f"{PROJECT}/runs/run-3/tags"
    assert three.call("PUT", path, {"tags": ["sweep", " base ", "sweep"]}).json() == {
        "tags": ["base", "sweep"]
    }
    assert names(three, tag="base") == names(three, search="SWEE") == ["run-3"]
    assert names(three, tag=["base", "other"]) == []
    assert three.get(f"{PROJECT}/run-table")["tags"] == ["base", "sweep"]
    assert three.status("PUT", path, {"tags": [HOSTILE]}) == 422
    assert three.status("PUT", path, {"tags": ["", "a"]}) == 422
    assert three.status("PUT", path, {"tags": []}, role="viewer") == 403
    assert three.call("PUT", path, {"tags": []}).json() == {"tags": []}
    assert names(three, tag="base") == []


@pytest.mark.ci
def test_the_overview_bins_losses_and_shows_the_states_of_each_rule(api: Api) -> None:
    judge(api, "run-1", exploding_from(200))
    overview = api.get(f"{RUN}/overview", points=3)
    assert (overview["grid"]["first"], overview["grid"]["last"]) == (0, 299)
    assert overview["grid"]["edges"] == [0, 100, 200, 300]
    assert overview["grid"]["time_ns"] == [0, 100_000_000, 200_000_000]
    (loss,) = overview["losses"]["lines"]
    assert (loss["tensor"], loss["mode"], loss["count"]) == ("loss", "train", [100, 100, 100])
    assert (loss["min"][0], loss["max"][2], loss["nonfinite"]) == (1.0, pytest.approx(3.99), [0, 0, 0])
    lanes = {lane["name"]: lane for lane in overview["lanes"]}
    assert [part["state"] for part in lanes["non_finite_values"]["intervals"]] == ["ok"]
    lane = lanes["exploding_gradient"]
    states = [(part["state"], part["first"], part["last"]) for part in lane["intervals"]]
    assert states[:3] == [("ok", 0, 199), ("pending", 200, 201), ("firing", 202, states[2][2])]
    assert states[3][0] == "resolved"
    assert states[3][2] is None
    fires = next(mark for mark in overview["marks"] if mark["type"] == "io.watchstep.alert.firing")
    assert (fires["step"], fires["fingerprint"]) == (202, lane["fingerprint"])
    zoomed = api.get(f"{RUN}/overview", points=3, first=150, last=152)
    assert zoomed["grid"]["edges"] == [150, 151, 152, 153]
    assert zoomed["losses"]["lines"][0]["mean"] == pytest.approx([2.5, 2.51, 2.52])


def test_a_restart_hides_the_steps_that_it_repeats(api: Api) -> None:
    run_id = judge(api, "run-1", exploding_from(40), segments=1)
    again = api.driven.recording(attempt="a2")
    claim = AttemptDocument("a2", 10, 1, "raise")
    again.store.create(attempt_document("a2"), encode(claim))
    key = again.write(0, 30, 129, healthy)
    api.driven.judge(run_id, key)
    overview = api.get(f"{RUN}/overview")
    assert [(entry["attempt"], entry["first_step"]) for entry in overview["attempts"]] == [
        ("a1", 0),
        ("a2", 30),
    ]
    lane = next(lane for lane in overview["lanes"] if lane["name"] == "exploding_gradient")
    assert [(part["attempt"], part["state"], part["first"], part["last"]) for part in lane["intervals"]] == [
        ("a1", "ok", 0, 29),
        ("a2", "ok", 30, None),
    ]
    fires = next(mark for mark in overview["marks"] if mark["type"].endswith("alert.firing"))
    assert fires["superseded"]
    starts = [(mark["id"], mark["step"]) for mark in overview["marks"] if mark["type"] == "attempt.started"]
    assert starts == [("attempt:a1", 0), ("attempt:a2", 30)]


def test_a_stop_is_shown_with_its_alert_and_reason(api: Api) -> None:
    run_id = judge(api, "run-1", nan_from(5), segments=1)
    stop = api.driven.actions(run_id, "stop")[0]
    dispatch(api.driven.service, stop.id)
    overview = api.get(f"{RUN}/overview")
    lane = next(lane for lane in overview["lanes"] if lane["name"] == "non_finite_values")
    assert overview["stop"]["fingerprint"] == lane["fingerprint"]
    assert "non_finite_values" in overview["stop"]["reason"]
    api.driven.change(RunRow, run_id, state="stopped", ended_ns=DAY)
    assert "non_finite_values" in api.get(f"{PROJECT}/run-table")["runs"][0]["reason"]
    assert "io.watchstep.stop.requested" in {mark["type"] for mark in overview["marks"]}


def test_a_run_without_data_has_an_overview(api: Api) -> None:
    api.driven.register()
    overview = api.get(f"{RUN}/overview")
    assert "nothing is recorded" in overview["problem"]
    assert (overview["grid"]["edges"], overview["losses"]["lines"], overview["marks"]) == ([], [], [])
    assert {lane["name"]: lane["intervals"] for lane in overview["lanes"]} == {
        "non_finite_values": [],
        "exploding_gradient": [],
    }


def test_a_run_without_losses_has_an_empty_chart(api: Api) -> None:
    recording = api.driven.recording().begin()
    weight = tensor("w", "weights", role="weight")
    recording.write_rows(0, [Row(step, weight, [1.0]) for step in range(5)])
    api.driven.register()
    overview = api.get(f"{RUN}/overview")
    assert (overview["problem"], overview["losses"]["lines"]) == ("", [])
    assert overview["grid"] == {"first": 0, "last": 4, "edges": [0, 1, 2, 3, 4, 5], "time_ns": [None] * 5}


def test_the_newest_value_is_of_the_newest_row_also_if_it_is_not_finite(api: Api) -> None:
    recording = api.driven.recording().begin()
    loss = tensor("loss", "losses", role="loss", shape=())
    rows = [Row(step, loss, [math.nan if step == 9 else 1.5]) for step in range(10)]
    recording.write_rows(0, [*rows, Row(4, loss, [2.5], mode="eval")])
    api.driven.register()
    train, evaluation = api.get(f"{RUN}/overview", points=2)["losses"]["lines"]
    assert train["mean"] == [1.5, 1.5]
    assert train["newest"] == {"step": 9, "value": None, "text": "nan"}
    assert evaluation["newest"] == {"step": 4, "value": 2.5, "text": "2.5"}


def test_metrics_and_the_system_have_a_line_per_worker_and_flags_no_mean(api: Api) -> None:
    recording = api.driven.recording().begin(world_size=2)
    loss = tensor("loss", "losses", role="loss", shape=())
    flag = tensor("skipped", "metrics", role="metric", shape=())
    load = tensor("system/cpu", "system", role="system", shape=())
    keys = []
    for worker in (0, 1):
        rows = [Row(step, loss, [1.0 + worker], worker=worker) for step in range(4)]
        rows += [Row(step, flag, [float(worker)], worker=worker) for step in range(4)]
        rows += [Row(2, load, [0.25 + worker], mode="global", worker=worker)]
        keys.append(recording.write_rows(0, rows, worker))
    api.driven.judge(api.driven.register(), *keys)
    overview = api.get(f"{RUN}/overview", points=1)
    assert (overview["workers"], overview["run"]["workers"]) == ([0, 1], 2)
    assert [line["mean"] for line in overview["losses"]["lines"]] == [[1.5]]
    for group, values in (("metrics", [[0.0], [1.0]]), ("system", [[0.25], [1.25]])):
        lines = overview[group]["lines"]
        assert [line["worker"] for line in lines] == [0, 1]
        assert [line["mean"] for line in lines] == values
    (line,) = api.get(f"{RUN}/overview", points=1, worker=1)["losses"]["lines"]
    assert (line["mean"], line["workers"]) == ([2.0], 1)


def test_an_overview_survives_deleted_and_damaged_objects(api: Api, folder_store: Store) -> None:
    judge(api, "run-1", healthy)
    folder = Path(folder_store.location) / "vision" / "run-1"
    victim = sorted((folder / "stats").rglob("*.arrow"))[1]
    victim.write_bytes(b"PAR1" + bytes(64))
    overview = api.get(f"{RUN}/overview", points=3)
    assert overview["losses"]["lines"][0]["count"] == [100, 0, 100]
    shutil.rmtree(folder / "stats")
    assert api.get(f"{RUN}/overview", points=3)["run"]["last_step"] == 299
    shutil.rmtree(folder)
    fresh = api.get(f"{PROJECT}/run-table")
    assert fresh["runs"][0]["last_step"] == 299


def test_names_of_tensors_are_text(api: Api) -> None:
    recording = api.driven.recording().begin()
    loss = tensor(HOSTILE, "losses", role="loss", shape=())
    recording.write_rows(0, [Row(step, loss, [1.0]) for step in range(5)])
    api.driven.register()
    (line,) = api.get(f"{RUN}/overview")["losses"]["lines"]
    assert line["tensor"] == HOSTILE


def test_hyperparameters_last_until_the_next_value(api: Api) -> None:
    recording = api.driven.recording().begin()
    loss = tensor("loss", "losses", role="loss", shape=())
    rate = tensor("optimizer:learning_rate/0", "metrics", role="metric", shape=())
    rows = [Row(step, loss, [1.0]) for step in range(100)]
    rows += [Row(step, rate, [value]) for step, value in ((2, 0.1), (49, 0.01), (51, 0.001))]
    rows.sort(key=lambda row: row.step)
    recording.write_rows(0, rows)
    api.driven.register()
    overview = api.get(f"{RUN}/overview", points=4)
    (line,) = overview["optimizer"]["lines"]
    assert line["count"] == [1, 1, 1, 0]
    assert line["mean"] == pytest.approx([0.1, 0.01, 0.001, 0.001])
    zoomed = api.get(f"{RUN}/overview", first=10, last=19, points=2)
    assert zoomed["configuration"]["hyperparameters"] == {rate.name: pytest.approx(0.001)}
    (line,) = zoomed["optimizer"]["lines"]
    assert (line["mean"], line["count"]) == ([pytest.approx(0.1)] * 2, [0, 0])
    assert overview["configuration"]["hyperparameters"] == {rate.name: pytest.approx(0.001)}


def test_the_overview_of_a_recorded_training(api: Api, folder_store: Store) -> None:
    with watchstep.Hook(folder_store.location, project="vision", run="run-1") as hook:
        for step in range(20):
            hook.log(loss=1 / (step + 1), accuracy=step / 20)
            hook.step()
    run_id = api.driven.register()
    api.driven.settle(run_id)
    overview = api.get(f"{RUN}/overview")
    (loss,) = overview["losses"]["lines"]
    assert loss["mean"] == pytest.approx([1 / (step + 1) for step in range(20)])
    assert [line["tensor"] for line in overview["metrics"]["lines"]] == ["accuracy"]
    assert overview["collections"] == {"losses": 1, "metrics": 1}
    assert overview["configuration"]["environment"]
    assert all(time > DAY for time in overview["grid"]["time_ns"])


def test_a_reload_reads_no_statistics_and_a_change_does(api: Api) -> None:
    run_id = judge(api, "run-1", healthy, segments=1)
    first = api.call("GET", f"{RUN}/overview")
    conditional = {"if-none-match": first.headers["etag"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "watchstep_services.api.routes.run_pages.read_scalars", lambda *_: pytest.fail("read again")
        )
        again = api.call("GET", f"{RUN}/overview", headers=conditional)
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    api.driven.recording().write(1, 100, 199)  # on the store, and not announced
    later = api.call("GET", f"{RUN}/overview", headers=conditional)
    assert (later.status_code, later.json()["grid"]["last"]) == (200, 199)
    api.driven.change(RunRow, run_id, state="lost")
    assert api.call("GET", f"{RUN}/overview", headers=conditional).json()["run"]["state"] == "lost"


def test_an_unknown_run_has_no_overview(api: Api) -> None:
    assert api.status("GET", f"{RUN}/overview", role="viewer") == 404
    assert api.status("GET", f"{PROJECT}/runs/run-1/overview", project="language") == 403


def test_the_pages_on_each_database(driven: Driven) -> None:
    api = Api.of(driven)
    judge(api, "run-1", nan_from(5), segments=1)
    judge(api, "run-2", healthy, segments=1)
    assert api.status("PUT", f"{RUN}/tags", {"tags": ["base"]}) == 200
    for sort in ("created", "name", "state", "step", "ended", "seen", "firing"):
        assert len(names(api, sort=sort)) == 2
    chosen = {"alert": ["firing", "pending"], "rule": "non_finite_values", "tag": "base", "search": "ASE"}
    assert names(api, state="running", since="2000-01-01T00:00:00Z", **chosen) == ["run-1"]
    overview = api.get(f"{RUN}/overview", points=10)
    lane = next(lane for lane in overview["lanes"] if lane["fingerprint"])
    assert [part["state"] for part in lane["intervals"]] == ["ok", "firing"]
    page = api.get(f"{RUN}/alerts/{lane['fingerprint']}/page")
    assert (page["alert"]["phase"], page["finding"]["step"]) == ("firing", 5)
    compared = api.get(f"{PROJECT}/comparison", runs="run-1,run-2")
    assert compared["divergences"][0]["first"]["step"] == 5


def test_pages_read_no_whole_rule_state(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api.of(driven)
    judge(api, "run-1", nan_from(5), segments=1)
    fingerprint = next(
        lane["fingerprint"] for lane in api.get(f"{RUN}/overview")["lanes"] if lane["fingerprint"]
    )
    table = f"{PROJECT}/rule-table"
    pages = (RUN, f"{RUN}/rules", f"{RUN}/overview", f"{RUN}/alerts/{fingerprint}/page", table)

    def parsed(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a page parses a whole rule state")

    monkeypatch.setattr(RuleMemory, "model_validate_json", parsed)
    run, rules, overview, alert, shown = (api.get(page) for page in pages)
    assert run["rules"] == rules["rules"]
    rule = next(entry for entry in rules["rules"] if entry["name"] == alert["rule"]["name"])
    assert (rule["health"], rule["phase"], rule["problem"]) == ("ok", "firing", "")
    assert rule["evaluated_rows"] > 0
    assert rule["findings"] > 0
    lane = next(entry for entry in overview["lanes"] if entry["name"] == rule["name"])
    assert (lane["health"], lane["phase"], alert["rule"]["health"]) == ("ok", "firing", "ok")
    counts = next(entry["health"] for entry in shown["rules"] if entry["name"] == rule["name"])
    assert counts == {"ok": 1, "no_data": 0, "error": 0}

    driven.change(RuleStateRow, state="damaged")
    run, rules, overview, alert, shown = (api.get(page) for page in pages)
    assert {entry["health"] for entry in rules["rules"]} == {"no_data"}
    assert alert["rule"]["health"] == "no_data"
