"""The benchmark of baselines: what it counts as a false alarm, and how uncertain its share is."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.baselines import compared_with, fired, interval
from watchstep import CaptureConfig, Hook, open_run
from watchstep_rules.baseline import summarize_run
from watchstep_rules.signals.baseline import merge_summaries


def record_loss(folder: Path, run: str, loss: float) -> str:
    with Hook(folder, run=run, config=CaptureConfig(overhead_budget=None)) as hook:
        for step in range(40):
            hook.log(loss=loss + 0.01 * (step % 3))
            hook.step()
    return hook.run_url


def test_only_a_run_that_leaves_the_ranges_counts(tmp_path: Path) -> None:
    earlier = {
        str(seed): summarize_run(open_run(record_loss(tmp_path, f"earlier-{seed}", 1.0 + 0.1 * seed)))
        for seed in range(3)
    }
    baseline = merge_summaries(earlier)
    assert baseline is not None
    rules = [compared_with(baseline)]
    assert fired(record_loss(tmp_path, "alike", 1.05), rules) == []
    alerts = fired(record_loss(tmp_path, "ten-times", 10.0), rules)
    assert [severity for severity, _ in alerts] == ["warning"]
    assert "above the range" in alerts[0][1]


@pytest.mark.parametrize(
    ("hits", "runs", "expected"), [(0, 10, (0.0, 0.2775)), (5, 10, (0.2366, 0.7634)), (10, 10, (0.7225, 1.0))]
)
def test_the_interval_is_wilsons(hits: int, runs: int, expected: tuple[float, float]) -> None:
    assert interval(hits, runs) == pytest.approx(expected, abs=1e-4)
