"""Production's parts as processes, and a supervisor that starts again what died."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.crash import clock
from benchmarks.crash.servers import free_port
from tests.infra.compose import command_of

_PATIENCE = 120.0
_BACKOFF = 0.3  # a supervisor does not start at once again what may end at once again


class Nursery:
    """One start program and the processes that it forks: those that run, by name."""

    def __init__(self, folder: Path, harness: str, environment: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as errors:
            self._program = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.crash.nursery", str(folder), harness],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environment),
                cwd=Path(__file__).parents[2],
                start_new_session=True,  # it ends with its input, and takes its children along
            )
        self.running: dict[str, int] = {}
        self.said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, name="nursery", daemon=True)
        self._listener.start()

    def start(self, name: str, command: list[str], folder: Path) -> None:
        """Have a process forked; it is running once `said` tells."""
        assert self._program.stdin is not None
        order = {"name": name, "command": command, "folder": str(folder)}
        self._program.stdin.write(json.dumps(order).encode() + b"\n")
        self._program.stdin.flush()

    def close(self) -> None:
        """End all of them."""
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._program.wait(_PATIENCE)
        self._listener.join(_PATIENCE)

    def _listen(self) -> None:
        assert self._program.stdout is not None
        with self._program.stdout as said:
            for line in said:
                self.said.put(json.loads(line))


class Parts:
    """api, two workers of which one has a clock that jumps, and the scheduler; restarted whenever they end.

    Attributes:
        url: of the API.
        deaths: how often each part ended.
    """

    def __init__(self, folder: Path, harness: str, environment: dict[str, str], processes: int) -> None:
        self._folder = folder
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.deaths: Counter[str] = Counter()
        held = {**environment, "WATCHSTEP_PUBLIC_URL": self.url}
        steady = Nursery(folder, harness, held, folder / "nursery.log")
        jumping = Nursery(
            folder, harness, {**held, **clock.environment(folder)}, folder / "jumping-nursery.log"
        )
        self._nurseries = (steady, jumping)
        here = ["--host", "127.0.0.1", "--port", str(port)]  # the last word of each counts
        few = ["--processes", str(processes)]
        self._parts: dict[str, tuple[Nursery, list[str]]] = {
            "api": (steady, [*command_of("api"), *here]),
            "worker": (steady, [*command_of("worker"), *few]),
            "jumping-worker": (jumping, [*command_of("worker"), *few]),
            "scheduler": (steady, command_of("scheduler")),
        }
        self._due: dict[str, float] = {}
        self._ending = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)

    def start(self) -> None:
        """Start all."""
        for name in self._parts:
            self._start(name)
        self._supervisor.start()

    def close(self) -> None:
        """End all."""
        self._ending.set()
        self._supervisor.join()
        for name in self._parts:
            self.kill(name, whole=True)
        for nursery in self._nurseries:
            nursery.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parts."""
        return tuple(self._parts)

    def pid(self, name: str) -> int | None:
        """The part's process; None between its end and its start."""
        return self._parts[name][0].running.get(name)

    def children(self, name: str) -> list[psutil.Process]:
        """The processes of a worker's pool."""
        pid = self.pid(name)
        try:
            return [] if pid is None else psutil.Process(pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill(self, name: str, *, whole: bool) -> bool:
        """SIGKILL to a part, or to it and the processes of its pool; False where it does not run."""
        pid = self.pid(name)
        found = self.children(name) if whole else []
        if pid is None:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
            for child in found:
                child.kill()
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False
        return True

    def log(self, name: str) -> str:
        """What a part wrote."""
        path = self._folder / name / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _start(self, name: str) -> None:
        nursery, command = self._parts[name]
        nursery.start(name, command, self._folder / name)

    def _supervise(self) -> None:
        while not self._ending.is_set():
            for nursery in self._nurseries:
                while not nursery.said.empty():
                    self._hear(nursery, nursery.said.get())
            for name, due in list(self._due.items()):
                if due <= time.monotonic():
                    del self._due[name]
                    self._start(name)
            time.sleep(0.02)

    def _hear(self, nursery: Nursery, said: dict[str, Any]) -> None:
        name, pid = str(said["name"]), int(said["pid"])
        if "status" not in said:
            nursery.running[name] = pid
        elif nursery.running.get(name) == pid:
            del nursery.running[name]
            self.deaths[name] += 1
            self._due[name] = time.monotonic() + _BACKOFF
