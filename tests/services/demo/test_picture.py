from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.sdk.training import Training
from watchstep import CaptureConfig, Hook, open_run
from watchstep_services.demo.report import Evidence, draw_png

LONG = (
    "non_finite_values: 18432 NaN among 18432 elements of features.0.block.conv1:output, 0 tolerated, in "
    + 60 * "W"
)


@pytest.mark.parametrize("title", ["non_finite_values: short", LONG, f"{LONG} $\\alpha$ \x1b[31m"])
def test_the_title_of_the_picture_is_not_cut_off(tmp_path: Path, title: str) -> None:
    import matplotlib.image

    hook, training = Hook(tmp_path, run="r", config=CaptureConfig(overhead_budget=None)), Training()
    hook.watch(training.model, training.optimizer)
    training.run(4)
    hook.close()
    run = open_run(hook.run_url)
    draw_png(Evidence(run, run, 2, 3, title), tmp_path / "picture.png")
    picture = matplotlib.image.imread(tmp_path / "picture.png")
    height, width = picture.shape[:2]
    above_the_plots = picture[: height // 5, :, :3]
    edges = np.concatenate([above_the_plots[:, :5], above_the_plots[:, width - 5 :]], axis=1)
    assert (edges == 1.0).all()
    assert (above_the_plots < 0.5).any()
