"""Weights that the optimizer leaves as they are, though there is something to learn."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.block import Block
from watchstep.derived import rms, zero_share
from watchstep.statistics import Floats
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.finding import Finding, finding_at
from watchstep_rules.layers import is_normalisation, is_weighted
from watchstep_rules.steps import whole_steps

_HALF = ("float16", "bfloat16")
_ABRUPT = 0.1  # of the usual update; a cosine to zero leaves less at its last records
_FORGET = 0.9


class WeightNotUpdatingParams(Params):
    """Parameters of `WeightNotUpdating`."""

    threshold: float = Field(
        1e-8, ge=0, description="Root mean square of an update over the weight's, up to which it is none."
    )
    rounded: float = Field(
        0.99,
        gt=0,
        le=1,
        description="Share of elements that an update leaves as they are, from which on it is lost to rounding.",
    )
    patience: int = Field(
        20,
        ge=1,
        description="Records through which all updates are none, from which on a rate that ran down is a fault too.",
    )
    alive: float = Field(
        1e-3,
        gt=0,
        le=1,
        description="A gradient below this share of its largest so far says that the layer has converged.",
    )


class Past(NamedTuple):
    """What is kept of a parameter.

    Attributes:
        last: root mean square of the last gradient; negative before the first.
        largest: the largest so far.
        dense: whether at least half of the last gradient's elements were not zero.
        ratio: of the last update that was not none, over the weight; 0 before the first.
        usual: the largest such ratio, forgotten by a tenth at each.
    """

    last: float = -1.0
    largest: float = 0.0
    dense: bool = False
    ratio: float = 0.0
    usual: float = 0.0

    @property
    def stopped(self) -> bool:
        """Whether updates that end here end at once, and not as a learning rate that runs down to zero."""
        return self.ratio >= _ABRUPT * self.usual

    @property
    def moved(self) -> bool:
        """Whether it has ever been updated."""
        return self.ratio > 0


class WeightNotUpdatingState(State):
    """The past of each parameter, by ``name@worker``, the order of weighted modules whose output was seen, and losses that are zero.

    ``still`` counts records in a row in which all updates were none.
    """

    parameters: dict[str, Past] = Field(default_factory=dict)
    computed: dict[str, int] = Field(default_factory=dict)
    nothing_lost: dict[str, bool] = Field(default_factory=dict)
    still: int = 0


class WeightNotUpdating(Rule[WeightNotUpdatingParams, WeightNotUpdatingState]):
    """Fires when updates are missing in one of five ways. An update is *none* where ``rms(update) <= threshold * rms(weight)``.

    - **None at all**: all updates of a step are none while some gradient is alive: the optimizer is skipped, or its
      learning rate is zero. Also where no weight has ever been updated, whatever the gradients,
      though some loss is not zero. A gradient is alive
      at ``alive`` times its own largest; below, a plain optimizer's updates round to nothing because it has converged.
      Updates that were there must have ended at once: a learning rate that a schedule brings down to zero is
      no fault, unless it stays there through ``patience`` records.
    - **Lost to rounding**: ``rounded`` of an update's elements are zero, though half of the gradient's are not.
      Weights in half precision do that where the learning rate is small; in others a gradient that small has vanished.
    - **Cut off**: layers that require a gradient, and were computed, never got one, while all layers after them learn:
      what they give is detached from the loss.
    - **Masked**: the gradient of a layer's weight has always been zero, though its bias has one, and layers before it
      get theirs. Zero inputs do that as well, from their layer on.
    - **Vectors alone**: all that learns are biases and scales of weighted layers and normalisation, and nothing of the
      last weighted layer that was computed: the loop that was to freeze some layers froze others as well. Tuning of
      biases, which trains the head, is another thing.

    Deliberate freezing is left alone: parameters with ``requires_grad=False`` have no updates on record, and
    parameters that the optimizer does not hold have none either. The threshold 1e-8 is that of SageMaker's
    WeightUpdateRatio. Vectors are judged only where there is nothing else: the gradient of a bias before
    normalisation is zero by construction.
    """

    name = "weight_not_updating"
    summary = "weights stay as they are though there is something to learn"
    needs = Needs(
        collections=("updates", "gradients", "activations", "losses"),
        roles=("update", "gradient", "output", "loss"),
        probes=("update_ratio",),
    )
    merge = "sealed"
    params_type = WeightNotUpdatingParams
    state_type = WeightNotUpdatingState

    def evaluate(
        self,
        params: WeightNotUpdatingParams,
        state: WeightNotUpdatingState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[WeightNotUpdatingState, list[Finding]]:
        """Judge the updates of each step together."""
        past = _Past(dict(state.parameters), dict(state.computed), dict(state.nothing_lost), state.still)
        figures = _Figures.of(block)
        findings = []
        for rows in whole_steps(block):
            updates = past.follow(block, rows, figures)
            for row, why in _missing(params, block, figures, updates, past):
                findings.append(self._finding(params, block, row, float(figures.ratio[row]), why))
            past.move(block, figures, updates, params)
        return WeightNotUpdatingState(
            parameters=past.parameters,
            computed=past.computed,
            nothing_lost=past.nothing_lost,
            still=past.still,
        ), findings

    def _finding(
        self, params: WeightNotUpdatingParams, block: Block, row: int, ratio: float, why: str
    ) -> Finding:
        held = f"at most {params.threshold:.3g} is none" if ratio <= params.threshold else "it alone learns"
        message = f"{block.info(row).name} is {ratio:.3g} of the weight, {held}: {why}"
        return finding_at(self.name, block, row, value=ratio, threshold=params.threshold, message=message)


class _Figures(NamedTuple):
    """Of each row: root mean square, that over the weight's (the former, where that is not known), share of zeros."""

    rms: Floats
    ratio: Floats
    zero: Floats

    @classmethod
    def of(cls, block: Block) -> _Figures:
        size = np.nan_to_num(rms(block.statistics), nan=0.0)
        ratio = block.probes.get("update_ratio", np.full(len(block), np.nan))
        return cls(size, np.where(np.isfinite(ratio), ratio, size), zero_share(block.statistics))


class _Past:
    """The state while a block is judged."""

    def __init__(
        self,
        parameters: dict[str, Past],
        computed: dict[str, int],
        nothing_lost: dict[str, bool],
        still: int,
    ) -> None:
        self.parameters = parameters
        self.computed = computed
        self.nothing_lost = nothing_lost
        self.still = still

    def of(self, block: Block, row: int) -> Past:
        """Of a row's parameter."""
        return self.parameters.get(_parameter(block, row), Past())

    def follow(self, block: Block, rows: NDArray[np.intp], figures: _Figures) -> list[int]:
        """Take in a step's gradients, outputs and losses; gives the rows of its updates."""
        updates = []
        for row in map(int, rows):
            info = block.info(row)
            if block.statistics.finite[row] == 0:
                continue
            if info.role == "update":
                updates.append(row)
            elif info.role == "gradient":
                size, before = _short(figures.rms[row]), self.of(block, row)
                self.parameters[_parameter(block, row)] = before._replace(
                    last=size, largest=max(size, before.largest), dense=bool(figures.zero[row] <= 0.5)
                )
            elif info.role == "loss":
                name = f"{info.name}@{block.worker[row]}"
                self.nothing_lost[name] = bool(block.statistics.mean[row] == 0)
            elif is_weighted(info):
                self.computed[info.module] = info.order
        return updates

    def move(
        self, block: Block, figures: _Figures, updates: list[int], params: WeightNotUpdatingParams
    ) -> None:
        """Take in a step's updates."""
        for row in updates:
            ratio, before = _short(figures.ratio[row]), self.of(block, row)
            if ratio > params.threshold:
                usual = max(ratio, _short(_FORGET * before.usual))
                self.parameters[_parameter(block, row)] = before._replace(ratio=ratio, usual=usual)


def _short(value: float) -> float:
    """Four digits: what is kept of a tensor is little."""
    return float(f"{value:.4g}")


def _parameter(block: Block, row: int) -> str:
    return f"{block.info(row).name.rpartition(':')[0]}@{block.worker[row]}"


def _missing(
    params: WeightNotUpdatingParams, block: Block, figures: _Figures, updates: list[int], past: _Past
) -> list[tuple[int, str]]:
    """Rows of updates that are missing, and why."""
    if not updates:
        return []
    judged = [row for row in updates if len(block.info(row).shape) > 1] or updates
    held = [past.of(block, row) for row in judged]
    none = [figures.ratio[row] <= params.threshold for row in judged]
    past.still = past.still + 1 if all(none) else 0
    if all(none):
        long = past.still >= params.patience
        if any(
            (one.stopped or long) and one.last > 0 and one.last >= params.alive * one.largest for one in held
        ):
            return [(row, "no weight changes, though there are gradients") for row in judged]
        waits = bool(past.nothing_lost) and all(past.nothing_lost.values())
        if not waits and not any(one.moved for one in past.parameters.values()):
            return [(row, "no weight has ever changed") for row in judged]
        return []
    found = _cut_off(block, judged, held, past)
    for row, one in zip(judged, held, strict=True):
        alive = one.dense and one.last >= params.alive * one.largest and block.info(row).dtype in _HALF
        if alive and figures.zero[row] >= params.rounded:
            found.append((row, f"rounding loses {figures.zero[row]:.0%} of its elements"))
    return found or _masked(block, judged, none, past) or _vectors_alone(block, updates, past)


def _cut_off(block: Block, judged: list[int], held: list[Past], past: _Past) -> list[tuple[int, str]]:
    learning = [
        block.info(row).order for row, one in zip(judged, held, strict=True) if one.last >= 0 or one.moved
    ]
    without = [row for row, one in zip(judged, held, strict=True) if one.last < 0 and not one.moved]
    if not learning or any(block.info(row).order >= min(learning) for row in without):
        return []
    why = "its layer is computed, but never gets a gradient, while all after it do"
    return [(row, why) for row in without if block.info(row).module in past.computed]


def _masked(block: Block, judged: list[int], none: list[bool], past: _Past) -> list[tuple[int, str]]:
    """A zero gradient is no dead layer's where its bias has one, and layers before it learn."""
    learning = [block.info(row).order for row in judged if past.of(block, row).moved]
    found = []
    for row, is_none in zip(judged, none, strict=True):
        info, held = block.info(row), past.of(block, row)
        bias = past.parameters.get(f"{info.module}.bias@{block.worker[row]}", Past())
        if is_none and is_weighted(info) and held.last == held.largest == 0 and bias.last > 0:
            found.append((row, info.order))
    first = min([*learning, *(order for _, order in found)], default=0)
    why = "its gradient has always been zero, though that of its bias is not, and layers before it get theirs"
    return [(row, why) for row, order in found if order > first]


def _vectors_alone(block: Block, updates: list[int], past: _Past) -> list[tuple[int, str]]:
    infos = [block.info(row) for row in updates]
    held = {info.module for info in infos}
    if any(len(info.shape) > 1 or not (is_weighted(info) or is_normalisation(info)) for info in infos):
        return []
    if not past.computed or max(past.computed, key=lambda module: past.computed[module]) in held:
        return []
    why = f"of {len(past.computed)} layers that were computed none has a weight that may learn"
    return [(row, why) for row in updates]
