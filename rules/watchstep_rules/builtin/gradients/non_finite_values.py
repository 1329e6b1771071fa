"""A tensor that contains NaN or infinity, whether it damages training or not."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format import tensors
from watchstep.format.block import Block, sort_key, view
from watchstep.format.tensors import MODES, TensorInfo
from watchstep_rules.rule import (
    Advice,
    Finding,
    FindingRows,
    Hits,
    Merge,
    Needs,
    Params,
    Rule,
    State,
    is_metric,
)
from watchstep_rules.signals.nonfinite import (
    USUAL_CAUSES,
    WHAT_TO_TRY,
    Origins,
    advice_for_bad_input,
    advice_for_first_output,
    counts_of,
    execution,
    has_elements,
    is_model_input,
    nonfinite,
)
from watchstep_rules.signals.series import SeriesRows
from watchstep_rules.signals.tensor_selection import has_role, rows_where
from watchstep_rules.signals.update_evidence import APPLIED, MISSING, SKIPPED, UpdateEvidence

_DOWNSTREAM = ("input", "output", "loss", "gradient")
_STATE = ("weight", "bias")
_UNUSABLE = ("output", "label")
_MOST_NAMED = 3
_STEADY = 10
_BAD = -1
_TRAIN = MODES.index("train")


_Pass = tuple[int, int, int]
"""Step, worker and mode."""


class NonFiniteValuesParams(Params):
    """Parameters of `NonFiniteValues`."""

    max_elements: int = Field(0, ge=0, description="Number of tolerated NaN and infinities in one tensor.")
    only_nan: bool = Field(
        False, description="Ignore infinities, as an option of SageMaker's ExplodingTensor."
    )
    allow_infinity_in: tuple[str, ...] = Field(
        ("output", "input", "weight", "bias"),
        description="Roles in which infinity is valid, because masks and log-probabilities use it.",
    )
    judge_inputs: bool = Field(
        False,
        description="Whether the inputs of models are judged too; by default they are only evidence for later tensors.",
    )
    whole_steps: bool = Field(
        False,
        description="Whether a step is judged once, when all workers have passed it. Another rule config can then inhibit this one, and outputs and labels are ignored at steps with only finite losses and gradients.",
    )


class NonFiniteValuesState(State):
    """State of `NonFiniteValues`.

    Attributes:
        finite: series of logged losses and of the program's own tensors that have been finite.
        metrics: by series of metrics: the number of finite values in a row, at most 10; -1 while a metric with 10 is not finite.
    """

    finite: tuple[str, ...] = ()
    metrics: dict[str, int] = Field(default_factory=dict)


class NonFiniteValues(Rule[NonFiniteValuesParams, NonFiniteValuesState]):
    """Fires when ``nan + pos_inf + neg_inf > max_elements`` for any tensor.

    One element is enough, as in SageMaker's ExplodingTensor rule. Such a value may be harmless: a batch without labels has the loss NaN
    and the gradient zero, and a program may skip it. This rule therefore warns, and `nan_or_inf` reports damage.

    - Unlike SageMaker's rule, it ignores infinity in activations and weights, because masks use it on purpose.
    - With ``whole_steps`` it also ignores a NaN output or label at a step with finite losses and gradients: nothing uses it, as in
      padding, and for missing labels.
    - Of outputs of whole models only those that the program records with ``hook.record`` are judged: those of a watched model follow
      from its activations.
    - Infinity in a tensor of the program's own (``custom``) counts only after the tensor was without: a mask contains infinity from the
      start.
    - A metric counts only after 10 finite values in a row: programs log NaN at steps without an evaluation, and for means over nothing.
      With ``whole_steps``, steps that a gradient scaler skips do not count.
    - A bad input of the model alone is not a finding, because a model may impute missing values. If the input and a later tensor of the
      step are bad and weights are not, the finding names the input.
    - A loss that the program logs itself counts as infinite only after it was finite, because many programs start with
      ``best_loss = inf``. In an evaluation it also counts as NaN only after it was finite: the mean over an empty slice is NaN.
    - A step that a gradient scaler skips for overflow records no gradients in PyTorch, and with ``whole_steps`` its gradients do not count in
      other frameworks, so mixed precision does not make the rule fire.
    - If the record shows that no update applied the values, the message states it with the step.
    """

    name = "non_finite_values"
    summary = "a loss, metric, activation, gradient, weight or custom tensor contains NaN or infinity; training may be healthy"
    needs = Needs(
        collections=(
            "losses",
            "gradients",
            "weights",
            "biases",
            "activations",
            tensors.INPUTS,
            tensors.OUTPUTS,
            tensors.LABELS,
            tensors.METRICS,
            tensors.CUSTOM,
        ),
        evidence=(tensors.INPUTS,),
        metrics=(APPLIED, MISSING, SKIPPED),
    )
    merge = "per_worker"
    usual_causes = USUAL_CAUSES
    what_to_try = WHAT_TO_TRY
    cannot_distinguish = (
        "Losses that are non-finite at several steps in a row in a program that skips such batches on purpose, from a fault.",
    )

    def merged(self, params: NonFiniteValuesParams) -> Merge:
        """``per_worker``, or ``watermark`` with ``whole_steps``."""
        return "watermark" if params.whole_steps else self.merge

    def needed(self, params: NonFiniteValuesParams) -> Needs:
        """Inputs are evidence, or judged with ``judge_inputs``."""
        return replace(self.needs, evidence=()) if params.judge_inputs else self.needs

    def conclusive(self, params: NonFiniteValuesParams, block: Block) -> NDArray[np.bool_]:
        """Rows of tensors with elements, whether finite or not."""
        return has_elements(block)

    def evaluate(
        self,
        params: NonFiniteValuesParams,
        state: NonFiniteValuesState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[NonFiniteValuesState, FindingRows]:
        """Judge each row by itself; for losses, metrics and tensors of the program's own also whether they were finite before."""
        statistics = block.statistics
        bad = statistics.nan.copy()
        still_at_its_start, finite = _not_yet_finite(block, state.finite)
        own = rows_where(block, has_role, "custom")
        bad[still_at_its_start & ~own & (block.mode != _TRAIN)] = 0
        if not params.only_nan:
            masked = rows_where(block, has_role, *params.allow_infinity_in)
            bad += np.where(masked | still_at_its_start, 0, statistics.pos_inf + statistics.neg_inf)
        ignored, metrics = _unsteady(block, state.metrics, whole_steps=params.whole_steps)
        bad[ignored | rows_where(block, _is_output_of_watched_model)] = 0
        if params.whole_steps:
            bad[rows_where(block, has_role, "gradient") & _is_skipped(block)] = 0
        state = NonFiniteValuesState(finite=finite, metrics=metrics)
        hit = bad > params.max_elements
        if params.whole_steps:
            hit &= ~_unused(block, hit)
        upstream = _bad_inputs(block, np.flatnonzero(hit))
        if not params.judge_inputs:
            hit = hit & ~rows_where(block, is_model_input)
        return state, self._findings(params, block, np.flatnonzero(hit), bad, upstream)

    def advice(self, finding: Finding) -> Advice:
        """An output that is the first bad tensor of its step had finite weights, so its input is the likeliest cause."""
        usual = super().advice(finding)
        if finding.upstream:
            return advice_for_bad_input(usual)
        return advice_for_first_output(usual) if finding.role in ("output", "input") else usual

    def _findings(
        self,
        params: NonFiniteValuesParams,
        block: Block,
        rows: NDArray[np.intp],
        bad: NDArray[np.int64],
        inputs: dict[_Pass, list[int]],
    ) -> FindingRows:
        """Findings with evidence about origins and updates. The output that was executed first is the likeliest cause."""
        evidence = functools.cache(lambda: (Origins(block), UpdateEvidence(block)))

        def upstream(row: int) -> list[int]:
            info = block.info(row)
            return (
                inputs.get(_pass_of(block, row), [])
                if info.role in _DOWNSTREAM and not is_model_input(info)
                else []
            )

        def words(row: int, value: float, threshold: float) -> str:  # noqa: ARG001 - as all words
            message = f"{counts_of(block, row)}, {params.max_elements} tolerated"
            if bad_inputs := upstream(row):
                message += "; the input contained " + ", and ".join(
                    counts_of(block, bad_input) for bad_input in bad_inputs[:_MOST_NAMED]
                )
            return message

        def finish(finding: Finding, row: int) -> Finding:
            names = tuple(block.info(bad_input).name for bad_input in upstream(row))
            finding = finding.model_copy(update={"upstream": names})
            if finding.role not in _DOWNSTREAM or is_model_input(block.info(row)):
                return finding
            origins, updates = evidence()
            return origins.of(row).annotate(updates.annotate(finding, row))

        tolerated = np.full(len(rows), float(params.max_elements))
        hits = Hits(rows, bad[rows].astype(np.float64), tolerated, _executed_first(block, rows))
        return FindingRows(self.name, block, hits, words, finish)


def _executed_first(block: Block, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Whether a chosen row is the output that was executed first in its pass, bool of shape (chosen,)."""
    first = np.zeros(len(rows), np.bool_)
    places = np.flatnonzero(rows_where(block, has_role, "output")[rows])
    if len(places):
        outputs = rows[places]
        pass_of = _passes(block)[outputs]
        when = sort_key(*execution(block, outputs))
        order = np.lexsort((when, pass_of))
        begins = np.diff(pass_of[order], prepend=-1) != 0
        earliest = when[order][begins][np.cumsum(begins) - 1]
        first[places[order[when[order] == earliest]]] = True
    return first


def _bad_inputs(block: Block, bad: NDArray[np.intp]) -> dict[_Pass, list[int]]:
    """Bad rows of model inputs, by pass, at steps without bad weights."""
    inputs = bad[rows_where(block, is_model_input)[bad]]
    if not len(inputs):
        return {}
    state = bad[rows_where(block, has_role, *_STATE)[bad]]
    steps_with_bad_state = {_pass_of(block, row)[:2] for row in state.tolist()}
    by_pass: dict[_Pass, list[int]] = {}
    for row in inputs.tolist():
        key = _pass_of(block, row)
        if key[:2] not in steps_with_bad_state:
            by_pass.setdefault(key, []).append(row)
    return by_pass


def _unused(block: Block, hit: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Outputs and labels that are not finite, in passes with only finite losses and gradients."""
    outputs = np.flatnonzero(hit & rows_where(block, has_role, *_UNUSABLE))
    unused = np.zeros(len(block), np.bool_)
    if not len(outputs):
        return unused
    ends = rows_where(block, has_role, "loss", "gradient")
    is_bad = block.statistics.nan + block.statistics.pos_inf + block.statistics.neg_inf > 0
    passes = _passes(block)
    finite, bad = np.unique(passes[ends & ~is_bad]), np.unique(passes[ends & is_bad])
    unused[outputs] = np.isin(passes[outputs], finite) & ~np.isin(passes[outputs], bad)
    return unused


def _passes(block: Block) -> NDArray[np.int64]:
    """The pass of each row, as a number."""
    return sort_key(block.step, block.worker, block.mode)


def _pass_of(block: Block, row: int) -> _Pass:
    return int(block.step[row]), int(block.worker[row]), int(block.mode[row])


def _is_derived(info: TensorInfo) -> bool:
    return info.derived


def _is_output_of_watched_model(info: TensorInfo) -> bool:
    return tensors.OUTPUTS in info.collections and bool(info.module_type)


def _not_yet_finite(block: Block, finite: tuple[str, ...]) -> tuple[NDArray[np.bool_], tuple[str, ...]]:
    """Rows of logged losses that have never been finite and of custom tensors that always contained infinity, and the series that did not.

    Args:
        block: the rows.
        finite: series that were finite before.
    """
    logged = rows_where(block, has_role, "loss") & ~(rows_where(block, _is_derived) & (block.mode == _TRAIN))
    own = rows_where(block, has_role, "custom")
    waiting = np.zeros(len(block), np.bool_)
    rows = np.flatnonzero(logged | own)
    statistics = block.statistics
    has_infinity = (statistics.pos_inf + statistics.neg_inf)[rows] > 0
    is_finite = (statistics.finite[rows] > 0) & ~(own[rows] & has_infinity)
    by_series = SeriesRows.of(view(block, rows), by_mode=True)
    finite_before, newly_finite = set(finite), {}
    for name, places in zip(by_series.names, by_series.rows(), strict=True):
        if name not in finite_before:
            finite_so_far = np.logical_or.accumulate(is_finite[places])
            waiting[rows[places]] = ~finite_so_far
            if finite_so_far[-1]:
                newly_finite[int(places[np.argmax(finite_so_far)])] = name
    names = (newly_finite[place] for place in sorted(newly_finite))
    return waiting, (*finite, *names)


def _is_skipped(block: Block) -> NDArray[np.bool_]:
    """Rows of steps that a gradient scaler skips, bool of shape (n,), if all rows of a step are known."""
    skipped = rows_where(block, is_metric, SKIPPED)
    if not skipped.any():
        return np.zeros(len(block), np.bool_)
    step_of = sort_key(block.step, block.worker)
    return np.isin(step_of, step_of[skipped])


def _unsteady(
    block: Block, before: dict[str, int], *, whole_steps: bool
) -> tuple[NDArray[np.bool_], dict[str, int]]:
    """Rows of metrics without `_STEADY` finite values in a row before, and the counts after them, as in `NonFiniteValuesState`.

    If all rows of a step are known, steps that a gradient scaler skips are left out: the norm of an overflowed gradient is not finite.
    """
    metrics = rows_where(block, has_role, "metric")
    if whole_steps:
        metrics = metrics & ~_is_skipped(block)
    rows = np.flatnonzero(metrics)
    is_bad = nonfinite(block)[rows] > 0
    ignored, counts = rows_where(block, has_role, "metric"), dict(before)
    by_series = SeriesRows.of(view(block, rows), by_mode=True)
    for name, places in zip(by_series.names, by_series.rows(), strict=True):
        count = counts.get(name, 0)
        if not is_bad[places].any():
            counts[name] = min(_STEADY, max(count, 0) + len(places))
            continue
        for place in places.tolist():
            if not is_bad[place]:
                count = min(_STEADY, max(count, 0) + 1)
            elif count in (_STEADY, _BAD):
                count = _BAD
                ignored[rows[place]] = False
            else:
                count = 0
        counts[name] = count
    return ignored, counts
