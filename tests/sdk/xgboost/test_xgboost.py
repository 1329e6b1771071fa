"""XGBoost, recorded for real: by its callback, in unmodified programs, and without names that another version may lack."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.missing_names import remove_within_test
from tests.sdk.training import EVERY_STEP, recorded
from tests.warmed import warmed
from watchstep import CaptureConfig, Collection, Hook, Run, StopTraining, open_run
from watchstep.capture.config import Cadence
from watchstep.errors import ConfigError
from watchstep.format.control import StopRequest

xgboost = pytest.importorskip(
    "xgboost", reason="XGBOOST IS NOT INSTALLED: its callback is not proven by this run"
)
from watchstep.xgboost import Recording  # noqa: E402 - it needs XGBoost
from watchstep.xgboost.internals import xgboost_names  # noqa: E402

pytestmark = pytest.mark.ci

ROUNDS = 6
PARAMETERS: dict[str, Any] = {"objective": "binary:logistic", "max_depth": 3, "nthread": 1, "seed": 1}


def data(rows: int = 200) -> Any:
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 5))
    return xgboost.DMatrix(x, x[:, 0] * x[:, 1] + 0.1 * random.normal(size=rows) > 0)


def trained(
    store: Path, evals: tuple[str, ...] = ("train", "valid"), **params: Any
) -> tuple[Run, Any, dict[str, Any]]:
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


def rows_of(run: Run, name: str) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = run.tensor(name).statistics().to_pydict()
    return rows


def column(run: Run, name: str, figure: str = "mean", mode: str = "train") -> list[float]:
    rows = rows_of(run, name)
    return [value for value, row_mode in zip(rows[figure], rows["mode"], strict=True) if row_mode == mode]


def test_evaluations_are_losses_and_metrics_by_round(tmp_path: Path) -> None:
    run, _, log = trained(tmp_path, ("train", "valid", "other"), eval_metric=["error", "auc", "logloss"])
    assert column(run, "loss") == pytest.approx(log["train"]["logloss"])
    assert column(run, "loss", mode="eval") == pytest.approx(log["valid"]["logloss"])
    assert column(run, "auc", mode="eval") == pytest.approx(log["valid"]["auc"])
    assert column(run, "other:loss", mode="eval") == pytest.approx(log["other"]["logloss"])
    assert column(run, "error") == pytest.approx(log["train"]["error"])
    assert (run.tensor("loss").info.role, run.tensor("auc").info.role) == ("loss", "metric")
    assert rows_of(run, "loss")["step"][-1] == ROUNDS - 1


@pytest.mark.parametrize(("params", "trees"), [({}, 1), ({"num_parallel_tree": 3}, 3)])
def test_trees_and_features(params: dict[str, Any], trees: int, tmp_path: Path) -> None:
    run, booster, _ = trained(tmp_path, **params)
    rows = rows_of(run, "tree_depth")
    assert set(rows["count"]) == {trees}
    assert set(rows["max"]) == {3.0}
    scores = booster.get_score(importance_type="weight")
    whole = rows_of(run, "feature_importance/weight")
    if rows["step"][-1] == ROUNDS - 1:  # the budget may leave the last round out
        assert whole["abs_sum"][-1] == sum(scores.values())
        assert whole["probe.top_share_1"][-1] == pytest.approx(max(scores.values()) / sum(scores.values()))
    assert set(whole["count"]) == {5}
    assert whole["probe.top_share_5"][0] == pytest.approx(1)


def test_the_first_round_is_whole(tmp_path: Path) -> None:
    run, booster, _ = trained(tmp_path)
    first = booster[0].get_score(importance_type="gain")
    whole = rows_of(run, "feature_importance/gain")
    assert (whole["step"][0], whole["abs_sum"][0]) == (0, pytest.approx(sum(first.values())))
    assert whole["zero"][0] == 5 - len(first)


def test_a_linear_booster_has_no_trees(tmp_path: Path) -> None:
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
    hook = Hook(tmp_path, on_stop="raise")
    hook._recorder.request_stop(StopRequest("attempt", 2, "enough"))
    with pytest.raises(StopTraining):
        xgboost.train(PARAMETERS, data(), ROUNDS, callbacks=[Recording(hook)])
    assert hook._recorder.stopped is not None
    hook.close()


def test_a_closed_hook_is_not_used(tmp_path: Path) -> None:
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
        rows = rows_of(run, f"tree/{number}")
        trees = [nodes(json.loads(dumped[3 * step + number])) for step in range(ROUNDS)]
        assert rows["probe.tree_leaves"] == [sum("leaf" in node for node in tree) for tree in trees]
        assert rows["probe.tree_largest_node"] == [max(node["nodeid"] for node in tree) for tree in trees]
        assert rows["probe.tree_gain"] == pytest.approx(
            [sum(node.get("gain", 0) for node in tree) for tree in trees], rel=1e-5
        )
        assert rows["mean"] == [max(node.get("depth", -1) for node in tree) + 1 for tree in trees]
    whole = rows_of(run, "tree_depth")
    assert whole["count"] == [3] * ROUNDS
    parts = [rows_of(run, f"tree/{number}") for number in range(3)]
    assert whole["probe.gain"] == pytest.approx(np.sum([part["probe.tree_gain"] for part in parts], 0))


@pytest.mark.skipif(xgboost.__version__.startswith("3.0."), reason="XGBoost 3.0 cannot dump such trees")
def test_trees_with_several_outputs_have_no_gain(tmp_path: Path) -> None:
    data, _, _ = named(labels=lambda x: x[:, :2])
    run, _ = boosted(tmp_path, data, {"multi_strategy": "multi_output_tree", "tree_method": "hist"})
    rows = rows_of(run, "tree_depth")
    assert set(rows["max"]) == {3.0}
    assert set(rows["probe.gain"]) == {None}


def test_hyperparameters_are_recorded_once_and_when_they_change(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    rates = xgboost.callback.LearningRateScheduler(lambda step: 0.3 if step < 3 else 0.1)
    xgboost.train({**PARAMETERS, "gamma": 0.5}, data(), ROUNDS, callbacks=[rates, Recording(hook)])
    run = recorded(hook)
    rows = rows_of(run, "optimizer:learning_rate/0")
    assert rows["step"] == [0, 3]
    assert rows["mean"] == pytest.approx([0.3, 0.1])
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
    rows = rows_of(run, "residuals")
    assert rows["std"][-1] == pytest.approx((y - booster.predict(data)).std(), rel=1e-5)
    assert "confusion" not in run.collections


def test_shap_values_by_name_and_in_full(tmp_path: Path) -> None:
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
    assert rows_of(run, "feature_importance/shap")["count"] == [5] * ROUNDS


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
    with Hook(tmp_path) as hook, pytest.raises(ConfigError, match=match):
        Recording(hook, **options)


def test_estimators_can_be_cloned_and_pickled(tmp_path: Path) -> None:
    base = pytest.importorskip("sklearn.base")
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
    assert set(rows_of(run, "outputs")["count"]) == {400}
    assert column(run, "feature_importance/weight", "abs_sum")[-1] == sum(
        booster.get_score(importance_type="weight").values()
    )
    assert run.tensor("final_accuracy").steps() == [2 * ROUNDS - 1]


def test_what_the_programs_own_stop_raises_ends_the_training(tmp_path: Path) -> None:
    def fail(_: StopRequest) -> None:
        raise ValueError("no disk")

    hook = Hook(tmp_path, on_stop=fail)
    hook._recorder.request_stop(StopRequest("attempt", 1, "enough"))
    with pytest.raises(ValueError, match="no disk"):
        xgboost.train(PARAMETERS, data(), ROUNDS, callbacks=[Recording(hook)])
    hook.close()


UNMODIFIED = """
import sys
import hashlib
import numpy as np
import xgboost
if sys.argv[1] == "recorded":
    from watchstep.xgboost.attach import attach
    attach()
    attach()
random = np.random.default_rng(0)
x = random.normal(size=(300, 4))
y = (x[:, 0] > 0).astype(int)
params = {"objective": "binary:logistic", "nthread": 1, "max_depth": 2}
data, valid = xgboost.DMatrix(x, y), xgboost.DMatrix(x, 1 - y)
first = xgboost.train(params, data, 4, evals=[(valid, "v"), (data, "t")], verbose_eval=False)
models = [first]
try:
    models.append(xgboost.XGBClassifier(n_estimators=3, n_jobs=1).fit(x, y).get_booster())
except ImportError:
    pass
try:
    xgboost.train({"objective": "none such"}, data, 2)
except xgboost.core.XGBoostError:
    print("failed")
if sys.argv[1] == "recorded":  # a program that records itself
    import watchstep
    from watchstep.xgboost import Recording
    with watchstep.Hook(run="own") as hook:
        xgboost.train(params, data, 2, callbacks=[Recording(hook)])
        xgboost.train(params, data, 2)
print([hashlib.sha256(model.save_raw()).hexdigest() for model in models])
"""


@pytest.mark.ci
def test_each_training_of_an_unmodified_program_is_a_run(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(UNMODIFIED)
    environment = {
        "WATCHSTEP_STORE": str(tmp_path / "runs"),
        "WATCHSTEP_RUN": "boosted",
        "WATCHSTEP_ATTEMPT": tmp_path.name,
        "HOME": str(tmp_path),
    }
    plain, attached = (
        warmed().run(program, name, folder=tmp_path, environment=environment, modules=["xgboost", "sklearn"])
        for name in ("plain", "recorded")
    )
    assert plain == attached
    folder = tmp_path / "runs" / "default"
    first = open_run(folder / "boosted")
    assert first.steps("train") == list(range(4))
    rows = first.tensor("loss").statistics().to_pydict()
    losses = {
        mode: [mean for mean, own in zip(rows["mean"], rows["mode"], strict=True) if own == mode]
        for mode in ("train", "eval")
    }
    assert losses["train"][-1] < losses["train"][0]  # the training data are recognized by identity
    assert losses["eval"][-1] > losses["eval"][0]
    assert open_run(folder / "boosted-2").tensor("tree_depth").steps()[0] == 0
    assert [end.state for end in open_run(folder / "boosted-3").ends()] == ["failed"]
    assert sorted(path.name for path in folder.iterdir()) == ["boosted", "boosted-2", "boosted-3", "own"]
    assert open_run(folder / "own").steps("train") == [0, 1]


def _trained(callback: Any) -> bytes:
    x = np.random.default_rng(0).normal(size=(60, 3))
    data = xgboost.DMatrix(x, x[:, 0] > 0)
    booster = xgboost.train(
        {"objective": "binary:logistic", "nthread": 1, "max_depth": 2},
        data,
        2,
        evals=[(data, "train")],
        verbose_eval=False,
        callbacks=[] if callback is None else [callback],
    )
    model: bytes = booster.save_raw()
    return bytes(model)


@pytest.mark.parametrize("key", xgboost_names.table)
def test_a_missing_name_costs_one_capability(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _trained(None)
    remove_within_test(xgboost_names, key, monkeypatch)
    hook = Hook(tmp_path, config=EVERY_STEP)
    assert _trained(Recording(hook)) == plain
    hook.close()
    cost = xgboost_names.table[key].cost
    assert not hook.health["faults"]
    assert f"XGBoost: {cost}" in hook.health["notes"] or key in {"train", "train_of_estimators", "error"}
    recorded = {info.name for info in open_run(hook.run_url).catalogue}
    assert ("loss" in recorded) == (cost != "rounds")
    assert ("tree_depth" in recorded) == (
        cost not in {"rounds", "trees, importance, hyperparameters and predictions"}
    )


def test_a_module_that_cannot_be_imported_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "watchstep.xgboost")
    monkeypatch.setitem(sys.modules, "watchstep.xgboost.callback", None)
    broken = importlib.import_module("watchstep.xgboost")
    hook = Hook(tmp_path)
    assert _trained(broken.Recording(hook)) == _trained(None)
    hook.close()
    assert list(hook.health["faults"]) == ["XGBoost is not recorded"]
