"""`nan_or_inf` fires where training is damaged, and not where it is sound: real training loops, recorded as the defaults do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.rules.runs import all_at_once, follow, one_by_one
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from tests.sdk.training import recorded
from watchstep import Cadence, CaptureConfig, Hook
from watchstep.format.block import Block
from watchstep.format.tensors import TensorInfo
from watchstep_rules import nan_or_inf
from watchstep_rules.backtest.backtest import backtest
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Phase
from watchstep_rules.rule import Finding

NAN, INF = math.nan, math.inf
STEPS, BAD = 12, 5
CONFIG = CaptureConfig(system=None)
Batch = tuple[Tensor, Tensor]


class Fired(NamedTuple):
    """The stops and warnings of the default rules for a run."""

    stops: list[Finding]
    warnings: list[int]


def batch(step: int, bad: int | None = None) -> Batch:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 8, generator=generator)
    y = (x.sum(1) > 0).long()
    return (torch.full_like(x, NAN) if step == bad else x), y


def network(*, normalized: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle: list[nn.Module] = [nn.BatchNorm1d(16)] if normalized else []
    return nn.Sequential(nn.Linear(8, 16), *middle, nn.ReLU(), nn.Linear(16, 2))


def fired(hook: Hook) -> Fired:
    outcomes = {outcome.config.name: outcome for outcome in backtest(recorded(hook).rows(), DEFAULT_RULES)}
    transitions = outcomes["nan_or_inf"].transitions
    stops = [
        change.finding
        for change in transitions
        if change.phase is Phase.FIRING and change.finding is not None
    ]
    warned = outcomes["non_finite_values"].transitions
    return Fired(stops, [change.step for change in warned if change.phase is Phase.FIRING])


def train_and_rows(
    folder: Path,
    step_of: Callable[[int, nn.Module, torch.optim.Optimizer, Hook], None],
    model: nn.Module | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    steps: int = STEPS,
    config: CaptureConfig = CONFIG,
) -> Hook:
    """A training whose every step is the caller's."""
    model = model or network()
    updates = optimizer(model.parameters(), lr=1e-2)
    hook = Hook(folder, run="r", config=config)
    hook.watch(model, updates)
    for step in range(steps):
        step_of(step, model, updates, hook)
    return hook


def train(
    folder: Path, step_of: Callable[[int, nn.Module, torch.optim.Optimizer, Hook], None], **options: Any
) -> Fired:
    """The stops and warnings of such a training."""
    return fired(train_and_rows(folder, step_of, **options))


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, given: Batch) -> Tensor:
    """Compute the loss of a batch, and the gradients of it alone."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(given[0]), given[1])
    loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
    return loss


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: Batch, hook: Hook | None = None
) -> None:
    loss = backward(model, optimizer, given)
    optimizer.step()
    if hook is not None:
        hook.log(loss=loss)


def scaled_update(
    scaler: torch.amp.GradScaler, model: nn.Module, optimizer: torch.optim.Optimizer, given: Batch
) -> None:
    optimizer.zero_grad()
    scaler.scale(functional.cross_entropy(model(given[0]), given[1])).backward()  # type: ignore[no-untyped-call,unused-ignore]
    scaler.step(optimizer)
    scaler.update()


# Sound trainings.


def test_a_batch_without_labels_is_no_damage(tmp_path: Path) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        x, y = batch(step)
        update(model, optimizer, (x, torch.full_like(y, -100) if step >= BAD else y), hook)

    result = train(tmp_path, step_of)
    assert result.stops == []
    assert result.warnings == [BAD + 1]  # it lasts: that is worth a word


@pytest.mark.ci
def test_a_lone_batch_without_labels_is_not_even_a_warning(tmp_path: Path) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        x, y = batch(step)
        update(model, optimizer, (x, torch.full_like(y, -100) if step % 5 == 4 else y), hook)

    assert train(tmp_path, step_of, steps=20) == ([], [])


@pytest.mark.parametrize("logs", [False, True])
@pytest.mark.parametrize("before_backward", [False, True])
def test_a_program_that_skips_losses_that_are_not_finite(
    tmp_path: Path, before_backward: bool, logs: bool
) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        x, y = batch(step, bad=step if step % 4 == 3 else None)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        if logs:
            hook.log(loss=loss)
        if before_backward and not torch.isfinite(loss):
            return
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        if torch.isfinite(loss):
            optimizer.step()

    assert train(tmp_path, step_of, steps=24).stops == []


@pytest.mark.ci
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_program_that_skips_gradient_norms_that_are_not_finite(tmp_path: Path, by_hand: bool) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        backward(model, optimizer, batch(step, bad=step if step % 4 == 3 else None))
        if by_hand:
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()

    assert train(tmp_path, step_of, steps=24).stops == []


@pytest.mark.parametrize("gradients", ["after_clipping", "before_clipping"])
def test_infinities_that_are_clipped_before_the_update(
    tmp_path: Path, gradients: Literal["after_clipping", "before_clipping"]
) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        backward(model, optimizer, batch(step))
        if step % 4 == 3:
            next(model.parameters()).grad[0, 0] = INF  # type: ignore[index]
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()

    config = replace(CONFIG, gradients=gradients, overhead_budget=None)
    assert train(tmp_path, step_of, steps=24, config=config).stops == []


class Cautious(torch.optim.SGD):
    """Leaves gradients out that are not finite, inside of its step."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            super().step(closure)


@pytest.mark.ci
def test_an_optimizer_that_leaves_such_gradients_out_itself(tmp_path: Path) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        update(model, optimizer, batch(step, bad=step if step % 4 == 3 else None), hook)

    assert train(tmp_path, step_of, optimizer=Cautious, steps=24).stops == []


@pytest.mark.parametrize("unscales", [False, True])
def test_a_step_that_a_gradient_scaler_skips_is_no_damage(tmp_path: Path, unscales: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)

    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        x, y = batch(step)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y) * 1e3
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call,unused-ignore]
        if unscales:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        hook.log(loss=loss)

    result = train(tmp_path, step_of, steps=30)
    assert scaler.get_scale() < 2.0**120  # some were skipped
    assert result == ([], [])


class Masked(nn.Module):
    """Attention with a mask from a module and a frozen parameter; padding rows stay NaN and are not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        mask = torch.triu(torch.full((4, 4), -INF), 1)
        self.mask = nn.Parameter(mask, requires_grad=False)
        self.causal, self.pad = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        encoded = self.encode(x).view(8, 4, 8)
        scores = (
            encoded @ encoded.transpose(1, 2) + self.causal(self.mask) + self.causal(-self.mask).clamp(max=0)
        )
        padded = torch.full((8, 4, 8), NAN)
        self.pad(padded)
        out: Tensor = self.head((scores.softmax(-1) @ encoded).reshape(32, 8))
        return out


def test_masks_and_padding_rows_are_no_damage(tmp_path: Path) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        if step == BAD:
            mask = model.get_parameter("mask").data
            mask[:, 0], mask[:, 1] = -INF, 0.0
        update(model, optimizer, batch(step), hook)

    assert train(tmp_path, step_of, model=Masked()) == ([], [])


class LogOfZero(nn.Module):
    """Log-probabilities of impossible classes are -inf; their product with a count of zero is NaN, and is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.logs, self.products = network(), nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        with torch.no_grad():
            logs = self.logs((out > 0).float().log())
            torch.where(logs.isfinite(), self.products(logs * 0), 0).sum()
        return out


def test_a_masked_logarithm_of_zero_is_no_damage(tmp_path: Path) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        update(model, optimizer, batch(step), hook)

    assert train(tmp_path, step_of, model=LogOfZero()) == ([], [])


@pytest.mark.parametrize("name", ["val_loss", "loss"])
def test_an_empty_validation_slice_is_no_damage(tmp_path: Path, name: str) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        update(model, optimizer, batch(step), hook)
        if step % 4 == 3:
            model.eval()
            x, y = batch(100)
            part = slice(0, 0) if step == 7 else slice(0, 8)
            hook.mode = "eval"
            with torch.no_grad():
                loss = functional.cross_entropy(model(x[part]), y[part])
            hook.log(loss=loss) if name == "loss" else hook.log(val_loss=loss)
            hook.mode = "train"
            model.train()

    assert train(tmp_path, step_of) == ([], [])


@pytest.mark.ci
def test_an_unwatched_model_may_contain_nan(tmp_path: Path) -> None:
    other = network()
    other[0].weight.data.fill_(NAN)  # type: ignore[operator,union-attr,unused-ignore]

    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        x, y = batch(step)
        functional.cross_entropy(other(x), y).backward()  # type: ignore[no-untyped-call,unused-ignore]
        update(model, optimizer, (x, y), hook)

    assert train(tmp_path, step_of, steps=60).stops == []


# Damage.


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_weights_that_an_update_makes_nan_are_found_at_its_step(
    tmp_path: Path, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    def step_of(step: int, model: nn.Module, updates: torch.optim.Optimizer, hook: Hook) -> None:
        update(model, updates, batch(step, bad=BAD), hook)

    result = train(tmp_path, step_of, optimizer=optimizer)
    assert [finding.step for finding in result.stops] == [BAD]
    assert "skipped" not in result.stops[0].message
    assert result.stops[0].upstream == ("model:input",)
    assert (
        "which the optimizer is about to apply; the input contained 256 NaN among 256 elements"
        in result.stops[0].message
    )


class Overflows(nn.Module):
    """Computes scores in float16 that leave its range at one step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.encode, self.drop = nn.Linear(8, 2), nn.Linear(8, 8), nn.Dropout(0.0)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        encoded = self.encode(x) * self.scale
        scores = (encoded.half() @ encoded.half().T).float()
        shares = self.drop((scores - scores.amax(1, keepdim=True)).exp())
        out: Tensor = self.head(shares @ encoded)
        return out


@pytest.mark.ci
def test_the_first_bad_output_is_named_of_a_step_that_is_not_measured(tmp_path: Path) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        model.scale = 1e3 if step == BAD else 1.0  # type: ignore[assignment,unused-ignore]
        update(model, optimizer, batch(step), hook)

    measured = replace(CONFIG, overhead_budget=None)
    live = replace(measured, collections={"activations": Cadence(every=1000)})
    for folder, chosen in (("live", live), ("measured", measured)):
        (finding,) = train(tmp_path / folder, step_of, model=Overflows(), config=chosen).stops
        assert (finding.step, finding.mode, finding.worker) == (BAD, "train", 0)
        assert finding.origin == "drop:output"
        assert "; first non-finite output: drop:output (Dropout), " in finding.message
        ends = "while encode:output was finite; it arose between encode:output and the end of drop"
        assert finding.message.endswith(ends) is (folder == "measured")


def test_weights_that_were_bad_before_a_step_are_named_by_it(tmp_path: Path) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        if step == BAD:
            model[2].weight.data[0, 0] = NAN  # type: ignore[index,union-attr,operator,unused-ignore]
        update(model, optimizer, batch(step), hook)

    (finding,) = train(tmp_path, step_of).stops
    assert (finding.step, finding.tensor) == (BAD, "2.weight")
    assert finding.message == "1 NaN among 32 elements of 2.weight, 0 before"


def test_a_lone_infinity_in_one_gradient_is_found_at_its_step(tmp_path: Path) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        backward(model, optimizer, batch(step))
        if step == BAD:
            next(model.parameters()).grad[0, 0] = INF  # type: ignore[index]
        optimizer.step()

    (finding,) = train(tmp_path, step_of).stops
    assert (finding.step, finding.tensor) == (BAD, "0.weight:gradient")


def test_a_learning_rate_that_makes_weights_infinite_is_found_one_step_later(tmp_path: Path) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        optimizer.param_groups[0]["lr"] = 1e38 if step == BAD else 1e-2
        update(model, optimizer, batch(step), hook)

    (finding,) = train(tmp_path, step_of, optimizer=torch.optim.SGD).stops
    assert finding.step == BAD + 1


def test_weights_that_are_damaged_while_the_program_skips_every_loss_after_it(tmp_path: Path) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        optimizer.zero_grad()
        x, y = batch(step, bad=BAD)
        loss = functional.cross_entropy(model(x), y)
        if step > BAD and not torch.isfinite(loss):
            raise RuntimeError("the loss is not finite")
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        optimizer.step()

    model = network()
    updates = torch.optim.SGD(model.parameters(), lr=1e-2)
    hook = Hook(tmp_path, run="r", config=CONFIG)
    hook.watch(model, updates)
    for step in range(BAD + 1):
        step_of(step, model, updates, hook)
    with pytest.raises(RuntimeError, match="not finite"):
        step_of(BAD + 1, model, updates, hook)
    assert [finding.step for finding in fired(hook).stops] == [BAD]


@pytest.mark.ci
def test_poisoned_optimizer_state_is_found_where_weights_were_restored(tmp_path: Path) -> None:
    saved: dict[str, Tensor] = {}

    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        if step == BAD:
            saved.update({name: tensor_value.clone() for name, tensor_value in model.state_dict().items()})
        update(model, optimizer, batch(step, bad=BAD), hook)
        if step == BAD:
            model.load_state_dict(saved)

    hook = train_and_rows(tmp_path, step_of)
    checked = {
        (finding.step, finding.tensor)
        for finding in judged(hook)
        if finding.tensor.endswith("exp_avg:finite_check")
    }
    assert (BAD, "0.weight:exp_avg:finite_check") in checked


def test_second_moments_that_overflow_are_found_within_a_hundred_steps(tmp_path: Path) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        backward(model, optimizer, batch(step))
        if step == BAD:
            model[2].weight.grad.fill_(1e25)  # type: ignore[index,union-attr,operator,unused-ignore]
        optimizer.step()

    (finding,) = train(tmp_path, step_of, optimizer=torch.optim.Adam, steps=102).stops
    assert finding.tensor == "2.weight:exp_avg_sq:finite_check"
    assert finding.step <= 99


@pytest.mark.parametrize(("looks", "delay"), [("backward", 1), ("log", 1), ("nothing", 20)])
def test_running_statistics_that_a_skipped_batch_made_nan_are_found(
    tmp_path: Path, looks: str, delay: int
) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        x, y = batch(step, bad=BAD)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        if looks == "log":
            hook.log(loss=loss)
        if not torch.isfinite(loss) and looks != "backward":
            return
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        if torch.isfinite(loss):
            optimizer.step()

    (finding,) = train(tmp_path, step_of, model=network(normalized=True), steps=30).stops
    assert finding.tensor == "1.running_mean:finite_check"
    assert "16 NaN among 16 elements of 1.running_mean after the update, 0 at the start" in finding.message
    assert BAD <= finding.step <= BAD + delay


class OwnNorm(nn.Module):
    """A normalization of the program's own, which uses its running statistics in evaluations only."""

    def __init__(self, *, in_place: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.in_place = nn.Linear(8, 2), in_place
        self.running_var: Tensor
        self.register_buffer("running_var", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        spread = x.detach().var(0)
        if self.in_place:
            self.running_var.lerp_(spread, 0.1)
        else:
            self.running_var = 0.9 * self.running_var + 0.1 * spread
        out: Tensor = self.head((x - x.mean(0)) / (x.std(0) + 1e-3))
        return out


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("looks", "delay"), [("backward", 8), ("nothing", 28)])
def test_running_statistics_of_a_module_of_the_programs_own(
    tmp_path: Path, looks: str, delay: int, in_place: bool
) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        x, y = batch(step, bad=BAD)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        if looks == "backward" or torch.isfinite(loss):
            loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        if torch.isfinite(loss):
            optimizer.step()

    (finding,) = train(tmp_path, step_of, model=OwnNorm(in_place=in_place), steps=40).stops
    assert finding.tensor == "running_var:finite_check"
    assert BAD + 2 <= finding.step <= BAD + delay
    assert finding.message.startswith("8 NaN among 8 elements of running_var, 0 at the start")


class Odd(nn.Module):
    """Buffers that are NaN or infinite now and then: figures of one batch, a mask that is made anew, a statistic that is restored."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = network(), OwnNorm()
        self.recalls: Tensor
        self.norm.bias_mask: Tensor  # type: ignore[misc]
        self.register_buffer("recalls", torch.zeros(2))
        self.norm.register_buffer("bias_mask", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.recalls.copy_(torch.tensor([NAN, 1.0]))
        self.norm.bias_mask.fill_(-INF)[0] = 0.0  # type: ignore[operator,union-attr,unused-ignore]
        out: Tensor = self.inner(x) + self.norm(x)
        return out


@pytest.mark.ci
def test_buffers_of_a_programs_own_that_are_no_running_statistics_are_ignored(tmp_path: Path) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        running_var = model.get_buffer("norm.running_var").clone()
        x, y = batch(step, bad=step if step % 10 == 9 else None)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        if torch.isfinite(loss):
            optimizer.step()
        else:
            model.get_buffer("norm.running_var").copy_(running_var)
        optimizer.zero_grad()

    assert train(tmp_path, step_of, model=Odd(), steps=60).stops == []


@pytest.mark.ci
def test_weights_that_are_nan_from_the_start_are_damage_after_fifty_steps(tmp_path: Path) -> None:
    model = network()
    model[2].weight.data[0, 0] = NAN  # type: ignore[index,union-attr,operator,unused-ignore]

    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        backward(model, optimizer, batch(step))
        for parameter in model.parameters():
            parameter.grad.nan_to_num_(0.0)  # type: ignore[union-attr]
        optimizer.step()

    config = replace(CONFIG, overhead_budget=None)
    result = train(tmp_path, step_of, model=model, optimizer=torch.optim.SGD, steps=60, config=config)
    assert [(finding.step, finding.tensor, finding.value) for finding in result.stops] == [
        (49, "2.weight", 50.0)
    ]
    assert result.warnings


@pytest.mark.ci
def test_fifty_steps_that_a_scaler_skips_in_a_row_are_damage(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu")

    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        scaled_update(scaler, model, optimizer, batch(step, bad=step if step >= BAD else None))

    (finding,) = train(tmp_path, step_of, steps=60).stops
    assert (finding.step, finding.tensor, finding.value) == (BAD + 49, "updates:missing", 50.0)
    assert f"; the gradient scaler skipped step {BAD + 49}" in finding.message


def warning(folder: Path, step_of: Callable[[int, nn.Module, torch.optim.Optimizer, Hook], None]) -> Finding:
    """What the only alert of a training names, a warning of values that are not finite."""
    hook = train_and_rows(folder, step_of, steps=12)
    outcomes = backtest(recorded(hook).rows(), DEFAULT_RULES)
    (change,) = [
        transition
        for outcome in outcomes
        for transition in outcome.transitions
        if transition.phase is Phase.FIRING
    ]
    assert change.finding is not None
    assert change.finding.rule == "non_finite_values"
    return change.finding


def test_a_warning_states_that_the_gradient_scaler_skipped_the_step(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu")

    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        scaled_update(scaler, model, optimizer, batch(step, bad=step if BAD <= step < BAD + 3 else None))

    result = warning(tmp_path, step_of)
    assert result.step == BAD + 1
    assert (
        f"; the gradient scaler skipped step {result.step}, and the recorded weights are finite"
        in result.message
    )


def test_a_warning_states_that_an_update_was_finite_though_the_loss_was_not(tmp_path: Path) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        x, y = batch(step)
        is_bad = BAD <= step < BAD + 3
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        if is_bad:  # the program leaves that loss out of its update, and makes one with the next
            (loss * NAN).backward()  # type: ignore[no-untyped-call,unused-ignore]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        optimizer.step()
        hook.log(loss=loss * NAN if is_bad else loss)

    result = warning(tmp_path, step_of)
    assert (
        f"; the update of step {result.step} was made with finite gradients, and the recorded weights are finite"
        in result.message
    )


@pytest.mark.parametrize("how", ["backward", "log", "norm"])
def test_fifty_passes_that_a_program_skips_in_a_row_are_damage(tmp_path: Path, how: str) -> None:
    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        x, y = batch(step)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        bad = step >= BAD
        if how == "log":
            hook.log(loss=loss * NAN if bad else loss)
            if bad:
                return
        (loss * NAN if bad and how == "backward" else loss).backward()  # type: ignore[no-untyped-call,unused-ignore]
        if how == "norm":
            if bad:
                model[0].weight.grad[0] = NAN  # type: ignore[index,union-attr,unused-ignore]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not bad:
            optimizer.step()

    (finding,) = train(tmp_path, step_of, steps=BAD + 52).stops
    assert (finding.step, finding.tensor) == (BAD, "updates:missing")
    assert 50 <= finding.value <= 52
    assert f"; no finite update was recorded at step {BAD}" in finding.message


def test_an_alert_resolves_once_the_damage_is_restored(tmp_path: Path) -> None:
    saved: dict[str, Tensor] = {}

    def step_of(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        if step == BAD:
            saved.update({name: tensor_value.clone() for name, tensor_value in model.state_dict().items()})
        update(model, optimizer, batch(step, bad=BAD), hook)
        if step == BAD + 3:
            model.load_state_dict(saved)

    hook = train_and_rows(tmp_path, step_of, optimizer=torch.optim.SGD, steps=40)
    (outcome,) = backtest(recorded(hook).rows(), DEFAULT_RULES[:1])
    firing, resolved = (
        change for change in outcome.transitions if change.phase in (Phase.FIRING, Phase.RESOLVED)
    )
    assert firing.step == BAD
    assert BAD + 4 <= resolved.step <= BAD + 16


def judged(hook: Hook) -> list[Finding]:
    (outcome,) = backtest(recorded(hook).rows(), DEFAULT_RULES[:1])
    return outcome.findings


# The rule alone.

LOSS = TensorInfo("loss", ("losses",), "loss", dtype="float64")
OUTPUT = tensor("a:output", "activations", role="output")
WEIGHT = replace(gradient("a"), name="a.weight", role="weight", collections=("weights",))
CHECK = replace(WEIGHT, name="a.weight:finite_check", role="finite_check", collections=("finite_checks",))
APPLIED = TensorInfo("gradients:nonfinite_applied", ("metrics",), "metric", dtype="float64")


def findings(*rows: Row, **params: object) -> list[Finding]:
    return all_at_once(RuleConfig(rule="nan_or_inf", params=params), block_of(list(rows))).findings


@pytest.mark.parametrize("info", [LOSS, OUTPUT])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_loss_or_an_output_alone_is_no_damage(info: TensorInfo, bad: float) -> None:
    assert findings(*(Row(step, info, [bad]) for step in range(49))) == []


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_gradient_that_is_applied_is_damage(bad: float) -> None:
    (finding,) = findings(Row(3, gradient("a"), [1.0, bad]))
    assert (finding.step, finding.value) == (3, 1.0)
    assert findings(Row(3, APPLIED, [0.0]), Row(3, gradient("a"), [1.0, bad])) == []
    applied = findings(Row(3, APPLIED, [1.0]), Row(3, gradient("a"), [1.0, bad]))
    assert [finding.tensor for finding in applied] == ["a.weight:gradient"]


def test_weights_are_damaged_while_they_contain_more_nan_than_before() -> None:
    values = [[-INF, 1.0], [-INF, NAN], [-INF, NAN], [-INF, 2.0], [NAN, NAN]]
    rows = [Row(step, WEIGHT, content) for step, content in enumerate(values)]
    assert [finding.step for finding in findings(*rows)] == [1, 2, 4]


def test_weights_that_contained_nan_when_first_recorded_get_fifty_steps() -> None:
    rows = [
        Row(step, info, content)
        for step in range(60)
        for info, content in ((WEIGHT, [NAN, 1.0]), (gradient("a"), [0.0]))
    ]
    assert [finding.step for finding in findings(*rows)] == list(range(49, 60))
    forbidden = [replace(row, values=[-INF, 1.0]) if row.info is WEIGHT else row for row in rows]
    assert findings(*forbidden) == []  # a transition that is never taken
    mended = [
        *rows[:60],
        Row(30, WEIGHT, [1.0, 1.0]),
        *(replace(row, step=row.step + 1) for row in rows[60:]),
    ]
    assert [finding.step for finding in findings(*mended)] == list(range(31, 61))  # finite before
    frozen = [replace(row, info=gradient("b")) if row.info is not WEIGHT else row for row in rows]
    assert findings(*frozen) == []


def test_own_buffers_are_damaged_at_the_third_record_that_shows_no_less() -> None:
    seen = [[NAN, 1.0], [NAN, NAN], [NAN, 1.0], [NAN, 1.0], [NAN, 1.0], [1.0, 1.0], [NAN, 1.0]]
    for name, bad, steps in (("own", NAN, [4]), ("own", INF, []), ("running_max", INF, [4])):
        info = replace(CHECK, name=f"{name}:finite_check", role="buffer_check")
        rows = [
            Row(step, info, [bad if value != 1.0 else 1.0 for value in content])
            for step, content in enumerate(seen)
        ]
        assert [finding.step for finding in findings(*rows)] == steps


def test_steps_that_arrive_one_by_one_are_judged_as_those_that_arrive_together() -> None:
    own = replace(CHECK, name="own:finite_check", role="buffer_check")
    rows = [
        Row(step, info, content, worker=worker)
        for worker in (0, 1)
        for step in range(60)
        for info, content in ((WEIGHT, [NAN]), (gradient("a"), [0.0]), (own, [NAN if step % 7 else 1.0]))
    ]
    config = RuleConfig(rule="nan_or_inf")
    block = block_of(rows).ordered()
    outcome = follow(config, one_by_one(block))
    assert outcome.findings == all_at_once(config, block).findings
    assert {finding.tensor for finding in outcome.findings} == {"a.weight", "own:finite_check"}


def test_a_parameter_without_a_gradient_is_a_mask() -> None:
    rows = [
        Row(step, info, content)
        for step, content in enumerate([[0.0, 1.0], [-INF, 1.0], [-INF, -INF]])
        for info, content in ((WEIGHT, content), (gradient("b"), [1.0]))
    ]
    assert findings(*rows) == []


def test_what_was_bad_at_the_start_is_damaged_only_where_there_is_more() -> None:
    assert findings(Row(3, CHECK, [NAN, 1.0], probes={"nonfinite_at_start": 1.0})) == []
    (finding,) = findings(Row(3, CHECK, [NAN, NAN], probes={"nonfinite_at_start": 1.0}))
    assert finding.message == "2 NaN among 2 elements of a.weight after the update, 1 at the start"


def test_a_run_that_records_losses_alone_is_damaged_after_fifty_without_a_finite_one() -> None:
    best = replace(LOSS, name="best_loss")
    bad = [Row(step, LOSS, [NAN]) for step in range(60)]
    assert [finding.step for finding in findings(*bad)] == list(range(49, 60))
    assert [finding.step for finding in findings(*bad[:3], steps_without_update=2)] == [1, 2]
    assert findings(*bad[:30], Row(30, LOSS, [1.0]), *bad[31:]) == []
    assert findings(Row(0, WEIGHT, [1.0]), *bad) == []
    sound = [Row(step, info, [value]) for step in range(60) for info, value in ((best, INF), (LOSS, 1.0))]
    assert findings(*sound) == []


def test_in_python_it_is_as_severe_as_by_default() -> None:
    assert nan_or_inf().stop().config.severity == "critical"
    assert nan_or_inf().severe("info").config.severity == "info"


def test_nothing_is_damaged_where_nothing_was_recorded() -> None:
    assert all_at_once(RuleConfig(rule="nan_or_inf"), Block.empty()).findings == []
