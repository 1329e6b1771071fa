"""Kubernetes backend: ``batch/v1`` Jobs, and Kubeflow's TrainJobs. See ``docs/launch/kubernetes.md``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PrivateAttr

from watchstep.errors import ConfigError
from watchstep_launch.backend import (
    BackendDownError,
    CredentialsExpiredError,
    JobHandle,
    JobNotFoundError,
    JobStatus,
    Launch,
    LogPart,
)
from watchstep_launch.backends.kubernetes import states
from watchstep_launch.backends.kubernetes.identity import (
    KubernetesIdentity,
    KubernetesRefusedError,
    Resource,
    join_id,
    split_id,
)
from watchstep_launch.backends.kubernetes.states import kill, read_logs, stop
from watchstep_launch.backends.kubernetes.submission import (
    LABELS,
    KubernetesSettings,
    path_of,
    pods_of,
    submit,
    submitted_job,
)

if TYPE_CHECKING:
    from watchstep_launch.backends.kubernetes.client import KubernetesClient

NAME = "kubernetes"

_DELETED = JobStatus("vanished", detail="deleted, or replaced by another object with its name")
_ELSEWHERE = JobStatus("unknown", detail="the job belongs to another cluster")

Object = dict[str, Any]


class Kubernetes(KubernetesSettings):
    """Runs the command in a pod of a Job, or in the pods of a TrainJob, and queries the API server.

    An identity is the object's UID. Every change includes the object's UID, and the server refuses it for
    another object with the same name.

    The backend is tested with a stand-in that implements the documented API; see *Unverified behavior* in ``docs/launch/kubernetes.md``.
    """

    kind: ClassVar[str] = NAME
    poll_seconds: ClassVar[float] = 3.0
    submission_seconds: ClassVar[float] = 0.0

    _connected: KubernetesClient | None = PrivateAttr(None)
    _lock: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    def submit(self, launch: Launch) -> JobHandle:
        """Create the Job or TrainJob, and a Secret that it owns for the launch's secret variables.

        The launch's folder and log are not used: the program runs in ``working_directory`` or the image's own folder, and the
        cluster keeps its output.

        Raises:
            SubmissionRejectedError: the cluster refused the job.
        """
        with self._requests() as client:
            cluster = client.cluster()
            return _handle(self.runs_as, submit(client, launch, self), cluster)

    def status(self, job: JobHandle) -> JobStatus:
        """Return the job's status: "vanished" once it was deleted, "unknown" if the backend queries another cluster."""
        return self._query(job)[0]

    def logs(self, job: JobHandle, cursor: str = "") -> LogPart:
        """Return new lines of its pods, one pod after another. The output of deleted pods is lost."""
        with self._requests() as client:
            resource, object_ = self._find_object(client, job)
            if resource is None or object_ is None:
                return LogPart(b"", cursor)
            return read_logs(client, pods_of(client, resource, object_), cursor)

    def stop(self, job: JobHandle) -> JobStatus:
        """Send SIGTERM to the programs, and SIGKILL after their pods' grace period. None is restarted.

        A Job's pods remain, with output and exit codes; a TrainJob is suspended, which deletes its pods.
        """
        return self._end(job, stop)

    def kill(self, job: JobHandle) -> JobStatus:
        """Delete the pods with a grace period of one second. The Job or TrainJob itself remains, as a record of the end."""
        return self._end(job, kill)

    def jobs(self) -> list[JobHandle]:
        """List the namespace's jobs that Watchstep submitted, for any user."""
        selector = ",".join(f"{name}={value}" for name, value in LABELS.items())
        with self._requests() as client:
            cluster = client.cluster()
            kinds: list[tuple[Resource, list[Object]]] = [
                ("Job", client.read(path_of("Job", self.namespace), labelSelector=selector)["items"]),
                ("TrainJob", self._train_jobs(client, selector)),
            ]
        return [
            _handle(kind, job, cluster)
            for kind, jobs in kinds
            for job in jobs
            if not states.status_of(job, ()).is_over
        ]

    def find(self, name: str) -> JobHandle | None:
        """Return the Job or TrainJob of a launch; None if there is none.

        A job without its Secret, because its launcher ended too early, can never start: it is deleted.
        """
        with self._requests() as client:
            job = submitted_job(client, name, self)
            return None if job is None else _handle(self.runs_as, job, client.cluster())

    def reattach(self, id: str) -> JobHandle:  # noqa: A002 - the protocol's
        """Return the Job with this name, or with ``trainjob/NAME`` the TrainJob, in the backend's namespace.

        Raises:
            JobNotFoundError: there is no such job.
        """
        resource_and_name = split_id(id)
        if resource_and_name is None:
            raise JobNotFoundError(
                f"{id!r} is not the name of a Kubernetes Job",
                "use NAME, or trainjob/NAME, as kubectl get jobs shows it",
            )
        resource, name = resource_and_name
        with self._requests() as client:
            job = client.find(path_of(resource, self.namespace, name))
            if job is None:
                raise JobNotFoundError(
                    f"namespace {self.namespace} has no job {id!r}",
                    f"list the jobs: kubectl get jobs -n {self.namespace}",
                )
            return _handle(resource, job, client.cluster())

    def settled(self, job: JobHandle) -> JobHandle:
        """Return the same job with its identity in canonical form.

        Raises:
            ConfigError: the identity is not a Kubernetes identity, or the id is not a valid name.
        """
        if split_id(job.id) is None:
            raise ConfigError(f"{job.id!r} is not the name of a Kubernetes Job", "use NAME, or trainjob/NAME")
        identity = KubernetesIdentity.of(job)
        identity.check(job.id)
        return JobHandle(job.backend, job.id, identity.as_data(), job.details)

    def _query(self, job: JobHandle) -> tuple[JobStatus, Resource | None, Object, list[Object]]:
        with self._requests() as client:
            resource, object_ = self._find_object(client, job)
            if resource is None:
                return _ELSEWHERE, None, {}, []
            if object_ is None:
                return _DELETED, None, {}, []
            pods = pods_of(client, resource, object_)
            return states.status_of(object_, pods), resource, object_, pods

    def _end(self, job: JobHandle, end: Any) -> JobStatus:
        status, resource, object_, pods = self._query(job)
        if status.is_over or resource is None:
            return status
        with self._requests() as client:
            end(client, resource, object_, pods)
        return self.status(job)

    def _find_object(self, client: KubernetesClient, job: JobHandle) -> tuple[Resource | None, Object | None]:
        """Return the kind and the object of exactly this job: no object if it is gone, no kind if it belongs to another cluster."""
        identity, resource_and_name = KubernetesIdentity.of(job), split_id(job.id)
        if resource_and_name is None:
            return "Job", None
        if identity.is_elsewhere(client.cluster()):
            return None, None
        resource, name = resource_and_name
        object_ = client.find(path_of(resource, self.namespace, name))
        return resource, object_ if object_ is not None and identity.means(object_) else None

    def _train_jobs(self, client: KubernetesClient, selector: str) -> list[Object]:
        try:
            return list(client.read(path_of("TrainJob", self.namespace), labelSelector=selector)["items"])
        except KubernetesRefusedError as error:
            if error.code != 404:  # Kubeflow is not installed
                raise
        except CredentialsExpiredError:
            if self.runs_as == "TrainJob":
                raise
        return []

    @contextmanager
    def _requests(self) -> Iterator[KubernetesClient]:
        """Yield the client. Refusals other than the errors that backends know are raised as an unavailable server."""
        client = self._client()
        try:
            yield client
        except KubernetesRefusedError as error:
            raise BackendDownError(
                f"Kubernetes: {error.message}", "see this message, and the API server's log"
            ) from error

    def _client(self) -> KubernetesClient:
        with self._lock:
            if self._connected is None:
                try:
                    from watchstep_launch.backends.kubernetes.client import KubernetesClient
                except ImportError as error:
                    raise ConfigError(
                        f"the Kubernetes client is not installed ({error})",
                        "pip install 'watchstep[kubernetes]'",
                    ) from error
                self._connected = KubernetesClient(self.context)
            return self._connected


def _handle(resource: Resource, object_: Object, cluster: str) -> JobHandle:
    identity = KubernetesIdentity.of_object(object_, cluster)
    return JobHandle(NAME, join_id(resource, object_["metadata"]["name"]), identity.as_data())
