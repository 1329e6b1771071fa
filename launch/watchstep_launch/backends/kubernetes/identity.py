"""A Kubernetes job's identity, and the API's refusals."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from watchstep.errors import ConfigError
from watchstep_launch.backend import JobHandle


class KubernetesRefusedError(Exception):
    """The API server said no: ``code`` is HTTP's, ``reason`` Kubernetes' word for it, ``said`` its message."""

    def __init__(self, code: int, reason: str, said: str) -> None:
        super().__init__(said)
        self.code = code
        self.reason = reason
        self.said = said[:500] or reason or f"HTTP {code}"


Resource = Literal["Job", "TrainJob"]

TRAIN_JOB = "trainjob/"
"""What ids of TrainJobs begin with."""

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_UID = re.compile(r"[A-Za-z0-9-]{1,64}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


@dataclass(frozen=True)
class KubernetesIdentity:
    """What tells a job from every other with its name.

    Attributes:
        uid: the cluster's own for the object; no other has it, has had it, or will have it.
        created: when it was created, as the cluster writes it.
        cluster: UID of the namespace kube-system; empty where whoever asked may not see that.
    """

    uid: str
    created: str
    cluster: str

    @classmethod
    def of(cls, job: JobHandle) -> KubernetesIdentity:
        """The identity of a job.

        Raises:
            ConfigError: it is none of Kubernetes'.
        """
        try:
            held = {name: str(job.identity[name]) for name in ("uid", "created", "cluster")}
        except KeyError as error:
            raise ConfigError(
                f"job {job.id!r}: its identity is none of Kubernetes' ({error} is missing)",
                "bind it with uid, created and cluster, as Kubernetes.reattach gives them",
            ) from error
        return cls(**held)

    @classmethod
    def of_object(cls, found: dict[str, Any], cluster: str) -> KubernetesIdentity:
        """The identity of what the cluster shows now."""
        metadata = found["metadata"]
        return cls(str(metadata["uid"]), str(metadata["creationTimestamp"]), cluster)

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)

    def is_elsewhere(self, cluster: str) -> bool:
        """Whether it is known to be another cluster's job."""
        return bool(self.cluster and cluster and self.cluster != cluster)

    def means(self, found: dict[str, Any]) -> bool:
        """Whether it is this object."""
        metadata = found["metadata"]
        return bool((metadata["uid"], metadata["creationTimestamp"]) == (self.uid, self.created))

    def check(self, job_id: str) -> None:
        """See that it is spelt as the cluster spells it.

        Raises:
            ConfigError: it is not.
        """
        fits = _UID.fullmatch(self.uid) and _TIME.fullmatch(self.created)
        if not fits or (self.cluster and not _UID.fullmatch(self.cluster)):
            raise ConfigError(
                f"job {job_id!r}: its identity {self.as_data()} is none of Kubernetes'",
                "bind it as Kubernetes.reattach gives it",
            )


def split_id(job_id: str) -> tuple[Resource, str] | None:
    """What runs a job, and its name there; None where no job can have this id."""
    name = job_id.removeprefix(TRAIN_JOB)
    if not _NAME.fullmatch(name):
        return None
    return ("Job" if name == job_id else "TrainJob"), name


def join_id(resource: Resource, name: str) -> str:
    """The id of a job."""
    return name if resource == "Job" else f"{TRAIN_JOB}{name}"
