"""What users set of a backend on Amazon SageMaker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from watchstep_launch.backends.aws.calls import Arn, AwsModel, RoleArn, S3Url
from watchstep_launch.backends.aws.sagemaker_source import Source

Text = Annotated[str, Field(min_length=1, max_length=2500)]
Channel = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=512)]


class SageMakerSettings(AwsModel):
    """What users set of a backend on Amazon SageMaker."""

    role: RoleArn | None = Field(None, description="The role that the job itself has. Needed to submit.")
    image_uri: Text | None = Field(None, description="The image, with watchstep in it. Needed to submit.")
    instance_type: Text | None = Field(None, description="ml.p4d.24xlarge, say. Needed to submit.")
    output_path: S3Url | None = Field(
        None, description="Where SageMaker puts what the job leaves in /opt/ml/model. Needed to submit."
    )
    instance_count: int = Field(1, ge=1, description="Instances; each runs the command once.")
    volume_size: int = Field(30, ge=1, description="GB of each instance's disk.")
    volume_kms_key: str | None = Field(None, description="Key that encrypts the disks.")
    output_kms_key: str | None = Field(None, description="Key that encrypts the output.")
    max_run: int = Field(86400, ge=1, description="Seconds that the job may take.")
    use_spot_instances: bool = Field(
        False, description="Take spot instances; SageMaker starts the job again when it loses one."
    )
    max_wait: int | None = Field(
        None, ge=1, description="Seconds that a spot job may wait and take; max_run where it is left out."
    )
    max_retry_attempts: int | None = Field(
        None,
        ge=1,
        le=30,
        description="How often SageMaker may start the job again after an error of its own.",
    )
    keep_alive_period_in_seconds: int | None = Field(
        None, ge=0, le=3600 * 6, description="So long the instances are kept warm for the next job."
    )
    subnets: tuple[Text, ...] = Field((), description="Subnets of the VPC that the job runs in.")
    security_group_ids: tuple[Text, ...] = Field((), description="Security groups there.")
    encrypt_inter_container_traffic: bool = Field(
        False, description="Encrypt what instances say to each other."
    )
    enable_network_isolation: bool = Field(
        False, description="Keep the container from all network, S3 and the service included."
    )
    hyperparameters: Mapping[str, str] = Field(
        default_factory=dict, description="As they are, to the container's hyperparameters.json."
    )
    inputs: Mapping[Channel, str | Mapping[str, Any]] = Field(
        default_factory=dict,
        description="Channel: an S3 prefix, or a Channel of CreateTrainingJob without its name.",
    )
    input_mode: Literal["File", "Pipe", "FastFile"] = Field("File", description="How inputs come.")
    checkpoint_s3_uri: S3Url | None = Field(
        None, description="S3 prefix that checkpoints are kept in step with."
    )
    checkpoint_local_path: str = Field("/opt/ml/checkpoints", description="The folder that is.")
    tags: Mapping[str, str] = Field(default_factory=dict, description="Tags of the job.")
    entrypoint: tuple[str, ...] = Field(
        (),
        description="The container's entrypoint, which gets the command as arguments; the command itself where it is left out.",
    )
    source: Source = Field(
        "program",
        description="What of the launcher's folder goes along: the files that the command names, the folder, or none.",
    )
    code_location: S3Url | None = Field(
        None, description="S3 prefix for that; output_path where it is left out."
    )
    secrets: Mapping[Variable, Arn] = Field(
        default_factory=dict,
        description="Variable: ARN in Secrets Manager or Parameter Store, from which the container fetches its value.",
    )
    extra: Mapping[str, Any] = Field(
        default_factory=dict, description="Whatever else CreateTrainingJob takes, in its own form."
    )
