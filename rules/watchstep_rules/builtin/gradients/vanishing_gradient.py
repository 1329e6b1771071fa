"""A layer with a vanishing gradient while others still learn, or a training that never had gradients."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block, sort_key, view
from watchstep.format.statistics import Floats, StatisticsBatch
from watchstep.format.tensors import MODES, TensorInfo
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.loss_progress import Courses, LossProgress, follow_loss
from watchstep_rules.signals.rival_losses import Rivals, rivals
from watchstep_rules.signals.series import SeriesRows, step_numbers
from watchstep_rules.signals.tensor_selection import kind_of_expert, rows_where

_NOTHING = 1e-6  # the rounding error of float32 in a loss of about 1
_FIRST = 2.0  # up to this ratio to its first size, a gradient does not count as growing
_STATE, _INPUT = "weight_hh", "weight_ih"  # of PyTorch's recurrent layers and cells
_NEAR = 0.1  # share of the limit while trainings settle
_FALLEN = 0.01  # share of its largest size to which each gradient has fallen if a part starves


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
        description="Share of the largest layer's magnitude in the same step below which it counts as vanished; both must hold.",
    )
    converged: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="Share of its first value at which a loss has converged, so that gradients may vanish.",
    )
    settling: int = Field(
        50,
        ge=0,
        description="Steps after the first record in which a size must be below a tenth of the limit.",
    )
    starved: int = Field(
        50, ge=1, description="Steps for which a rival loss has been won before a part counts as starved."
    )
    min_dimensions: int = Field(2, ge=0, description="Fewest dimensions of the parameters to judge.")


class VanishingGradientState(State):
    """State of `VanishingGradient`.

    Attributes:
        largest: the largest size of any layer so far, by mode.
        series: the largest size of each layer so far, by ``tensor@worker/mode``; at least twice its first size.
        losses: the losses so far.
        began: the step of the first record; None before it.
        outdone: the step since which a loss is won and its rival is not learned; -1 if that is not so.
        winners: layers with a gradient at a step without the rival of a loss, as ``tensor/loss``.
    """

    largest: dict[str, float] = Field(default_factory=dict)
    series: dict[str, float] = Field(default_factory=dict)
    losses: dict[str, LossProgress] = Field(default_factory=dict)
    began: int | None = None
    outdone: int = -1
    winners: list[str] = Field(default_factory=list)


class VanishingGradient(Rule[VanishingGradientParams, VanishingGradientState]):
    """Fires when the ``size`` of a layer's gradient meets all of these conditions.

    ``size < threshold``, ``size < relative * max over layers of size``, and ``size <=`` the layer's largest size before, or twice its
    first size.

    ``size`` is the mean of ``|g|`` over the non-zero elements, so that an embedding of which a batch uses few rows has the size of these
    rows. The first condition and its 1e-7 are SageMaker's VanishingGradient. The second distinguishes a starved layer from a converged
    training, in which all gradients are small together; its 1e-3 is the first-to-last-layer ratio of AutoTrainer (Zhang et al., ICSE
    2021). The third excludes a layer that starts to learn, with a gradient that grows from record to record (zero-initialized branches
    while the learning rate warms up). A factor of two is the variation between batches of a gradient that does not grow.

    In the first ``settling`` steps ``size`` must be below a tenth of the limit: queries and keys of attention start with very small
    gradients, because small weights make attention uniform, and the gradients grow by orders of magnitude once the learning rate has
    warmed up.

    The rule also fires for every layer while no layer has ever had a size of ``threshold * relative``: such a training has not converged
    but never started. This is 1e-10, a hundredth of the epsilon that Adam adds (Kingma and Ba, 2015).

    The rule does not fire while a loss is at or below ``converged`` of its first values, or all losses are below 1e-6 (as for an agent
    without rewards so far, or a copy that is distilled from itself): little is left to learn then. AutoTrainer instead requires an
    accuracy below 0.6; at a twentieth, a classifier of two classes is nearly always right and confident.

    **Starved parts.** The gradients of a generator vanish if its discriminator tells all its outputs apart (Arjovsky and Bottou, Towards
    Principled Methods for Training GANs, 2017, theorem 2.4). The rule fires if these conditions are met for ``starved`` steps, whatever the
    size and the other conditions:

    - of two losses with a backward pass each, one is at a thousandth of its first values, and the other one is not below its own; the
      names are the recorder's own, or contain words such as ``d`` and ``g``, ``discriminator`` and ``generator``;
    - the size of each layer's gradient at the step is at most a hundredth of its largest size before.

    It names the layers without gradients at steps that do not have the second loss; all layers if there are no such steps.

    Not reported are:

    - an expert of a mixture without examples at the step: the gradient of ``….experts.3.….weight`` is zero everywhere, and that of the
      same weight of another expert is not;
    - the state weight of a recurrent layer if its gradient is zero everywhere and that of the input weight is not: the state was empty, as
      in a sequence of one step;
    - vectors: the gradient of a bias before batch normalization, or of a key bias in attention, is zero by construction.
    """

    name = "vanishing_gradient"
    version = 5
    summary = "a layer's gradient vanishes while others still learn"
    needs = Needs(collections=("gradients", "losses"), roles=("gradient", "loss"), about=("gradient",))
    merge = "watermark"
    usual_causes = (
        "Sigmoids or tanhs in a deep stack shrink the gradient at each layer.",
        "Initial weights are too small for the depth.",
        "Units after this layer are saturated or dead, so that no gradient passes back.",
        "A discriminator is far ahead of its generator, whose loss saturates.",
        "The layer is disconnected: detach, no_grad, or the loss does not use its output.",
    )
    what_to_try = (
        "Use ReLU-like activations, residual connections or normalization.",
        "Initialize by fan-in with the activation's gain: torch.nn.init.kaiming_normal_ or xavier_normal_.",
        "Look at the outputs of the layers between this one and the loss; record the collection activations if this run does not.",
        "For a generator: the loss -log D(x) in place of log(1 - D(x)), fewer or slower updates of the discriminator, noise on its inputs.",
        "Check that the layer's output reaches the loss; look for detach and torch.no_grad.",
    )
    cannot_distinguish = (
        "A layer that is disconnected on purpose and still has tiny gradients, from a starved layer.",
        "An actor with a loss of one sign that cannot fall any more, beside a critic that has learned its values, from a generator that starves.",
        "A loss term with such a small weight, from one that does not reach its layers.",
    )

    def evaluate(
        self,
        params: VanishingGradientParams,
        state: VanishingGradientState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[VanishingGradientState, list[Finding]]:
        """Compare the layers of each step with each other, over all workers."""
        wide = rows_where(block, _is_judged, params.min_dimensions)
        judged = view(block, np.flatnonzero(wide & (block.statistics.finite > 0)))
        losses, steps, courses = _follow(state.losses, block)
        at_rest = steps[_rests(params, courses)]
        rivalry = rivals(state.outdone, steps, courses)
        outdone = -1 if rivalry is None else int(rivalry.since[-1]) if len(steps) else state.outdone
        if not len(judged):
            return state.model_copy(update={"losses": losses, "outdone": outdone}), []
        size = _size(judged.statistics)
        series = SeriesRows.of(judged, by_mode=True)
        largest_by_series, _, before = _so_far(state.series, series.names, series.rows(), size, least=_FIRST)
        _, first, step = np.unique(sort_key(judged.mode, judged.step), return_index=True, return_inverse=True)
        mode = judged.mode[first]
        largest = np.zeros(len(mode))
        np.maximum.at(largest, step, size)
        modes = np.unique(mode).tolist()
        of_mode = [np.flatnonzero(mode == number) for number in modes]
        overall, ever, _ = _so_far(state.largest, [MODES[number] for number in modes], of_mode, largest)
        floor = params.threshold * params.relative
        never = (ever < floor)[step]
        waits = np.isin(judged.step, at_rest)
        limit = np.where(never, floor, np.minimum(params.threshold, params.relative * largest[step]))
        began = int(judged.step.min()) if state.began is None else state.began
        settles = (judged.step < began + params.settling) & ~never
        limit = np.where(settles, _NEAR * limit, limit)
        hits = np.flatnonzero((size < limit) & (size <= before) & ~waits)
        excluded = _of_starved_experts(judged, hits, size, step) if len(hits) else set()
        excluded |= _of_empty_states(judged, hits, size, step) if len(hits) else set()
        findings = [
            self._finding(judged, int(row), float(size[row]), float(limit[row]), never=bool(never[row]))
            for row in hits
            if int(row) not in excluded
        ]
        winners = state.winners
        if rivalry is not None:
            winners = _with_winners(winners, judged, steps, rivalry)
            has_fallen = size <= _FALLEN * before
            findings += [
                self._of_starved(judged, row, float(size[row]), float(before[row]), rivalry, steps)
                for row in _starved(params, judged, has_fallen, steps, rivalry, set(winners))
            ]
        state = VanishingGradientState(
            largest=overall,
            series=largest_by_series,
            losses=losses,
            began=began,
            outdone=outdone,
            winners=winners,
        )
        return state, findings

    def _of_starved(
        self, block: Block, row: int, size: float, before: float, rivalry: Rivals, steps: NDArray[np.int64]
    ) -> Finding:
        place = int(np.searchsorted(steps, block.step[row]))
        message = (
            f"mean |gradient| of {block.info(row).name} has fallen from {before:.3g} to {size:.3g}: since step {rivalry.since[place]}, "
            f"{rivalry.won[place]} is below a thousandth of its first values, and {rivalry.lost[place]} has not fallen"
        )
        return finding_at(self.name, block, row, value=size, threshold=_FALLEN * before, message=message)

    def _finding(self, block: Block, row: int, size: float, limit: float, *, never: bool) -> Finding:
        others = "and no layer has learned yet" if never else "while other layers learn"
        message = f"mean |gradient| of {block.info(row).name} is {size:.3g}, below {limit:.3g}, {others}"
        return finding_at(self.name, block, row, value=size, threshold=limit, message=message)


def _is_judged(info: TensorInfo, least: int) -> bool:
    return info.role == "gradient" and len(info.shape) >= least


def _of_starved_experts(
    block: Block, hits: NDArray[np.intp], size: Floats, step: NDArray[np.intp]
) -> set[int]:
    """Hits that are zero while the same weight of another expert has a gradient at that step."""
    kinds = {row: kind_of_expert(block.info(row).name) for row in hits[size[hits] == 0].tolist()}
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


def _of_empty_states(block: Block, hits: NDArray[np.intp], size: Floats, step: NDArray[np.intp]) -> set[int]:
    """Hits that are zero and recurrent state weights, while the input weights have a gradient at that step."""
    names = {row: block.info(row).name for row in hits[size[hits] == 0].tolist()}
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


def _with_winners(winners: list[str], block: Block, steps: NDArray[np.int64], rivalry: Rivals) -> list[str]:
    """Add layers with a gradient at steps at which a loss has no value of its rival, as ``tensor/loss``."""
    place = np.searchsorted(steps, block.step)
    new: set[str] = set()
    for loss, with_loser in rivalry.with_loser.items():
        tensors = np.unique(block.tensor[~with_loser[place]]).tolist()
        new.update(f"{block.catalogue[tensor].name}/{loss}" for tensor in tensors)
    return winners if new.issubset(winners) else sorted(new.union(winners))


def _starved(
    params: VanishingGradientParams,
    block: Block,
    has_fallen: NDArray[np.bool_],
    steps: NDArray[np.int64],
    rivalry: Rivals,
    winners: set[str],
) -> list[int]:
    """Rows of starved parts: at steps at which a rival has been won for long enough, and all gradients have fallen."""
    place = np.searchsorted(steps, block.step)
    since = rivalry.since[place]
    lasts = (since >= 0) & (block.step >= since + params.starved)
    if not lasts.any():
        return []
    lasts &= ~np.isin(block.step, block.step[~has_fallen])
    rows = [
        row
        for row in np.flatnonzero(lasts).tolist()
        if rivalry.with_loser[rivalry.won[place[row]]][place[row]]
    ]
    losers = [row for row in rows if f"{block.info(row).name}/{rivalry.won[place[row]]}" not in winners]
    of_loser = {int(block.step[row]) for row in losers}
    return [row for row in rows if row in losers or int(block.step[row]) not in of_loser]


def _follow(
    before: dict[str, LossProgress], block: Block
) -> tuple[dict[str, LossProgress], NDArray[np.int64], Courses]:
    """The losses after the block, its steps, and the courses of the losses over them."""
    order = np.argsort(block.step, kind="stable")
    ordered = block if bool((order[1:] > order[:-1]).all()) else view(block, order)
    losses, courses = follow_loss(before, ordered, step_numbers(ordered))
    return losses, np.unique(ordered.step), courses


def _rests(params: VanishingGradientParams, courses: Courses) -> NDArray[np.bool_]:
    """At which steps a loss has converged, or all are negligible."""
    rests = courses.any_converged(params.converged)
    if courses.low:
        rests |= courses.known & (
            np.max([np.where(np.isinf(low), 0.0, low) for low in courses.low], axis=0) < _NOTHING
        )
    return rests


def _size(statistics: StatisticsBatch) -> Floats:
    """Mean magnitude of the finite, non-zero elements; zero if there are none."""
    nonzero = (statistics.finite - statistics.zero).astype(np.float64)
    return statistics.abs_sum / np.maximum(nonzero, 1)


def _so_far(
    largest_before: dict[str, float],
    names: list[str],
    places: list[NDArray[np.intp]],
    values: Floats,
    least: float = 0.0,
) -> tuple[dict[str, float], Floats, Floats]:
    """The largest value of each name so far: for the state, up to and including each place, and before each place.

    The largest value of a new name starts at ``least`` times its first value.
    """
    kept = dict(largest_before)
    including, before = np.empty(len(values)), np.empty(len(values))
    for name, rows in zip(names, places, strict=True):
        running = np.maximum.accumulate(
            np.concatenate([[kept.get(name, least * values[rows[0]])], values[rows]])
        )
        before[rows], including[rows] = running[:-1], running[1:]
        kept[name] = float(running[-1])
    return kept, including, before
