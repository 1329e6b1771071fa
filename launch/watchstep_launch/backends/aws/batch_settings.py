"""What users set of a backend on AWS Batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from watchstep_launch.backends.aws.calls import Arn, AwsModel, RoleArn

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_:/.-]+$", max_length=512)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=512)]


class AwsBatchSettings(AwsModel):
    """What users set of a backend on AWS Batch."""

    job_queue: Word | None = Field(
        None, description="Name or ARN of the queue. Needed to submit and to list."
    )
    job_definition: Word | None = Field(
        None, description="Name, name:revision or ARN of a definition; else one is registered for the image."
    )
    image: str | None = Field(
        None, max_length=512, description="The image, with watchstep and a shell in it."
    )
    platform: Literal["EC2", "FARGATE"] = Field("EC2", description="What the definition is for.")
    job_role: RoleArn | None = Field(None, description="The role that the job itself has.")
    execution_role: RoleArn | None = Field(
        None, description="The role by which the image is pulled and secrets are fetched."
    )
    vcpus: float | None = Field(None, gt=0, description="vCPUs of each node.")
    memory_mib: int | None = Field(None, gt=0, description="MiB of memory of each node.")
    gpus: int | None = Field(None, gt=0, description="GPUs of each node.")
    shared_memory_mib: int | None = Field(
        None, gt=0, description="MiB of /dev/shm, which DataLoader's workers use."
    )
    assign_public_ip: bool = Field(False, description="On Fargate: whether the task gets a public address.")
    nodes: int = Field(1, ge=1, le=1000, description="Nodes; with several, a multi-node parallel job.")
    attempts: int | None = Field(
        None,
        ge=1,
        le=10,
        description="How often the job is started; the definition's own where it is left out.",
    )
    evaluate_on_exit: tuple[Mapping[str, str], ...] = Field(
        (),
        max_length=3,
        description="Conditions on which it is started again, behind those that keep what was stopped stopped.",
    )
    timeout_seconds: int | None = Field(None, ge=60, description="Seconds that each attempt may take.")
    share_identifier: str | None = Field(None, max_length=255, description="For queues with fair shares.")
    tags: Mapping[str, str] = Field(default_factory=dict, description="Tags of the job and its definition.")
    secrets: Mapping[Variable, Arn] = Field(
        default_factory=dict,
        description="Variable: ARN in Secrets Manager or Parameter Store, from which the container agent fetches its value.",
    )
    log_group: str = Field(
        "/aws/batch/job", min_length=1, max_length=512, description="Where its output goes."
    )
    extra: Mapping[str, Any] = Field(
        default_factory=dict, description="Whatever else SubmitJob takes, in its own form."
    )
    definition_extra: Mapping[str, Any] = Field(
        default_factory=dict, description="Whatever else RegisterJobDefinition takes, in its own form."
    )

    @model_validator(mode="after")
    def _has_what_to_run(self) -> AwsBatchSettings:
        if self.job_definition is not None and self.image is not None:
            raise ValueError("give job_definition or image, not both")
        if self.image is not None and (self.vcpus is None or self.memory_mib is None):
            raise ValueError("an image needs vcpus and memory_mib")
        if self.evaluate_on_exit and self.attempts is None:
            raise ValueError("evaluate_on_exit needs attempts")
        return self
