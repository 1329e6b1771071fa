"""Reports of benchmarks, and baselines of the detection benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.baselines import compared_with, fired, interval
from benchmarks.report import Figure, Report, arguments
from watchstep import CaptureConfig, Hook, open_run
from watchstep_rules.baseline import summarize_run
from watchstep_rules.signals.baseline import merge_summaries

# Reports


@pytest.mark.parametrize(
    ("figure", "ok"),
    [
        (Figure(1.0, "ratio", 1.01), True),
        (Figure(1.02, "ratio", 1.01), False),
        (Figure(3.0, "1/s", 2.0, "at least"), True),
        (Figure(1.0, "1/s", 2.0, "at least"), False),
        (Figure(1.0, "ratio"), None),
        (Figure(None, "ratio", 1.0), False),
        (Figure(None, "ratio"), None),
    ],
)
def test_a_target_is_met_missed_or_not_there(figure: Figure, ok: bool | None) -> None:
    assert figure.ok is ok


def test_the_file_holds_figures_machine_and_versions(tmp_path: Path) -> None:
    report = Report("Capture", quick=True, packages=("no-such-package",))
    report.add("gate", Figure(1.005, "ratio", 1.01, note="median/min 1.002"))
    report.add("peer", Figure(None, "ratio", note="not installed"))
    report.remark("5 rounds")
    report.write(tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["figures"]["gate"] == {"value": 1.005, "target": 1.01, "unit": "ratio", "ok": True}
    assert data["figures"]["peer"] == {"value": None, "target": None, "unit": "ratio", "ok": None}
    assert data["notes"]["gate"] == "median/min 1.002"
    assert data["machine"].keys() >= {"cpu", "cores", "memory"}
    assert data["versions"]["no-such-package"] == "not installed"
    assert data["versions"]["watchstep"] != "not installed"
    assert data["quick"]
    assert data["remarks"] == ["5 rounds"]


def test_the_table_says_what_was_missed_and_that_the_run_was_short(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = Report("Capture", quick=True)
    report.add("gate", Figure(1.5, "ratio", 1.01))
    report.add("peer", Figure(None, "ratio", note="not installed"))
    report.show()
    printed = capsys.readouterr().out
    assert "MISSED" in printed
    assert "not installed" in printed
    assert "--quick" in printed


def test_a_name_is_taken_once() -> None:
    report = Report("Capture")
    report.add("gate", Figure(1.0, "ratio"))
    with pytest.raises(ValueError, match="gate"):
        report.add("gate", Figure(1.0, "ratio"))


def test_every_benchmark_takes_the_same_options() -> None:
    options = arguments("A benchmark.").parse_args(["--quick", "--json", "out.json"])
    assert options.quick
    assert options.json == "out.json"


# Baselines


def record_loss(folder: Path, run: str, loss: float) -> str:
    with Hook(folder, run=run, config=CaptureConfig(overhead_budget=None)) as hook:
        for step in range(40):
            hook.log(loss=loss + 0.01 * (step % 3))
            hook.step()
    return hook.run_url


def test_only_a_run_that_leaves_the_ranges_counts(tmp_path: Path) -> None:
    earlier = {
        str(seed): summarize_run(open_run(record_loss(tmp_path, f"earlier-{seed}", 1.0 + 0.1 * seed)))
        for seed in range(5)
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
