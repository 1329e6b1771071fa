"""Settings of AWS Batch, and the job definition and submission made from them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from watchstep.stopping import EXIT_STOPPED, EXIT_TOMBSTONE
from watchstep_launch.backend import Launch, SubmissionRejectedError
from watchstep_launch.backends.aws.calls import MARK, Arn, AwsModel, RoleArn, merged, without_empty

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_:/.-]+$", max_length=512)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=512)]


class AwsBatchSettings(AwsModel):
    """User settings of the AWS Batch backend."""

    job_queue: Word | None = Field(
        None, description="Name or ARN of the queue. Required to submit and to list jobs."
    )
    job_definition: Word | None = Field(
        None,
        description="Name, name:revision or ARN of a definition; by default, one is registered for the image.",
    )
    image: str | None = Field(
        None, max_length=512, description="Container image that includes watchstep and a shell."
    )
    platform: Literal["EC2", "FARGATE"] = Field("EC2", description="Platform of the definition.")
    job_role: RoleArn | None = Field(None, description="Role of the job itself.")
    execution_role: RoleArn | None = Field(None, description="Role that pulls the image and fetches secrets.")
    vcpus: float | None = Field(None, gt=0, description="vCPUs of each node.")
    memory_mib: int | None = Field(None, gt=0, description="MiB of memory of each node.")
    gpus: int | None = Field(None, gt=0, description="GPUs of each node.")
    shared_memory_mib: int | None = Field(
        None, gt=0, description="MiB of /dev/shm, used by DataLoader workers."
    )
    assign_public_ip: bool = Field(False, description="Whether a Fargate task gets a public address.")
    nodes: int = Field(1, ge=1, le=1000, description="Nodes; with several, a multi-node parallel job.")
    attempts: int | None = Field(
        None,
        ge=1,
        le=10,
        description="How often the job is started; by default as in the definition.",
    )
    evaluate_on_exit: tuple[Mapping[str, str], ...] = Field(
        (),
        max_length=3,
        description="Conditions for starting the job again, after those that prevent restarts of stopped runs.",
    )
    timeout_seconds: int | None = Field(None, ge=60, description="Seconds that each attempt may take.")
    share_identifier: str | None = Field(None, max_length=255, description="For queues with fair shares.")
    tags: Mapping[str, str] = Field(default_factory=dict, description="Tags of the job and its definition.")
    secrets: Mapping[Variable, Arn] = Field(
        default_factory=dict,
        description="Variable → ARN in Secrets Manager or Parameter Store, from which the container agent fetches its value.",
    )
    log_group: str = Field(
        "/aws/batch/job", min_length=1, max_length=512, description="Log group of the job's output."
    )
    extra: Mapping[str, Any] = Field(
        default_factory=dict, description="Further parameters of SubmitJob, in its own format."
    )
    definition_extra: Mapping[str, Any] = Field(
        default_factory=dict, description="Further parameters of RegisterJobDefinition, in its own format."
    )

    @model_validator(mode="after")
    def _check_image_or_definition(self) -> AwsBatchSettings:
        if self.job_definition is not None and self.image is not None:
            raise ValueError("set job_definition or image, not both")
        if self.image is not None and (self.vcpus is None or self.memory_mib is None):
            raise ValueError("image requires vcpus and memory_mib")
        if self.evaluate_on_exit and self.attempts is None:
            raise ValueError("evaluate_on_exit requires attempts")
        return self


MAX_BYTES = 30 * 1024
"""Size limit of a SubmitJob request."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_ATTEMPT = 'export WATCHSTEP_RESTARTS="$((${AWS_BATCH_JOB_ATTEMPT:-1} - 1))"; '
_NODES = (
    'export PET_NNODES="${PET_NNODES:-$AWS_BATCH_JOB_NUM_NODES}" PET_NODE_RANK="${PET_NODE_RANK:-$AWS_BATCH_JOB_NODE_INDEX}" '
    'PET_MASTER_ADDR="${PET_MASTER_ADDR:-${AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS:-127.0.0.1}}" '
    'PET_MASTER_PORT="${PET_MASTER_PORT:-29500}"; '
)


def submission(settings: AwsBatchSettings, launch: Launch, name: str, definition: str) -> dict[str, Any]:
    """Return the parameters of SubmitJob.

    Raises:
        SubmissionRejectedError: Batch would refuse or modify the job.
    """
    overrides = {
        "command": _command(settings, launch),
        "environment": _environment(settings, launch),
        "resourceRequirements": resources(settings),
    }
    parameters: dict[str, Any] = {
        "jobName": name,
        "jobQueue": settings.job_queue,
        "jobDefinition": definition,
        "retryStrategy": retries(settings),
        "timeout": {"attemptDurationSeconds": settings.timeout_seconds},
        "shareIdentifier": settings.share_identifier,
        "tags": {**settings.tags, MARK: "1"},
    }
    if settings.nodes > 1:
        parameters["nodeOverrides"] = {
            "numNodes": settings.nodes,
            "nodePropertyOverrides": [{"targetNodes": "0:", "containerOverrides": overrides}],
        }
    else:
        parameters["containerOverrides"] = overrides
    request: dict[str, Any] = merged(without_empty(parameters), settings.extra)
    if (size := len(json.dumps(request))) > MAX_BYTES:
        raise SubmissionRejectedError(
            f"job {name}: command and environment have {size} bytes, more than Batch's limit of {MAX_BYTES}",
            "move long values into the image, or into a file on S3",
        )
    return request


def definition_of(settings: AwsBatchSettings) -> dict[str, Any]:
    """Return the parameters of RegisterJobDefinition. The name is a hash of the rest, so that equal definitions are shared."""
    is_fargate = settings.platform == "FARGATE"
    container = {
        "image": settings.image,
        "jobRoleArn": settings.job_role,
        "executionRoleArn": settings.execution_role,
        "command": ["true"],
        "resourceRequirements": resources(settings),
        "secrets": [{"name": name, "valueFrom": arn} for name, arn in settings.secrets.items()],
        "networkConfiguration": {"assignPublicIp": "ENABLED"} if settings.assign_public_ip else None,
        "linuxParameters": {"sharedMemorySize": settings.shared_memory_mib},
    }
    parameters: dict[str, Any] = {"platformCapabilities": ["FARGATE" if is_fargate else "EC2"]}
    if settings.nodes > 1:
        ranges = [{"targetNodes": "0:", "container": without_empty(container)}]
        properties = {"numNodes": settings.nodes, "mainNode": 0, "nodeRangeProperties": ranges}
        parameters = {"type": "multinode", "nodeProperties": properties}
    else:
        parameters = {**parameters, "type": "container", "containerProperties": container}
    definition: dict[str, Any] = merged(without_empty(parameters), settings.definition_extra)
    digest = sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()[:16]
    return {"jobDefinitionName": f"watchstep-{digest}", **definition, "tags": {**settings.tags, MARK: "1"}}


def resources(settings: AwsBatchSettings) -> list[dict[str, str]]:
    """Return the resources of each node that are set."""
    amounts = {"VCPU": settings.vcpus, "MEMORY": settings.memory_mib, "GPU": settings.gpus}
    return [{"type": kind, "value": f"{value:g}"} for kind, value in amounts.items() if value is not None]


def retries(settings: AwsBatchSettings) -> dict[str, Any]:
    """Return the retry strategy. It never retries a run that a rule stopped, whatever the user configures."""
    if settings.attempts is None:
        return {}
    never = [{"onExitCode": str(code), "action": "EXIT"} for code in (EXIT_STOPPED, EXIT_TOMBSTONE)]
    if settings.attempts == 1 and not settings.evaluate_on_exit:
        return {"attempts": 1}
    return {"attempts": settings.attempts, "evaluateOnExit": [*never, *map(dict, settings.evaluate_on_exit)]}


def _command(settings: AwsBatchSettings, launch: Launch) -> list[str]:
    for word in launch.command:
        if word.startswith("Ref::"):
            raise SubmissionRejectedError(
                f"argument {word!r}: Batch would replace it by a job parameter",
                "use another form, such as --name=Ref::value",
            )
        if "\0" in word:
            raise SubmissionRejectedError(f"argument {word!r} contains a zero byte", "remove it")
    script = f'{_ATTEMPT}{_NODES if settings.nodes > 1 else ""}exec "$@"'
    return ["sh", "-c", script, "watchstep", *launch.command]


def _environment(settings: AwsBatchSettings, launch: Launch) -> list[dict[str, str]]:
    merged_variables = {**launch.environment, **launch.secrets}
    variables = {name: value for name, value in merged_variables.items() if name not in settings.secrets}
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name) or name.startswith("AWS_BATCH"):
            raise SubmissionRejectedError(
                f"environment variable {name!r} has an invalid name for AWS Batch",
                "use letters, digits and '_', and no prefix AWS_BATCH",
            )
        if "\0" in value:
            raise SubmissionRejectedError(f"environment variable {name} contains a zero byte", "remove it")
    return [{"name": name, "value": value} for name, value in variables.items()]
