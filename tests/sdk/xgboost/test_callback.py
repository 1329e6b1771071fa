"""XGBoost, recorded for real."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sdk.training import EVERY_STEP, recorded
from watchstep import CaptureConfig, Collection, Hook, Run, StopTraining
from watchstep.capture.config import Cadence
from watchstep.errors import ConfigError
from watchstep.format.control import StopRequest

xgboost = pytest.importorskip(
    "xgboost", reason="XGBOOST IS NOT INSTALLED: its callback is not proven by this run"
)
ROUNDS = 6
PARAMETERS: dict[str, Any] = {"objective": "binary:logistic", "max_depth": 3, "nthread": 1, "seed": 1}


def data(rows: int = 200) -> Any:
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 5))
    return xgboost.DMatrix(x, x[:, 0] * x[:, 1] + 0.1 * random.normal(size=rows) > 0)


def trained(
    store: Path, evals: tuple[str, ...] = ("train", "valid"), **params: Any
) -> tuple[Run, Any, dict[str, Any]]:
    from watchstep.xgboost import Recording

    hook = Hook(store, overhead_budget=1.0)
    log: dict[str, Any] = {}
    matrices = data()
    booster = xgboost.train(
        {**PARAMETERS, **params},
        matrices,
        ROUNDS,
        evals=[(matrices, name) for name in evals],
        callbacks=[Recording(hook)],
        evals_result=log,
        verbose_eval=False,
    )
    return recorded(hook), booster, log


def column(run: Run, name: str, figure: str = "mean", mode: str = "train") -> list[float]:
    rows = run.tensor(name).statistics().to_pydict()
    return [value for value, row_mode in zip(rows[figure], rows["mode"], strict=True) if row_mode == mode]


def test_evaluations_are_losses_and_metrics_by_round(tmp_path: Path) -> None:
    run, _, log = trained(tmp_path, eval_metric=["error", "auc", "logloss"])
    assert column(run, "loss") == pytest.approx(log["train"]["logloss"])
    assert column(run, "loss", mode="eval") == pytest.approx(log["valid"]["logloss"])
    assert column(run, "auc", mode="eval") == pytest.approx(log["valid"]["auc"])
    assert column(run, "error") == pytest.approx(log["train"]["error"])
    assert (run.tensor("loss").info.role, run.tensor("auc").info.role) == ("loss", "metric")
    assert run.tensor("loss").statistics().to_pydict()["step"][-1] == ROUNDS - 1


def test_several_validation_sets(tmp_path: Path) -> None:
    run, _, log = trained(tmp_path, ("train", "valid", "other"), eval_metric="rmse")
    assert column(run, "loss", mode="eval") == pytest.approx(log["valid"]["rmse"])
    assert column(run, "other:loss", mode="eval") == pytest.approx(log["other"]["rmse"])


@pytest.mark.parametrize(("params", "trees"), [({}, 1), ({"num_parallel_tree": 3}, 3)])
def test_trees_and_features(params: dict[str, Any], trees: int, tmp_path: Path) -> None:
    run, booster, _ = trained(tmp_path, **params)
    rows = run.tensor("tree_depth").statistics().to_pydict()
    assert set(rows["count"]) == {trees}
    assert set(rows["max"]) == {3.0}
    scores = booster.get_score(importance_type="weight")
    whole = run.tensor("feature_importance/weight").statistics().to_pydict()
    if rows["step"][-1] == ROUNDS - 1:  # the budget may leave the last round out
        assert whole["abs_sum"][-1] == sum(scores.values())
        assert whole["probe.top_share_1"][-1] == pytest.approx(max(scores.values()) / sum(scores.values()))
    assert set(whole["count"]) == {5}
    assert whole["probe.top_share_5"][0] == pytest.approx(1)


def test_the_first_round_is_whole(tmp_path: Path) -> None:
    run, booster, _ = trained(tmp_path)
    first = booster[0].get_score(importance_type="gain")
    whole = run.tensor("feature_importance/gain").statistics().to_pydict()
    assert (whole["step"][0], whole["abs_sum"][0]) == (0, pytest.approx(sum(first.values())))
    assert whole["zero"][0] == 5 - len(first)


def test_a_linear_booster_has_no_trees(tmp_path: Path) -> None:
    from watchstep.xgboost import Recording

    matrices, hook = data(), Hook(tmp_path)
    params = {"objective": "binary:logistic", "booster": "gblinear", "nthread": 1}
    xgboost.train(
        params, matrices, 2, evals=[(matrices, "train")], callbacks=[Recording(hook)], verbose_eval=False
    )
    run = recorded(hook)
    assert [info.name for info in run.catalogue if "tree" in info.role or "importance" in info.role] == []
    assert column(run, "optimizer:learning_rate/0") == [0.5]
    assert "linear" in hook.health["notes"]["trees"]


def test_cross_validation_records_means(tmp_path: Path) -> None:
    from watchstep.xgboost import Recording

    hook = Hook(tmp_path)
    found = xgboost.cv(PARAMETERS, data(), 3, nfold=2, callbacks=[Recording(hook)], as_pandas=False)
    run = recorded(hook)
    assert column(run, "loss") == pytest.approx(found["train-logloss-mean"])
    assert column(run, "loss", mode="eval") == pytest.approx(found["test-logloss-mean"])


def test_the_model_is_the_same_with_and_without(tmp_path: Path) -> None:
    _, with_it, _ = trained(tmp_path)
    without = xgboost.train(PARAMETERS, data(), ROUNDS)
    assert with_it.get_dump(with_stats=True) == without.get_dump(with_stats=True)


def test_a_stop_ends_it_where_the_hook_opted_in(tmp_path: Path) -> None:
    from watchstep.xgboost import Recording

    hook = Hook(tmp_path, on_stop="raise")
    hook._recorder.request_stop(StopRequest("attempt", 2, "enough"))
    with pytest.raises(StopTraining):
        xgboost.train(PARAMETERS, data(), ROUNDS, callbacks=[Recording(hook)])
    assert hook._recorder.stopped is not None
    hook.close()


def test_a_closed_hook_is_not_used(tmp_path: Path) -> None:
    from watchstep.xgboost import Recording

    hook = Hook(tmp_path)
    hook.close()
    assert xgboost.train(PARAMETERS, data(), 2, callbacks=[Recording(hook)]).num_boosted_rounds() == 2
    assert not hook.health["faults"]


NAMES = ["age", "income of 2025", "x y", "d" * 300, "é,gain=5"]


def named(rows: int = 400, labels: Any = None) -> tuple[Any, Any, Any]:
    """A matrix with named features, the features and the labels."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 5))
    y = (x[:, 0] * x[:, 1] + 0.1 * random.normal(size=rows) > 0).astype(int) if labels is None else labels(x)
    return xgboost.DMatrix(x, y, feature_names=NAMES), x, y


def boosted(store: Path, data: Any, params: dict[str, Any], **options: Any) -> tuple[Run, Any]:
    from watchstep.xgboost import Recording

    hook = Hook(store, config=EVERY_STEP)
    booster = xgboost.train(
        {"nthread": 1, "max_depth": 3, **params},
        data,
        ROUNDS,
        evals=[(data, "train")],
        callbacks=[Recording(hook, **options)],
        verbose_eval=False,
    )
    return recorded(hook), booster


def test_importance_has_the_names_of_the_features(tmp_path: Path) -> None:
    data, _, _ = named()
    kinds = ("weight", "gain", "cover", "total_gain", "total_cover")
    run, booster = boosted(tmp_path, data, {"objective": "binary:logistic"}, importances=kinds)
    long = next(name for name in run.tensors() if name.startswith("feature_importance/gain:ddd"))
    assert len(long) < 230
    for kind in kinds:
        scores = booster.get_score(importance_type=kind)
        for name in NAMES:
            row = f"feature_importance/{kind}:{name}" if len(name) < 200 else long.replace("gain", kind)
            assert column(run, row)[-1] == pytest.approx(scores[name], rel=1e-5)


def test_the_most_important_features_have_rows(tmp_path: Path) -> None:
    run, booster = boosted(tmp_path, named()[0], {"objective": "binary:logistic"}, features=2)
    rows = [name for name in run.tensors() if name.startswith("feature_importance/gain:")]
    last = [name for name in rows if run.tensor(name).steps()[-1] == ROUNDS - 1]
    scores = booster.get_score(importance_type="gain")
    best = sorted(scores, key=scores.__getitem__)[-2:]
    assert {name.partition(":")[2][:100] for name in last} == {name[:100] for name in best}


def test_each_tree_of_a_round_has_a_row(tmp_path: Path) -> None:
    data, _, _ = named(labels=lambda x: (x[:, 0] > 0).astype(int) + (x[:, 1] > 1))
    run, booster = boosted(tmp_path, data, {"objective": "multi:softprob", "num_class": 3, "max_depth": 4})
    dumped = booster.get_dump(dump_format="json", with_stats=True)

    def nodes(node: dict[str, Any]) -> list[dict[str, Any]]:
        return [node, *(below for child in node.get("children", ()) for below in nodes(child))]

    for number in range(3):
        rows = run.tensor(f"tree/{number}").statistics().to_pydict()
        trees = [nodes(json.loads(dumped[3 * step + number])) for step in range(ROUNDS)]
        assert rows["probe.tree_leaves"] == [sum("leaf" in node for node in tree) for tree in trees]
        assert rows["probe.tree_largest_node"] == [max(node["nodeid"] for node in tree) for tree in trees]
        assert rows["probe.tree_gain"] == pytest.approx(
            [sum(node.get("gain", 0) for node in tree) for tree in trees], rel=1e-5
        )
        assert rows["mean"] == [max(node.get("depth", -1) for node in tree) + 1 for tree in trees]
    whole = run.tensor("tree_depth").statistics().to_pydict()
    assert whole["count"] == [3] * ROUNDS
    parts = [run.tensor(f"tree/{number}").statistics().to_pydict() for number in range(3)]
    assert whole["probe.gain"] == pytest.approx(np.sum([part["probe.tree_gain"] for part in parts], 0))


def test_trees_with_several_outputs_have_no_gain(tmp_path: Path) -> None:
    data, _, _ = named(labels=lambda x: x[:, :2])
    run, _ = boosted(tmp_path, data, {"multi_strategy": "multi_output_tree", "tree_method": "hist"})
    rows = run.tensor("tree_depth").statistics().to_pydict()
    assert set(rows["max"]) == {3.0}
    assert set(rows["probe.gain"]) == {None}


def test_hyperparameters_are_recorded_once_and_when_they_change(tmp_path: Path) -> None:
    from watchstep.xgboost import Recording

    hook = Hook(tmp_path, config=EVERY_STEP)
    rates = xgboost.callback.LearningRateScheduler(lambda step: 0.3 if step < 3 else 0.1)
    xgboost.train({**PARAMETERS, "gamma": 0.5}, data(), ROUNDS, callbacks=[rates, Recording(hook)])
    run = recorded(hook)
    rows = run.tensor("optimizer:learning_rate/0").statistics().to_pydict()
    assert (rows["step"], rows["mean"]) == ([0, 3], pytest.approx([0.3, 0.1]))
    assert (column(run, "booster:max_depth"), column(run, "booster:gamma")) == ([3], [0.5])
    assert "objective=binary:logistic, booster=gbtree" in hook.health["notes"]["hyperparameters"]


def test_predictions_and_labels_of_samples(tmp_path: Path) -> None:
    data, x, y = named()
    valid = (x[:40], y[:40])
    run, booster = boosted(
        tmp_path,
        data,
        {"objective": "binary:logistic"},
        train_data=data,
        validation_data=valid,
        sample_rows=100,
    )
    predictions = booster.predict(data)[::4]
    assert column(run, "outputs")[-1] == pytest.approx(predictions.mean())
    assert column(run, "outputs", "count") == [100] * ROUNDS
    assert column(run, "outputs", "count", "eval") == [40] * ROUNDS
    right = (predictions > 0.5) == y[::4]
    for label in (0, 1):
        rows = run.tensor(f"confusion/{label}").statistics("train").to_pydict()
        assert rows["probe.all_correct"][-1] - rows["probe.all_correct"][-2] == right[y[::4] == label].sum()
    counts = run.tensor("labels").statistics("train").to_pydict()
    assert (counts["step"], counts["probe.labels_counted"][-1]) == ([0, 1, 2, 3], len(y))
    assert counts["probe.largest_class"][-1] == np.bincount(y).max()


def test_residuals_of_a_regression(tmp_path: Path) -> None:
    data, _, y = named(labels=lambda x: 3 * x[:, 0])
    run, booster = boosted(tmp_path, data, {"objective": "reg:squarederror"}, train_data=data)
    rows = run.tensor("residuals").statistics().to_pydict()
    assert rows["std"][-1] == pytest.approx((y - booster.predict(data)).std(), rel=1e-5)
    assert "confusion" not in run.collections


def test_shap_values_by_name_and_in_full(tmp_path: Path) -> None:
    from watchstep.xgboost import Recording

    data, _, _ = named()
    saved = {**EVERY_STEP.collections, "custom": Collection(Cadence(), tensors=Cadence(every=5))}
    config = CaptureConfig(overhead_budget=None, system=None, collections=saved)
    hook = Hook(tmp_path, config=config)
    booster = xgboost.train(
        PARAMETERS, data, ROUNDS, callbacks=[Recording(hook, train_data=data, shap_rows=50)]
    )
    run = recorded(hook)
    values = booster.predict(data, pred_contribs=True)[::8, :-1]
    for number, name in enumerate(NAMES[:2]):
        means = column(run, f"feature_importance/shap:{name}")
        assert means[-1] == pytest.approx(np.abs(values[:, number]).mean(), rel=1e-4)
    assert run.tensor("shap_values").value(5)[:, 0] == pytest.approx(values, rel=1e-3, abs=1e-6)
    assert run.tensor("feature_importance/shap").statistics().to_pydict()["count"] == [5] * ROUNDS


@pytest.mark.parametrize("booster", ["gbtree", "dart"])
def test_predicting_changes_nothing(booster: str, tmp_path: Path) -> None:
    data, x, y = named()
    params = {**PARAMETERS, "booster": booster, "subsample": 0.7, "rate_drop": 0.3, "max_depth": 3}
    if booster == "gbtree":
        del params["rate_drop"]
    _, with_it = boosted(tmp_path, data, params, train_data=data, validation_data=(x, y), shap_rows=20)
    without = xgboost.train(params, named()[0], ROUNDS, evals=[(data, "train")], verbose_eval=False)
    assert with_it.save_raw() == without.save_raw()


def test_data_that_cannot_be_sampled_are_noted(tmp_path: Path) -> None:
    from watchstep.xgboost import Recording

    hook = Hook(tmp_path, config=EVERY_STEP)
    _, x, y = named()
    quantiles = xgboost.QuantileDMatrix(x, y)
    options = {"train_data": quantiles, "validation_data": [1, 2]}
    xgboost.train(PARAMETERS, quantiles, 2, callbacks=[Recording(hook, **options)])
    recorded(hook)
    assert "QuantileDMatrix cannot be sliced" in hook.health["notes"]["train_data"]
    assert "type list" in hook.health["notes"]["validation_data"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"importances": ("split",)}, "split"),
        ({"features": -1}, "features"),
        ({"sample_rows": 0}, "sample_rows"),
        ({"shap_rows": 10}, "train_data"),
    ],
)
def test_invalid_options(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    from watchstep.xgboost import Recording

    with Hook(tmp_path) as hook, pytest.raises(ConfigError, match=match):
        Recording(hook, **options)


def test_estimators_can_be_cloned_and_pickled(tmp_path: Path) -> None:
    base = pytest.importorskip("sklearn.base")
    from watchstep.xgboost import Recording

    hook = Hook(tmp_path, config=EVERY_STEP)
    _, x, y = named()
    model = xgboost.XGBClassifier(
        n_estimators=3, n_jobs=1, callbacks=[Recording(hook, training="validation_0", train_data=(x, y))]
    )
    clone = base.clone(model).fit(x, y, eval_set=[(x, y)], verbose=False)
    pickled = pickle.loads(pickle.dumps(clone))
    assert pickled.predict(x).tolist() == clone.predict(x).tolist()
    assert copy.deepcopy(clone).get_booster().num_boosted_rounds() == 3
    pickled.fit(x, y, eval_set=[(x, y)], verbose=False)  # a copy from a file records nothing
    run = recorded(hook)
    assert run.steps("train") == [0, 1, 2]
    assert run.tensor("outputs").steps() == [0, 1, 2]


def test_the_last_state_is_recorded_whatever_the_cadence(tmp_path: Path) -> None:
    from watchstep.xgboost import Recording

    rare = {**EVERY_STEP.collections, "custom": Cadence(every=4), "outputs": Cadence(every=4)}
    hook = Hook(tmp_path, config=CaptureConfig(overhead_budget=None, system=None, collections=rare))
    matrix, x, y = named()
    options = {"train_data": matrix, "validation_data": (x, y), "shap_rows": 5}
    evals = [(matrix, "train")]
    for _ in range(2):
        booster = xgboost.train(
            PARAMETERS,
            matrix,
            ROUNDS,
            evals=evals,
            callbacks=[Recording(hook, **options)],
            verbose_eval=False,
        )
    hook.log(final_accuracy=0.5)
    run = recorded(hook)
    assert run.steps("train") == list(range(2 * ROUNDS))
    assert run.tensor("tree_depth").steps() == [0, 4, 5, 8, 11]
    assert run.tensor("feature_importance/shap").steps() == [0, 4, 5, 8, 11]
    assert run.tensor("outputs").statistics("eval").to_pydict()["step"][-1] == 2 * ROUNDS - 1
    assert set(run.tensor("outputs").statistics().to_pydict()["count"]) == {400}
    assert column(run, "feature_importance/weight", "abs_sum")[-1] == sum(
        booster.get_score(importance_type="weight").values()
    )
    assert run.tensor("final_accuracy").steps() == [2 * ROUNDS - 1]


def test_a_fault_of_the_programs_own_stop_does_not_reach_training(tmp_path: Path) -> None:
    from watchstep.xgboost import Recording

    def fail(_: StopRequest) -> None:
        raise ValueError("no disk")

    hook = Hook(tmp_path, on_stop=fail)
    hook._recorder.request_stop(StopRequest("attempt", 1, "enough"))
    booster = xgboost.train(PARAMETERS, data(), ROUNDS, callbacks=[Recording(hook)])
    hook.close()
    assert booster.num_boosted_rounds() == ROUNDS
