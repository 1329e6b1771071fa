"""A training that resumes with other weights, hyperparameters, optimizer state or losses than it had at that step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.capture.steps.metric_names import HAS_STATE, IN_PROCESS, SCALE
from watchstep.format.block import Block, view
from watchstep.format.statistics import Floats, rms
from watchstep.format.tensors import TensorInfo
from watchstep_rules.builtin.tensors.similar_across_runs import References
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.loss_series import loss_series
from watchstep_rules.signals.reference import (
    OWN_RUN,
    CheckedReference,
    arrays_of,
    is_training,
    lowest_workers,
)
from watchstep_rules.signals.robust import medians, robust_spread
from watchstep_rules.signals.tensor_selection import has_role, rows_where

_RATE = re.compile(r"(?:.*\.)?optimizer(?:_\d+)?:learning_rate/")
_STEPS = 20
"""Steps of an attempt that are judged."""

_NEAR = 10
"""Distance in steps of the earlier values that a learning rate is compared with."""

_LOSSES_BEFORE = 100
_FEWEST = 5
_MOST_SERIES = 64
_MOST_TEXTS = 4

_RECORDED = 0.9
"""Share of the steps before an attempt that earlier attempts must have recorded: the last ones may be lost in a crash."""

_MOVED = 0.02
"""A weight tensor has moved, and shows which weights were loaded, if its size changed by this share since the run's first steps."""

_CLOSE = 0.25
"""Share of that change within which a size is that of a step."""

_MATCHED, _FAR, _LATER = 0.05, 0.5, 20
"""The weights of an attempt that begins at step 0 are those of an earlier step if the median distance of their sizes is within the first share
of the range of the size, that to the sizes of the first step is beyond the second, and the step is later by this number."""


class ResumeMismatchParams(Params):
    """Parameters of `ResumeMismatch`."""

    factor: float = Field(1.5, gt=1, description="Ratio at which a learning rate differs from those before.")
    scale: float = Field(8.0, gt=1, description="Ratio at which the scale of a gradient scaler differs.")
    losses: int = Field(5, ge=3, le=20, description="Number of first losses, whose median is compared.")
    deviations: float = Field(
        6.0, gt=0, description="Robust standard deviations by which they exceed those before."
    )
    rise: float = Field(0.5, ge=0, description="Share by which they exceed them.")
    reference: References = Field(
        {},
        description="For each tensor the steps of earlier attempts, ascending, and the rms at each step. Set when an attempt begins.",
    )


class ResumeMismatchState(State):
    """State of `ResumeMismatch`.

    Attributes:
        start: first step of the attempt; -1 before.
        place: the last step of the earlier attempts that the attempt continues from; -1 if it continues none.
        over: whether nothing remains to be judged.
        seen: metrics that were compared.
        losses: first losses by ``name/mode``.
        doubtful: whether the attempt may be another phase, so that only a higher learning rate with higher losses shows a fault.
        raised: whether a learning rate is higher than any before; of a doubtful attempt.
        texts: what differs, until they do.
        problem: why there is nothing to compare with.
    """

    start: int = -1
    place: int = -1
    over: bool = False
    seen: tuple[str, ...] = ()
    losses: dict[str, list[float]] = Field(default_factory=dict)
    doubtful: bool = False
    raised: bool = False
    texts: tuple[str, ...] = ()
    problem: str = ""


class _Earlier:
    """The statistics of earlier attempts."""

    def __init__(self, reference: References) -> None:
        self._reference = reference

    def cover(self, step: int) -> bool:
        """Whether they were recorded until shortly before a step."""
        last = max(int(self.arrays(name)[0][-1]) for name in self._reference)
        return last >= _RECORDED * step

    def has(self, name: str) -> bool:
        return name in self._reference

    def arrays(self, name: str) -> tuple[NDArray[np.int64], Floats]:
        """Steps and values of a tensor, each of shape (n,), n > 0."""
        if isinstance(self._reference, CheckedReference):
            return self._reference.arrays(name)
        return arrays_of(self._reference[name])

    def first(self, name: str) -> float:
        return float(self.arrays(name)[1][0])

    def highest(self, name: str) -> float:
        return float(self.arrays(name)[1].max())

    def at(self, name: str, step: int) -> float:
        """The value at a step, interpolated; that of the nearest step outside of the range."""
        return float(np.interp(step, *self.arrays(name)))

    def around(self, name: str, step: int) -> Floats:
        """The values that were valid within `_NEAR` steps of a step, shape (n,)."""
        steps, values = self.arrays(name)
        first = max(0, int(np.searchsorted(steps, step - _NEAR, side="right")) - 1)
        last = int(np.searchsorted(steps, step + _NEAR, side="right"))
        return values[first : max(last, first + 1)]

    def restarted(self, name: str, value: float, factor: float) -> bool:
        """Whether the values once rose by a factor to this one, as at the end of a cycle."""
        values = self.arrays(name)[1]
        risen = values[1:][values[1:] >= factor * values[:-1]]
        return bool(np.isclose(risen, value, rtol=1e-3, atol=0).any())

    def before(self, name: str, step: int, count: int) -> Floats:
        """The last values up to a step, shape (n,)."""
        steps, values = self.arrays(name)
        last = int(np.searchsorted(steps, step, side="right"))
        return values[max(0, last - count) : last]


class ResumeMismatch(Rule[ResumeMismatchParams, ResumeMismatchState]):
    """Fires when an attempt that continues an earlier one begins with other values than those at its step.

    An attempt continues an earlier one if its first step is later than 0, or if the sizes of its first weights are those of a later step:
    within 5 % of the range of each size in the median, and not those of the run's beginning. Compared in its first 20 steps:

    - **weights**, if the first step is known: most sizes that have changed since the run's first steps by 2 % are those of the beginning.
    - **learning rates**: ``rate >= factor * max(rates)``, with the rates within 10 steps of the place; or the rate is that of the run's
      first step, and differs by ``factor`` from those at the place: a schedule that begins anew.
    - **optimizer state**: the optimizer has none before the first update, and had some in earlier attempts.
    - **the scale of a gradient scaler** differs by ``scale``.
    - **losses**: ``median(first losses) > level + max(deviations * spread, rise * level)``, with median and robust spread (Hampel 1974) of
      the last 100 recorded losses before.

    An attempt that follows a training of the same process may be another phase, a fold or a trial, whose optimizer is new on purpose: it is reported only if it goes on
    from the end of that training, at ``factor`` times the highest learning rate before, with higher losses. A training that goes on with the same model is no attempt of its own. Not judged are
    lower learning rates, one to which an earlier attempt had risen before, as at the end of each cycle, the first attempt of a run and one whose earlier attempts recorded less than nine tenths of the steps before it.
    """

    name = "resume_mismatch"
    summary = "a training resumes with other weights, hyperparameters, optimizer state or losses than before"
    needs = Needs(
        collections=("metrics", "losses", "weights"), roles=("metric", "loss", "weight"), evidence_rows=0
    )
    merge = "watermark"
    reference_param = "reference"
    usual_causes = (
        "The checkpoint does not contain the state of the optimizer, the scheduler or the scaler, or it is not loaded.",
        "The scheduler was made after the optimizer's state was loaded, and set the learning rate to its first value.",
        "The weights were loaded into another model, or not at all (strict=False, other names).",
    )
    what_to_try = (
        "Save and load model, optimizer, scheduler and scaler together, and load the optimizer's state after the scheduler was made.",
        "Restart from the checkpoint with the complete state; the steps after the resume are not those of the earlier training.",
        "If the change is intended, record the new training as a run with another name.",
    )
    cannot_distinguish = (
        "A learning rate that was raised, or an optimizer that was replaced, on purpose, from one that was not restored.",
        "Other data since the resume, from weights that were not restored completely.",
        "A checkpoint at the end of a schedule's first cycle, from a schedule that begins anew.",
        "The position in the data, the seeds, and a state of the optimizer that was restored in part, are not compared.",
    )

    def reference(self, params: ResumeMismatchParams) -> str:
        """The earlier attempts."""
        return OWN_RUN

    def reference_figure(self, params: ResumeMismatchParams) -> str:
        """The size of weights; for a number its magnitude."""
        return "rms"

    def applies(self, params: ResumeMismatchParams) -> bool:
        """Whether there are earlier attempts, or a reason why they cannot be read."""
        return bool(params.reference or _problem(params))

    def problem(self, state: ResumeMismatchState) -> str:
        """Why the earlier attempts cannot be compared with."""
        return state.problem

    def evaluate(
        self,
        params: ResumeMismatchParams,
        state: ResumeMismatchState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[ResumeMismatchState, list[Finding]]:
        """Judge the first steps, one after another."""
        if state.over or not len(block):
            return state, []
        if not params.reference:
            is_resumed = bool((block.step[is_training(block)] > 0).all())
            return state.model_copy(
                update={"over": True, "problem": _problem(params) if is_resumed else ""}
            ), []
        earlier = _Earlier(params.reference)
        block = view(block, np.flatnonzero(is_training(block) & lowest_workers(block)))
        findings: list[Finding] = []
        for step, rows in _by_step(block):
            if state.start < 0:
                state, found = self._begin(params, state, earlier, rows, step)
                findings += found
            if state.over or step > state.start + _STEPS:
                return ResumeMismatchState(start=state.start, place=state.place, over=True), findings
            state, found = self._compare(params, state, earlier, rows)
            findings += found
        return state, findings

    def _begin(
        self,
        params: ResumeMismatchParams,
        state: ResumeMismatchState,
        earlier: _Earlier,
        rows: Block,
        step: int,
    ) -> tuple[ResumeMismatchState, list[Finding]]:
        """Find the step that the attempt continues from, and whether it has the weights of that step."""
        weights = _first_rows(rows, _is_weight)
        over = state.model_copy(update={"start": step, "over": True})
        is_doubtful = bool(_first_rows(rows, _is_in_process))
        if step == 0:
            place = _place_of(earlier, rows, weights)
            begun = state.model_copy(update={"start": 0, "place": place})
            return (over if place < 0 or is_doubtful else begun), []
        if not earlier.cover(step):
            return over, []
        anew = _have_first_sizes(earlier, rows, weights, step - 1)
        if not anew:
            return state.model_copy(update={"start": step, "place": step - 1, "doubtful": is_doubtful}), []
        row = weights[anew[0]]
        now, before = float(rms(rows.statistics)[row]), earlier.at(anew[0], step - 1)
        message = (
            f"the weights are not those of step {step - 1}: the rms of {anew[0]}"
            f"{f' and {len(anew) - 1} others' if len(anew) > 1 else ''} is that of the run's first steps "
            f"({now:.4g}, and {before:.4g} before the resume)"
        )
        return over, [finding_at(self.name, rows, row, value=now, threshold=before, message=message)]

    def _compare(
        self, params: ResumeMismatchParams, state: ResumeMismatchState, earlier: _Earlier, rows: Block
    ) -> tuple[ResumeMismatchState, list[Finding]]:
        """Compare the numbers of one step."""
        step = _Step(params, earlier, state.place, rows)
        seen = set(state.seen)
        losses = {key: list(values) for key, values in state.losses.items()}
        rates = list(step.rates(seen))
        numbers = [*rates, *step.scales(seen), *step.states(seen)]
        harmed = list(step.losses(losses))
        state = state.model_copy(update={"seen": tuple(sorted(seen)), "losses": losses})
        if state.doubtful:
            texts = [*state.texts, *(found.text for found in numbers)][:_MOST_TEXTS]
            is_raised = state.raised or any(
                found.value >= params.factor * earlier.highest(rows.info(found.row).name) for found in rates
            )
            state = state.model_copy(update={"texts": tuple(texts), "raised": is_raised})
            mismatches, texts = harmed if is_raised else [], [*texts, *(found.text for found in harmed)]
        else:
            mismatches, texts = numbers + harmed, [found.text for found in numbers + harmed]
        if not mismatches:
            return state, []
        row, value, limit, _ = mismatches[0]
        message = "; ".join(texts[: _MOST_TEXTS + 1])
        return state, [finding_at(self.name, rows, row, value=value, threshold=limit, message=message)]


class _Mismatch(NamedTuple):
    """A row that differs from the earlier attempts."""

    row: int
    value: float
    limit: float
    text: str


class _Step:
    """The rows of one step after a resume, compared with the earlier attempts.

    Args:
        params: parameters of the rule.
        earlier: the earlier attempts.
        place: the step that the attempt continues from.
        rows: the rows.
    """

    def __init__(self, params: ResumeMismatchParams, earlier: _Earlier, place: int, rows: Block) -> None:
        self._params, self._earlier, self._place, self._rows = params, earlier, place, rows
        self._values = rms(rows.statistics)

    def _unseen(
        self, is_of: Callable[[TensorInfo], bool], seen: set[str]
    ) -> Iterator[tuple[str, int, float]]:
        """Yield name, row and value of each metric of a kind that is not seen yet and that earlier attempts have; add it to those seen."""
        for name, row in _first_rows(self._rows, is_of).items():
            if name not in seen and self._earlier.has(name) and len(seen) < _MOST_SERIES:
                seen.add(name)
                yield name, row, float(self._values[row])

    def rates(self, seen: set[str]) -> Iterator[_Mismatch]:
        """Compare the first learning rate of each group of parameters."""
        for name, row, rate in self._unseen(_is_rate, seen):
            before = self._earlier.around(name, self._place)
            lowest, highest = float(before.min()), float(before.max())
            then = f"after the resume, and was {highest:.3g} at step {self._place}"
            if self._earlier.restarted(name, rate, self._params.factor):
                continue
            if rate >= self._params.factor * highest > 0:
                yield _Mismatch(row, rate, self._params.factor * highest, f"{name} is {rate:.3g} {then}")
            elif self._params.factor * rate <= lowest and _equal(rate, self._earlier.first(name)):
                yield _Mismatch(
                    row, rate, lowest / self._params.factor, f"{name} begins anew at {rate:.3g} {then}"
                )

    def scales(self, seen: set[str]) -> Iterator[_Mismatch]:
        """Compare the first scale of each gradient scaler."""
        for name, row, scale in self._unseen(_is_scale, seen):
            before, factor = self._earlier.around(name, self._place), self._params.scale
            if before.min() > 0 and not before.min() / factor < scale < before.max() * factor:
                limit = float(before.max()) * factor
                text = f"{name} is {scale:.4g} after the resume, and was {before.max():.4g} at step {self._place}"
                yield _Mismatch(row, scale, limit, text)

    def states(self, seen: set[str]) -> Iterator[_Mismatch]:
        """Find optimizers without state before the first update, if they had some in earlier attempts."""
        for name, row, value in self._unseen(_is_state, seen):
            if not value and self._earlier.arrays(name)[1].any():
                text = f"{name} is 0 at the first update after the resume: momentum and other averages of step {self._place} were not restored"
                yield _Mismatch(row, value, 1.0, text)

    def losses(self, first: dict[str, list[float]]) -> Iterator[_Mismatch]:
        """Collect the first losses, and compare their median."""
        for series in loss_series(Block.empty(), self._rows, "train"):
            name, row = series.name, int(series.rows[0])
            if not self._earlier.has(name) or (series.key not in first and len(first) >= _MOST_SERIES):
                continue
            values = first.setdefault(series.key, [])
            if len(values) >= self._params.losses or not np.isfinite(series.values[0]):
                continue
            values.append(float(series.values[0]))
            level, limit = self._loss_limit(self._earlier.before(name, self._place, _LOSSES_BEFORE))
            median = float(np.median(values))
            if len(values) == self._params.losses and min(values) >= 0 and median > limit:
                text = f"{name} is {median:.4g} in the median of {len(values)} steps after the resume, and was {level:.4g} before"
                yield _Mismatch(row, median, limit, text)

    def _loss_limit(self, before: Floats) -> tuple[float, float]:
        """Return the level of losses before, and the limit; infinity with few losses."""
        if len(before) < _FEWEST:
            return 0.0, np.inf
        level, spread = float(medians(before[None, :])[0]), float(robust_spread(before[None, :])[0])
        return level, level + max(self._params.deviations * spread, self._params.rise * level)


def _problem(params: ResumeMismatchParams) -> str:
    return params.reference.problem if isinstance(params.reference, CheckedReference) else ""


def _by_step(block: Block) -> Iterator[tuple[int, Block]]:
    """Yield each step with its rows, ascending."""
    order = np.argsort(block.step, kind="stable")
    steps = block.step[order]
    for part in np.split(order, np.flatnonzero(np.diff(steps)) + 1):
        if len(part):
            yield int(block.step[part[0]]), view(block, part)


def _is_weight(info: TensorInfo) -> bool:
    return has_role(info, "weight")


def _is_rate(info: TensorInfo) -> bool:
    return has_role(info, "metric") and _RATE.match(info.name) is not None


def _is_scale(info: TensorInfo) -> bool:
    return has_role(info, "metric") and info.name.endswith(SCALE)


def _is_state(info: TensorInfo) -> bool:
    return has_role(info, "metric") and info.name.endswith(f":{HAS_STATE}")


def _is_in_process(info: TensorInfo) -> bool:
    return has_role(info, "metric") and info.name.endswith(IN_PROCESS)


def _equal(value: float, other: float) -> bool:
    return bool(np.isclose(value, other, rtol=1e-6, atol=0.0))


def _first_rows(rows: Block, is_of: Callable[[TensorInfo], bool]) -> dict[str, int]:
    """Return the first row of each tensor of a kind with finite values, by name."""
    found: dict[str, int] = {}
    for row in np.flatnonzero(rows_where(rows, is_of) & np.isfinite(rms(rows.statistics))).tolist():
        found.setdefault(rows.info(row).name, row)
    return found


class _Sizes(NamedTuple):
    """Weights that earlier attempts measured: names, and sizes now, each of shape (n,)."""

    names: list[str]
    now: Floats


def _sizes(earlier: _Earlier, rows: Block, weights: dict[str, int]) -> _Sizes:
    names = [name for name in weights if earlier.has(name)]
    return _Sizes(names, rms(rows.statistics)[[weights[name] for name in names]] if names else np.empty(0))


def _have_first_sizes(earlier: _Earlier, rows: Block, weights: dict[str, int], place: int) -> list[str]:
    """Return the weights that have the sizes of the run's first steps and not those at a place, if most that have moved do; else none."""
    names, now = _sizes(earlier, rows, weights)
    first = np.array([earlier.first(name) for name in names])
    at = np.array([earlier.at(name, place) for name in names])
    moved = np.abs(at - first)
    has_moved = moved > _MOVED * np.maximum(at, first)
    anew = has_moved & (np.abs(now - first) <= _CLOSE * moved)
    if anew.sum() < 2 or anew.sum() < 0.8 * has_moved.sum():
        return []
    return [names[index] for index in np.flatnonzero(anew)]


def _place_of(earlier: _Earlier, rows: Block, weights: dict[str, int]) -> int:
    """Return the step of earlier attempts with the sizes of these weights; -1 if there is none, or it is one of the first."""
    names, now = _sizes(earlier, rows, weights)
    if len(names) < 3:
        return -1
    steps = max((earlier.arrays(name)[0] for name in names), key=len)
    sizes = np.array([np.interp(steps, *earlier.arrays(name)) for name in names])
    spans = np.ptp(sizes, axis=1)
    has_moved = spans > _MOVED * sizes.max(axis=1)
    if has_moved.sum() < 3:
        return -1
    distances = np.median(np.abs(sizes - now[:, None])[has_moved] / spans[has_moved, None], axis=0)
    nearest = int(np.argmin(distances))
    matches = distances[nearest] <= _MATCHED and distances[0] >= _FAR
    return int(steps[nearest]) if matches and steps[nearest] >= steps[0] + _LATER else -1
