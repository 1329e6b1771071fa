"""The step that stops a training is computed again in the program's own loop, and the operation and line that failed are named."""

from __future__ import annotations

import inspect
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import watchstep
from tests.sdk.programs import record_program, run_program
from watchstep.errors import ConfigError
from watchstep.trace import diagnose, open_trace, saved_traces
from watchstep_rules import backtest_run
from watchstep_rules.config.rule_config import RuleConfig

_SAMPLES, _BAD = 160, 100


class Network(nn.Module):
    """Draws random numbers and changes buffers in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


def samples() -> TensorDataset:
    """Inputs and targets, of which one has no logarithm."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(_SAMPLES, 4, generator=generator), torch.rand(_SAMPLES, 1, generator=generator) + 0.5
    y[_BAD] = 0.0
    return TensorDataset(x, y)


def loader() -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=8, shuffle=True)


Program = Callable[[nn.Module, torch.optim.Optimizer], None]


def accumulates(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, (x, y) in enumerate(loader()):
        loss = (model(x) - y.log()).square().mean() / 2  # bad
        loss.backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def calls_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in loader():

        def closure(x: Tensor = x, y: Tensor = y) -> float:
            optimizer.zero_grad()
            loss = (model(x) - y.log()).square().mean()  # bad
            loss.backward()
            return float(loss.item())

        optimizer.step(closure)


def checkpoints(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def part(x: Tensor, y: Tensor) -> Tensor:
        difference: Tensor = model(x) - y.log()  # bad
        return difference.square()

    for x, y in loader():
        optimizer.zero_grad()
        checkpoint(part, x, y, use_reentrant=False).mean().backward()
        optimizer.step()


class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        root = x.abs().sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (root,) = ctx.saved_tensors
        return gradients[0] / (2 * root)  # bad of divides_in_backward


def divides_in_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in loader():
        optimizer.zero_grad()
        output = model(x)
        Root.apply(torch.where(y == 0, output * 0, output)).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def draws_its_batches(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    xs, ys = samples().tensors
    for _ in range(200):
        chosen = torch.randint(0, _SAMPLES, (8,))
        optimizer.zero_grad()
        (model(xs[chosen]) - ys[chosen].log()).square().mean().backward()  # bad
        optimizer.step()


def scales(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for x, y in loader():
        optimizer.zero_grad()
        loss = (model(x) - y.log()).square().mean()  # bad
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def updates_two_models(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    other = nn.Linear(1, 1)
    another = torch.optim.SGD(other.parameters(), lr=0.01)
    for x, y in loader():
        another.zero_grad()
        other(model(x).detach()).mean().backward()
        another.step()
        optimizer.zero_grad()
        (other(model(x)) - y.log()).square().mean().backward()  # bad
        optimizer.step()


PROGRAMS: list[Program] = [
    accumulates,
    calls_a_closure,
    checkpoints,
    divides_in_backward,
    draws_its_batches,
    scales,
    updates_two_models,
]


def line_of(program: Program) -> int:
    """Return the number of the line that a program marks as bad."""
    source = Path(inspect.getfile(program)).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(source, 1):
        if line.endswith(f"# bad of {program.__name__}"):
            return number
    lines, first = inspect.getsourcelines(program)
    return next(first + number for number, line in enumerate(lines) if line.rstrip().endswith("# bad"))


def train(folder: Path, program: Program, **options: Any) -> watchstep.Hook:
    """Train until the stop. The update of the step that fails is not made."""
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watchstep.Hook(folder, run="r", explain=True, **options) as hook:
        hook.watch(model, optimizer)
        with pytest.raises(watchstep.StopTraining):
            program(model, optimizer)
    assert not hook.health["faults"]
    assert all(values.isfinite().all() for values in model.state_dict().values())
    return hook


def reason_of(hook: watchstep.Hook) -> str:
    assert hook.stopped is not None
    return hook.stopped.reason


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_line_is_named(tmp_path: Path, program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    hook = train(tmp_path, program)
    place = f"{Path(__file__)}:{line_of(program)} in "
    assert place in reason_of(hook), reason_of(hook)
    assert "approximate" not in reason_of(hook)
    if program in {accumulates, checkpoints, scales}:
        assert f"; sample {_BAD} (row " in reason_of(hook)
    printed = capsys.readouterr().err
    assert f"at {place}" in printed
    named = "; sample " in reason_of(hook)
    assert (f"watchstep skip-list {hook.run_url} --step " in printed) == named
    assert hook.stopped is not None
    run = watchstep.open_run(hook.run_url)
    (key,) = saved_traces(run)
    assert key.first == key.last == hook.stopped.step
    found = diagnose(open_trace(run, key)).first
    assert found is not None
    assert found.cause == "operation"
    assert max(run.tensor("loss").steps()) == hook.stopped.step, (
        "a step that is computed again is recorded once"
    )
    (attempt,) = backtest_run(hook.run_url, [RuleConfig(rule="training_stopped")]).attempts
    (fired,) = attempt.outcomes[0].fired
    assert fired.finding is not None
    assert fired.step == hook.stopped.step
    assert f"at {place}" in fired.finding.message.partition(". ")[0], "the first sentence of a notification"


@pytest.mark.parametrize("cause", ["weight", "column"])
def test_a_fault_of_all_samples_is_not_one_of_a_sample(tmp_path: Path, cause: str) -> None:
    data = samples()
    if cause == "column":
        data.tensors[0][:, 1] = 0.5

    def program(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number, (x, *_) in enumerate(DataLoader(data, batch_size=8)):
            if cause == "weight" and number == 5:
                with torch.no_grad():
                    next(model.parameters())[0, 0] = math.nan
            scaled = x / x.std(0) if cause == "column" else x
            optimizer.zero_grad()
            model(scaled - scaled.mean(0)).square().mean().backward()
            optimizer.step()

    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watchstep.Hook(tmp_path, run="r", explain=True) as hook:
        hook.watch(model, optimizer)
        with pytest.raises(watchstep.StopTraining):
            program(model, optimizer)
    expected = (
        "layers.0.weight was not finite before the step" if cause == "weight" else "aten.div.Tensor made"
    )
    assert expected in reason_of(hook)
    assert "; sample " not in reason_of(hook)


def test_a_program_that_counts_on_in_its_data_is_given_the_arguments_of_the_step(tmp_path: Path) -> None:
    xs = samples().tensors[0]
    xs[_BAD] = math.inf

    def program(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for first in range(0, _SAMPLES, 8):
            optimizer.zero_grad()
            model(xs[first : first + 8]).square().mean().backward()
            optimizer.step()

    reason = reason_of(train(tmp_path, program))
    assert "was not finite before the step" in reason
    assert "(approximate: the model was given its arguments again" in reason


def test_what_the_loss_reads_besides_cannot_be_given_again(tmp_path: Path) -> None:
    xs, ys = samples().tensors

    def program(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for first in range(0, _SAMPLES, 8):
            optimizer.zero_grad()
            (model(xs[first : first + 8]) - ys[first : first + 8].log()).square().mean().backward()
            optimizer.step()

    assert "no data loader of PyTorch yielded its batch" in reason_of(train(tmp_path, program))


def test_a_fault_that_does_not_come_again_is_called_not_reproducible(tmp_path: Path) -> None:
    def program(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        clean = TensorDataset(samples().tensors[0], torch.ones(_SAMPLES, 1))
        for number, (x, y) in enumerate(DataLoader(clean, batch_size=8, shuffle=True)):
            output = model(x)
            if number == 9:  # as if a bit had flipped
                output.data[3] = math.nan
            optimizer.zero_grad()
            (output - y).square().mean().backward()
            optimizer.step()

    reason = reason_of(train(tmp_path, program))
    assert re.search(r"not reproducible: computed again twice .* finite with equal losses .*hardware", reason)


def test_a_program_with_a_queue_of_its_own_goes_on_with_other_batches(tmp_path: Path) -> None:
    def program(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        waiting: list[Any] = []
        for batch in loader():
            waiting.append(batch)
            if len(waiting) < 4:
                continue
            x, y = waiting.pop(0)
            optimizer.zero_grad()
            (model(x) - y.log()).square().mean().backward()
            optimizer.step()

    assert "the program went on with other batches" in reason_of(train(tmp_path, program))


def test_a_program_that_ends_first_is_recorded_as_stopped(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(DataLoader(samples(), batch_size=8))
    with watchstep.Hook(tmp_path, run="r", explain=True) as hook:
        hook.watch(model, optimizer)
        for _ in range(_BAD // 8 + 1):
            x, y = next(batches)
            optimizer.zero_grad()
            (model(x) - y.log()).square().mean().backward()
            optimizer.step()
    assert "the program ended before its step could be computed again" in reason_of(hook)
    (end,) = watchstep.open_run(hook.run_url).ends()
    assert end.state == "stopped"
    assert all(values.isfinite().all() for values in model.state_dict().values())


def test_an_optimizer_whose_updates_cannot_be_prevented_stops_at_once(tmp_path: Path) -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for hook in list(self._optimizer_step_pre_hooks.values()):
                hook(self, (), {})
            return super().step(closure)

    torch.manual_seed(0)
    model = Network()
    optimizer = Own(model.parameters(), lr=0.01)
    with watchstep.Hook(tmp_path, run="r", explain=True) as hook:
        hook.watch(model, optimizer)
        with pytest.raises(watchstep.StopTraining):
            draws_its_batches(model, optimizer)
    assert "the gradients of step" in reason_of(hook)


def test_a_batch_that_the_program_changes_is_not_given_again(tmp_path: Path) -> None:
    def program(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x, y in loader():
            optimizer.zero_grad()
            (model(x) - y.log_()).square().mean().backward()
            optimizer.step()

    assert "it was not computed again: the program has changed its batch" in reason_of(
        train(tmp_path, program)
    )


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "LBFGS"])
def test_a_healthy_training_is_unchanged(tmp_path: Path, optimizer: str) -> None:
    def trained(*, is_recorded: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = Network()
        made: torch.optim.Optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
        clean = TensorDataset(samples().tensors[0], torch.ones(_SAMPLES, 1))
        hook = watchstep.Hook(tmp_path, run="r", explain=True) if is_recorded else None
        if hook is not None:
            hook.watch(model, made)
        for x, y in DataLoader(clean, batch_size=8, shuffle=True):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                made.zero_grad()
                loss: Tensor = (model(x) - y).square().mean()
                loss.backward()
                return loss

            made.step(closure)  # type: ignore[arg-type]
        if hook is not None:
            hook.close()
            assert not hook.health["faults"]
        return {**model.state_dict(), "random": torch.get_rng_state()}

    plain, recorded = trained(is_recorded=False), trained(is_recorded=True)
    assert all(torch.equal(values, recorded[name]) for name, values in plain.items())


def test_explaining_needs_a_policy_that_stops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing stops"):
        watchstep.Hook(tmp_path, explain=True, on_nonfinite="skip")
    with pytest.raises(ConfigError, match="nothing stops"):
        watchstep.Hook(tmp_path, explain=True, on_nonfinite="record")
    monkeypatch.setenv("WATCHSTEP_EXPLAIN", "yes")
    with pytest.raises(ConfigError, match="WATCHSTEP_EXPLAIN"):
        watchstep.Hook(tmp_path)


PLAIN = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(64, 4), torch.rand(64, 1) + 0.5
y[50] = 0.0
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
try:
    for x, y in loader:
        loss = (model(x) - y.log()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
except SystemExit as stop:
    print("exit code", stop.code)
"""


@pytest.mark.ci
def test_an_unchanged_program_names_the_line_by_one_option(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PLAIN)
    printed = record_program(program, folder=tmp_path, options=("--explain", "--store", tmp_path / "runs"))
    assert "exit code 86" in printed.output
    assert "watchstep: first bad operation: aten.log.default" in printed.errors
    assert f"at {program}:12 in <module>" in printed.errors


FOLDS = """
import torch

try:
    for fold in range(3):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        x = torch.rand(320, 4)
        x[300] *= -1 if fold == 2 else 1
        for (x,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=8):
            optimizer.zero_grad()
            (model(x) - x.sum(1).log()).square().mean().backward()
            optimizer.step()
except SystemExit as stop:
    print("exit code", stop.code)
"""


@pytest.mark.ci
def test_trainings_that_follow_each_other_in_one_process_are_explained(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(FOLDS)
    printed = record_program(program, folder=tmp_path, options=("--explain", "--store", tmp_path / "runs"))
    assert "exit code 86" in printed.output, printed.errors
    assert f"aten.log.default made the first NaN or infinity at {program}:12 in <module>" in printed.errors


@pytest.mark.ci
def test_the_bundle_of_a_run_is_computed_in_the_program_that_is_started_again(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PLAIN)
    options = ("--on-nonfinite", "stop", "--run", "r", "--store", tmp_path / "runs")
    assert "aten.log" not in record_program(program, folder=tmp_path, options=options).errors
    explain = [
        sys.executable,
        "-m",
        "watchstep.command",
        "explain",
        "default/r",
        "--store",
        str(tmp_path / "runs"),
        "--",
    ]
    done = subprocess.run(
        [*explain, sys.executable, str(program)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "exit code 86\n")
    assert f"at {program}:12 in <module>" in done.stderr
    assert (
        "the gradients of step 6 are not finite; aten.log.default made the first NaN or infinity"
        in done.stderr
    )
    program.write_text(PLAIN.replace("Linear(4, 8)", "Linear(4, 9)").replace("Linear(8, 1)", "Linear(9, 1)"))
    other = subprocess.run(
        [*explain, sys.executable, str(program)], capture_output=True, text=True, check=False
    )
    assert other.returncode == 1
    assert "parameter '0.weight' of shape (8, 4) has shape (9, 4)" in other.stderr


RANKS = """
import os
import sys

import torch
import torch.distributed.fsdp
from torch import distributed

import watchstep

distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(0)
model = WRAPPED
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(64, 4), torch.rand(64, 1) + 0.5
y[41] = 0.0
dataset = torch.utils.data.TensorDataset(x, y)
sampler = torch.utils.data.DistributedSampler(dataset, shuffle=False)
hook = watchstep.Hook(sys.argv[1], run="r", explain=True)
hook.watch(model, optimizer)
try:
    for x, y in torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler):
        loss = (model(x) - y.log()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
except SystemExit:
    print(f"rank {rank}: {hook.stopped.reason}")
hook.close()
distributed.destroy_process_group()
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    "wrapped",
    [
        "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))",
        'distributed.fsdp.fully_shard(torch.nn.Linear(4, 1), mesh=distributed.init_device_mesh("cpu", (2,)))',
    ],
)
def test_all_ranks_compute_the_step_again_and_one_names_the_line(tmp_path: Path, wrapped: str) -> None:
    printed = run_program(tmp_path, RANKS.replace("WRAPPED", wrapped), tmp_path / "runs", ranks=2)
    assert (
        f"rank 1: the gradients of step 5 are not finite; aten.log.default made the first NaN or infinity at {tmp_path}/train.py:24"
        in printed
    )
    assert (
        "rank 0: the gradients of step 5 are not finite; the first NaN or infinity came from another rank"
        in printed
    )
