"""Jobs of a Ray cluster, by its Jobs API. See ``docs/launch/ray.md``."""

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
from watchstep_launch.backends.ray.submission import MARK, is_of, never_began, reason_in, request_of

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
    """Submits, asks and stops jobs at the dashboard's address. The command is the job's entrypoint.

    An identity is the time in milliseconds at which the cluster took the job: a submission id comes again only where
    its job was deleted, or on a new cluster. The Jobs API stops by the id alone: should the job be deleted and its id taken anew
    within the milliseconds between the look and the stop, that one would be stopped.
    """

    kind: ClassVar[str] = NAME
    poll_seconds: ClassVar[float] = 2.0
    submission_seconds: ClassVar[float] = 0.0

    address: Address = Field(
        "http://127.0.0.1:8265", description="Where the dashboard answers: http://head:8265."
    )
    cpus: float | None = Field(None, gt=0, description="CPUs that are kept for the entrypoint.")
    gpus: float | None = Field(None, gt=0, description="GPUs that are kept for the entrypoint.")
    memory: int | None = Field(None, gt=0, description="Bytes of memory that are kept for the entrypoint.")
    resources: Mapping[str, float] = Field(
        default_factory=dict, description="Resources of the cluster's own that the entrypoint needs."
    )
    runtime_env: Mapping[str, Any] = Field(
        default_factory=dict,
        description="Ray's runtime environment: pip, working_dir and the like. With a working_dir, the job runs there.",
    )
    stop_seconds: int = Field(
        30, ge=1, description="So long after SIGTERM Ray sends SIGKILL to what is left of the job."
    )
    _held: RayClient | None = PrivateAttr(None)
    _making: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    def submit(self, launch: Launch) -> JobHandle:
        """Submit a job; its id is the launch's name. Ray shows a job's variables to whoever may see the job.

        Raises:
            SubmissionRejectedError: Ray refused it, or gave it up at once. What needs more than the cluster has is no error: it
                waits.
        """
        kept = {
            "entrypoint_num_cpus": self.cpus,
            "entrypoint_num_gpus": self.gpus,
            "entrypoint_memory": self.memory,
            "entrypoint_resources": dict(self.resources) or None,
        }
        found = self._submitted(request_of(launch, self.runtime_env, kept, self.stop_seconds))
        if never_began(found):
            raise _rejected(reason_in(found.message or "") or found.status.value)
        return _handle(found)

    def status(self, job: JobHandle) -> JobStatus:
        """How the job is; "vanished" once the cluster has been started anew, or the job was deleted."""
        found = self._details(job.id)
        if found is None or _started(found) != _identity(job):
            return JobStatus("vanished", detail="this cluster does not know it")
        state = _STATES.get(found.status.value, "unknown")
        why = next(iter((found.message or "").splitlines()), "")
        if never_began(found) and (reason := reason_in(found.message or "")) not in why:
            why = f"{why} ({reason})"
        return JobStatus(
            state, _exit_code(found), f"{found.status.value}: {why}" if why else found.status.value
        )

    def logs(self, job: JobHandle, cursor: str = "") -> LogPart:
        """What the driver wrote, behind Ray's own lines. Ray gives all of it at each call."""
        if self.status(job).state in ("queued", "vanished"):
            return LogPart(b"", cursor)
        data = self._told(lambda client: client.logs(job.id)).encode()
        start = int(cursor) if cursor.isdecimal() else 0
        part = data[start : start + LARGEST_PART]
        return LogPart(part, str(start + len(part)))

    def stop(self, job: JobHandle) -> JobStatus:
        """SIGTERM to all processes of the job; Ray sends SIGKILL to those that are left after ``stop_seconds``."""
        before = self.status(job)
        if before.is_over:
            return before
        self._told(lambda client: client.stop(job.id))
        return self.status(job)

    def kill(self, job: JobHandle) -> JobStatus:
        """The same as `stop`: Ray has no other end, and kills by itself. Asking twice does not prolong it."""
        return self.stop(job)

    def jobs(self) -> list[JobHandle]:
        """Those that launchers of Watchstep submitted to this cluster, whoever ran them."""
        held = self._told(lambda client: client.all())
        return [
            _handle(one)
            for one in held
            if one.submission_id and MARK in (one.metadata or {}) and not one.status.is_terminal()
        ]

    def find(self, name: str) -> JobHandle | None:
        """The job of a launch: its name is the submission id. A cluster that was started anew knows none from before."""
        found = self._details(name)
        return None if found is None else _handle(found)

    def reattach(self, id: str) -> JobHandle:  # noqa: A002 - the protocol's
        """The job with this submission id now.

        Raises:
            JobNotFoundError: there is none, or it was not submitted to the Jobs API, which could not stop it.
        """
        found = self._details(id)
        if found is None:
            raise JobNotFoundError(f"job {id!r}: Ray knows none", "see ray job list for their ids")
        if not found.submission_id:
            raise JobNotFoundError(
                f"job {id!r}: a driver that connected by itself, which Ray cannot stop",
                "start it by ray job submit",
            )
        return _handle(found)

    def settled(self, job: JobHandle) -> JobHandle:
        """The same, its identity spelt as this class spells it.

        Raises:
            ConfigError: the identity is not one of Ray's.
        """
        return JobHandle(job.backend, job.id, {"started": _identity(job)}, job.details)

    def _submitted(self, asked: Mapping[str, Any]) -> JobDetails:
        """The job that came of a submission; looked for where there was no answer, or an error of which a job may be left.

        Raises:
            SubmissionRejectedError: none did.
            BackendDownError: none did, or nobody knows.
        """
        client, job_id = self._client(), str(asked["submission_id"])
        from watchstep_launch.backends.ray.client import RayRefusedError

        try:
            client.submit(**asked)
        except (RayRefusedError, BackendDownError) as error:
            found = self._details(job_id)
            if found is not None and is_of(found, asked):
                return found
            if isinstance(error, RayRefusedError):
                raise _rejected(error.reason) from error
            raise
        found = self._details(job_id)
        if found is None:
            raise BackendDownError(
                f"job {job_id!r} was taken, and Ray knows it no more", "see the cluster's dashboard"
            )
        return found

    def _client(self) -> RayClient:
        with self._making:
            if self._held is None:
                try:
                    from watchstep_launch.backends.ray.client import RayClient
                except ImportError as error:
                    raise ConfigError(
                        f"Ray is not installed ({error})", "pip install 'watchstep[ray]'"
                    ) from error
                self._held = RayClient(self.address)
            return self._held

    def _told(self, ask: Any) -> Any:
        client = self._client()
        from watchstep_launch.backends.ray.client import RayRefusedError

        try:
            return ask(client)
        except RayRefusedError as error:
            raise BackendDownError(
                f"Ray at {self.address}: {error.reason}", "see its dashboard's and its agents' logs"
            ) from error

    def _details(self, job_id: str) -> JobDetails | None:
        found: JobDetails | None = self._told(lambda client: client.details(job_id))
        return found


def _rejected(why: str) -> SubmissionRejectedError:
    return SubmissionRejectedError(
        f"Ray took no job: {why}", "correct the backend's options or the launch, and submit again"
    )


def _handle(found: JobDetails) -> JobHandle:
    return JobHandle(NAME, str(found.submission_id), {"started": _started(found)})


def _started(found: JobDetails) -> int:
    return int(found.start_time or 0)


def _identity(job: JobHandle) -> int:
    try:
        return int(job.identity["started"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"job {job.id!r}: its identity is none of Ray's ({error!r})",
            "bind it with started, in milliseconds, as Ray.reattach gives it",
        ) from error


def _exit_code(found: JobDetails) -> int | None:
    if found.status.value == "SUCCEEDED":
        return 0
    code = found.driver_exit_code
    return None if code is None or found.status.value != "FAILED" else int(code)
