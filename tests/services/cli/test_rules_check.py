"""``watchstep rules check`` and ``schema``, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from watchstep.errors import RuleError
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_services.cli.main import app

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
