"""Weights that a training should not begin with: all the same, far too large, or far too small."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.block import Block
from watchstep.derived import rms
from watchstep.statistics import Floats
from watchstep.tensors import TensorInfo
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.finding import Finding, finding_at
from watchstep_rules.layers import is_normalisation, is_weighted
from watchstep_rules.steps import whole_steps

_CONSTANT = 1e-10  # m2 over the sum of squares: what float32 leaves of a constant's


class PoorInitializationParams(Params):
    """Parameters of `PoorInitialization`."""

    large: float = Field(3.0, gt=1, description="Gain of a layer, from which on it is large.")
    growth: float = Field(
        10.0, gt=1, description="Product over large layers of gain / 1.5, from which on it is a fault."
    )
    small: float = Field(0.1, gt=0, lt=1, description="Gain of a hidden layer, below which it is small.")
    shrinkage: float = Field(
        1e-3, gt=0, lt=1, description="Product over small layers of gain / 0.5, below which it is a fault."
    )


class PoorInitializationState(State):
    """Whether the first step has been judged."""

    judged: bool = False


class PoorInitialization(Rule[PoorInitializationParams, PoorInitializationState]):
    """Fires at the first step when its weights are of one of three kinds.

    - **All the same**: a layer's weights are one number other than zero, and the next layer's too; or all layers'
      weights are constant, zero or not. Units of such a layer stay equal for ever (Goodfellow et al. 2016, 8.4). One
      layer alone is no fault, if it is zero: last layers, residual branches and adapters begin so on purpose.
    - **Too large**: in two layers or more ``gain = rms(W) * sqrt(fan_in)`` is at least 3, and over these
      ``prod(gain / 1.5) >= 10``. A signal keeps its size at a gain of 1 (Glorot and Bengio 2010) to 1.41 (He et al.
      2015); PyTorch's own is 0.58.
    - **Too small**: in two hidden layers or more the gain is below 0.1, and over these ``prod(gain / 0.5) < 1e-3``,
      and no weight's gradient is a hundredth of the largest bias's: the input has hardly any say.

    The last two leave out models with normalisation, which takes any scale out again. A layer is linear,
    convolutional or recurrent; its weights are matrices with at least two inputs and two outputs. Scales, biases,
    embeddings and tables are none. Weights that a checkpoint brought count like others.
    """

    name = "poor_initialization"
    summary = "weights begin all the same, far too large, or far too small"
    needs = Needs(collections=("weights", "gradients"), roles=("weight", "gradient"))
    merge = "sealed"
    params_type = PoorInitializationParams
    state_type = PoorInitializationState

    def evaluate(
        self,
        params: PoorInitializationParams,
        state: PoorInitializationState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[PoorInitializationState, list[Finding]]:
        """Judge the first step in train mode that has weights."""
        if state.judged:
            return state, []
        for rows in whole_steps(block):
            weights = [int(row) for row in rows if block.info(int(row)).role == "weight"]
            if weights:
                return PoorInitializationState(judged=True), self._judge(params, block, rows, weights)
        return state, []

    def _judge(
        self, params: PoorInitializationParams, block: Block, rows: NDArray[np.intp], weights: list[int]
    ) -> list[Finding]:
        held = block.statistics
        layers = sorted(
            (row for row in weights if _fan_in(block.info(row)) and held.finite[row] > 1),
            key=lambda row: (block.info(row).order, row),
        )
        size = rms(held)
        gain = {row: float(size[row]) * _fan_in(block.info(row)) ** 0.5 for row in layers}
        alike = {row for row in layers if held.m2[row] <= _CONSTANT * held.square_sum[row]}
        if same := _all_the_same(layers, alike, gain):
            return [self._same(block, row) for row in same]
        if any(is_normalisation(block.info(row)) for row in weights):
            return []
        large = [row for row in layers if gain[row] >= params.large]
        if len(large) > 1 and prod(gain[row] / 1.5 for row in large) >= params.growth:
            return [self._scale(params.large, block, row, gain[row], "at least") for row in large]
        small = [row for row in layers[:-1] if row not in alike and gain[row] < params.small]
        faint = len(small) > 1 and prod(gain[row] / 0.5 for row in small) < params.shrinkage
        if faint and _input_has_no_say(block, rows, size):
            return [self._scale(params.small, block, row, gain[row], "below") for row in small]
        return []

    def _same(self, block: Block, row: int) -> Finding:
        info = block.info(row)
        number = float(block.statistics.mean[row])
        message = f"all {block.statistics.count[row]} elements of {info.name} begin as {number:.3g}: its units stay equal"
        return finding_at(self.name, block, row, value=number, threshold=0.0, message=message)

    def _scale(self, limit: float, block: Block, row: int, gain: float, word: str) -> Finding:
        message = (
            f"{block.info(row).name} begins with a gain rms * sqrt(fan in) of {gain:.2g}, {word} {limit:g}, as do others; "
            "1 to 1.41 keeps a signal's size"
        )
        return finding_at(self.name, block, row, value=gain, threshold=limit, message=message)


def _fan_in(info: TensorInfo) -> int:
    """Inputs of each unit of a layer; 0 for what is no layer, or has one input or one output."""
    shape = info.shape
    if not is_weighted(info) or len(shape) < 2 or shape[0] < 2:
        return 0
    inputs = prod(shape[1:])
    return inputs if inputs > 1 else 0


def _all_the_same(layers: Sequence[int], alike: set[int], gain: dict[int, float]) -> list[int]:
    if len(layers) > 1 and alike == set(layers):
        return list(layers)
    return [
        row for row, after in pairwise(layers) if {row, after} <= alike and gain[row] > 0 and gain[after] > 0
    ]


def _input_has_no_say(block: Block, rows: NDArray[np.intp], size: Floats) -> bool:
    """Whether all gradients of weights are small beside that of a bias, which is the error that comes back."""
    infos = [
        (block.info(int(row)), float(size[row])) for row in rows if block.info(int(row)).role == "gradient"
    ]
    errors = [one for info, one in infos if len(info.shape) == 1]
    weights = [one for info, one in infos if len(info.shape) > 1]
    return not errors or max(weights, default=0.0) < 0.01 * max(errors)
