"""Trainings with LightGBM that are recorded in tests: seeded, with one thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightgbm
import numpy as np

from watchstep import CaptureConfig, Hook, Run, open_run
from watchstep.lightgbm import Recording

ROUNDS = 6
NAMES = [f"column_{number}" for number in range(5)]
EVERY_STEP = CaptureConfig(overhead_budget=None, system=None)
PARAMETERS: dict[str, Any] = {
    "objective": "binary",
    "num_leaves": 8,
    "learning_rate": 0.2,
    "num_threads": 1,
    "deterministic": True,
    "verbose": -1,
    "seed": 1,
    "metric": ["auc", "binary_logloss", "binary_error"],
}


def arrays(rows: int = 400) -> tuple[Any, Any]:
    """Features and labels of two classes."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 5))
    return x, (x[:, 0] * x[:, 1] + 0.1 * random.normal(size=rows) > 0).astype(np.int64)


def dataset(labels: Any = None) -> Any:
    """A data set of `arrays`."""
    x, y = arrays()
    return lightgbm.Dataset(x, y if labels is None else labels, feature_name=NAMES)


def trained(
    store: Path, params: dict[str, Any] | None = None, labels: Any = None, **options: Any
) -> tuple[Run, Any, dict[str, Any]]:
    """Train with a recording; return the run, the booster and LightGBM's own log."""
    hook = Hook(store, config=EVERY_STEP)
    log: dict[str, Any] = {}
    data = dataset(labels)
    booster = lightgbm.train(
        {**PARAMETERS, **(params or {})},
        data,
        ROUNDS,
        valid_sets=[
            data,
            lightgbm.Dataset(*arrays(), reference=data),
            lightgbm.Dataset(*arrays(), reference=data),
        ]
        if labels is None
        else [data],
        valid_names=["training", "valid", "other"] if labels is None else ["training"],
        callbacks=[Recording(hook, **options), lightgbm.record_evaluation(log)],
    )
    hook.close()
    assert not hook.health["faults"]
    return open_run(hook.run_url), booster, log


def column(run: Run, name: str, figure: str = "mean", mode: str = "train") -> list[float]:
    """Values of a figure by step."""
    rows = run.tensor(name).statistics().to_pydict()
    return [value for value, row_mode in zip(rows[figure], rows["mode"], strict=True) if row_mode == mode]
