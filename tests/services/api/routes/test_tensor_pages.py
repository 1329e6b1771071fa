"""Pages of tensors, of one run and of several."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from tests.services.api.conftest import Api
from tests.services.recording import LAYERS, Recording, Value, exploding_from, healthy, nan_from
from watchstep.format import documents, segment
from watchstep.format.documents import AttemptDocument, RunDocument
from watchstep.format.layout import SCHEMA_VERSION, SnapshotKey, attempt_document
from watchstep.reading import index as index_module
from watchstep.reading.compaction import compact
from watchstep.reading.grid import GridRequest
from watchstep.reading.run import Run, open_run
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.api.queries.forms import View
from watchstep_services.api.queries.view_cache import ViewCache
from watchstep_services.api.routes import tensor_pages
from watchstep_services.db.models import FindingRow, RuleConfigRow

RUN = "/v1/projects/vision/runs/run-1"
FIRST, SECOND = (info.name for info in LAYERS)
STEPS = 120
RULES = (
    RuleConfig(rule="vanishing_gradient", params={"threshold": 1e-6}, severity="info"),
    RuleConfig(rule="overfit"),
)
COMPARISON = "/v1/projects/vision/comparison"


@pytest.fixture
def recorded(api: Api) -> Api:
    recording = api.driven.recording().begin()
    for seq in range(3):
        recording.write(seq, seq * 40, seq * 40 + 39, exploding_from(100))
    api.driven.register(rules=RULES)
    return api


@pytest.fixture
def run(recorded: Api, folder_store: Store) -> Run:
    return open_run(f"{folder_store.location}/vision/run-1")


def call(api: Api, what: str, headers: dict[str, str] | None = None, **parameters: Any) -> httpx.Response:
    path = f"{RUN}/{what}?{urlencode(parameters, doseq=True)}"
    return api.call("GET", path, role="viewer", headers=headers or {})


def get(api: Api, what: str, **parameters: Any) -> Any:
    return api.get(f"{RUN}/{what}", **parameters)


@pytest.mark.ci
def test_a_heatmap_with_its_module_tree(recorded: Api, run: Run) -> None:
    heatmap = get(
        recorded, "heatmap", collection="gradients", figure="l2", reduce=["mean", "max"], first=30, last=110
    )
    grid = run.grid(GridRequest((FIRST, SECOND), "l2", 200, first=30, last=110))
    assert heatmap["tensors"] == [FIRST, SECOND]
    assert heatmap["edges"] == grid.edges.tolist()
    assert (heatmap["first"], heatmap["last"]) == (0, STEPS - 1)
    assert heatmap["mean"] == grid.mean.tolist()
    assert heatmap["max"] == grid.max.tolist()
    assert heatmap["min"] is None
    assert (heatmap["low"], heatmap["high"]) == (np.nanmin(grid.mean), np.nanmax(grid.max))
    assert [entry["module_type"] for entry in heatmap["layers"]] == ["Linear", "Linear"]
    assert [(node["path"], node["rows"], node["end_row"]) for node in heatmap["modules"]] == [
        ("first", [0], 1),
        ("second", [1], 2),
    ]
    assert heatmap["nonfinite"] == {"row": [], "column": [], "count": []}
    few = get(recorded, "heatmap", collection="gradients", figure="l2", rows=1)
    assert (few["tensors"], few["left_out"]) == ([FIRST], 1)


def test_nonfinite_elements_of_a_heatmap(api: Api) -> None:
    api.driven.recording().begin().write(0, 0, 9, nan_from(5))
    api.driven.register()
    heatmap = get(api, "heatmap", tensor="loss", figure="mean", points=2)
    assert heatmap["nonfinite"] == {"row": [0], "column": [1], "count": [5]}
    assert heatmap["mean"] == [[1.0, None]]
    assert heatmap["modules"] == []
    matrices = safetensors.numpy.load(
        call(api, "heatmap", tensor="loss", figure="mean", points=2, format="safetensors").content
    )
    assert matrices["nonfinite"].tolist() == [[0, 5]]
    assert np.isnan(matrices["mean"][0, 1])


@pytest.mark.parametrize("by_header", [False, True])
def test_a_heatmap_as_matrices(recorded: Api, run: Run, by_header: bool) -> None:
    parameters: dict[str, Any] = {"collection": "gradients", "figure": "l2", "points": 7, "reduce": ["min"]}
    if by_header:
        answer = call(recorded, "heatmap", {"accept": "application/vnd.safetensors;q=1, */*"}, **parameters)
    else:
        answer = call(recorded, "heatmap", format="safetensors", **parameters)
    assert answer.headers["content-type"] == "application/vnd.safetensors"
    matrices = safetensors.numpy.load(answer.content)
    grid = run.grid(GridRequest((FIRST, SECOND), "l2", 7))
    assert set(matrices) == {"edges", "min", "nonfinite"}
    np.testing.assert_array_equal(matrices["min"], grid.min.astype(np.float32))
    np.testing.assert_array_equal(matrices["edges"], grid.edges)
    size = int.from_bytes(answer.content[:8], "little")
    head = json.loads(answer.content[8 : 8 + size])
    described = json.loads(head["__metadata__"]["description"])
    whole = get(recorded, "heatmap", **parameters)
    assert described == {
        name: whole[name] for name in whole if name not in {"edges", "mean", "min", "max", "nonfinite"}
    }


def read_table(answer: httpx.Response, form: str) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    if form == "csv":
        assert answer.headers["content-disposition"].endswith('.csv"')
        return list(csv.DictReader(io.StringIO(answer.text)))
    if form == "parquet":
        table = pq.read_table(pa.BufferReader(answer.content))
    else:
        table = pa.ipc.open_stream(answer.content).read_all()
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


@pytest.mark.parametrize("form", ["csv", "parquet", "arrow"])
def test_every_picture_offers_its_data(recorded: Api, run: Run, form: str) -> None:
    grid = run.grid(GridRequest((FIRST, SECOND), "l2", 3))
    cells = read_table(
        call(recorded, "heatmap", collection="gradients", figure="l2", points=3, format=form), form
    )
    assert [(row["tensor"], int(row["first_step"]), int(row["last_step"])) for row in cells] == [
        (name, first, first + 39) for name in (FIRST, SECOND) for first in (0, 40, 80)
    ]
    assert [float(row["max"]) for row in cells] == grid.max.ravel().tolist()
    histogram = run.histogram(SECOND, 3)
    rows = read_table(call(recorded, "histogram", tensor=SECOND, points=3, format=form), form)
    assert sum(int(row["count"]) for row in rows if row["kind"] == "finite") == histogram.counts.sum()
    assert [float(row["lower"]) for row in rows] == [1.0, 1.0, 1.0, 524288.0]
    points = read_table(call(recorded, "series", tensor=SECOND, figure="l2", points=5, format=form), form)
    assert len(points) == 5
    assert sum(int(row["count"]) for row in points) == STEPS
    room = read_table(call(recorded, "headroom", collection="gradients", format=form), form)
    assert [row["tensor"] for row in room] == [FIRST, SECOND]
    assert [row["fp16_state"] for row in room] == ["ok", "overflow"]


def test_histograms_of_a_range(recorded: Api, run: Run) -> None:
    histogram = get(recorded, "histogram", tensor=SECOND, first=90, last=109, points=2)
    assert histogram["edges"] == [90, 100, 110]
    assert sum(map(sum, histogram["counts"])) == 20
    assert run.histogram(SECOND, 2, first=90, last=109).edges.tolist() == [90, 100, 110]


def test_headroom(recorded: Api) -> None:
    room = get(recorded, "headroom", collection="gradients", points=2)
    assert [each["name"] for each in room["formats"]] == ["fp16", "bf16", "fp32", "fp8_e4m3", "fp8_e5m2"]
    first, second = room["tensors"]
    assert (second["largest"], second["largest_step"]) == (1e6, 100)
    assert (first["smallest"], first["smallest_step"]) == (1.0, 0)
    assert [each["state"] for each in second["formats"]] == ["overflow", "ok", "ok", "overflow", "overflow"]
    assert room["largest"][1] == 1e6
    assert first["shares"] == []


def test_the_page_of_a_tensor(recorded: Api, folder_store: Store, run: Run) -> None:
    store = folder_store.child("vision/run-1/")
    for key in (
        SnapshotKey("a1", 0, 7, "train", ""),
        SnapshotKey("a1", 0, 9, "train", "gradients"),
        SnapshotKey("a1", 0, 8, "train", "activations"),
    ):
        store.put(key.path, b"not read")
    page = get(recorded, "tensor", tensor=SECOND, figure=["l2", "abs_max"], points=50, rows=4)
    assert page["tensor"]["name"] == SECOND
    assert (page["first"], page["last"], page["modes"], page["workers"]) == (0, STEPS - 1, ["train"], [0])
    assert [each["figure"] for each in page["series"]] == ["l2", "abs_max"]
    assert (
        page["series"][0]["lines"] == get(recorded, "series", tensor=SECOND, figure="l2", points=50)["lines"]
    )
    assert page["histogram"] == get(recorded, "histogram", tensor=SECOND, points=4)
    assert {"l2", "mean", "nan"} <= set(page["figures"])
    assert page["headroom"]["formats"][0]["state"] == "overflow"
    shares = {each["format"]: each["overflow"] for each in page["headroom"]["shares"]}
    assert (shares["fp16"], shares["bf16"]) == (pytest.approx(20 / 30), 0.0)
    assert [(entry["step"], entry["collection"]) for entry in page["saved"]] == [(7, ""), (9, "gradients")]
    assert page["location"] == run.location
    assert get(recorded, "tensor", tensor=SECOND, rows=0)["histogram"] is None


@pytest.mark.ci
def test_the_neighbours_of_a_tensor(recorded: Api) -> None:
    neighbours = get(recorded, "tensor", tensor=SECOND, rows=0)["neighbours"]
    assert (neighbours["previous"], neighbours["next"]) == (FIRST, None)
    assert [entry["name"] for entry in neighbours["module"]] == [SECOND]
    neighbours = get(recorded, "tensor", tensor=FIRST, rows=0)["neighbours"]
    assert (neighbours["previous"], neighbours["next"]) == (None, SECOND)
    alone = get(recorded, "tensor", tensor="loss", rows=0)["neighbours"]
    assert (alone["previous"], alone["next"], alone["module"]) == (None, None, [])


@pytest.mark.ci
def test_thresholds_of_the_rules_that_judge_a_tensor(recorded: Api) -> None:
    before = call(recorded, "tensor", tensor=SECOND)
    rules = {rule["name"]: rule for rule in before.json()["rules"]}
    assert {"exploding_gradient", "vanishing_gradient"} <= set(rules)
    assert "overfit" not in rules
    assert rules["vanishing_gradient"]["thresholds"] == [
        {"figure": "abs_mean", "parameter": "threshold", "value": 1e-6, "side": "below"}
    ]
    assert rules["exploding_gradient"]["findings"] == []
    finding = {"mode": "train", "worker": 0, "value": 1e6, "threshold": "Infinity", "message": "m"}
    with recorded.driven.service.database.write() as session:
        config = session.query(RuleConfigRow).filter_by(name="exploding_gradient").one()
        for step, name in ((100, SECOND), (101, FIRST)):
            session.add(
                FindingRow(config_id=config.id, attempt="a1", step=step, finding={**finding, "tensor": name})
            )
    after = call(recorded, "tensor", {"if-none-match": before.headers["etag"]}, tensor=SECOND)
    assert after.status_code == 200
    (found,) = [rule for rule in after.json()["rules"] if rule["name"] == "exploding_gradient"]
    assert [(each["step"], each["value"], each["threshold"]) for each in found["findings"]] == [
        (100, 1e6, None)
    ]
    assert found["left_out"] == 0


@pytest.mark.parametrize(
    ("what", "parameters"),
    [
        ("heatmap", {"collection": "gradients", "figure": "l2"}),
        ("heatmap", {"collection": "gradients", "figure": "l2", "format": "safetensors"}),
        ("headroom", {"collection": "gradients"}),
        ("tensor", {"tensor": SECOND}),
        ("series", {"tensor": SECOND, "figure": "l2"}),
        ("series", {"tensor": SECOND, "figure": "l2", "format": "csv"}),
        ("histogram", {"tensor": SECOND}),
        ("deviations", {"attempt": "a1", "step": 100}),
    ],
)
def test_unchanged_views_read_no_statistics(
    recorded: Api, monkeypatch: pytest.MonkeyPatch, what: str, parameters: dict[str, Any]
) -> None:
    first = call(recorded, what, **parameters)
    with monkeypatch.context() as patch:
        patch.setattr(index_module.RunIndex, "_decoding", None)  # reading statistics would fail
        again = call(recorded, what, {"if-none-match": first.headers["etag"]}, **parameters)
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
        assert call(recorded, what, **parameters).content == first.content
    recorded.driven.recording().write(3, STEPS, STEPS + 9, exploding_from(100))
    new = call(recorded, what, {"if-none-match": first.headers["etag"]}, **parameters)
    assert new.status_code == 200
    assert new.headers["etag"] != first.headers["etag"]


@pytest.mark.ci
def test_a_compaction_changes_no_picture(recorded: Api, folder_store: Store) -> None:
    parameters = {"collection": "gradients", "figure": "l2", "points": 9}
    before = get(recorded, "heatmap", **parameters)
    compact(f"{folder_store.location}/vision/run-1", delete_after=0)
    assert get(recorded, "heatmap", **parameters) == before


@pytest.mark.parametrize(
    ("what", "status"),
    [
        ("heatmap?figure=l2", 422),
        ("heatmap?figure=l2&collection=gradients&tensor=loss", 422),
        ("heatmap?figure=l2&collection=nothing", 422),
        ("heatmap?figure=nothing&collection=gradients", 422),
        ("heatmap?figure=l2&tensor=nothing", 404),
        ("heatmap?figure=l2&collection=gradients&points=2001", 422),
        ("heatmap?figure=l2&collection=gradients&reduce=sum", 422),
        ("headroom", 422),
        ("headroom?tensor=nothing", 404),
        ("headroom?collection=gradients&format=safetensors", 422),
        ("tensor?tensor=nothing", 404),
        ("tensor?tensor=loss&figure=nothing", 422),
        ("series?tensor=loss&figure=mean&format=xml", 422),
    ],
)
def test_invalid_requests(recorded: Api, what: str, status: int) -> None:
    answer = recorded.call("GET", f"{RUN}/{what}")
    assert answer.status_code == status, answer.text


def test_what_is_encoded_is_part_of_the_memory_of_a_query(
    recorded: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_pages, "_ENCODED_BYTES", 1 << 40)
    parameters: dict[str, Any] = {"collection": "gradients", "figure": "l2"}
    for form, status in (("safetensors", 200), ("json", 413), ("csv", 413)):
        assert call(recorded, "heatmap", format=form, **parameters).status_code == status


def test_the_memory_of_cached_views_is_bounded() -> None:
    cache = ViewCache(100)
    for name in "abcde":
        cache.add(name, View(bytes(25), "text/plain"))
    assert [cache.get(name) is not None for name in "abcde"] == [False, True, True, True, True]
    cache.get("b")
    cache.add("f", View(bytes(20), "text/plain"))
    assert cache.get("b") is not None
    assert cache.get("c") is None
    cache.add("large", View(bytes(26), "text/plain"))
    assert cache.get("large") is None


def record(api: Api, run: str, value: Value, *, seconds: float = 0) -> None:
    """A run of 200 steps in two segments."""
    recording = api.driven.recording(run).begin()
    for seq in range(2):
        recording.write(seq, seq * 100, seq * 100 + 99, value, taken_ns=int(seconds * 1e9))
    api.driven.register(run)


def compare(api: Api, **parameters: Any) -> Any:
    return api.get(COMPARISON, **parameters)


@pytest.fixture
def three_runs(api: Api) -> Api:
    record(api, "base", exploding_from(1000))
    record(api, "same", exploding_from(1000), seconds=3600)
    record(api, "late", exploding_from(150))
    return api


def test_runs_are_binned_over_one_grid(three_runs: Api) -> None:
    answer = compare(
        three_runs, runs="base,late", tensor="second.weight:gradient", figure="abs_max", points=4
    )
    assert answer["grid"] == {"align": "step", "edges": [0, 50, 100, 150, 200]}
    (series,) = answer["series"]
    base, late = series["lines"]
    assert (base["run"], late["run"]) == ("base", "late")
    assert base["count"] == late["count"] == [50] * 4
    assert base["mean"][:3] == late["mean"][:3]
    assert late["min"][3] == late["max"][3] == 1e6
    assert answer["tensors"] == ["loss", "first.weight:gradient", "second.weight:gradient"]


def test_the_default_series_are_the_losses(three_runs: Api) -> None:
    (series,) = compare(three_runs, runs="base,same")["series"]
    assert (series["tensor"], series["figure"], series["mode"]) == ("loss", "mean", "train")


def test_runs_are_aligned_by_time_since_their_first_row(three_runs: Api) -> None:
    answer = compare(three_runs, runs="base,same", align="time", points=2)
    (series,) = answer["series"]
    assert series["lines"][0]["mean"] == series["lines"][1]["mean"]
    assert answer["grid"]["edges"][0] == 0
    started = [run["started_ns"] for run in answer["runs"]]
    assert started[1] - started[0] == 3600 * 10**9
    assert [run["location"].rsplit("/", 1)[1] for run in answer["runs"]] == ["base", "same"]


def test_the_first_difference_of_each_tensor_is_named(three_runs: Api) -> None:
    same, late = compare(three_runs, runs="base,same,late")["divergences"]
    assert (same["first"], same["tensors"], same["complete"]) == (None, [], True)
    assert (same["compared_first"], same["compared_last"], same["rows"]) == (0, 199, 600)
    assert [(entry["step"], entry["tensor"]) for entry in late["tensors"]] == [
        (150, "second.weight:gradient")
    ]
    assert late["first"] == late["tensors"][0]
    assert late["first"]["b"] == 1e6
    assert compare(three_runs, runs="base,late", divergence="false")["divergences"] == []


def test_runs_without_data_losses_or_a_readable_document_are_shown_with_the_problem(three_runs: Api) -> None:
    three_runs.driven.register("empty")
    record(three_runs, "nan", nan_from(5))
    damaged = three_runs.driven.recording("damaged").begin()
    three_runs.driven.register("damaged")
    damaged.store.put("run.json", b"{")
    answer = compare(three_runs, runs="base,empty,nan,damaged")
    problems = [run["problem"] for run in answer["runs"]]
    assert problems[0] == problems[2] == ""
    assert "nothing is recorded" in problems[1]
    assert "not a document of this kind" in problems[3]
    (series,) = answer["series"]
    assert [line["run"] for line in series["lines"]] == ["base", "nan"]
    assert series["lines"][1]["nonfinite"][10] == 1
    assert [entry["run"] for entry in answer["divergences"]] == ["nan"]


@pytest.mark.parametrize(
    ("runs", "status"),
    [
        ("base", 422),
        ("base,base", 422),
        ("base,absent", 404),
        ("base,../etc", 422),
        ("a,b,c,d,e,f,g,h,i", 422),
    ],
)
def test_other_names_are_refused(three_runs: Api, runs: str, status: int) -> None:
    answer = three_runs.call("GET", f"{COMPARISON}?{urlencode({'runs': runs})}", role="viewer")
    assert answer.status_code == status, answer.text


def test_an_unknown_figure_is_refused(three_runs: Api) -> None:
    answer = three_runs.call("GET", f"{COMPARISON}?runs=base,late&figure=nothing", role="viewer")
    assert answer.status_code == 422


def test_differing_settings_are_listed(api: Api, folder_store: Store) -> None:
    for run, rate in (("one", 0.1), ("two", 0.2)):
        folder_store.put(
            f"vision/{run}/run.json",
            f'{{"project": "vision", "run": "{run}", "created_ns": 1, "config": {{"model": {{"lr": {rate}, "depth": 4}}}}, '
            f'"schema": {SCHEMA_VERSION}}}'.encode(),
        )
        claim = AttemptDocument("a1", 1, environment={"torch": f"2.{rate}"})
        folder_store.put(f"vision/{run}/{attempt_document('a1')}", documents.encode(claim))
        Recording(folder_store, run).write(0, 0, 3, healthy)
        api.driven.register(run)
    settings = compare(api, runs="one,two")["settings"]
    assert settings["differing"] == [
        {"source": "environment", "name": "torch", "values": ["2.0.1", "2.0.2"], "step": None},
        {"source": "config", "name": "model.lr", "values": [0.1, 0.2], "step": None},
    ]
    assert settings["compared"] == {"hyperparameter": 0, "environment": 1, "config": 2}


def test_hostile_numbers_are_shown(api: Api) -> None:
    """An integer that no float represents, and times at both ends of 64 bits."""
    recordings = [api.driven.recording(run).begin() for run in ("base", "hostile")]
    document = RunDocument("vision", "hostile", 1, config={"seed": 10**400})
    recordings[1].store.put("run.json", documents.encode(document))
    for recording in recordings:
        recording.write(0, 0, 3)
        api.driven.register(recording.run)
    rows = segment.decode(recordings[1].encoded(0, 2), "rows")
    times = np.repeat(np.array([-(2**63), -1, 2**63 - 1]), 3)
    key = recordings[1].key(0, 0, 3)
    recordings[1].store.put(key.path, segment.encode(replace(rows, time_ns=times)))
    answer = compare(api, runs="base,hostile", align="time", points=4)
    (series,) = answer["series"]
    assert [sum(line["count"]) for line in series["lines"]] == [4, 3]
    assert answer["grid"]["edges"] == [0, 2**60, 2**61, 3 * 2**60, 2**62 + 1]
    assert answer["settings"]["differing"] == [
        {"source": "config", "name": "seed", "values": [None, "1" + 299 * "0"], "step": None},
    ]


def test_a_reload_costs_no_reading(three_runs: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{COMPARISON}?runs=base,late"
    first = three_runs.call("GET", path)
    monkeypatch.setattr(
        "watchstep_services.api.routes.comparison.read_compared", lambda *_: pytest.fail("read again")
    )
    again = three_runs.call("GET", path, headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
