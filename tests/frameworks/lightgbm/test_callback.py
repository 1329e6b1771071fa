"""LightGBM, recorded for real."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lightgbm", reason="LIGHTGBM IS NOT INSTALLED: its callback is not proven by this run")

import lightgbm

from tests.frameworks.lightgbm.boosted import (
    EVERY_STEP,
    NAMES,
    PARAMETERS,
    ROUNDS,
    arrays,
    column,
    dataset,
    trained,
)
from watchstep import CaptureConfig, Hook, StopTraining, open_run
from watchstep.capture.config import Cadence
from watchstep.errors import ConfigError
from watchstep.format.control import StopRequest
from watchstep.lightgbm import Recording


def depth_of(node: dict[str, Any]) -> int:
    children = [node[side] for side in ("left_child", "right_child") if side in node]
    return 1 + max(map(depth_of, children)) if children else 0


def gain_of(node: dict[str, Any]) -> float:
    children = [node[side] for side in ("left_child", "right_child") if side in node]
    return float(node["split_gain"]) + sum(map(gain_of, children)) if children else 0.0


def test_evaluations_are_losses_and_metrics_by_round(tmp_path: Path) -> None:
    run, _, log = trained(tmp_path)
    assert column(run, "loss") == pytest.approx(log["training"]["binary_logloss"])
    assert column(run, "loss", mode="eval") == pytest.approx(log["valid"]["binary_logloss"])
    assert column(run, "other:loss", mode="eval") == pytest.approx(log["other"]["binary_logloss"])
    assert column(run, "auc", mode="eval") == pytest.approx(log["valid"]["auc"])
    assert column(run, "binary_error") == pytest.approx(log["training"]["binary_error"])


def test_the_loss_can_be_named(tmp_path: Path) -> None:
    run, _, log = trained(tmp_path, loss="binary_error")
    assert column(run, "loss") == pytest.approx(log["training"]["binary_error"])
    assert column(run, "binary_logloss") == pytest.approx(log["training"]["binary_logloss"])


def test_trees_and_importance_are_those_of_the_model(tmp_path: Path) -> None:
    run, booster, _ = trained(tmp_path, importances=("weight", "gain", "total_gain"))
    trees = [tree["tree_structure"] for tree in booster.dump_model()["tree_info"]]
    assert column(run, "tree_depth", "max") == [depth_of(tree) for tree in trees]
    leaves = [tree["num_leaves"] for tree in booster.dump_model()["tree_info"]]
    rows = run.tensor("tree/0").statistics().to_pydict()
    assert rows["probe.tree_leaves"] == leaves
    assert rows["probe.tree_largest_node"] == [2 * count - 2 for count in leaves]
    assert rows["probe.tree_gain"] == pytest.approx([gain_of(tree) for tree in trees], rel=1e-4)
    split, gain = booster.feature_importance("split"), booster.feature_importance("gain")
    for number, name in enumerate(NAMES):
        if split[number]:
            assert column(run, f"feature_importance/weight:{name}")[-1] == split[number]
            assert column(run, f"feature_importance/total_gain:{name}")[-1] == pytest.approx(gain[number])
            assert column(run, f"feature_importance/gain:{name}")[-1] == pytest.approx(
                gain[number] / split[number]
            )
    whole = run.tensor("feature_importance/weight").statistics().to_pydict()
    assert (whole["abs_sum"][-1], whole["count"][-1]) == (sum(split), 5)
    assert whole["probe.top_share_1"][-1] == pytest.approx(max(split) / sum(split))


def test_a_tree_of_each_class(tmp_path: Path) -> None:
    _, y = arrays()
    labels = y + (np.arange(len(y)) % 3 == 0)
    params = {"objective": "multiclass", "num_class": 3, "metric": "multi_logloss"}
    run, booster, _ = trained(tmp_path, params, labels, train_data=(arrays()[0], labels), shap_rows=7)
    trees = [depth_of(tree["tree_structure"]) for tree in booster.dump_model()["tree_info"]]
    rows = run.tensor("tree_depth").statistics().to_pydict()
    assert rows["count"] == [3] * ROUNDS
    assert rows["max"] == [max(trees[3 * step : 3 * step + 3]) for step in range(ROUNDS)]
    assert run.tensor("shap_values").info.shape == (7, 3, 5)
    assert sorted(run.collections["confusion"]) == ["confusion/0", "confusion/1", "confusion/2"]
    assert column(run, "booster:num_class") == [3]


def test_hyperparameters_are_recorded_once_and_when_they_change(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    rates = lightgbm.reset_parameter(learning_rate=lambda step: 0.2 if step < 3 else 0.1)
    lightgbm.train(PARAMETERS, dataset(), ROUNDS, callbacks=[rates, Recording(hook)])
    hook.close()
    run = open_run(hook.run_url)
    rows = run.tensor("optimizer:learning_rate/0").statistics().to_pydict()
    assert (rows["step"], rows["mean"]) == ([0, 3], pytest.approx([0.2, 0.1]))
    assert (column(run, "booster:num_leaves"), column(run, "booster:lambda_l2")) == ([8], [0])
    assert "objective=binary, boosting=gbdt" in hook.health["notes"]["hyperparameters"]


def test_predictions_labels_and_shap_values_of_samples(tmp_path: Path) -> None:
    x, y = arrays()
    run, booster, _ = trained(
        tmp_path, train_data=(x, y), validation_data=(x[:40], y[:40]), sample_rows=100, shap_rows=20
    )
    sample = x[::4]
    assert column(run, "outputs")[-1] == pytest.approx(booster.predict(sample).mean())
    assert column(run, "outputs", "count", "eval") == [40] * ROUNDS
    right = (booster.predict(sample) > 0.5) == y[::4]
    for label in (0, 1):
        rows = run.tensor(f"confusion/{label}").statistics("train").to_pydict()
        before = rows["probe.all_correct"][-2], rows["probe.all_examples"][-2]
        assert rows["probe.all_correct"][-1] - before[0] == right[y[::4] == label].sum()
        assert rows["probe.all_examples"][-1] - before[1] == (y[::4] == label).sum()
    counts = run.tensor("labels").statistics("train").to_pydict()
    assert (counts["step"], counts["probe.labels_counted"][-1]) == ([0, 1, 2, 3], len(y))
    assert counts["probe.largest_class"][-1] == np.bincount(y).max()
    shap = booster.predict(x[::20], pred_contrib=True)[:, :-1]
    for number, name in enumerate(NAMES):
        means = column(run, f"feature_importance/shap:{name}")
        assert means[-1] == pytest.approx(np.abs(shap[:, number]).mean())


@pytest.mark.parametrize("boosting", ["gbdt", "dart", "rf"])
def test_the_model_is_the_same_with_and_without(boosting: str, tmp_path: Path) -> None:
    x, y = arrays()
    params = {"boosting": boosting, "bagging_fraction": 0.7, "bagging_freq": 1, "feature_fraction": 0.8}
    _, with_it, _ = trained(tmp_path, params, train_data=(x, y), shap_rows=10)
    data = dataset()
    sets = [data, *(lightgbm.Dataset(*arrays(), reference=data) for _ in range(2))]
    without = lightgbm.train({**PARAMETERS, **params}, data, ROUNDS, valid_sets=sets)
    assert with_it.model_to_string() == without.model_to_string()


def test_early_stopping_ends_after_the_last_round_is_recorded(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    data = dataset()
    noise = lightgbm.Dataset(arrays()[0], 1 - arrays()[1], reference=data)
    stop = lightgbm.early_stopping(2, verbose=False)
    booster = lightgbm.train(PARAMETERS, data, 50, valid_sets=[noise], callbacks=[stop, Recording(hook)])
    hook.close()
    assert open_run(hook.run_url).steps("eval") == list(range(booster.best_iteration + 2))


def test_cross_validation_records_means(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    found = lightgbm.cv(
        PARAMETERS,
        dataset(),
        3,
        nfold=2,
        eval_train_metric=True,
        callbacks=[Recording(hook, training="train")],
    )
    hook.close()
    run = open_run(hook.run_url)
    assert column(run, "loss") == pytest.approx(found["train binary_logloss-mean"])
    assert column(run, "loss", mode="eval") == pytest.approx(found["valid binary_logloss-mean"])
    assert "tree_depth" not in run.tensors()


def test_an_estimator_of_scikit_learn(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    x, y = arrays()
    names = np.array(["no", "yes"])[y]
    model = lightgbm.LGBMClassifier(n_estimators=ROUNDS, num_leaves=4, n_jobs=1, verbose=-1)
    model.fit(x, names, callbacks=[Recording(hook, train_data=(x, names))])
    hook.close()
    assert not hook.health["faults"]
    run = open_run(hook.run_url)
    right = model.predict(x) == names
    rows = run.tensor("confusion/1").statistics().to_pydict()
    assert rows["probe.all_correct"][-1] - rows["probe.all_correct"][-2] == right[y == 1].sum()


def test_residuals_of_a_regression(tmp_path: Path) -> None:
    x, _ = arrays()
    labels = x[:, 0] * 3
    run, booster, _ = trained(
        tmp_path, {"objective": "regression", "metric": "l2"}, labels, train_data=(x, labels)
    )
    residuals = labels - booster.predict(x)
    rows = run.tensor("residuals").statistics().to_pydict()
    assert rows["std"][-1] == pytest.approx(residuals.std())
    assert "confusion" not in run.collections


def test_data_that_cannot_be_sampled_are_noted(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    data = dataset()
    lightgbm.train(PARAMETERS, data, 2, callbacks=[Recording(hook, train_data=data)])
    hook.close()
    assert "raw data" in hook.health["notes"]["train_data"]
    assert not hook.health["faults"]
    with pytest.raises(ConfigError, match="importances"):
        Recording(hook, importances=("split",))


def test_copies_in_other_places_record_nothing_there(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    recording = Recording(hook, train_data=arrays())
    assert copy.deepcopy(recording)._recording is recording._recording
    lightgbm.train(PARAMETERS, dataset(), 2, callbacks=[pickle.loads(pickle.dumps(recording))])
    hook.close()
    assert open_run(hook.run_url).steps() == []


def test_a_stop_ends_it_where_the_hook_opted_in(tmp_path: Path) -> None:
    hook = Hook(tmp_path, on_stop="raise", config=EVERY_STEP)
    hook._recorder.request_stop(StopRequest("attempt", 2, "enough"))
    with pytest.raises(StopTraining):
        lightgbm.train(PARAMETERS, dataset(), ROUNDS, callbacks=[Recording(hook)])
    hook.close()


def test_rules_over_trees_judge_it(tmp_path: Path) -> None:
    from tests.rules.recording import evaluate_training

    x, _ = arrays()

    def train(hook: Hook) -> None:
        params = {
            **PARAMETERS,
            "objective": "regression",
            "metric": "l2",
            "num_leaves": 31,
            "min_data_in_leaf": 1,
        }
        lightgbm.train(
            params, dataset(np.exp(2 * x[:, 0])), 4, callbacks=[Recording(hook, importances=("total_gain",))]
        )

    assert {finding.step for finding in evaluate_training(train, "tree_depth", tmp_path / "a")} == {
        0,
        1,
        2,
        3,
    }
    share: dict[str, object] = {"kind": "total_gain", "features": 1, "share": 0.9}
    assert evaluate_training(train, "feature_importance", tmp_path / "b", share) != []


def test_the_last_state_is_recorded_whatever_the_cadence(tmp_path: Path) -> None:
    rare = {**EVERY_STEP.collections, "custom": Cadence(every=4), "outputs": Cadence(every=4)}
    hook = Hook(tmp_path, config=CaptureConfig(overhead_budget=None, system=None, collections=rare))
    lightgbm.train(
        PARAMETERS, dataset(), ROUNDS, callbacks=[Recording(hook, train_data=arrays(), shap_rows=5)]
    )
    hook.close()
    run = open_run(hook.run_url)
    for name in ("tree_depth", "outputs", "feature_importance/shap"):
        assert run.tensor(name).steps() == [0, 4, 5]
