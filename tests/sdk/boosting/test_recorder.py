"""Recording of boosting rounds, independent of the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.boosting.models import KnownModel
from tests.sdk.training import EVERY_STEP
from watchstep import Hook, Run, open_run
from watchstep.boosting.evaluations import MetricValue, numbers_of
from watchstep.boosting.figures import TopShares, bounded_name
from watchstep.boosting.model import evenly_spaced
from watchstep.boosting.recorder import BoostingOptions, HookRecording

ROUNDS = 6


def recorded(folder: Path, *models: KnownModel, **options: Any) -> tuple[Run, Hook]:
    hook = Hook(folder, config=EVERY_STEP)
    recording = HookRecording(hook, "known", BoostingOptions(training="train", **options))
    recording.begin()
    for model in models:
        recording.finish_round(lambda: (), lambda model=model: model, is_last=True)  # type: ignore[misc]
    hook.close()
    return open_run(hook.run_url), hook


def rows(run: Run, name: str, mode: Any = "train") -> dict[str, list[Any]]:
    table: dict[str, list[Any]] = run.tensor(name).statistics(mode).to_pydict()
    return table


def test_trees_and_importance_have_rows(tmp_path: Path) -> None:
    run, hook = recorded(tmp_path, KnownModel(), KnownModel(values=(4.0, 3.0, 1.0)))
    assert rows(run, "tree_depth")["max"] == [2, 2]
    assert (rows(run, "tree_depth")["probe.leaves"], rows(run, "tree_depth")["probe.gain"]) == (
        [4, 4],
        [1.5] * 2,
    )
    assert (rows(run, "tree/0")["mean"], rows(run, "tree/1")["mean"]) == ([2, 2], [0, 0])
    assert rows(run, "tree/0")["probe.tree_largest_node"] == [4, 4]
    assert rows(run, "feature_importance/gain:first")["mean"] == [4, 4]
    assert rows(run, "feature_importance/gain:second")["step"] == [1]  # it had none at first
    assert rows(run, "feature_importance/gain")["probe.top_share_1"] == [0.8, 0.5]
    assert rows(run, "optimizer:learning_rate/0")["mean"] == [0.5]
    assert hook.health["notes"]["hyperparameters"] == "objective=o"


def test_the_number_of_features_with_rows_is_bounded(tmp_path: Path) -> None:
    names = [f"feature {number}" for number in range(40)]
    models = [KnownModel(names=names, values=np.roll(np.arange(40.0), shift).tolist()) for shift in range(40)]
    run, _ = recorded(tmp_path, *models, features=2, importances=("gain",))
    assert len([name for name in run.tensors() if name.startswith("feature_importance/gain:")]) == 20


def test_a_fault_of_one_part_does_not_affect_the_others(tmp_path: Path) -> None:
    model = KnownModel(fails=True)
    run, hook = recorded(tmp_path, model, model, train_data=(np.eye(3), [1, 0, 0]))
    assert "known trees" in hook.health["faults"]
    assert rows(run, "outputs")["count"] == [3, 3]
    assert run.steps("train") == [0, 1]


def test_text_labels_are_numbered_in_their_order(tmp_path: Path) -> None:
    features = np.array([[0.9], [0.1], [0.9], [0.2]])
    run, _ = recorded(tmp_path, KnownModel(), train_data=(features, ["yes", "no", "no", "no"]))
    assert (rows(run, "confusion/0")["probe.examples"], rows(run, "confusion/0")["probe.correct"]) == (
        [3],
        [2],
    )
    assert rows(run, "confusion/1")["probe.correct"] == [1]


def test_labels_of_a_data_set_are_counted_once(tmp_path: Path) -> None:
    labels = np.arange(1000) % 10 == 0
    data = (np.zeros((1000, 1)), labels)
    run, _ = recorded(tmp_path, *[KnownModel()] * ROUNDS, train_data=data, sample_rows=50)
    counts = rows(run, "labels")
    assert (counts["step"], counts["probe.labels_counted"][-1]) == ([0, 1, 2, 3], 1000)
    assert (counts["probe.largest_class"][-1], counts["probe.smallest_class"][-1]) == (900, 100)
    assert rows(run, "outputs")["count"] == [50] * ROUNDS


def test_residuals_are_of_numbers_only(tmp_path: Path) -> None:
    features = np.array([[1.0], [2.0]])
    data = (features, [3.0, 3.0])
    run, _ = recorded(tmp_path / "a", KnownModel("regression"), train_data=data, validation_data=data)
    assert rows(run, "residuals")["mean"] == rows(run, "residuals", "eval")["mean"] == [1.5]
    run, _ = recorded(tmp_path / "b", KnownModel("other"), train_data=data)
    assert "residuals" not in run.tensors()


def test_shap_values_are_importance(tmp_path: Path) -> None:
    data = (np.array([[1.0, -2.0, 0.0], [3.0, 2.0, 0.0]]), [0, 1])
    run, _ = recorded(tmp_path, KnownModel(), train_data=data, shap_rows=2)
    assert rows(run, "feature_importance/shap:second")["mean"] == [2]
    assert rows(run, "feature_importance/shap")["max"] == [2]
    assert rows(run, "shap_values")["negative"] == [1]


@given(st.lists(st.floats(-1e6, 1e6), max_size=15))
def test_shares_ascend_to_one(values: list[float]) -> None:
    shares = [column[0] for column in TopShares(np.array(values, np.float64)).collect().values()]
    if any(values):
        assert shares == sorted(shares)
        assert shares[-1] == pytest.approx(1) or len(values) > 10
    else:
        assert np.isnan(shares).all()


@given(st.integers(0, 5000), st.integers(1, 5000))
def test_samples_are_evenly_spaced(length: int, most: int) -> None:
    places = evenly_spaced(length, most)
    assert len(places) == min(length, most)
    gaps = np.diff(places)
    assert not len(gaps) or gaps.max() - gaps.min() <= 1
    assert not len(places) or 0 == places[0] <= places[-1] < length


@given(st.text(), st.text())
def test_names_are_bounded(first: str, second: str) -> None:
    long = [bounded_name(f"{name}{'x' * 300}") for name in (first, second)]
    assert max(map(len, long)) <= 200
    assert (long[0] == long[1]) == (bounded_name(first) == bounded_name(second))
    bounded_name(first).encode()


def test_a_loss_is_chosen_for_each_data_set() -> None:
    evaluations = [
        MetricValue(dataset, metric, value, metric != "auc")
        for dataset in ("valid", "train", "other")
        for metric, value in (("rmse", 1.0), ("auc", 2.0), ("mae", 3.0))
    ]
    last = numbers_of(evaluations, "train")
    assert last["train"] == {"rmse": 1, "auc": 2, "loss": 3}
    assert last["eval"] == {
        "rmse": 1, "auc": 2, "loss": 3, "other:rmse": 1, "other:auc": 2, "other:loss": 3,
    }  # fmt: skip
    assert numbers_of(evaluations, "train", is_last=False)["train"] == {"loss": 1, "auc": 2, "mae": 3}
    assert numbers_of(evaluations, "train", "auc")["train"] == {"rmse": 1, "loss": 2, "mae": 3}
