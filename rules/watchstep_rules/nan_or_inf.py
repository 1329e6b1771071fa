"""A tensor that holds NaN or infinity."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.block import Block
from watchstep.block_view import view
from watchstep.tensors import TensorInfo
from watchstep_rules.contract import Advice, Needs, Params, Rule, State
from watchstep_rules.figures.chosen_tensors import has_role, rows_where
from watchstep_rules.figures.series import SeriesRows
from watchstep_rules.finding import Finding, finding_at

_BAD_BATCH = "The data hold NaN or infinity, or a value far beyond all others."
_LOOK_AT_INPUT = "Look at model:input at this step: where it holds NaN or infinity, check batches with torch.isfinite before they are fed."


class NanOrInfParams(Params):
    """Parameters of `NanOrInf`."""

    max_elements: int = Field(0, ge=0, description="How many such elements are tolerated in one tensor.")
    only_nan: bool = Field(False, description="Leave infinities out, as SageMaker's ExplodingTensor can.")
    allow_negative_infinity_in: tuple[str, ...] = Field(
        ("output", "input"),
        description="Roles in which -inf is legitimate: attention masks and log-probabilities use it.",
    )


class NanOrInfState(State):
    """Series of logged losses that have been finite."""

    finite: tuple[str, ...] = ()


class NanOrInf(Rule[NanOrInfParams, NanOrInfState]):
    """Fires when ``nan + pos_inf + neg_inf > max_elements`` for any tensor.

    Non-finite numbers never leave a training by themselves, so one element is enough; that is the test of SageMaker's
    ExplodingTensor rule. Unlike it, -inf in activations is left out: masked attention puts it there on purpose.
    A loss that the program logs itself counts as infinite only after it was finite: ``best_loss = inf`` is how many
    programs begin. A step that a gradient scaler skips for overflow records no gradients, so mixed precision raises no alarm.
    """

    name = "nan_or_inf"
    summary = "a weight, gradient, activation or loss holds NaN or infinity"
    needs = Needs(collections=("losses", "gradients", "weights", "biases", "activations"))
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
        return state, [
            self._finding(params, block, int(row), int(bad[row]))
            for row in np.flatnonzero(bad > params.max_elements)
        ]

    def advice(self, finding: Finding) -> Advice:
        """An output that is the first bad tensor of its step had finite weights: what came into it is the likeliest cause.

        Inputs alone are no finding, since a model may fill their gaps.
        """
        usual = super().advice(finding)
        if finding.role not in ("output", "input"):
            return usual
        causes = (cause for cause in usual.usual_causes if cause != _BAD_BATCH)
        tries = (one for one in usual.what_to_try if one != _LOOK_AT_INPUT)
        return Advice((_BAD_BATCH, *causes), (_LOOK_AT_INPUT, *tries))

    def _finding(self, params: NanOrInfParams, block: Block, row: int, bad: int) -> Finding:
        held = block.statistics
        kinds = [(held.nan[row], "NaN"), (held.pos_inf[row], "+inf"), (held.neg_inf[row], "-inf")]
        seen = ", ".join(f"{int(number)} {kind}" for number, kind in kinds if number)
        message = f"{seen} among {int(held.count[row])} elements of {block.info(row).name}, {params.max_elements} tolerated"
        return finding_at(
            self.name, block, row, value=float(bad), threshold=float(params.max_elements), message=message
        )


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
