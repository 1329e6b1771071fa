"""What the parts of the hook cost at a step where nothing is due: ``python -m benchmarks.capture.parts``.

The parts are put aside one after another, in blocks of a few steps that take turns in one process, as in `benchmarks.capture.pairs`. Medians of the ratios
of the training thread's CPU time are told; *once more* is a second block without any part, and shows the noise. The recorder's other threads are told as
shares of the time that passed.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

from benchmarks.capture import instruments
from benchmarks.capture.models import WORKLOADS, Training
from benchmarks.capture.pairs import Listening, watch_all
from benchmarks.report import Figure, Report, arguments
from watchstep import Hook
from watchstep.capture.schedule import Schedule

_WORKLOADS = ("mlp", "cnn", "gpt", "encoder", "dcgan", "ppo", "bert", "modules")
_WARM = 130
_PARTS = {
    "none": {"modules": False, "losses": False, "steps": False},
    "none, once more": {"modules": False, "losses": False, "steps": False},
    "all": {"modules": True, "losses": True, "steps": True},
    "all but module hooks": {"modules": False, "losses": True, "steps": True},
    "all but backward()": {"modules": True, "losses": False, "steps": True},
    "all but optimizer hooks": {"modules": True, "losses": True, "steps": False},
}


def _seconds(training: Training, steps: int) -> float:
    began = time.thread_time()
    for _ in range(steps):
        training.backward()
        training.update()
    return (time.thread_time() - began) / steps


def _threads() -> dict[str, float]:
    """Return the processor seconds of the recorder's threads so far."""
    seconds = {}
    for thread in threading.enumerate():
        if thread.name.startswith("watchstep"):
            scheduled = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            seconds[thread.name] = int(scheduled.read_text(encoding="ascii").split()[0]) * 1e-9
    return seconds


def measured(workload: str, report: Report, *, rounds: int, steps: int) -> None:
    """Measure one workload."""
    training = WORKLOADS[workload].start()
    taken: dict[str, list[float]] = {name: [] for name in _PARTS}
    with tempfile.TemporaryDirectory() as folder, Hook(folder, **instruments.Budget.options()) as hook:
        watch_all(hook, training)
        listening = Listening(hook)
        _seconds(training, _WARM)
        decide = Schedule._decide  # noqa: SLF001 - a program cannot turn off its measurements and keep the rest

        def decide_nothing(schedule: Schedule, step: int) -> None:
            decide(schedule, step)
            schedule._due = frozenset()  # noqa: SLF001 - as above

        Schedule._decide = decide_nothing  # type: ignore[method-assign,assignment] # noqa: SLF001
        try:
            _seconds(training, 10)  # until nothing of the last measurements is left to do
            before, began = _threads(), time.perf_counter()
            for turn in range(rounds):
                names = list(_PARTS)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    listening.set(**_PARTS[name])
                    _seconds(training, 1)
                    taken[name].append(_seconds(training, steps))
            passed, after = time.perf_counter() - began, _threads()
        finally:
            Schedule._decide = decide  # type: ignore[method-assign] # noqa: SLF001
            listening.set(modules=True)
    for name, seconds in taken.items():
        ratios = [each / bare for each, bare in zip(seconds, taken["none"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        note = f"quartiles {low:.3f} and {high:.3f} of {rounds} blocks of {steps} steps"
        report.add(f"{workload}/{name}", Figure(middle, "ratio", note=note))
    for name, seconds_before in before.items():
        report.add(f"{workload}/{name}", Figure((after[name] - seconds_before) / passed, "share of the time"))


def main() -> None:
    """Run it."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=_WORKLOADS, action="append", help="leave the others out")
    given = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("Capture, part by part", quick=given.quick)
    for workload in given.only or _WORKLOADS:
        measured(workload, report, rounds=8 if given.quick else 40, steps=3 if given.quick else 5)
    report.finish(given.json)


if __name__ == "__main__":
    main()
