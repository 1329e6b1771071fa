"""The comparison of runs: a common grid, the first differences, and settings, also of runs that cannot be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

from tests.services.api.conftest import Api
from tests.services.recording import Recording, Value, exploding_from, healthy, nan_from
from watchstep.format import documents, segment
from watchstep.format.documents import RunDocument
from watchstep.format.layout import SCHEMA_VERSION
from watchstep.store.store import Store

COMPARISON = "/v1/projects/vision/comparison"


def record(api: Api, store: Store, run: str, value: Value, *, seconds: float = 0) -> None:
    """A run of 200 steps in two segments."""
    recording = Recording(store, run).begin()
    for seq in range(2):
        recording.write(seq, seq * 100, seq * 100 + 99, value, taken_ns=int(seconds * 1e9))
    api.driven.register(run)


def get(api: Api, **parameters: Any) -> Any:
    answer = api.call("GET", f"{COMPARISON}?{urlencode(parameters, doseq=True)}", role="viewer")
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def recorded(api: Api, folder_store: Store) -> Api:
    record(api, folder_store, "base", exploding_from(1000))
    record(api, folder_store, "same", exploding_from(1000), seconds=3600)
    record(api, folder_store, "late", exploding_from(150))
    return api


def test_runs_are_binned_over_one_grid(recorded: Api) -> None:
    answer = get(recorded, runs="base,late", tensor="second.weight:gradient", figure="abs_max", points=4)
    assert answer["grid"] == {"align": "step", "edges": [0, 50, 100, 150, 200]}
    (series,) = answer["series"]
    base, late = series["lines"]
    assert (base["run"], late["run"]) == ("base", "late")
    assert base["count"] == late["count"] == [50] * 4
    assert base["mean"][:3] == late["mean"][:3]
    assert late["min"][3] == late["max"][3] == 1e6
    assert answer["tensors"] == ["loss", "first.weight:gradient", "second.weight:gradient"]


def test_the_default_series_are_the_losses(recorded: Api) -> None:
    (series,) = get(recorded, runs="base,same")["series"]
    assert (series["tensor"], series["figure"], series["mode"]) == ("loss", "mean", "train")


def test_runs_are_aligned_by_time_since_their_first_row(recorded: Api) -> None:
    answer = get(recorded, runs="base,same", align="time", points=2)
    (series,) = answer["series"]
    assert series["lines"][0]["mean"] == series["lines"][1]["mean"]
    assert answer["grid"]["edges"][0] == 0
    started = [run["started_ns"] for run in answer["runs"]]
    assert started[1] - started[0] == 3600 * 10**9
    assert [run["location"].rsplit("/", 1)[1] for run in answer["runs"]] == ["base", "same"]


def test_the_first_difference_of_each_tensor_is_named(recorded: Api) -> None:
    same, late = get(recorded, runs="base,same,late")["divergences"]
    assert (same["first"], same["tensors"], same["complete"]) == (None, [], True)
    assert (same["compared_first"], same["compared_last"], same["rows"]) == (0, 199, 600)
    assert [(entry["step"], entry["tensor"]) for entry in late["tensors"]] == [
        (150, "second.weight:gradient")
    ]
    assert late["first"] == late["tensors"][0]
    assert late["first"]["b"] == 1e6
    assert get(recorded, runs="base,late", divergence="false")["divergences"] == []


def test_runs_without_data_losses_or_a_readable_document_are_shown_with_the_problem(
    recorded: Api, folder_store: Store
) -> None:
    recorded.driven.register("empty")
    record(recorded, folder_store, "nan", nan_from(5))
    damaged = Recording(folder_store, "damaged").begin()
    recorded.driven.register("damaged")
    damaged.store.put("run.json", b"{")
    answer = get(recorded, runs="base,empty,nan,damaged")
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
def test_other_names_are_refused(recorded: Api, runs: str, status: int) -> None:
    answer = recorded.call("GET", f"{COMPARISON}?{urlencode({'runs': runs})}", role="viewer")
    assert answer.status_code == status, answer.text


def test_an_unknown_figure_is_refused(recorded: Api) -> None:
    answer = recorded.call("GET", f"{COMPARISON}?runs=base,late&figure=nothing", role="viewer")
    assert answer.status_code == 422


def test_differing_settings_are_listed(api: Api, folder_store: Store) -> None:
    for run, rate in (("one", 0.1), ("two", 0.2)):
        folder_store.put(
            f"vision/{run}/run.json",
            f'{{"project": "vision", "run": "{run}", "created_ns": 1, "config": {{"model": {{"lr": {rate}, "depth": 4}}}}, '
            f'"environment": {{"torch": "2.{rate}"}}, "schema": {SCHEMA_VERSION}}}'.encode(),
        )
        Recording(folder_store, run).write(0, 0, 3, healthy)
        api.driven.register(run)
    assert get(api, runs="one,two")["settings"] == [
        {"source": "config", "name": "model.lr", "values": [0.1, 0.2]},
        {"source": "environment", "name": "torch", "values": ["2.0.1", "2.0.2"]},
    ]


def test_hostile_numbers_are_shown(api: Api, folder_store: Store) -> None:
    """An integer that no float represents, and times at both ends of 64 bits."""
    recordings = [Recording(folder_store, run).begin() for run in ("base", "hostile")]
    document = RunDocument("vision", "hostile", 1, config={"seed": 10**400})
    recordings[1].store.put("run.json", documents.encode(document))
    for recording in recordings:
        recording.write(0, 0, 3)
        api.driven.register(recording.run)
    rows = segment.decode(recordings[1].encoded(0, 2), "rows")
    times = np.repeat(np.array([-(2**63), -1, 2**63 - 1]), 3)
    key = recordings[1].key(0, 0, 3)
    recordings[1].store.put(key.path, segment.encode(replace(rows, time_ns=times)))
    answer = get(api, runs="base,hostile", align="time", points=4)
    (series,) = answer["series"]
    assert [sum(line["count"]) for line in series["lines"]] == [4, 3]
    assert answer["grid"]["edges"] == [0, 2**60, 2**61, 3 * 2**60, 2**62 + 1]
    assert answer["settings"] == [
        {"source": "config", "name": "seed", "values": [None, "1" + 299 * "0"]},
    ]


def test_a_reload_costs_no_reading(recorded: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"authorization": f"Bearer {recorded.token('viewer')}"}
    path = f"{COMPARISON}?runs=base,late"
    first = recorded.client.request("GET", path, headers=headers)
    monkeypatch.setattr(
        "watchstep_services.api.routes.comparison.read_compared", lambda *_: pytest.fail("read again")
    )
    again = recorded.client.request("GET", path, headers={**headers, "if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
