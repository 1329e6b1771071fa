"""A real Ray cluster of one node, in a folder of its own and with ports of its own."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.services.jobs import eventually
from tests.services.redis import free_port

SECONDS = 180.0
"""Ray starts ten processes, each of which imports much."""

_WORKER_PORTS = 21_000
"""From here on each cluster takes a thousand, at random: it does not look whether another one's workers have them."""


@dataclass(frozen=True)
class RayCluster:
    """A running cluster.

    Attributes:
        address: of its dashboard, where jobs are submitted.
    """

    address: str


def missing() -> str:
    """Why there can be no cluster here; empty where there can be one."""
    return "" if importlib.util.find_spec("ray") else "NO RAY HERE: pip install 'watchstep[ray]'"


@contextmanager
def running_ray() -> Iterator[RayCluster]:
    """Start a cluster, and leave nothing of it behind."""
    # Not pytest's folder: its sockets' paths have to be short.
    with tempfile.TemporaryDirectory(prefix="ws-ray-", ignore_cleanup_errors=True) as folder:
        port = free_port()
        head = _start(Path(folder), port)
        try:
            cluster = RayCluster(f"http://127.0.0.1:{port}")
            eventually(lambda: head.poll() is not None or _answers(cluster), SECONDS)
            if head.poll() is not None:
                raise RuntimeError((Path(folder) / "output").read_text(encoding="utf-8")[-2000:])
            yield cluster
        finally:
            _end(head, folder)


def _start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    first = _WORKER_PORTS + 1000 * secrets.randbelow(10)
    # Without --port=0 and these, it takes 6379 and workers' ports from 10002 to 19999.
    command = (
        Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--port=0",
        "--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={port}",
        f"--dashboard-agent-listen-port={free_port()}", f"--ray-client-server-port={free_port()}",
        f"--min-worker-port={first}", f"--max-worker-port={first + 999}",
        f"--temp-dir={folder}", "--num-cpus=8", "--object-store-memory=80000000", "--disable-usage-stats",
    )  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "WATCHSTEP_"))}
    # Jobs find the tests' own interpreter as "python".
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(
            command,
            # Whatever this user's own clusters ask for.
            env={**kept, "PATH": path, "RAY_AUTH_MODE": "disabled"},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _answers(cluster: RayCluster) -> bool:
    try:
        with urllib.request.urlopen(f"{cluster.address}/api/jobs/", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _end(head: subprocess.Popen[bytes], folder: str) -> None:
    """End the cluster's processes, and no other cluster's: ``ray stop`` would end every one of this machine."""
    head.send_signal(signal.SIGTERM)
    try:
        head.wait(30)
    except subprocess.TimeoutExpired:
        head.kill()
        head.wait()

    def none_left() -> bool:
        for pid in (left := _of(folder)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return not left

    eventually(none_left, SECONDS)


def _of(folder: str) -> list[int]:
    """Processes that were started with this folder, or by one that was: workers have it in their environment."""
    named = folder.encode()
    found = []
    for place in Path("/proc").glob("[1-9]*"):
        try:
            held = place.joinpath("cmdline").read_bytes() + place.joinpath("environ").read_bytes()
        except OSError:
            continue
        if named in held and int(place.name) != os.getpid():
            found.append(int(place.name))
    return found
