"""Unmodified programs that train with LightGBM, as `watchstep run` records them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import environment_of, run_python
from watchstep import open_run

pytest.importorskip("lightgbm", reason="LIGHTGBM IS NOT INSTALLED: attaching to it is not proven by this run")

PROGRAM = """
import sys
import numpy as np
import lightgbm
if sys.argv[1] == "recorded":
    from watchstep.lightgbm.attach import attach
    attach()
    attach()
random = np.random.default_rng(0)
x = random.normal(size=(300, 4))
y = (x[:, 0] > 0).astype(int)
params = {"objective": "binary", "verbose": -1, "num_threads": 1, "num_leaves": 5}
data = lightgbm.Dataset(x, y)
valid = lightgbm.Dataset(x, 1 - y, reference=data)
first = lightgbm.train(params, data, 4, [valid, data], ["v", "t"])
second = lightgbm.LGBMClassifier(n_estimators=3, num_leaves=5, n_jobs=1, verbose=-1).fit(x, y).booster_
print(first.model_to_string() + second.model_to_string())
"""


def test_each_training_of_an_unmodified_program_is_a_run(tmp_path: Path) -> None:
    outputs = {}
    for name in ("plain", "recorded"):
        environment = environment_of(
            tmp_path,
            WATCHSTEP_STORE=str(tmp_path / "runs"),
            WATCHSTEP_RUN="boosted",
            WATCHSTEP_ATTEMPT=tmp_path.name,
        )
        outputs[name] = run_python("-W", "error", "-c", PROGRAM, name, env=environment, timeout=600)
    assert outputs["plain"] == outputs["recorded"]
    first, second = (open_run(tmp_path / "runs" / "default" / name) for name in ("boosted", "boosted-2"))
    assert first.steps("train") == list(range(4))
    rows = first.tensor("loss").statistics().to_pydict()
    by_mode = {
        mode: [mean for mean, own in zip(rows["mean"], rows["mode"], strict=True) if own == mode]
        for mode in ("train", "eval")
    }
    assert by_mode["train"][-1] < by_mode["train"][0]  # the training data, by identity
    assert by_mode["eval"][-1] > by_mode["eval"][0]
    assert second.tensor("tree_depth").steps()[0] == 0
