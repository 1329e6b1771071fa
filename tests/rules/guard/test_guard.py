"""Rules inside a training: their findings equal those of a backtest, and a bad update is not applied."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.sdk.training import EVERY_STEP, Training, batches, recorded, small_model
from watchstep import Hook, StopTraining
from watchstep.errors import ConfigError, RuleError
from watchstep_rules import Guard, RuleConfig
from watchstep_rules.backtest.backtest import backtest
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import MinimumDuration, StopAction, TensorScope
from watchstep_rules.engine.alert import Transition
from watchstep_rules.engine.judge import Verdict
from watchstep_rules.rule import Finding

STOP = (StopAction(),)
NAN = RuleConfig(rule="nan_or_inf", actions=STOP)
EAGER = (
    NAN,
    RuleConfig(rule="vanishing_gradient", params={"threshold": 1.0, "relative": 0.5}),
    RuleConfig(rule="exploding_gradient", params={"growth": 1.1, "window": 3, "warmup": 2}),
    RuleConfig(rule="dead_relu", params={"share": 0.1, "steps": 1, "examples": 1}),
    RuleConfig(rule="weight_not_updating", params={"threshold": 1.0}),
    RuleConfig(rule="oscillating_loss", params={"window": 4}),
    RuleConfig(rule="loss_not_decreasing", params={"patience": 4, "warmup": 2, "min_fall": 0.9}),
)


class Verdicts:
    """Collects the verdicts of a guard."""

    def __init__(self) -> None:
        self.findings: dict[str, list[Finding]] = {}
        self.transitions: dict[str, list[Transition]] = {}

    def __call__(self, config: RuleConfig, verdict: Verdict) -> None:
        self.findings.setdefault(config.name, []).extend(verdict.findings)
        self.transitions.setdefault(config.name, []).extend(verdict.transitions)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def poison(model: nn.Module, value: float = math.nan) -> None:
    """One element of the last layer's gradient."""
    gradient = list(model.parameters())[-2].grad
    assert gradient is not None
    gradient[0, 0] = value


def train(
    hook: Hook,
    steps: int,
    bad: int | None = None,
    model: nn.Module | None = None,
    before: Callable[[int], Any] = lambda _: None,
) -> Training:
    """A loop that logs its loss after the update; the gradient of one step is bad."""
    training = Training(model or small_model())
    hook.watch(training.model, training.optimizer)
    for step, (x, y) in enumerate(batches(steps)):
        training.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(training.model(x), y)
        loss.backward()
        if step == bad:
            poison(training.model)
        before(step)
        training.optimizer.step()
        hook.log(loss=loss)
    return training


@pytest.mark.ci
@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("config", [EVERY_STEP, None])
def test_a_guard_finds_step_by_step_what_a_backtest_finds(tmp_path: Path, every: int, config: Any) -> None:
    verdicts = Verdicts()
    hook = Hook(tmp_path, config=config)
    Guard(EAGER, every=every, on_verdict=verdicts).attach(hook)
    train(hook, 40)
    run = recorded(hook)
    assert hook.health["guard"]["problems"] == {}
    outcomes = backtest(run.rows(), EAGER)
    assert any(outcome.findings for outcome in outcomes)
    for outcome in outcomes:
        assert verdicts.findings.get(outcome.config.name, []) == outcome.findings
        assert verdicts.transitions.get(outcome.config.name, []) == outcome.transitions


def test_a_bad_gradient_stops_the_training_before_the_update(tmp_path: Path) -> None:
    model = small_model()
    before_update: list[list[Tensor]] = []
    verdicts = Verdicts()
    hook = Hook(tmp_path, run="r")
    Guard(on_verdict=verdicts).attach(hook)
    with (
        pytest.raises(StopTraining, match="nan_or_inf: bad from step 3: 1 NaN among 32 elements") as stopped,
        hook,
    ):
        train(hook, 6, bad=3, model=model, before=lambda _: before_update.append(weights(model)))
    assert len(before_update) == 4
    assert all(torch.equal(now, then) for now, then in zip(weights(model), before_update[-1], strict=True))
    assert stopped.value.step == 3
    assert hook.health["guard"]["firing"] == {"nan_or_inf": 3}
    run = recorded(hook)
    assert [finding.step for finding in verdicts.findings["nan_or_inf"]] == [3]
    (outcome,) = backtest(run.rows(), [DEFAULT_RULES[0]])
    assert verdicts.findings["nan_or_inf"] == outcome.findings


@pytest.mark.ci
@pytest.mark.parametrize("place", [0, 100_000, 262_143])
def test_a_lone_infinity_in_a_large_gradient_is_seen_at_once(tmp_path: Path, place: int) -> None:
    model = nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = Hook(tmp_path, guard=True)
    hook.watch(model, optimizer)
    model(torch.ones(1, 512)).sum().backward()
    assert model.weight.grad is not None
    model.weight.grad.view(-1)[place] = math.inf
    before = weights(model)
    with pytest.raises(StopTraining):
        optimizer.step()
    assert torch.equal(model.weight, before[0])
    hook.close()


@pytest.mark.ci
def test_a_bad_loss_stops_before_the_update(tmp_path: Path) -> None:
    training = Training()
    hook = Hook(tmp_path, guard=True)
    hook.watch(training.model, training.optimizer)
    before = weights(training.model)
    loss = training.model(torch.full((2, 8), math.inf)).sum()
    loss.backward()
    with pytest.raises(StopTraining, match="nan_or_inf: bad from step 0"):
        training.optimizer.step()
    assert all(torch.equal(now, then) for now, then in zip(weights(training.model), before, strict=True))
    hook.close()


def test_a_rule_over_losses_stops_when_its_step_is_over(tmp_path: Path) -> None:
    stuck = RuleConfig(
        rule="loss_not_decreasing",
        params={"patience": 4, "warmup": 2},
        hold=MinimumDuration(steps=1),
        actions=STOP,
    )
    hook = Hook(tmp_path)
    verdicts = Verdicts()
    Guard([stuck], on_verdict=verdicts).attach(hook)

    def run() -> None:
        for _ in range(20):
            hook.log(loss=1.0)
            hook.step()

    with pytest.raises(StopTraining, match="loss is 1 on average") as stopped:
        run()
    outcome = backtest(recorded(hook).rows(), [stuck])[0]
    assert outcome.fired[0].step == stopped.value.step == verdicts.findings["loss_not_decreasing"][0].step


@pytest.mark.ci
def test_rules_without_a_stop_only_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    Guard([NAN.model_copy(update={"actions": ()})]).attach(hook)
    train(hook, 3, bad=1)
    hook.close()
    assert hook.health["guard"]["firing"] == {"nan_or_inf": 1}
    assert "watchstep: guard: nan_or_inf: bad from step 1" in caplog.text


@pytest.mark.ci
def test_a_stop_that_the_program_catches_is_not_repeated(tmp_path: Path) -> None:
    hook = Hook(tmp_path, guard=True)
    training = Training()
    hook.watch(training.model, training.optimizer)
    raised = []
    for step, (x, y) in enumerate(batches(4)):
        training.optimizer.zero_grad()
        nn.functional.cross_entropy(training.model(x), y).backward()
        poison(training.model)
        try:
            training.optimizer.step()
        except StopTraining:
            raised.append(step)
    hook.close()
    assert raised == [0]
    assert not hook.health["faults"]


def test_a_step_that_a_gradient_scaler_skips_is_no_fault(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    training = Training()
    hook = Hook(tmp_path, config=EVERY_STEP, guard=True)
    hook.watch(training.model, training.optimizer)
    for step, (x, y) in enumerate(batches(4)):
        training.optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(training.model(x), y)).backward()
        if step == 1:
            poison(training.model, math.inf)
        scaler.step(training.optimizer)
        scaler.update()
    hook.close()
    assert hook.health["guard"]["firing"] == {}
    assert not hook.health["faults"]


def test_accumulated_micro_batches_are_one_step(tmp_path: Path) -> None:
    verdicts, training = Verdicts(), Training()
    hook = Hook(tmp_path, config=EVERY_STEP)
    Guard(EAGER, every=1, on_verdict=verdicts).attach(hook)
    hook.watch(training.model, training.optimizer)
    for number, (x, y) in enumerate(batches(20)):
        (nn.functional.cross_entropy(training.model(x), y) / 2).backward()
        if number % 2:
            training.optimizer.step()
            training.optimizer.zero_grad()
    for outcome in backtest(recorded(hook).rows(), EAGER):
        assert verdicts.findings.get(outcome.config.name, []) == outcome.findings


@pytest.mark.ci
def test_a_step_with_a_closure_is_judged_after_its_update(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    hook = Hook(tmp_path, guard=True)
    hook.watch(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 8)).sum()
        loss.backward()
        poison(model)
        return loss

    with pytest.raises(StopTraining, match="nan_or_inf: bad from step 0"):
        optimizer.step(closure)  # type: ignore[no-untyped-call,unused-ignore]
    hook.close()


def test_losses_are_those_without_a_guard(tmp_path: Path) -> None:
    plain = Training().run(10)
    hook = Hook(tmp_path, guard=True)
    training = Training()
    hook.watch(training.model, training.optimizer)
    assert training.run(10) == plain
    hook.close()
    assert hook.health["guard"]["steps"] == 10
    assert hook.health["guard"]["seconds"] > 0


def test_without_a_guard_health_has_no_guard_entry(tmp_path: Path) -> None:
    with Hook(tmp_path) as hook:
        assert "guard" not in hook.health


def test_of_several_ranks_none_may_stop_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="2 ranks"):
        Hook(tmp_path, guard=True)
    hook = Hook(tmp_path)
    with pytest.raises(ConfigError, match="agree=True"):
        Guard().attach(hook)
    Guard(agree=True).attach(hook)
    with pytest.raises(ConfigError, match="has a guard already"):
        Guard(agree=True).attach(hook)
    hook.close()


def test_what_a_guard_cannot_be_made_of(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="guard=3"):
        Hook(tmp_path, guard=3)
    with pytest.raises(RuleError, match="every=0"):
        Guard(every=0)
    with pytest.raises(RuleError, match="stalled_training"):
        Guard([RuleConfig(rule="stalled_training")])
    for kind, params in (
        ("sql", {"query": "SELECT tensor FROM statistics"}),
        ("python", {"module": "watchstep_rules.builtin.gradients.nan_or_inf", "class": "NanOrInf"}),
    ):
        with pytest.raises(RuleError, match="guard: mine: a rule of kind python or sql"):
            Guard([NAN, RuleConfig(rule=kind, name="mine", params=params)])
    with pytest.raises(RuleError, match="missing"):
        Hook(tmp_path, guard=tmp_path / "missing.yaml")


@pytest.mark.ci
def test_a_rule_file_guards(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n  - {rule: nan_or_inf, actions: [stop], tensors: {include: 'loss'}}\n")
    hook = Hook(tmp_path, guard=rules)
    train(hook, 3, bad=2)  # a gradient is not in its scope
    hook.close()
    assert hook.health["guard"]["firing"] == {}


def test_a_guard_that_fails_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    def fail(config: RuleConfig, verdict: Verdict) -> None:
        raise ZeroDivisionError("failed")

    hook = Hook(tmp_path)
    Guard([NAN], on_verdict=fail).attach(hook)
    train(hook, 3)
    hook.close()
    assert hook.health["faults"] == {"guard": "ZeroDivisionError: failed"}


def test_only_what_some_rule_looks_at_is_retained(tmp_path: Path) -> None:
    verdicts = Verdicts()
    scope = TensorScope(include="3\\.")
    config = RuleConfig(rule="exploding_gradient", params={"growth": 1.01, "warmup": 1}, tensors=scope)
    hook = Hook(tmp_path, config=EVERY_STEP)
    Guard([config], on_verdict=verdicts, every=3).attach(hook)
    train(hook, 12)
    (outcome,) = backtest(recorded(hook).rows(), [config])
    assert verdicts.findings["exploding_gradient"] == outcome.findings


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NO GPU HERE: that a guard waits is not proven by this run"
)
def test_on_a_device_a_bad_gradient_stops_before_the_update(tmp_path: Path) -> None:
    model = small_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    hook = Hook(tmp_path, guard=True)
    hook.watch(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(4, 8, device="cuda")).sum().backward()
        before = weights(model)
        if step < 3:
            optimizer.step()
            continue
        poison(model)
        with pytest.raises(StopTraining, match="nan_or_inf: bad from step 3"):
            optimizer.step()
        assert all(torch.equal(now, then) for now, then in zip(weights(model), before, strict=True))
    hook.close()
    assert not hook.health["faults"]
