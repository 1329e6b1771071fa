"""Amazon SageMaker backend and its job states. See ``docs/launch/sagemaker.md``."""

from __future__ import annotations

import re
import secrets as randoms
import time
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, ClassVar

from watchstep.errors import ConfigError
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
from watchstep_launch.backends.aws import sagemaker_request
from watchstep_launch.backends.aws.calls import (
    MARK,
    AwsCallError,
    identity_of,
    milliseconds,
    of_container,
    region_of,
)
from watchstep_launch.backends.aws.sagemaker_request import (
    START_COMMAND,
    SageMakerSettings,
    fits,
    request,
    variables,
)

NAME = "sagemaker"
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
_ATTEMPTS = 3

_JOB_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
_JOB_ARN = re.compile(r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:[0-9]{12}:training-job/(?P<name>.+)")


class SageMaker(SageMakerSettings):
    """Submits with CreateTrainingJob, queries with DescribeTrainingJob and CloudWatch Logs, stops with StopTrainingJob.

    Fields have the names of SageMaker's Python SDK. StopTrainingJob sends SIGTERM and, 120 seconds later, SIGKILL. SageMaker has no
    other way to end a job, so `stop` and `kill` do the same.

    An identity consists of the job's ARN and its creation time. SageMaker stops a job by its name alone, and reuses a name only
    after the job was deleted. If a job were deleted and created again between query and stop, the new job would
    be stopped.

    The backend has not been run on AWS: it is tested with moto, and with a stand-in for what moto lacks.
    """

    kind: ClassVar[str] = NAME
    poll_seconds: ClassVar[float] = 5.0
    submission_seconds: ClassVar[float] = 0.0
    longest_variable: ClassVar[int] = sagemaker_request.MAX_VALUE

    def submit(self, launch: Launch) -> JobHandle:
        """Create a training job with the launch's name. Local files and a long command are uploaded to S3.

        Variables of the job, including secrets that ``secrets`` does not name, are visible to everyone with permission to describe it.

        Raises:
            SubmissionRejectedError: SageMaker refused the job, or would refuse it.
        """
        name = launch.name or f"watchstep-{randoms.token_hex(6)}"
        self._check_complete()
        environment = variables(launch, self.secrets)
        files = sagemaker_request.local_files(launch, self.source)
        words = [*self.entrypoint, *launch.command]
        by_s3 = bool(files) or self._needs_start or not fits(words)
        code = self._put(launch, name, files) if by_s3 else ""
        parameters = request(self, name, START_COMMAND if by_s3 else launch.command, environment, code)
        try:
            self.aws().call("sagemaker", "create_training_job", once=True, **parameters)
        except AwsCallError as error:
            raise _rejected(error) from error
        except BackendDownError as error:
            return self._find_submitted(name, error)
        return self._find_submitted(name, None)

    def status(self, job: JobHandle) -> JobStatus:
        """Return the job's status; "vanished" if SageMaker no longer knows it."""
        return _status(self._describe(job))

    def logs(self, job: JobHandle, cursor: str = "") -> LogPart:
        """Return the job's output from CloudWatch Logs. Lines from instances other than the first have a label.

        CloudWatch receives lines some seconds after they are written. Bytes that are not UTF-8 are lost.
        """
        aws, region = self.aws(), region_of(identity_of(job, "SageMaker")["arn"])
        streams = aws_logs.streams_below(aws, region, LOG_GROUP, f"{job.id}/")
        return aws_logs.read_streams(aws, region, LOG_GROUP, streams, cursor, _label)

    def stop(self, job: JobHandle) -> JobStatus:
        """Call StopTrainingJob: SIGTERM to the program and, 120 seconds later, SIGKILL."""
        description = self._describe(job)
        # A second request for a job that is stopping would be refused.
        if (
            description is None
            or description["TrainingJobStatus"] == "Stopping"
            or status_of(description).is_over
        ):
            return _status(description)
        region = region_of(identity_of(job, "SageMaker")["arn"])
        try:
            self.aws().call("sagemaker", "stop_training_job", region=region, TrainingJobName=job.id)
        except AwsCallError as error:
            after = self._describe(job)
            if after is not None and after["TrainingJobStatus"] == "InProgress":
                raise BackendError(
                    f"job {job.id}: could not be stopped ({error})", "see the job in the SageMaker console"
                ) from error
        return self.status(job)

    def kill(self, job: JobHandle) -> JobStatus:
        """Same as `stop`: SageMaker kills by itself after its timeout. Repeating it has no effect."""
        return self.stop(job)

    def jobs(self) -> list[JobHandle]:
        """List the jobs of the account and region with the tag of Watchstep."""
        listed = [summary for state in ("InProgress", "Stopping") for summary in self._list(state)]
        return [_handle(summary) for summary in listed if self._is_marked(str(summary["TrainingJobArn"]))]

    def find(self, name: str) -> JobHandle | None:
        """Return the training job of a launch, which has the launch's name."""
        description = self._describe_name(name, "")
        return None if description is None else _handle(description)

    def reattach(self, id: str) -> JobHandle:  # noqa: A002 - the protocol's
        """Return the training job with this name or ARN.

        Raises:
            JobNotFoundError: there is no such job.
        """
        arn = _JOB_ARN.fullmatch(id)
        name = id if arn is None else arn["name"]
        if not _JOB_NAME.fullmatch(name):
            raise JobNotFoundError(f"{id!r} is not the name of a training job", "use a name or an ARN")
        description = self._describe_name(name, region_of(id))
        if description is None or (arn is not None and description["TrainingJobArn"].lower() != id.lower()):
            raise JobNotFoundError(
                f"SageMaker has no job {id!r} here", "check the region and the account, or use its ARN"
            )
        return _handle(description)

    def settled(self, job: JobHandle) -> JobHandle:
        """Return the same job with its identity in canonical form.

        Raises:
            ConfigError: the identity is not a SageMaker identity, or does not match the id.
        """
        identity = identity_of(job, "SageMaker")
        match = _JOB_ARN.fullmatch(identity["arn"])
        if match is None or match["name"].lower() != job.id.lower():
            raise ConfigError(
                f"job {job.id!r}: its ARN is {identity['arn'][:200]!r}",
                "bind it as SageMaker.reattach returns it",
            )
        return JobHandle(job.backend, job.id, identity, job.details)

    @property
    def _needs_start(self) -> bool:
        """Whether the container must determine something before it starts the program."""
        return bool(self.secrets) or self._may_restart or self.instance_count > 1

    @property
    def _may_restart(self) -> bool:
        return self.use_spot_instances or self.max_retry_attempts is not None or "RetryStrategy" in self.extra

    def _check_complete(self) -> None:
        for field in ("role", "image_uri", "instance_type", "output_path"):
            if not getattr(self, field):
                raise SubmissionRejectedError(
                    f"{field} is not set, and a training job requires it", f"set SageMaker({field}=…)"
                )

    def _put(self, launch: Launch, name: str, files: list[PurePosixPath]) -> str:
        """Upload the job's files to S3. Returns the prefix.

        Raises:
            SubmissionRejectedError: the bucket refuses them, or they are too large.
        """
        prefix = f"{(self.code_location or self.output_path or '').rstrip('/')}/{name}/code"
        bucket, _, key = prefix.removeprefix("s3://").partition("/")
        objects = sagemaker_request.package(launch, files, self.secrets, self._may_restart)
        try:
            for file_name, data in objects.items():
                self.aws().call("s3", "put_object", Bucket=bucket, Key=f"{key}/{file_name}", Body=data)
        except AwsCallError as error:
            raise SubmissionRejectedError(
                f"{prefix}: S3 refused the upload ({error})", "set code_location to an existing bucket"
            ) from error
        return f"{prefix}/"

    def _find_submitted(self, name: str, unanswered: BackendDownError | None) -> JobHandle:
        """Return a job that was created, or may have been.

        Raises:
            BackendDownError: there is none, or the answer cannot be determined.
        """
        cause: BackendError | None = unanswered
        for attempt in range(_ATTEMPTS):
            time.sleep(0.5 * attempt)
            try:
                if (description := self._describe_name(name, "")) is not None:
                    return _handle(description)
            except (BackendDownError, CredentialsExpiredError) as error:
                cause = error
                break
        accepted = "may have accepted" if unanswered else "accepted"
        raise BackendDownError(
            f"SageMaker {accepted} training job {name}, but does not show it ({cause.what if cause else 'it does not know the job'})",
            "look for it in the SageMaker console; use watchstep attach once it is visible",
        ) from cause

    def _describe(self, job: JobHandle) -> dict[str, Any] | None:
        """Return the description of exactly this job; None if SageMaker no longer knows it."""
        identity = identity_of(job, "SageMaker")
        description = self._describe_name(job.id, region_of(identity["arn"]))
        if description is None:
            self.aws().check_account(identity["arn"])
            return None
        return description if _handle(description) == JobHandle(NAME, job.id, identity) else None

    def _describe_name(self, name: str, region: str) -> dict[str, Any] | None:
        try:
            return self.aws().call("sagemaker", "describe_training_job", region=region, TrainingJobName=name)
        except AwsCallError as error:
            if error.is_missing:
                return None
            raise BackendDownError(
                f"training job {name}: {error}", "see the job in the SageMaker console"
            ) from error

    def _list(self, state: str) -> list[dict[str, Any]]:
        jobs: list[dict[str, Any]] = []
        parameters: dict[str, Any] = {"StatusEquals": state, "MaxResults": 100}
        while True:
            page = self.aws().call("sagemaker", "list_training_jobs", **parameters)
            jobs += page["TrainingJobSummaries"]
            if not page.get("NextToken"):
                return jobs
            parameters["NextToken"] = page["NextToken"]

    def _is_marked(self, arn: str) -> bool:
        try:
            tags = self.aws().call("sagemaker", "list_tags", ResourceArn=arn)["Tags"]
        except AwsCallError:  # deleted meanwhile
            return False
        return any(tag["Key"] == MARK for tag in tags)


def _status(description: Mapping[str, Any] | None) -> JobStatus:
    if description is None:
        return JobStatus("vanished", detail="SageMaker does not know the job")
    return status_of(description)


def _handle(description: Mapping[str, Any]) -> JobHandle:
    identity = {
        "arn": str(description["TrainingJobArn"]),
        "created": milliseconds(description["CreationTime"]),
    }
    return JobHandle(NAME, str(description["TrainingJobName"]), identity)


def _label(stream: str) -> str:
    """Return the instance in a stream name such as ``job/algo-2-1795212000``; empty for the first."""
    instance = stream.rpartition("/")[2].rpartition("-")[0]
    return "" if instance in ("", "algo-1") else f"[{instance}] "


def _rejected(error: AwsCallError) -> SubmissionRejectedError:
    hint = {
        "ResourceInUse": "launch it under another name",
        "ResourceLimitExceeded": "ask AWS for a higher quota, or take another instance type",
    }
    return SubmissionRejectedError(
        f"SageMaker rejected the job: {error}",
        hint.get(error.code, "correct the backend's settings or the launch"),
    )


_WAITING = frozenset(("Starting", "Pending", "LaunchingMLInstances"))
_OUT_OF_TIME = frozenset(("MaxRuntimeExceeded", "MaxWaitTimeExceeded"))
_RAN = frozenset(("Training", "Uploading", "Interrupted", "Restarting"))

_LAST_CODE = re.compile(r"exit code:?\s*(-?\d{1,9})\s*$", re.IGNORECASE)
_SOME_CODE = re.compile(r"exit\s?code:?\s*(-?\d{1,9})", re.IGNORECASE)
_MAX_REASON = 500


def status_of(description: Mapping[str, Any]) -> JobStatus:
    """Return a job's status from its DescribeTrainingJob description."""
    primary, secondary = str(description["TrainingJobStatus"]), str(description.get("SecondaryStatus", ""))
    reason = " ".join(str(description.get("FailureReason", "")).split())
    detail = f"{secondary or primary}: {reason[:_MAX_REASON]}" if reason else secondary or primary
    if primary == "Completed":
        return JobStatus("ended", 0, detail)
    if primary == "Failed":
        return JobStatus("ended", exit_code(reason), detail)
    if primary == "Stopped":
        # Nobody requested these stops: as with a time limit elsewhere, the job has ended by itself.
        return JobStatus("ended" if secondary in _OUT_OF_TIME else "cancelled", None, detail)
    if primary == "InProgress":
        return JobStatus(_in_progress(description, secondary), None, detail)
    return JobStatus({"Stopping": "running", "Deleting": "vanished"}.get(primary, "unknown"), None, detail)  # type: ignore[arg-type]


def exit_code(reason: str) -> int | None:
    """Return the exit code in a failure reason, negative for a signal; None if there is none.

    SageMaker has no field for it. The container's own exit code comes last, ``…, exit code: 1``; that of SageMaker's toolkit,
    ``ExitCode 1``, comes first.
    """
    match = _LAST_CODE.search(reason) or _SOME_CODE.search(reason)
    return None if match is None else of_container(int(match[1]))


def _in_progress(description: Mapping[str, Any], secondary: str) -> JobState:
    if secondary not in _WAITING:
        return "running"
    transitions = description.get("SecondaryStatusTransitions", [])
    ran = any(transition.get("Status") in _RAN for transition in transitions)
    return "running" if ran else "queued"
