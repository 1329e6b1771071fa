"""NaN or infinity that damages a training: in an applied update, or in parameters, optimizer state or running statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format import tensors
from watchstep.format.block import Block, view
from watchstep.format.statistics import Floats
from watchstep.format.tensors import MODES, TensorInfo
from watchstep_rules.rule import Advice, Finding, FindingRows, Hits, Needs, Params, Rule, State, is_metric
from watchstep_rules.signals.nonfinite import (
    USUAL_CAUSES,
    WHAT_TO_TRY,
    Origins,
    advice_for_bad_input,
    counts_of,
    has_elements,
    is_model_input,
    nonfinite,
)
from watchstep_rules.signals.series import LaggedRows, SeriesRows
from watchstep_rules.signals.tensor_selection import has_role, rows_where
from watchstep_rules.signals.update_evidence import APPLIED, MISSING, UpdateEvidence

_TRAIN = MODES.index("train")
_CHECK = ":finite_check"
_GRADIENT = ":gradient"
_PARAMETERS = ("weight", "bias")
_OF_UPDATES = ("weight", "bias", "gradient", "update", "finite_check", "buffer_check")
_MOST_NAMED = 3
_CHECKS = 3
_STATISTICS = ("running", "moving", "mean", "avg", "average", "var", "std", "ema")

_Place = tuple[int, int]
"""Step and worker."""


class NanOrInfParams(Params):
    """Parameters of `NanOrInf`."""

    steps_without_update: int = Field(
        50,
        ge=1,
        description="This many consecutive training steps without a finite update are damage; fewer are skipped batches.",
    )


class NanOrInfState(State):
    """State of `NanOrInf`.

    Attributes:
        damaged: the number of non-finite elements before the damage, by damaged series of weights.
        nan_since: the first recorded step, by series of weights that have contained NaN since they were first recorded.
        buffers: by running statistic of the program's own modules that is not finite: the number of elements at the last check, and the
            number of consecutive checks with no fewer than before.
        updating: workers with records that only updates produce.
        without: by other worker: the number of consecutive steps without a finite loss, and the last of them.
        gradients: by gradient that the program recorded itself: the number of consecutive steps at which it was recorded and was not
            finite, and the last of them.
    """

    damaged: dict[str, float] = Field(default_factory=dict)
    nan_since: dict[str, int] = Field(default_factory=dict)
    buffers: dict[str, tuple[int, int]] = Field(default_factory=dict)
    updating: tuple[int, ...] = ()
    without: dict[int, tuple[int, int]] = Field(default_factory=dict)
    gradients: dict[str, tuple[int, int]] = Field(default_factory=dict)


class NanOrInf(Rule[NanOrInfParams, NanOrInfState]):
    """Fires when NaN or infinity damages a training, which does not recover from it by itself.

    Damage means: the optimizer applies a gradient that is not finite; a trained parameter, its optimizer state, or a running statistic of
    a normalization layer contains more non-finite elements than before; or ``steps_without_update`` consecutive training steps had no
    finite update, also for a single trained parameter that contains NaN from the start. For normalization modules of the program's own,
    recognized by name, buffers count that change in training, were finite, and contain no fewer non-finite elements at three
    consecutive checks. A loss or an output that is not finite is not damage (`non_finite_values` reports it): a batch without labels has
    the loss NaN and the gradient zero, programs and gradient scalers skip updates, and masks are infinite on purpose.

    A gradient is judged when its update is made. A gradient that the program or a `torch.amp.GradScaler` skips is not recorded. One that
    the optimizer itself skips is recognized by parameters and state that stay finite after the update, in host memory. For a run without
    records of updates, steps without a finite loss are counted instead.

    For a gradient that the program records itself (``hook.record`` with a role), it is not known whether its update is made. It is
    damage once it was not finite at ``steps_without_update`` consecutive records. A weight or bias that the program records itself is a
    trained parameter: it is damage as soon as it contains more non-finite elements than before.

    The message names what was not finite first in the pass: the input, weights, or the first output in the order of execution. If the
    record shows that the scaler or the program skipped the update of that step, the message states it.
    """

    name = "nan_or_inf"
    summary = "NaN or infinity damages training: an update applies it, or parameters, optimizer state or running statistics contain it"
    needs = Needs(
        collections=(
            "losses",
            "gradients",
            "weights",
            "biases",
            "updates",
            tensors.FINITE_CHECKS,
            tensors.INPUTS,
            tensors.METRICS,
            tensors.ACTIVATIONS,
        ),
        evidence=(tensors.INPUTS, tensors.METRICS, tensors.ACTIVATIONS, "updates"),
        evidence_rows=0,
    )
    merge = "per_worker"
    usual_causes = USUAL_CAUSES
    what_to_try = WHAT_TO_TRY
    cannot_distinguish = (
        "Buffers of the program's own modules without the name of a running statistic may contain values of one batch; they are not judged.",
        "An optimizer that skips non-finite gradients inside its own step() is recognized in host memory; on a GPU, and in a guard, its gradients count as applied.",
        "A program that restores its weights on purpose after a bad update was damaged when the rule fired.",
        "A program that skips bad passes before backward() and logs no loss leaves no record of them.",
        "For a program that records its gradients but not its weights itself, applied non-finite gradients are reported only after steps_without_update records.",
        "Skips of a gradient scaler with fused optimizers on a GPU are not counted as missing updates; scaler_skips reports them.",
    )

    def lookback(self, params: NanOrInfParams) -> int:
        """One row: the previous counts of each parameter, and whether it has a gradient."""
        return 1

    def conclusive(self, params: NanOrInfParams, block: Block) -> NDArray[np.bool_]:
        """Rows of tensors with elements, whether finite or not."""
        return has_elements(block)

    def evaluate(
        self, params: NanOrInfParams, state: NanOrInfState, context: Block, block: Block, now: int
    ) -> tuple[NanOrInfState, FindingRows]:
        """Judge each row by itself, weights against the previous row, and losses by how long they have not been finite."""
        bad = nonfinite(block)
        weights = _Weights(state, context, block, bad, params.steps_without_update)
        buffers, own = _own_buffers(state, block)
        most = params.steps_without_update
        updating, without, losses = _losses(state, block, most)
        gradients, given = _given_gradients(state, block, bad, most)
        kinds = (
            _applied(block, bad),
            _checked(block, bad),
            _missing(block, most),
            *weights.damage(),
            own,
            losses,
            given,
        )
        findings = _findings(self.name, block, bad, kinds)
        state = NanOrInfState(
            damaged=weights.damaged,
            nan_since=weights.nan_since,
            buffers=buffers,
            updating=updating,
            without=without,
            gradients=gradients,
        )
        return state, findings

    def advice(self, finding: Finding) -> Advice:
        """If the model's input was measured and was bad, it is the first cause."""
        usual = super().advice(finding)
        return advice_for_bad_input(usual) if finding.upstream else usual


_Message = Callable[[Block, int, float, float], str]
"""Returns the message for a row, given value and threshold."""


class _Damage(NamedTuple):
    """Rows with damage of one kind, and the function that builds their messages, of which an alert needs few."""

    hits: Hits
    message: _Message

    @classmethod
    def of(
        cls,
        message: _Message,
        rows: Sequence[int] | NDArray[np.intp],
        values: Sequence[float] | NDArray[np.generic],
        thresholds: Sequence[float] | Floats | float,
    ) -> _Damage:
        """From columns of shape (n,), or one threshold for all rows."""
        per_row = np.broadcast_to(np.asarray(thresholds, np.float64), np.shape(rows))
        return cls(Hits(np.array(rows, np.intp), np.array(values, np.float64), per_row), message)


def _findings(rule: str, block: Block, bad: NDArray[np.int64], kinds: Sequence[_Damage]) -> FindingRows:
    """Findings for damage of several kinds, by row, with evidence about origins and updates. No row has two kinds of damage."""
    rows = np.concatenate([kind.hits.rows for kind in kinds])
    values = np.concatenate([kind.hits.values for kind in kinds])
    thresholds = np.concatenate([kind.hits.thresholds for kind in kinds])
    kind_of = np.repeat(np.arange(len(kinds)), [len(kind.hits) for kind in kinds])
    order = np.argsort(rows, kind="stable")
    hits, kind_of = Hits(rows, values, thresholds).take(order), kind_of[order]
    evidence = functools.cache(lambda: (_Inputs(block, bad), Origins(block), UpdateEvidence(block)))

    def words(row: int, value: float, threshold: float) -> str:
        kind = kinds[int(kind_of[np.searchsorted(hits.rows, row)])]
        return kind.message(block, row, value, threshold)

    def finish(finding: Finding, row: int) -> Finding:
        if finding.role in _PARAMETERS:
            return finding
        inputs, origins, updates = evidence()
        return origins.of(row).annotate(updates.annotate(inputs.annotate(finding, row), row))

    return FindingRows(rule, block, hits, words, finish)


def _is_watched(info: TensorInfo, *roles: str) -> bool:
    """Whether a tensor with one of the roles belongs to a watched model: the module of a tensor that the program records is not known."""
    return info.role in roles and bool(info.module_type)


def _is_given(info: TensorInfo, *roles: str) -> bool:
    """Whether the program recorded a tensor with one of the roles itself."""
    return info.role in roles and not info.module_type


def _applied(block: Block, bad: NDArray[np.int64]) -> _Damage:
    """Gradients that are not finite, in updates that are made, except those that the optimizer is known to have skipped."""
    applied: dict[_Place, bool] = {}
    for row in np.flatnonzero(rows_where(block, is_metric, APPLIED)).tolist():
        place = _place(block, row)
        applied[place] = applied.get(place, False) or bool(block.statistics.mean[row] > 0)
    rows = np.flatnonzero(rows_where(block, _is_watched, "gradient") & (block.mode == _TRAIN) & (bad > 0))
    if not all(applied.values()):
        skipped = [not applied.get(_place(block, row), True) for row in rows.tolist()]
        rows = rows[~np.array(skipped, np.bool_)]
    return _Damage.of(_applied_message, rows, bad[rows].astype(np.float64), 0.0)


def _applied_message(block: Block, row: int, value: float, threshold: float) -> str:  # noqa: ARG001 - a _Message
    return f"{counts_of(block, row)}, which the optimizer is about to apply"


def _checked(block: Block, bad: NDArray[np.int64]) -> _Damage:
    """Parameters and optimizer state after an update with more non-finite elements than at the start."""
    rows = np.flatnonzero(rows_where(block, has_role, "finite_check") & (bad > 0))
    column = block.probes.get("nonfinite_at_start")
    start = np.zeros(len(rows)) if column is None else np.nan_to_num(column[rows], nan=0.0)
    more = bad[rows] > start
    return _Damage.of(_checked_message, rows[more], bad[rows][more].astype(np.float64), start[more])


def _checked_message(block: Block, row: int, value: float, threshold: float) -> str:  # noqa: ARG001 - a _Message
    return f"{counts_of(block, row).removesuffix(_CHECK)} after the update, {threshold:g} at the start"


def _missing(block: Block, most: int) -> _Damage:
    """Consecutive steps without a finite update, as counted by the recorder; for a step delivered in parts, the last count."""
    rows = np.flatnonzero(rows_where(block, is_metric, MISSING))
    counts = block.statistics.max[rows]
    many = counts >= most
    return _Damage.of(_missing_message, rows[many], counts[many], float(most))


def _missing_message(block: Block, row: int, value: float, threshold: float) -> str:
    return (
        f"{block.info(row).name}: {value:g} training steps in a row without a finite update, "
        f"damage from {threshold:.0f} on"
    )


class _Weights:
    """Weights and biases with more non-finite elements than in the previous row, until they recover; and those that never were finite.

    A trained parameter that contains NaN when it is first recorded gets no finite update, so its steps count as steps without an
    update. Infinity may be on purpose: a table of transitions forbids some transitions with it.

    Attributes:
        damaged, nan_since: the fields of the state after the block.
    """

    def __init__(
        self, state: NanOrInfState, context: Block, block: Block, bad: NDArray[np.int64], most: int
    ) -> None:
        self.damaged, self.nan_since = dict(state.damaged), dict(state.nan_since)
        self._hits: list[tuple[int, float, float]] = []
        self._never: list[tuple[int, float, float]] = []
        self._block, self._bad, self._most = block, bad, most
        parameters = rows_where(block, has_role, *_PARAMETERS)
        if not self.damaged and not self.nan_since and not (bad[parameters] > 0).any():
            return
        self._trained = _Trained(context, block)
        rows = np.flatnonzero(parameters)
        chosen = view(block, rows)
        lagged = LaggedRows.of(context, chosen)
        before = lagged.lag(lagged.column(nonfinite), 1)
        by_series = SeriesRows.of(chosen)
        for name, places in zip(by_series.names, by_series.rows(), strict=True):
            if name in self.damaged or name in self.nan_since or (bad[rows[places]] > 0).any():
                for place in places.tolist():
                    self._judge(name, int(rows[place]), float(before[place]))

    def _judge(self, name: str, row: int, before: float) -> None:
        bad = float(self._bad[row])
        if name not in self.damaged:
            if bad > before and self._trained.has_gradient(row):
                self.damaged[name] = before
            else:
                self._judge_start(name, row, is_first=bool(np.isnan(before)))
                return
        if bad <= self.damaged[name]:
            del self.damaged[name]
            return
        self._hits.append((row, bad, self.damaged[name]))

    def _judge_start(self, name: str, row: int, *, is_first: bool) -> None:
        block, step = self._block, int(self._block.step[row])
        if not block.statistics.nan[row]:
            self.nan_since.pop(name, None)
            return
        if is_first:
            self.nan_since[name] = step
        if name not in self.nan_since:
            return
        steps = step - self.nan_since[name] + 1
        if steps >= self._most and self._trained.has_gradient(row):
            self._never.append((row, float(steps), float(self._most)))

    def damage(self) -> tuple[_Damage, _Damage]:
        """Rows with more non-finite elements than before, and rows of parameters that never were finite."""
        more, never = (
            _Damage.of(
                message,
                [row for row, _, _ in hits],
                [value for _, value, _ in hits],
                [threshold for _, _, threshold in hits],
            )
            for message, hits in ((_more_message, self._hits), (_never_finite_message, self._never))
        )
        return more, never


def _more_message(block: Block, row: int, value: float, threshold: float) -> str:  # noqa: ARG001 - a _Message
    return f"{counts_of(block, row)}, {threshold:g} before"


def _never_finite_message(block: Block, row: int, value: float, threshold: float) -> str:
    return (
        f"{counts_of(block, row)}, some of them NaN from the start: {value:.0f} training steps in a row "
        f"without a finite update, damage from {threshold:.0f} on"
    )


class _Trained:
    """Which parameters have a gradient; if no gradient was recorded at all, every parameter may have one.

    Only gradients in earlier rows count, so that later rows do not change the result.
    """

    def __init__(self, context: Block, block: Block) -> None:
        self._block = block
        self._first: dict[tuple[str, int], int] = {}
        self._first_of: dict[int, int] = {}
        for before, rows in ((True, context), (False, block)):
            chosen = np.flatnonzero(rows_where(rows, has_role, "gradient"))
            key = (rows.tensor[chosen].astype(np.int64) << 32) | rows.worker[chosen]
            for row in chosen[np.unique(key, return_index=True)[1]].tolist():
                name, worker, at = rows.info(row).name, int(rows.worker[row]), -1 if before else row
                self._first[name, worker] = min(self._first.get((name, worker), at), at)
                self._first_of[worker] = min(self._first_of.get(worker, at), at)

    def has_gradient(self, row: int) -> bool:
        """Whether the parameter of a row has a gradient, according to earlier rows; always, if the program recorded it itself."""
        if _is_given(self._block.info(row), *_PARAMETERS):
            return True
        name, worker = self._block.info(row).name + _GRADIENT, int(self._block.worker[row])
        never = len(self._block)
        if self._first.get((name, worker), never) < row:
            return True
        return self._first_of.get(worker, never) >= row


def _own_buffers(state: NanOrInfState, block: Block) -> tuple[dict[str, tuple[int, int]], _Damage]:
    """Running statistics of the program's own modules that were finite and are not at several consecutive checks, each after a change.

    A running statistic never recovers from NaN; a buffer with values of one batch does. Infinity counts only if the name of the buffer
    is that of a statistic, because other buffers may be masks.
    """
    buffers = dict(state.buffers)
    hits: dict[int, tuple[int, int]] = {}
    for row in np.flatnonzero(rows_where(block, has_role, "buffer_check")).tolist():
        name = f"{block.info(row).name}@{int(block.worker[row])}"
        statistics = block.statistics
        bad = int(statistics.nan[row])
        if _is_statistic(block.info(row)):
            bad += int(statistics.pos_inf[row] + statistics.neg_inf[row])
        before, checks = buffers.pop(name, (0, 0))
        if not bad:
            continue
        checks = checks + 1 if bad >= before else 1
        buffers[name] = (bad, checks)
        if checks >= _CHECKS:
            hits[row] = bad, checks

    def message(block: Block, row: int, value: float, threshold: float) -> str:  # noqa: ARG001 - a _Message
        counts = counts_of(block, row).removesuffix(_CHECK)
        return (
            f"{counts}, 0 at the start, and no fewer at {hits[row][1]} checks in a row, each after a change"
        )

    return buffers, _Damage.of(message, list(hits), [float(bad) for bad, _ in hits.values()], 0.0)


def _is_statistic(info: TensorInfo) -> bool:
    """Whether the name of a buffer is that of a statistic."""
    leaf = info.name.removesuffix(_CHECK).rpartition(".")[2].lower()
    return any(word in leaf for word in _STATISTICS)


def _losses(
    state: NanOrInfState, block: Block, most: int
) -> tuple[tuple[int, ...], dict[int, tuple[int, int]], _Damage]:
    """Consecutive steps without a finite loss, for workers without records of updates."""
    updates = rows_where(block, _is_watched, *_OF_UPDATES) | rows_where(block, is_metric, MISSING)
    first = dict.fromkeys(state.updating, -1)
    for worker in np.unique(block.worker[updates]).tolist():
        first.setdefault(worker, int(np.argmax(updates & (block.worker == worker))))
    losses = np.flatnonzero(rows_where(block, has_role, "loss") & (block.mode == _TRAIN))
    without = dict(state.without)
    hits, counts = [], []
    is_finite = (block.statistics.finite > 0) | (block.statistics.count == 0)
    for row in losses.tolist() if without or not is_finite[losses].all() else ():
        step, worker = _place(block, row)
        if is_finite[row] or first.get(worker, row) < row:
            without.pop(worker, None)
            continue
        count, last = without.get(worker, (0, -1))
        count += step != last
        without[worker] = (count, step)
        if count >= most:
            hits.append(row)
            counts.append(float(count))
    updating = tuple(sorted(first))
    without = {worker: count for worker, count in sorted(without.items()) if worker not in first}
    return updating, without, _Damage.of(_without_loss_message, hits, counts, float(most))


def _without_loss_message(block: Block, row: int, value: float, threshold: float) -> str:
    return (
        f"no loss was finite in {value:.0f} training steps in a row, and no updates were recorded, "
        f"damage from {threshold:.0f} on: {counts_of(block, row)}"
    )


def _given_gradients(
    state: NanOrInfState, block: Block, bad: NDArray[np.int64], most: int
) -> tuple[dict[str, tuple[int, int]], _Damage]:
    """Gradients that the program recorded itself, after many consecutive records that were not finite."""
    gradients = dict(state.gradients)
    rows = np.flatnonzero(rows_where(block, _is_given, "gradient") & (block.mode == _TRAIN))
    hits, counts = [], []
    for row in rows.tolist() if gradients or (bad[rows] > 0).any() else ():
        name, step = f"{block.info(row).name}@{int(block.worker[row])}", int(block.step[row])
        count, last = gradients.pop(name, (0, -1))
        if not bad[row]:
            continue
        count += step != last
        gradients[name] = (count, step)
        if count >= most:
            hits.append(row)
            counts.append(float(count))
    return gradients, _Damage.of(_given_message, hits, counts, float(most))


def _given_message(block: Block, row: int, value: float, threshold: float) -> str:
    return (
        f"{block.info(row).name} was not finite at {value:.0f} records in a row, damage from {threshold:.0f} on: "
        f"{counts_of(block, row)}"
    )


class _Inputs:
    """Inputs of models that were not finite at steps with finite weights."""

    def __init__(self, block: Block, bad: NDArray[np.int64]) -> None:
        self._block = block
        self._rows: dict[_Place, list[int]] = {}
        bad_parameters = rows_where(block, has_role, *_PARAMETERS) & (bad > 0)
        places = {_place(block, row) for row in np.flatnonzero(bad_parameters).tolist()}
        bad_inputs = rows_where(block, is_model_input) & (block.mode == _TRAIN) & (bad > 0)
        for row in np.flatnonzero(bad_inputs).tolist():
            if _place(block, row) not in places:
                self._rows.setdefault(_place(block, row), []).append(row)

    def annotate(self, finding: Finding, row: int) -> Finding:
        """The finding with the bad inputs of its step in its message and data."""
        rows = self._rows.get(_place(self._block, row))
        if not rows:
            return finding
        counts = ", and ".join(counts_of(self._block, bad_input) for bad_input in rows[:_MOST_NAMED])
        names = tuple(self._block.info(bad_input).name for bad_input in rows)
        return finding.model_copy(
            update={"message": f"{finding.message}; the input contained {counts}", "upstream": names}
        )


def _place(block: Block, row: int) -> _Place:
    return int(block.step[row]), int(block.worker[row])
