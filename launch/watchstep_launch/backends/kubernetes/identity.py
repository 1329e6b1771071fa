"""Identity of a Kubernetes job, and the API's refusals."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from watchstep.errors import ConfigError
from watchstep_launch.backend import JobHandle


class KubernetesRefusedError(Exception):
    """The API server refused a request: ``code`` is the HTTP status, ``reason`` Kubernetes' reason, ``message`` its message."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message[:500] or reason or f"HTTP {code}"


Resource = Literal["Job", "TrainJob"]

TRAIN_JOB = "trainjob/"
"""Prefix of the ids of TrainJobs."""

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_UID = re.compile(r"[A-Za-z0-9-]{1,64}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


@dataclass(frozen=True)
class KubernetesIdentity:
    """Distinguishes a job from every other job with its name.

    Attributes:
        uid: the cluster's UID of the object, which is never reused.
        created: time of creation, as the cluster writes it.
        cluster: UID of the namespace kube-system; empty if it was not readable.
    """

    uid: str
    created: str
    cluster: str

    @classmethod
    def of(cls, job: JobHandle) -> KubernetesIdentity:
        """Return the identity of a job.

        Raises:
            ConfigError: the identity is not a Kubernetes identity.
        """
        try:
            fields = {name: str(job.identity[name]) for name in ("uid", "created", "cluster")}
        except KeyError as error:
            raise ConfigError(
                f"job {job.id!r}: the identity is not a Kubernetes identity ({error} is missing)",
                "use uid, created and cluster, as Kubernetes.reattach returns them",
            ) from error
        return cls(**fields)

    @classmethod
    def of_object(cls, object_: dict[str, Any], cluster: str) -> KubernetesIdentity:
        """Return the identity of an object."""
        metadata = object_["metadata"]
        return cls(str(metadata["uid"]), str(metadata["creationTimestamp"]), cluster)

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)

    def is_elsewhere(self, cluster: str) -> bool:
        """Whether the job is known to belong to another cluster."""
        return bool(self.cluster and cluster and self.cluster != cluster)

    def means(self, object_: dict[str, Any]) -> bool:
        """Whether an object is this job."""
        metadata = object_["metadata"]
        return bool((metadata["uid"], metadata["creationTimestamp"]) == (self.uid, self.created))

    def check(self, job_id: str) -> None:
        """Check the identity's format.

        Raises:
            ConfigError: the format is invalid.
        """
        is_valid = _UID.fullmatch(self.uid) and _TIME.fullmatch(self.created)
        if not is_valid or (self.cluster and not _UID.fullmatch(self.cluster)):
            raise ConfigError(
                f"job {job_id!r}: {self.as_data()} is not a Kubernetes identity",
                "use the identity that Kubernetes.reattach returns",
            )


def split_id(job_id: str) -> tuple[Resource, str] | None:
    """Return the kind and the name in an id; None if the id is invalid."""
    name = job_id.removeprefix(TRAIN_JOB)
    if not _NAME.fullmatch(name):
        return None
    return ("Job" if name == job_id else "TrainJob"), name


def join_id(resource: Resource, name: str) -> str:
    """Return the id of a job."""
    return name if resource == "Job" else f"{TRAIN_JOB}{name}"
