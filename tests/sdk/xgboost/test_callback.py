"""XGBoost, recorded for real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sdk.training import recorded
from watchstep import Hook, Run, StopTraining
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
    assert run.tensors() == ["loss"]
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
