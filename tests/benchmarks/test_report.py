import json
from pathlib import Path

import pytest

from benchmarks.report import Figure, Report, arguments


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
