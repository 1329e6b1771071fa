"""A tensor that holds NaN or infinity."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.block import Block
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.finding import Finding, finding_at


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
            masked = block.mask_of_tensors(
                [info.role in params.allow_negative_infinity_in for info in block.catalogue]
            )
            infinite = held.pos_inf + np.where(masked, 0, held.neg_inf)
            bad += np.where(still_at_its_start, 0, infinite)
        return state, [
            self._finding(params, block, int(row), int(bad[row]))
            for row in np.flatnonzero(bad > params.max_elements)
        ]

    def _finding(self, params: NanOrInfParams, block: Block, row: int, bad: int) -> Finding:
        held = block.statistics
        kinds = [(held.nan[row], "NaN"), (held.pos_inf[row], "+inf"), (held.neg_inf[row], "-inf")]
        seen = ", ".join(f"{int(number)} {kind}" for number, kind in kinds if number)
        message = f"{seen} among {int(held.count[row])} elements of {block.info(row).name}, {params.max_elements} tolerated"
        return finding_at(
            self.name, block, row, value=float(bad), threshold=float(params.max_elements), message=message
        )


def _not_yet_finite(block: Block, state: NanOrInfState) -> tuple[NDArray[np.bool_], NanOrInfState]:
    """Which rows are of a logged loss that has never been finite, and the state after them."""
    logged = block.mask_of_tensors([info.role == "loss" and not info.derived for info in block.catalogue])
    waiting = np.zeros(len(block), np.bool_)
    finite = dict.fromkeys(state.finite)
    for row in np.flatnonzero(logged):
        name = f"{block.info(int(row)).name}@{block.worker[row]}/{block.mode[row]}"
        if block.statistics.finite[row]:
            finite[name] = None
        waiting[row] = name not in finite
    return waiting, NanOrInfState(finite=tuple(finite))
