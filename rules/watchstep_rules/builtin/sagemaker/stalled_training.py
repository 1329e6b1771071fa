"""A training of which nothing has come for some time."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from watchstep_rules.builtin.sagemaker.amazon import AmazonParams
from watchstep_rules.builtin.sagemaker.translated import Translated
from watchstep_rules.builtin.system.stalled_training import (
    StalledTraining,
    StalledTrainingParams,
    StalledTrainingState,
)


class SagemakerStalledTrainingParams(AmazonParams):
    """Parameters of `SagemakerStalledTraining`."""

    amazon: ClassVar[str] = "StalledTrainingRule"
    threshold: float = Field(1800.0, gt=0, description="Seconds without a row that are too long.")
    stop_training_on_fire: bool = Field(
        False, description="Only false: a rule config stops a job by its actions, not by a parameter."
    )
    training_job_name_prefix: str = Field(
        "", max_length=256, description="Accepted and without effect: a run knows its job."
    )

    @field_validator("stop_training_on_fire")
    @classmethod
    def _stops_by_action(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "true: give the rule config 'actions: [stop]' instead, which an operator must be allowed to do"
            )
        return value


class SagemakerStalledTraining(Translated[SagemakerStalledTrainingParams]):
    """Fires when no row of any worker came for ``threshold`` seconds by the service's clock: SageMaker's StalledTrainingRule.

    Of the time between two looks of the service no more than a third of the threshold counts, so that a service that was down
    makes no silence. `stalled_training` also asks for a silence longer than the pauses that the run has come back from.
    """

    name = "sagemaker_stalled_training"
    summary = "nothing was recorded for some time, as SageMaker tests it"
    clock = True
    inner = StalledTraining()
    needs = StalledTraining.needs
    merge = StalledTraining.merge
    usual_causes = StalledTraining.usual_causes
    what_to_try = StalledTraining.what_to_try
    params_type = SagemakerStalledTrainingParams
    state_type = StalledTrainingState

    def translated(self, params: SagemakerStalledTrainingParams) -> StalledTrainingParams:
        """Whatever pauses there were before."""
        return StalledTrainingParams(threshold=params.threshold, patience=0.0)
