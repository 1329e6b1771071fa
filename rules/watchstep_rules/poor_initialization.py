"""Weights that a training should not begin with: all the same, far too large, or far too small."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.block import Block
from watchstep.derived import rms, std
from watchstep.statistics import Floats
from watchstep.tensors import TensorInfo
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.figures.layers import is_normalisation, is_weighted
from watchstep_rules.figures.steps import whole_steps
from watchstep_rules.finding import Finding, finding_at

_SURE = 2.0  # spread of logits, from which on softmax is about as sure as it may be wrong
_LOUD = 3.0  # root mean square of inputs; UMLAUT (CHI 2021) warns of inputs beyond -1 to 1
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
    spread: float = Field(
        100.0,
        gt=1,
        description="Spread of a hidden layer's output over that of another, from which on it is a fault.",
    )
    above_guess: float = Field(
        3.0, gt=1, description="First loss over that of a guess, from which on large weights are a fault."
    )


class PoorInitializationState(State):
    """Whether the first step has been judged."""

    judged: bool = False


class PoorInitialization(Rule[PoorInitializationParams, PoorInitializationState]):
    """Fires at the first step when its weights are of one of five kinds.

    - **All the same**: a layer's weights are one number other than zero, and the next layer's too; or all layers'
      weights are constant, zero or not. Units of such a layer stay equal for ever (Goodfellow et al. 2016, 8.4). One
      layer alone is no fault, if it is zero: last layers, residual branches and adapters begin so on purpose.
    - **Too large**: in two layers or more ``gain = rms(W) * sqrt(fan_in)`` is at least 3, and over these
      ``prod(gain / 1.5) >= 10``. A signal keeps its size at a gain of 1 (Glorot and Bengio 2010) to 1.41 (He et al.
      2015); PyTorch's own is 0.58.
    - **Too small**: in two hidden layers or more the gain is below 0.1, and over these ``prod(gain / 0.5) < 1e-3``,
      and no weight's gradient is a hundredth of the largest bias's: the input has hardly any say.
    - **The signal dies or runs away**: the spread (standard deviation) of the last hidden layer's output is ``spread`` times
      less than the first's, and gains in between are below 0.5; or some later layer's is as many times more. Layers whose output is
      zero are left out. SageMaker's PoorWeightInitialization takes a ratio of variances of 10, which default
      initialisation has.
    - **Too sure**: the first loss is ``above_guess`` times the logarithm of how many classes the last layer tells apart, its
      outputs spread by 2 or more and can make such a loss, and a layer (or an embedding that the last layer shares) has a gain of at least 3: it
      is sure before it has learnt, and the first steps only take that back (Karpathy, "A Recipe for Training Neural
      Networks", 2019: verify the loss at initialisation). Inputs with a root mean square above 3 are another fault, and
      so are measured targets; a model that was trained on other labels is sure too, but has no such gains.

    All but the first and the last leave out models with normalisation, which takes any scale out again. A layer is linear,
    convolutional or recurrent; its weights are matrices with at least two inputs and two outputs. Scales, biases,
    embeddings and tables are none. Weights that a checkpoint brought count like others.
    """

    name = "poor_initialization"
    summary = "weights begin all the same, far too large, or far too small"
    version = 2
    needs = Needs(
        collections=("weights", "gradients", "activations", "inputs", "losses", "labels"),
        roles=("weight", "gradient", "output", "input", "loss", "label"),
        probes=("class_counts",),
        about=("weight", "output"),
    )
    merge = "sealed"
    usual_causes = (
        "A hand-written initialisation sets all weights alike, or with a fixed deviation at any width.",
        "Weights were loaded or scaled by mistake.",
        "The gain is that of another activation.",
    )
    what_to_try = (
        "Initialise by fan-in: torch.nn.init.kaiming_normal_ for ReLU, xavier_normal_ for tanh (He et al., 2015; Glorot, 2010).",
        "Leave weights random; only biases and last layers of branches may begin at zero.",
        "Put normalisation after layers whose scale is uncertain.",
    )
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
        sure = _too_sure(params, block, rows, weights, size)
        if sure is not None:
            return [self._sure(params, block, *sure)]
        if any(is_normalisation(block.info(row)) for row in weights):
            return []
        large = [row for row in layers if gain[row] >= params.large]
        if len(large) > 1 and prod(gain[row] / 1.5 for row in large) >= params.growth:
            return [self._scale(params.large, block, row, gain[row], "at least") for row in large]
        small = [row for row in layers[:-1] if row not in alike and gain[row] < params.small]
        faint = len(small) > 1 and prod(gain[row] / 0.5 for row in small) < params.shrinkage
        if faint and _input_has_no_say(block, rows, size):
            return [self._scale(params.small, block, row, gain[row], "below") for row in small]
        return self._signal(params, block, rows, [gain[row] for row in layers])

    def _signal(
        self, params: PoorInitializationParams, block: Block, rows: NDArray[np.intp], gains: list[float]
    ) -> list[Finding]:
        spreads = _spreads(block, rows)
        if len(spreads) < 3:
            return []
        first, last = spreads[0][1], spreads[-2][1]
        if last * params.spread <= first and sum(gain < 0.5 for gain in gains) > 1:
            row, share = spreads[-2][0], last / first
            message = (
                f"the output of {block.info(row).name} spreads {share:.2g} times as far as the first layer's"
            )
            return [
                finding_at(self.name, block, row, value=share, threshold=1 / params.spread, message=message)
            ]
        row, widest = max(spreads[1:], key=lambda each: each[1])
        if widest >= params.spread * first:
            message = f"the output of {block.info(row).name} spreads {widest / first:.3g} times as far as the first layer's"
            return [
                finding_at(
                    self.name, block, row, value=widest / first, threshold=params.spread, message=message
                )
            ]
        return []

    def _sure(
        self, params: PoorInitializationParams, block: Block, row: int, loss: float, guess: float
    ) -> Finding:
        message = f"{block.info(row).name} begins at {loss:.3g}, a guess among its classes gives {guess:.3g}, and weights are large"
        return finding_at(
            self.name, block, row, value=loss, threshold=params.above_guess * guess, message=message
        )

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


def _spreads(block: Block, rows: NDArray[np.intp]) -> list[tuple[int, float]]:
    """The standard deviation of each weighted layer's output that is not constant, in the order of layers."""
    held: dict[str, tuple[int, int, float]] = {}
    spread = std(block.statistics)
    for row in map(int, rows):
        info = block.info(row)
        if info.role == "output" and is_weighted(info) and spread[row] > 0:
            order, _, most = held.get(info.module, (info.order, row, 0.0))
            held[info.module] = (order, row, max(most, float(spread[row])))
    return [(row, most) for _, row, most in sorted(held.values())]


def _too_sure(
    params: PoorInitializationParams, block: Block, rows: NDArray[np.intp], weights: list[int], size: Floats
) -> tuple[int, float, float] | None:
    """The row of a first loss that is far above that of a guess, the loss, and the guess's; None where it is not."""
    infos = {row: block.info(row) for row in map(int, rows)}
    spreads = _spreads(block, rows)
    losses = [row for row, info in infos.items() if info.role == "loss"]
    if not spreads or len(losses) != 1:
        return None
    held, last, loss = block.statistics, spreads[-1][0], losses[0]
    classes = infos[last].shape[-1] if infos[last].shape else 0
    value, reach = float(held.mean[loss]), float(held.max[last] - held.min[last])
    guess = float(np.log(max(2, classes)))
    if not params.above_guess * guess <= value <= reach + guess or spreads[-1][1] < _SURE:
        return None
    loud = any(
        info.role == "input" and "float" in info.dtype and size[row] > _LOUD for row, info in infos.items()
    )
    if loud or _labels_are_measured(block, infos):
        return None
    shared = {classes} if not any(infos[row].module == infos[last].module for row in weights) else set()
    large = any(
        size[row] * prod(infos[row].shape[1:]) ** 0.5 >= params.large
        for row in weights
        if _fan_in(infos[row]) or (len(infos[row].shape) == 2 and infos[row].shape[0] in shared)
    )
    return (loss, value, guess) if large else None


def _labels_are_measured(block: Block, infos: dict[int, TensorInfo]) -> bool:
    counted = block.probes.get("classes", np.full(len(block), np.nan))
    return any(
        info.role == "label" and "float" in info.dtype and not np.isfinite(counted[row])
        for row, info in infos.items()
    )
