"""A program with runs of the real libraries, without a network: its own values are untouched, and mirrored ones equal what was recorded."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.capture.mirror import mirrored_program
from tests.sdk.capture.mirror.mirrored_program import loss_of
from tests.sdk.event_files import accumulated
from tests.warmed import warmed
from watchstep import Run, open_run

pytestmark = pytest.mark.ci
ROOT = Path(__file__).parents[4]
STEPS, BAD_STEP = 60, 37


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mirrored")
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_ALLOW_FILE_STORE": "true",  # a database takes six seconds to make
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }
    program = folder / "program.py"
    program.write_text(Path(mirrored_program.__file__).read_text())
    warmed().run(program, folder, STEPS, BAD_STEP, folder=ROOT, environment=environment, warnings="ignore")
    return folder


@pytest.fixture(scope="module")
def read(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "read.json").read_text())
    assert read["health"]["faults"] == {}
    assert "non_finite_values" in read["stopped"]
    return read


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return open_run(folder / "store" / "default" / "r")


@pytest.fixture(scope="module")
def expected(run: Run) -> dict[str, dict[int, float]]:
    """The series as a reader of the run gets them."""
    losses = run.losses().to_pylist()
    series = {
        f"watchstep/{mode}/loss": {row["step"]: row["value"] for row in losses if row["mode"] == mode}
        for mode in ("train", "eval")
    }
    gradients = [run.series(name, "l2").to_pylist() for name in run.tensors("gradients")]
    norms: dict[int, float] = {}
    for rows in gradients:
        for row in rows:
            norms[row["step"]] = math.hypot(norms.get(row["step"], 0.0), row["l2"])
    series["watchstep/train/gradients/l2"] = norms
    assert len(series["watchstep/train/loss"]) == BAD_STEP + 1
    return series


def assert_equal(mirrored: dict[int, float], expected: dict[int, float]) -> None:
    assert mirrored.keys() == expected.keys()
    for step, value in mirrored.items():
        assert value == pytest.approx(expected[step], rel=1e-12, nan_ok=True)


def test_mlflow_has_the_series_and_the_alert(
    read: dict[str, Any], run: Run, expected: dict[str, dict[int, float]]
) -> None:
    series = {name: dict(map(tuple, rows)) for name, rows in read["mlflow"]["series"].items()}
    for name, values in expected.items():
        assert_equal(series[name], values)
    assert series["watchstep/alerts/non_finite_values"] == {BAD_STEP: 1.0}
    assert series["loss"].keys() == set(range(BAD_STEP + 1))
    tags = read["mlflow"]["tags"]
    assert (tags["watchstep.project"], tags["watchstep.run"]) == ("default", "r")
    assert open_run(tags["watchstep.url"]).steps() == run.steps()
    assert tags["watchstep.alert.non_finite_values"].startswith(f"firing at step {BAD_STEP}: ")
    assert read["health"]["mirror"]["mlflow"]["id"] == read["mlflow"]["run"]


def test_trackio_has_the_series_and_the_alert(
    read: dict[str, Any], expected: dict[str, dict[int, float]]
) -> None:
    rows = read["trackio"]["rows"]
    for name, values in expected.items():
        assert_equal({row["step"]: row[name] for row in rows if name in row}, values)
    # The program's own rows, which are logged without a step, are counted from 0 on.
    own = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert own == [(step, pytest.approx(loss_of(step), rel=1e-12)) for step in range(BAD_STEP + 1)]
    assert read["trackio"]["config"]["lr"] == 0.1
    assert read["trackio"]["config"]["watchstep"]["run"] == "r"
    assert ("Watchstep: non_finite_values", "error", BAD_STEP) in {
        (alert["title"], alert["level"], alert["step"]) for alert in read["trackio"]["alerts"]
    }


def test_wandb_has_each_value_at_its_step_and_the_programs_rows(
    read: dict[str, Any], expected: dict[str, dict[int, float]]
) -> None:
    rows = read["wandb"]["rows"]
    own = [(row["_step"], row["loss"]) for row in rows if "loss" in row]
    assert own == [(10 * step, pytest.approx(loss_of(step), rel=1e-12)) for step in range(BAD_STEP + 1)]
    mirrored = [row for row in rows if "watchstep/step" in row]
    # W&B puts what is logged between two steps of the program into one row, where a later value replaces an earlier one of the same name.
    assert 0 < len(mirrored) <= read["health"]["mirror"]["wandb"]["points"]
    for row in mirrored:
        for name, values in expected.items():
            if name in row:
                value = values[row["watchstep/step"]]
                assert float(row[name]) == pytest.approx(value, rel=1e-12, nan_ok=True)
    # The mirror and the program log from two threads, and W&B numbers rows in the order in which they arrive.
    bad = [row for row in mirrored if row["watchstep/step"] == BAD_STEP]
    assert [
        row["watchstep/alerts/non_finite_values"]
        for row in bad
        if "watchstep/alerts/non_finite_values" in row
    ] == [1]
    assert read["wandb"]["axes"] == {"watchstep/step": "", "watchstep/*": "watchstep/step"}
    assert read["wandb"]["config"]["watchstep"]["run"] == "r"
    titles = [title for title, *_ in read["wandb"]["alerts"]]
    assert titles[:1] == ["Watchstep: non_finite_values"]
    assert titles[-1] == "Watchstep: stop"


def test_tensorboard_has_the_series_and_the_alert(
    folder: Path, expected: dict[str, dict[int, float]]
) -> None:
    events = accumulated(folder / "events" / "watchstep")
    for name, values in expected.items():
        series = {event.step: event.value for event in events.Scalars(name)}
        assert series.keys() == values.keys()
        assert series == pytest.approx(values, rel=1e-6, nan_ok=True)
    texts = [
        event.tensor_proto.string_val[0].decode()
        for event in events.Tensors("watchstep/alerts/text_summary")
        if event.step == BAD_STEP
    ]
    assert texts[0].startswith(f"critical non_finite_values: firing at step {BAD_STEP}: ")
