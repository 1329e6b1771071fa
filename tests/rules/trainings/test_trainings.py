"""Rules over layers, tested with small recorded trainings: healthy unusual ones and faulty ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.rules.trainings.cases import CASES, Training
from watchstep import CaptureConfig, Hook, open_run
from watchstep.format.block import Block
from watchstep_rules.backtest.backtest import backtest
from watchstep_rules.config.defaults import DEFAULT_RULES

pytestmark = pytest.mark.release

OVER_LAYERS = {
    "class_imbalance",
    "dead_relu",
    "exploding_gradient",
    "poor_initialization",
    "saturated_activation",
    "vanishing_gradient",
    "weight_not_updating",
}
STEPS = 120


class Clock:
    """A clock that advances only when the program works or a tensor is measured, for reproducible cadences."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 25e-6
        return self.now


def recorded(training: Training, folder: Path) -> Block:
    """Train in the plain loop with the default capture, in steps of a millisecond."""
    torch.set_num_threads(1)
    clock = Clock()
    with Hook(folder, config=CaptureConfig(clock=clock)) as hook:
        model, optimizer, loss_function, batches = training.build(3)
        hook.watch(model, optimizer)
        for _, (x, y) in zip(range(max(STEPS, training.onset + STEPS)), batches, strict=False):
            optimizer.zero_grad()
            loss = loss_function(model(x), y)
            loss.backward()
            optimizer.step()
            hook.log(loss=loss)
            hook.record(labels=y)
            clock.now += 1e-3
    assert not hook.health["faults"]
    return open_run(hook.run_url).rows()


@pytest.mark.parametrize("name", sorted(CASES))
def test_what_is_wrong_is_reported_and_nothing_else(name: str, tmp_path: Path) -> None:
    training = CASES[name]
    configs = [config for config in DEFAULT_RULES if config.rule in OVER_LAYERS]
    outcomes = backtest(recorded(training, tmp_path), configs)
    assert not [outcome.problem for outcome in outcomes if outcome.problem]
    fired = {outcome.config.rule: outcome.fired[0].step for outcome in outcomes if outcome.fired}
    assert training.truth & OVER_LAYERS <= fired.keys()
    assert fired.keys() <= training.truth | training.also
    assert all(fired[rule] >= training.onset for rule in training.truth & fired.keys())
