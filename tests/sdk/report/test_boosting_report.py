"""The report of a run of gradient boosting, and what a notebook shows of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.sdk.boosting.models import KnownModel
from tests.sdk.report.test_report import HOSTILE, Page
from tests.sdk.training import EVERY_STEP
from watchstep import Hook, Run, open_run
from watchstep.boosting.evaluations import MetricValue
from watchstep.boosting.model import Task
from watchstep.boosting.recorder import BoostingOptions, HookRecording
from watchstep.reading.boosting import read_boosting
from watchstep.report import collect_report, render_report


def boosted(folder: Path, task: Task) -> Run:
    hook = Hook(folder, config=EVERY_STEP)
    random = np.random.default_rng(0)
    features = random.random((100, 3))
    labels = features[:, 0] > 0.6 if task == "binary" else features[:, 0] + random.normal(size=100)
    options = BoostingOptions(training="train", train_data=(features, labels), shap_rows=10)
    recording = HookRecording(hook, "known", options)
    model = KnownModel(task, names=("age", HOSTILE, "third"), values=(4.0, 0.5, 1.0))
    for step in range(5):
        found = [
            MetricValue("train", "auc", 0.5 + step / 10, False),
            MetricValue("train", "rmse", 1 / (1 + step), True),
        ]
        recording.finish_round(lambda found=found: found, lambda: model, is_last=True)  # type: ignore[misc]
    hook.close()
    return open_run(hook.run_url)


@pytest.fixture(scope="module")
def classified(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return boosted(tmp_path_factory.mktemp("classified"), "binary")


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return boosted(tmp_path_factory.mktemp("regression"), "regression")


def test_importance_is_by_name_and_ordered(classified: Run) -> None:
    boosting = read_boosting(classified.index, 100)
    assert boosting is not None
    gain = next(entry for entry in boosting.importances if entry.kind == "gain")
    assert (gain.step, list(gain.values)) == (4, [("age", 4), ("third", 1), (HOSTILE, 0.5)])
    assert [line.name for line in gain.lines] == ["age", "third", HOSTILE]
    assert [entry.kind for entry in boosting.importances] == ["gain", "shap", "weight"]


def test_the_report_of_a_classifier(classified: Run) -> None:
    page = Page(render_report(collect_report(classified)))
    assert "Boosting" in page.all("h2")
    headings = page.all("h3")
    for heading in (
        "Evaluations",
        "Importance at step 4: mean gain of a split",
        "Importance at step 4: mean magnitude of SHAP values",
        "Depth of a round's trees",
        "Confusion of classes",
        "Hyperparameters",
    ):
        assert heading in headings
    assert "Residuals: label minus prediction" not in headings
    cells = page.all("td")
    (first,) = (place for place, cell in enumerate(cells) if cell == "train" and cells[place + 1] == "0")
    counts = [entry for entry in read_boosting(classified.index, 100).classes if entry.label == "0"]  # type: ignore[union-attr]
    assert cells[first + 2] == str(counts[0].examples)
    assert cells[first + 4].startswith("1 (")  # examples between 0.5 and 0.6
    assert "learning_rate/0" in cells


def test_the_report_of_a_regression_has_residuals(regression: Run) -> None:
    page = Page(render_report(collect_report(regression)))
    assert {"Residuals: label minus prediction", "Residuals by power of two"} <= set(page.all("h3"))
    assert "Confusion of classes" not in page.all("h3")


def test_names_of_features_are_text(classified: Run) -> None:
    html = render_report(collect_report(classified))
    page = Page(html)
    assert [names for tag, names in page.tags if tag == "img" and names.get("src") == "x"] == []
    assert html.count("<script") == 2
    assert not any("style" in names for _, names in page.tags)
    notebook = Page(classified._repr_html_())
    assert [names for tag, names in notebook.tags if tag == "img" and names.get("src") == "x"] == []


def test_a_notebook_shows_the_same(classified: Run, regression: Run) -> None:
    headings = Page(classified._repr_html_()).all("h3")
    assert {"loss", "Evaluations", "Depth of a round's trees", "Confusion of classes"} <= set(headings)
    assert "Residuals: label minus prediction" in Page(regression._repr_html_()).all("h3")


def test_other_runs_have_no_such_section(tmp_path: Path) -> None:
    with Hook(tmp_path, config=EVERY_STEP) as hook:
        hook.log(loss=1.0)
        hook.step()
    run = open_run(hook.run_url)
    assert read_boosting(run.index, 100) is None
    assert "Boosting" not in Page(render_report(collect_report(run))).all("h2")
