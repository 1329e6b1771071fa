"""Jobs on AWS Batch, and their states. See ``docs/launch/aws-batch.md``."""

from __future__ import annotations

import re
import secrets as randoms
import time
from collections.abc import Iterator, Mapping, Sequence
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
from watchstep_launch.backends.aws.batch_request import AwsBatchSettings, definition_of, submission
from watchstep_launch.backends.aws.calls import (
    MARK,
    AwsCallError,
    identity_of,
    milliseconds,
    of_container,
    region_of,
)

NAME = "aws_batch"
REASON = "stopped by Watchstep"
_LOOKS = 3
_MOST_DESCRIBED = 100

_JOB_ID = re.compile(r"[A-Za-z0-9-]{1,64}(:[0-9]{1,5})?")
_JOB_ARN = re.compile(r"arn:aws[a-z-]*:batch:[a-z0-9-]+:[0-9]{12}:job/(?P<id>.+)")


class AwsBatch(AwsBatchSettings):
    """Submits by SubmitJob to a queue, looks by DescribeJobs and CloudWatch Logs, stops by TerminateJob.

    TerminateJob is SIGTERM and, after the container agent's stop timeout (30 s unless it is set otherwise), SIGKILL: there is no other
    end, so that `stop` and `kill` ask for the same. A job that waits is cancelled by it.

    An identity is the job's ARN and the time at which it was created. A job's id is a UUID of Batch's own, which no other job ever has.

    It was never run on AWS: the tests meet moto, and a stand-in for what moto lacks.
    """

    kind: ClassVar[str] = NAME
    poll_seconds: ClassVar[float] = 5.0
    submission_seconds: ClassVar[float] = 60.0  # and lists show a job some time after it was taken

    def submit(self, launch: Launch) -> JobHandle:
        """Submit a job, called like the launch.

        Variables of the job, secrets among them that ``secrets`` does not name, can be read by whoever may describe it.

        Raises:
            SubmissionRejectedError: Batch refused it, or would.
        """
        name = launch.name or f"watchstep-{randoms.token_hex(6)}"
        if self.job_queue is None or (self.job_definition is None and self.image is None):
            raise SubmissionRejectedError(
                "AWS Batch: job_queue, or job_definition or image, is not set, and a job needs them",
                "AwsBatch(job_queue=…, job_definition=…)",
            )
        asked = submission(self, launch, name, self.job_definition or "")
        try:
            asked["jobDefinition"] = self._definition()
            answer = self.aws().call("batch", "submit_job", once=True, **asked)
        except AwsCallError as error:
            raise SubmissionRejectedError(
                f"AWS Batch took no job: {error}", "correct the backend's settings or the launch"
            ) from error
        except BackendDownError as error:
            return self._looked_for(name, error)
        return self._just_submitted(str(answer["jobId"]), name)

    def status(self, job: JobHandle) -> JobStatus:
        """How the job is; "vanished" where Batch knows it no more, which is a week after its end."""
        found = self._described(job)
        return (
            JobStatus("vanished", detail="Batch does not know it")
            if found is None
            else self._status(job, found)
        )

    def logs(self, job: JobHandle, cursor: str = "") -> LogPart:
        """What the job's attempts wrote, one after another, from CloudWatch Logs; lines of other nodes than the main one name theirs.

        CloudWatch gets lines some seconds after they are written. Bytes that are not UTF-8 do not come through.
        """
        region = region_of(identity_of(job, "AwsBatch")["arn"])
        found = self._described(job)
        if found is None:
            return LogPart(b"", cursor)
        labels = dict.fromkeys(streams_of(found), "")
        for number, node in enumerate(self._nodes(found, region)):
            for stream in streams_of(node):
                labels.setdefault(stream, f"[node {number}] " if number else "")
        return aws_logs.read_streams(self.aws(), region, self.log_group, labels, cursor, labels.__getitem__)

    def stop(self, job: JobHandle) -> JobStatus:
        """TerminateJob: SIGTERM to the program and, after the agent's stop timeout, SIGKILL; a job that waits is cancelled."""
        before = self.status(job)
        if before.is_over:
            return before
        region = region_of(identity_of(job, "AwsBatch")["arn"])
        try:
            self.aws().call("batch", "terminate_job", region=region, jobId=job.id, reason=REASON)
        except AwsCallError as error:
            if not (after := self.status(job)).is_over:
                raise BackendError(
                    f"job {job.id}: could not be stopped ({error})", "see it in Batch's console"
                ) from error
            return after
        return self.status(job)

    def kill(self, job: JobHandle) -> JobStatus:
        """The same as `stop`: Batch has no other end, and kills by itself. Asking twice changes nothing."""
        return self.stop(job)

    def jobs(self) -> list[JobHandle]:
        """Those of the queue that carry the tag of Watchstep's launchers; none without a queue."""
        if self.job_queue is None:
            return []
        listed = [str(one["jobId"]) for state in ACTIVE for one in self._listed(jobStatus=state)]
        ids = list(dict.fromkeys(listed))  # a job may go on to the next state while they are listed
        found = self._all_described(ids, "")
        return [
            _handle(one) for one in found if MARK in (one.get("tags") or {}) and not status_of(one).is_over
        ]

    def find(self, name: str) -> JobHandle | None:
        """The newest job of the queue that is called like the launch, for a week after its end.

        Raises:
            BackendDownError: there is no queue to look in, or Batch does not answer.
        """
        if self.job_queue is None:
            raise BackendDownError(
                f"job {name}: no queue to look for it in", "AwsBatch(job_queue=…), the one of its launch"
            )
        found = self._listed(filters=[{"name": "JOB_NAME", "values": [name]}])
        return self._just_submitted(str(found[0]["jobId"]), name) if found else None

    def reattach(self, id: str) -> JobHandle:  # noqa: A002 - the protocol's
        """The job with this id or ARN; of an array, one of its jobs (``id:0``).

        Raises:
            JobNotFoundError: there is none.
        """
        arn = _JOB_ARN.fullmatch(id)
        job_id = id if arn is None else arn["id"]
        if not _JOB_ID.fullmatch(job_id):
            raise JobNotFoundError(f"job {id!r}: no job id of Batch's", "give an id, or an ARN")
        found = self._all_described([job_id], region_of(id))
        if not found or (arn is not None and found[0]["jobArn"] != id):
            raise JobNotFoundError(
                f"job {id!r}: Batch knows none here", "see to the region and the account; give its ARN"
            )
        if "size" in (found[0].get("arrayProperties") or {}):
            raise JobNotFoundError(f"job {id!r}: is an array", f"name one of its jobs: {job_id}:0")
        return _handle(found[0])

    def settled(self, job: JobHandle) -> JobHandle:
        """The same, its identity spelt as this class spells it.

        Raises:
            ConfigError: the identity is not one of Batch's, or another's than the id's.
        """
        identity = identity_of(job, "AwsBatch")
        named = _JOB_ARN.fullmatch(identity["arn"])
        if named is None or named["id"] != job.id:
            raise ConfigError(
                f"job {job.id!r}: its ARN is {identity['arn'][:200]!r}",
                "bind it as AwsBatch.reattach gives it",
            )
        return JobHandle(job.backend, job.id, identity, job.details)

    def _definition(self) -> str:
        """The definition to submit with: the user's, or one that is registered unless an equal one is."""
        if self.job_definition is not None:
            if self.secrets:
                self._check_secrets(self.job_definition)
            return self.job_definition
        asked = definition_of(self)
        held = self._definitions(jobDefinitionName=asked["jobDefinitionName"], status="ACTIVE")
        if not held:
            held = [self.aws().call("batch", "register_job_definition", **asked)]
        return str(held[0]["jobDefinitionArn"])

    def _check_secrets(self, definition: str) -> None:
        """See that a definition of the user's own gives the secrets: SubmitJob cannot add them."""
        by_name = not definition.startswith("arn:") and ":" not in definition
        asked: Any = (
            {"jobDefinitionName": definition, "status": "ACTIVE"}
            if by_name
            else {"jobDefinitions": [definition]}
        )
        held = sorted(self._definitions(**asked), key=lambda one: int(one["revision"]))
        given = {str(one["name"]): one["valueFrom"] for each in held[-1:] for one in _secrets_in(each)}
        for name, place in self.secrets.items():
            if given.get(name) != place:
                raise SubmissionRejectedError(
                    f"job definition {definition}: has no secret {name} from {place}",
                    "add it to the definition's containerProperties.secrets, or let image= register one",
                )

    def _definitions(self, **asked: Any) -> list[dict[str, Any]]:
        return list(self.aws().call("batch", "describe_job_definitions", **asked)["jobDefinitions"])

    def _status(self, job: JobHandle, found: Mapping[str, Any]) -> JobStatus:
        status = status_of(found)
        if not status.is_over:
            return status
        return status_of(found, self._nodes(found, region_of(identity_of(job, "AwsBatch")["arn"])))

    def _nodes(self, found: Mapping[str, Any], region: str) -> list[dict[str, Any]]:
        """What Batch says of each node of a multi-node job; none of any other."""
        count = int((found.get("nodeProperties") or {}).get("numNodes", 0))
        return self._all_described([f"{found['jobId']}#{number}" for number in range(count)], region)

    def _looked_for(self, name: str, error: BackendDownError) -> JobHandle:
        """A job whose submission got no answer.

        Raises:
            BackendDownError: there is none, or nobody knows.
        """
        why: BackendError = error
        for look in range(_LOOKS):
            time.sleep(0.5 * look)
            try:
                found = self._listed(filters=[{"name": "JOB_NAME", "values": [name]}])
            except (BackendDownError, CredentialsExpiredError) as listing:
                why = listing
                break
            if found:
                return self._just_submitted(str(found[0]["jobId"]), name)
        raise BackendDownError(
            f"job {name}: may have been taken, and Batch does not show it ({error.what})",
            "look for it in Batch's console; watchstep attach takes it once it is seen",
        ) from why

    def _just_submitted(self, job_id: str, name: str) -> JobHandle:
        why: BackendError | None = None
        for look in range(_LOOKS):
            time.sleep(0.5 * look)
            try:
                if found := self._all_described([job_id], ""):
                    return _handle(found[0])
            except (BackendDownError, CredentialsExpiredError) as error:
                why = error
                break
        raise BackendDownError(
            f"job {job_id} ({name}) was taken, and Batch does not say when ({why.what if why else 'it knows none'})",
            "look for it in Batch's console; watchstep attach takes it once it is seen",
        ) from why

    def _described(self, job: JobHandle) -> dict[str, Any] | None:
        """What Batch says of this very job; None where it knows it no more."""
        identity = identity_of(job, "AwsBatch")
        found = self._all_described([job.id], region_of(identity["arn"]))
        if not found:
            self.aws().check_account(identity["arn"])
            return None
        return found[0] if dict(_handle(found[0]).identity) == identity else None

    def _all_described(self, ids: Sequence[str], region: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for first in range(0, len(ids), _MOST_DESCRIBED):
            some = list(ids[first : first + _MOST_DESCRIBED])
            try:
                found += self.aws().call("batch", "describe_jobs", region=region, jobs=some)["jobs"]
            except AwsCallError as error:
                raise BackendDownError(f"AWS Batch: {error}", "see its console") from error
        return found

    def _listed(self, **asked: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while True:
            try:
                page = self.aws().call("batch", "list_jobs", jobQueue=self.job_queue, **asked)
            except AwsCallError as error:
                raise BackendDownError(f"queue {self.job_queue}: {error}", "see Batch's console") from error
            found += page["jobSummaryList"]
            if not page.get("nextToken"):
                return found
            asked["nextToken"] = page["nextToken"]


def _handle(found: Mapping[str, Any]) -> JobHandle:
    identity = {"arn": str(found["jobArn"]), "created": milliseconds(found["createdAt"])}
    return JobHandle(NAME, str(found["jobId"]), identity)


def _secrets_in(definition: Mapping[str, Any]) -> list[dict[str, Any]]:
    ranges = (definition.get("nodeProperties") or {}).get("nodeRangeProperties", [])
    containers = [definition.get("containerProperties"), *(one.get("container") for one in ranges)]
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


def status_of(found: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]] = ()) -> JobStatus:
    """How a job is, by what DescribeJobs answers of it, and of its nodes where it has several."""
    held = str(found["status"])
    state = _STATES.get(held, "unknown")
    why = " ".join(str(found.get("statusReason") or _last_container(found).get("reason") or "").split())[:500]
    detail = f"{held}: {why}" if why else held
    if state != "ended":
        return JobStatus(state, None, detail)
    codes = [code for one in (found, *nodes) if (code := _exit_code(one)) is not None]
    code = next((code for code in codes if code), 0 if held == "SUCCEEDED" else None)
    if held == "FAILED" and (found.get("isTerminated") or found.get("isCancelled")):
        return JobStatus("cancelled", code, detail)
    return JobStatus("ended", code, detail)


def streams_of(found: Mapping[str, Any]) -> Iterator[str]:
    """The log streams of a job's attempts, oldest first."""
    containers = [one.get("container") or {} for one in found.get("attempts", [])]
    named = [str(one.get("logStreamName") or "") for one in (*containers, found.get("container") or {})]
    yield from dict.fromkeys(filter(None, named))


def _exit_code(found: Mapping[str, Any]) -> int | None:
    code = _last_container(found).get("exitCode")
    return None if code is None else of_container(int(code))


def _last_container(found: Mapping[str, Any]) -> Mapping[str, Any]:
    now: Mapping[str, Any] = found.get("container") or {}
    if "exitCode" in now or not found.get("attempts"):
        return now
    return found["attempts"][-1].get("container") or now
