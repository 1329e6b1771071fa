"""Jobs of a Kubernetes cluster: ``batch/v1`` Jobs, and Kubeflow's TrainJobs. See ``docs/launch/kubernetes.md``."""

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
from watchstep_launch.backends.kubernetes.manifest import OURS, KubernetesSettings
from watchstep_launch.backends.kubernetes.states import kill, read_logs, stop
from watchstep_launch.backends.kubernetes.submission import path_of, pods_of, submit, taken

if TYPE_CHECKING:
    from watchstep_launch.backends.kubernetes.client import KubernetesClient

NAME = "kubernetes"

_DELETED = JobStatus("vanished", detail="deleted, or its name is another's now")
_ELSEWHERE = JobStatus("unknown", detail="it is another cluster's than the one that is asked")

Object = dict[str, Any]


class Kubernetes(KubernetesSettings):
    """Runs the command in a pod of a Job, or in those of a TrainJob, and asks the API server how it is.

    An identity is the object's UID. Every change names the UID of what it is meant for, and the server refuses it for
    another object with the same name.

    It was tried on a stand-in that speaks the API as it is documented; see *What is unproven* in ``docs/launch/kubernetes.md``.
    """

    kind: ClassVar[str] = NAME
    poll_seconds: ClassVar[float] = 3.0
    submission_seconds: ClassVar[float] = 0.0

    _held: KubernetesClient | None = PrivateAttr(None)
    _making: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    def submit(self, launch: Launch) -> JobHandle:
        """Create the Job or TrainJob, and a Secret that it owns with the launch's secret variables.

        The launch's folder and log are not used: the program runs where ``working_directory`` or the image says, and the
        cluster keeps its output.

        Raises:
            SubmissionRejectedError: the cluster refused it.
        """
        with self._asking() as client:
            cluster = client.cluster()
            return _handle(self.runs_as, submit(client, launch, self), cluster)

    def status(self, job: JobHandle) -> JobStatus:
        """How the job is; "vanished" once it was deleted, "unknown" where the cluster asked is another than its own."""
        return self._look(job)[0]

    def logs(self, job: JobHandle, cursor: str = "") -> LogPart:
        """New lines of its pods, one pod's behind the other's. Pods that were deleted took theirs with them."""
        with self._asking() as client:
            resource, found = self._found(client, job)
            if resource is None or found is None:
                return LogPart(b"", cursor)
            return read_logs(client, pods_of(client, resource, found), cursor)

    def stop(self, job: JobHandle) -> JobStatus:
        """SIGTERM to the programs, SIGKILL after their pods' grace time; none is started again.

        A Job's pods stay, with output and exit codes; a TrainJob is suspended, which deletes them.
        """
        return self._end(job, stop)

    def kill(self, job: JobHandle) -> JobStatus:
        """Delete the pods, with a second's grace. The Job or TrainJob itself stays, to say that it was ended."""
        return self._end(job, kill)

    def jobs(self) -> list[JobHandle]:
        """Those in the namespace that launchers of Watchstep submitted, whoever ran them."""
        selector = ",".join(f"{name}={value}" for name, value in OURS.items())
        with self._asking() as client:
            cluster = client.cluster()
            kinds: list[tuple[Resource, list[Object]]] = [
                ("Job", client.read(path_of("Job", self.namespace), labelSelector=selector)["items"]),
                ("TrainJob", self._train_jobs(client, selector)),
            ]
        return [
            _handle(kind, found, cluster)
            for kind, held in kinds
            for found in held
            if not states.status_of(found, ()).is_over
        ]

    def find(self, name: str) -> JobHandle | None:
        """The Job or TrainJob of a launch; None where there is none.

        One that lacks its Secret, for its launcher ended before that was made, can never start: it is deleted.
        """
        with self._asking() as client:
            found = taken(client, name, self)
            return None if found is None else _handle(self.runs_as, found, client.cluster())

    def reattach(self, id: str) -> JobHandle:  # noqa: A002 - the protocol's
        """The Job with this name now, or with ``trainjob/NAME`` the TrainJob, in the backend's namespace.

        Raises:
            JobNotFoundError: there is none.
        """
        place = split_id(id)
        if place is None:
            raise JobNotFoundError(
                f"job {id!r}: no name of a Job", "give NAME, or trainjob/NAME, as kubectl get jobs shows it"
            )
        with self._asking() as client:
            found = client.find(path_of(place[0], self.namespace, place[1]))
            if found is None:
                raise JobNotFoundError(
                    f"job {id!r}: there is none in namespace {self.namespace}",
                    f"see kubectl get jobs -n {self.namespace} for their names",
                )
            return _handle(place[0], found, client.cluster())

    def settled(self, job: JobHandle) -> JobHandle:
        """The same, its identity spelt as this class spells it.

        Raises:
            ConfigError: the identity is not one of Kubernetes', or the id no job's.
        """
        if split_id(job.id) is None:
            raise ConfigError(f"job {job.id!r}: no name of a Job", "give NAME, or trainjob/NAME")
        identity = KubernetesIdentity.of(job)
        identity.check(job.id)
        return JobHandle(job.backend, job.id, identity.as_data(), job.details)

    def _look(self, job: JobHandle) -> tuple[JobStatus, Resource | None, Object, list[Object]]:
        with self._asking() as client:
            resource, found = self._found(client, job)
            if resource is None:
                return _ELSEWHERE, None, {}, []
            if found is None:
                return _DELETED, None, {}, []
            pods = pods_of(client, resource, found)
            return states.status_of(found, pods), resource, found, pods

    def _end(self, job: JobHandle, end: Any) -> JobStatus:
        status, resource, found, pods = self._look(job)
        if status.is_over or resource is None:
            return status
        with self._asking() as client:
            end(client, resource, found, pods)
        return self.status(job)

    def _found(self, client: KubernetesClient, job: JobHandle) -> tuple[Resource | None, Object | None]:
        """What runs this very job, and its object; no object where it is gone, nothing where it cannot be seen from here."""
        identity, place = KubernetesIdentity.of(job), split_id(job.id)
        if place is None:
            return "Job", None
        if identity.is_elsewhere(client.cluster()):
            return None, None
        found = client.find(path_of(place[0], self.namespace, place[1]))
        return place[0], found if found is not None and identity.means(found) else None

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
    def _asking(self) -> Iterator[KubernetesClient]:
        """The client; what is refused beside the errors that backends know is told as a server that cannot now."""
        client = self._client()
        try:
            yield client
        except KubernetesRefusedError as error:
            raise BackendDownError(
                f"Kubernetes: {error.said}", "see what it says, and the API server's log"
            ) from error

    def _client(self) -> KubernetesClient:
        with self._making:
            if self._held is None:
                try:
                    from watchstep_launch.backends.kubernetes.client import KubernetesClient
                except ImportError as error:
                    raise ConfigError(
                        f"Kubernetes' client is not installed ({error})",
                        "pip install 'watchstep[kubernetes]'",
                    ) from error
                self._held = KubernetesClient(self.context)
            return self._held


def _handle(resource: Resource, found: Object, cluster: str) -> JobHandle:
    identity = KubernetesIdentity.of_object(found, cluster)
    return JobHandle(NAME, join_id(resource, found["metadata"]["name"]), identity.as_data())
