"""Normalisation layers in evaluation mode during training: a note, for that is sound when it is deliberate."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import in_a_row, probe

_VARIANCE = "running_var"


class RunningStatisticsFrozenParams(Params):
    """Parameters of `RunningStatisticsFrozen`."""

    records: int = Field(2, ge=1, le=1000, description="Records in a row at which it is so.")


class RunningStatisticsFrozenState(State):
    """Nothing."""


class RunningStatisticsFrozen(Rule[RunningStatisticsFrozenParams, RunningStatisticsFrozenState]):
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
    params_type = RunningStatisticsFrozenParams
    state_type = RunningStatisticsFrozenState

    def lookback(self, params: RunningStatisticsFrozenParams) -> int:
        """The records before."""
        return params.records - 1

    def conclusive(self, params: RunningStatisticsFrozenParams, block: Block) -> NDArray[np.bool_]:  # noqa: ARG002 - the contract's
        """Rows with the mode of the layer."""
        return has_probe(block, "training")

    def evaluate(
        self,
        params: RunningStatisticsFrozenParams,
        state: RunningStatisticsFrozenState,
        context: Block,
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[RunningStatisticsFrozenState, list[Finding]]:
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
