"""Losses that have not improved for so many steps, one loss at a time."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from watchstep_rules.builtin.losses.overtraining import Overtraining, OvertrainingParams, OvertrainingState
from watchstep_rules.builtin.sagemaker.amazon import AmazonParams
from watchstep_rules.builtin.sagemaker.translated import Translated


class SagemakerOvertrainingParams(AmazonParams):
    """Parameters of `SagemakerOvertraining`."""

    amazon: ClassVar[str] = "Overtraining"
    patience_train: int = Field(5, ge=1, description="Training losses in a row without an improvement.")
    patience_validation: int = Field(10, ge=1, description="Validation losses in a row without one.")
    delta: float = Field(0.01, ge=0, description="By how much a loss must fall below the best one.")


class SagemakerOvertraining(Translated[SagemakerOvertrainingParams]):
    """Fires when ``loss < best - delta`` has not held for ``patience_train`` or ``patience_validation`` losses in a row.

    SageMaker's Overtraining, on single losses and with a delta as it stands. ``best`` is the last loss that was an improvement. The
    losses of a training differ by batch: `overtraining` takes means, and a delta as a share.
    """

    name = "sagemaker_overtraining"
    summary = "a loss has not improved for some steps, as SageMaker tests it"
    inner = Overtraining()
    needs = Overtraining.needs
    merge = Overtraining.merge
    usual_causes = Overtraining.usual_causes
    what_to_try = Overtraining.what_to_try
    params_type = SagemakerOvertrainingParams
    state_type = OvertrainingState

    def translated(self, params: SagemakerOvertrainingParams) -> OvertrainingParams:
        """Single losses, and the delta as it stands."""
        return OvertrainingParams(
            patience_train=params.patience_train,
            patience_validation=params.patience_validation,
            delta=params.delta,
            as_share=False,
            window=1,
        )
