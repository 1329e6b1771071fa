"""Jobs on Amazon SageMaker, and their states. See ``docs/launch/sagemaker.md``."""

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
_LOOKS = 3

_JOB_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
_JOB_ARN = re.compile(r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:[0-9]{12}:training-job/(?P<name>.+)")


class SageMaker(SageMakerSettings):
    """Submits by CreateTrainingJob, looks by DescribeTrainingJob and CloudWatch Logs, stops by StopTrainingJob.

    Fields are called as in SageMaker's Python SDK. StopTrainingJob is SIGTERM and, 120 seconds later, SIGKILL: there is no
    other end, so that `stop` and `kill` ask for the same.

    An identity is the job's ARN and the time at which it was created. SageMaker stops by the name alone, and gives the name of
    a job to no other unless that was deleted: should it be deleted and made anew between the look and the stop, that one would
    be stopped.

    It was never run on AWS: the tests meet moto, and a stand-in for what moto lacks.
    """

    kind: ClassVar[str] = NAME
    poll_seconds: ClassVar[float] = 5.0
    submission_seconds: ClassVar[float] = 0.0

    def submit(self, launch: Launch) -> JobHandle:
        """Create a training job, called like the launch. Files of the launcher's and a long command go by S3.

        Variables of the job, secrets among them that ``secrets`` does not name, can be read by whoever may describe it.

        Raises:
            SubmissionRejectedError: SageMaker refused it, or would.
        """
        name = launch.name or f"watchstep-{randoms.token_hex(6)}"
        self._check_complete()
        given = variables(launch, self.secrets)
        files = sagemaker_request.local_files(launch, self.source)
        words = [*self.entrypoint, *launch.command]
        by_s3 = bool(files) or self._needs_start or not fits(words)
        code = self._put(launch, name, files) if by_s3 else ""
        asked = request(self, name, START_COMMAND if by_s3 else launch.command, given, code)
        try:
            self.aws().call("sagemaker", "create_training_job", once=True, **asked)
        except AwsCallError as error:
            raise _rejected(error) from error
        except BackendDownError as error:
            return self._looked_for(name, error)
        return self._looked_for(name, None)

    def status(self, job: JobHandle) -> JobStatus:
        """How the job is; "vanished" where SageMaker knows it no more."""
        return _status(self._described(job))

    def logs(self, job: JobHandle, cursor: str = "") -> LogPart:
        """What the job wrote, line by line, from CloudWatch Logs; lines of other instances than the first name theirs.

        CloudWatch gets lines some seconds after they are written. Bytes that are not UTF-8 do not come through.
        """
        aws, region = self.aws(), region_of(identity_of(job, "SageMaker")["arn"])
        streams = aws_logs.streams_below(aws, region, LOG_GROUP, f"{job.id}/")
        return aws_logs.read_streams(aws, region, LOG_GROUP, streams, cursor, _label)

    def stop(self, job: JobHandle) -> JobStatus:
        """StopTrainingJob: SIGTERM to the program and, 120 seconds later, SIGKILL."""
        found = self._described(job)
        # One that is stopping was asked already, and asking again is refused.
        if found is None or found["TrainingJobStatus"] == "Stopping" or status_of(found).is_over:
            return _status(found)
        region = region_of(identity_of(job, "SageMaker")["arn"])
        try:
            self.aws().call("sagemaker", "stop_training_job", region=region, TrainingJobName=job.id)
        except AwsCallError as error:
            after = self._described(job)
            if after is not None and after["TrainingJobStatus"] == "InProgress":
                raise BackendError(
                    f"job {job.id}: could not be stopped ({error})", "see it in SageMaker's console"
                ) from error
        return self.status(job)

    def kill(self, job: JobHandle) -> JobStatus:
        """The same as `stop`: SageMaker has no other end, and kills by itself. Asking twice changes nothing."""
        return self.stop(job)

    def jobs(self) -> list[JobHandle]:
        """Those of the account and region that carry the tag of Watchstep's launchers."""
        listed = [one for state in ("InProgress", "Stopping") for one in self._listed(state)]
        return [_handle(one) for one in listed if self._is_marked(str(one["TrainingJobArn"]))]

    def find(self, name: str) -> JobHandle | None:
        """The training job of a launch, which is called like it."""
        found = self._named(name, "")
        return None if found is None else _handle(found)

    def reattach(self, id: str) -> JobHandle:  # noqa: A002 - the protocol's
        """The training job with this name or ARN.

        Raises:
            JobNotFoundError: there is none.
        """
        arn = _JOB_ARN.fullmatch(id)
        name = id if arn is None else arn["name"]
        if not _JOB_NAME.fullmatch(name):
            raise JobNotFoundError(f"job {id!r}: no training job's name", "give a name, or an ARN")
        found = self._named(name, region_of(id))
        if found is None or (arn is not None and found["TrainingJobArn"].lower() != id.lower()):
            raise JobNotFoundError(
                f"job {id!r}: SageMaker knows none here", "see to the region and the account; give its ARN"
            )
        return _handle(found)

    def settled(self, job: JobHandle) -> JobHandle:
        """The same, its identity spelt as this class spells it.

        Raises:
            ConfigError: the identity is not one of SageMaker's, or another's than the id's.
        """
        identity = identity_of(job, "SageMaker")
        named = _JOB_ARN.fullmatch(identity["arn"])
        if named is None or named["name"].lower() != job.id.lower():
            raise ConfigError(
                f"job {job.id!r}: its ARN is {identity['arn'][:200]!r}",
                "bind it as SageMaker.reattach gives it",
            )
        return JobHandle(job.backend, job.id, identity, job.details)

    @property
    def _needs_start(self) -> bool:
        """Whether the container has to find out something before the program is started."""
        return bool(self.secrets) or self._starts_again or self.instance_count > 1

    @property
    def _starts_again(self) -> bool:
        return self.use_spot_instances or self.max_retry_attempts is not None or "RetryStrategy" in self.extra

    def _check_complete(self) -> None:
        for field in ("role", "image_uri", "instance_type", "output_path"):
            if not getattr(self, field):
                raise SubmissionRejectedError(
                    f"{field}: is not set, and a training job needs it", f"SageMaker({field}=…)"
                )

    def _put(self, launch: Launch, name: str, files: list[PurePosixPath]) -> str:
        """Put on S3 what the job starts from; returns the prefix.

        Raises:
            SubmissionRejectedError: the bucket refuses it, or there is too much.
        """
        prefix = f"{(self.code_location or self.output_path or '').rstrip('/')}/{name}/code"
        bucket, _, key = prefix.removeprefix("s3://").partition("/")
        objects = sagemaker_request.packed(launch, files, self.secrets, self._starts_again)
        try:
            for each, data in objects.items():
                self.aws().call("s3", "put_object", Bucket=bucket, Key=f"{key}/{each}", Body=data)
        except AwsCallError as error:
            raise SubmissionRejectedError(
                f"{prefix}: S3 took no code ({error})", "name a bucket that is there, by code_location"
            ) from error
        return f"{prefix}/"

    def _looked_for(self, name: str, unanswered: BackendDownError | None) -> JobHandle:
        """A job that was created, or may have been.

        Raises:
            BackendDownError: there is none, or nobody knows.
        """
        why: BackendError | None = unanswered
        for look in range(_LOOKS):
            time.sleep(0.5 * look)
            try:
                if (found := self._named(name, "")) is not None:
                    return _handle(found)
            except (BackendDownError, CredentialsExpiredError) as error:
                why = error
                break
        said = "may have been taken" if unanswered else "was taken"
        raise BackendDownError(
            f"training job {name} {said}, and SageMaker does not show it ({why.what if why else 'it knows none'})",
            "look for it in SageMaker's console; watchstep attach takes it once it is seen",
        ) from why

    def _described(self, job: JobHandle) -> dict[str, Any] | None:
        """What SageMaker says of this very job; None where it knows it no more."""
        identity = identity_of(job, "SageMaker")
        found = self._named(job.id, region_of(identity["arn"]))
        if found is None:
            self.aws().check_account(identity["arn"])
            return None
        return found if _handle(found) == JobHandle(NAME, job.id, identity) else None

    def _named(self, name: str, region: str) -> dict[str, Any] | None:
        try:
            return self.aws().call("sagemaker", "describe_training_job", region=region, TrainingJobName=name)
        except AwsCallError as error:
            if error.means_missing:
                return None
            raise BackendDownError(
                f"training job {name}: {error}", "see it in SageMaker's console"
            ) from error

    def _listed(self, state: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        asked: dict[str, Any] = {"StatusEquals": state, "MaxResults": 100}
        while True:
            page = self.aws().call("sagemaker", "list_training_jobs", **asked)
            found += page["TrainingJobSummaries"]
            if not page.get("NextToken"):
                return found
            asked["NextToken"] = page["NextToken"]

    def _is_marked(self, arn: str) -> bool:
        try:
            held = self.aws().call("sagemaker", "list_tags", ResourceArn=arn)["Tags"]
        except AwsCallError:  # gone by now
            return False
        return any(tag["Key"] == MARK for tag in held)


def _status(found: Mapping[str, Any] | None) -> JobStatus:
    return JobStatus("vanished", detail="SageMaker does not know it") if found is None else status_of(found)


def _handle(found: Mapping[str, Any]) -> JobHandle:
    identity = {"arn": str(found["TrainingJobArn"]), "created": milliseconds(found["CreationTime"])}
    return JobHandle(NAME, str(found["TrainingJobName"]), identity)


def _label(stream: str) -> str:
    """Of ``job/algo-2-1795212000``: the instance, unless it is the first."""
    instance = stream.rpartition("/")[2].rpartition("-")[0]
    return "" if instance in ("", "algo-1") else f"[{instance}] "


def _rejected(error: AwsCallError) -> SubmissionRejectedError:
    hint = {
        "ResourceInUse": "launch it under another name",
        "ResourceLimitExceeded": "ask AWS for a higher quota, or take another instance type",
    }
    return SubmissionRejectedError(
        f"SageMaker took no job: {error}",
        hint.get(error.code, "correct the backend's settings or the launch"),
    )


_WAITING = frozenset(("Starting", "Pending", "LaunchingMLInstances"))
_OUT_OF_TIME = frozenset(("MaxRuntimeExceeded", "MaxWaitTimeExceeded"))
_RAN = frozenset(("Training", "Uploading", "Interrupted", "Restarting"))

_LAST_CODE = re.compile(r"exit code:?\s*(-?\d{1,9})\s*$", re.IGNORECASE)
_SOME_CODE = re.compile(r"exit\s?code:?\s*(-?\d{1,9})", re.IGNORECASE)
_MOST_REASON = 500


def status_of(found: Mapping[str, Any]) -> JobStatus:
    """How a job is, by what DescribeTrainingJob answers."""
    held, second = str(found["TrainingJobStatus"]), str(found.get("SecondaryStatus", ""))
    reason = " ".join(str(found.get("FailureReason", "")).split())
    detail = f"{second or held}: {reason[:_MOST_REASON]}" if reason else second or held
    if held == "Completed":
        return JobStatus("ended", 0, detail)
    if held == "Failed":
        return JobStatus("ended", exit_code(reason), detail)
    if held == "Stopped":
        # Nobody asked for these stops: as with a time limit elsewhere, the job is over by itself.
        return JobStatus("ended" if second in _OUT_OF_TIME else "cancelled", None, detail)
    if held == "InProgress":
        return JobStatus(_in_progress(found, second), None, detail)
    return JobStatus({"Stopping": "running", "Deleting": "vanished"}.get(held, "unknown"), None, detail)  # type: ignore[arg-type]


def exit_code(reason: str) -> int | None:
    """The exit code that a failure's reason names; negative for a signal; None where it names none.

    SageMaker has no field for it. What the container ended by stands last, ``…, exit code: 1``; its toolkit's
    ``ExitCode 1`` stands first.
    """
    found = _LAST_CODE.search(reason) or _SOME_CODE.search(reason)
    return None if found is None else of_container(int(found[1]))


def _in_progress(found: Mapping[str, Any], second: str) -> JobState:
    if second not in _WAITING:
        return "running"
    ran = any(one.get("Status") in _RAN for one in found.get("SecondaryStatusTransitions", []))
    return "running" if ran else "queued"
