"""Faults of updates that begin in the middle: rates, decay, signs, gradients and parameters that are left out."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from benchmarks.detection.mid_run import accepted
from benchmarks.detection.mid_run.bases import (
    Base,
    counting_language,
    digits_by_convolutions,
    digits_by_layers,
    digits_reconstructed,
    scale_groups,
    sine_regression,
    train,
    two_kinds_of_waves,
)
from benchmarks.detection.witnessed import Training, mid_run


@mid_run(
    "rate_100_of_convolutions", "the rate of SGD with momentum is multiplied by 100", 200, accepted.RATE_RISES
)
def rate_100_of_convolutions(run: Training) -> None:
    """400 steps."""
    base = digits_by_convolutions(run, 400)
    before = train(run, base, 200, once=lambda held: scale_groups(held.optimizer, "lr", 100))
    run.separates("accuracy", before, base.measure(), sound_at_least=0.85)


@mid_run("rate_100_of_a_language_model", "the rate of AdamW is multiplied by 100", 150, accepted.RATE_RISES)
def rate_100_of_a_language_model(run: Training) -> None:
    """300 steps; the transformer normalises after its sums, as the first ones did."""
    base = counting_language(run, 300, norm_first=False)
    before = train(run, base, 150, once=lambda held: scale_groups(held.optimizer, "lr", 100))
    run.separates("loss", before, base.measure(), sound_at_most=0.1)


@mid_run("rate_100_of_a_regression", "the rate of Adam is multiplied by 100", 200, accepted.RATE_RISES)
def rate_100_of_a_regression(run: Training) -> None:
    """400 steps."""
    base = sine_regression(run, 400)
    before = train(run, base, 200, once=lambda held: scale_groups(held.optimizer, "lr", 100))
    run.separates("error", before, base.measure(), sound_at_most=0.2)


@mid_run(
    "rate_100_of_waves",
    "a scheduler multiplies where it should divide: the rate of a GRU is 100 times as high",
    250,
    accepted.RATE_RISES,
)
def rate_100_of_waves(run: Training) -> None:
    """420 steps."""
    base = two_kinds_of_waves(run, 420)
    before = train(run, base, 250, once=lambda held: scale_groups(held.optimizer, "lr", 100))
    run.separates("accuracy", before, base.measure(), sound_at_least=0.9)


@mid_run(
    "rate_grows_by_tenth_each_step",
    "an exponential schedule with a factor above one",
    150,
    accepted.RATE_RISES,
)
def rate_grows_by_tenth_each_step(run: Training) -> None:
    """350 steps; after 50 of them the rate is 100 times as high."""
    base = digits_reconstructed(run, 350)

    def updated(held: Base) -> None:
        scale_groups(held.optimizer, "lr", 1.1 if held.optimizer.param_groups[0]["lr"] < 10 else 1.0)
        held.optimizer.step()

    before = train(run, base, 150, updated=updated)
    run.separates("error", before, base.measure(), sound_at_most=0.06)


@mid_run(
    "decay_100_of_layers",
    "weight decay of AdamW is multiplied by 1,000: weights shrink to nothing",
    200,
    accepted.SHRINKS,
)
def decay_100_of_layers(run: Training) -> None:
    """500 steps; 0.05 becomes 50."""
    base = digits_by_layers(run, 500, rate=2e-3)
    before = train(run, base, 200, once=lambda held: scale_groups(held.optimizer, "weight_decay", 1000))
    run.separates("accuracy", before, base.measure(), sound_at_least=0.85)


@mid_run(
    "decay_100_of_convolutions",
    "weight decay of SGD is multiplied by 100 twice: 1e-4 becomes 1",
    150,
    accepted.SHRINKS,
)
def decay_100_of_convolutions(run: Training) -> None:
    """400 steps."""
    base = digits_by_convolutions(run, 400)
    before = train(run, base, 150, once=lambda held: scale_groups(held.optimizer, "weight_decay", 1e4))
    run.separates("accuracy", before, base.measure(), sound_at_least=0.85)


@mid_run("sign_flipped", "the sign of the loss is turned around before backward()", 200, accepted.EXPLODES)
def sign_flipped(run: Training) -> None:
    """400 steps of ascent."""
    base = digits_by_layers(run, 400)
    before = train(run, base, 200, loss=lambda value: -value)
    run.separates("accuracy", before, base.measure(), sound_at_least=0.85)


@mid_run(
    "sign_wrong_from_the_start",
    "the negative of the loss is minimised from the first step on",
    0,
    accepted.EXPLODES,
)
def sign_wrong_from_the_start(run: Training) -> None:
    """150 steps of ascent."""
    base = digits_by_layers(run, 150)
    before = train(run, base, 0, loss=lambda value: -value)
    run.separates("accuracy", before, base.measure(), sound_at_least=0.7)


@mid_run(
    "sign_flipped_of_a_language_model",
    "the sign of the loss is turned around before backward()",
    220,
    accepted.EXPLODES,
)
def sign_flipped_of_a_language_model(run: Training) -> None:
    """350 steps."""
    base = counting_language(run, 350)
    before = train(run, base, 220, loss=lambda value: -value)
    run.separates("loss", before, base.measure(), sound_at_most=0.05)


@mid_run(
    "encoder_without_gradients",
    "the encoder runs under no_grad from then on",
    30,
    accepted.STANDS_STILL | {"gradients_cease"},
)
def encoder_without_gradients(run: Training) -> None:
    """300 steps of a slow SGD; the model's call is the same, its layers are called one by one."""
    base = digits_by_layers(run, 300, activation=nn.Tanh, rate=3e-4)
    before = train(run, base, 30, forward=_through)
    run.separates("accuracy", before, base.measure(), sound_at_least=0.65)


def _through(model: nn.Module, x: Tensor) -> Tensor:
    """Call the model, its layers but the last one without gradients."""
    assert isinstance(model, nn.Sequential)
    layers = list(model)
    handles = [
        layer.register_forward_hook(lambda _module, _given, output: output.detach()) for layer in layers[:-1]
    ]
    output: Tensor = model(x)
    for handle in handles:
        handle.remove()
    return output


@mid_run(
    "parameters_left_out_of_groups",
    "the optimizer is made anew without the parameters of the first layers",
    30,
    accepted.NOT_IN_OPTIMIZER,
)
def parameters_left_out_of_groups(run: Training) -> None:
    """300 steps; a filter by name matches the head alone."""
    base = digits_by_layers(run, 300, activation=nn.Tanh, rate=3e-4)

    def once(held: Base) -> None:
        group: dict[str, Any] = held.optimizer.param_groups[0]
        group["params"] = group["params"][-2:]

    before = train(run, base, 30, once=once)
    run.separates("accuracy", before, base.measure(), sound_at_least=0.65)


@mid_run(
    "copy_never_updated",
    "updates go to a copy of the weights, which are never copied back",
    60,
    accepted.STANDS_STILL,
)
def copy_never_updated(run: Training) -> None:
    """350 steps; the optimizer holds main weights, as in mixed precision, and the copy to the model is left out."""
    base = digits_by_convolutions(run, 350, rate=0.01)
    main = copy.deepcopy(base.model)

    def updated(held: Base) -> None:
        for held_parameter, parameter in zip(main.parameters(), held.model.parameters(), strict=True):
            held_parameter.grad = parameter.grad
        for held_parameter in main.parameters():
            if held_parameter.grad is not None:
                held_parameter.data.add_(held_parameter.grad, alpha=-0.01)

    before = train(run, base, 60, updated=updated)
    run.separates("accuracy", before, base.measure(), sound_at_least=0.88)


@mid_run(
    "gradients_not_cleared",
    "zero_grad() is lost in a change of the loop: gradients add up",
    150,
    accepted.EXPLODES | {"missing_zero_grad"},
)
def gradients_not_cleared(run: Training) -> None:
    """400 steps of SGD with momentum."""
    base = digits_by_convolutions(run, 400, rate=0.05)
    before = train(run, base, 150, cleared=False)
    run.separates("accuracy", before, base.measure(), sound_at_least=0.85)


@mid_run(
    "rate_of_zero",
    "a schedule that counts epochs where steps are meant ends at a rate of zero",
    50,
    accepted.STANDS_STILL,
)
def rate_of_zero(run: Training) -> None:
    """400 steps."""
    base = digits_by_layers(run, 400, rate=5e-4)
    before = train(run, base, 50, once=lambda held: scale_groups(held.optimizer, "lr", 0.0))
    run.separates("accuracy", before, base.measure(), sound_at_least=0.88)


@mid_run(
    "clipped_to_nothing", "gradients are clipped to a norm of 1e-8 by a wrong unit", 50, accepted.STANDS_STILL
)
def clipped_to_nothing(run: Training) -> None:
    """400 steps of SGD."""
    base = digits_by_convolutions(run, 400)

    def updated(held: Base) -> None:
        nn.utils.clip_grad_norm_(held.model.parameters(), 1e-8)
        held.optimizer.step()

    def once(held: Base) -> None:
        held.optimizer.state.clear()
        scale_groups(held.optimizer, "weight_decay", 0.0)

    before = train(run, base, 50, once=once, updated=updated)
    run.separates("accuracy", before, base.measure(), sound_at_least=0.88)


@mid_run(
    "weights_read_back_each_step",
    "a checkpoint's first weights are read back each time a validation ends",
    200,
    accepted.LOSS_RISES | accepted.STANDS_STILL,
)
def weights_read_back_each_step(run: Training) -> None:
    """420 steps; from the onset on each tenth step begins with the weights of step 0."""
    base = digits_by_layers(run, 420)
    first = copy.deepcopy(base.model.state_dict())
    steps = iter(range(1000))

    def updated(held: Base) -> None:
        if next(steps) % 10 == 0:
            held.model.load_state_dict(first)
        else:
            held.optimizer.step()

    before = train(run, base, 200, updated=updated)
    run.separates("accuracy", before, base.measure(), sound_at_least=0.85)


@mid_run("momentum_above_one", "a schedule of momentum goes past one", 180, accepted.RATE_RISES)
def momentum_above_one(run: Training) -> None:
    """380 steps; 0.9 becomes 1.1."""
    base = digits_by_convolutions(run, 380)
    before = train(run, base, 180, once=lambda held: scale_groups(held.optimizer, "momentum", 1.1 / 0.9))
    run.separates("accuracy", before, base.measure(), sound_at_least=0.85)


@mid_run(
    "exploded_and_stays_high",
    "one update at a rate a million times too high: the loss explodes, stays finite, and stays high",
    160,
    accepted.EXPLODES,
)
def exploded_and_stays_high(run: Training) -> None:
    """400 steps of SGD on a regression; one update is wrong, and none before or after."""
    base = sine_regression(run, 400)
    base.optimizer = SGD(base.model.parameters(), 0.02)
    updates = iter(range(1000))

    def updated(held: Base) -> None:
        factor = 1e6 if next(updates) == 0 else 1.0
        scale_groups(held.optimizer, "lr", factor)
        held.optimizer.step()
        scale_groups(held.optimizer, "lr", 1 / factor)

    before = train(run, base, 160, updated=updated)
    run.separates("error", before, base.measure(), sound_at_most=1.0)


@mid_run(
    "optimizer_of_another_model",
    "after a restart of the loop the optimizer is that of a model that is not trained any more",
    40,
    accepted.NOT_IN_OPTIMIZER,
)
def optimizer_of_another_model(run: Training) -> None:
    """300 steps; the optimizer holds the parameters of a copy."""
    base = two_kinds_of_waves(run, 300)
    other = copy.deepcopy(base.model)

    def once(held: Base) -> None:
        held.optimizer = AdamW(other.parameters(), 5e-3)

    before = train(run, base, 40, once=once)
    run.separates("accuracy", before, base.measure(), sound_at_least=0.9)


@mid_run(
    "epsilon_of_adam_too_large",
    "Adam's epsilon is set to 1,000 in a change of settings: updates nearly vanish",
    40,
    accepted.STANDS_STILL,
)
def epsilon_of_adam_too_large(run: Training) -> None:
    """350 steps."""
    base = digits_reconstructed(run, 350)
    assert isinstance(base.optimizer, Adam)
    before = train(run, base, 40, once=lambda held: scale_groups(held.optimizer, "eps", 1e11))
    run.separates("error", before, base.measure(), sound_at_most=0.055)
