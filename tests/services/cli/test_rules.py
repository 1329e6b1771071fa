"""``watchstep rules``: check, schema, show, test and backtest, as a user types them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.rules.custom.programs import LOUD
from tests.services.cli.command_line import run_command
from tests.services.recording import PROJECT, Recording, exploding_from, nan_from
from watchstep.errors import RuleError
from watchstep.store.store import Store
from watchstep_rules import parse
from watchstep_rules.backtest.backtest import (
    AttemptOutcome,
    BacktestOutcome,
    JudgingOrder,
    Replayed,
    ReplayOutcome,
)
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Phase, Transition
from watchstep_rules.engine.judge import RuleHealth
from watchstep_services.cli.backtest import show_rules
from watchstep_services.cli.main import app
from watchstep_services.cli.serve import source_of
from watchstep_services.core.settings import settings_for
from watchstep_services.runs.registration import register
from watchstep_services.serve.embedded import EmbeddedService

GOOD = """
rules:
  - rule: non_finite_values
    severity: critical
    actions: [stop, {webhook: "https://chat.example.com/secret/path"}, {notify: ml-oncall}]
  - rule: overfit
    name: late
    tensors: {include: "val"}
    for: {steps: 3, seconds: 60}
    keep_firing: {steps: 5}
    dry_run: true
inhibit: [{source: non_finite_values, target: [late]}]
"""
TESTS = """
tests:
  - name: the loss is lost
    series: [{tensor: loss, values: 3*0.9x20 NaNx60}]
    expect: [{rule: nan_or_inf, fires_at: %d, stops: true}]
"""
INHIBIT = "inhibit: [{source: nan_or_inf, target: [overfit]}]\n"
CASES = {
    "extends: defaults\nrules: [{rule: loss_spike, actions: [stop]}]": {
        "nan_or_inf": "default rule",
        "loss_spike": "of your rule file",
    },
    f"extends: defaults\n{INHIBIT}": {"nan_or_inf": "default rule"},
    "extends: defaults\nrules: [{rule: nan_or_inf, severity: warning}]": {"nan_or_inf": "of your rule file"},
    "rules: [{rule: nan_or_inf, actions: [stop]}]": {"nan_or_inf": "of your rule file"},
}


def run(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["rules", *map(str, arguments)])
    return done.exit_code, " ".join(done.output.split())


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD, encoding="utf-8")
    return path


def test_a_valid_file_has_a_line_per_action(good: Path) -> None:
    done = CliRunner().invoke(app, ["rules", "check", str(good)])
    assert done.exit_code == 0
    assert done.output.splitlines() == [
        f"{good}: 2 rules (1 critical, 1 warning)",
        "  stops the job: non_finite_values",
        "  posts to chat.example.com: non_finite_values",
        "  notifies ml-oncall: non_finite_values",
        "  dry run: late",
    ]


def test_the_summary_of_many_rules_is_short(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(
        "extends: defaults\nrules:\n"
        + "".join(f"  - {{rule: overfit, name: mine_{number}, dry_run: true}}\n" for number in range(7)),
        encoding="utf-8",
    )
    code, summary = run("check", path)
    assert code == 0
    assert f"{len(DEFAULT_RULES) + 7} rules (" in summary
    assert summary.endswith(
        "stops the job: nan_or_inf dry run: mine_0, mine_1, mine_2, mine_3, mine_4, and 2 more"
    )
    path.write_text("rules: [{rule: overfit}]", encoding="utf-8")
    assert run("check", path)[1].endswith("1 rule (1 warning) stops the job: no rule")


def test_verbose_prints_a_row_per_rule(good: Path) -> None:
    code, said = run("check", "--verbose", good)
    assert code == 0
    assert "2 rules" in said
    for words in (
        "stops the job",
        "posts to",
        "notifies ml-oncall",
        "late (overfit)",
        "3 steps and 60 s",
        "dry run",
    ):
        assert words in said
    assert "secret" not in said


def test_each_error_is_reported_with_its_line_and_exit_code_1(good: Path, tmp_path: Path) -> None:
    bad, broken = tmp_path / "bad.yaml", tmp_path / "broken.yaml"
    bad.write_text("rules:\n- {rule: nan}\n- {rule: overfit, severity: fatal}\n", encoding="utf-8")
    broken.write_text("rules:\n  - [", encoding="utf-8")
    code, said = run("check", good, bad, broken, tmp_path / "none.yaml")
    assert code == 1
    assert "bad.yaml:2: error: rules.0.rule: unknown rule 'nan'" in said
    assert "bad.yaml:3: error: rules.1.severity: " in said
    assert "broken.yaml:2: error: not valid YAML" in said
    assert "none.yaml:1: error: cannot be read" in said
    assert "good.yaml: 2 rules" in said


def test_the_schema_is_printed() -> None:
    done = CliRunner().invoke(app, ["rules", "schema"])
    assert json.loads(done.output)["properties"]["rules"]


def test_a_rule_shows_its_causes() -> None:
    code, said = run("show", "nan_or_inf")
    assert code == 0
    assert "Usual causes: - The learning rate is too high" in said
    assert "What to try: - " in said


@pytest.mark.parametrize("text", ["", "rules: []\n"])
def test_a_file_without_rules_gets_a_warning(tmp_path: Path, text: str) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text(text, encoding="utf-8")
    code, said = run("check", path)
    assert code == 0
    assert "empty.yaml:1: warning: the file has no rules: it evaluates nothing" in said


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "nan_or_inf",
            "By default: critical; fires after 1 step; resolved after 1 step without findings; stops the job.",
        ),
        ("nan_or_inf", "Inhibits while it fires: non_finite_values, "),
        (
            "exploding_gradient",
            "By default: warning; fires after 2 steps; resolved after 2 steps without findings.",
        ),
        ("stalled_training", "Off by default: a healthy program may pause for any time."),
        ("stalled_training", "; by the clock, also without rows."),
        ("sql", "query string required"),
        ("class_imbalance", "misprediction number or null None"),
    ],
)
def test_a_rule_shows_what_it_does_by_default(name: str, words: str) -> None:
    assert words in run("show", name)[1]


def test_the_hint_for_an_unknown_rule_lists_similar_names_first() -> None:
    done = CliRunner().invoke(app, ["rules", "show", "nan_or_if"])
    assert isinstance(done.exception, RuleError)
    first, *rest = done.exception.hint.splitlines()
    assert first.startswith("did you mean nan_or_inf")
    assert rest
    assert max(map(len, rest)) <= 100


def test_exit_codes_output_and_junit(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(TESTS % 69, encoding="utf-8")
    bad.write_text(TESTS % 70, encoding="utf-8")
    done = run_command("rules", "test", good)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "1 test, all passed"
    done = run_command("rules", "test", good, bad, "--junit", tmp_path / "junit.xml")
    assert done.returncode == 1
    assert "- expected: fires at 70" in done.stdout
    assert "+ got:      fires at 69, tensor loss" in done.stdout
    assert done.stdout.splitlines()[-1] == "2 tests, 1 failed"
    assert (tmp_path / "junit.xml").read_text(encoding="utf-8").count("<testcase") == 2


def test_results_as_json(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(TESTS % 69, encoding="utf-8")
    bad.write_text(TESTS % 70, encoding="utf-8")
    done = run_command("rules", "test", good, bad, "--json")
    assert (done.returncode, done.stderr) == (1, "")
    passed, failed = json.loads(done.stdout)
    assert (passed["file"], failed["file"]) == (str(good), str(bad))
    (test,) = passed["tests"]
    assert (test["name"], test["passed"], test["differences"]) == ("the loss is lost", True, [])
    (test,) = failed["tests"]
    assert not test["passed"]
    assert test["differences"][0]["rule"] == "nan_or_inf"
    assert "fires at 70" in test["differences"][0]["expected"]


def test_errors_that_a_user_can_fix(tmp_path: Path) -> None:
    for arguments in (["/no/tests.yaml"], []):
        done = run_command("rules", "test", *arguments)
        assert done.returncode == 2
        assert "hint: " in done.stderr
        assert "Traceback" not in done.stderr


def test_the_schema_of_rule_tests_is_printed() -> None:
    assert json.loads(run_command("rules", "test", "--schema").stdout)["title"] == "Watchstep rule tests"


def test_a_check_reports_the_isolation_of_python_rules(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOUD, encoding="utf-8")
    (tmp_path / "rules.yaml").write_text(
        "rules: [{rule: python, name: mine, params: {file: mine.py, class: Loud}}]", encoding="utf-8"
    )
    done = run_command("rules", "check", tmp_path / "rules.yaml")
    assert done.returncode == 0, done.stdout
    assert "mine: Python rule; isolation on this machine: full" in done.stdout


@pytest.mark.parametrize("text", CASES)
def test_rules_of_a_file(text: str) -> None:
    sources = {config.name: source_of(config, has_file=True) for config in parse(text, "rules.yaml")}
    assert {name: sources[name] for name in CASES[text]} == CASES[text]


def test_rules_without_a_file() -> None:
    assert {source_of(config, has_file=False) for config in DEFAULT_RULES} == {"default rule"}


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


@pytest.mark.ci
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


@pytest.mark.ci
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_many_runs_and_a_sweep(store: Path, rules: Path, tmp_path: Path, jobs: str) -> None:
    found = tmp_path / "found.json"
    options = ["--rules", str(rules), "--jobs", jobs, "--json", str(found)]
    sweep = ["--sweep", "growth=10:1e8:3", "--sweep", "exploding_gradient.for=1"]
    done = run_command("rules", "backtest", f"{store}/{PROJECT}/*", *options, *sweep)
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "exploding_gradient 2 3 - 22 vision/explosion" in lines
    assert "10 1 2 3 - 20 vision/explosion" in lines
    assert "100 3 2 3 - 22 vision/explosion <- current" in lines
    assert "100,000,000 1 0 3 - - -" in lines
    held = json.loads(found.read_text())
    assert [run["run"] for run in held["runs"]] == ["explosion", "late", "nan"]
    assert held["failed"] == []
    assert [len(one["fired"]) for one in held["sweep"] if one["current"]] == [2]
    (attempt,) = held["runs"][1]["attempts"]
    assert attempt["order"] == "steps"
    told = {one["rule_config"]["name"]: one for one in attempt["rules"]}
    assert told["exploding_gradient"]["transitions"][-1]["step"] == 25
    assert told["exploding_gradient"]["found"] == len(told["exploding_gradient"]["findings"]) > 0


def test_the_precision_of_a_rule_is_that_of_the_alerts_with_an_answer() -> None:
    def tested(run: str, answer: str) -> Replayed:
        change = Transition(Phase.FIRING, 3, None, 3, 0)
        rule = ReplayOutcome(RuleConfig(rule="exploding_gradient"), [], 1, [change], RuleHealth.OK, "")
        attempt = AttemptOutcome("a1", JudgingOrder.STEPS, (), 9, [rule])
        outcome = BacktestOutcome(f"s3://b/{run}", PROJECT, run, [attempt])
        return Replayed(outcome, (), {"exploding_gradient": answer} if answer else {})

    text = io.StringIO()
    show_rules(
        Console(width=120, file=text),
        [tested("a", "yes"), tested("b", "no"), tested("c", "not_sure"), tested("d", "")],
    )
    assert "exploding_gradient 4 4 1 of 2 3 vision/a" in " ".join(text.getvalue().split())


@pytest.mark.ci
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


@pytest.mark.ci
def test_a_failed_rule_sets_the_exit_code(store: Path, tmp_path: Path) -> None:
    rules = tmp_path / "ill.yaml"
    query = "SELECT tensor FROM statistics WHERE CAST(tensor AS INTEGER) > 0"
    rules.write_text(
        f"rules: [{{rule: non_finite_values}}, {{rule: sql, name: mine, params: {{query: '{query}'}}}}]"
    )
    done = run_command("rules", "backtest", "nan", "late", "--store", store, "--rules", rules, "--jobs", "1")
    assert done.returncode == 1
    assert "vision/nan" in done.stdout
    assert "rule mine cannot be evaluated (2 runs): " in done.stderr
    assert "Conversion Error" in done.stderr


@pytest.mark.ci
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


@pytest.mark.ci
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


@pytest.mark.ci
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
    assert "100 1 2 - 25 vision/late <- current" in lines
    assert other.returncode == 2
    assert "vision/x: not found" in other.stderr
    assert "use <project>/<run>" in plain.stderr


@pytest.mark.ci
def test_a_malicious_folder_name_is_skipped_and_damaged_runs_are_an_error(store: Path, rules: Path) -> None:
    (store / PROJECT / "\x1b[2Jevil").mkdir()
    options = ("--store", store, "--rules", rules, "--jobs", "1")
    done = run_command("rules", "backtest", f"{PROJECT}/", *options)
    assert done.returncode == 0, done.stderr
    assert "vision/nan" in done.stdout
    assert "'\\x1b[2Jevil'" in done.stderr
    for segment in (store / PROJECT / "late").rglob("*.arrow"):
        segment.write_bytes(b"garbage")
    done = run_command("rules", "backtest", "late", *options)
    assert done.returncode == 1
    assert "none of its 3 segments can be read" in done.stderr


@pytest.mark.ci
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
