"""One training in a process of its own, run a round at a time on its parent's word."""

from __future__ import annotations

import contextlib
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
    """What one round cost, in seconds of a step: CPU of the process and its helpers, of the training thread; wall."""

    cpu: float
    thread: float
    wall: float


@dataclass(frozen=True)
class Farewell:
    """What a child says at its end.

    Attributes:
        peak: the most memory held at once by the process and its helpers, MiB.
        account: share of the program's time that the instrument says it took in the counted rounds; None where it
            says nothing.
        fault: why the figures mean nothing; empty where they do.
    """

    peak: float
    account: float | None
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
    before = None
    while steps := connection.recv():
        _round(connection, training, instrument, steps, drain)
        before = before or instrument.account()  # the first round is the warm-up
    connection.send(_farewell(instrument, before or (0.0, 0.0)))


def _farewell(instrument: Instrument, before: tuple[float, float]) -> Farewell:
    peak = _peak_memory()
    spent, program = (now - then for now, then in zip(instrument.account(), before, strict=True))
    account = spent / program if program else None
    try:
        instrument.close()
    except Exception:  # noqa: BLE001 - told to the parent, which reports it
        return Farewell(peak, account, traceback.format_exc(limit=-3))
    return Farewell(peak, account)


def _round(
    connection: Connection, training: Training, instrument: Instrument, steps: int, drain: float
) -> None:
    cpu, thread, wall = _cpu(), time.thread_time(), time.perf_counter()
    for _ in range(steps):
        loss = training.backward()
        instrument.after_backward()
        training.update()
        instrument.after_step(loss)
    thread, wall = time.thread_time() - thread, time.perf_counter() - wall
    connection.send(True)
    time.sleep(drain)
    connection.send(Sample((_cpu() - cpu) / steps, thread / steps, wall / steps))


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
