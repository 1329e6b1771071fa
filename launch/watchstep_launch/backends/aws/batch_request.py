"""A launch as AWS Batch takes it: the job, and the definition that it needs where the user names none."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from typing import Any

from watchstep.stopping import EXIT_STOPPED, EXIT_TOMBSTONE
from watchstep_launch.backend import Launch
from watchstep_launch.backends.aws.batch_settings import AwsBatchSettings
from watchstep_launch.backends.aws.calls import MARK
from watchstep_launch.backends.aws.forms import merged, without_empty
from watchstep_launch.errors import SubmissionRejectedError

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
