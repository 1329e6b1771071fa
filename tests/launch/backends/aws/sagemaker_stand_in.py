"""SageMaker's training jobs of `aws_stand_in`: a stand-in, not AWS."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
from botocore import xform_name

from tests.launch.backends.aws.aws_containers import Container
from tests.launch.backends.aws.aws_stand_in import REGION, Asked, RefusalError, StandIn

GROUP = "/aws/sagemaker/TrainingJobs"


@dataclass
class _Job:
    request: dict[str, Any]
    arn: str
    created: float
    status: str = "InProgress"
    second: str = "Starting"
    reason: str = ""
    starts: int = 0
    passed: list[dict[str, Any]] = field(default_factory=list)
    containers: list[Container] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)


class SageMakerStandIn:
    """Answers for SageMaker.

    Attributes:
        holds: keep new jobs waiting for instances.
    """

    def __init__(self, stand_in: StandIn) -> None:
        self._in = stand_in
        self._jobs: dict[str, _Job] = {}
        self.holds = False
        stand_in.services["sagemaker"] = self.answer

    def answer(self, asked: Asked) -> dict[str, Any]:
        """What is said to a call."""
        said: dict[str, Any] = getattr(self, f"_{xform_name(asked.operation)}")(asked)
        return said

    def pass_time(self, name: str) -> None:
        """Let the 120 seconds after SIGTERM pass."""
        if name in self._jobs and self._jobs[name].status == "Stopping":
            self._send(self._jobs[name], signal.SIGKILL)

    def close(self) -> None:
        """Leave no process behind."""
        with self._in.lock:
            left = [container for job in self._jobs.values() for container in job.containers]
        for container in left:
            container.send(signal.SIGKILL)
            container.join()

    def begin_again(self, name: str) -> None:
        """End a job's containers as by a fault of SageMaker's, and start them once more."""
        job = self._jobs[name]
        with self._in.lock:
            containers, job.codes, job.containers = job.containers, [], []
            self._go_on(job, "Restarting")
            job.starts += 1
        for container in containers:
            container.send(signal.SIGKILL)
            container.join()
        self._start(job)

    def _create_training_job(self, asked: Asked) -> dict[str, Any]:
        name = asked.body["TrainingJobName"]
        if name in self._jobs:
            raise RefusalError(
                "ResourceInUse", "Training job names must be unique within an AWS account and region."
            )
        said = asked.forward()
        job = _Job(asked.body, said["TrainingJobArn"], round(time.time(), 3))
        with self._in.lock:
            self._jobs[name] = job
            self._go_on(job, "Starting")
        if not self.holds:
            self._start(job)
        return said

    def _describe_training_job(self, asked: Asked) -> dict[str, Any]:
        said = asked.forward()
        with self._in.lock:
            job = self._jobs[asked.body["TrainingJobName"]]
            own = {
                "TrainingJobStatus": job.status,
                "SecondaryStatus": job.second,
                "CreationTime": job.created,
            }
            own["SecondaryStatusTransitions"] = list(job.passed)
            if job.reason:
                own["FailureReason"] = job.reason
        return {**said, **own}

    def _list_training_jobs(self, asked: Asked) -> dict[str, Any]:
        with self._in.lock:
            listed = [
                {
                    "TrainingJobName": name, "TrainingJobArn": job.arn, "CreationTime": job.created,
                    "TrainingJobStatus": job.status,
                }
                for name, job in self._jobs.items()
                if job.status == asked.body["StatusEquals"]
            ]  # fmt: skip
        first = int(asked.body.get("NextToken", 0))
        page = {"TrainingJobSummaries": listed[first : first + 2]}
        return {**page, "NextToken": str(first + 2)} if len(listed) > first + 2 else page

    def _list_tags(self, asked: Asked) -> dict[str, Any]:
        return asked.forward()

    def _stop_training_job(self, asked: Asked) -> dict[str, Any]:
        with self._in.lock:
            job = self._jobs.get(asked.body["TrainingJobName"])
            if job is None:
                raise RefusalError("ValidationException", "Requested resource not found.")
            if job.status != "InProgress":
                raise RefusalError(
                    "ValidationException",
                    f"The request was rejected because the training job is in status {job.status}.",
                )
            job.status = "Stopping"
            self._go_on(job, "Stopping")
            if not job.containers:
                job.status = "Stopped"
                self._go_on(job, "Stopped")
        self._send(job, signal.SIGTERM)
        return {}

    def _send(self, job: _Job, number: int) -> None:
        for container in job.containers:
            container.send(number)

    def _go_on(self, job: _Job, second: str) -> None:
        job.second = second
        job.passed.append({"Status": second, "StartTime": time.time()})

    def _start(self, job: _Job) -> None:
        hosts = [f"algo-{number + 1}" for number in range(job.request["ResourceConfig"]["InstanceCount"])]
        prepared = [(host, self._prepared(job, host, hosts)) for host in hosts]
        with self._in.lock:
            if job.status != "InProgress":
                return
            self._go_on(job, "Training")
            starts = job.starts
            job.containers = [self._container(job, host, root, starts) for host, root in prepared]

    def _container(self, job: _Job, host: str, root: Path, starts: int) -> Container:
        name, how = job.request["TrainingJobName"], job.request["AlgorithmSpecification"]
        words = [*how["ContainerEntrypoint"], *how.get("ContainerArguments", [])]
        # The folder of a container is one of this machine's here.
        command = [
            f"{root}{word[len('/opt/ml') :]}" if word.startswith("/opt/ml/") else word for word in words
        ]
        variables = {
            "TRAINING_JOB_NAME": name,
            "TRAINING_JOB_ARN": job.arn,
            **job.request.get("Environment", {}),
        }
        stream = f"{name}/{host}-{time.time_ns() // 1_000_000}"

        def ended(code: int) -> None:
            with self._in.lock:
                if job.starts != starts:
                    return
                job.codes.append(code)
                if len(job.codes) == job.request["ResourceConfig"]["InstanceCount"]:
                    self._end(job)

        return Container(command, variables, self._in.workdir, (GROUP, stream), ended)

    def _end(self, job: _Job) -> None:
        bad = next((code for code in job.codes if code), 0)
        if job.status == "Stopping":
            job.status = "Stopped"
        elif bad:
            job.status, job.reason = "Failed", f"AlgorithmError: , exit code: {bad}"
        else:
            job.status = "Completed"
        self._go_on(job, job.status)

    def _prepared(self, job: _Job, host: str, hosts: list[str]) -> Path:
        """``/opt/ml`` of one host, with what the channels bring."""
        root = Path(self._in.folder, job.request["TrainingJobName"], host)
        config = root / "input" / "config"
        config.mkdir(parents=True, exist_ok=True)
        (config / "resourceconfig.json").write_text(json.dumps({"current_host": host, "hosts": hosts}))
        (config / "hyperparameters.json").write_text(json.dumps(job.request.get("HyperParameters", {})))
        s3 = boto3.client("s3", region_name=REGION)
        for channel in job.request.get("InputDataConfig", []):
            url = channel["DataSource"].get("S3DataSource", {}).get("S3Uri", "")
            if not url:  # a file system
                continue
            bucket, _, prefix = url.removeprefix("s3://").partition("/")
            for held in s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", []):
                place = root / "input" / "data" / channel["ChannelName"] / held["Key"].removeprefix(prefix)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(s3.get_object(Bucket=bucket, Key=held["Key"])["Body"].read())
        return root
