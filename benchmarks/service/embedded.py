"""The embedded service: 20 runs at once, and a real training that is gone soon after its bad step."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Figure, Report
from benchmarks.service.load import PERIOD, STEPS, quantile, settle, simulating, stops
from benchmarks.service.simulated import Plan
from watchstep_services.core.settings import Settings
from watchstep_services.serve.embedded import EmbeddedService
from watchstep_services.serve.launching import LaunchedProgram, launch_local

RUNS = 20
_BAD_STEP = 200
_PATIENCE_SECONDS = 120.0
_TRAINING = f"""
import sys, time
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
while True:
    x = torch.randn(16, 64)
    if step == {_BAD_STEP}:
        x[3, 5] = float("nan")
        with open(sys.argv[1], "w") as told:
            told.write(str(time.time_ns()))
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
    time.sleep(0.02)
    step += 1
"""
"""Steps of 20 ms; the inputs of one hold a NaN. It never ends by itself."""


def add_embedded_figures(report: Report, *, quick: bool) -> None:
    """`watchstep serve` in this process."""
    warm, seconds = (6.0, 12.0) if quick else (10.0, 90.0)
    with tempfile.TemporaryDirectory(prefix="ws-bench-") as folder:
        settings = Settings(store=f"{folder}/runs", home=Path(folder) / "home")
        with EmbeddedService(settings) as service:
            store = service.service.settings.store
            plan = Plan(
                service.url, service.recorder_token, store, RUNS, PERIOD, STEPS, warm, seconds, bad_share=0.1
            )
            spent, began = time.process_time(), time.monotonic()
            with simulating(plan, Path(folder)) as ended:
                told = ended()
            cores = (time.process_time() - spent) / (time.monotonic() - began)
            settle(service.database, told)
            found = stops(service.database, told)
    requested = found.requested.values()
    note = f"{len(requested)} stops, {len(found.never)} without; {cores:.2f} cores of the service"
    report.add(
        f"embedded, {RUNS} runs: segment to stop, p50", Figure(quantile(requested, 0.5), "s", note=note)
    )
    report.add(
        f"embedded, {RUNS} runs: segment to stop, p99", Figure(quantile(requested, 0.99), "s", 1.0, note=note)
    )


def add_training_figures(report: Report, *, quick: bool) -> None:
    """From the bad step in a process to the end of that process."""
    rounds = [_one_training() for _ in range(2 if quick else 10)]
    took = sorted(rounds)
    note = f"{len(took)} trainings, {took[0]:.2f} to {took[-1]:.2f} s; steps of 20 ms, it stops itself"
    report.add("bad step to process gone, median", Figure(quantile(took, 0.5), "s", note=note))


def _one_training() -> float:
    os.environ["WATCHSTEP_OVERHEAD_BUDGET"] = "none"
    with tempfile.TemporaryDirectory(prefix="ws-bench-") as name:
        folder = Path(name)
        program, told = folder / "train.py", folder / "bad"
        program.write_text(_TRAINING)
        with EmbeddedService(
            Settings(store=f"{name}/runs", home=folder / "home", grace_seconds=30.0)
        ) as service:
            command = (sys.executable, str(program), str(told))
            job = launch_local(
                service.service,
                LaunchedProgram("bench", "r", command, folder, folder / "log"),
                service.recorder_token,
            )
            backend = service.service.backends["local"]
            until = time.monotonic() + _PATIENCE_SECONDS
            while not backend.status(job).is_over:
                if time.monotonic() > until:
                    backend.kill(job)
                    raise RuntimeError(
                        f"not stopped in {_PATIENCE_SECONDS:g} s: {(folder / 'log').read_text()}"
                    )
                time.sleep(0.005)
            gone = time.time_ns()
        return (gone - int(told.read_text())) / 1e9
