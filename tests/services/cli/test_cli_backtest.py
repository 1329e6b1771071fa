"""``watchstep rules backtest`` on recorded runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rules.custom.programs import LOUD
from tests.services.cli.command_line import run_command
from tests.services.recording import PROJECT, Recording, exploding_from, nan_from
from watchstep.store.store import Store
from watchstep_services.core.settings import settings_for
from watchstep_services.runs.registration import register
from watchstep_services.serve.embedded import EmbeddedService

pytestmark = pytest.mark.ci


@pytest.fixture
def store(tmp_path: Path) -> Path:
    opened = Store.open(tmp_path / "runs", create=True)
    for run, value in (("nan", nan_from(4)), ("explosion", exploding_from(20)), ("late", exploding_from(23))):
        Recording(opened, run=run).begin().write_all([9, 19, 29], value)
    (tmp_path / "runs" / PROJECT / "notes").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(
        "rules:\n"
        "  - {rule: non_finite_values, severity: critical, actions: [stop]}\n"
        "  - {rule: exploding_gradient, for: {steps: 3}}\n"
        "  - {rule: class_imbalance}\n"
    )
    return path


def test_one_run(store: Path, rules: Path) -> None:
    done = run_command("rules", "backtest", "nan", "--store", store, "--rules", rules)
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0] == "vision/nan 90 rows, by step: no service evaluated it"
    assert lines[1] == "RULE SEVERITY STEP SINCE TENSOR MESSAGE"
    assert lines[2].startswith("non_finite_values critical, stops 4 4 loss 1 NaN among 1 elements")
    assert "silent: exploding_gradient" in lines
    assert "no data: class_imbalance" in lines
    assert done.stderr == ""


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_many_runs_and_a_sweep(store: Path, rules: Path, tmp_path: Path, jobs: str) -> None:
    found = tmp_path / "found.json"
    options = ["--rules", str(rules), "--jobs", jobs, "--json", str(found)]
    sweep = ["--sweep", "growth=10:1e8:3", "--sweep", "exploding_gradient.for=1"]
    done = run_command("rules", "backtest", f"{store}/{PROJECT}/*", *options, *sweep)
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "exploding_gradient 2 3 22 vision/explosion" in lines
    assert "10 1 2 3 20 vision/explosion" in lines
    assert "100 3 2 3 22 vision/explosion <- current" in lines
    assert "1e+08 1 0 3 - -" in lines
    held = json.loads(found.read_text())
    assert [run["run"] for run in held["runs"]] == ["explosion", "late", "nan"]
    assert held["failed"] == []
    assert [len(one["fired"]) for one in held["sweep"] if one["current"]] == [2]
    (attempt,) = held["runs"][1]["attempts"]
    assert attempt["order"] == "steps"
    told = {one["rule_config"]["name"]: one for one in attempt["rules"]}
    assert told["exploding_gradient"]["transitions"][-1]["step"] == 25
    assert told["exploding_gradient"]["found"] == len(told["exploding_gradient"]["findings"]) > 0


def test_a_dry_run_and_a_custom_message_are_shown(store: Path, tmp_path: Path) -> None:
    rules = tmp_path / "dry.yaml"
    message = "{label.team}: {run} is lost at {step}"
    rules.write_text(
        f"rules: [{{rule: non_finite_values, dry_run: true, actions: [stop], labels: {{team: red}}, message: '{message}'}}]"
    )
    done = run_command("rules", "backtest", "nan", "--store", store, "--rules", rules, "--json", "-")
    assert done.returncode == 0, done.stderr
    assert "non_finite_values warning, dry run 4 4 loss red: nan is lost at 4" in " ".join(
        done.stderr.split()
    )
    (attempt,) = json.loads(done.stdout)["runs"][0]["attempts"]
    assert attempt["rules"][0]["transitions"][-1]["message"] == "red: nan is lost at 4"


def test_a_failed_rule_sets_the_exit_code(store: Path, tmp_path: Path) -> None:
    rules = tmp_path / "ill.yaml"
    query = "SELECT tensor FROM statistics WHERE CAST(tensor AS INTEGER) > 0"
    rules.write_text(
        f"rules: [{{rule: non_finite_values}}, {{rule: sql, name: mine, params: {{query: '{query}'}}}}]"
    )
    done = run_command("rules", "backtest", "nan", "late", "--store", store, "--rules", rules)
    assert done.returncode == 1
    assert "vision/nan" in done.stdout
    assert "rule mine cannot be evaluated (2 runs): " in done.stderr
    assert "Conversion Error" in done.stderr


def test_a_failed_run_affects_no_other(store: Path, rules: Path) -> None:
    (store / PROJECT / "late" / "run.json").write_text("{")
    named = ["nan", f"{PROJECT}/", "nothere", "x*"]
    done = run_command("rules", "backtest", *named, "--store", store, "--rules", rules)
    assert done.returncode == 1
    assert "vision/nan" in done.stdout
    assert "vision/explosion" in done.stdout
    assert done.stderr.count("not evaluated:") == 3
    assert "late/run.json: not a document" in done.stderr
    assert "runs 'x*'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nan", "--sweep", "nothing=1"], "no rule has a parameter 'nothing'"),
        (["nan", "--json", "/nowhere/found.json"], "cannot be written"),
    ],
)
def test_invalid_arguments_are_reported(store: Path, rules: Path, arguments: list[str], said: str) -> None:
    done = run_command("rules", "backtest", *arguments, "--store", store, "--rules", rules)
    assert done.returncode == 2
    assert said in done.stderr
    assert "hint:" in done.stderr


def test_a_service_evaluates_its_own_runs(store: Path, rules: Path) -> None:
    with EmbeddedService(settings_for(str(store), None, sweep_seconds=0.05, listing_seconds=0.05)) as service:
        for run in ("nan", "late"):
            register(service.service, PROJECT, run, (), "operator")
        options = ["--rules", str(rules), "--service", "", "--sweep", "growth=1e8"]
        named = [f"{PROJECT}/nan", f"{PROJECT}/lat?"]
        done = run_command("rules", "backtest", *named, "--store", store, *options)
        other = run_command("rules", "backtest", f"{PROJECT}/x", "--store", store, "--service", "")
        plain = run_command("rules", "backtest", "nan", "--store", store, "--service", "")
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "vision/late 90 rows, by step: no service evaluated it" in lines
    assert any(line.startswith("non_finite_values critical, stops 4 4 loss") for line in lines)
    assert "100 1 2 25 vision/late <- current" in lines
    assert other.returncode == 2
    assert "vision/x: not found" in other.stderr
    assert "use <project>/<run>" in plain.stderr


def test_a_malicious_folder_name_is_skipped_and_damaged_runs_are_an_error(store: Path, rules: Path) -> None:
    (store / PROJECT / "\x1b[2Jevil").mkdir()
    done = run_command("rules", "backtest", f"{PROJECT}/", "--store", store, "--rules", rules)
    assert done.returncode == 0, done.stderr
    assert "vision/nan" in done.stdout
    assert "'\\x1b[2Jevil'" in done.stderr
    for segment in (store / PROJECT / "late").rglob("*.arrow"):
        segment.write_bytes(b"garbage")
    done = run_command("rules", "backtest", "late", "--store", store, "--rules", rules)
    assert done.returncode == 1
    assert "none of its 3 segments can be read" in done.stderr


def test_a_sweep_of_a_parameter_of_a_python_rules_class(store: Path, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    rules = tmp_path / "python.yaml"
    rules.write_text("rules:\n  - {rule: python, name: loud, params: {file: loud.py, class: Loud}}\n")
    found = tmp_path / "found.json"
    sweep = ["--sweep", "loud.threshold=1e-9,1e30"]
    done = run_command(
        "rules", "backtest", "late", "--store", store, "--rules", rules, *sweep, "--json", found
    )
    assert done.returncode == 0, done.stderr
    variations = json.loads(found.read_text())["sweep"]
    assert [variation["settings"] for variation in variations] == [
        {"loud.threshold": value} for value in (1e-9, 2.0, 1e30)
    ]
    assert [variation["current"] for variation in variations] == [False, True, False]
    assert variations[0]["fired"]
    assert not variations[2]["fired"]
