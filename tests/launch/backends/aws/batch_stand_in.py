"""AWS Batch of `aws_stand_in`: a stand-in, not AWS."""

from __future__ import annotations

import fnmatch
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from botocore import xform_name

from tests.launch.backends.aws.aws_containers import Container
from tests.launch.backends.aws.aws_stand_in import Asked, StandIn

GROUP = "/aws/batch/job"


@dataclass
class _Job:
    request: dict[str, Any]
    arn: str
    created: int
    status: str = "RUNNABLE"
    reason: str = ""
    terminated: bool = False
    attempts: list[dict[str, Any]] = field(default_factory=list)
    nodes: dict[int, dict[str, Any]] = field(default_factory=dict)
    containers: list[Container] = field(default_factory=list)


class BatchStandIn:
    """Answers for AWS Batch.

    Attributes:
        holds: keep new jobs waiting for a place.
    """

    def __init__(self, stand_in: StandIn) -> None:
        self._in = stand_in
        self._jobs: dict[str, _Job] = {}
        self.holds = False
        stand_in.services["batch"] = self.answer

    def answer(self, asked: Asked) -> dict[str, Any]:
        """What is said to a call."""
        own = getattr(self, f"_{xform_name(asked.operation)}", None)
        said: dict[str, Any] = asked.forward() if own is None else own(asked)
        return said

    def pass_time(self, job_id: str) -> None:
        """Let the agent's stop timeout after SIGTERM pass."""
        if job_id in self._jobs and self._jobs[job_id].terminated:
            self._send(self._jobs[job_id], signal.SIGKILL)

    def close(self) -> None:
        """Leave no process behind."""
        with self._in.lock:
            left = [container for job in self._jobs.values() for container in job.containers]
            for job in self._jobs.values():
                job.terminated = True
        for container in left:
            container.send(signal.SIGKILL)
            container.join()

    def _submit_job(self, asked: Asked) -> dict[str, Any]:
        said = asked.forward()
        job = _Job(asked.body, said["jobArn"], time.time_ns() // 1_000_000)
        with self._in.lock:
            self._jobs[said["jobId"]] = job
            if not self.holds:
                self._start(said["jobId"], job)
        return said

    def _describe_jobs(self, asked: Asked) -> dict[str, Any]:
        found = []
        for job_id in asked.body["jobs"]:
            parent, _, node = job_id.partition("#")
            if parent not in self._jobs:
                continue
            (said,) = asked.forward(asked={"jobs": [parent]})["jobs"]
            with self._in.lock:
                job = self._jobs[parent]
                found.append({**said, **(self._node(job, job_id, int(node)) if node else self._told(job))})
        return {"jobs": found}

    def _list_jobs(self, asked: Asked) -> dict[str, Any]:
        names = {name for one in asked.body.get("filters", []) for name in one["values"]}
        with self._in.lock:
            listed = [
                {"jobId": job_id, "jobArn": job.arn, "jobName": job.request["jobName"]}
                for job_id, job in self._jobs.items()
                if (job.request["jobName"] in names if names else job.status == asked.body["jobStatus"])
            ]
        first = int(asked.body.get("nextToken", 0))
        page = {"jobSummaryList": listed[first : first + 2]}
        return {**page, "nextToken": str(first + 2)} if len(listed) > first + 2 else page

    def _terminate_job(self, asked: Asked) -> dict[str, Any]:
        with self._in.lock:
            job = self._jobs.get(asked.body["jobId"])
            if job is None or job.status in ("SUCCEEDED", "FAILED"):
                return {}
            job.terminated, job.reason = True, asked.body["reason"]
            if not job.containers:
                job.status = "FAILED"
        self._send(job, signal.SIGTERM)
        return {}

    def _told(self, job: _Job) -> dict[str, Any]:
        said: dict[str, Any] = {
            "status": job.status, "createdAt": job.created, "statusReason": job.reason, "attempts": list(job.attempts),
            "isTerminated": job.terminated, "isCancelled": False, "tags": job.request.get("tags", {}),
        }  # fmt: skip
        if "nodeOverrides" in job.request:
            properties = {"numNodes": self._count(job), "mainNode": 0, "nodeRangeProperties": []}
            return {**said, "nodeProperties": properties, "container": None, "attempts": []}
        return {**said, "container": job.nodes.get(0, {})}

    def _node(self, job: _Job, job_id: str, number: int) -> dict[str, Any]:
        return {"jobId": job_id, "status": job.status, "container": job.nodes.get(number, {}), "attempts": []}

    def _count(self, job: _Job) -> int:
        return int(job.request.get("nodeOverrides", {}).get("numNodes", 1))

    def _send(self, job: _Job, number: int) -> None:
        for container in job.containers:
            container.send(number)

    def _start(self, job_id: str, job: _Job) -> None:
        job.status, job.nodes = "RUNNING", {}
        job.containers = [self._container(job_id, job, number) for number in range(self._count(job))]

    def _container(self, job_id: str, job: _Job, number: int) -> Container:
        nodes = job.request.get("nodeOverrides", {}).get("nodePropertyOverrides")
        given = nodes[0]["containerOverrides"] if nodes else job.request["containerOverrides"]
        attempt = len(job.attempts) + 1
        variables = {"AWS_BATCH_JOB_ID": job_id, "AWS_BATCH_JOB_ATTEMPT": str(attempt)}
        if nodes:
            variables["AWS_BATCH_JOB_NUM_NODES"] = str(self._count(job))
            variables["AWS_BATCH_JOB_NODE_INDEX"] = str(number)
        if number:
            variables["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = "127.0.0.1"
        variables.update({one["name"]: one["value"] for one in given.get("environment", [])})
        stream = f"{job.request['jobName']}/default/{job_id}-{attempt}-{number}"
        job.nodes[number] = {"logStreamName": stream}

        def ended(code: int) -> None:
            with self._in.lock:
                job.nodes[number]["exitCode"] = code
                if sum("exitCode" in node for node in job.nodes.values()) == self._count(job):
                    self._end(job_id, job)

        return Container(given["command"], variables, self._in.workdir, (GROUP, stream), ended)

    def _end(self, job_id: str, job: _Job) -> None:
        job.attempts.append({"container": dict(job.nodes[0])})
        bad = next((node["exitCode"] for node in job.nodes.values() if node["exitCode"]), 0)
        job.containers = []
        if bad and not job.terminated and self._tries_again(job, bad):
            self._start(job_id, job)
            return
        job.status = "FAILED" if bad or job.terminated else "SUCCEEDED"
        job.reason = job.reason or ("Essential container in task exited" if bad else "")

    def _tries_again(self, job: _Job, code: int) -> bool:
        how = job.request.get("retryStrategy", {})
        if len(job.attempts) >= how.get("attempts", 1):
            return False
        for rule in how.get("evaluateOnExit", []):
            if fnmatch.fnmatch(str(code), rule.get("onExitCode", "*")):
                return bool(rule["action"] == "RETRY")
        return True
