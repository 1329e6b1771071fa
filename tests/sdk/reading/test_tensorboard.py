"""Event files, read back by TensorBoard itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.reading.stored import FIRST, small_run
from watchstep import open_run
from watchstep.errors import ConfigError
from watchstep.reading.tensorboard import export

TAG = FIRST.name.replace(":", "_")


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import HISTOGRAMS, EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={HISTOGRAMS: 0})
    found.Reload()
    return found


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    run = open_run(small_run(tmp_path / "store", workers=2))
    target = tmp_path / "events"
    assert export(run, target, ("max", "rms")) == 2 * 12 * (1 + 2 * 3)
    assert sorted(folder.name for folder in target.iterdir()) == ["train-0", "train-1"]
    found = events(target / "train-1")
    due = run.series(FIRST.name, "rms", worker=1)
    scalars = found.Scalars(f"{TAG}/rms")
    assert [event.step for event in scalars] == due["step"].to_pylist()
    assert [event.value for event in scalars] == pytest.approx(due["rms"].to_pylist(), rel=1e-6)
    assert len(found.Scalars("loss")) == 12
    histogram = found.Histograms(TAG)[2].histogram_value
    assert (histogram.min, histogram.max, histogram.num) == (-1.5, 3.0, 3.0)
    assert histogram.bucket_limit == [-1.0, 0.0, 2.0, 4.0]
    assert histogram.bucket == [1.0, 1.0, 0.0, 1.0]


def test_a_folder_with_events_is_refused(tmp_path: Path) -> None:
    run = open_run(small_run(tmp_path / "store"))
    export(run, tmp_path / "events")
    with pytest.raises(ConfigError, match="already"):
        export(run, tmp_path / "events")


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match="watchstep\\[tensorboard\\]"):
        export(open_run(small_run(tmp_path)), tmp_path / "events")
