"""Synthetic rows have the requested figure, and all their figures are of one tensor."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.blocks import statistics_of
from watchstep.format.segment_checks import check_values
from watchstep.format.statistics import COUNT_COLUMNS, DERIVED, VALUE_COLUMNS, StatisticsBatch
from watchstep_rules.testing.file import FIGURES, RuleTest, elements_with, statistics_with
from watchstep_rules.testing.running import made


def figure(name: str, batch: StatisticsBatch) -> float:
    return float((DERIVED[name](batch) if name in DERIVED else getattr(batch, name))[0])


@pytest.mark.parametrize("name", FIGURES)
@given(value=st.floats(1e-12, 1e12), count=st.integers(2, 200), share=st.floats(0, 1))
def test_a_made_row_has_its_figure(name: str, value: float, count: int, share: float) -> None:
    whole = float(math.floor(share * count))
    if name.endswith("_share"):
        value = whole / count
    elif name in {"nan", "pos_inf", "neg_inf", "zero"}:
        value = whole
    assert figure(name, statistics_with(name, [value], count)) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("name", FIGURES)
@given(value=st.sampled_from([0.0, 1.0, 3.0, math.nan, math.inf, -math.inf]), count=st.integers(3, 40))
def test_the_other_figures_are_those_of_its_elements(name: str, value: float, count: int) -> None:
    if name.endswith("_share") and math.isfinite(value):
        value = min(value, 1.0)
    batch = statistics_with(name, [value], count)
    plain = [number for number, times in elements_with(name, value, count) for _ in range(times)]
    assert len(plain) == count
    real = statistics_of([plain])
    for column in (*COUNT_COLUMNS, *VALUE_COLUMNS):
        np.testing.assert_allclose(
            getattr(batch, column), getattr(real, column), rtol=1e-9, atol=1e-9, err_msg=column
        )
    assert batch.histogram.row(0)[0].tolist() == real.histogram.row(0)[0].tolist()
    assert batch.histogram.row(0)[1].tolist() == real.histogram.row(0)[1].tolist()


@pytest.mark.parametrize(
    ("name", "value", "count", "message"),
    [
        ("abs_mean", -1.0, 4, "never negative"),
        ("std", 1.0, 1, "one element"),
        ("zero_share", 1.5, 4, "has 4 elements"),
        ("nan", 5.0, 4, "has 4 elements"),
        ("nan", 0.5, 4, "has 4 elements"),
    ],
)
def test_a_figure_that_cannot_be_is_refused(name: str, value: float, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        statistics_with(name, [value], count)


def test_a_made_run_is_one_that_a_recorder_could_have_written() -> None:
    test = RuleTest.model_validate(
        {
            "name": "all sorts",
            "workers": 2,
            "interval": 0.5,
            "series": [
                {"tensor": "net.fc1.weight:gradient", "values": "1x4 _ 2"},
                {"tensor": "net.fc1.bias", "values": 1, "start": 3},
                {"tensor": "act:output", "module_type": "ReLU", "values": "1x2", "probes": {"channels": 8, "dead_channels": "1 _"}},
                {"tensor": "loss", "values": "3 NaN", "every": 2, "mode": "eval", "worker": 1},
                {"tensor": "accuracy", "values": "0.5"},
                {"tensor": "labels", "values": "1", "shape": [16]},
            ],
            "expect": [],
        }
    )  # fmt: skip
    block = check_values(made(test))
    infos = {info.name: info for info in block.catalogue}
    assert {
        name: (info.role, info.collections[0], info.module, info.shape) for name, info in infos.items()
    } == {
        "net.fc1.weight:gradient": ("gradient", "gradients", "net.fc1", (8, 8)),
        "net.fc1.bias": ("bias", "biases", "net.fc1", (8,)),
        "act:output": ("output", "activations", "act", (8, 8)),
        "loss": ("loss", "losses", "", ()),
        "accuracy": ("metric", "metrics", "", ()),
        "labels": ("label", "labels", "", (16,)),
    }
    assert infos["net.fc1.bias"].module_type == "Linear"
    of_gradient = block.mask_of_tensors([info.name == "net.fc1.weight:gradient" for info in block.catalogue])
    assert block.step[of_gradient & (block.worker == 0)].tolist() == [0, 1, 2, 3, 5]
    of_loss = block.mask_of_tensors([info.role == "loss" for info in block.catalogue])
    assert [(int(s), int(w), int(m)) for s, w, m in zip(block.step[of_loss], block.worker[of_loss], block.mode[of_loss], strict=True)] == [(0, 1, 1), (2, 1, 1)]  # fmt: skip
    assert np.diff(np.unique(block.time_ns)).min() == 500_000_000
    of_output = block.mask_of_tensors([info.role == "output" for info in block.catalogue])
    assert block.probes["channels"][of_output].tolist() == [8.0] * 4
    assert np.isnan(block.probes["dead_channels"][of_output]).tolist() == [False, False, True, True]
