"""Trainings without each name of XGBoost that another version may lack."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.missing_names import remove_within_test
from watchstep import CaptureConfig, Hook, open_run

xgboost: Any = pytest.importorskip(
    "xgboost", reason="XGBOOST IS NOT INSTALLED: what its names cost is not proven by this run"
)
from watchstep.xgboost import Recording  # noqa: E402 - it needs XGBoost
from watchstep.xgboost.internals import xgboost_names  # noqa: E402

EVERY_STEP = CaptureConfig(overhead_budget=None, system=None)


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
