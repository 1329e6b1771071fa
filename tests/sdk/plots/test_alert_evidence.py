from __future__ import annotations

import io
import math
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.processes import run_python
from watchstep.plots.alert_evidence import AlertEvidence, alert_png

EVIDENCE = AlertEvidence(
    rule="exploding_gradient",
    tensor="layer.weight:gradient",
    figure="l2",
    steps=range(20),
    values=[1.5**step for step in range(20)],
    step=15,
    thresholds=300.0,
    stopped_at=18,
    message="l2 of the gradient is 437, the threshold is 300",
    run="r",
)


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


@pytest.mark.ci
def test_the_picture_is_small() -> None:
    png = alert_png(EVIDENCE)
    assert size_of(png) == (800, 400)
    assert len(png) < 40_000
    assert size_of(alert_png(EVIDENCE, 400, 300)) == (400, 300)


def pixels(png: bytes) -> set[tuple[int, ...]]:
    from PIL import Image

    colours = Image.open(io.BytesIO(png)).convert("RGB").getcolors(1 << 20)
    assert colours is not None
    return {colour for _, colour in colours}  # type: ignore[misc]


def is_near(colour: tuple[int, ...], other: tuple[int, int, int]) -> bool:
    return max(abs(a - b) for a, b in zip(colour, other, strict=True)) < 24


@pytest.mark.parametrize("colour", [(0, 0x72, 0xB2), (0xE6, 0x9F, 0)])
def test_series_and_threshold_are_drawn(colour: tuple[int, int, int]) -> None:
    assert any(is_near(pixel, colour) for pixel in pixels(alert_png(EVIDENCE)))


def test_the_step_is_a_black_line_and_no_value_that_is_not_finite() -> None:
    from PIL import Image

    image = Image.open(io.BytesIO(alert_png(EVIDENCE))).convert("L")
    dark = np.asarray(image) < 60
    assert (dark.sum(axis=0) > 0.4 * image.height).any()
    assert not any(is_near(pixel, (0xD5, 0x5E, 0)) for pixel in pixels(alert_png(EVIDENCE)))


@pytest.mark.parametrize(
    "values",
    [
        [],
        [None, None],
        [math.nan, math.inf, -math.inf],
        [1e308, 5e-324],
        [-1e308, 1e308],
        [0.0, 0.0],
        [1.0],
    ],
)
@pytest.mark.parametrize("thresholds", [None, 0.0, 1e308])
def test_any_values_can_be_drawn(values: list[float | None], thresholds: float | None) -> None:
    evidence = AlertEvidence(
        rule="r",
        tensor="t",
        figure="f",
        steps=range(len(values)),
        values=values,
        step=2**62,
        thresholds=thresholds,
        usual_range=(0.0, 1e308),
    )
    assert size_of(alert_png(evidence)) == (800, 400)


@pytest.mark.parametrize(
    "name", ["$\\frac{x}$", "日本語", "\x1b[31m\u202e\0", "_private", "x" * 5000, "\\alpha $", "{}%s"]
)
def test_names_are_text(name: str) -> None:
    evidence = AlertEvidence(
        rule=name, tensor=name, figure=name, steps=[1, 2], values=[1.0, 2.0], step=2, message=name, run=name
    )
    assert size_of(alert_png(evidence)) == (800, 400)


@pytest.mark.ci
def test_pictures_of_several_threads_are_those_of_one() -> None:
    expected = alert_png(EVIDENCE)
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(alert_png, [EVIDENCE] * 8)) == {expected}


@pytest.mark.ci
def test_pyplot_is_not_loaded_and_the_error_without_matplotlib_has_a_hint() -> None:
    program = """
import sys
from tests.sdk.plots.test_alert_evidence import EVIDENCE
from watchstep.plots.alert_evidence import alert_png
assert "matplotlib" not in sys.modules
alert_png(EVIDENCE)
assert "matplotlib.pyplot" not in sys.modules
for name in [name for name in sys.modules if name.startswith(("matplotlib", "watchstep.plots.plot_figure"))]:
    del sys.modules[name]
sys.modules["matplotlib"] = None
try:
    alert_png(EVIDENCE)
except Exception as error:
    print(type(error).__name__, error.hint)
"""
    output = run_python("-c", program)
    assert output == "ConfigError pip install 'watchstep[plots]'\n"
