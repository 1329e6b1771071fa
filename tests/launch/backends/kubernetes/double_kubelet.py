"""Pods of the stand-in for a cluster: each runs its container's command as a process of this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from tests.launch.backends.kubernetes.double_store import Object, StatusError, Store

_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
_REFERENCE = re.compile(r"\$(\$|\(([-._a-zA-Z][-._a-zA-Z0-9]*)\))")


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    lines: list[tuple[int, bytes]] = field(default_factory=list)
    why: str = ""
    over: bool = False
    killing: threading.Timer | None = None


class Kubelet:
    """Starts and ends the pods of one node.

    Attributes:
        images: that can be pulled; any where it is None.
        full: whether the node has no room.
    """

    def __init__(self, store: Store, lock: threading.RLock, changed: Callable[[Object], None]) -> None:
        self.images: set[str] | None = None
        self.full = False
        self._store = store
        self._lock = lock
        self._changed = changed
        self._running: dict[str, _Running] = {}
        self._threads: list[threading.Thread] = []

    def see(self, pod: Object) -> None:
        """Do what a new or changed pod asks for."""
        uid = pod["metadata"]["uid"]
        if uid in self._running:
            self._keep_deadline(pod)
        elif "phase" not in pod.get("status", {}) or _waits(pod):
            self._start(pod)

    def delete(self, pod: Object, grace: int | None) -> None:
        """Ask a pod's program to end, and let the pod go once it has."""
        metadata = pod["metadata"]
        held = self._running.get(metadata["uid"])
        seconds = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace
        first = "deletionTimestamp" not in metadata
        metadata.setdefault("deletionTimestamp", _stamp(time.time_ns()))
        metadata["deletionGracePeriodSeconds"] = seconds
        self._store.touch(pod)
        if held is None or held.over:
            self._gone(pod)
        elif first or grace is not None:
            self._end(held, seconds)

    def log(self, pod: Object, since: str, *, stamped: bool) -> bytes:
        """What a pod wrote, from a second on."""
        held = self._running.get(pod["metadata"]["uid"])
        if held is None:
            name = pod["metadata"]["name"]
            raise StatusError(
                400, "BadRequest", f'container "main" in pod "{name}" is waiting to start: ContainerCreating'
            )
        second = since[:19]  # the API cuts fractions off
        return b"".join(
            (f"{_stamp(at)} ".encode() if stamped else b"") + line
            for at, line in list(held.lines)
            if _stamp(at)[:19] >= second
        )

    def close(self) -> None:
        """End all programs."""
        with self._lock:
            for held in self._running.values():
                self._end(held, 0)
        for thread in self._threads:
            thread.join()

    def _start(self, pod: Object) -> None:
        container = pod["spec"]["containers"][0]
        if self.full:
            said = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
            unschedulable = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": said,
            }
            self._set(pod, {"phase": "Pending", "conditions": [unschedulable]})
            return
        pod["spec"]["nodeName"] = "node-1"
        if self.images is not None and container["image"] not in self.images:
            self._wait(pod, "ImagePullBackOff", f'Back-off pulling image "{container["image"]}"')
            return
        try:
            variables = self._variables(pod, container)
        except StatusError as error:
            self._wait(pod, "CreateContainerConfigError", error.message)
            return
        words = [expanded(word, variables) for word in container.get("command", ())]
        words += [expanded(word, variables) for word in container.get("args", ())]
        try:
            process = subprocess.Popen(
                words,
                env=variables,
                cwd=container.get("workingDir", "/"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._set(pod, {"phase": "Failed", **_terminated(container, 128, "StartError", f"exec: {error}")})
            return
        held = self._running[pod["metadata"]["uid"]] = _Running(process)
        started = {"running": {"startedAt": _stamp(time.time_ns())}}
        self._set(
            pod, {"phase": "Running", "startTime": _stamp(time.time_ns()), **_statuses(container, started)}
        )
        thread = threading.Thread(target=self._follow, args=(pod, held), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _variables(self, pod: Object, container: Object) -> dict[str, str]:
        """The environment of an image with this Python, and the container's own."""
        held = {"PATH": _PATH, "HOME": "/root"}
        for one in container.get("env") or ():
            if "valueFrom" not in one:
                held[one["name"]] = expanded(one.get("value", ""), held)
                continue
            if reference := one["valueFrom"].get("secretKeyRef"):
                secret = self._store.get("Secret", pod["metadata"]["namespace"], reference["name"])
                held[one["name"]] = secret["stringData"][reference["key"]]
            else:
                held[one["name"]] = _field(pod, one["valueFrom"]["fieldRef"]["fieldPath"])
        return held

    def _follow(self, pod: Object, held: _Running) -> None:
        assert held.process.stdout is not None
        reading = threading.Thread(target=self._read, args=(held,), daemon=True)
        reading.start()
        os.waitid(os.P_PID, held.process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            held.over = True
            if held.killing is not None:
                held.killing.cancel()
        os.killpg(held.process.pid, signal.SIGKILL)  # what its first process leaves behind ends with it
        reading.join()
        code = held.process.wait()
        held.process.stdout.close()
        container = pod["spec"]["containers"][0]
        with self._lock:
            code = 128 - code if code < 0 else code
            phase = "Failed" if code or held.why else "Succeeded"
            reason = {"reason": held.why} if held.why else {}
            self._set(
                pod,
                {
                    "phase": phase,
                    **reason,
                    **_terminated(container, code, "Error" if code else "Completed", ""),
                },
            )
            if "deletionTimestamp" in pod["metadata"]:
                self._gone(pod)

    def _read(self, held: _Running) -> None:
        assert held.process.stdout is not None
        for line in held.process.stdout:
            held.lines.append((time.time_ns(), line))

    def _keep_deadline(self, pod: Object) -> None:
        held = self._running[pod["metadata"]["uid"]]
        if pod["spec"].get("activeDeadlineSeconds") and not held.why and not held.over:
            held.why = "DeadlineExceeded"
            self._end(held, pod["spec"].get("terminationGracePeriodSeconds", 30))

    def _end(self, held: _Running, grace: float) -> None:
        if held.over:
            return
        os.kill(held.process.pid, signal.SIGTERM if grace else signal.SIGKILL)
        if held.killing is not None:
            held.killing.cancel()
        held.killing = threading.Timer(grace, self._kill, (held,))
        held.killing.daemon = True
        held.killing.start()

    def _kill(self, held: _Running) -> None:
        with self._lock:
            if not held.over:
                os.killpg(held.process.pid, signal.SIGKILL)

    def _wait(self, pod: Object, reason: str, message: str) -> None:
        waiting = {"waiting": {"reason": reason, "message": message}}
        self._set(pod, {"phase": "Pending", **_statuses(pod["spec"]["containers"][0], waiting)})

    def _set(self, pod: Object, status: Object) -> None:
        with self._lock:
            pod["status"] = {**pod.get("status", {}), **status}
            if self._store.is_there(pod):
                self._store.touch(pod)
                self._changed(pod)

    def _gone(self, pod: Object) -> None:
        # The Job's controller has counted it.
        pod["metadata"].pop("finalizers", None)
        self._running.pop(pod["metadata"]["uid"], None)  # the kubelet removes its output
        self._store.remove(pod)
        self._changed(pod)


def _waits(pod: Object) -> bool:
    return bool(pod["status"]["phase"] == "Pending")


def _statuses(container: Object, state: Object) -> Object:
    held = {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": "running" in state,
    }
    return {"containerStatuses": [{**held, "restartCount": 0, "state": state}]}


def _terminated(container: Object, code: int, reason: str, message: str) -> Object:
    return _statuses(container, {"terminated": {"exitCode": code, "reason": reason, "message": message}})


def expanded(text: str, variables: dict[str, str]) -> str:
    """``$(NAME)`` of what is known, and ``$$`` as one ``$``, as the documentation of ``command`` has it."""

    def replaced(found: re.Match[str]) -> str:
        return "$" if found[1] == "$" else variables.get(found[2], found[0])

    return _REFERENCE.sub(replaced, text)


def _field(pod: Object, path: str) -> str:
    found = re.fullmatch(r"metadata\.(annotations|labels)\['([^']+)'\]", path)
    if found is None:
        raise StatusError(422, "Invalid", f"fieldPath {path} is not supported")
    return str(pod["metadata"].get(found[1], {}).get(found[2], ""))


def _stamp(nanoseconds: int) -> str:
    whole, fraction = divmod(nanoseconds, 10**9)
    return f"{datetime.fromtimestamp(whole, timezone.utc):%Y-%m-%dT%H:%M:%S}.{fraction:09d}Z"
