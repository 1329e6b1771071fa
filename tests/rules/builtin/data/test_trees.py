"""Rules over boosted trees, that XGBoost made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rules.recording import evaluate_training
from watchstep import Hook

xgboost = pytest.importorskip(
    "xgboost", reason="XGBOOST IS NOT INSTALLED: rules over trees are not proven by this run"
)


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
