"""``watchstep check-config FILE``: errors, the summary, and the dry run of a model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services.cli.command_line import run_command
from watchstep.capture.document.document import document_schema

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 2)
        self.unused = nn.Linear(1, 1)

    def forward(self, x):
        return {"scores": self.head(self.body(x)), "count": torch.tensor(3)}


def model():
    return Net()


def both():
    net = Net()
    return net, torch.optim.Adam(net.parameters())


def tensor():
    return torch.randn(16, 8)


def keywords():
    return {"x": torch.randn(16, 8)}


def wrong():
    return (torch.randn(16, 9),)


def nothing():
    return 7


def fails():
    raise ValueError("no data here")
"""
CAPTURE = """
collections:
  weights: {cadence: 10, tensors: 100}
  optimizer_state: {cadence: null, tensors: 50}
  outputs_of_body:
    include: "body.*:output"
    roles: [output]
    tensors: {every: 10}
    tensor_limits: {rows: [0, 4]}
  typo: {include: "bdy.*", exclude: "nothing.*", modules: [head], roles: [weight]}
  apart: {include: "body.*", modules: [head]}
  tiny: {roles: [weight], tensors: 5, tensor_limits: {hour_bytes: 3}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "dry_run_net.py").write_text(MODEL)
    (tmp_path / "capture.yaml").write_text(CAPTURE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "dry_run_net", raising=False)
    return tmp_path


def check(*words: str) -> subprocess.CompletedProcess[str]:
    return run_command("check-config", *words)


def planned(*words: str) -> dict[str, Any]:
    done = check("capture.yaml", "--dry-run", *words, "--json")
    assert done.returncode == 0, done.stderr
    plan: dict[str, Any] = json.loads(done.stdout)["dry_run"]
    return plan


def by_name(plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in plan["collections"]}


def test_a_valid_file_is_summarized(folder: Path) -> None:
    done = check("capture.yaml")
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert lines[0] == "capture.yaml: valid"
    (row,) = [line for line in lines if line.startswith("outputs_of_body")]
    assert "every 10; rows [0, 4]" in row
    assert "include 'body.*:output'; roles output" in row
    (unchanged,) = [line for line in lines if line.startswith("as built in: ")]
    assert "gradients" in unchanged
    assert "weights" not in unchanged
    answer = json.loads(check("capture.yaml", "--json").stdout)
    assert (answer["ok"], answer["problems"]) == (True, [])
    assert answer["document"]["collections"]["weights"] == {
        "cadence": {"every": 10},
        "tensors": {"every": 100},
    }


CADENCES = """
collections:
  weights: {tensors: {steps: [0, 5]}}
  gradients: {cadence: {every: 10, steps: [3]}, tensors: {every: null, steps: [0, 5]}}
  activations: {cadence: {stop: 0, steps: [0, 5]}, modes: {eval: 5, predict: {every: 3, steps: [0, 6]}}}
  losses: {cadence: {every: 5, start: 10, stop: 100, steps: [7], modes: [train, eval]}}
  evaluation: {roles: [output], tensors: {every: 1, modes: [eval]}}
  seldom: {roles: [output], tensors: {every: 2, modes: [eval]}, tensor_limits: {rows: [0, 4]}}
"""


def test_cadences_are_stated_as_they_apply(folder: Path) -> None:
    (folder / "capture.yaml").write_text(CADENCES)
    done = check("capture.yaml")
    rows = {line.split()[0]: re.split(" {2,}", line)[1:3] for line in done.stdout.splitlines()}
    budget = "as the budget allows"
    assert rows["weights"] == [budget, "every step, and at 0, 5"]
    assert rows["gradients"] == ["every 10, and at 3", "only at 0, 5"]
    assert rows["activations"] == [
        "only at 0, 5; eval: every 5 passes; predict: every 3 passes, and at 0, 6",
        "never",
    ]
    assert rows["losses"] == ["every 5 from 10 before 100, and at 7 in train, eval", "never"]
    assert rows["evaluation"] == [budget, "every pass in eval; at most one pass between two steps"]
    assert rows["seldom"] == [
        budget,
        "every 2 passes in eval; at most one pass between two steps; rows [0, 4]",
    ]
    warnings = [
        f"collections.{path}.steps: no effect, because 'every' is {every} and these steps are due anyway; "
        f"add '{only}' for these steps only"
        for path, every, only in (
            ("weights.tensors", 1, "every: null"),
            ("activations.modes.predict", 3, "stop: 0"),
        )
    ]
    assert done.returncode == 0
    assert done.stdout.splitlines()[-2:] == [f"capture.yaml: warning: {warning}" for warning in warnings]
    assert json.loads(check("capture.yaml", "--json").stdout)["warnings"] == warnings


def test_all_errors_are_shown_and_the_exit_code_is_1(folder: Path) -> None:
    (folder / "capture.yaml").write_text("gate: 1\ncollections: {a: {tensor: 3}}\n")
    done = check("capture.yaml")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "capture.yaml: error: gate: 1 is not true or false",
        "  hint: use true or false",
        "capture.yaml: error: collections.a.tensor: unknown key",
        "  hint: did you mean tensors or tensor_limits?",
    ]
    answer = json.loads(check("capture.yaml", "--json").stdout)
    assert not answer["ok"]
    assert [problem["path"] for problem in answer["problems"]] == ["gate", "collections.a.tensor"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.yaml", None, "No such file"),
        ("broken.yaml", "a: [", "not valid YAML"),
        ("list.yaml", "[1]", "[1] is not a mapping"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(
    folder: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (folder / name).write_text(content)
    done = check(name)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{name}: error: ")
    assert message in done.stdout


def test_a_dry_run_shows_tensors_rows_bytes_and_selectors_without_a_match(folder: Path) -> None:
    plan = planned("--model", "dry_run_net:both", "--input", "dry_run_net:tensor", "--step-seconds", "0.5")
    collections = by_name(plan)
    weights = collections["weights"]
    assert weights["tensors"] == ["body.0.weight", "body.1.weight", "head.weight", "unused.weight"]
    assert weights["rows_per_step"] == pytest.approx(0.4)
    assert weights["object_bytes"] == 4 * (8 * 32 + 32 + 32 * 2 + 1)
    assert weights["hour_bytes"] == pytest.approx(3600 / 0.5 / 100 * weights["object_bytes"])
    outputs = collections["outputs_of_body"]
    assert outputs["tensors"] == ["body:output", "body.0:output", "body.1:output", "body.2:output"]
    assert (outputs["rows_per_step"], outputs["unknown"]) == (None, 0)
    assert outputs["object_bytes"] == 4 * 4 * 4 * 32  # 4 tensors of float32, 4 of 16 rows
    state = collections["optimizer_state"]
    assert state["rows_per_step"] == 0
    assert "head.weight:exp_avg_sq" in state["tensors"]
    assert "unused:output" not in collections["activations"]["tensors"]
    assert collections["activations"]["unknown"] == 0
    assert plan["faults"] == [
        "collections.typo.include: 'bdy.*' matches no tensor",
        "collections.typo.exclude: 'nothing.*' matches no tensor",
        "collections.apart: no tensor matches all of its selectors",
        "collections.tiny.tensor_limits.hour_bytes: 3 is less than the smallest tensor, of 4 bytes",
    ]
    assert plan["elements_per_second"] > 1e6
    assert 0 < plan["fixed_seconds_per_step"] < plan["full_seconds"] < 1
    assert "losses" in plan["by_program"]


def test_without_an_input_the_shapes_of_activations_are_unknown(folder: Path) -> None:
    plan = planned("--model", "dry_run_net:model")
    collections = by_name(plan)
    assert not plan["has_input"]
    assert "unused:output" in collections["activations"]["tensors"]
    assert collections["activations"]["unknown"] == len(collections["activations"]["tensors"])
    assert collections["outputs_of_body"]["unknown"] == 4
    assert collections["outputs_of_body"]["object_bytes"] == 0
    assert collections["weights"]["hour_bytes"] is None
    assert collections["gradients"]["tensors"]
    text = check("capture.yaml", "--dry-run", "--model", "dry_run_net:model").stdout
    assert "without --input the shapes of activations, inputs and outputs are unknown" in text
    assert "sizes per hour require --step-seconds" in text
    assert "0 B + 4 unknown" in text


def test_a_dry_run_names_what_it_cannot_know(folder: Path) -> None:
    (folder / "capture.yaml").write_text(
        "collections:\n"
        "  weights: {cadence: 2, tensors: 100}\n"
        "  evaluation: {roles: [output], cadence: null, tensors: {every: 1, modes: [eval]}}\n"
    )
    words = ("--dry-run", "--model", "dry_run_net:model", "--input", "dry_run_net:tensor")
    done = check("capture.yaml", *words, "--step-seconds", "0.5")
    lines = done.stdout.splitlines()
    (planned_row,) = [line for line in lines if re.match("evaluation +[0-9]", line)]
    assert re.split(" {2,}", planned_row)[4] == "unknown"
    assert (
        "bytes per hour of evaluation are unknown: they depend on how often the program makes passes in these modes"
        in lines
    )
    (fixed,) = [line for line in lines if line.startswith("collections with a fixed cadence ('every: N'): ")]
    assert "rows of statistics per step on average" in fixed
    assert "unknown" not in check("capture.yaml", *words).stdout


def test_an_input_may_be_a_mapping_of_keywords_and_nothing_is_written(folder: Path) -> None:
    before = {path.name for path in folder.iterdir()}
    plan = planned("--model", "dry_run_net:model", "--input", "dry_run_net:keywords")
    assert by_name(plan)["outputs_of_body"]["unknown"] == 0
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dry-run",), "--dry-run and --model belong together"),
        (("--dry-run", "--model", "dry_run_net:model"), "no file given"),
        (("--model", "dry_run_net:model"), "--dry-run and --model belong together"),
        (("--dry-run", "--model", "dry_run_net"), "not MODULE:FACTORY"),
        (("--dry-run", "--model", "nowhere:model"), "No module named 'nowhere'"),
        (("--dry-run", "--model", "dry_run_net:modle"), "has no attribute 'modle'"),
        (("--dry-run", "--model", "dry_run_net:fails"), "no data here"),
        (("--dry-run", "--model", "dry_run_net:nothing"), "the factory returned a int"),
        (
            ("--dry-run", "--model", "dry_run_net:model", "--input", "dry_run_net:wrong"),
            "the model's forward or backward pass fails",
        ),
        (("--dry-run", "--model", "dry_run_net:model", "--step-seconds", "0"), "invalid --step-seconds"),
    ],
)
def test_invalid_options_are_refused_with_exit_code_2(
    folder: Path, words: tuple[str, ...], message: str
) -> None:
    file = [] if message == "no file given" else ["capture.yaml"]
    done = check(*file, *words)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_schema_is_printed() -> None:
    assert json.loads(check("--schema").stdout) == document_schema()
