"""Normalization layers that train while their running statistics do not change, and normalization layers in evaluation mode."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block, view
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.robust import short
from watchstep_rules.signals.series import SeriesRows, in_a_row, probe

_VARIANCE = "running_var"


class FrozenBatchNormParams(Params):
    """Parameters of `FrozenBatchNorm`."""

    records: int = Field(2, ge=1, le=1000, description="Records in a row at which it is so.")
    batches: int = Field(
        20, ge=1, description="Batches in training mode that must have left running statistics untouched."
    )
    drift: float = Field(
        10.0,
        gt=1,
        description="Root mean square of an output over that of data with the running statistics, from which on they do not fit.",
    )


class Fit(NamedTuple):
    """How the output of a layer in evaluation mode compares with what its scale and shift make of data with its running statistics.

    Attributes:
        output: mean square of the last output, negative before the first.
        records: of the running statistics in a row at which that was too large.
    """

    output: float = -1.0
    records: int = 0

    def ratio(self, affine_square: float) -> float:
        """Root mean square of the last output over the expected one; 0 where one of them is not known."""
        return (self.output / affine_square) ** 0.5 if self.output >= 0 and affine_square > 0 else 0.0


class FrozenBatchNormState(State):
    """Layers that were seen in training mode, by ``tensor@worker``, and the fit of those in evaluation mode, by ``module@worker``."""

    trained: tuple[str, ...] = ()
    fits: dict[str, Fit] = Field(default_factory=dict)


class _Why(IntEnum):
    UNTRAINED = 1
    UNTOUCHED = 2
    FORGOTTEN = 3
    DRIFTED = 4


class FrozenBatchNorm(Rule[FrozenBatchNormParams, FrozenBatchNormState]):
    """Fires for a layer with running statistics when one of these holds at ``records`` records in a row.

    - **Never in training mode**: its scale learns, the whole model is in evaluation mode, and ``running_var`` is exactly 1 for all
      channels, as it begins: it normalises by nothing.
    - **Untouched**: in training mode it has taken in ``batches`` batches, and ``running_var`` is exactly 1 all the
      same: with a momentum of 0 evaluation will normalise by nothing.
    - **Forgotten in evaluation mode**: its scale learns, the layer was in training mode earlier in this run, and now the
      whole model is in evaluation mode at updates: after an evaluation nobody called ``train()``.
    - **Drifted**: it is in evaluation mode, and the root mean square of its output is ``drift`` times ``sqrt(mean(scale²) + mean(shift²))``,
      which is that of data with its running statistics: its input has become another. Layers before it that learn on move that ratio to 3.5 in
      healthy fine-tuning; inputs that are no longer scaled move it to hundreds. A frozen scale and shift count as well, and a layer without
      them makes 1 of it. An input that becomes much smaller than the statistics is not seen.

    ``x̂ = (x - running_mean) / sqrt(running_var + eps)`` in evaluation mode; a batch in training mode moves the running
    statistics by ``momentum`` times the distance (Ioffe and Szegedy, 2015; PyTorch's BatchNorm2d). A variance of exactly
    1 in every channel is what no batch leaves.

    Deliberate freezing is left alone: layers whose scale does not require a gradient or no optimizer holds, pretrained
    layers that are in evaluation mode from the start, and single layers that are in evaluation mode while the model
    is in training mode, as long as their running statistics fit. `running_statistics_frozen` notes them.
    """

    name = "frozen_batch_norm"
    summary = "a normalisation layer learns while its running statistics stand still"
    version = 3
    needs = Needs(
        collections=("buffers", "activations"),
        roles=("buffer", "output"),
        about=("buffer",),
        evidence_rows=0,
    )
    merge = "sealed"
    usual_causes = (
        "model.eval() was called for an evaluation, and model.train() not after it.",
        "The model was built or loaded in evaluation mode, and never put into training mode.",
        "The layer's momentum is 0, as other frameworks' momentum of 1 means.",
        "The layer is frozen with statistics of other data, or of inputs that were scaled.",
    )
    what_to_try = (
        "Call model.train() after each evaluation, before the next batch.",
        "Set the layer's momentum to 0.1, or None for a plain mean.",
        "Compare the inputs' mean and deviation with those of the training that left the statistics, or let the layer take in batches.",
        "To freeze a layer on purpose, also take its scale and shift from the optimizer.",
    )
    cannot_distinguish = (
        "A model that is fine-tuned with the whole model in evaluation mode from some step on, on purpose, from a forgotten train().",
        "An input that is meant to be of another scale from some step on, from one that is no longer normalized.",
        "An input that becomes much smaller than the running statistics is not found.",
        "Normalization layers of the program's own classes are not judged.",
    )

    def lookback(self, params: FrozenBatchNormParams) -> int:
        """The records before."""
        return params.records - 1

    def conclusive(self, params: FrozenBatchNormParams, block: Block) -> NDArray[np.bool_]:
        """All rows but those of a layer of which nothing was measured."""
        return has_probe(block, "training") | (block.statistics.finite > 0)

    def evaluate(
        self,
        params: FrozenBatchNormParams,
        state: FrozenBatchNormState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[FrozenBatchNormState, list[Finding]]:
        """Judge each layer by its running variance."""
        fits, drifted = _follow_fits(params, state.fits, block)
        context, block = _variances(context), _variances(block)
        if not len(block):
            return state.model_copy(update={"fits": fits}), []
        trained, was_trained = _trained(state.trained, block)
        found = np.zeros(len(block), np.int64)
        for why in _Why:
            if why is _Why.DRIFTED:
                continue
            hit = in_a_row(context, block, lambda rows, why=why: _holds(rows, why, params), params.records)  # type: ignore[misc]  # mypy does not infer a lambda with a default
            found[hit & (was_trained | (why is not _Why.FORGOTTEN)) & (found == 0)] = why
        ratio = np.array([drifted.get(_key(block, row), 0.0) for row in range(len(block))])
        found[(ratio > 0) & (found == 0)] = _Why.DRIFTED
        return FrozenBatchNormState(trained=trained, fits=fits), [
            self._finding(params, block, int(row), _Why(int(found[row])), float(ratio[row]))
            for row in np.flatnonzero(found)
        ]

    def _finding(
        self, params: FrozenBatchNormParams, block: Block, row: int, why: _Why, ratio: float
    ) -> Finding:
        info = block.info(row)
        layer = info.module or "the model"
        said = {
            _Why.UNTRAINED: f"{layer} learns while the whole model is in evaluation mode, and {info.name} is 1 everywhere, as it begins",
            _Why.UNTOUCHED: (
                f"{layer} has taken in {probe(block, 'batches_tracked')[row]:.0f} batches, and {info.name} is 1 everywhere, "
                "as it begins"
            ),
            _Why.FORGOTTEN: (
                f"{layer} learns while the whole model is in evaluation mode, in which {info.name} stands still; earlier it "
                "was in training mode"
            ),
            _Why.DRIFTED: (
                f"the output of {layer}, which is in evaluation mode, has {ratio:.3g} times the root mean square that its running "
                f"statistics promise, {params.drift:g} is the limit: {info.name} does not fit its input"
            ),
        }[why]
        message = f"{said}, at {params.records} records in a row"
        if why is _Why.DRIFTED:
            return finding_at(self.name, block, row, value=ratio, threshold=params.drift, message=message)
        value = float(block.statistics.mean[row])
        return finding_at(
            self.name, block, row, value=value if np.isfinite(value) else 0.0, threshold=1.0, message=message
        )


def _holds(rows: Block, why: _Why, params: FrozenBatchNormParams) -> NDArray[np.bool_]:
    held, training = rows.statistics, probe(rows, "training")
    forgotten = (probe(rows, "learns") == 1) & (training == 0) & (probe(rows, "model_training") == 0)
    untouched = (held.min == 1) & (held.max == 1) & (held.nonfinite == 0)
    holds: NDArray[np.bool_] = {
        _Why.UNTRAINED: forgotten & untouched,
        _Why.UNTOUCHED: untouched & (training == 1) & (probe(rows, "batches_tracked") >= params.batches),
        _Why.FORGOTTEN: forgotten,
    }[why]
    return holds


def _key(block: Block, row: int) -> tuple[int, str]:
    return int(block.step[row]), f"{block.info(row).module}@{block.worker[row]}"


def _follow_fits(
    params: FrozenBatchNormParams, known: dict[str, Fit], block: Block
) -> tuple[dict[str, Fit], dict[tuple[int, str], float]]:
    """The fit of each layer in evaluation mode, and the ratio of those that drifted, by step and ``module@worker``.

    A layer is followed from the first record that shows it in evaluation mode until one shows it in training mode, so that models whose
    layers train cost nothing here.
    """
    is_variance = block.mask_of_tensors([info.name.endswith(_VARIANCE) for info in block.catalogue])
    variances = np.flatnonzero(is_variance & (block.mode == 0))
    evaluating = probe(block, "training")[variances] == 0
    if not known and not evaluating.any():
        return known, {}
    modules = {name.rpartition("@")[0] for name in known}
    modules |= {block.info(row).module for row in variances[evaluating].tolist()}
    chosen = block.mask_of_tensors(
        [info.module in modules and info.role == "output" for info in block.catalogue]
    )
    outputs = np.flatnonzero(chosen & (block.mode == 0) & (block.statistics.finite > 0))
    mean_square = block.statistics.square_sum[outputs] / block.statistics.finite[outputs]
    affine_square = probe(block, "affine_square")[variances]
    # Of one step the outputs come first.
    events = [
        (int(block.step[row]), 0, row, value)
        for row, value in zip(outputs.tolist(), mean_square.tolist(), strict=True)
    ]
    events += [
        (int(block.step[row]), 1, row, value if here else None)
        for row, value, here in zip(
            variances.tolist(), affine_square.tolist(), evaluating.tolist(), strict=True
        )
    ]
    fits, drifted = dict(known), {}
    for step, is_statistic, row, value in sorted(events, key=lambda event: event[:3]):
        name = f"{block.info(row).module}@{block.worker[row]}"
        fit = fits.get(name)
        if not is_statistic:
            if fit is not None:
                fits[name] = fit._replace(output=short(value))
        elif value is None:
            fits.pop(name, None)
        else:
            fit = fit or Fit()
            ratio = fit.ratio(value)
            records = min(fit.records + 1, params.records) if ratio >= params.drift else 0
            fits[name] = fit._replace(records=records)
            if records >= params.records:
                drifted[step, name] = ratio
    return fits, drifted


def _trained(known: tuple[str, ...], block: Block) -> tuple[tuple[str, ...], NDArray[np.bool_]]:
    """The layers that have been in training mode, and whether that of each row was, up to the row."""
    series = SeriesRows.of(block)
    training = probe(block, "training") == 1
    was, new = np.zeros(len(block), np.bool_), []
    for name, rows in zip(series.names, series.rows(), strict=True):
        was[rows] = np.logical_or.accumulate(training[rows]) | (name in known)
        if name not in known and was[rows[-1]]:
            new.append((int(rows[int(np.argmax(training[rows]))]), name))
    return (*known, *(name for _, name in sorted(new))), was


def _variances(block: Block) -> Block:
    chosen = block.mask_of_tensors([info.name.endswith(_VARIANCE) for info in block.catalogue])
    return view(block, np.flatnonzero(chosen & (block.mode == 0)))


class RunningStatisticsFrozenParams(Params):
    """Parameters of `RunningStatisticsFrozen`."""

    records: int = Field(2, ge=1, le=1000, description="Records in a row at which it is so.")


class RunningStatisticsFrozen(Rule[RunningStatisticsFrozenParams, State]):
    """Notes a layer with running statistics that is in evaluation mode at updates, at ``records`` records in a row.

    Its running statistics stand still, and it normalises by them: sound when deliberate, as in fine-tuning of a pretrained model or with
    small batches. By default its severity is info. `frozen_batch_norm` warns where the running statistics do not fit the input, and where the whole
    model is in evaluation mode by mistake.
    """

    name = "running_statistics_frozen"
    summary = "a normalisation layer is in evaluation mode during training; sound when deliberate"
    needs = Needs(collections=("buffers",), roles=("buffer",))
    merge = "per_worker"
    usual_causes = (
        "The layer is frozen on purpose, as in fine-tuning.",
        "model.eval() was called, and model.train() not after it.",
    )
    what_to_try = (
        "Nothing, if it is deliberate.",
        "Otherwise call model.train() before the training goes on.",
    )
    cannot_distinguish = (
        "Evaluation mode on purpose, from a forgotten train(): its severity is info for that reason.",
    )

    def lookback(self, params: RunningStatisticsFrozenParams) -> int:
        """The records before."""
        return params.records - 1

    def conclusive(self, params: RunningStatisticsFrozenParams, block: Block) -> NDArray[np.bool_]:
        """Rows with the mode of the layer."""
        return has_probe(block, "training")

    def evaluate(
        self, params: RunningStatisticsFrozenParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each record of a running variance."""
        found = in_a_row(context, block, _is_frozen, params.records)
        return state, [self._finding(params, block, int(row)) for row in np.flatnonzero(found)]

    def _finding(self, params: RunningStatisticsFrozenParams, block: Block, row: int) -> Finding:
        info = block.info(row)
        message = (
            f"{info.module or 'the model'} is in evaluation mode, at {params.records} records in a row: its running statistics "
            f"({info.name}) are frozen; sound when deliberate, e.g. fine-tuning"
        )
        return finding_at(self.name, block, row, value=0.0, threshold=1.0, message=message)


def _is_frozen(rows: Block) -> NDArray[np.bool_]:
    is_variance = rows.mask_of_tensors([info.name.endswith(_VARIANCE) for info in rows.catalogue])
    frozen: NDArray[np.bool_] = is_variance & (rows.mode == 0) & (probe(rows, "training") == 0)
    return frozen
