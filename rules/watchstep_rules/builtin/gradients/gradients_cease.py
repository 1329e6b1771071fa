"""Layers that learned and no longer get a gradient, while later layers do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.tensors import TensorInfo
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.series import in_training, whole_steps
from watchstep_rules.signals.tensor_selection import is_weighted, rows_where


class GradientsCeaseParams(Params):
    """Parameters of `GradientsCease`."""

    records: int = Field(4, ge=1, le=1000, description="Consecutive records without a gradient.")
    warmup: int = Field(8, ge=1, le=1000, description="Consecutive records with a gradient before them.")


class Flow(NamedTuple):
    """The gradients of one weight.

    Attributes:
        order: the order of its layer.
        kin: the collections of its gradient; gradients in the same collections are measured together.
        alive: consecutive records with a gradient before those without one, counted up to ``warmup``.
        without: consecutive records without a gradient.
        computed: whether its layer has had an output since.
    """

    order: int
    kin: str
    alive: int = 0
    without: int = 0
    computed: bool = False


class GradientsCeaseState(State):
    """State of `GradientsCease`: the gradients of each weight, by ``name@worker``."""

    weights: dict[str, Flow] = Field(default_factory=dict)


class GradientsCease(Rule[GradientsCeaseParams, GradientsCeaseState]):
    """Fires when the first layers of a model had a gradient at ``warmup`` consecutive records and have none at ``records`` records.

    A record without a gradient is a step at which the optimizer updated the weight, gradients of other weights were measured, and the
    gradient of this weight was missing or zero. The layer must still be computed, and all weighted layers up to it must have lost their
    gradients, while later layers have one: its output is detached from the loss, or computed under ``no_grad``. Such weights do not
    change, or only by momentum and weight decay.

    ``requires_grad=False`` during the run is freezing on purpose: such a weight has no recorded update. The same applies to a separate
    optimizer that no longer steps. Layers that never had a gradient are reported by `weight_not_updating`. A layer between others that
    learn may be skipped by design, as in stochastic depth, or as an expert without examples. Inputs of zero also remove the first
    weight's gradient, and are detected by it.
    """

    name = "gradients_cease"
    summary = "the first layers learned and no longer get a gradient, while later layers do"
    needs = Needs(
        collections=("gradients", "updates", "activations"),
        roles=("gradient", "update", "output"),
        about=("update",),
    )
    merge = "watermark"
    usual_causes = (
        "The encoder is computed under torch.no_grad() or in inference mode from some step on.",
        "Its output is detached, or converted to numbers and back.",
        "The inputs have become zero, so that the first weight has no gradient, although its bias may have one.",
        "A condition on the step or epoch selects a branch without gradients.",
    )
    what_to_try = (
        "Look at what the program does differently from the step at which it began.",
        "Check requires_grad and grad_fn of the encoder's output, and the inputs.",
        "Freeze on purpose with requires_grad_(False), which this rule does not report.",
    )
    cannot_distinguish = (
        "A program that detaches its encoder on purpose from step N on, from one that does so by mistake.",
        "A detached branch between layers that learn, from one with an output that is unused on purpose: neither is reported.",
    )

    def evaluate(
        self, params: GradientsCeaseParams, state: GradientsCeaseState, context: Block, block: Block, now: int
    ) -> tuple[GradientsCeaseState, list[Finding]]:
        """Follow the gradients of each weight, step by step."""
        block = in_training(block)
        chosen = rows_where(block, _is_weight_of, "gradient")
        gradients = np.flatnonzero(chosen & _is_alive(block))
        if _all_flow(block, gradients, chosen, state.weights):
            return _all_alive(block, gradients, state, params.warmup), []
        weights, findings = dict(state.weights), []
        for step in _steps(block):
            for row in step.follow(block, weights, params):
                flow = weights[_name(block, row)]
                message = (
                    f"{block.info(row).name}: the layer is computed and updated, but its weight has had no gradient at {flow.without} records "
                    "in a row, as all weighted layers before it; layers after it have one"
                )
                findings.append(
                    finding_at(
                        self.name,
                        block,
                        row,
                        value=float(flow.without),
                        threshold=float(params.records),
                        message=message,
                    )
                )
        return GradientsCeaseState(weights=weights), findings


def _is_weight_of(info: TensorInfo, role: str) -> bool:
    return info.role == role and len(info.shape) > 1 and is_weighted(info)


def _is_output(info: TensorInfo) -> bool:
    return info.role == "output" and is_weighted(info)


def _is_alive(block: Block) -> NDArray[np.bool_]:
    """Whether some element of each row is not zero, or is NaN or infinite."""
    statistics = block.statistics
    alive: NDArray[np.bool_] = (statistics.abs_sum > 0) | (statistics.finite < statistics.count)
    return alive


def _name(block: Block, row: int) -> str:
    """The weight of a gradient or update row: ``name@worker``."""
    return f"{block.info(row).name.rpartition(':')[0]}@{block.worker[row]}"


def _kin(info: TensorInfo) -> str:
    return ",".join(info.collections)


def _all_flow(
    block: Block, gradients: NDArray[np.intp], chosen: NDArray[np.bool_], weights: dict[str, Flow]
) -> bool:
    """Whether every known weight has a gradient at each step of the block with gradients, so that steps need not be followed singly."""
    if any(flow.without for flow in weights.values()):
        return False
    if len(gradients) != np.count_nonzero(chosen):
        return False
    if not len(gradients):
        return not rows_where(block, _is_weight_of, "update").any()
    steps = len(np.unique(block.step[gradients]))
    names = {_name(block, row) for row in _one_of_each(block, gradients)}
    return len(gradients) == steps * len(names) and names.issuperset(weights)


def _one_of_each(block: Block, rows: NDArray[np.intp]) -> list[int]:
    """One row of each tensor and worker."""
    key = (block.tensor[rows].astype(np.int64) << 32) | block.worker[rows]
    first: list[int] = rows[np.unique(key, return_index=True)[1]].tolist()
    return first


def _all_alive(
    block: Block, gradients: NDArray[np.intp], state: GradientsCeaseState, warmup: int
) -> GradientsCeaseState:
    """The state after a block with a gradient of each weight at each step."""
    steps = len(np.unique(block.step[gradients]))
    changed = {}
    for row in _one_of_each(block, gradients):
        name, info = _name(block, row), block.info(row)
        before = state.weights.get(name)
        alive = min(warmup, steps + (before.alive if before is not None else 0))
        if before is None or before.alive != alive or before.kin != _kin(info):
            changed[name] = Flow(info.order, _kin(info), alive)
    return GradientsCeaseState(weights={**state.weights, **changed}) if changed else state


def _steps(block: Block) -> Iterator[_Step]:
    """The steps of each worker, ascending."""
    gradient, update = (rows_where(block, _is_weight_of, role) for role in ("gradient", "update"))
    output = rows_where(block, _is_output)
    for rows in whole_steps(block):
        for worker in np.unique(block.worker[rows]).tolist():
            own = rows[block.worker[rows] == worker]
            yield _Step(own[gradient[own]].tolist(), own[update[own]].tolist(), own[output[own]].tolist())


class _Step(NamedTuple):
    """Rows of weighted layers at one step of one worker: of gradients, of updates, and of outputs."""

    gradients: list[int]
    updates: list[int]
    outputs: list[int]

    def follow(self, block: Block, weights: dict[str, Flow], params: GradientsCeaseParams) -> list[int]:
        """Add the step; returns update rows of weights with gradients that have ceased."""
        is_alive = _is_alive(block)
        with_gradient = {_name(block, row): block.info(row) for row in self.gradients if is_alive[row]}
        for name, info in with_gradient.items():
            before = weights.get(name)
            alive = min(params.warmup, before.alive + 1) if before is not None and not before.without else 1
            weights[name] = Flow(info.order, _kin(info), alive)
        self._note_outputs(block, weights)
        measured = {_kin(block.info(row)) for row in self.gradients}
        ceased = []
        for row in self.updates:
            name = _name(block, row)
            before = weights.get(name)
            if before is not None and name not in with_gradient and before.kin in measured:
                weights[name] = before._replace(without=min(before.without + 1, 1000))
                ceased.append((row, weights[name]))
        first = min((info.order for info in with_gradient.values()), default=-1)
        # An expert without examples is not computed and is no evidence about other layers.
        computed = [flow.order for _, flow in ceased if flow.computed]
        if not computed or max(computed) >= first:
            return []
        return [
            row
            for row, flow in ceased
            if flow.without >= params.records and flow.alive >= params.warmup and flow.computed
        ]

    def _note_outputs(self, block: Block, weights: dict[str, Flow]) -> None:
        if not any(flow.without and not flow.computed for flow in weights.values()):
            return
        modules = {f"{block.info(row).module}@{block.worker[row]}" for row in self.outputs}
        for name, flow in weights.items():
            parameter, _, worker = name.rpartition("@")
            if flow.without and not flow.computed and f"{parameter.rpartition('.')[0]}@{worker}" in modules:
                weights[name] = flow._replace(computed=True)
