"""A layer whose gradient is close to nothing while others still learn, or a training that never had one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block, sort_key, view
from watchstep.format.statistics import Floats, StatisticsBatch
from watchstep.format.tensors import MODES, TensorInfo
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.loss_progress import LossProgress, follow_loss
from watchstep_rules.signals.series import SeriesRows, step_numbers
from watchstep_rules.signals.tensor_selection import kind_of_expert, rows_where

_NOTHING = 1e-6  # of a loss of about 1 it is what float32 rounds away
_FIRST = 2.0  # times its first size a gradient may have without being one that grows
_STATE, _INPUT = "weight_hh", "weight_ih"  # of PyTorch's recurrent layers and cells
_NEAR = 0.1  # share of the limit from which on a size is near to it


class VanishingGradientParams(Params):
    """Parameters of `VanishingGradient`."""

    threshold: float = Field(
        1e-7,
        gt=0,
        description="Mean magnitude of the non-zero elements below which a gradient counts as vanished.",
    )
    relative: float = Field(
        1e-3,
        gt=0,
        le=1,
        description="… and it is less than this share of the largest layer's in the same step.",
    )
    converged: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="Share of its first value at which a loss has converged: gradients may vanish.",
    )
    settling: int = Field(
        50,
        ge=0,
        description="Steps after the first record through which a size must be below a tenth of the limit.",
    )
    min_dimensions: int = Field(2, ge=0, description="Judge parameters with at least so many dimensions.")


class VanishingGradientState(State):
    """The largest size so far: of any layer's gradient, by mode, and of each, by ``tensor@worker/mode``; and the losses so far.

    Of each layer it is twice its first size at least. ``began``: step of the first record, None before it.
    """

    largest: dict[str, float] = Field(default_factory=dict)
    series: dict[str, float] = Field(default_factory=dict)
    losses: dict[str, LossProgress] = Field(default_factory=dict)
    began: int | None = None


class VanishingGradient(Rule[VanishingGradientParams, VanishingGradientState]):
    """Fires when a layer's gradient has a ``size`` that meets all of these.

    ``size < threshold``, ``size < relative * max over layers of size``, ``size <=`` the layer's largest before, or twice its
    first.

    ``size`` is the mean of ``|g|`` over the elements that are not zero: an embedding of which a batch touches few rows
    is as large as what these rows get. The first test and its 1e-7 are SageMaker's VanishingGradient. The second tells
    a layer that starves from a training that has converged, where all gradients are small together; its 1e-3 is the
    first-to-last-layer ratio of AutoTrainer (Zhang et al., ICSE 2021). The third leaves alone a layer that wakes up,
    whose gradient grows from record to record (zero-initialised branches while the learning rate warms up); twice the
    first is what batches make of a gradient that does not grow.

    In the first ``settling`` steps ``size`` must be below a tenth of the limit: queries and keys of attention begin
    with hardly any gradient, since small weights make attention uniform, and it grows by orders of magnitude once the
    learning rate has warmed up.

    It also fires for every layer while no layer has ever had a size of ``threshold * relative``: such a training has
    not converged, it never began. That is 1e-10, a hundredth of the epsilon that Adam adds (Kingma and Ba, 2015).

    Nothing is said while a loss has come down to ``converged`` of its first values, or all losses are below 1e-6 (as those of an agent
    are that has not met a reward, or of a copy that is distilled from itself): small gradients are then what there is to learn. AutoTrainer asks for an accuracy
    below 0.6 in their place; a twentieth is where a classifier of two classes is nearly always right and sure.

    An expert of a mixture that no example of the step goes to is left alone: the gradient of ``….experts.3.….weight`` is zero
    everywhere, and that of the same weight of another expert is not.

    The weight of a recurrent layer's state is left alone where its gradient is zero everywhere and that of its input is not: the state was empty,
    as in a sequence of one step.

    Vectors are left out: the gradient of a bias before batch normalisation, or of a key bias in attention, is zero by
    construction.
    """

    name = "vanishing_gradient"
    version = 4
    summary = "a layer's gradient is close to nothing while others still learn"
    needs = Needs(collections=("gradients", "losses"), roles=("gradient", "loss"), about=("gradient",))
    merge = "sealed"
    usual_causes = (
        "Sigmoids or tanhs in a deep stack shrink the gradient at each layer.",
        "Weights began too small for the depth.",
        "Units before this layer are saturated or dead, so nothing passes back.",
        "The layer is cut off: detach, no_grad, or its output is not used by the loss.",
    )
    what_to_try = (
        "Use ReLU-like activations, residual connections or normalisation.",
        "Initialise by fan-in with the activation's gain: torch.nn.init.kaiming_normal_ or xavier_normal_.",
        "Look at the outputs of the layers between this one and the loss; record the collection activations if this run does not.",
        "Check that the layer's output reaches the loss; look for detach and torch.no_grad.",
    )
    cannot_distinguish = (
        "A layer that is cut off on purpose and still has gradients next to nothing, from one that starves.",
        "A term of the loss whose weight is as small as that, from one that does not reach its layers.",
    )

    def evaluate(
        self,
        params: VanishingGradientParams,
        state: VanishingGradientState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[VanishingGradientState, list[Finding]]:
        """Judge each step's layers against each other, on whatever worker they are."""
        wide = rows_where(block, _is_judged, params.min_dimensions)
        judged = view(block, np.flatnonzero(wide & (block.statistics.finite > 0)))
        losses, at_rest = _at_rest(params, state.losses, block)
        if not len(judged):
            return state.model_copy(update={"losses": losses}), []
        size = _size(judged.statistics)
        series = SeriesRows.of(judged, by_mode=True)
        kept, _, before = _so_far(state.series, series.names, series.rows(), size, least=_FIRST)
        _, first, step = np.unique(sort_key(judged.mode, judged.step), return_index=True, return_inverse=True)
        mode = judged.mode[first]
        largest = np.zeros(len(mode))
        np.maximum.at(largest, step, size)
        modes = np.unique(mode).tolist()
        of_mode = [np.flatnonzero(mode == one) for one in modes]
        overall, ever, _ = _so_far(state.largest, [MODES[one] for one in modes], of_mode, largest)
        floor = params.threshold * params.relative
        never = (ever < floor)[step]
        waits = np.isin(judged.step, at_rest)
        limit = np.where(never, floor, np.minimum(params.threshold, params.relative * largest[step]))
        began = int(judged.step.min()) if state.began is None else state.began
        settles = (judged.step < began + params.settling) & ~never
        limit = np.where(settles, _NEAR * limit, limit)
        found = np.flatnonzero((size < limit) & (size <= before) & ~waits)
        starved = _of_starved_experts(judged, found, size, step) if len(found) else set()
        starved |= _of_empty_states(judged, found, size, step) if len(found) else set()
        return VanishingGradientState(largest=overall, series=kept, losses=losses, began=began), [
            self._finding(judged, int(row), float(size[row]), float(limit[row]), never=bool(never[row]))
            for row in found
            if int(row) not in starved
        ]

    def _finding(self, block: Block, row: int, size: float, limit: float, *, never: bool) -> Finding:
        others = "and no layer has learnt yet" if never else "while other layers learn"
        message = f"mean |gradient| of {block.info(row).name} is {size:.3g}, below {limit:.3g}, {others}"
        return finding_at(self.name, block, row, value=size, threshold=limit, message=message)


def _is_judged(info: TensorInfo, least: int) -> bool:
    return info.role == "gradient" and len(info.shape) >= least


def _of_starved_experts(
    block: Block, found: NDArray[np.intp], size: Floats, step: NDArray[np.intp]
) -> set[int]:
    """Those among found rows that are zero, while the same weight of another expert has a gradient at that step."""
    kinds = {row: kind_of_expert(block.info(row).name) for row in found[size[found] == 0].tolist()}
    kinds = {row: kind for row, kind in kinds.items() if kind}
    if not kinds:
        return set()
    wanted = set(kinds.values())
    of_tensor = [kind_of_expert(info.name) for info in block.catalogue]
    learns = {
        (int(step[row]), of_tensor[block.tensor[row]], block.info(row).shape)
        for row in np.flatnonzero(size > 0).tolist()
        if of_tensor[block.tensor[row]] in wanted
    }
    return {row for row, kind in kinds.items() if (int(step[row]), kind, block.info(row).shape) in learns}


def _of_empty_states(block: Block, found: NDArray[np.intp], size: Floats, step: NDArray[np.intp]) -> set[int]:
    """Those among found rows that are zero and a recurrent state's weights, while the input's weights have a gradient at that step."""
    names = {row: block.info(row).name for row in found[size[found] == 0].tolist()}
    wanted = {row: name.replace(_STATE, _INPUT) for row, name in names.items() if _STATE in name}
    if not wanted:
        return set()
    chosen = set(wanted.values())
    of_input = np.array([info.name in chosen for info in block.catalogue], np.bool_)[block.tensor]
    learns = {
        (int(step[row]), int(block.worker[row]), block.info(row).name)
        for row in np.flatnonzero(of_input & (size > 0)).tolist()
    }
    return {row for row, name in wanted.items() if (int(step[row]), int(block.worker[row]), name) in learns}


def _at_rest(
    params: VanishingGradientParams, kept: dict[str, LossProgress], block: Block
) -> tuple[dict[str, LossProgress], NDArray[np.int64]]:
    """The losses afterwards, and the steps at which one has converged, or all are next to nothing."""
    if not len(block):
        return kept, np.empty(0, np.int64)
    order = np.argsort(block.step, kind="stable")
    ordered = block if bool((order[1:] > order[:-1]).all()) else view(block, order)
    numbers = step_numbers(ordered)
    losses, courses = follow_loss(kept, ordered, numbers)
    rests = courses.any_converged(params.converged)
    if courses.low:
        rests |= courses.known & (
            np.max([np.where(np.isinf(low), 0.0, low) for low in courses.low], axis=0) < _NOTHING
        )
    return losses, np.unique(ordered.step)[rests]


def _size(statistics: StatisticsBatch) -> Floats:
    """Mean magnitude of the finite elements that are not zero; zero where all are."""
    nonzero = (statistics.finite - statistics.zero).astype(np.float64)
    return statistics.abs_sum / np.maximum(nonzero, 1)


def _so_far(
    kept: dict[str, float],
    names: list[str],
    places: list[NDArray[np.intp]],
    values: Floats,
    least: float = 0.0,
) -> tuple[dict[str, float], Floats, Floats]:
    """The largest value of each name so far: to be kept, up to and with each place, and before each place.

    That of a name without any counts as ``least`` times its first value.
    """
    kept = dict(kept)
    including, before = np.empty(len(values)), np.empty(len(values))
    for name, rows in zip(names, places, strict=True):
        running = np.maximum.accumulate(
            np.concatenate([[kept.get(name, least * values[rows[0]])], values[rows]])
        )
        before[rows], including[rows] = running[:-1], running[1:]
        kept[name] = float(running[-1])
    return kept, including, before
