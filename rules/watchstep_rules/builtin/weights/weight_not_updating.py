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
    is_half_gain,
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
    """Fires when updates are missing in one of nine ways. There is *no update* if ``rms(update) <= threshold * rms(weight)``.

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
    - **Gains that never move**: the vectors of normalization layers in half precision get gradients, and ``rounded`` of each of their updates'
      elements have been zero since the start, while a matrix learns. Gains start at one, where the next number of bfloat16 is 0.0078 away.
      Reported after ten records and fifty steps, and not while a warm-up may still reach them: updates must not have grown in the second half of the run so far.
    - **Disconnected**: layers that require a gradient and were computed have never had one, while all later layers learn: their output is
      detached from the loss, or computed without gradients, as in a reentrant checkpoint whose inputs need none. The weights of an adapter are computed with the
      layer inside it.
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
    version = 4
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
        """Evaluate the updates of each step together."""
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
            for row, reason in _missing(params, block, figures, updates, past):
                findings.append(self._finding(params, block, row, float(figures.ratio[row]), reason))
            past.move(block, figures, updates, params.threshold)
            findings.extend(self._forgotten(block, row) for row in forgotten(block, rows, past.held))
        return WeightNotUpdatingState(**vars(past)), findings

    def advice(self, finding: Finding) -> Advice:
        """Return the advice of `AbsentFromOptimizer` for a parameter in no optimizer."""
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
        self, params: WeightNotUpdatingParams, block: Block, row: int, ratio: float, reason: str
    ) -> Finding:
        no_update = f", no update up to {params.threshold:.3g}" if ratio <= params.threshold else ""
        message = f"{block.info(row).name} is {ratio:.3g} of the weight{no_update}: {reason}"
        return finding_at(self.name, block, row, value=ratio, threshold=params.threshold, message=message)


def _missing(
    params: WeightNotUpdatingParams, block: Block, figures: Figures, updates: list[int], past: Weights
) -> list[tuple[int, str]]:
    """Return the rows of missing updates, and the reasons."""
    if not updates:
        return []
    relevant = [row for row in updates if len(block.info(row).shape) > 1] or updates
    parameters = [past.of(block, row) for row in relevant]
    no_update = [figures.ratio[row] <= params.threshold for row in relevant]
    past.still = past.still + 1 if all(no_update) else 0
    step = int(block.step[relevant[0]])
    past.pace = past.pace.after(params.ran_down, step, float(max(figures.ratio[row] for row in relevant)))
    if (
        past.pace.has_run_down(step)
        and past.loss_is_high
        and any(parameter.is_alive(params.alive) for parameter in parameters)
    ):
        reason = (
            f"once it was up to {past.pace.fastest:.2g}, since step {past.pace.since} no weight gets further"
        )
        return [(row, reason) for row in relevant]
    is_slow = past.pace.never_began(params.ran_down, step) and past.loss_is_high
    if is_slow and any(parameter.is_alive(params.alive) for parameter in parameters):
        reason = f"no weight has changed by more than {past.pace.fastest:.2g} of itself at any step since step {past.pace.begun}"
        return [(row, reason) for row in relevant]
    if all(no_update):
        is_long = past.still >= params.patience
        if any(
            (parameter.stopped or is_long) and parameter.is_alive(params.alive) for parameter in parameters
        ):
            return [(row, "no weight changes, though there are gradients") for row in relevant]
        all_losses_zero = bool(past.nothing_lost) and all(past.nothing_lost.values())
        if not all_losses_zero and not any(parameter.moved for parameter in past.parameters.values()):
            return [(row, "no weight has ever changed") for row in relevant]
        return []
    missing = _disconnected(block, relevant, parameters, past)
    for row, parameter in zip(relevant, parameters, strict=True):
        alive = (
            parameter.dense
            and parameter.last >= params.alive * parameter.largest
            and block.info(row).dtype in HALF
        )
        if alive and figures.zero[row] >= params.rounded:
            missing.append((row, f"rounding loses {figures.zero[row]:.0%} of its elements"))
    return (
        missing
        or _unmoved_gains(params, block, figures, updates, past)
        or _masked(block, relevant, no_update, past)
        or _only_vectors(block, updates, past)
    )


def _unmoved_gains(
    params: WeightNotUpdatingParams, block: Block, figures: Figures, updates: list[int], past: Weights
) -> list[tuple[int, str]]:
    step = int(block.step[updates[0]])
    if not past.pace.is_past_warm_up(step):
        return []
    reason = "rounding has lost all of its updates since the start: its gain keeps its first values"
    return [
        (row, reason)
        for row in updates
        if is_half_gain(block.info(row))
        and figures.zero[row] >= params.rounded
        and (parameter := past.of(block, row)).is_alive(params.alive)
        and parameter.dense
        and not parameter.moved
    ]


def _disconnected(
    block: Block, relevant: list[int], parameters: list[WeightHistory], past: Weights
) -> list[tuple[int, str]]:
    learning = [
        block.info(row).order
        for row, parameter in zip(relevant, parameters, strict=True)
        if parameter.last >= 0 or parameter.moved
    ]
    disconnected = [
        row
        for row, parameter in zip(relevant, parameters, strict=True)
        if parameter.last < 0 and not parameter.moved
    ]
    # A layer that was never computed, such as an expert without examples, is not disconnected. An adapter's own weights are computed with the layer in it.
    disconnected = [row for row in disconnected if _is_computed(block.info(row).module, past)]
    if not learning or any(block.info(row).order >= min(learning) for row in disconnected):
        return []
    reason = "its layer is computed, but never gets a gradient, while all after it do"
    return [(row, reason) for row in disconnected]


def _is_computed(module: str, past: Weights) -> bool:
    return any(inner == module or inner.startswith(f"{module}.") for inner in past.computed)


def _masked(block: Block, relevant: list[int], no_update: list[bool], past: Weights) -> list[tuple[int, str]]:
    """Return the layers with a masked weight gradient: it is always zero, but the bias has a gradient and earlier layers learn."""
    learning = [block.info(row).order for row in relevant if past.of(block, row).moved]
    masked = []
    for row, is_missing in zip(relevant, no_update, strict=True):
        info, parameter = block.info(row), past.of(block, row)
        bias = past.parameters.get(f"{info.module}.bias@{block.worker[row]}", WeightHistory())
        if is_missing and is_weighted(info) and parameter.last == parameter.largest == 0 and bias.last > 0:
            masked.append((row, info.order))
    first = min([*learning, *(order for _, order in masked)], default=0)
    reason = (
        "its gradient has always been zero, though that of its bias is not, and layers before it get theirs"
    )
    return [(row, reason) for row, order in masked if order > first]


def _only_vectors(block: Block, updates: list[int], past: Weights) -> list[tuple[int, str]]:
    infos = [block.info(row) for row in updates]
    modules = {info.module for info in infos}
    if any(len(info.shape) > 1 or not (is_weighted(info) or is_normalization(info)) for info in infos):
        return []
    if not past.computed or max(past.computed, key=lambda module: past.computed[module]) in modules:
        return []
    reason = f"it alone learns; of {len(past.computed)} layers that were computed none has a weight that may"
    return [(row, reason) for row in updates]
