"""Unsuitable initial weights: all equal, far too large, or far too small."""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.statistics import Floats, rms, std
from watchstep.format.tensors import TensorInfo
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.tensor_selection import is_normalization, is_weighted

_OVERCONFIDENT = 2.0  # spread of logits at which softmax is overconfident
_LARGE_INPUTS = 3.0  # rms of inputs; UMLAUT (CHI 2021) warns of inputs outside -1 to 1
_CONSTANT = 1e-10  # m2 over the sum of squares of a constant, after float32 rounding


class PoorInitializationParams(Params):
    """Parameters of `PoorInitialization`."""

    large: float = Field(3.0, gt=1, description="Gain at which a layer is large.")
    growth: float = Field(
        10.0, gt=1, description="Product of gain / 1.5 over large layers at which it is a fault."
    )
    small: float = Field(0.1, gt=0, lt=1, description="Gain below which a hidden layer is small.")
    shrinkage: float = Field(
        1e-3, gt=0, lt=1, description="Product of gain / 0.5 over small layers below which it is a fault."
    )
    spread: float = Field(
        100.0,
        gt=1,
        description="Ratio of the output spreads of two hidden layers at which it is a fault.",
    )
    above_guess: float = Field(
        3.0,
        gt=1,
        description="Ratio of the first loss to that of a random guess at which large weights are a fault.",
    )


class PoorInitializationState(State):
    """State of `PoorInitialization`: whether the first step has been evaluated."""

    judged: bool = False


class PoorInitialization(Rule[PoorInitializationParams, PoorInitializationState]):
    """Fires at the first step if the weights have one of five faults.

    - **All equal**: a layer's weights are a constant other than zero, and so are the next layer's; or the weights of all layers are
      constant, zero or not, including layers with one input or one output. Units of such a layer remain equal forever (Goodfellow et al.
      2016, 8.4). A single layer of zeros is not a fault: last layers, residual branches and adapters start like this on purpose.
    - **Too large**: in two layers or more ``gain = rms(W) * sqrt(fan_in)`` is at least 3, and over these
      ``prod(gain / 1.5) >= 10``. A signal keeps its size at a gain of 1 (Glorot and Bengio 2010) to 1.41 (He et al.
      2015); PyTorch's own is 0.58.
    - **Too small**: in two hidden layers or more the gain is below 0.1, and over these ``prod(gain / 0.5) < 1e-3``, and no weight's gradient
      is a hundredth of the largest bias's: the input has hardly any influence.
    - **The signal vanishes or explodes**: the spread (standard deviation) of the last hidden layer's output is ``spread`` times less than
      the first's, and gains in between are below 0.5; or that of some later layer is as many times larger. Layers with an output of zero
      are ignored. SageMaker's PoorWeightInitialization uses a ratio of variances of 10, which default initialization exceeds.
    - **Overconfident**: the first loss is ``above_guess`` times the logarithm of the number of classes of the last layer, its outputs have a
      spread of 2 or more, which can cause such a loss, and a layer (or an embedding that shares the last layer's weights) has a gain of at
      least 3: the model is confident before it has learned, and the first steps only undo this (Karpathy, "A Recipe for Training Neural
      Networks", 2019: verify the loss at initialization). Inputs with a root mean square above 3 are another fault, and so are measured
      targets. A model that was trained on other labels is also confident, but has no such gains.

    Only the first and the last fault are judged in models with normalization, which removes any scale. A layer is linear, convolutional or
    recurrent; its weights are matrices with at least two inputs and two outputs, without scales, biases, embeddings and tables. Weights from
    a checkpoint are judged like others.
    """

    name = "poor_initialization"
    summary = "initial weights are all equal, far too large, or far too small"
    version = 2
    needs = Needs(
        collections=("weights", "gradients", "activations", "inputs", "losses", "labels"),
        roles=("weight", "gradient", "output", "input", "loss", "label"),
        probes=("class_counts",),
        about=("weight", "output"),
    )
    merge = "watermark"
    usual_causes = (
        "A custom initialization sets all weights equal, or uses a fixed deviation at any width.",
        "Weights were loaded or scaled by mistake.",
        "The gain is that of another activation.",
    )
    what_to_try = (
        "Initialize by fan-in: torch.nn.init.kaiming_normal_ for ReLU, xavier_normal_ for tanh (He et al., 2015; Glorot, 2010).",
        "Use random weights; only biases and last layers of branches may start at zero.",
        "Add normalization after layers of uncertain scale.",
    )
    cannot_distinguish = (
        "Large weights that a custom layer scales down in its forward pass, from weights that are too large.",
        "Large weights of a checkpoint that were trained for other labels, from an overconfident initialization.",
        "Normalization by a function or a custom module is not recognized unless its class name shows it.",
    )

    def evaluate(
        self,
        params: PoorInitializationParams,
        state: PoorInitializationState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[PoorInitializationState, list[Finding]]:
        """Evaluate the first step in train mode that has weights."""
        if state.judged:
            return state, []
        training = block.mode == 0
        weights = training & block.mask_of_tensors([info.role == "weight" for info in block.catalogue])
        if not weights.any():
            return state, []
        rows = np.flatnonzero(training & (block.step == block.step[weights].min()))
        return PoorInitializationState(judged=True), self._judge(params, _FirstStep(block, rows))

    def _judge(self, params: PoorInitializationParams, step: _FirstStep) -> list[Finding]:
        block, statistics = step.block, step.block.statistics
        weights = step.of_role("weight")
        layers = weights[(step.fan_in(weights) > 0) & (statistics.finite[weights] > 1)]
        layers = layers[np.lexsort((layers, step.order(layers)))]
        gain = step.size[layers] * np.sqrt(step.fan_in(layers))
        is_constant = statistics.m2[layers] <= _CONSTANT * statistics.square_sum[layers]
        others = weights[(step.fan_in(weights) == 0) & step.is_matrix(weights)]
        others_are_random = bool((statistics.m2[others] > _CONSTANT * statistics.square_sum[others]).any())
        equal_layers = layers[_all_the_same(is_constant, gain, others_are_random=others_are_random)]
        if len(equal_layers):
            return [self._same(block, int(row)) for row in equal_layers]
        overconfident = _overconfident_loss(params, step, weights)
        if overconfident is not None:
            return [self._sure(params, block, *overconfident)]
        if any(is_normalization(info) for info in step.infos(weights)):
            return []
        large = gain >= params.large
        if large.sum() > 1 and prod((gain[large] / 1.5).tolist()) >= params.growth:
            return self._scales(params.large, block, layers[large], gain[large], "at least")
        small = (gain < params.small) & ~is_constant
        small[-1:] = False  # the last layer may start small
        vanishes = small.sum() > 1 and prod((gain[small] / 0.5).tolist()) < params.shrinkage
        if vanishes and _input_is_small(step):
            return self._scales(params.small, block, layers[small], gain[small], "below")
        return self._signal(params, step, gain)

    def _signal(self, params: PoorInitializationParams, step: _FirstStep, gains: Floats) -> list[Finding]:
        block, spreads = step.block, step.spreads
        if len(spreads) < 3:
            return []
        first, last = spreads[0][1], spreads[-2][1]
        if last * params.spread <= first and (gains < 0.5).sum() > 1:
            row, share = spreads[-2][0], last / first
            message = (
                f"the output of {block.info(row).name} spreads {share:.2g} times as far as the first layer's"
            )
            return [
                finding_at(self.name, block, row, value=share, threshold=1 / params.spread, message=message)
            ]
        row, widest = max(spreads[1:], key=lambda entry: entry[1])
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

    def _scales(
        self, limit: float, block: Block, rows: NDArray[np.intp], gains: Floats, word: str
    ) -> list[Finding]:
        return [
            finding_at(
                self.name,
                block,
                row,
                value=gain,
                threshold=limit,
                message=f"{block.info(row).name} begins with a gain rms * sqrt(fan in) of {gain:.2g}, {word} {limit:g}, as do"
                " others; 1 to 1.41 keeps a signal's size",
            )
            for row, gain in zip(rows.tolist(), gains.tolist(), strict=True)
        ]


class _FirstStep:
    """Rows of the first step, of up to thousands of workers. Catalogue entries are evaluated once for each tensor.

    Attributes:
        block: block of the rows.
        rows: rows of the step.
        size: rms of each row of the block.
    """

    def __init__(self, block: Block, rows: NDArray[np.intp]) -> None:
        self.block = block
        self.rows = rows
        self.size = rms(block.statistics)
        self._fan_in = np.array([_fan_in(info) for info in block.catalogue], np.float64)
        self._order = np.array([info.order for info in block.catalogue], np.int64)

    def of_role(self, role: str, also: Callable[[TensorInfo], bool] = lambda _: True) -> NDArray[np.intp]:
        """Return the rows of tensors with a role that fulfil another condition."""
        chosen = [info.role == role and also(info) for info in self.block.catalogue]
        return self.rows[np.array(chosen, np.bool_)[self.block.tensor[self.rows]]]

    def fan_in(self, rows: NDArray[np.intp]) -> Floats:
        """Return `_fan_in` of each row."""
        return self._fan_in[self.block.tensor[rows]]

    def is_matrix(self, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Return whether each row belongs to the matrix of a weighted layer, including those with one input or output."""
        matrices = [is_weighted(info) and len(info.shape) > 1 for info in self.block.catalogue]
        return np.array(matrices, np.bool_)[self.block.tensor[rows]]

    def order(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return the position of each row's tensor in the model."""
        return self._order[self.block.tensor[rows]]

    def infos(self, rows: NDArray[np.intp]) -> list[TensorInfo]:
        """Return the tensors of the rows."""
        return [self.block.catalogue[index] for index in np.unique(self.block.tensor[rows])]

    @functools.cached_property
    def spreads(self) -> list[tuple[int, float]]:
        """Last row and largest standard deviation of each weighted layer's non-constant output, in the order of layers."""
        block, spread = self.block, std(self.block.statistics)
        rows = self.of_role("output", is_weighted)
        rows = rows[spread[rows] > 0]
        numbers: dict[str, int] = {}
        modules = np.array(
            [numbers.setdefault(info.module, len(numbers)) for info in block.catalogue], np.intp
        )[block.tensor[rows]]
        largest = np.zeros(len(numbers))
        np.maximum.at(largest, modules, spread[rows])
        last = dict(zip(modules.tolist(), rows.tolist(), strict=True))
        first = dict(zip(modules[::-1].tolist(), rows[::-1].tolist(), strict=True))
        entries = [
            (block.info(first[module]).order, row, float(largest[module])) for module, row in last.items()
        ]
        return [(row, widest) for _, row, widest in sorted(entries)]


def _fan_in(info: TensorInfo) -> int:
    """Return the number of inputs of each unit of a layer; 0 for other tensors, and for one input or one output."""
    shape = info.shape
    if not is_weighted(info) or len(shape) < 2 or shape[0] < 2:
        return 0
    inputs = prod(shape[1:])
    return inputs if inputs > 1 else 0


def _all_the_same(alike: NDArray[np.bool_], gain: Floats, *, others_are_random: bool) -> NDArray[np.bool_]:
    """Return which layers, in order, start at a constant like the next layer; all if all do."""
    if len(alike) > 1 and alike.all() and not others_are_random:
        return alike
    stays_equal = alike & (gain > 0)
    stays_equal[:-1] &= stays_equal[1:]
    stays_equal[-1:] = False
    return stays_equal


def _input_is_small(step: _FirstStep) -> bool:
    """Return whether all gradients of weights are small compared with that of a bias, which is the backpropagated error."""
    errors = step.size[step.of_role("gradient", lambda info: len(info.shape) == 1)]
    weights = step.size[step.of_role("gradient", lambda info: len(info.shape) > 1)]
    if not len(errors):
        return True
    # The size is NaN for gradients without finite elements, such as those of an empty shard. Ignore these.
    weight, error = np.fmax.reduce(weights, initial=np.nan), np.fmax.reduce(errors)
    return bool((weight if len(weights) else 0.0) < 0.01 * error)


def _overconfident_loss(
    params: PoorInitializationParams, step: _FirstStep, weights: NDArray[np.intp]
) -> tuple[int, float, float] | None:
    """Return the row and value of a first loss far above that of a random guess, and the loss of the guess; None if it is not."""
    block, statistics = step.block, step.block.statistics
    losses = step.of_role("loss")
    if not step.spreads or len(losses) != 1:
        return None
    (last, widest), loss = step.spreads[-1], int(losses[0])
    output = block.info(last)
    classes = output.shape[-1] if output.shape else 0
    value, output_range = float(statistics.mean[loss]), float(statistics.max[last] - statistics.min[last])
    guess = float(np.log(max(2, classes)))
    if not params.above_guess * guess <= value <= output_range + guess or widest < _OVERCONFIDENT:
        return None
    has_large_inputs = bool((step.size[step.of_role("input", _is_measured)] > _LARGE_INPUTS).any())
    if has_large_inputs or _labels_are_measured(step):
        return None
    shared = {classes} if not any(info.module == output.module for info in step.infos(weights)) else set()
    fan_in = np.array(
        [
            prod(info.shape[1:]) if _fan_in(info) or (len(info.shape) == 2 and info.shape[0] in shared) else 0
            for info in block.catalogue
        ],
        np.float64,
    )
    weights = weights[fan_in[block.tensor[weights]] > 0]
    large = bool((step.size[weights] * np.sqrt(fan_in[block.tensor[weights]]) >= params.large).any())
    return (loss, value, guess) if large else None


def _is_measured(info: TensorInfo) -> bool:
    return "float" in info.dtype


def _labels_are_measured(step: _FirstStep) -> bool:
    labels = step.of_role("label", _is_measured)
    counted = step.block.probes.get("classes")
    return bool(len(labels)) and (counted is None or not np.isfinite(counted[labels]).all())
