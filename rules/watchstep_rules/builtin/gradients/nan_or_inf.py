"""NaN or infinity that damages a training: in what the optimizer applies, or in what its updates leave behind."""

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
    BAD_BATCH,
    CHECK_BATCHES,
    GAPS,
    LOOK_AT_INPUT,
    Origins,
    counts_of,
    has_elements,
    is_given,
    nonfinite,
)
from watchstep_rules.signals.series import SeriesRows, Trail
from watchstep_rules.signals.tensor_selection import has_role, rows_where
from watchstep_rules.signals.update_evidence import APPLIED, MISSING, UpdateEvidence

_TRAIN = MODES.index("train")
_CHECK = ":finite_check"
_GRADIENT = ":gradient"
_PARAMETERS = ("weight", "bias")
_OF_UPDATES = ("weight", "bias", "gradient", "update", "finite_check", "buffer_check")
_MOST_NAMED = 3
_LOOKS = 3
_STATISTICS = ("running", "moving", "mean", "avg", "average", "var", "std", "ema")

_Place = tuple[int, int]
"""Step and worker."""


class NanOrInfParams(Params):
    """Parameters of `NanOrInf`."""

    steps_without_update: int = Field(
        50,
        ge=1,
        description="So many training steps in a row without a finite update are damage: one by one they are skipped batches.",
    )


class NanOrInfState(State):
    """What is remembered.

    Attributes:
        damaged: of each series of weights that is damaged, how many non-finite elements it had before.
        nan_since: of each series of weights that held NaN when it was first recorded and does so since, that first step.
        buffers: of each running statistic of the program's own modules that is not finite, how many elements at the last look, and at how
            many looks in a row there were no fewer than before.
        updating: workers of which something was recorded that only updates show.
        without: of each other worker, how many steps in a row had no finite loss, and the last of them.
    """

    damaged: dict[str, float] = Field(default_factory=dict)
    nan_since: dict[str, int] = Field(default_factory=dict)
    buffers: dict[str, tuple[int, int]] = Field(default_factory=dict)
    updating: tuple[int, ...] = ()
    without: dict[int, tuple[int, int]] = Field(default_factory=dict)


class NanOrInf(Rule[NanOrInfParams, NanOrInfState]):
    """Fires when NaN or infinity damages a training, which does not come back from it by itself.

    That is: the optimizer applies a gradient that is not finite; a trained parameter, what the optimizer keeps for it, or a running statistic
    of a normalization layer holds more non-finite elements than before; or ``steps_without_update`` training steps in a row had no finite
    update, also of a single trained parameter that holds NaN from the start. Of normalization modules of the program's own,
    known by their names, buffers count that change in training, were finite and hold no fewer non-finite elements at three looks in a row. A loss or an output that is not finite is no damage (`non_finite_values` reports it): a batch without labels has the loss NaN and the
    gradient zero, programs and gradient scalers skip updates, and masks are infinite on purpose.

    A gradient is judged where its update is made. One that the program or a `torch.amp.GradScaler` skips is not recorded; one that the optimizer
    itself leaves out is recognized by parameters and state that stay finite after the update, in host memory. Of a run that records nothing of
    updates, steps without a finite loss are counted instead.

    The message names what was not finite first in the pass: the input, weights, or the first output in the order of execution. Where
    the update of that step was left out on record, by the scaler or the program, the message says so.
    """

    name = "nan_or_inf"
    summary = "NaN or infinity damages training: an update applies it, or parameters, optimizer state or running statistics hold it"
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
        "Buffers of the program's own by other names than those of running statistics may hold figures of one batch: they are not judged.",
        "An optimizer that leaves non-finite gradients out inside of its own step() is recognized in host memory; on a GPU, and by a guard, its gradients count as applied.",
        "A program that restores its weights on purpose after a bad update was damaged when the rule fired.",
        "A program that skips bad passes before backward() and logs no loss leaves no trace of them.",
        "A scaler's skips of fused optimizers on a GPU are not counted as missing updates; scaler_skips reports them.",
    )

    def lookback(self, params: NanOrInfParams) -> int:
        """What each parameter held before, and that it has a gradient."""
        return 1

    def conclusive(self, params: NanOrInfParams, block: Block) -> NDArray[np.bool_]:
        """Rows of tensors with elements: those that are not finite are what it is about."""
        return has_elements(block)

    def evaluate(
        self, params: NanOrInfParams, state: NanOrInfState, context: Block, block: Block, now: int
    ) -> tuple[NanOrInfState, FindingRows]:
        """Judge each row by itself, weights by the row before, and losses alone by how long they are not finite."""
        bad = nonfinite(block)
        weights = _Weights(state, context, block, bad, params.steps_without_update)
        buffers, own = _own_buffers(state, block)
        updating, without, losses = _losses(state, block, params.steps_without_update)
        most = params.steps_without_update
        kinds = (
            _applied(block, bad),
            _checked(block, bad),
            _missing(block, most),
            *weights.damage(),
            own,
            losses,
        )
        findings = _findings(self.name, block, bad, kinds)
        state = NanOrInfState(
            damaged=weights.damaged,
            nan_since=weights.nan_since,
            buffers=buffers,
            updating=updating,
            without=without,
        )
        return state, findings

    def advice(self, finding: Finding) -> Advice:
        """Where the model's input was measured and was bad, that comes first."""
        usual = super().advice(finding)
        if not finding.upstream:
            return usual
        causes = (cause for cause in usual.usual_causes if cause != BAD_BATCH)
        tries = (one for one in usual.what_to_try if one != LOOK_AT_INPUT)
        return Advice((GAPS, *causes), (CHECK_BATCHES, *tries))


_Words = Callable[[Block, int, float, float], str]
"""Says what was found in a row, by value and threshold."""


class _Damage(NamedTuple):
    """Rows that are damage of one kind, and what says so: an alert needs few of the messages."""

    hits: Hits
    words: _Words

    @classmethod
    def of(
        cls,
        words: _Words,
        rows: Sequence[int] | NDArray[np.intp],
        values: Sequence[float] | NDArray[np.generic],
        thresholds: Sequence[float] | Floats | float,
    ) -> _Damage:
        """From columns of shape (n,), or one threshold for all."""
        held = np.broadcast_to(np.asarray(thresholds, np.float64), np.shape(rows))
        return cls(Hits(np.array(rows, np.intp), np.array(values, np.float64), held), words)


def _findings(rule: str, block: Block, bad: NDArray[np.int64], kinds: Sequence[_Damage]) -> FindingRows:
    """Damage of several kinds, by row, with where its passes were first not finite and what became of its updates; no row is of two kinds."""
    rows = np.concatenate([kind.hits.rows for kind in kinds])
    values = np.concatenate([kind.hits.values for kind in kinds])
    thresholds = np.concatenate([kind.hits.thresholds for kind in kinds])
    which = np.repeat(np.arange(len(kinds)), [len(kind.hits) for kind in kinds])
    order = np.argsort(rows, kind="stable")
    hits, which = Hits(rows, values, thresholds).take(order), which[order]
    evidence = functools.cache(lambda: (_Inputs(block, bad), Origins(block), UpdateEvidence(block)))

    def words(row: int, value: float, threshold: float) -> str:
        kind = kinds[int(which[np.searchsorted(hits.rows, row)])]
        return kind.words(block, row, value, threshold)

    def finish(finding: Finding, row: int) -> Finding:
        if finding.role in _PARAMETERS:
            return finding
        inputs, origins, updates = evidence()
        return origins.of(row).said_with(updates.said_with(inputs.told(finding, row), row))

    return FindingRows(rule, block, hits, words, finish)


def _applied(block: Block, bad: NDArray[np.int64]) -> _Damage:
    """Gradients that are not finite, of updates that are made; not those that the optimizer is known to have left out."""
    applied: dict[_Place, bool] = {}
    for row in np.flatnonzero(rows_where(block, is_metric, APPLIED)).tolist():
        place = _place(block, row)
        applied[place] = applied.get(place, False) or bool(block.statistics.mean[row] > 0)
    rows = np.flatnonzero(rows_where(block, has_role, "gradient") & (block.mode == _TRAIN) & (bad > 0))
    if not all(applied.values()):
        left_out = [not applied.get(_place(block, row), True) for row in rows.tolist()]
        rows = rows[~np.array(left_out, np.bool_)]
    return _Damage.of(_say_applied, rows, bad[rows].astype(np.float64), 0.0)


def _say_applied(block: Block, row: int, value: float, threshold: float) -> str:  # noqa: ARG001 - as all words
    return f"{counts_of(block, row)}, which the optimizer applies"


def _checked(block: Block, bad: NDArray[np.int64]) -> _Damage:
    """What updates left behind, where more of it is not finite than at the start."""
    rows = np.flatnonzero(rows_where(block, has_role, "finite_check") & (bad > 0))
    column = block.probes.get("nonfinite_at_start")
    start = np.zeros(len(rows)) if column is None else np.nan_to_num(column[rows], nan=0.0)
    more = bad[rows] > start
    return _Damage.of(_say_checked, rows[more], bad[rows][more].astype(np.float64), start[more])


def _say_checked(block: Block, row: int, value: float, threshold: float) -> str:  # noqa: ARG001 - as all words
    return f"{counts_of(block, row).removesuffix(_CHECK)} after the update, {threshold:g} at the start"


def _missing(block: Block, most: int) -> _Damage:
    """Steps in a row without a finite update, as the recorder counts them; of a step that is handed over in parts, the last count."""
    rows = np.flatnonzero(rows_where(block, is_metric, MISSING))
    counts = block.statistics.max[rows]
    many = counts >= most
    return _Damage.of(_say_missing, rows[many], counts[many], float(most))


def _say_missing(block: Block, row: int, value: float, threshold: float) -> str:
    return (
        f"{block.info(row).name}: {value:g} training steps in a row without a finite update, "
        f"{threshold:.0f} make it damage"
    )


class _Weights:
    """Weights and biases that hold more than the row before, until they hold no more than that again; and those that never were finite.

    A trained parameter that holds NaN when it is first recorded gets no finite update, so its steps count as such. Infinity
    may be there on purpose: a table of transitions forbids some by it.

    Attributes:
        damaged, nan_since: as the state has them, after the block.
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
        trail = Trail.of(context, chosen)
        before = trail.back(trail.column(nonfinite), 1)
        by_series = SeriesRows.of(chosen)
        for name, places in zip(by_series.names, by_series.rows(), strict=True):
            if name in self.damaged or name in self.nan_since or (bad[rows[places]] > 0).any():
                for place in places.tolist():
                    self._judge(name, int(rows[place]), float(before[place]))

    def _judge(self, name: str, row: int, before: float) -> None:
        bad = float(self._bad[row])
        if name not in self.damaged:
            if bad > before and self._trained.holds(row):
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
        if steps >= self._most and self._trained.holds(row):
            self._never.append((row, float(steps), float(self._most)))

    def damage(self) -> tuple[_Damage, _Damage]:
        """Rows that hold more than before, and rows that never were finite."""
        more, never = (
            _Damage.of(
                words, [row for row, _, _ in hits], [value for _, value, _ in hits], [at for _, _, at in hits]
            )
            for words, hits in ((_say_more, self._hits), (_say_never, self._never))
        )
        return more, never


def _say_more(block: Block, row: int, value: float, threshold: float) -> str:  # noqa: ARG001 - as all words
    return f"{counts_of(block, row)}, {threshold:g} before"


def _say_never(block: Block, row: int, value: float, threshold: float) -> str:
    return (
        f"{counts_of(block, row)}, of which some were NaN from the start: {value:.0f} training steps in a row "
        f"without a finite update of it, {threshold:.0f} make it damage"
    )


class _Trained:
    """Which parameters have a gradient; where no gradient was recorded at all, each may have.

    Gradients of the rows before count, so that rows that arrive later change nothing.
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

    def holds(self, row: int) -> bool:
        """Whether the parameter of a row has one, as far as was known then."""
        name, worker = self._block.info(row).name + _GRADIENT, int(self._block.worker[row])
        never = len(self._block)
        if self._first.get((name, worker), never) < row:
            return True
        return self._first_of.get(worker, never) >= row


def _own_buffers(state: NanOrInfState, block: Block) -> tuple[dict[str, tuple[int, int]], _Damage]:
    """Running statistics of the program's own modules that were finite, and are not at several looks in a row, each after they changed.

    A running statistic never comes back from NaN. A buffer that holds the figures of one batch does. Infinity counts where the
    buffer's name says that it is a statistic: others may be masks.
    """
    buffers = dict(state.buffers)
    hits: dict[int, tuple[int, int]] = {}
    for row in np.flatnonzero(rows_where(block, has_role, "buffer_check")).tolist():
        name = f"{block.info(row).name}@{int(block.worker[row])}"
        held = block.statistics
        bad = int(held.nan[row])
        if _is_statistic(block.info(row)):
            bad += int(held.pos_inf[row] + held.neg_inf[row])
        before, looks = buffers.pop(name, (0, 0))
        if not bad:
            continue
        looks = looks + 1 if bad >= before else 1
        buffers[name] = (bad, looks)
        if looks >= _LOOKS:
            hits[row] = bad, looks

    def say(block: Block, row: int, value: float, threshold: float) -> str:  # noqa: ARG001 - as all words
        counted = counts_of(block, row).removesuffix(_CHECK)
        return f"{counted}, 0 at the start, and no fewer at {hits[row][1]} looks in a row, each after it had changed"

    return buffers, _Damage.of(say, list(hits), [float(bad) for bad, _ in hits.values()], 0.0)


def _is_statistic(info: TensorInfo) -> bool:
    """Whether a buffer's name says that it holds a statistic."""
    leaf = info.name.removesuffix(_CHECK).rpartition(".")[2].lower()
    return any(word in leaf for word in _STATISTICS)


def _losses(
    state: NanOrInfState, block: Block, most: int
) -> tuple[tuple[int, ...], dict[int, tuple[int, int]], _Damage]:
    """Of workers that record nothing of updates, steps in a row none of whose losses is finite."""
    updates = rows_where(block, has_role, *_OF_UPDATES) | rows_where(block, is_metric, MISSING)
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
    without = {worker: held for worker, held in sorted(without.items()) if worker not in first}
    return updating, without, _Damage.of(_say_without_loss, hits, counts, float(most))


def _say_without_loss(block: Block, row: int, value: float, threshold: float) -> str:
    return (
        f"no loss was finite in {value:.0f} training steps in a row, and nothing was recorded of updates, "
        f"{threshold:.0f} make it damage: {counts_of(block, row)}"
    )


class _Inputs:
    """What models were given, where it was not finite at steps whose weights were."""

    def __init__(self, block: Block, bad: NDArray[np.int64]) -> None:
        self._block = block
        self._rows: dict[_Place, list[int]] = {}
        spoilt = rows_where(block, has_role, *_PARAMETERS) & (bad > 0)
        places = {_place(block, row) for row in np.flatnonzero(spoilt).tolist()}
        given = rows_where(block, is_given) & (block.mode == _TRAIN) & (bad > 0)
        for row in np.flatnonzero(given).tolist():
            if _place(block, row) not in places:
                self._rows.setdefault(_place(block, row), []).append(row)

    def told(self, finding: Finding, row: int) -> Finding:
        """The finding, with what its step's models were given."""
        rows = self._rows.get(_place(self._block, row))
        if not rows:
            return finding
        seen = ", and ".join(counts_of(self._block, one) for one in rows[:_MOST_NAMED])
        names = tuple(self._block.info(one).name for one in rows)
        return finding.model_copy(
            update={"message": f"{finding.message}; the input held {seen}", "upstream": names}
        )


def _place(block: Block, row: int) -> _Place:
    return int(block.step[row]), int(block.worker[row])
