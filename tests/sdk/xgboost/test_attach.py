"""Unmodified programs that train with XGBoost, as `watchstep run` records them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from watchstep import open_run

PROGRAM = """
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


def test_each_training_of_an_unmodified_program_is_a_run(tmp_path: Path) -> None:
    pytest.importorskip(
        "xgboost", reason="XGBOOST IS NOT INSTALLED: attaching to it is not proven by this run"
    )
    outputs = {}
    for name in ("plain", "recorded"):
        environment = {
            "WATCHSTEP_STORE": str(tmp_path / "runs"),
            "WATCHSTEP_RUN": "boosted",
            "WATCHSTEP_ATTEMPT": tmp_path.name,
            "HOME": str(tmp_path),
            "PYTHONPATH": ":".join(path for path in sys.path if path),
        }
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, name],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        outputs[name] = done.stdout
    assert outputs["plain"] == outputs["recorded"]
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
