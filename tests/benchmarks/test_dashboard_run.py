"""The recorded run of the dashboard's benchmark: its rows are valid, the same each time, and wrong where they are said to be."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.dashboard_run import FAULTS, catalogue, finished_steps, make_run
from watchstep import Run, open_run
from watchstep.format.segment_checks import check_values
from watchstep.reading.grid import GridRequest

STEPS = 200


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return open_run(make_run(tmp_path_factory.mktemp("store"), STEPS))


@pytest.mark.ci
def test_the_run_is_recorded_and_compacted(run: Run) -> None:
    assert run.index.manifest is not None
    assert not run.index.segments
    assert not run.damaged
    assert run.state() == "completed"
    assert [info.name for info in run.catalogue] == [
        info.name for info in sorted(catalogue(), key=lambda info: (info.order, info.name))
    ]
    assert run.steps("train") == list(range(STEPS))
    rows = check_values(run.rows())
    statistics = rows.statistics
    inside = np.concatenate([[0], np.cumsum(statistics.histogram.counts)])[statistics.histogram.offsets]
    np.testing.assert_array_equal(np.diff(inside) + statistics.zero + statistics.nonfinite, statistics.count)
    assert run.tensor("head.weight:gradient").saved_steps() == [0, 100, 187, 188]


@pytest.mark.ci
def test_its_faults_are_in_the_rows(run: Run) -> None:
    for fault in FAULTS:
        first, end = fault.steps(STEPS)
        figure = "zero_share" if fault.kind == "dead" else "rms"
        grid = run.grid(GridRequest(fault.tensors, figure, STEPS, nonfinite=True))
        if fault.kind == "nan":
            expected = np.zeros(STEPS, np.bool_)
            expected[first:end] = True
            np.testing.assert_array_equal(grid.nonfinite > 0, np.tile(expected, (len(fault.tensors), 1)))
            continue
        before, during = grid.mean[:, first - 1], grid.mean[:, end - 1]
        ratio = before / during if fault.kind == "vanishing" else during / before
        assert (ratio > 10).all(), fault.kind


def test_its_rows_are_the_same_each_time() -> None:
    first, second = ([step.records for step in finished_steps(3)] for _ in range(2))
    for records, repeated in zip(first, second, strict=True):
        for record, again in zip(records, repeated, strict=True):
            np.testing.assert_array_equal(
                record.measurement.collect().square_sum, again.measurement.collect().square_sum
            )
