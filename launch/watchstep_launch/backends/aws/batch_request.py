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


MOST_BYTES = 30 * 1024
"""Of a SubmitJob request."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_ATTEMPT = 'export WATCHSTEP_RESTARTS="$((${AWS_BATCH_JOB_ATTEMPT:-1} - 1))"; '
_NODES = (
    'export PET_NNODES="${PET_NNODES:-$AWS_BATCH_JOB_NUM_NODES}" PET_NODE_RANK="${PET_NODE_RANK:-$AWS_BATCH_JOB_NODE_INDEX}" '
    'PET_MASTER_ADDR="${PET_MASTER_ADDR:-${AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS:-127.0.0.1}}" '
    'PET_MASTER_PORT="${PET_MASTER_PORT:-29500}"; '
)


def submission(settings: AwsBatchSettings, launch: Launch, name: str, definition: str) -> dict[str, Any]:
    """What SubmitJob is asked.

    Raises:
        SubmissionRejectedError: Batch does not take it, or would change it.
    """
    overrides = {
        "command": _command(settings, launch),
        "environment": _environment(settings, launch),
        "resourceRequirements": resources(settings),
    }
    asked: dict[str, Any] = {
        "jobName": name,
        "jobQueue": settings.job_queue,
        "jobDefinition": definition,
        "retryStrategy": retries(settings),
        "timeout": {"attemptDurationSeconds": settings.timeout_seconds},
        "shareIdentifier": settings.share_identifier,
        "tags": {**settings.tags, MARK: "1"},
    }
    if settings.nodes > 1:
        asked["nodeOverrides"] = {
            "numNodes": settings.nodes,
            "nodePropertyOverrides": [{"targetNodes": "0:", "containerOverrides": overrides}],
        }
    else:
        asked["containerOverrides"] = overrides
    made: dict[str, Any] = merged(without_empty(asked), settings.extra)
    if (size := len(json.dumps(made))) > MOST_BYTES:
        raise SubmissionRejectedError(
            f"job {name}: command and environment make {size} bytes, and Batch takes {MOST_BYTES}",
            "put what is long into the image, or into a file on S3",
        )
    return made


def definition_of(settings: AwsBatchSettings) -> dict[str, Any]:
    """What RegisterJobDefinition is asked; its name follows from all the rest, so that equal ones are one."""
    fargate = settings.platform == "FARGATE"
    container = {
        "image": settings.image,
        "jobRoleArn": settings.job_role,
        "executionRoleArn": settings.execution_role,
        "command": ["true"],
        "resourceRequirements": resources(settings),
        "secrets": [{"name": name, "valueFrom": place} for name, place in settings.secrets.items()],
        "networkConfiguration": {"assignPublicIp": "ENABLED"} if settings.assign_public_ip else None,
        "linuxParameters": {"sharedMemorySize": settings.shared_memory_mib},
    }
    asked: dict[str, Any] = {"platformCapabilities": ["FARGATE" if fargate else "EC2"]}
    if settings.nodes > 1:
        every = [{"targetNodes": "0:", "container": without_empty(container)}]
        properties = {"numNodes": settings.nodes, "mainNode": 0, "nodeRangeProperties": every}
        asked = {"type": "multinode", "nodeProperties": properties}
    else:
        asked = {**asked, "type": "container", "containerProperties": container}
    made: dict[str, Any] = merged(without_empty(asked), settings.definition_extra)
    named = sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]
    return {"jobDefinitionName": f"watchstep-{named}", **made, "tags": {**settings.tags, MARK: "1"}}


def resources(settings: AwsBatchSettings) -> list[dict[str, str]]:
    """What each node is to have, as far as it is said."""
    said = {"VCPU": settings.vcpus, "MEMORY": settings.memory_mib, "GPU": settings.gpus}
    return [{"type": kind, "value": f"{value:g}"} for kind, value in said.items() if value is not None]


def retries(settings: AwsBatchSettings) -> dict[str, Any]:
    """What is tried again: nothing that a rule stopped, whatever the user says of the rest."""
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
                f"argument {word!r}: Batch would put a parameter of the job's in its place",
                "give it another form, --name=Ref::value for one",
            )
        if "\0" in word:
            raise SubmissionRejectedError(f"argument {word!r}: has a zero byte", "leave it out")
    script = f'{_ATTEMPT}{_NODES if settings.nodes > 1 else ""}exec "$@"'
    return ["sh", "-c", script, "watchstep", *launch.command]


def _environment(settings: AwsBatchSettings, launch: Launch) -> list[dict[str, str]]:
    held = {**launch.environment, **launch.secrets}
    given = {name: value for name, value in held.items() if name not in settings.secrets}
    for name, value in given.items():
        if not _VARIABLE.fullmatch(name) or name.startswith("AWS_BATCH"):
            raise SubmissionRejectedError(
                f"environment variable {name!r}: Batch does not take its name",
                "use letters, digits and '_', and no AWS_BATCH at the beginning",
            )
        if "\0" in value:
            raise SubmissionRejectedError(f"environment variable {name}: has a zero byte", "leave it out")
    return [{"name": name, "value": value} for name, value in given.items()]
