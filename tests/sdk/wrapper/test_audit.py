"""``watchstep audit``: real programs that are deterministic, or differ in their weights, data, one operation, or the backward pass."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from watchstep.errors import ConfigError, FormatError
from watchstep.wrapper.audit.audit_command import main
from watchstep.wrapper.audit.record import read_records

PROLOGUE = """
import os, random, time
import torch
from torch import nn
torch.set_num_threads(1)
"""
SEEDED = "torch.manual_seed(0)\n"
TRAINING = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(64, 4), torch.randint(0, 2, (64,))
for step in range(5):
    rows = order[8 * step : 8 * step + 8]
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
MODEL = "model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))\n"
ORDER = "order = torch.randperm(64)\n"


class Audited:
    """The result of an audit of a program."""

    def __init__(self, code: int, data: dict[str, Any]) -> None:
        self.code = code
        self.data = data
        self.operations = data["ranks"][0]["operations"]
        self.first = self.operations["first"]
        self.cause = data["cause"]
        self.risks = " ".join(data["risks"])

    @property
    def line(self) -> str:
        """The source line of the first operation that differs."""
        text: str = self.first["operation"]["line"]["text"]
        return text


def exit_code(*arguments: str | Path) -> int:
    """Audit, and return the exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def audit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """Audits a program of two steps."""

    def run(program: str, *options: str, steps: int = 2) -> Audited:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(program))
        code = exit_code("--steps", str(steps), "--json", *options, "--", sys.executable, path)
        return Audited(code, json.loads(capfd.readouterr().out))

    return run


@pytest.mark.ci
def test_a_deterministic_program(audit: Any) -> None:
    seeded = "import watchstep\nwatchstep.seed_all(4)\n"
    hook = 'hook = watchstep.Hook("elsewhere", run="own")\nhook.watch(model)\n'
    result = audit(seeded + PROLOGUE + MODEL + hook + ORDER + TRAINING)
    assert not Path("elsewhere").exists()  # an audit records to a store of its own
    assert (result.code, result.data["differs"], result.cause) == (0, False, None)
    assert result.operations["compared"] > 60
    assert result.data["recorded"]["compared"] > 20
    (record, _) = result.data["ranks"][0]["records"]
    assert (record["steps"], record["seeds"]["seed"]) == (2, 4)
    assert set(record["seeds"]["generators"]) == {"python", "numpy", "torch"}
    assert "seed_all" not in result.risks


@pytest.mark.release
def test_a_program_without_a_seed(audit: Any) -> None:
    program = PROLOGUE + MODEL + ORDER + TRAINING
    result = audit(program, steps=1)
    assert (result.code, result.cause["what"]) == (1, "the initial values of 0.weight")
    assert "watchstep.seed_all" in result.cause["hint"]
    assert (result.first["kind"], result.line) == ("random", MODEL.strip())
    assert result.first["operation"]["step"] == 0
    assert (result.data["recorded"]["step"], result.data["recorded"]["tensor"]) == (0, "0.bias")
    assert result.data["ranks"][0]["generators"] == ["torch"]


@pytest.mark.release
def test_a_seed_of_the_audit_the_report_as_text_and_what_is_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROLOGUE + MODEL + ORDER + TRAINING)
    folder = tmp_path / "kept"
    options = ("--steps", "1", "--seed", "3", "--keep", folder)
    assert exit_code(*options, "--", sys.executable, program) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("deterministic: 2 runs of 1 step(s), ")
    assert "seeds: watchstep.seed_all(3) seeded python, numpy, torch" in lines
    assert (folder / "reports-1" / "trace-0.zip").exists()
    assert [record.steps for record in read_records(folder / "reports-0").values()] == [1]
    with pytest.raises(ConfigError, match="name a folder that does not exist"):
        main(["--keep", str(folder), "--", sys.executable, str(program)])


@pytest.mark.release
def test_an_order_of_the_data_without_a_seed(audit: Any) -> None:
    order = "order = list(range(64))\nrandom.shuffle(order)\n"
    result = audit(PROLOGUE + SEEDED + MODEL + order + TRAINING)
    assert (result.code, result.cause["what"]) == (1, "the samples: other data, or the same in another order")
    assert "generators that were not seeded: python" in result.cause["hint"]
    assert result.line == "loss = nn.functional.cross_entropy(model(x[rows]), y[rows])"
    assert result.data["recorded"]["tensor"] == "loss"


@pytest.mark.release
def test_data_that_the_workers_of_a_loader_draw_without_a_seed(audit: Any) -> None:
    program = """
from torch.utils.data import DataLoader, Dataset
import numpy as np
class Rows(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.as_tensor(np.random.default_rng().normal(size=4).astype("float32")), index % 2
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(Rows(), batch_size=8, shuffle=True, num_workers=2):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    result = audit(PROLOGUE + SEEDED + MODEL + program)
    assert (result.code, result.cause["what"]) == (1, "the samples: other data, or the same in another order")
    assert (result.first["kind"], result.first["operation"]["module"]) == ("input", "0")
    assert result.operations["partings"] == []  # however the workers' batches arrive
    assert result.data["ranks"][0]["records"][0]["loaders"] == [
        {"workers": 2, "sampler": "RandomSampler", "has_generator": False}
    ]
    assert "a DataLoader with 2 workers (RandomSampler) has no generator" in result.risks


@pytest.mark.release
def test_an_operation_with_a_number_of_the_clock(audit: Any) -> None:
    jitter = """
class Jitter(nn.Module):
    def forward(self, x):
        return x * (1 + 1e-6 * time.perf_counter())
"""
    model = MODEL.replace("nn.ReLU()", "Jitter()")
    result = audit(PROLOGUE + SEEDED + jitter + model + ORDER + TRAINING)
    assert (result.code, result.cause["what"]) == (1, "a number that Python computed")
    assert result.line == "return x * (1 + 1e-6 * time.perf_counter())"
    assert (result.first["operation"]["name"], result.first["operation"]["module"]) == (
        "aten.mul.Tensor",
        "1",
    )


@pytest.mark.release
def test_a_custom_operation_with_random_numbers(audit: Any) -> None:
    custom = """
@torch.library.custom_op("demo::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + random.random()
noisy.register_autograd(lambda context, gradient: gradient)
class Noisy(nn.Module):
    def forward(self, x):
        return noisy(x)
"""
    model = MODEL.replace("nn.ReLU()", "Noisy()")
    result = audit(PROLOGUE + SEEDED + custom + model + ORDER + TRAINING)
    assert (result.code, result.cause["what"], result.line) == (1, "a custom operation", "return noisy(x)")
    assert "generator python was not seeded" in result.risks


@pytest.mark.release
def test_a_difference_in_the_backward_pass_only(audit: Any) -> None:
    function = """
class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + 1e-4 * int.from_bytes(os.urandom(2), "big"))
class Layer(nn.Module):
    def forward(self, x):
        return Noisy.apply(x)
"""
    model = MODEL.replace("nn.ReLU()", "Layer()")
    result = audit(PROLOGUE + SEEDED + function + model + ORDER + TRAINING)
    assert (result.code, result.first["operation"]["phase"]) == (1, "backward")
    assert result.line.startswith("return gradient * (1 + 1e-4")
    assert result.data["recorded"]["tensor"] == "0.weight:gradient"
    assert result.data["recorded"]["step"] == 0


@pytest.mark.release
def test_a_sequence_that_depends_on_chance(
    audit: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    branch = """
class Branch(nn.Module):
    def forward(self, x):
        for _ in range(int.from_bytes(os.urandom(2), "big") % 97):
            x = x + 0
        return x
"""
    model = MODEL.replace("nn.ReLU()", "Branch()")
    result = audit(PROLOGUE + SEEDED + branch + model + ORDER + TRAINING, steps=1)
    assert (result.code, result.cause["what"]) == (1, "the runs execute different operations")
    assert result.operations["partings"][0]["step"] == 0
    assert result.data["recorded"]["step"] is None  # the values are the same


@pytest.mark.release
def test_a_tensor_that_changes_outside_of_pytorch_is_named(audit: Any) -> None:
    program = """
model = nn.Linear(4, 2)
order = torch.arange(64)
"""
    change = "    model.weight.detach().numpy()[0, 0] += int.from_bytes(os.urandom(2), 'big')\n"
    result = audit(PROLOGUE + SEEDED + program + TRAINING + change)
    assert (result.code, result.cause["what"]) == (1, "the values of weight")
    assert "outside of PyTorch's operations" in result.cause["hint"]


AGAIN = """
import pathlib
flag = pathlib.Path(__file__).with_name("flag")
second = flag.exists()
flag.touch()
"""


@pytest.mark.release
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("break", 0),
        pytest.param("raise SystemExit('a device error')", 1, marks=pytest.mark.release),
        pytest.param("os._exit(7)", 7, marks=pytest.mark.release),
    ],
)
def test_a_run_that_ends_early_differs(
    end: str, code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "train.py"
    early = f"    if second and step == 1:\n        {end}\n"
    loop = TRAINING.replace("    rows =", f"{early}    rows =", 1)
    program.write_text(f"{PROLOGUE}{SEEDED}{AGAIN}{MODEL}{ORDER}{loop}")
    assert exit_code("--", sys.executable, program) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("not deterministic: 2 runs of ")
    assert lines[1] == "cause: the runs end differently"
    assert "run 0: stopped by the audit after 3 step(s)" in lines
    after = "no step that was reported" if code == 7 else "1 step(s)"
    assert f"run 1: ended by itself with code {code} after {after}" in lines
    assert ("  a device error" in lines) == (code == 1)


@pytest.mark.release
def test_a_run_that_fails_before_its_first_step_differs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "train.py"
    failing = "if not second:\n    raise SystemExit('no data')\n"
    program.write_text(f"{PROLOGUE}{SEEDED}{AGAIN}{failing}{MODEL}{ORDER}{TRAINING}")
    assert exit_code("--steps", "1", "--json", "--", sys.executable, program) == 1
    report = json.loads(capfd.readouterr().out)
    assert report["differs"]
    assert report["cause"]["what"] == "the runs end differently"
    first, second = report["ends"]
    assert (first["code"], first["steps"], first["stopped"], first["tail"]) == (1, {}, False, "no data")
    assert (second["steps"], second["stopped"], second["tail"]) == ({"0": 1}, True, "")


def test_a_program_that_fails_or_trains_nothing(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("raise SystemExit('no data')")
    with pytest.raises(ConfigError, match=r"(?s)ended with code 1, and took no step .*no data"):
        main(["--", sys.executable, str(program)])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--runs", "1", "--", "true"],
        ["--steps", "0", "--", "true"],
        ["--seed", "-1", "--", "true"],
        ["--", "no-such-program"],
    ],
)
def test_invalid_options(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(arguments)


def test_a_damaged_report(tmp_path: Path) -> None:
    (tmp_path / "record-0.json").write_text('{"steps": "many"}')
    with pytest.raises(FormatError, match=r"record-0\.json"):
        read_records(tmp_path)
