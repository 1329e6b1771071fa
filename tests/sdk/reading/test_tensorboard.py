"""Event files, read back by TensorBoard itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.sdk.event_files import accumulated
from tests.sdk.format.blocks import Row, block_of, gradient
from tests.sdk.reading.stored import FIRST, LOSS, new_run, small_run, write
from watchstep import open_run
from watchstep.errors import ConfigError
from watchstep.reading.tensorboard import export

TAG = FIRST.name.replace(":", "_")


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    run = open_run(small_run(tmp_path / "store", workers=2))
    target = tmp_path / "events"
    assert export(run, target, ("max", "rms")) == 2 * 12 * (1 + 2 * 3)
    assert sorted(folder.name for folder in target.iterdir()) == ["train-0", "train-1"]
    found = accumulated(target / "train-1")
    due = run.series(FIRST.name, "rms", worker=1)
    scalars = found.Scalars(f"{TAG}/rms")
    assert [event.step for event in scalars] == due["step"].to_pylist()
    assert [event.value for event in scalars] == pytest.approx(due["rms"].to_pylist(), rel=1e-6)
    assert len(found.Scalars("loss")) == 12
    histogram = found.Histograms(TAG)[2].histogram_value
    assert (histogram.min, histogram.max, histogram.num) == (-1.5, 3.0, 3.0)
    assert histogram.bucket_limit == [-1.0, 0.0, 2.0, 4.0]
    assert histogram.bucket == [1.0, 1.0, 0.0, 1.0]


@pytest.mark.ci
def test_histograms_of_many_rows_are_their_bins(tmp_path: Path) -> None:
    """More rows than are encoded together, with all magnitudes that a float64 has."""
    tensors = [gradient(f"layer{index}") for index in range(600)]
    powers = [range(-1074 + index % 7, 1024, 1 if index == 500 else 40 + index % 50) for index in range(600)]
    elements = [[(-1.0) ** place * 2.0**power for place, power in enumerate(row)] for row in powers]
    store = new_run(tmp_path)
    write(store, [block_of([Row(0, info, row) for info, row in zip(tensors, elements, strict=True)])])
    export(open_run(tmp_path / "default" / "r"), tmp_path / "events")
    found = accumulated(tmp_path / "events" / "train-0")
    for info, row in zip(tensors, elements, strict=True):
        (event,) = found.Histograms(info.name.replace(":", "_"))
        histogram = event.histogram_value
        limits = histogram.bucket_limit
        assert limits == sorted(set(limits))
        filled = [limit for limit, count in zip(limits, histogram.bucket, strict=True) if count]
        assert filled == sorted(min(2 * x, sys.float_info.max) if x > 0 else x for x in row)
        assert sum(histogram.bucket) == histogram.num == len(row)


def test_what_does_not_exist_is_omitted(tmp_path: Path) -> None:
    rows = [
        Row(0, LOSS, [float("nan")]),
        Row(0, FIRST, [float("inf")] * 3),
        Row(1, LOSS, [2.0]),
        Row(1, FIRST, [1e300, float("nan")]),
    ]
    write(new_run(tmp_path), [block_of(rows)])
    export(open_run(tmp_path / "default" / "r"), tmp_path / "events")
    found = accumulated(tmp_path / "events" / "train-0")
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 2.0)]
    assert [event.step for event in found.Histograms(TAG)] == [1]
    (mean,) = found.Scalars(f"{TAG}/mean")
    assert mean.value == float("inf")  # TensorBoard's numbers are float32


def test_a_folder_with_events_is_refused(tmp_path: Path) -> None:
    run = open_run(small_run(tmp_path / "store"))
    export(run, tmp_path / "events")
    with pytest.raises(ConfigError, match="already"):
        export(run, tmp_path / "events")


def test_a_file_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("in the way")
    with pytest.raises(ConfigError, match="events"):
        export(open_run(small_run(tmp_path / "store")), tmp_path / "events")


def test_a_figure_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'median' does not exist"):
        export(open_run(small_run(tmp_path / "store")), tmp_path / "events", ("median",))
