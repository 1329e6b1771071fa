"""One training in a process of its own, run a round at a time on its parent's word."""

from __future__ import annotations

import contextlib
import itertools
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import torch

from benchmarks.capture.instruments import Instrument, UnavailableError
from benchmarks.capture.models import WORKLOADS, Training
from benchmarks.capture.variants import VARIANTS


@dataclass(frozen=True)
class Sample:
    """What one round cost, in seconds.

    Attributes:
        thread: CPU of the training thread in each step.
        rest: CPU of everything else, helper processes too, a step; also what runs on after the round's last step.
    """

    thread: list[float]
    rest: float


@dataclass(frozen=True)
class Farewell:
    """What a child says at its end.

    Attributes:
        peak: the most memory held at once by the process and its helpers, MiB.
        account: seconds of a step that the instrument says it took in the counted rounds; 0 where it says nothing.
        fault: why the figures mean nothing; empty where they do.
    """

    peak: float
    account: float
    fault: str = ""


def run(connection: Connection, workload: str, variant: str, folder: str, drain: float) -> None:
    """Serve rounds until told to stop. Says None when ready, or why it cannot be.

    Args:
        connection: gets numbers of steps; 0 ends. Each is answered by True when they are done and by a `Sample`.
        workload: which training.
        variant: what is put on it.
        folder: an empty one.
        drain: seconds after a round for what runs behind the training; they belong to the round.
    """
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    try:
        training = WORKLOADS[workload].start()
        instrument = VARIANTS[variant].make(training, Path(folder))
    except UnavailableError as error:
        connection.send(str(error))
        return
    except Exception:  # noqa: BLE001 - told to the parent, which reports it as missing
        connection.send(traceback.format_exc(limit=-3))
        return
    connection.send(None)
    _round(connection, training, instrument, connection.recv(), drain)  # the warm-up
    before, total = instrument.account(), 0
    while steps := connection.recv():
        _round(connection, training, instrument, steps, drain)
        total += steps
    connection.send(_farewell(instrument, before, max(1, total)))


def _farewell(instrument: Instrument, before: float, steps: int) -> Farewell:
    peak = _peak_memory()
    account = (instrument.account() - before) / steps
    try:
        instrument.close()
    except Exception:  # noqa: BLE001 - told to the parent, which reports it
        return Farewell(peak, account, traceback.format_exc(limit=-3))
    return Farewell(peak, account)


def _round(
    connection: Connection, training: Training, instrument: Instrument, steps: int, drain: float
) -> None:
    cpu = _cpu()
    marks = [time.thread_time()]
    for _ in range(steps):
        loss = training.backward()
        instrument.after_backward()
        training.update()
        instrument.after_step(loss)
        marks.append(time.thread_time())
    connection.send(True)
    time.sleep(drain)
    rest = (_cpu() - cpu - (marks[-1] - marks[0])) / steps
    connection.send(Sample([after - before for before, after in itertools.pairwise(marks)], max(0.0, rest)))


def _cpu() -> float:
    """CPU seconds of all threads of this process and of its helpers."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system
    return total


def _peak_memory() -> float:
    """MiB: the highest resident size of this process and of each helper. `ru_maxrss` would start at the parent's."""
    members = [psutil.Process(), *psutil.Process().children(recursive=True)]
    total = 0
    for member in members:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{member.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1])
    return total / 1024
