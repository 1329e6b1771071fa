"""A tensor that holds NaN or infinity."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep import tensors
from watchstep.block import Block
from watchstep.block_view import view
from watchstep.tensors import TensorInfo
from watchstep_rules.contract import Advice, Needs, Params, Rule, State
from watchstep_rules.figures.chosen_tensors import has_role, rows_where
from watchstep_rules.figures.series import SeriesRows
from watchstep_rules.finding import Finding, finding_at

_DOWNSTREAM = ("input", "output", "loss", "gradient")
_STATE = ("weight", "bias")
_MOST_NAMED = 3
_BAD_BATCH = "The data hold NaN or infinity, or a value far beyond all others."
_LOOK_AT_INPUT = "Look at model:input at this step: where it holds NaN or infinity, check batches with torch.isfinite before they are fed."
_GAPS = "The batch of this step was bad, as measured: values are missing in the data, or what prepares them is at fault."
_CHECK_BATCHES = (
    "Find the examples by torch.isfinite, before batches are fed; leave them out, or fill their gaps."
)


_Pass = tuple[int, int, int]
"""Step, worker and mode."""


class NanOrInfParams(Params):
    """Parameters of `NanOrInf`."""

    max_elements: int = Field(0, ge=0, description="How many such elements are tolerated in one tensor.")
    only_nan: bool = Field(False, description="Leave infinities out, as SageMaker's ExplodingTensor can.")
    allow_negative_infinity_in: tuple[str, ...] = Field(
        ("output", "input"),
        description="Roles in which -inf is legitimate: attention masks and log-probabilities use it.",
    )
    judge_inputs: bool = Field(
        False,
        description="Whether what a model is given is judged too; else it only says why something after it is bad.",
    )


class NanOrInfState(State):
    """Series of logged losses that have been finite."""

    finite: tuple[str, ...] = ()


class NanOrInf(Rule[NanOrInfParams, NanOrInfState]):
    """Fires when ``nan + pos_inf + neg_inf > max_elements`` for any tensor.

    Non-finite numbers never leave a training by themselves, so one element is enough; that is the test of SageMaker's
    ExplodingTensor rule. Unlike it, -inf in activations is left out: masked attention puts it there on purpose.
    What the model is given is no finding alone, for a model may fill gaps; where it is bad, and something after it at the same step
    while weights are not, the finding says so. A loss that the program logs itself counts as infinite only after it was finite: ``best_loss = inf`` is how many
    programs begin. A step that a gradient scaler skips for overflow records no gradients, so mixed precision raises no alarm.
    """

    name = "nan_or_inf"
    summary = "a weight, gradient, activation or loss holds NaN or infinity"
    needs = Needs(
        collections=("losses", "gradients", "weights", "biases", "activations", tensors.INPUTS),
        evidence=(tensors.INPUTS,),
    )
    merge = "per_worker"
    usual_causes = (
        "The learning rate is too high: weights and then the loss grow without bound.",
        "The loss takes the logarithm of zero, divides by zero, or takes the root of zero.",
        _BAD_BATCH,
        "Half precision overflows: float16 ends at 65504.",
    )
    what_to_try = (
        "Look at the first tensor of this step in the order of the flow; what comes after it follows.",
        "Lower the learning rate, warm it up, or clip gradients with torch.nn.utils.clip_grad_norm_.",
        "Use losses on logits, such as cross_entropy and binary_cross_entropy_with_logits; add an epsilon under roots and logarithms.",
        _LOOK_AT_INPUT,
        "Find the operation with torch.autograd.detect_anomaly.",
        "Under float16 use torch.amp.GradScaler, or take bfloat16.",
    )
    params_type = NanOrInfParams
    state_type = NanOrInfState

    def needed(self, params: NanOrInfParams) -> Needs:
        """Inputs are judged where that is asked for."""
        return replace(self.needs, evidence=()) if params.judge_inputs else self.needs

    def evaluate(
        self,
        params: NanOrInfParams,
        state: NanOrInfState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[NanOrInfState, list[Finding]]:
        """Judge each row by itself; of a logged loss, whether it was finite before."""
        held = block.statistics
        bad = held.nan.copy()
        still_at_its_start, state = _not_yet_finite(block, state)
        if not params.only_nan:
            masked = rows_where(block, has_role, *params.allow_negative_infinity_in)
            infinite = held.pos_inf + np.where(masked, 0, held.neg_inf)
            bad += np.where(still_at_its_start, 0, infinite)
        hit = bad > params.max_elements
        upstream = _bad_inputs(block, np.flatnonzero(hit))
        if not params.judge_inputs:
            hit = hit & ~rows_where(block, _is_given)
        return state, [
            self._finding(params, block, row, int(bad[row]), upstream.get(_pass_of(block, row), []))
            for row in np.flatnonzero(hit).tolist()
        ]

    def advice(self, finding: Finding) -> Advice:
        """An output that is the first bad tensor of its step had finite weights: what came into it is the likeliest cause.

        Where that was measured and was bad, it is told as what was seen, and advised on.
        """
        usual = super().advice(finding)
        if finding.upstream:
            causes = (cause for cause in usual.usual_causes if cause != _BAD_BATCH)
            tries = (one for one in usual.what_to_try if one != _LOOK_AT_INPUT)
            return Advice((_GAPS, *causes), (_CHECK_BATCHES, *tries))
        if finding.role not in ("output", "input"):
            return usual
        causes = (cause for cause in usual.usual_causes if cause != _BAD_BATCH)
        tries = (one for one in usual.what_to_try if one != _LOOK_AT_INPUT)
        return Advice((_BAD_BATCH, *causes), (_LOOK_AT_INPUT, *tries))

    def _finding(
        self, params: NanOrInfParams, block: Block, row: int, bad: int, inputs: list[int]
    ) -> Finding:
        info = block.info(row)
        upstream = inputs if info.role in _DOWNSTREAM and not _is_given(info) else []
        message = f"{_seen(block, row)}, {params.max_elements} tolerated"
        if upstream:
            message += "; the input held " + ", and ".join(
                _seen(block, one) for one in upstream[:_MOST_NAMED]
            )
        found = finding_at(
            self.name, block, row, value=float(bad), threshold=float(params.max_elements), message=message
        )
        return found.model_copy(update={"upstream": tuple(block.info(one).name for one in upstream)})


def _seen(block: Block, row: int) -> str:
    held = block.statistics
    kinds = [(held.nan[row], "NaN"), (held.pos_inf[row], "+inf"), (held.neg_inf[row], "-inf")]
    seen = ", ".join(f"{int(number)} {kind}" for number, kind in kinds if number)
    return f"{seen} among {int(held.count[row])} elements of {block.info(row).name}"


def _bad_inputs(block: Block, bad: NDArray[np.intp]) -> dict[_Pass, list[int]]:
    """Rows of what models were given that are bad, by the pass that they were given to, where no weight was bad before."""
    given = bad[rows_where(block, _is_given)[bad]]
    if not len(given):
        return {}
    state = bad[rows_where(block, has_role, *_STATE)[bad]]
    spoilt = {_pass_of(block, row)[:2] for row in state.tolist()}
    found: dict[_Pass, list[int]] = {}
    for row in given.tolist():
        place = _pass_of(block, row)
        if place[:2] not in spoilt:
            found.setdefault(place, []).append(row)
    return found


def _pass_of(block: Block, row: int) -> _Pass:
    return int(block.step[row]), int(block.worker[row]), int(block.mode[row])


def _is_given(info: TensorInfo) -> bool:
    return tensors.INPUTS in info.collections


def _is_logged(info: TensorInfo) -> bool:
    return info.role == "loss" and not info.derived


def _not_yet_finite(block: Block, state: NanOrInfState) -> tuple[NDArray[np.bool_], NanOrInfState]:
    """Which rows are of a logged loss that has never been finite, and the state after them."""
    logged = rows_where(block, _is_logged)
    waiting = np.zeros(len(block), np.bool_)
    rows = np.flatnonzero(logged)
    is_finite = block.statistics.finite[rows] > 0
    by_series = SeriesRows.of(view(block, rows), by_mode=True)
    known, begun = set(state.finite), {}
    for name, places in zip(by_series.names, by_series.rows(), strict=True):
        if name not in known:
            finite = np.logical_or.accumulate(is_finite[places])
            waiting[rows[places]] = ~finite
            if finite[-1]:
                begun[int(places[np.argmax(finite)])] = name
    return waiting, NanOrInfState(finite=(*state.finite, *(begun[place] for place in sorted(begun))))
