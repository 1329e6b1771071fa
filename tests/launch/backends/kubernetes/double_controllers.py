"""What makes pods of Jobs, and Jobs of TrainJobs, in the stand-in for a cluster, as the documentation says that they do."""

from __future__ import annotations

import threading
import time
from datetime import datetime, timezone

from tests.launch.backends.kubernetes.double_kubelet import Kubelet
from tests.launch.backends.kubernetes.double_store import API_VERSIONS, Object, Store, now

_INDEX = "batch.kubernetes.io/job-completion-index"
_FAILURES = "batch.kubernetes.io/job-index-failure-count"
_JOB_SET = "jobset.sigs.k8s.io/jobset-name"
_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"


class Cluster:
    """A store, a node, and the controllers. Whoever touches it holds ``lock``.

    Attributes:
        backoff_seconds: before the first replacement of a failed pod; Kubernetes waits 10.
        stalled: while true, no controller does anything, as when theirs is being started anew.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.store = Store()
        self.kubelet = Kubelet(self.store, self.lock, self._pod_changed)
        self.backoff_seconds = 0.2
        self.stalled = False
        self._names = 0
        self._work: list[Object] = []
        self._working = False
        self._waited: set[tuple[str, str, int]] = set()

    def close(self) -> None:
        """End all that runs."""
        self.stalled = True
        self.kubelet.close()

    def see(self, found: Object) -> None:
        """Do what a new or changed object asks for, and what follows from that, one after the other."""
        self._work.append(found)
        if self._working:
            return
        self._working = True
        try:
            while self._work:
                self._see_one(self._work.pop(0))
        finally:
            self._working = False

    def _see_one(self, found: Object) -> None:
        kind = found["kind"]
        if self.stalled or not self.store.is_there(found):
            return
        if kind == "Job":
            self._see_job(found)
        elif kind == "TrainJob":
            self._see_train_job(found)
        elif kind == "Pod":
            self.kubelet.see(found)
        elif kind == "Secret":  # pods that waited for it are tried again
            for pod in self.store.all("Pod", found["metadata"]["namespace"]):
                self.kubelet.see(pod)

    def delete(self, found: Object, grace: int | None = None) -> None:
        """Delete an object, and what it owns."""
        if found["kind"] == "Pod":
            self.kubelet.delete(found, grace)
            return
        found["metadata"].setdefault("deletionTimestamp", now())
        self.store.touch(found)
        for one in self.store.remove(found):
            self.delete(one)

    def _pod_changed(self, pod: Object) -> None:
        for owner in pod["metadata"].get("ownerReferences") or ():
            if (job := self.store.find("Job", owner["uid"])) is not None:
                self.see(job)

    def _see_job(self, job: Object) -> None:
        spec, status = job["spec"], job.setdefault("status", {})
        if "selector" not in spec:
            uid = job["metadata"]["uid"]
            labels = {"batch.kubernetes.io/controller-uid": uid}
            spec["selector"] = {"matchLabels": labels}
            template = spec["template"].setdefault("metadata", {})
            template["labels"] = {
                **template.get("labels", {}),
                **labels,
                "batch.kubernetes.io/job-name": job["metadata"]["name"],
            }
        pods = self._pods(job)
        live = [pod for pod in pods if _phase(pod) not in ("Succeeded", "Failed")]
        if _holds(job, "Complete") or _holds(job, "Failed"):
            return
        failed = [pod for pod in pods if _phase(pod) == "Failed"]
        done = {_index(pod) for pod in pods if _phase(pod) == "Succeeded"}
        status.update(active=len(live), failed=len(failed), succeeded=len(done))
        if why := self._why_failed(job, failed):
            self._fail(job, live, why)
        elif spec.get("suspend"):
            status.pop("startTime", None)
            for pod in live:
                self._delete_once(pod)
            if not live:
                self._say(job, "Suspended", "JobSuspended")
        elif len(done) >= spec.get("completions", 1):
            self._say(job, "Complete", "CompletionsReached")
        else:
            self._run(job, pods, failed, done)
        self.store.touch(job)
        self._job_changed(job)

    def _run(self, job: Object, pods: list[Object], failed: list[Object], done: set[str]) -> None:
        status = job["status"]
        if "startTime" not in status:
            status["startTime"] = now()
            status.pop("conditions", None)
        for index in map(str, range(job["spec"].get("parallelism", 1))):
            mine = [pod for pod in pods if _index(pod) == index]
            if index in done or any(_phase(pod) not in ("Succeeded", "Failed") for pod in mine):
                continue
            times = sum(_index(pod) == index for pod in failed)
            start = (job["metadata"]["uid"], index, times)
            if times == 0 or start in self._waited:
                self._make_pod(job, index, times)
            else:
                self._later(job, self.backoff_seconds, start)

    def _later(self, found: Object, seconds: float, start: tuple[str, str, int] | None = None) -> None:
        def again() -> None:
            with self.lock:
                if start is not None:
                    self._waited.add(start)
                self.see(found)

        timer = threading.Timer(seconds, again)
        timer.daemon = True
        timer.start()

    def _make_pod(self, job: Object, index: str, times: int) -> None:
        template, metadata = job["spec"]["template"], job["metadata"]
        self._names += 1
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
        annotations = {_INDEX: index}
        if "backoffLimitPerIndex" in job["spec"]:
            annotations[_FAILURES] = str(times)
        made = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{metadata['name']}-{index}-{self._names:05d}",
                "labels": dict(template["metadata"]["labels"]),
                "annotations": annotations,
                "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
                "finalizers": ["batch.kubernetes.io/job-tracking"],
            },
            "spec": dict(template["spec"]),
        }
        job["status"]["active"] = job["status"].get("active", 0) + 1
        self.see(self.store.put(made, metadata["namespace"]))

    def _why_failed(self, job: Object, failed: list[Object]) -> str:
        spec = job["spec"]
        if _holds(job, "FailureTarget"):
            return str(next(one["reason"] for one in job["status"]["conditions"]))
        for rule in spec.get("podFailurePolicy", {}).get("rules", ()):
            if any(_code(pod) in rule["onExitCodes"]["values"] for pod in failed):
                return "PodFailurePolicy"
        if len(failed) > spec.get("backoffLimit", 6):
            return "BackoffLimitExceeded"
        deadline, started = spec.get("activeDeadlineSeconds"), job["status"].get("startTime")
        if deadline is not None and started is not None:
            since = datetime.strptime(started, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
            left = since.timestamp() + deadline - time.time()
            if left <= 0:
                return "DeadlineExceeded"
            self._later(job, left)
        return ""

    def _fail(self, job: Object, live: list[Object], why: str) -> None:
        """The condition comes once the pods are gone; until then there is another that says that it will."""
        if live:
            self._say(job, "FailureTarget", why)
            for pod in live:
                self._delete_once(pod)
        if not any(_phase(pod) not in ("Succeeded", "Failed") for pod in self._pods(job)):
            self._say(job, "Failed", why)

    def _delete_once(self, pod: Object) -> None:
        if "deletionTimestamp" not in pod["metadata"]:
            self.kubelet.delete(pod, None)

    def _say(self, found: Object, kind: str, why: str) -> None:
        held = found["status"].setdefault("conditions", [])
        if not _holds(found, kind):
            held.append(
                {
                    "type": kind,
                    "status": "True",
                    "reason": why,
                    "message": f"{kind}: {why}",
                    "lastTransitionTime": now(),
                }
            )

    def _pods(self, job: Object) -> list[Object]:
        uid = job["metadata"]["uid"]
        return [
            pod
            for pod in self.store.all("Pod", job["metadata"]["namespace"])
            if any(one["uid"] == uid for one in pod["metadata"].get("ownerReferences") or ())
        ]

    def _see_train_job(self, train: Object) -> None:
        train.setdefault("status", {})
        job = self._job_of(train)
        suspend = bool(train["spec"].get("suspend"))
        if job is None:
            job = self._make_job(train)
        elif bool(job["spec"].get("suspend")) != suspend:
            job["spec"]["suspend"] = suspend
            self.see(job)

    def _job_of(self, train: Object) -> Object | None:
        held = self.store.all("JobSet", train["metadata"]["namespace"])
        sets = [one for one in held if _owner(one) == train["metadata"]["uid"]]
        jobs = self.store.all("Job", train["metadata"]["namespace"])
        return next((one for one in jobs if sets and _owner(one) == sets[0]["metadata"]["uid"]), None)

    def _make_job(self, train: Object) -> Object:
        trainer, metadata = train["spec"]["trainer"], train["metadata"]
        namespace, labels = metadata["namespace"], {_JOB_SET: metadata["name"], _ATTEMPT: "0"}
        job_set = self.store.put(_owned("JobSet", metadata["name"], train, labels), namespace)
        job_set["spec"] = {}
        nodes = trainer.get("numNodes", 1)
        container = {
            "name": "node",
            "image": trainer.get("image", "runtime"),
            "command": trainer["command"],
            "env": [*trainer.get("env", ()), {"name": "PET_NNODES", "value": str(nodes)}],
        }
        made = _owned("Job", f"{metadata['name']}-node-0", job_set, labels)
        made["spec"] = {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 0,
            "suspend": bool(train["spec"].get("suspend")),
            "template": {
                "metadata": {"labels": dict(labels)},
                "spec": {"restartPolicy": "Never", "containers": [container]},
            },
        }
        job = self.store.put(made, namespace)
        self.see(job)
        return job

    def _job_changed(self, job: Object) -> None:
        job_set = self.store.find("JobSet", _owner(job))
        train = None if job_set is None else self.store.find("TrainJob", _owner(job_set))
        if train is None:
            return
        train.setdefault("status", {})
        for kind, why in (("Complete", "AllJobsCompleted"), ("Failed", "FailedJobs")):
            if _holds(job, kind):
                self._say(train, kind, why)
        if _holds(job, "Suspended"):
            self._say(train, "Suspended", "Suspended")
        self.store.touch(train)


def _owned(kind: str, name: str, owner: Object, labels: dict[str, str]) -> Object:
    metadata = owner["metadata"]
    reference = {
        "apiVersion": API_VERSIONS[owner["kind"]],
        "kind": owner["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
    }
    return {
        "apiVersion": API_VERSIONS[kind],
        "kind": kind,
        "metadata": {
            "name": name,
            "labels": dict(labels),
            "ownerReferences": [{**reference, "controller": True}],
        },
    }


def _owner(found: Object) -> str:
    return next((str(one["uid"]) for one in found["metadata"].get("ownerReferences") or ()), "")


def _phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def _index(pod: Object) -> str:
    return str(pod["metadata"].get("annotations", {}).get(_INDEX, "0"))


def _holds(found: Object, kind: str) -> bool:
    return any(one["type"] == kind for one in found.get("status", {}).get("conditions") or ())


def _code(pod: Object) -> int | None:
    state = pod["status"].get("containerStatuses", [{}])[0].get("state", {})
    return state["terminated"]["exitCode"] if "terminated" in state else None
