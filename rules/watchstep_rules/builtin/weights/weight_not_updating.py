"""Weights that the optimizer does not update although the model could learn."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.builtin.weights.absent_from_optimizer import AbsentFromOptimizer
from watchstep_rules.rule import Advice, Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.loss_progress import LossProgress
from watchstep_rules.signals.series import in_training
from watchstep_rules.signals.tensor_selection import is_normalization, is_weighted
from watchstep_rules.signals.update_evidence import OptimizedWeights, forgotten
from watchstep_rules.signals.weight_steps import (
    HALF,
    Figures,
    StepsOfWeights,
    WeightHistory,
    WeightPace,
    Weights,
)


class WeightNotUpdatingParams(Params):
    """Parameters of `WeightNotUpdating`."""

    threshold: float = Field(
        1e-8, ge=0, description="Relative update (root mean squares) up to which there is no update."
    )
    rounded: float = Field(
        0.99,
        gt=0,
        le=1,
        description="Share of elements unchanged by an update at which the update is lost to rounding.",
    )
    patience: int = Field(
        20,
        ge=1,
        description="Records without any update after which a decayed learning rate is also a fault.",
    )
    ran_down: float = Field(
        1e-6,
        ge=0,
        description="Relative update of the fastest weight at which a learning rate has decayed, if it was a thousand times that, or has always been too small.",
    )
    alive: float = Field(
        1e-3,
        gt=0,
        le=1,
        description="Share of its largest gradient so far below which a layer has converged.",
    )


class WeightNotUpdatingState(State):
    """State of `WeightNotUpdating`.

    Attributes:
        parameters: the past of each parameter, by ``name@worker``.
        computed: the order of weighted modules with a recorded output.
        nothing_lost: whether a loss is zero.
        still: consecutive records without any update.
        pace: how fast weights change.
        losses: the progress of the losses.
        held: the weights that optimizers update.
    """

    parameters: dict[str, WeightHistory] = Field(default_factory=dict)
    computed: dict[str, int] = Field(default_factory=dict)
    nothing_lost: dict[str, bool] = Field(default_factory=dict)
    still: int = 0
    pace: WeightPace = WeightPace()
    losses: dict[str, LossProgress] = Field(default_factory=dict)
    held: OptimizedWeights = OptimizedWeights()


class WeightNotUpdating(Rule[WeightNotUpdatingParams, WeightNotUpdatingState]):
    """Fires when updates are missing in one of eight ways. There is *no update* if ``rms(update) <= threshold * rms(weight)``.

    - **No update at all**: no weight of a step has an update while some gradient is alive: the optimizer is skipped, or its learning rate
      is zero. Also if no weight has ever been updated, whatever the gradients, and some loss is not zero. A gradient is alive from ``alive``
      times its own largest; below, updates of a plain optimizer round to zero because the layer has converged. Existing updates must have
      ended abruptly: a schedule that decays to zero is not a fault, unless it stays there for ``patience`` records.
    - **Decayed learning rate**: no weight changes by more than ``ran_down`` of its size in a step, at ten consecutive records and for a
      quarter of the run so far, although the fastest weight once changed by a thousand times that, gradients are alive, and the loss is
      above half of its first value: a schedule that was stepped too often. At 1e-6 ten thousand steps in one direction change a weight by
      a hundredth; schedules that end at zero reach it at the end.
    - **Too small from the start**: over ten records and fifty steps no weight has ever changed by more than ``ran_down`` of its size in a
      step, updates do not grow, gradients are alive, and the loss is above half of its first value: a learning rate that is far too small,
      or gradients that are clipped to almost zero.
    - **In no optimizer**: a weight gets gradients, is in no optimizer, and has not changed since its first record;
      `watchstep_rules.signals.update_evidence.forgotten` distinguishes it from weights that are excluded on purpose.
    - **Lost to rounding**: ``rounded`` of an update's elements are zero, although half of the gradient's are not. This happens with
      half-precision weights and a small learning rate; in other formats a gradient this small has vanished.
    - **Disconnected**: layers that require a gradient and were computed have never had one, while all later layers learn: their output is
      detached from the loss.
    - **Masked**: the gradient of a layer's weight has always been zero, although its bias and earlier layers have gradients. Zero inputs
      have the same effect from their layer on.
    - **Only vectors**: only biases and scales of weighted and normalization layers learn, and nothing of the last computed weighted layer:
      the loop that freezes some layers froze others as well. Bias tuning, which also trains the head, is not reported.

    Zero gradients at some steps are no evidence about updates at others: if one of the last eight gradients was zero, ending updates are
    not reported. Neither is deliberate freezing: parameters with ``requires_grad=False`` have no records. The threshold 1e-8 is that of
    SageMaker's WeightUpdateRatio. Vectors are judged only if there is no matrix, because the gradient of a bias before normalization is
    zero by construction.
    """

    name = "weight_not_updating"
    summary = "weights do not change although the model could learn"
    needs = Needs(
        collections=("updates", "gradients", "activations", "losses", "not_in_optimizer"),
        roles=("update", "gradient", "output", "loss", "not_in_optimizer"),
        probes=("update_ratio",),
        about=("update", "not_in_optimizer"),
    )
    version = 3
    merge = "watermark"
    usual_causes = (
        "The optimizer does not step: it is skipped, its learning rate is zero, or it has the parameters of another model.",
        "The layer gets no gradient: detach, no_grad, or it does not reach the loss.",
        "Updates are lost in half precision: they are below the resolution of the weights.",
        "A schedule decayed the learning rate to zero too early, or it is far too small, or gradients are clipped to almost zero.",
    )
    what_to_try = (
        "Check optimizer.step(), the current learning rate, and that the optimizer was created after the model was moved or replaced.",
        "Check that param.grad is not None and not zero after backward.",
        "Keep the weights in float32, with torch.amp.autocast around the forward pass.",
        "If the layer is frozen on purpose, set requires_grad=False, or exclude it with tensors: {exclude: …}.",
    )
    cannot_distinguish = (
        "A layer that is excluded from the optimizer on purpose without requires_grad=False, between layers that learn, from a forgotten layer.",
        "A layer that is detached on purpose and still requires a gradient, from one that is disconnected by mistake.",
        "A detached branch between layers that learn, from one with an output that is unused on purpose: neither is reported.",
        "An optimizer that is paused on purpose while gradients are alive, from one that is skipped.",
    )

    def evaluate(
        self,
        params: WeightNotUpdatingParams,
        state: WeightNotUpdatingState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[WeightNotUpdatingState, list[Finding]]:
        """Judge the updates of each step together."""
        block = in_training(block)
        past = Weights(**{name: getattr(state, name) for name in WeightNotUpdatingState.model_fields})
        figures = Figures.of(block)
        steps = StepsOfWeights.of(block, figures, params)
        findings = []
        for stretch in steps.stretches(past):
            if stretch.is_calm:
                steps.take_in(past, stretch)
                continue
            rows = np.arange(stretch.first, stretch.end)
            updates = past.follow(block, rows, figures)
            for row, why in _missing(params, block, figures, updates, past):
                findings.append(self._finding(params, block, row, float(figures.ratio[row]), why))
            past.move(block, figures, updates, params.threshold)
            findings.extend(self._forgotten(block, row) for row in forgotten(block, rows, past.held))
        return WeightNotUpdatingState(**vars(past)), findings

    def advice(self, finding: Finding) -> Advice:
        """The advice of `AbsentFromOptimizer` for a parameter in no optimizer."""
        if finding.role == "not_in_optimizer":
            return Advice(AbsentFromOptimizer.usual_causes, AbsentFromOptimizer.what_to_try)
        return super().advice(finding)

    def _forgotten(self, block: Block, row: int) -> Finding:
        size = float(block.statistics.abs_sum[row])
        message = (
            f"{block.info(row).name}: sum |gradient| is {size:.3g}, but the parameter is in no optimizer, "
            "and it has not changed since its first record"
        )
        return finding_at(self.name, block, row, value=size, threshold=0.0, message=message)

    def _finding(
        self, params: WeightNotUpdatingParams, block: Block, row: int, ratio: float, why: str
    ) -> Finding:
        no_update = f", no update up to {params.threshold:.3g}" if ratio <= params.threshold else ""
        message = f"{block.info(row).name} is {ratio:.3g} of the weight{no_update}: {why}"
        return finding_at(self.name, block, row, value=ratio, threshold=params.threshold, message=message)


def _missing(
    params: WeightNotUpdatingParams, block: Block, figures: Figures, updates: list[int], past: Weights
) -> list[tuple[int, str]]:
    """Rows of updates that are missing, and why."""
    if not updates:
        return []
    judged = [row for row in updates if len(block.info(row).shape) > 1] or updates
    held = [past.of(block, row) for row in judged]
    none = [figures.ratio[row] <= params.threshold for row in judged]
    past.still = past.still + 1 if all(none) else 0
    step = int(block.step[judged[0]])
    past.pace = past.pace.after(params.ran_down, step, float(max(figures.ratio[row] for row in judged)))
    if past.pace.has_run_down(step) and past.loss_is_high and any(one.is_alive(params.alive) for one in held):
        why = (
            f"once it was up to {past.pace.fastest:.2g}, since step {past.pace.since} no weight gets further"
        )
        return [(row, why) for row in judged]
    is_slow = past.pace.never_began(params.ran_down, step) and past.loss_is_high
    if is_slow and any(one.is_alive(params.alive) for one in held):
        why = f"no weight has changed by more than {past.pace.fastest:.2g} of itself at any step since step {past.pace.begun}"
        return [(row, why) for row in judged]
    if all(none):
        long = past.still >= params.patience
        if any((one.stopped or long) and one.is_alive(params.alive) for one in held):
            return [(row, "no weight changes, though there are gradients") for row in judged]
        waits = bool(past.nothing_lost) and all(past.nothing_lost.values())
        if not waits and not any(one.moved for one in past.parameters.values()):
            return [(row, "no weight has ever changed") for row in judged]
        return []
    found = _cut_off(block, judged, held, past)
    for row, one in zip(judged, held, strict=True):
        alive = one.dense and one.last >= params.alive * one.largest and block.info(row).dtype in HALF
        if alive and figures.zero[row] >= params.rounded:
            found.append((row, f"rounding loses {figures.zero[row]:.0%} of its elements"))
    return found or _masked(block, judged, none, past) or _vectors_alone(block, updates, past)


def _cut_off(
    block: Block, judged: list[int], held: list[WeightHistory], past: Weights
) -> list[tuple[int, str]]:
    learning = [
        block.info(row).order for row, one in zip(judged, held, strict=True) if one.last >= 0 or one.moved
    ]
    without = [row for row, one in zip(judged, held, strict=True) if one.last < 0 and not one.moved]
    # A layer that was never computed, as an expert without examples, is not cut off: what counts is what was.
    without = [row for row in without if block.info(row).module in past.computed]
    if not learning or any(block.info(row).order >= min(learning) for row in without):
        return []
    why = "its layer is computed, but never gets a gradient, while all after it do"
    return [(row, why) for row in without]


def _masked(block: Block, judged: list[int], none: list[bool], past: Weights) -> list[tuple[int, str]]:
    """A zero gradient is no dead layer's where its bias has one, and layers before it learn."""
    learning = [block.info(row).order for row in judged if past.of(block, row).moved]
    found = []
    for row, is_none in zip(judged, none, strict=True):
        info, held = block.info(row), past.of(block, row)
        bias = past.parameters.get(f"{info.module}.bias@{block.worker[row]}", WeightHistory())
        if is_none and is_weighted(info) and held.last == held.largest == 0 and bias.last > 0:
            found.append((row, info.order))
    first = min([*learning, *(order for _, order in found)], default=0)
    why = "its gradient has always been zero, though that of its bias is not, and layers before it get theirs"
    return [(row, why) for row, order in found if order > first]


def _vectors_alone(block: Block, updates: list[int], past: Weights) -> list[tuple[int, str]]:
    infos = [block.info(row) for row in updates]
    held = {info.module for info in infos}
    if any(len(info.shape) > 1 or not (is_weighted(info) or is_normalization(info)) for info in infos):
        return []
    if not past.computed or max(past.computed, key=lambda module: past.computed[module]) in held:
        return []
    why = f"it alone learns; of {len(past.computed)} layers that were computed none has a weight that may"
    return [(row, why) for row in updates]
