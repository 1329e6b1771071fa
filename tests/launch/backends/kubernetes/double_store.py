"""Objects of the stand-in for a cluster, kept as an API server keeps them, as far as it is documented.

Versions, UIDs that never come again, 409 for a name that is taken and for a UID that is another's, fields that cannot be
changed, graceful deletion, finalizers, and dependents that go with their owner.
"""

from __future__ import annotations

import copy
import itertools
import uuid
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
from jsonschema import ValidationError
from kubeflow_trainer_api import models

Object = dict[str, Any]
Key = tuple[str, str, str]

VERSION = "1.33"
API_VERSIONS: Mapping[str, str] = {
    "Job": "batch/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "Namespace": "v1",
    "Pod": "v1",
    "Secret": "v1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}
_PLURALS = {kind: f"{kind.lower()}s" for kind in API_VERSIONS}
_MAY_CHANGE = {
    # https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/, and the server's validation
    "Job": {"activeDeadlineSeconds", "backoffLimit", "parallelism", "suspend", "ttlSecondsAfterFinished"},
    "Pod": {"activeDeadlineSeconds"},
    "TrainJob": {"suspend", "runtimePatches"},
    "JobSet": {"suspend"},
}


class StatusError(Exception):
    """An answer that is a ``Status`` of failure."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message


class Store:
    """Objects by kind, namespace and name. Not for several threads at once."""

    def __init__(self) -> None:
        self._objects: dict[Key, Object] = {}
        self._versions = itertools.count(1000)
        self.put(_object("Namespace", "", "kube-system"))
        self.put(_object("Namespace", "", "default"))

    def get(self, kind: str, namespace: str, name: str) -> Object:
        """An object, or 404."""
        found = self._objects.get((kind, namespace, name))
        if found is None:
            raise StatusError(404, "NotFound", f'{_PLURALS[kind]} "{name}" not found')
        return found

    def find(self, kind: str, uid: str) -> Object | None:
        """The object with this UID, if it is still there."""
        return next((one for one in self.all(kind) if one["metadata"]["uid"] == uid), None)

    def all(self, kind: str, namespace: str | None = None, selector: str = "") -> list[Object]:
        """Objects of a kind with all of these labels."""
        wanted = [part.partition("=")[::2] for part in selector.split(",") if part]
        return [
            one
            for (each, place, _), one in self._objects.items()
            if each == kind
            and namespace in (None, place)
            and all(one["metadata"].get("labels", {}).get(name) == value for name, value in wanted)
        ]

    def create(self, kind: str, namespace: str, body: Object) -> Object:
        """Take an object that a client sent."""
        if body.get("apiVersion") != API_VERSIONS[kind] or body.get("kind") != kind:
            raise StatusError(400, "BadRequest", f"{body.get('apiVersion')}/{body.get('kind')} is no {kind}")
        if ("Namespace", "", namespace) not in self._objects:
            raise StatusError(404, "NotFound", f'namespaces "{namespace}" not found')
        name = body["metadata"]["name"]
        if (kind, namespace, name) in self._objects:
            raise StatusError(409, "AlreadyExists", f'{_PLURALS[kind]} "{name}" already exists')
        if body["metadata"].get("namespace", namespace) != namespace:
            raise StatusError(400, "BadRequest", "the namespace of the object does not match the request's")
        check(kind, body)
        return self.put(body, namespace)

    def put(self, body: Object, namespace: str = "") -> Object:
        """Take an object that the cluster itself made."""
        made = copy.deepcopy(body)
        made.pop("status", None)
        metadata = made["metadata"]
        given = {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "resourceVersion": self._version()}
        metadata.update(given)
        if namespace:
            metadata["namespace"] = namespace
        self._objects[made["kind"], namespace, metadata["name"]] = made
        return made

    def patch(self, kind: str, namespace: str, name: str, change: Object) -> Object:
        """Merge a change (RFC 7386). Status has its own address, and is left alone here."""
        held = self.get(kind, namespace, name)
        change = {key: value for key, value in change.items() if key != "status"}
        changed: Object = merged(held, change)
        for field in ("uid", "name", "namespace", "creationTimestamp"):
            if changed["metadata"].get(field) != held["metadata"].get(field):
                raise StatusError(
                    422, "Invalid", f'{kind} "{name}" is invalid: metadata.{field}: field is immutable'
                )
        if changed["metadata"]["resourceVersion"] != held["metadata"]["resourceVersion"]:
            raise StatusError(
                409,
                "Conflict",
                f'{_PLURALS[kind]} "{name}": the object has been modified; apply your changes',
            )
        for field in {*changed.get("spec", {}), *held.get("spec", {})} - _MAY_CHANGE.get(kind, set()):
            if changed["spec"].get(field) != held["spec"].get(field):
                raise StatusError(
                    422, "Invalid", f'{kind} "{name}" is invalid: spec.{field}: field is immutable'
                )
        _check_deadline(kind, name, held, changed)
        check(kind, changed)
        held.update(changed)
        self.touch(held)
        return held

    def touch(self, held: Object) -> None:
        """Give a changed object its new version."""
        held["metadata"]["resourceVersion"] = self._version()

    def is_there(self, held: Object) -> bool:
        """Whether this very object is still kept."""
        metadata = held["metadata"]
        return self._objects.get((held["kind"], metadata["namespace"], metadata["name"])) is held

    def remove(self, held: Object) -> list[Object]:
        """Let go of an object that no finalizer holds; what it owned, and what has to be deleted for that."""
        metadata = held["metadata"]
        if metadata.get("finalizers") or not self.is_there(held):
            return []
        del self._objects[held["kind"], metadata["namespace"], metadata["name"]]
        return [
            one
            for one in self._objects.values()
            if any(owner["uid"] == metadata["uid"] for owner in one["metadata"].get("ownerReferences") or ())
        ]

    def _version(self) -> str:
        return str(next(self._versions))


def check(kind: str, body: Object) -> None:
    """Refuse what does not fit the schemas that Kubernetes and Kubeflow publish; fields that they do not have, too."""
    try:
        if kind == "TrainJob":
            read = models.TrainerV1alpha1TrainJob.from_dict(body)
            known = {} if read is None else read.to_dict()
            if stray := sorted(_paths(body) - _paths(known)):
                raise StatusError(400, "BadRequest", f'strict decoding error: unknown field "{stray[0]}"')
        elif kind != "JobSet":
            kubernetes_validate.validate(body, VERSION, strict=True)
    except ValidationError as error:
        where = ".".join(map(str, error.absolute_path))
        raise StatusError(422, "Invalid", f"{kind} is invalid: {where}: {error.message}") from error
    except ValueError as error:  # pydantic's
        raise StatusError(422, "Invalid", f"{kind} is invalid: {error}") from error


def merged(held: Any, change: Any) -> Any:
    """RFC 7386."""
    if not isinstance(change, dict):
        return copy.deepcopy(change)
    result = dict(held) if isinstance(held, dict) else {}
    for name, value in change.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def now() -> str:
    """Now, as ``metav1.Time`` is written."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _check_deadline(kind: str, name: str, held: Object, changed: Object) -> None:
    before = held.get("spec", {}).get("activeDeadlineSeconds")
    after = changed.get("spec", {}).get("activeDeadlineSeconds")
    if after != before and (after is None or after < 1 or (kind == "Pod" and before and after > before)):
        raise StatusError(
            422, "Invalid", f'{kind} "{name}" is invalid: spec.activeDeadlineSeconds: Invalid value: {after}'
        )


def _paths(value: Any, at: str = "") -> set[str]:
    if isinstance(value, dict):
        return {path for name, one in value.items() for path in {f"{at}{name}", *_paths(one, f"{at}{name}.")}}
    if isinstance(value, list):
        return {path for number, one in enumerate(value) for path in _paths(one, f"{at}{number}.")}
    return set()


def _object(kind: str, namespace: str, name: str) -> Object:
    return {"apiVersion": API_VERSIONS[kind], "kind": kind, "metadata": {"name": name}}
