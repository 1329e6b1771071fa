"""AWS Batch backend and its job states. See ``docs/launch/aws-batch.md``.

Settings of AWS Batch, and the job definition and submission made from them.
"""

from __future__ import annotations

import json
import re
import secrets as randoms
import time
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from watchstep.errors import ConfigError
from watchstep.stopping import EXIT_STOPPED, EXIT_TOMBSTONE
from watchstep_launch.backend import (
    BackendDownError,
    BackendError,
    CredentialsExpiredError,
    JobHandle,
    JobNotFoundError,
    JobState,
    JobStatus,
    Launch,
    LogPart,
    SubmissionRejectedError,
)
from watchstep_launch.backends.aws import calls as aws_logs
from watchstep_launch.backends.aws.calls import (
    MARK,
    Arn,
    AwsCallError,
    AwsModel,
    RoleArn,
    identity_of,
    merged,
    milliseconds,
    of_container,
    region_of,
    without_empty,
)

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


NAME = "aws_batch"
REASON = "stopped by Watchstep"
_ATTEMPTS = 3
_MAX_DESCRIBED = 100

_JOB_ID = re.compile(r"[A-Za-z0-9-]{1,64}(:[0-9]{1,5})?")
_JOB_ARN = re.compile(r"arn:aws[a-z-]*:batch:[a-z0-9-]+:[0-9]{12}:job/(?P<id>.+)")


class AwsBatch(AwsBatchSettings):
    """Submits with SubmitJob to a queue, queries with DescribeJobs and CloudWatch Logs, stops with TerminateJob.

    TerminateJob sends SIGTERM and, after the container agent's stop timeout (30 s by default), SIGKILL. Batch has no other way to end
    a job, so `stop` and `kill` do the same. A waiting job is cancelled.

    An identity consists of the job's ARN and its creation time. A job's id is a UUID that Batch never reuses.

    The backend has not been run on AWS: it is tested with moto, and with a stand-in for what moto lacks.
    """

    kind: ClassVar[str] = NAME
    poll_seconds: ClassVar[float] = 5.0
    submission_seconds: ClassVar[float] = 60.0  # and lists show a job some time after it was accepted

    def submit(self, launch: Launch) -> JobHandle:
        """Submit a job with the launch's name.

        Variables of the job, including secrets that ``secrets`` does not name, are visible to everyone with permission to describe it.

        Raises:
            SubmissionRejectedError: Batch refused the job, or would refuse it.
        """
        name = launch.name or f"watchstep-{randoms.token_hex(6)}"
        if self.job_queue is None or (self.job_definition is None and self.image is None):
            raise SubmissionRejectedError(
                "AWS Batch: job_queue is not set, or both job_definition and image are not set",
                "set them as in AwsBatch(job_queue=…, job_definition=…)",
            )
        parameters = submission(self, launch, name, self.job_definition or "")
        try:
            parameters["jobDefinition"] = self._definition()
            response = self.aws().call("batch", "submit_job", once=True, **parameters)
        except AwsCallError as error:
            raise SubmissionRejectedError(
                f"AWS Batch rejected the job: {error}", "correct the backend's settings or the launch"
            ) from error
        except BackendDownError as error:
            return self._find_submitted(name, error)
        return self._await_description(str(response["jobId"]), name)

    def status(self, job: JobHandle) -> JobStatus:
        """Return the job's status; "vanished" once Batch no longer knows it, a week after its end."""
        description = self._describe(job)
        if description is None:
            return JobStatus("vanished", detail="Batch does not know the job")
        return self._status(job, description)

    def logs(self, job: JobHandle, cursor: str = "") -> LogPart:
        """Return the output of the job's attempts from CloudWatch Logs, one after another. Lines from nodes other than the main one have a label.

        CloudWatch receives lines some seconds after they are written. Bytes that are not UTF-8 are lost.
        """
        region = region_of(identity_of(job, "AwsBatch")["arn"])
        description = self._describe(job)
        if description is None:
            return LogPart(b"", cursor)
        labels = dict.fromkeys(streams_of(description), "")
        for number, node in enumerate(self._nodes(description, region)):
            for stream in streams_of(node):
                labels.setdefault(stream, f"[node {number}] " if number else "")
        return aws_logs.read_streams(self.aws(), region, self.log_group, labels, cursor, labels.__getitem__)

    def stop(self, job: JobHandle) -> JobStatus:
        """Call TerminateJob: SIGTERM to the program and, after the agent's stop timeout, SIGKILL; a waiting job is cancelled."""
        before = self.status(job)
        if before.is_over:
            return before
        region = region_of(identity_of(job, "AwsBatch")["arn"])
        try:
            self.aws().call("batch", "terminate_job", region=region, jobId=job.id, reason=REASON)
        except AwsCallError as error:
            if not (after := self.status(job)).is_over:
                raise BackendError(
                    f"job {job.id}: could not be stopped ({error})", "see the job in the Batch console"
                ) from error
            return after
        return self.status(job)

    def kill(self, job: JobHandle) -> JobStatus:
        """Same as `stop`: Batch kills by itself after its timeout. Repeating it has no effect."""
        return self.stop(job)

    def jobs(self) -> list[JobHandle]:
        """List the queue's jobs with the tag of Watchstep; empty without a queue."""
        if self.job_queue is None:
            return []
        listed = [str(summary["jobId"]) for state in ACTIVE for summary in self._list(jobStatus=state)]
        ids = list(dict.fromkeys(listed))  # a job may change its state between the lists
        return [
            _handle(description)
            for description in self._describe_all(ids, "")
            if MARK in (description.get("tags") or {}) and not status_of(description).is_over
        ]

    def find(self, name: str) -> JobHandle | None:
        """Return the newest job of the queue with this name, until a week after its end.

        Raises:
            BackendDownError: there is no queue to search, or Batch does not answer.
        """
        if self.job_queue is None:
            raise BackendDownError(
                f"job {name} cannot be searched for: job_queue is not set",
                "set AwsBatch(job_queue=…) as at its launch",
            )
        jobs = self._list(filters=[{"name": "JOB_NAME", "values": [name]}])
        return self._await_description(str(jobs[0]["jobId"]), name) if jobs else None

    def reattach(self, id: str) -> JobHandle:  # noqa: A002 - the protocol's
        """Return the job with this id or ARN; for an array, one of its jobs (``id:0``).

        Raises:
            JobNotFoundError: there is no such job.
        """
        arn = _JOB_ARN.fullmatch(id)
        job_id = id if arn is None else arn["id"]
        if not _JOB_ID.fullmatch(job_id):
            raise JobNotFoundError(f"{id!r} is not an AWS Batch job id", "use an id or an ARN")
        descriptions = self._describe_all([job_id], region_of(id))
        if not descriptions or (arn is not None and descriptions[0]["jobArn"] != id):
            raise JobNotFoundError(
                f"AWS Batch has no job {id!r} here", "check the region and the account, or use its ARN"
            )
        if "size" in (descriptions[0].get("arrayProperties") or {}):
            raise JobNotFoundError(f"job {id!r} is an array", f"name one of its jobs: {job_id}:0")
        return _handle(descriptions[0])

    def settled(self, job: JobHandle) -> JobHandle:
        """Return the same job with its identity in canonical form.

        Raises:
            ConfigError: the identity is not a Batch identity, or does not match the id.
        """
        identity = identity_of(job, "AwsBatch")
        match = _JOB_ARN.fullmatch(identity["arn"])
        if match is None or match["id"] != job.id:
            raise ConfigError(
                f"job {job.id!r}: its ARN is {identity['arn'][:200]!r}",
                "bind it as AwsBatch.reattach returns it",
            )
        return JobHandle(job.backend, job.id, identity, job.details)

    def _definition(self) -> str:
        """Return the definition to submit with: the user's, or an equal registered one, or a newly registered one."""
        if self.job_definition is not None:
            if self.secrets:
                self._check_secrets(self.job_definition)
            return self.job_definition
        parameters = definition_of(self)
        registered = self._definitions(jobDefinitionName=parameters["jobDefinitionName"], status="ACTIVE")
        if not registered:
            registered = [self.aws().call("batch", "register_job_definition", **parameters)]
        return str(registered[0]["jobDefinitionArn"])

    def _check_secrets(self, definition: str) -> None:
        """Check that the user's own definition provides the secrets: SubmitJob cannot add them."""
        by_name = not definition.startswith("arn:") and ":" not in definition
        query: Any = (
            {"jobDefinitionName": definition, "status": "ACTIVE"}
            if by_name
            else {"jobDefinitions": [definition]}
        )
        definitions = sorted(self._definitions(**query), key=lambda entry: int(entry["revision"]))
        provided = {
            str(secret["name"]): secret["valueFrom"]
            for newest in definitions[-1:]
            for secret in _secrets_in(newest)
        }
        for name, arn in self.secrets.items():
            if provided.get(name) != arn:
                raise SubmissionRejectedError(
                    f"job definition {definition} does not provide secret {name} from {arn}",
                    "add it to the definition's containerProperties.secrets, or set image= to register a definition",
                )

    def _definitions(self, **query: Any) -> list[dict[str, Any]]:
        return list(self.aws().call("batch", "describe_job_definitions", **query)["jobDefinitions"])

    def _status(self, job: JobHandle, description: Mapping[str, Any]) -> JobStatus:
        status = status_of(description)
        if not status.is_over:
            return status
        return status_of(
            description, self._nodes(description, region_of(identity_of(job, "AwsBatch")["arn"]))
        )

    def _nodes(self, description: Mapping[str, Any], region: str) -> list[dict[str, Any]]:
        """Return the descriptions of a multi-node job's nodes; empty for any other job."""
        count = int((description.get("nodeProperties") or {}).get("numNodes", 0))
        return self._describe_all([f"{description['jobId']}#{number}" for number in range(count)], region)

    def _find_submitted(self, name: str, error: BackendDownError) -> JobHandle:
        """Return a job whose submission got no answer.

        Raises:
            BackendDownError: there is none, or the answer cannot be determined.
        """
        cause: BackendError = error
        for attempt in range(_ATTEMPTS):
            time.sleep(0.5 * attempt)
            try:
                jobs = self._list(filters=[{"name": "JOB_NAME", "values": [name]}])
            except (BackendDownError, CredentialsExpiredError) as listing:
                cause = listing
                break
            if jobs:
                return self._await_description(str(jobs[0]["jobId"]), name)
        raise BackendDownError(
            f"AWS Batch may have accepted job {name}, but does not show it ({error.what})",
            "look for it in the Batch console; use watchstep attach once it is visible",
        ) from cause

    def _await_description(self, job_id: str, name: str) -> JobHandle:
        cause: BackendError | None = None
        for attempt in range(_ATTEMPTS):
            time.sleep(0.5 * attempt)
            try:
                if descriptions := self._describe_all([job_id], ""):
                    return _handle(descriptions[0])
            except (BackendDownError, CredentialsExpiredError) as error:
                cause = error
                break
        raise BackendDownError(
            f"AWS Batch accepted job {job_id} ({name}), but does not show it ({cause.what if cause else 'it does not know the job'})",
            "look for it in the Batch console; use watchstep attach once it is visible",
        ) from cause

    def _describe(self, job: JobHandle) -> dict[str, Any] | None:
        """Return the description of exactly this job; None if Batch no longer knows it."""
        identity = identity_of(job, "AwsBatch")
        descriptions = self._describe_all([job.id], region_of(identity["arn"]))
        if not descriptions:
            self.aws().check_account(identity["arn"])
            return None
        return descriptions[0] if dict(_handle(descriptions[0]).identity) == identity else None

    def _describe_all(self, ids: Sequence[str], region: str) -> list[dict[str, Any]]:
        descriptions: list[dict[str, Any]] = []
        for first in range(0, len(ids), _MAX_DESCRIBED):
            chunk = list(ids[first : first + _MAX_DESCRIBED])
            try:
                descriptions += self.aws().call("batch", "describe_jobs", region=region, jobs=chunk)["jobs"]
            except AwsCallError as error:
                raise BackendDownError(f"AWS Batch: {error}", "see the Batch console") from error
        return descriptions

    def _list(self, **parameters: Any) -> list[dict[str, Any]]:
        jobs: list[dict[str, Any]] = []
        while True:
            try:
                page = self.aws().call("batch", "list_jobs", jobQueue=self.job_queue, **parameters)
            except AwsCallError as error:
                raise BackendDownError(f"queue {self.job_queue}: {error}", "see the Batch console") from error
            jobs += page["jobSummaryList"]
            if not page.get("nextToken"):
                return jobs
            parameters["nextToken"] = page["nextToken"]


def _handle(description: Mapping[str, Any]) -> JobHandle:
    identity = {"arn": str(description["jobArn"]), "created": milliseconds(description["createdAt"])}
    return JobHandle(NAME, str(description["jobId"]), identity)


def _secrets_in(definition: Mapping[str, Any]) -> list[dict[str, Any]]:
    ranges = (definition.get("nodeProperties") or {}).get("nodeRangeProperties", [])
    containers = [definition.get("containerProperties"), *(entry.get("container") for entry in ranges)]
    return [secret for container in containers if container for secret in container.get("secrets", [])]


_STATES: dict[str, JobState] = {
    "SUBMITTED": "queued",
    "PENDING": "queued",
    "RUNNABLE": "queued",
    "STARTING": "running",
    "RUNNING": "running",
    "SUCCEEDED": "ended",
    "FAILED": "ended",
}
ACTIVE = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")
"""Statuses of jobs that are not over."""


def status_of(description: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]] = ()) -> JobStatus:
    """Return a job's status from its DescribeJobs description, and from its nodes' if it has several."""
    batch_status = str(description["status"])
    state = _STATES.get(batch_status, "unknown")
    reason = " ".join(
        str(description.get("statusReason") or _last_container(description).get("reason") or "").split()
    )[:500]
    detail = f"{batch_status}: {reason}" if reason else batch_status
    if state != "ended":
        return JobStatus(state, None, detail)
    codes = [code for container in (description, *nodes) if (code := _exit_code(container)) is not None]
    code = next((code for code in codes if code), 0 if batch_status == "SUCCEEDED" else None)
    if batch_status == "FAILED" and (description.get("isTerminated") or description.get("isCancelled")):
        return JobStatus("cancelled", code, detail)
    return JobStatus("ended", code, detail)


def streams_of(description: Mapping[str, Any]) -> Iterator[str]:
    """Yield the log streams of a job's attempts, oldest first."""
    containers = [attempt.get("container") or {} for attempt in description.get("attempts", [])]
    streams = [
        str(container.get("logStreamName") or "")
        for container in (*containers, description.get("container") or {})
    ]
    yield from dict.fromkeys(filter(None, streams))


def _exit_code(description: Mapping[str, Any]) -> int | None:
    code = _last_container(description).get("exitCode")
    return None if code is None else of_container(int(code))


def _last_container(description: Mapping[str, Any]) -> Mapping[str, Any]:
    current: Mapping[str, Any] = description.get("container") or {}
    if "exitCode" in current or not description.get("attempts"):
        return current
    return description["attempts"][-1].get("container") or current
