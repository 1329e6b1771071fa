"""Ray backend, on Ray's Jobs API. See ``docs/launch/ray.md``."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from watchstep.errors import ConfigError
from watchstep_launch.backend import (
    LARGEST_PART,
    BackendDownError,
    BackendModel,
    JobHandle,
    JobNotFoundError,
    JobState,
    JobStatus,
    Launch,
    LogPart,
    SubmissionRejectedError,
)
from watchstep_launch.backends.ray.submission import (
    MARK,
    is_submission,
    last_message_line,
    never_started,
    request_of,
)

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

    from watchstep_launch.backends.ray.client import RayClient

NAME = "ray"

_STATES: dict[str, JobState] = {
    "PENDING": "queued",
    "RUNNING": "running",
    "SUCCEEDED": "ended",
    "FAILED": "ended",
    "STOPPED": "cancelled",
}

Address = Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$", max_length=500)]


class Ray(BackendModel):
    """Submits, queries and stops jobs at the dashboard's address. The command is the job's entrypoint.

    An identity is the time in milliseconds at which the cluster accepted the job. A submission id is reused only after its job
    was deleted, or on a new cluster. The Jobs API stops a job by its id alone: if the job were deleted and its id reused
    in the milliseconds between query and stop, the new job would be stopped.
    """

    kind: ClassVar[str] = NAME
    poll_seconds: ClassVar[float] = 2.0
    submission_seconds: ClassVar[float] = 0.0

    address: Address = Field(
        "http://127.0.0.1:8265", description="Address of the dashboard: http://head:8265."
    )
    cpus: float | None = Field(None, gt=0, description="CPUs reserved for the entrypoint.")
    gpus: float | None = Field(None, gt=0, description="GPUs reserved for the entrypoint.")
    memory: int | None = Field(None, gt=0, description="Bytes of memory reserved for the entrypoint.")
    resources: Mapping[str, float] = Field(
        default_factory=dict, description="Custom resources that the entrypoint requires."
    )
    runtime_env: Mapping[str, Any] = Field(
        default_factory=dict,
        description="Ray's runtime environment: pip, working_dir and so on. With a working_dir, the job runs there.",
    )
    stop_seconds: int = Field(30, ge=1, description="Seconds from SIGTERM to SIGKILL.")
    _connected: RayClient | None = PrivateAttr(None)
    _lock: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    def submit(self, launch: Launch) -> JobHandle:
        """Submit a job; its id is the launch's name. Ray shows a job's variables to everyone who can see the job.

        Raises:
            SubmissionRejectedError: Ray refused the job, or it failed before it started. A job that requires more than the cluster
                has is not an error: it waits.
        """
        resources = {
            "entrypoint_num_cpus": self.cpus,
            "entrypoint_num_gpus": self.gpus,
            "entrypoint_memory": self.memory,
            "entrypoint_resources": dict(self.resources) or None,
        }
        details = self._submit(request_of(launch, self.runtime_env, resources, self.stop_seconds))
        if never_started(details):
            raise _rejected(last_message_line(details.message or "") or details.status.value)
        return _handle(details)

    def status(self, job: JobHandle) -> JobStatus:
        """Return the job's status; "vanished" after a restart of the cluster or the job's deletion."""
        details = self._details(job.id)
        if details is None or _started(details) != _identity(job):
            return JobStatus("vanished", detail="the cluster does not know the job")
        state = _STATES.get(details.status.value, "unknown")
        message = next(iter((details.message or "").splitlines()), "")
        if never_started(details) and (reason := last_message_line(details.message or "")) not in message:
            message = f"{message} ({reason})"
        return JobStatus(
            state,
            _exit_code(details),
            f"{details.status.value}: {message}" if message else details.status.value,
        )

    def logs(self, job: JobHandle, cursor: str = "") -> LogPart:
        """Return the driver's output, after Ray's own lines. Ray returns the whole output for each request."""
        if self.status(job).state in ("queued", "vanished"):
            return LogPart(b"", cursor)
        data = self._call(lambda client: client.logs(job.id)).encode()
        start = int(cursor) if cursor.isdecimal() else 0
        part = data[start : start + LARGEST_PART]
        return LogPart(part, str(start + len(part)))

    def stop(self, job: JobHandle) -> JobStatus:
        """Send SIGTERM to all processes of the job; Ray sends SIGKILL after ``stop_seconds``."""
        before = self.status(job)
        if before.is_over:
            return before
        self._call(lambda client: client.stop(job.id))
        return self.status(job)

    def kill(self, job: JobHandle) -> JobStatus:
        """Same as `stop`: Ray kills by itself after its timeout. Repeating it does not extend the timeout."""
        return self.stop(job)

    def jobs(self) -> list[JobHandle]:
        """List the jobs of this cluster that Watchstep submitted, for any user."""
        return [
            _handle(details)
            for details in self._call(lambda client: client.all())
            if details.submission_id and MARK in (details.metadata or {}) and not details.status.is_terminal()
        ]

    def find(self, name: str) -> JobHandle | None:
        """Return the job of a launch; its name is the submission id. A restarted cluster has no earlier jobs."""
        details = self._details(name)
        return None if details is None else _handle(details)

    def reattach(self, id: str) -> JobHandle:  # noqa: A002 - the protocol's
        """Return the job with this submission id.

        Raises:
            JobNotFoundError: there is no such job, or it was not submitted to the Jobs API, which cannot stop it.
        """
        details = self._details(id)
        if details is None:
            raise JobNotFoundError(f"Ray has no job {id!r}", "list the ids: ray job list")
        if not details.submission_id:
            raise JobNotFoundError(
                f"job {id!r} is a driver that connected by itself, which Ray cannot stop",
                "start it with ray job submit",
            )
        return _handle(details)

    def settled(self, job: JobHandle) -> JobHandle:
        """Return the same job with its identity in canonical form.

        Raises:
            ConfigError: the identity is not a Ray identity.
        """
        return JobHandle(job.backend, job.id, {"started": _identity(job)}, job.details)

    def _submit(self, request: Mapping[str, Any]) -> JobDetails:
        """Submit a job. After a missing answer, or an error that may leave a job, the job is searched for.

        Raises:
            SubmissionRejectedError: Ray refused the job.
            BackendDownError: there is no job, or the answer cannot be determined.
        """
        client, job_id = self._client(), str(request["submission_id"])
        from watchstep_launch.backends.ray.client import RayRefusedError

        try:
            client.submit(**request)
        except (RayRefusedError, BackendDownError) as error:
            details = self._details(job_id)
            if details is not None and is_submission(details, request):
                return details
            if isinstance(error, RayRefusedError):
                raise _rejected(error.reason) from error
            raise
        details = self._details(job_id)
        if details is None:
            raise BackendDownError(
                f"Ray accepted job {job_id!r}, but no longer knows it", "check the cluster's dashboard"
            )
        return details

    def _client(self) -> RayClient:
        with self._lock:
            if self._connected is None:
                try:
                    from watchstep_launch.backends.ray.client import RayClient
                except ImportError as error:
                    raise ConfigError(
                        f"Ray is not installed ({error})", "pip install 'watchstep[ray]'"
                    ) from error
                self._connected = RayClient(self.address)
            return self._connected

    def _call(self, request: Any) -> Any:
        client = self._client()
        from watchstep_launch.backends.ray.client import RayRefusedError

        try:
            return request(client)
        except RayRefusedError as error:
            raise BackendDownError(
                f"Ray at {self.address}: {error.reason}", "see the logs of the dashboard and its agents"
            ) from error

    def _details(self, job_id: str) -> JobDetails | None:
        details: JobDetails | None = self._call(lambda client: client.details(job_id))
        return details


def _rejected(reason: str) -> SubmissionRejectedError:
    return SubmissionRejectedError(
        f"Ray rejected the job: {reason}", "correct the backend's options or the launch, and submit again"
    )


def _handle(details: JobDetails) -> JobHandle:
    return JobHandle(NAME, str(details.submission_id), {"started": _started(details)})


def _started(details: JobDetails) -> int:
    return int(details.start_time or 0)


def _identity(job: JobHandle) -> int:
    try:
        return int(job.identity["started"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"job {job.id!r}: the identity is not a Ray identity ({error!r})",
            "use started, in milliseconds, as Ray.reattach returns it",
        ) from error


def _exit_code(details: JobDetails) -> int | None:
    if details.status.value == "SUCCEEDED":
        return 0
    code = details.driver_exit_code
    return None if code is None or details.status.value != "FAILED" else int(code)
