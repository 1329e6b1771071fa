"""Rules over boosted trees, that XGBoost made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rules.recording import EVERYTHING, evaluate_training
from tests.rules.runs import all_at_once
from watchstep import Hook, open_run
from watchstep_rules.config.defaults import DEFAULT_RULES

xgboost = pytest.importorskip(
    "xgboost", reason="XGBOOST IS NOT INSTALLED: rules over trees are not proven by this run"
)

pytestmark = pytest.mark.ci


def trained(hook: Hook, depth: int, used: int) -> None:
    """Train trees of a depth on data of which so many of eight features determine the target."""
    from watchstep.xgboost import Recording

    random = np.random.default_rng(0)
    x = random.normal(size=(400, 8))
    matrix: Any = xgboost.DMatrix(x, (x[:, :used] ** 2).sum(1))
    params = {"max_depth": depth, "nthread": 1}
    xgboost.train(
        params, matrix, 8, evals=[(matrix, "train")], callbacks=[Recording(hook)], verbose_eval=False
    )


def test_trees_that_are_too_deep_and_the_twin(tmp_path: Path) -> None:
    deep = evaluate_training(lambda hook: trained(hook, 6, 8), "tree_depth", tmp_path / "a")
    assert {finding.step for finding in deep} == set(range(8))
    assert deep[0].message == "tree_depth: the deepest of 1 trees has depth 6, more than 4"
    assert evaluate_training(lambda hook: trained(hook, 3, 8), "tree_depth", tmp_path / "b") == []
    assert (
        evaluate_training(lambda hook: trained(hook, 6, 8), "tree_depth", tmp_path / "c", {"depth": 6}) == []
    )


@pytest.mark.parametrize("kind", ["weight", "gain"])
def test_one_feature_that_decides_nearly_all_and_the_twin(kind: str, tmp_path: Path) -> None:
    params: dict[str, object] = {"kind": kind, "features": 2, "share": 0.6}
    found = evaluate_training(lambda hook: trained(hook, 2, 1), "feature_importance", tmp_path / "a", params)
    assert {finding.tensor for finding in found} == {f"feature_importance/{kind}"}
    assert "2 largest of 8 features have" in found[-1].message
    twin = evaluate_training(lambda hook: trained(hook, 4, 8), "feature_importance", tmp_path / "b", params)
    assert [finding for finding in twin if finding.step > 3] == []


def classified(hook: Hook, share: float, *, noise: float = 0.1) -> None:
    """Train a classifier of data of which a share has the class 1, with predictions on a sample."""
    from watchstep.xgboost import Recording

    random = np.random.default_rng(0)
    x = random.normal(size=(2000, 4))
    score = x[:, 0] + noise * random.normal(size=2000)
    y = (score > np.quantile(score, 1 - share)).astype(int)
    matrix, rest = xgboost.DMatrix(x[:1500], y[:1500]), (x[1500:], y[1500:])
    recording = Recording(hook, train_data=matrix, validation_data=rest, sample_rows=400, shap_rows=20)
    xgboost.train(
        {"objective": "binary:logistic", "max_depth": 3, "nthread": 1},
        matrix,
        12,
        evals=[(matrix, "train"), (xgboost.DMatrix(*rest), "valid")],
        callbacks=[recording],
        verbose_eval=False,
    )


def test_classes_of_a_booster_are_judged(tmp_path: Path) -> None:
    few = evaluate_training(lambda hook: classified(hook, 0.05), "class_imbalance", tmp_path / "a")
    assert {finding.tensor for finding in few} == {"labels"}
    assert evaluate_training(lambda hook: classified(hook, 0.12), "class_imbalance", tmp_path / "b") == []
    noisy = evaluate_training(lambda hook: classified(hook, 0.4, noise=2), "confusion", tmp_path / "c")
    assert {finding.tensor for finding in noisy} >= {"confusion/1"}
    params: dict[str, object] = {"from_step": 8}
    assert (
        evaluate_training(lambda hook: classified(hook, 0.4, noise=0.01), "confusion", tmp_path / "d", params)
        == []
    )


def test_a_healthy_training_is_judged_by_the_default_rules(tmp_path: Path) -> None:
    with Hook(tmp_path, config=EVERYTHING) as hook:
        classified(hook, 0.4)
    rows = open_run(hook.run_url).rows()
    findings = [finding for config in DEFAULT_RULES for finding in all_at_once(config, rows).findings]
    assert findings == []
