"""A tensor that holds NaN or infinity, whether that damages training or not."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format import tensors
from watchstep.format.block import Block, sort_key, view
from watchstep.format.tensors import MODES, TensorInfo
from watchstep_rules.rule import Advice, Finding, FindingRows, Hits, Merge, Needs, Params, Rule, State
from watchstep_rules.signals.nonfinite import (
    BAD_BATCH,
    CHECK_BATCHES,
    GAPS,
    LOOK_AT_INPUT,
    Origins,
    counts_of,
    execution,
    has_elements,
    is_given,
)
from watchstep_rules.signals.series import SeriesRows
from watchstep_rules.signals.tensor_selection import has_role, rows_where
from watchstep_rules.signals.update_evidence import APPLIED, MISSING, SKIPPED, UpdateEvidence

_DOWNSTREAM = ("input", "output", "loss", "gradient")
_STATE = ("weight", "bias")
_MOST_NAMED = 3
_TRAIN = MODES.index("train")


_Pass = tuple[int, int, int]
"""Step, worker and mode."""


class NonFiniteValuesParams(Params):
    """Parameters of `NonFiniteValues`."""

    max_elements: int = Field(0, ge=0, description="How many such elements are tolerated in one tensor.")
    only_nan: bool = Field(False, description="Leave infinities out, as SageMaker's ExplodingTensor can.")
    allow_infinity_in: tuple[str, ...] = Field(
        ("output", "input", "weight", "bias"),
        description="Roles in which infinity is legitimate: masks and log-probabilities use it.",
    )
    judge_inputs: bool = Field(
        False,
        description="Whether what a model is given is judged too; else it only says why something after it is bad.",
    )
    whole_steps: bool = Field(
        False,
        description="Whether a step is judged once, when all workers have passed it: another rule config can then keep this one quiet, and outputs are left out at steps whose losses and gradients are all finite.",
    )


class NonFiniteValuesState(State):
    """Series of logged losses that have been finite."""

    finite: tuple[str, ...] = ()


class NonFiniteValues(Rule[NonFiniteValuesParams, NonFiniteValuesState]):
    """Fires when ``nan + pos_inf + neg_inf > max_elements`` for any tensor.

    One element is enough, as in SageMaker's ExplodingTensor rule. Such a value may be sound: a batch without labels has the loss NaN and the
    gradient zero, and a program may skip it. So this rule warns, and `nan_or_inf` says when training is damaged. Unlike
    SageMaker's rule, it leaves infinity in activations and weights out: masks hold it on purpose. With ``whole_steps`` an output that is
    NaN is left out, too, where the losses and gradients of its step are finite: nothing uses it, as of padding.
    What the model is given is no finding alone, for a model may fill gaps; where it is bad, and something after it at the same step
    while weights are not, the finding says so. A loss that the program logs itself counts as infinite only after it was finite: ``best_loss = inf`` is how many
    programs begin. In an evaluation it counts as NaN only after it was finite, too: the mean over a slice that is empty is NaN. A step that a gradient scaler skips for overflow records no gradients, so mixed precision raises no alarm.
    Where the record shows that no update applied what was not finite, the message says so with the step.
    """

    name = "non_finite_values"
    summary = "a loss, activation, gradient or weight holds NaN or infinity; training may be sound"
    needs = Needs(
        collections=("losses", "gradients", "weights", "biases", "activations", tensors.INPUTS),
        evidence=(tensors.INPUTS,),
        metrics=(APPLIED, MISSING, SKIPPED),
    )
    merge = "per_worker"
    usual_causes = (
        "The learning rate is too high: weights and then the loss grow without bound.",
        "The loss takes the logarithm of zero, divides by zero, or takes the root of zero.",
        BAD_BATCH,
        "Half precision overflows: float16 ends at 65504.",
    )
    what_to_try = (
        "Look at the first of the recorded tensors of this step that is not finite, in the order of the flow; what comes after it follows.",
        "Lower the learning rate, warm it up, or clip gradients with torch.nn.utils.clip_grad_norm_.",
        "Use losses on logits, such as cross_entropy and binary_cross_entropy_with_logits; add an epsilon under roots and logarithms.",
        LOOK_AT_INPUT,
        "Find the operation with torch.autograd.detect_anomaly.",
        "Under float16 use torch.amp.GradScaler, or take bfloat16.",
    )
    cannot_distinguish = (
        "Losses that are non-finite at several steps in a row in a program that skips such batches on purpose, from a fault.",
    )

    def merged(self, params: NonFiniteValuesParams) -> Merge:
        """Each worker by itself, unless whole steps are asked for."""
        return "sealed" if params.whole_steps else self.merge

    def needed(self, params: NonFiniteValuesParams) -> Needs:
        """Inputs are judged where that is asked for."""
        return replace(self.needs, evidence=()) if params.judge_inputs else self.needs

    def conclusive(self, params: NonFiniteValuesParams, block: Block) -> NDArray[np.bool_]:
        """Rows of tensors with elements: those that are not finite are what it is about."""
        return has_elements(block)

    def evaluate(
        self,
        params: NonFiniteValuesParams,
        state: NonFiniteValuesState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[NonFiniteValuesState, FindingRows]:
        """Judge each row by itself; of a logged loss, whether it was finite before."""
        held = block.statistics
        bad = held.nan.copy()
        still_at_its_start, state = _not_yet_finite(block, state)
        bad[still_at_its_start & (block.mode != _TRAIN)] = 0
        if not params.only_nan:
            masked = rows_where(block, has_role, *params.allow_infinity_in)
            bad += np.where(masked | still_at_its_start, 0, held.pos_inf + held.neg_inf)
        hit = bad > params.max_elements
        if params.whole_steps:
            hit &= ~_unused(block, hit)
        upstream = _bad_inputs(block, np.flatnonzero(hit))
        if not params.judge_inputs:
            hit = hit & ~rows_where(block, is_given)
        return state, self._findings(params, block, np.flatnonzero(hit), bad, upstream)

    def advice(self, finding: Finding) -> Advice:
        """An output that is the first bad tensor of its step had finite weights: what came into it is the likeliest cause.

        Where that was measured and was bad, it is told as what was seen, and advised on.
        """
        usual = super().advice(finding)
        if finding.upstream:
            causes = (cause for cause in usual.usual_causes if cause != BAD_BATCH)
            tries = (one for one in usual.what_to_try if one != LOOK_AT_INPUT)
            return Advice((GAPS, *causes), (CHECK_BATCHES, *tries))
        if finding.role not in ("output", "input"):
            return usual
        causes = (cause for cause in usual.usual_causes if cause != BAD_BATCH)
        tries = (one for one in usual.what_to_try if one != LOOK_AT_INPUT)
        return Advice((BAD_BATCH, *causes), (LOOK_AT_INPUT, *tries))

    def _findings(
        self,
        params: NonFiniteValuesParams,
        block: Block,
        rows: NDArray[np.intp],
        bad: NDArray[np.int64],
        inputs: dict[_Pass, list[int]],
    ) -> FindingRows:
        """With where their pass was first not finite, and whether an update applied it; the output that was executed first is the likeliest cause."""
        evidence = functools.cache(lambda: (Origins(block), UpdateEvidence(block)))

        def upstream(row: int) -> list[int]:
            info = block.info(row)
            return (
                inputs.get(_pass_of(block, row), [])
                if info.role in _DOWNSTREAM and not is_given(info)
                else []
            )

        def words(row: int, value: float, threshold: float) -> str:  # noqa: ARG001 - as all words
            message = f"{counts_of(block, row)}, {params.max_elements} tolerated"
            if seen := upstream(row):
                message += "; the input held " + ", and ".join(
                    counts_of(block, one) for one in seen[:_MOST_NAMED]
                )
            return message

        def finish(finding: Finding, row: int) -> Finding:
            names = tuple(block.info(one).name for one in upstream(row))
            finding = finding.model_copy(update={"upstream": names})
            if finding.role not in _DOWNSTREAM or is_given(block.info(row)):
                return finding
            origins, updates = evidence()
            return origins.of(row).said_with(updates.said_with(finding, row))

        tolerated = np.full(len(rows), float(params.max_elements))
        hits = Hits(rows, bad[rows].astype(np.float64), tolerated, _executed_first(block, rows))
        return FindingRows(self.name, block, hits, words, finish)


def _executed_first(block: Block, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Of chosen rows those of the output of each pass that was executed first, bool of shape (chosen,)."""
    first = np.zeros(len(rows), np.bool_)
    places = np.flatnonzero(rows_where(block, has_role, "output")[rows])
    if len(places):
        outputs = rows[places]
        which = _passes(block)[outputs]
        when = sort_key(*execution(block, outputs))
        order = np.lexsort((when, which))
        begins = np.diff(which[order], prepend=-1) != 0
        earliest = when[order][begins][np.cumsum(begins) - 1]
        first[places[order[when[order] == earliest]]] = True
    return first


def _bad_inputs(block: Block, bad: NDArray[np.intp]) -> dict[_Pass, list[int]]:
    """Rows of what models were given that are bad, by the pass that they were given to, where no weight was bad before."""
    given = bad[rows_where(block, is_given)[bad]]
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


def _unused(block: Block, hit: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Outputs that are not finite, of passes whose losses all are, and so are the gradients of their step."""
    outputs = np.flatnonzero(hit & rows_where(block, has_role, "output"))
    unused = np.zeros(len(block), np.bool_)
    if not len(outputs):
        return unused
    ends = rows_where(block, has_role, "loss", "gradient")
    is_bad = block.statistics.nan + block.statistics.pos_inf + block.statistics.neg_inf > 0
    passes = _passes(block)
    finite, spoilt = np.unique(passes[ends & ~is_bad]), np.unique(passes[ends & is_bad])
    unused[outputs] = np.isin(passes[outputs], finite) & ~np.isin(passes[outputs], spoilt)
    return unused


def _passes(block: Block) -> NDArray[np.int64]:
    """The pass of each row, as a number."""
    return sort_key(block.step, block.worker, block.mode)


def _pass_of(block: Block, row: int) -> _Pass:
    return int(block.step[row]), int(block.worker[row]), int(block.mode[row])


def _is_logged(info: TensorInfo) -> bool:
    return info.role == "loss" and not info.derived


def _not_yet_finite(
    block: Block, state: NonFiniteValuesState
) -> tuple[NDArray[np.bool_], NonFiniteValuesState]:
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
    return waiting, NonFiniteValuesState(finite=(*state.finite, *(begun[place] for place in sorted(begun))))
