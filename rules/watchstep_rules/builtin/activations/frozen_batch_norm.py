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
from watchstep_rules.signals.robust import round_value
from watchstep_rules.signals.series import SeriesRows, in_a_row, probe

_VARIANCE = "running_var"


class FrozenBatchNormParams(Params):
    """Parameters of `FrozenBatchNorm`."""

    records: int = Field(2, ge=1, le=1000, description="Consecutive records with the condition.")
    batches: int = Field(
        20, ge=1, description="Batches in training mode after which running statistics must have changed."
    )
    drift: float = Field(
        10.0,
        gt=1,
        description="Ratio of an output's root mean square to the one expected from the running statistics at which they do not fit.",
    )


class Fit(NamedTuple):
    """The output of a layer in evaluation mode, compared with the expected output for data with its running statistics.

    Attributes:
        output: mean square of the last output; negative before the first.
        records: consecutive records of the running statistics at which it was too large.
    """

    output: float = -1.0
    records: int = 0

    def ratio(self, affine_square: float) -> float:
        """Ratio of the last output's root mean square to the expected one; 0 if one of them is not known."""
        return (self.output / affine_square) ** 0.5 if self.output >= 0 and affine_square > 0 else 0.0


class FrozenBatchNormState(State):
    """State of `FrozenBatchNorm`.

    Attributes:
        trained: layers that have been in training mode, by ``tensor@worker``.
        fits: the fit of layers in evaluation mode, by ``module@worker``.
    """

    trained: tuple[str, ...] = ()
    fits: dict[str, Fit] = Field(default_factory=dict)


class _Reason(IntEnum):
    UNTRAINED = 1
    UNTOUCHED = 2
    FORGOTTEN = 3
    DRIFTED = 4


class FrozenBatchNorm(Rule[FrozenBatchNormParams, FrozenBatchNormState]):
    """Fires for a layer with running statistics when one of these conditions is true at ``records`` consecutive records.

    - **Never in training mode**: its scale learns, the whole model is in evaluation mode, and ``running_var`` is exactly 1 for all
      channels, its initial value: the layer does not normalize.
    - **Untouched**: it has processed ``batches`` batches in training mode, and ``running_var`` is still exactly 1. With a momentum of 0,
      evaluation will not normalize.
    - **Forgotten in evaluation mode**: its scale learns, the layer was in training mode earlier in this run, and now the whole model is in
      evaluation mode at updates: ``train()`` was not called after an evaluation.
    - **Drifted**: it is in evaluation mode, and the root mean square of its output is ``drift`` times ``sqrt(mean(scale²) + mean(shift²))``,
      the value for data with its running statistics: its input has changed. Earlier layers that continue to learn move this ratio to 3.5
      in healthy fine-tuning; inputs that are no longer scaled move it to hundreds. A frozen scale and shift are included, and without them
      the expected value is 1. An input that becomes much smaller than the statistics is not detected.

    ``x̂ = (x - running_mean) / sqrt(running_var + eps)`` in evaluation mode. A batch in training mode moves the running statistics by
    ``momentum`` times the distance (Ioffe and Szegedy, 2015; PyTorch's BatchNorm2d). No batch leaves a variance of exactly 1 in every
    channel.

    Deliberate freezing is not reported: layers with a scale that does not require a gradient or is in no optimizer, pretrained layers
    that are in evaluation mode from the start, and single layers in evaluation mode while the model is in training mode, as long as their
    running statistics fit. `running_statistics_frozen` notes them.
    """

    name = "frozen_batch_norm"
    summary = "a normalization layer learns while its running statistics do not change"
    version = 3
    needs = Needs(
        collections=("buffers", "activations"),
        roles=("buffer", "output"),
        about=("buffer",),
        evidence_rows=0,
    )
    merge = "watermark"
    usual_causes = (
        "model.eval() was called for an evaluation without model.train() after it.",
        "The model was built or loaded in evaluation mode and never set to training mode.",
        "The layer's momentum is 0, which corresponds to a momentum of 1 in other frameworks.",
        "The layer is frozen with statistics of other data, or of scaled inputs.",
    )
    what_to_try = (
        "Call model.train() after each evaluation, before the next batch.",
        "Set the layer's momentum to 0.1, or None for a plain mean.",
        "Compare the inputs' mean and deviation with those of the original training, or update the statistics with batches in training mode.",
        "To freeze a layer on purpose, also remove its scale and shift from the optimizer.",
    )
    cannot_distinguish = (
        "Fine-tuning with the whole model in evaluation mode from some step on, on purpose, from a forgotten train().",
        "An input with another scale by design from some step on, from one that is no longer normalized.",
        "An input that becomes much smaller than the running statistics is not detected.",
        "Custom normalization classes are not judged.",
    )

    def lookback(self, params: FrozenBatchNormParams) -> int:
        """The previous records."""
        return params.records - 1

    def conclusive(self, params: FrozenBatchNormParams, block: Block) -> NDArray[np.bool_]:
        """Rows with any measurement of the layer."""
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
        for why in _Reason:
            if why is _Reason.DRIFTED:
                continue
            hit = in_a_row(context, block, lambda rows, why=why: _is_true(rows, why, params), params.records)  # type: ignore[misc]  # mypy does not infer a lambda with a default
            found[hit & (was_trained | (why is not _Reason.FORGOTTEN)) & (found == 0)] = why
        ratio = np.array([drifted.get(_key(block, row), 0.0) for row in range(len(block))])
        found[(ratio > 0) & (found == 0)] = _Reason.DRIFTED
        return FrozenBatchNormState(trained=trained, fits=fits), [
            self._finding(params, block, int(row), _Reason(int(found[row])), float(ratio[row]))
            for row in np.flatnonzero(found)
        ]

    def _finding(
        self, params: FrozenBatchNormParams, block: Block, row: int, why: _Reason, ratio: float
    ) -> Finding:
        info = block.info(row)
        layer = info.module or "the model"
        reason = {
            _Reason.UNTRAINED: f"{layer} learns while the whole model is in evaluation mode, and {info.name} is 1 everywhere, its initial value",
            _Reason.UNTOUCHED: (
                f"{layer} has processed {probe(block, 'batches_tracked')[row]:.0f} batches, and {info.name} is 1 everywhere, "
                "its initial value"
            ),
            _Reason.FORGOTTEN: (
                f"{layer} learns while the whole model is in evaluation mode, in which {info.name} does not change; earlier it "
                "was in training mode"
            ),
            _Reason.DRIFTED: (
                f"the output of {layer}, which is in evaluation mode, has {ratio:.3g} times the root mean square expected from its "
                f"running statistics, {params.drift:g} is the limit: {info.name} does not fit its input"
            ),
        }[why]
        message = f"{reason}, at {params.records} records in a row"
        if why is _Reason.DRIFTED:
            return finding_at(self.name, block, row, value=ratio, threshold=params.drift, message=message)
        value = float(block.statistics.mean[row])
        return finding_at(
            self.name, block, row, value=value if np.isfinite(value) else 0.0, threshold=1.0, message=message
        )


def _is_true(rows: Block, why: _Reason, params: FrozenBatchNormParams) -> NDArray[np.bool_]:
    statistics, training = rows.statistics, probe(rows, "training")
    forgotten = (probe(rows, "learns") == 1) & (training == 0) & (probe(rows, "model_training") == 0)
    untouched = (statistics.min == 1) & (statistics.max == 1) & (statistics.nonfinite == 0)
    is_true: NDArray[np.bool_] = {
        _Reason.UNTRAINED: forgotten & untouched,
        _Reason.UNTOUCHED: untouched & (training == 1) & (probe(rows, "batches_tracked") >= params.batches),
        _Reason.FORGOTTEN: forgotten,
    }[why]
    return is_true


def _key(block: Block, row: int) -> tuple[int, str]:
    return int(block.step[row]), f"{block.info(row).module}@{block.worker[row]}"


def _follow_fits(
    params: FrozenBatchNormParams, before: dict[str, Fit], block: Block
) -> tuple[dict[str, Fit], dict[tuple[int, str], float]]:
    """The fit of each layer in evaluation mode, and the ratio of drifted layers, by step and ``module@worker``.

    A layer is followed from its first record in evaluation mode until a record in training mode, so that models with all layers in
    training mode cost nothing.
    """
    is_variance = block.mask_of_tensors([info.name.endswith(_VARIANCE) for info in block.catalogue])
    variances = np.flatnonzero(is_variance & (block.mode == 0))
    evaluating = probe(block, "training")[variances] == 0
    if not before and not evaluating.any():
        return before, {}
    modules = {name.rpartition("@")[0] for name in before}
    modules |= {block.info(row).module for row in variances[evaluating].tolist()}
    chosen = block.mask_of_tensors(
        [info.module in modules and info.role == "output" for info in block.catalogue]
    )
    outputs = np.flatnonzero(chosen & (block.mode == 0) & (block.statistics.finite > 0))
    mean_square = block.statistics.square_sum[outputs] / block.statistics.finite[outputs]
    affine_square = probe(block, "affine_square")[variances]
    # Within a step the outputs are first.
    events = [
        (int(block.step[row]), 0, row, value)
        for row, value in zip(outputs.tolist(), mean_square.tolist(), strict=True)
    ]
    events += [
        (int(block.step[row]), 1, row, value if is_evaluating else None)
        for row, value, is_evaluating in zip(
            variances.tolist(), affine_square.tolist(), evaluating.tolist(), strict=True
        )
    ]
    fits, drifted = dict(before), {}
    for step, is_statistic, row, value in sorted(events, key=lambda event: event[:3]):
        name = f"{block.info(row).module}@{block.worker[row]}"
        fit = fits.get(name)
        if not is_statistic:
            if fit is not None:
                fits[name] = fit._replace(output=round_value(value))
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


def _trained(before: tuple[str, ...], block: Block) -> tuple[tuple[str, ...], NDArray[np.bool_]]:
    """The layers that have been in training mode, and for each row whether its layer has been so far."""
    series = SeriesRows.of(block)
    training = probe(block, "training") == 1
    was, new = np.zeros(len(block), np.bool_), []
    for name, rows in zip(series.names, series.rows(), strict=True):
        was[rows] = np.logical_or.accumulate(training[rows]) | (name in before)
        if name not in before and was[rows[-1]]:
            new.append((int(rows[int(np.argmax(training[rows]))]), name))
    return (*before, *(name for _, name in sorted(new))), was


def _variances(block: Block) -> Block:
    chosen = block.mask_of_tensors([info.name.endswith(_VARIANCE) for info in block.catalogue])
    return view(block, np.flatnonzero(chosen & (block.mode == 0)))


class RunningStatisticsFrozenParams(Params):
    """Parameters of `RunningStatisticsFrozen`."""

    records: int = Field(2, ge=1, le=1000, description="Consecutive records in evaluation mode.")


class RunningStatisticsFrozen(Rule[RunningStatisticsFrozenParams, State]):
    """Notes a layer with running statistics that is in evaluation mode at updates, at ``records`` consecutive records.

    Its running statistics do not change, and it normalizes by them. This is correct if deliberate, as in fine-tuning of a pretrained model
    or with small batches. By default the severity is info. `frozen_batch_norm` warns if the running statistics do not fit the input, and
    if the whole model is in evaluation mode by mistake.
    """

    name = "running_statistics_frozen"
    summary = "a normalization layer is in evaluation mode during training; correct if deliberate"
    needs = Needs(collections=("buffers",), roles=("buffer",))
    merge = "per_worker"
    usual_causes = (
        "The layer is frozen on purpose, as in fine-tuning.",
        "model.eval() was called without model.train() after it.",
    )
    what_to_try = (
        "Nothing, if it is deliberate.",
        "Otherwise call model.train() before the training continues.",
    )
    cannot_distinguish = (
        "Evaluation mode on purpose, from a forgotten train(); the severity is therefore info.",
    )

    def lookback(self, params: RunningStatisticsFrozenParams) -> int:
        """The previous records."""
        return params.records - 1

    def conclusive(self, params: RunningStatisticsFrozenParams, block: Block) -> NDArray[np.bool_]:
        """Rows with the mode of the layer."""
        return has_probe(block, "training")

    def evaluate(
        self, params: RunningStatisticsFrozenParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each record of a running variance."""
        is_hit = in_a_row(context, block, _is_frozen, params.records)
        return state, [self._finding(params, block, int(row)) for row in np.flatnonzero(is_hit)]

    def _finding(self, params: RunningStatisticsFrozenParams, block: Block, row: int) -> Finding:
        info = block.info(row)
        message = (
            f"{info.module or 'the model'} is in evaluation mode, at {params.records} records in a row: its running statistics "
            f"({info.name}) are frozen; correct if deliberate, e.g. fine-tuning"
        )
        return finding_at(self.name, block, row, value=0.0, threshold=1.0, message=message)


def _is_frozen(rows: Block) -> NDArray[np.bool_]:
    is_variance = rows.mask_of_tensors([info.name.endswith(_VARIANCE) for info in rows.catalogue])
    frozen: NDArray[np.bool_] = is_variance & (rows.mode == 0) & (probe(rows, "training") == 0)
    return frozen
