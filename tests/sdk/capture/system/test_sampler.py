"""Recordings with real system figures, sampled far more often than by default, and times of steps by a clock of the test."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from benchmarks.detection.fixed_clock import FixedClock
from tests.sdk.programs import run_program
from tests.sdk.training import Training, recorded, watched_training
from watchstep import Bounds, CaptureConfig, Hook, Run, SystemSampling, open_run
from watchstep.capture.system.sampler import Samples, StepTimes, Waiting
from watchstep.errors import ConfigError, StoreError
from watchstep.format.system_figures import (
    CPU,
    DATA_WAIT,
    DATA_WORKERS,
    FIGURES,
    INITIALIZATION_SECONDS,
    MEMORY,
    NODE_MEMORY,
    STEP_SECONDS,
)
from watchstep.reading.comparison.diff import diff

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

OFTEN = CaptureConfig(
    overhead_budget=None,
    system=SystemSampling(seconds=0.01, row_seconds=0.02, share=1.0),
    bounds=Bounds(flush_seconds=0.01),
)


def sampled(hook: Hook) -> list[str]:
    """Figures of the system that are on the store."""
    try:
        return open_run(hook.run_url).tensors("system")
    except StoreError:  # nothing has been written yet
        return []


def train_until(name: str, hook: Hook) -> Training:
    """Train until a figure is on the store, and a few steps more."""
    training = Training()
    hook.watch(training.model, training.optimizer)
    while name not in sampled(hook):
        training.run(5)
    training.run(5)
    return training


def figures(run: Run) -> dict[str, list[float]]:
    return {name: run.series(name, "mean")["mean"].to_pylist() for name in run.tensors("system")}


def test_a_recording_has_rows_of_the_process_and_its_machine(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=OFTEN)
    train_until(DATA_WAIT, hook)
    run = recorded(hook)
    found = figures(run)
    assert {CPU, MEMORY, NODE_MEMORY, STEP_SECONDS, DATA_WAIT} <= set(found)
    assert set(found) <= {figure.name for figure in FIGURES}
    assert all(0 <= share <= 1 for name in (NODE_MEMORY, DATA_WAIT) for share in found[name])
    assert all(value > 2**20 for value in found[MEMORY])
    row = run.series(MEMORY, "count")
    assert set(row["mode"].to_pylist()) == {"global"}
    assert set(run.steps("global")) <= set(run.steps("train"))
    assert not hook.health["notes"]


def test_each_step_is_sampled_once(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=OFTEN)
    train_until(STEP_SECONDS, hook)
    run = recorded(hook)
    steps = sum(run.series(STEP_SECONDS, "count")["count"].to_pylist())
    assert 0 < steps <= run.steps("train")[-1]


def test_what_is_sampled_while_a_step_lasts_is_one_row() -> None:
    samples, waiting = Samples(), Waiting()
    assert samples.as_rows() is None
    assert waiting.take() is None
    for names in ((CPU, MEMORY), (MEMORY, STEP_SECONDS)):
        for name in names:
            samples.add({name: 1.0})
            samples.add({name: 3.0})
        rows = samples.as_rows()
        assert rows is not None
        waiting.give(rows)
    taken = waiting.take()
    assert taken is not None
    assert rows is not None
    assert waiting.take() is None
    assert [info.name for info in taken.tensors] == [CPU, MEMORY, STEP_SECONDS]
    assert taken.statistics.count.tolist() == [2, 4, 2]
    assert taken.statistics.mean.tolist() == [2.0, 2.0, 2.0]
    assert taken.time_ns == rows.time_ns


def test_a_short_recording_has_none(tmp_path: Path) -> None:
    hook, training = watched_training(
        tmp_path, config=CaptureConfig(overhead_budget=None, system=SystemSampling(row_seconds=3600))
    )
    training.run(3)
    assert recorded(hook).tensors("system") == []


def samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "watchstep-system"]


@pytest.mark.parametrize(
    ("config", "number"),
    [
        (CaptureConfig(system=None), 0),
        (CaptureConfig(clock=FixedClock(0.01), system=SystemSampling(0.01, 0.01)), 0),
        (OFTEN, 1),
    ],
    ids=["switched off", "reproducible by its clock", "on"],
)
def test_a_thread_samples_while_a_hook_is_open_unless_it_is_off(
    config: CaptureConfig, number: int, tmp_path: Path
) -> None:
    hook = Hook(tmp_path, config=config)
    assert len(samplers()) == number
    hook.close()
    assert samplers() == []


def test_losses_are_the_same_to_the_bit(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path, config=OFTEN)
    losses = training.run(30)
    hook.close()
    assert losses == Training().run(30)


def test_two_runs_differ_by_what_they_learnt_alone(tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        hook = Hook(tmp_path / name, config=OFTEN)
        train_until(MEMORY, hook)
        runs.append(recorded(hook))
    found = diff(runs[0], runs[1])
    assert not any(name.startswith("system/") for name in (*found.only_a, *found.only_b))
    assert not any(name.startswith("system/") for name in found.table["tensor"].to_pylist())


def test_its_cost_is_reported(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=CaptureConfig(system=SystemSampling(0.01, 0.02, share=1.0)))
    train_until(MEMORY, hook)
    hook.close()
    assert hook.health["overhead"]["spent_seconds"] > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": 0},
        {"seconds": 2.0, "row_seconds": 1.0},
        {"row_seconds": float("inf")},
        {"seconds": float("nan")},
        {"share": 0},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        SystemSampling(**wrong)  # type: ignore[arg-type]  # numbers that are none


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_samples_nothing_and_ends(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=OFTEN)
    train_until(MEMORY, hook)
    child = os.fork()
    if child == 0:
        hook.close()
        os._exit(len(samplers()))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    recorded(hook)


WORKERS = """
import contextlib, sys, torch, watchstep
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8, num_workers=2, persistent_workers=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
settings = watchstep.SystemSampling(seconds=0.01, row_seconds=0.02, share=1.0)
with watchstep.Hook(sys.argv[1], run="r", config=watchstep.CaptureConfig(overhead_budget=None, system=settings)) as hook:
    hook.watch(model, optimizer)
    seen = False
    while not seen:
        for (x,) in loader:
            model(x).pow(2).mean().backward()
            optimizer.step()
        with contextlib.suppress(watchstep.WatchstepError):  # nothing has been written yet
            run = watchstep.open_run(hook.run_url)
            seen = 2.0 in run.series("system/data_workers", "max")["max"].to_pylist()
    assert not hook.health["faults"], hook.health
"""


@pytest.mark.ci
def test_workers_that_load_data_are_counted_and_sample_nothing_themselves(tmp_path: Path) -> None:
    if not hasattr(torch.multiprocessing, "_set_thread_name"):
        pytest.skip("before PyTorch 2.6 workers have no name")
    run_program(tmp_path, WORKERS, tmp_path, PYTHONWARNINGS="error")
    run = open_run(str(tmp_path / "default" / "r"))
    assert run.workers == [0]
    assert max(run.series(DATA_WORKERS, "max")["max"].to_pylist()) == 2.0
    (seconds,) = run.series(INITIALIZATION_SECONDS, "mean")["mean"].to_pylist()
    assert 0 < seconds < 120


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def step_times() -> tuple[Clock, StepTimes]:
    clock = Clock()
    return clock, StepTimes(clock)


def test_a_step_is_from_update_to_update_and_waits_until_its_forward_pass() -> None:
    clock, times = step_times()
    for wait, work in ((1.0, 3.0), (1.0, 3.0), (0.0, 2.0)):
        clock.now += wait
        times.forward()
        clock.now += work / 2
        times.forward()  # micro-batches: the first one counts
        clock.now += work / 2
        times.finished()
    assert times.first == 104.0
    assert times.take() == ([4.0, 2.0], [0.25, 0.0])
    assert times.take() == ([], [])


def test_a_step_with_an_evaluation_in_it_is_omitted() -> None:
    clock, times = step_times()
    for evaluates in (False, True, False):
        clock.now += 1.0
        if evaluates:
            times.other_mode()
        times.forward()
        clock.now += 1.0
        times.finished()
    assert times.take() == ([2.0], [0.5])


def test_an_update_without_a_forward_pass_waits_for_nothing_that_is_seen() -> None:
    clock, times = step_times()
    for _ in range(3):
        clock.now += 2.0
        times.finished()
    assert times.take() == ([2.0, 2.0], [])


def test_unconsumed_step_times_are_limited() -> None:
    clock, times = step_times()
    for _ in range(70_000):
        clock.now += 1.0
        times.forward()
        times.finished()
    seconds, waits = times.take()
    assert len(seconds) == len(waits) == 65_536
