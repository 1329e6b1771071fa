"""A run with statistics that deviate from those of another run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator, field_validator, model_validator

from watchstep.errors import RuleError
from watchstep.format.block import Block
from watchstep.format.statistics import Floats, StatisticsBatch
from watchstep_rules.rule import (
    Finding,
    FindingRows,
    Hits,
    Merge,
    Needs,
    Params,
    Rule,
    State,
    TensorNeeds,
    finding_at,
)
from watchstep_rules.saved_block import SavedBlock
from watchstep_rules.signals.reference import (
    FIGURES,
    MOST_POINTS,
    MOST_TENSORS,
    CheckedReference,
    Point,
    arrays_of,
    figure_of,
    is_training,
    lowest_workers,
)

_MIN_ROWS = 1000
"""Number of rows without a counterpart after which it is reported that no step was shared."""
RUN_PATTERN = r"^$|^[A-Za-z0-9][A-Za-z0-9._-]*$"

Points = Annotated[list[Point], Field(min_length=1, max_length=MOST_POINTS)]


def _unless_checked(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return value if isinstance(value, CheckedReference) else check(value)


References = Annotated[dict[str, Points], Field(max_length=MOST_TENSORS), WrapValidator(_unless_checked)]


class SimilarAcrossRunsParams(Params):
    """Parameters of `SimilarAcrossRuns`."""

    run: str = Field(
        "",
        max_length=128,
        pattern=RUN_PATTERN,
        description="Name of the other run, of the same project. Its statistics are stored when the first rows of an attempt are evaluated.",
    )
    reference: References = Field(
        {},
        description="Instead of run: for each tensor the steps of the other run, ascending, and the statistic at each step.",
    )
    figure: str = Field("rms", description="The statistic to compare, also that of the reference.")
    tolerance: float = Field(
        0.5, ge=0, description="Tolerated difference from the reference, as a share of it."
    )
    atol: float = Field(1e-8, ge=0, description="Tolerated absolute difference, in addition to tolerance.")
    elementwise: bool = Field(
        False,
        description="Compare each element of full tensors of both runs, instead of a statistic. By default weights and biases are compared.",
    )
    rtol: float = Field(
        1e-5, ge=0, description="For elementwise: tolerated difference of an element, as a share of it."
    )
    every: int = Field(
        100,
        ge=1,
        lt=2**31,
        description="For elementwise: steps between the full tensors that recorders save.",
    )

    @model_validator(mode="after")
    def _has_tensors(self) -> SimilarAcrossRunsParams:
        if self.elementwise and (self.reference or not self.run):
            raise ValueError(
                "elementwise compares the saved tensors of another run: give 'run', and no 'reference'"
            )
        return self

    @field_validator("figure")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in FIGURES:
            raise ValueError(f"unknown figure {value!r}: use one of {', '.join(FIGURES)}")
        return value

    @field_validator("reference")
    @classmethod
    def _ascending(cls, value: References) -> References:
        return ascending(value)


def ascending(reference: References) -> References:
    """Check that steps ascend; returns the reference.

    Raises:
        ValueError: the steps of a tensor do not ascend.
    """
    for name, points in () if isinstance(reference, CheckedReference) else reference.items():
        if any(later[0] <= point[0] for point, later in pairwise(points)):
            raise ValueError(f"the steps of {name!r} do not ascend")
    return reference


class SimilarAcrossRunsState(State):
    """Whether a tensor was compared; else the first one that could not be, and the number of rows that could not be."""

    compared: bool = False
    alone: str = ""
    step: int = -1
    rows: int = 0
    saved: bool = False

    @property
    def problem(self) -> str:
        """Why nothing was compared; empty if something was, or nothing was saved yet."""
        if self.compared or not self.alone or (not self.saved and self.rows < _MIN_ROWS):
            return ""
        if self.saved:
            return (
                f"no saved tensor could be compared: the other run did not save {self.alone}, or another part of it; record both runs with this "
                "rule, with the same number of workers"
            )
        return (
            f"no statistic could be compared: the other run did not measure {self.alone} at step {self.step}; give the collection the same fixed cadence in both "
            "runs"
        )


class SimilarAcrossRuns(Rule[SimilarAcrossRunsParams, SimilarAcrossRunsState]):
    """Fires when ``|figure - reference(step)| > atol + tolerance * |reference(step)|``.

    ``reference(step)`` is the statistic of the other run at the same step. Steps that the other run did not measure, or that its record
    leaves out, are not judged, so a run that equals the other never fires, whatever the tolerance. By default each recorder chooses by
    itself at which steps it measures, and two runs share few of them: a fixed cadence of the compared collections, the same in both runs,
    makes all of them comparable. That no step was shared is reported in the rule's health. The statistics of the other run do not change while an attempt is evaluated, or the same rows could later be judged
    differently: they are stored when the attempt begins (``run``), or are parameters (``reference``), as computed by
    `watchstep_rules.signals.reference.reference_of`. Rows of the modes train and global are
    judged: shards as a whole tensor, and of several workers the lowest that has the tensor at the step.

    SageMaker's SimilarAcrossRuns compares tensors with those of another trial by an unpublished criterion. Half of the reference is our
    choice: two seeds of one program differ by less in weights, and by more in losses and gradients, for which ``for`` should require many
    consecutive steps. Off by default, because it needs a reference.

    With ``elementwise`` it compares full tensors and fires when ``|x - y| > atol + rtol * |y|`` for any element x, and y of the other run at
    the same step, mode and worker, as `numpy.allclose` does. NaN equals NaN. Tensors of another shape differ. Both runs must save the
    tensors, at steps that they share: a recorder whose run has the rule saves them every ``every`` steps. A tensor without a
    counterpart is not judged; that nothing could be compared is reported in the rule's health.
    """

    name = "similar_across_runs"
    summary = "statistics deviate from those of another run"
    needs = Needs(collections=("losses", "metrics", "weights", "biases", "gradients", "activations"))
    merge = "watermark"
    reference_param = "reference"
    usual_causes = (
        "The program, its data, its seed or a library version differs from the other run.",
        "The number of workers changed, and with it the batch of a step.",
        "Rounding differs: another device, number format or compiler.",
    )
    what_to_try = (
        "Find the first step and tensor at which the two runs differ: watchstep diff.",
        "Compare seeds, versions, the order of the data and the batch of all workers together.",
    )

    def reference(self, params: SimilarAcrossRunsParams) -> str:
        """The other run."""
        return params.run

    def reference_figure(self, params: SimilarAcrossRunsParams) -> str:
        """The compared statistic."""
        return "" if params.elementwise else params.figure

    def needed(self, params: SimilarAcrossRunsParams) -> Needs:
        """Statistics, or full tensors of both runs."""
        if not params.elementwise:
            return self.needs
        return saved_in_both_runs(self.needs, ("weights", "biases"), params.every)

    def merged(self, params: SimilarAcrossRunsParams) -> Merge:
        """Full tensors are compared worker by worker."""
        return "per_worker" if params.elementwise else self.merge

    def problem(self, state: SimilarAcrossRunsState) -> str:
        """That no saved tensor could be compared."""
        return state.problem

    def conclusive(self, params: SimilarAcrossRunsParams, block: Block) -> NDArray[np.bool_]:
        """Rows that have a counterpart in the other run."""
        if isinstance(block, SavedBlock):
            return has_counterpart(block)
        return np.isfinite(statistics_of_reference(params.reference, block))

    def evaluate(
        self,
        params: SimilarAcrossRunsParams,
        state: SimilarAcrossRunsState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[SimilarAcrossRunsState, Sequence[Finding]]:
        """Compare each row with the step of the other run.

        Raises:
            RuleError: the statistics of the other run are not known.
        """
        if params.elementwise:
            return compare_elements(self.name, params.run, (params.rtol, params.atol), state, block)
        check_reference(params.run, params.reference)
        in_reference = block.mask_of_tensors([info.name in params.reference for info in block.catalogue])
        if not in_reference.any():  # without a reference, or in a block of other tensors
            return state, []
        rows = np.flatnonzero(in_reference & is_training(block) & lowest_workers(block))
        if not len(rows):
            return state, []
        seen = figure_of(block.statistics, params.figure)[rows]
        wanted = statistics_of_reference(params.reference, block)[rows]
        limit = params.atol + params.tolerance * np.abs(wanted)
        if np.isfinite(wanted).any():
            state = SimilarAcrossRunsState(compared=True)
        elif not state.compared:
            first = min((int(block.step[row]), block.info(row).name[:200]) for row in rows.tolist())
            step, name = min(first, (state.step, state.alone)) if state.alone else first
            state = SimilarAcrossRunsState(alone=name, step=step, rows=state.rows + len(rows))
        return state, [
            finding_at(
                self.name,
                block,
                int(rows[place]),
                value=float(seen[place]),
                threshold=float(wanted[place]),
                message=(
                    f"{params.figure} of {block.info(int(rows[place])).name} is {seen[place]:.4g}, in the other run "
                    f"{wanted[place]:.4g}: {limit[place]:.3g} apart are tolerated"
                ),
            )
            for place in np.flatnonzero(np.abs(seen - wanted) > limit)
        ]


def saved_in_both_runs(needs: Needs, collections: tuple[str, ...], every: int) -> Needs:
    """The needs of a comparison of full tensors of some collections."""
    return replace(needs, collections=collections, tensors=TensorNeeds(every, reference=True))


def has_counterpart(block: SavedBlock) -> NDArray[np.bool_]:
    """Rows of tensors that the other run saved too, bool of shape (n,)."""
    return np.array([reference is not None for reference in block.references], np.bool_)


def compare_elements(
    rule: str, run: str, tolerances: tuple[float, float], state: SimilarAcrossRunsState, block: Block
) -> tuple[SimilarAcrossRunsState, Sequence[Finding]]:
    """Compare each saved tensor with that of the other run.

    Args:
        rule: name of the rule.
        run: the other run.
        tolerances: the relative and the absolute tolerance of an element.
        state: the state so far.
        block: saved tensors with their references; any other block has no rows.
    """
    if not isinstance(block, SavedBlock):
        return state, []
    has_reference = has_counterpart(block)
    compared, alone = state.compared or bool(has_reference.any()), state.alone
    if not compared and len(block):
        alone = alone or f"{block.info(0).name} at step {block.step[0]}"
    apart, most = _differences(block, tolerances)
    shapes = {
        row: (list(block.values[row].shape), list(reference.shape))
        for row in np.flatnonzero(apart).tolist()
        if (reference := block.references[row]) is not None and block.values[row].shape != reference.shape
    }
    sizes = np.array([values.size for values in block.values], np.int64)

    def words(row: int, value: float, _threshold: float) -> str:
        name = block_without_values.info(row).name
        if row in shapes:
            return f"{name} has the shape {shapes[row][0]}, in run {run} {shapes[row][1]}"
        return (
            f"{value:.0f} of {sizes[row]} elements of {name} are not those of run {run}, within {tolerances[0]:g} of each and {tolerances[1]:g}; "
            f"the largest difference is {most[row]:.4g}"
        )

    block_without_values = _without_values(block)
    rows = np.flatnonzero(apart)
    hits = Hits(rows, apart[rows].astype(np.float64), np.zeros(len(rows)))
    state = SimilarAcrossRunsState(compared=compared, alone="" if compared else alone[:200], saved=True)
    return state, FindingRows(rule, block_without_values, hits, words)


def _without_values(block: SavedBlock) -> Block:
    """The same rows without values and statistics, so that findings do not keep full tensors in memory."""
    columns = {field.name: getattr(block, field.name) for field in fields(Block)}
    return Block(**{**columns, "statistics": StatisticsBatch.neutral(len(block))})


_SMALL = 64
"""Elements up to which tensors are compared together: an object may have tens of thousands of single numbers."""


def _differences(block: SavedBlock, tolerances: tuple[float, float]) -> tuple[NDArray[np.int64], Floats]:
    """For each row the result of `_apart`, arrays of shape (n,); 0 without a counterpart."""
    apart, most = np.zeros(len(block), np.int64), np.zeros(len(block))
    small: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}
    for row, (values, reference) in enumerate(zip(block.values, block.references, strict=True)):
        if reference is None:
            continue
        is_small = 0 < values.size <= _SMALL and values.shape == reference.shape
        if is_small and not _is_complex(values, reference):
            small[row] = (values.reshape(-1), reference.reshape(-1))
        else:
            apart[row], most[row] = _apart(values, reference, *tolerances)
    if small:
        rows = np.fromiter(small, np.intp)
        starts = np.concatenate([[0], np.cumsum([len(values) for values, _ in small.values()])[:-1]])
        new, old = (np.concatenate(arrays, dtype=np.float64) for arrays in zip(*small.values(), strict=True))
        differs, difference = _elements_apart(new, old, *tolerances)
        difference = np.where(differs, np.where(np.isfinite(difference), difference, np.inf), 0.0)
        apart[rows] = np.add.reduceat(differs.astype(np.int64), starts)
        most[rows] = np.maximum.reduceat(difference, starts)
    return apart, most


def _is_complex(*arrays: NDArray[Any]) -> bool:
    return any(array.dtype.kind == "c" for array in arrays)


def _elements_apart(
    new: NDArray[Any], old: NDArray[Any], rtol: float, atol: float
) -> tuple[NDArray[np.bool_], Floats]:
    """For each element whether it differs by more than the tolerances, and by how much."""
    with np.errstate(invalid="ignore", over="ignore"):
        return ~np.isclose(new, old, rtol, atol, equal_nan=True), np.abs(new - old)


def _apart(values: NDArray[Any], reference: NDArray[Any], rtol: float, atol: float) -> tuple[int, float]:
    """The number of elements that differ by more than the tolerances, and the largest difference of finite elements.

    Of tensors of different shapes all elements differ, at least one.
    """
    if values.shape != reference.shape:
        return max(1, values.size, reference.size), np.inf
    wide = np.complex128 if _is_complex(values, reference) else np.float64
    differs, difference = _elements_apart(values.astype(wide), reference.astype(wide), rtol, atol)
    difference = difference[differs]
    is_finite = bool(difference.size) and bool(np.isfinite(difference).all())
    return int(np.count_nonzero(differs)), float(difference.max()) if is_finite else np.inf


def check_reference(run: str, reference: References) -> None:
    """Check that the statistics of a run are known.

    Raises:
        RuleError: they are not.
    """
    if run and not reference:
        reason = reference.problem if isinstance(reference, CheckedReference) else ""
        raise RuleError(
            f"run {run!r}: its statistics were not stored when this attempt began"
            + (
                f": {reason}"
                if reason
                else ", because the project had no such run, they could not be stored, or the rule was added later"
            ),
            "record that run first; they are stored once, when the next attempt begins",
        )


def statistics_of_reference(reference: References, block: Block) -> Floats:
    """Return the statistic of the other run at the step of each row, float64 of shape (n,); NaN if it is not known."""
    values = np.full(len(block), np.nan)
    order = np.argsort(block.tensor, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(block.tensor[order])) + 1):
        name = block.info(int(rows[0])).name if len(rows) else ""
        if name not in reference:
            continue
        steps, figures = (
            reference.arrays(name) if isinstance(reference, CheckedReference) else arrays_of(reference[name])
        )
        place = np.minimum(np.searchsorted(steps, block.step[rows]), len(steps) - 1)
        values[rows] = np.where(steps[place] == block.step[rows], figures[place], np.nan)
    return values
