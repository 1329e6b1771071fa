"""One training in a process of its own, run a round at a time on its parent's word. Imports no framework until it runs."""

from __future__ import annotations

import os
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.frameworks.training import FrameworkTraining
from benchmarks.frameworks.workloads import WORKLOADS

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "JAX_PLATFORMS": "cpu",
}


@dataclass(frozen=True)
class Outcome:
    """What a process reports at its end.

    Attributes:
        losses: of each step or epoch, as hexadecimal numbers.
        weights: a digest of the last weights.
        measured: role → steps at which it was measured; empty without a recording.
        peak: the most memory that the process had, MiB.
        fault: why the figures mean nothing; empty where they do.
    """

    losses: list[str] = field(default_factory=list)
    weights: str = ""
    measured: dict[str, int] = field(default_factory=dict)
    peak: float = 0.0
    fault: str = ""


def run(connection: Connection, workload: str, variant: str, folder: str, core: int) -> None:
    """Serve rounds until the parent ends. Reports None when ready, or why it cannot be.

    Args:
        connection: receives (steps, drain in seconds); no steps end. Each is answered by True when the steps are done, and by CPU seconds
            of all threads from the beginning of the steps to the end of the drain, in which the writer works.
        workload: which training.
        variant: what is put on it.
        folder: an empty one.
        core: which the process is confined to.
    """
    os.sched_setaffinity(0, {core})
    chosen = WORKLOADS[workload]
    os.environ |= {**_ENVIRONMENT, **chosen.environment}
    try:
        training = chosen.starts()(variant, Path(folder))
    except Exception:  # noqa: BLE001 - reported as missing
        connection.send(traceback.format_exc(limit=-3))
        return
    connection.send(None)
    try:
        _serve(connection, training)
        outcome = _outcome(training)
    except EOFError:
        return  # the parent was ended
    except Exception:  # noqa: BLE001 - as above
        outcome = Outcome(fault=traceback.format_exc(limit=-3))
    connection.send(outcome)


def _serve(connection: Connection, training: FrameworkTraining) -> None:
    while True:
        steps, drain = connection.recv()
        if not steps:
            return
        began = time.process_time()
        training.run(steps)
        connection.send(True)
        time.sleep(drain)
        connection.send(time.process_time() - began)


def _outcome(training: FrameworkTraining) -> Outcome:
    peak = 0.0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            peak = int(line.split()[1]) / 1024
    losses, weights = training.losses(), training.weights()
    return Outcome(losses, weights, training.close(), peak)
