"""Trainings without each name of LightGBM that another version may lack."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

lightgbm: Any = pytest.importorskip("lightgbm")

from tests.frameworks.lightgbm.boosted import EVERY_STEP, PARAMETERS, dataset  # noqa: E402
from tests.missing_names import remove_within_test  # noqa: E402
from watchstep import Hook, open_run  # noqa: E402
from watchstep.lightgbm import Recording  # noqa: E402
from watchstep.lightgbm.internals import lightgbm_names  # noqa: E402


def _trained(callback: Any) -> str:
    data = dataset()
    booster = lightgbm.train(
        PARAMETERS,
        data,
        2,
        valid_sets=[data],
        valid_names=["training"],
        callbacks=[] if callback is None else [callback],
    )
    return str(booster.model_to_string())


@pytest.mark.parametrize("key", lightgbm_names.table)
def test_a_missing_name_costs_one_capability(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _trained(None)
    remove_within_test(lightgbm_names, key, monkeypatch)
    hook = Hook(tmp_path, config=EVERY_STEP)
    assert _trained(Recording(hook)) == plain
    hook.close()
    cost = lightgbm_names.table[key].cost
    assert not hook.health["faults"]
    assert f"LightGBM: {cost}" in hook.health["notes"] or key in {"train", "train_of_estimators", "error"}
    recorded = {info.name for info in open_run(hook.run_url).catalogue}
    assert ("loss" in recorded) == (cost != "rounds")
    assert ("tree_depth" in recorded) == (
        cost not in {"rounds", "trees, importance, hyperparameters and predictions"}
    )


def test_a_module_that_cannot_be_imported_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "watchstep.lightgbm")
    monkeypatch.setitem(sys.modules, "watchstep.lightgbm.callback", None)
    broken = importlib.import_module("watchstep.lightgbm")
    hook = Hook(tmp_path)
    assert _trained(broken.Recording(hook)) == _trained(None)
    hook.close()
    assert list(hook.health["faults"]) == ["LightGBM is not recorded"]
