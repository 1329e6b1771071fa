"""Series that are written short, and the rows that are made of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.blocks import statistics_of
from watchstep.format.segment_checks import check_values
from watchstep.format.statistics import COUNT_COLUMNS, DERIVED, VALUE_COLUMNS, StatisticsBatch
from watchstep_rules.testing.file import FIGURES, RuleTest, elements_with, statistics_with, values_of
from watchstep_rules.testing.running import made

# Notation


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", []),
        ("3", [3]),
        ("-3.5e-2", [-0.035]),
        (".5 2.", [0.5, 2.0]),
        ("3x4", [3, 3, 3, 3]),
        ("1+2x4", [1, 3, 5, 7]),
        ("7-2x3", [7, 5, 3]),
        ("-1-2x3", [-1, -3, -5]),
        ("1+-2x3", [1, -1, -3]),
        ("1e-3+1e-3x3", [0.001, 0.002, 0.003]),
        ("1*10x4", [1, 10, 100, 1000]),
        ("8*0.5x3", [8, 4, 2]),
        ("1e300*1e300x3", [1e300, math.inf, math.inf]),
        ("-1e300*1e300x3", [-1e300, -math.inf, -math.inf]),
        ("1 _ 2", [1, None, 2]),
        ("_x3 1x0", [None] * 3),
        ("Inf -Inf +Infx2", [math.inf, -math.inf, math.inf, math.inf]),
        ("1e-3x2\n  1e-9x1", [0.001, 0.001, 1e-9]),
    ],
)
def test_what_is_written_short(text: str, values: list[float | None]) -> None:
    assert values_of(text) == pytest.approx(values, abs=0)


def test_invalid_numbers_are_refused() -> None:
    assert all(math.isnan(value) for value in values_of("NaN nanx2") if value is not None)


@pytest.mark.parametrize(
    "text", ["x3", "3x", "3x-1", "1+2", "a", "1__", "_+1x2", "1,2", "1*x3", "0x10y", "1x2000000"]
)
def test_invalid_notation_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a valid value|has no number of values|values"):
        values_of(text)


@given(st.floats(-1e6, 1e6), st.integers(0, 50))
def test_a_value_and_a_count(value: float, count: int) -> None:
    assert values_of(f"{value!r}x{count}") == [value] * count


# Rows


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
