"""Normalisation layers that learn while their running statistics stand still."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.block import Block
from watchstep.block_view import view
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.figures.in_a_row import in_a_row, probe
from watchstep_rules.figures.series import SeriesRows
from watchstep_rules.finding import Finding, finding_at

_VARIANCE = "running_var"


class FrozenBatchNormParams(Params):
    """Parameters of `FrozenBatchNorm`."""

    records: int = Field(2, ge=1, le=1000, description="Records in a row at which it is so.")
    batches: int = Field(
        20, ge=1, description="Batches in training mode that must have left running statistics untouched."
    )


class FrozenBatchNormState(State):
    """Layers that were seen in training mode, by ``tensor@worker``."""

    trained: tuple[str, ...] = ()


class _Why(IntEnum):
    UNTRAINED = 1
    UNTOUCHED = 2
    FORGOTTEN = 3


class FrozenBatchNorm(Rule[FrozenBatchNormParams, FrozenBatchNormState]):
    """Fires for a layer with running statistics when one of these holds at ``records`` records in a row.

    - **Never in training mode**: its scale learns, it is in evaluation mode, and ``running_var`` is exactly 1 for all
      channels, as it begins: it normalises by nothing.
    - **Untouched**: in training mode it has taken in ``batches`` batches, and ``running_var`` is exactly 1 all the
      same: with a momentum of 0 evaluation will normalise by nothing.
    - **Forgotten in evaluation mode**: its scale learns, the layer was in training mode earlier in this run, and now the
      whole model is in evaluation mode at updates: after an evaluation nobody called ``train()``.

    ``x̂ = (x - running_mean) / sqrt(running_var + eps)`` in evaluation mode; a batch in training mode moves the running
    statistics by ``momentum`` times the distance (Ioffe and Szegedy, 2015; PyTorch's BatchNorm2d). A variance of exactly
    1 in every channel is what no batch leaves.

    Deliberate freezing is left alone: layers whose scale does not require a gradient or no optimizer holds, pretrained
    layers that are in evaluation mode from the start, and single layers that are frozen while the rest of the model
    stays in training mode.
    """

    name = "frozen_batch_norm"
    summary = "a normalisation layer learns while its running statistics stand still"
    needs = Needs(collections=("buffers",), roles=("buffer",))
    merge = "per_worker"
    usual_causes = (
        "model.eval() was called for an evaluation, and model.train() not after it.",
        "The model was built or loaded in evaluation mode, and never put into training mode.",
        "The layer's momentum is 0, as other frameworks' momentum of 1 means.",
    )
    what_to_try = (
        "Call model.train() after each evaluation, before the next batch.",
        "Set the layer's momentum to 0.1, or None for a plain mean.",
        "To freeze a layer on purpose, also take its scale and shift from the optimizer.",
    )
    params_type = FrozenBatchNormParams
    state_type = FrozenBatchNormState

    def lookback(self, params: FrozenBatchNormParams) -> int:
        """The records before."""
        return params.records - 1

    def evaluate(
        self,
        params: FrozenBatchNormParams,
        state: FrozenBatchNormState,
        context: Block,
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[FrozenBatchNormState, list[Finding]]:
        """Judge each layer by its running variance."""
        context, block = _variances(context), _variances(block)
        if not len(block):
            return state, []
        trained, was_trained = _trained(state.trained, block)
        found = np.zeros(len(block), np.int64)
        for why in _Why:
            hit = in_a_row(context, block, lambda rows, why=why: _holds(rows, why, params), params.records)  # type: ignore[misc]  # mypy does not infer a lambda with a default
            found[hit & (was_trained | (why is not _Why.FORGOTTEN)) & (found == 0)] = why
        return FrozenBatchNormState(trained=trained), [
            self._finding(params, block, int(row), _Why(int(found[row]))) for row in np.flatnonzero(found)
        ]

    def _finding(self, params: FrozenBatchNormParams, block: Block, row: int, why: _Why) -> Finding:
        info = block.info(row)
        layer = info.module or "the model"
        said = {
            _Why.UNTRAINED: f"{layer} learns in evaluation mode, and {info.name} is 1 everywhere, as it begins",
            _Why.UNTOUCHED: (
                f"{layer} has taken in {probe(block, 'batches_tracked')[row]:.0f} batches, and {info.name} is 1 everywhere, "
                "as it begins"
            ),
            _Why.FORGOTTEN: (
                f"{layer} learns while the whole model is in evaluation mode, in which {info.name} stands still; earlier it "
                "was in training mode"
            ),
        }[why]
        message = f"{said}, at {params.records} records in a row"
        value = float(block.statistics.mean[row])
        return finding_at(
            self.name, block, row, value=value if np.isfinite(value) else 0.0, threshold=1.0, message=message
        )


def _holds(rows: Block, why: _Why, params: FrozenBatchNormParams) -> NDArray[np.bool_]:
    held, training = rows.statistics, probe(rows, "training")
    evaluating = (probe(rows, "learns") == 1) & (training == 0)
    untouched = (held.min == 1) & (held.max == 1) & (held.nonfinite == 0)
    holds: NDArray[np.bool_] = {
        _Why.UNTRAINED: evaluating & untouched,
        _Why.UNTOUCHED: untouched & (training == 1) & (probe(rows, "batches_tracked") >= params.batches),
        _Why.FORGOTTEN: evaluating & (probe(rows, "model_training") == 0),
    }[why]
    return holds


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
