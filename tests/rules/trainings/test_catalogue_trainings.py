"""Rules that are off by default, each tested with one recorded training that has the fault and one that has not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own abbreviation
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from tests.rules.trainings.parts import (
    STEPS,
    Built,
    Make,
    Task,
    Training,
    adam,
    initialised,
    layers,
    paced,
    sgd,
)
from tests.rules.trainings.test_trainings import recorded
from watchstep import CaptureConfig, Hook, open_run
from watchstep.format.block import Block
from watchstep_rules.backtest.backtest import backtest
from watchstep_rules.baseline import summarize_run
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.signals.baseline import MIN_RUNS, merge_summaries
from watchstep_rules.signals.reference import reference_of

pytestmark = pytest.mark.release

Batches = Iterator[tuple[Tensor, Tensor]]


def sound(seed: int) -> Built:
    torch.manual_seed(seed)
    model = layers(20, 32, 32, 5)
    return model, adam(model, 3e-3), F.cross_entropy, Task(seed).batches()


def without_output(seed: int) -> Built:
    model, optimizer, loss, batches = sound(seed)
    nn.init.constant_(model.get_parameter("2.bias"), -50.0)
    return model, optimizer, loss, batches


def one_batch(seed: int) -> Built:
    model, optimizer, loss, batches = sound(seed)
    return model, optimizer, loss, cycle(islice(batches, 1))


def wide_weights(seed: int) -> Built:
    model, optimizer, loss, batches = sound(seed)
    return initialised(model, lambda w: nn.init.normal_(w, std=3.0)), optimizer, loss, batches


def at_rate(rate: float) -> Make:
    def build(seed: int) -> Built:
        model, _, loss, batches = sound(seed)
        return model, adam(model, rate, weight_decay=0.0), loss, batches

    return build


def rate_that_jumps(seed: int) -> Built:
    model, _, loss, batches = sound(seed)
    return model, paced(sgd(model, 0.1), lambda step: 1.0 if step < 90 else 300.0), loss, batches


def one_odd_batch(seed: int) -> Built:
    model, optimizer, loss, batches = sound(seed)
    return model, optimizer, loss, ((x * 300 if step == 60 else x, y) for step, (x, y) in enumerate(batches))


def tiny_loss(seed: int) -> Built:
    model, optimizer, _, batches = sound(seed)
    return model, optimizer, lambda out, y: 1e-6 * F.cross_entropy(out, y), batches


def images(mean: float) -> Make:
    def build(seed: int) -> Built:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 5))
        extra = (
            (x.reshape(-1, 1, 5, 4).repeat(1, 1, 1, 2)[..., :5] + mean, y) for x, y in Task(seed).batches()
        )
        return model, adam(model), F.cross_entropy, extra

    return build


@dataclass(frozen=True)
class Twins:
    """A rule, a training with its fault, and one without."""

    config: dict[str, Any]
    faulty: Make
    healthy: Make = sound
    first: int = field(default=0)


TWINS = {
    "all_zero": Twins({"for": {"steps": 3}}, without_output),
    "unchanged_tensor": Twins({"tensors": {"collection": "inputs"}}, one_batch),
    "tensor_variance": Twins({"params": {"max_threshold": 30.0, "min_threshold": 1e-12}}, wide_weights),
    "weight_update_ratio": Twins({}, at_rate(300.0)),
    "learning_rate_scale": Twins({"for": {"steps": 3}}, at_rate(1e-8)),
    "overtraining": Twins({"params": {"patience_train": 60}}, at_rate(0.0)),
    "input_image_mean": Twins({}, images(3.0), images(0.0)),
    "number_format_headroom": Twins({"tensors": {"include": r".*weight:gradient"}}, tiny_loss),
    "loss_spike": Twins({}, rate_that_jumps, first=90),
    "gradient_norm_spike": Twins({"params": {"window": 5}}, one_odd_batch, first=60),
}


def fired(config: dict[str, Any], rows: Block) -> list[int]:
    (outcome,) = backtest(rows, [RuleConfig.model_validate(config)])
    assert not outcome.problem
    return [transition.step for transition in outcome.fired]


@pytest.mark.parametrize("name", sorted(TWINS))
def test_one_twin_is_found_and_the_other_is_not(name: str, tmp_path: Path) -> None:
    twins = TWINS[name]
    config = {"rule": name, **twins.config}
    assert fired(config, recorded(Training(twins.healthy, STEPS), tmp_path / "healthy")) == []
    found = fired(config, recorded(Training(twins.faulty, STEPS, onset=twins.first), tmp_path / "faulty"))
    assert found
    assert min(found) >= twins.first


def test_a_run_is_compared_with_another(tmp_path: Path) -> None:
    first, again, other = (
        recorded(Training(build, STEPS), tmp_path / str(number))
        for number, build in enumerate((sound, sound, at_rate(0.3)))
    )
    config = {
        "rule": "similar_across_runs",
        "params": {"reference": reference_of(first, include=r".*weight$")},
    }
    assert fired(config, again) == []
    assert fired(config, other)


def seeded(make: Make, seed: int) -> Training:
    return Training(lambda _: make(seed), STEPS)


def test_a_training_is_compared_with_five_earlier_ones(tmp_path: Path) -> None:
    summaries = {}
    for seed in range(MIN_RUNS):
        recorded(seeded(sound, seed), tmp_path / str(seed))
        (location,) = (tmp_path / str(seed) / "default").iterdir()
        summaries[str(seed)] = summarize_run(open_run(location))
    baseline = merge_summaries(summaries)
    assert baseline is not None
    params = {"baseline": baseline.model_dump(mode="json")}
    config = {"rule": "unlike_earlier_runs", "params": params, "for": {"steps": 5}}
    assert fired(config, recorded(seeded(sound, MIN_RUNS), tmp_path / "again")) == []
    assert fired(config, recorded(seeded(at_rate(0.3), MIN_RUNS + 1), tmp_path / "other"))


class NotAtAnyScale(torch.autograd.Function):
    """Its backward pass makes NaN, as the root of zero does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * torch.nan


def scaled(folder: Path, *, broken: bool) -> Block:
    """Trained with a gradient scaler that begins at a scale at which the first steps overflow."""
    model, optimizer, loss_function, batches = sound(3)
    scaler = GradScaler("cpu", 2.0**127, 2.0, 0.5, 50)
    with Hook(folder, config=CaptureConfig()) as hook:
        hook.watch(model, optimizer)
        for _, (x, y) in zip(range(80), batches, strict=False):
            optimizer.zero_grad()
            loss = loss_function(model(x), y)
            if broken:
                loss = NotAtAnyScale.apply(loss)  # type: ignore[no-untyped-call]  # PyTorch's
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            hook.log(loss=loss)
    return open_run(hook.run_url).rows()


def test_a_scaler_that_only_skips_is_found_and_one_that_finds_its_scale_is_not(tmp_path: Path) -> None:
    config = {"rule": "scaler_skips"}
    assert fired(config, scaled(tmp_path / "sound", broken=False)) == []
    assert fired(config, scaled(tmp_path / "broken", broken=True)) == [19]
