"""Each witnessed program in a process of its own: recorded by a real hook on a fixed clock, and judged by the default rules.

``python -m benchmarks.detection.isolated FILE`` runs the task that the JSON file describes, and writes its results beside it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.detection.fixed_clock import FixedClock
from benchmarks.detection.witnessed import Quality, Training, Witnessed, witnessed_programs
from watchstep import CaptureConfig, Hook, open_run
from watchstep_rules.backtest.backtest import backtest_run
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import StopAction

Capture = Literal["default", "every_step"]

STEP_SECONDS = 0.001
PROCESS_SECONDS = 900
"""After which a program's process is ended: many times what all of its seeds take on an idle machine."""


@dataclass(frozen=True)
class Alarm:
    """An alert that began to fire.

    Attributes:
        rule: its rule.
        step: at which it fired.
        severity: info, warning or critical.
        stops: whether it would stop the job.
        attempt: number of the attempt, from 0.
        tensor: that it names.
        message: its message.
    """

    rule: str
    step: int
    severity: str
    stops: bool
    attempt: int
    tensor: str
    message: str


@dataclass(frozen=True)
class Result:
    """One run of one program.

    Attributes:
        program: its name.
        seed: its seed.
        faulty: whether its fault was made to begin.
        alarms: in the order of attempts and steps.
        qualities: what the program measured of itself.
        seconds: of CPU time, recording and judging included.
        failure: how the program failed, which then has neither alarms nor qualities; empty where it did not.
    """

    program: str
    seed: int
    faulty: bool
    alarms: tuple[Alarm, ...]
    qualities: tuple[Quality, ...]
    seconds: float
    failure: str = ""

    @property
    def unexpected(self) -> list[str]:
        """Measures that are not as the program says they must be; one without any measure is no witness."""
        if self.failure:
            return [f"failed: {self.failure}"]
        if not self.qualities:
            return ["nothing was measured"]
        return [quality.words for quality in self.qualities if not quality.expected]


@dataclass(frozen=True)
class Task:
    """A program with its seeds. ``rank`` is that of a process among several that train together."""

    program: str
    seeds: tuple[int, ...]
    faulty: tuple[bool, ...]
    capture: Capture
    judged: bool = True
    rank: int = 0


class ProgramFailedError(RuntimeError):
    """A program raised, or its recorder had faults."""


def run_tasks(
    tasks: Sequence[Task],
    processes: int,
    done: Callable[[int, int], None] = lambda _done, _all: None,
) -> Iterator[list[Result]]:
    """Results of each task in their order, ``processes`` of them at a time; of a program that raised, its failure.

    Processes are forked from one that has imported PyTorch and the programs, and has run nothing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.detection.isolated", "benchmarks.detection.warm"])
    with context.Pool(processes, maxtasksperchild=1) as pool:
        for number, outcome in enumerate(pool.imap(_outcome, tasks, chunksize=1), 1):
            done(number, len(tasks))
            yield outcome


def _outcome(task: Task) -> list[Result]:
    """The results, or how the program failed; its output is shown only then."""
    with tempfile.TemporaryFile("w+") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        for name in [name for name in os.environ if name.startswith("WATCHSTEP_")]:
            del os.environ[name]
        try:
            return run_here(task)
        except Exception:  # noqa: BLE001 - whatever a program raises is told
            sys.stdout.flush()
            output.seek(0)
            failure = f"{output.read()[-2000:]}\n{traceback.format_exc()[-3000:]}"
            return [
                Result(task.program, seed, faulty, (), (), 0.0, failure)
                for seed in task.seeds
                for faulty in task.faulty
            ]


def run_process(task: Task, environment: dict[str, str] | None = None) -> list[Result]:
    """Run a task in a new process with an environment of its own, as ranks need one.

    Raises:
        ProgramFailedError: it raised; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "task.json"
        given.write_text(json.dumps(asdict(task)), encoding="utf-8")
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks.detection.isolated", str(given)],
            check=False,
            capture_output=True,
            text=True,
            timeout=PROCESS_SECONDS,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )
        written = given.with_suffix(".results.json")
        if ended.returncode or not written.exists():
            raise ProgramFailedError(f"{task.program}: {(ended.stderr or ended.stdout)[-3000:]}")
        return [_result(data) for data in json.loads(written.read_text(encoding="utf-8"))]


def _result(data: dict[str, Any]) -> Result:
    alarms = tuple(Alarm(**alarm) for alarm in data.pop("alarms"))
    qualities = tuple(Quality(**quality) for quality in data.pop("qualities"))
    return Result(alarms=alarms, qualities=qualities, **data)


def run_here(task: Task) -> list[Result]:
    """Run a task in this process, which shall do nothing else: programs set global states of their own."""
    program = witnessed_programs()[task.program]
    results = []
    for seed in task.seeds:
        for faulty in task.faulty:
            before = time.process_time()
            with tempfile.TemporaryDirectory() as folder:
                if program.ranks > 1 and "RANK" not in os.environ:
                    qualities = _by_ranks(program, seed, Path(folder), task)
                else:
                    qualities = _recorded(program, seed, Path(folder), task.capture, faulty=faulty)
                url = f"{Path(folder).as_uri()}/runs/default/run"
                alarms = tuple(alarms_of(url)) if task.judged else ()
            seconds = time.process_time() - before
            results.append(Result(program.name, seed, faulty, alarms, tuple(qualities), round(seconds, 2)))
    return results


def _recorded(
    program: Witnessed, seed: int, folder: Path, capture: Capture, *, faulty: bool
) -> list[Quality]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(5000 + seed)
    clock = FixedClock(STEP_SECONDS)
    budget: dict[str, Any] = {"overhead_budget": None} if capture == "every_step" else {}
    config = CaptureConfig(clock=clock, **budget)
    hooks: list[Hook] = []

    def open_hook(first_step: int) -> Hook:
        hook = Hook(_store(folder), run="run", config=config, first_step=first_step)
        hooks.append(hook)
        return hook

    (folder / "files").mkdir(exist_ok=True)
    training = Training(
        seed,
        open_hook,
        clock.step,
        faulty=faulty,
        store=str(folder / "files"),
        rank=int(os.environ.get("RANK", "0")),
        ranks=program.ranks,
    )
    try:
        program.train(training)
    finally:
        for hook in hooks:
            hook.close()
    for hook in hooks:
        if faults := hook.health["faults"]:
            raise ProgramFailedError(f"{program.name}, seed {seed}: the recorder had faults: {faults}")
    return training.qualities


def _store(folder: Path) -> str:
    return os.environ.get("BENCHMARK_STORE") or str(folder / "runs")


def _by_ranks(program: Witnessed, seed: int, folder: Path, task: Task) -> list[Quality]:
    """Train in as many processes as there are ranks; the first one measures."""
    shared = {
        "WORLD_SIZE": str(program.ranks),
        "LOCAL_WORLD_SIZE": str(program.ranks),
        "BENCHMARK_STORE": str(folder / "runs"),
        "BENCHMARK_MEETING": (folder / "meeting").as_uri(),
        "WATCHSTEP_RUN": "run",
        "WATCHSTEP_ATTEMPT": "a",
    }
    alone = Task(task.program, (seed,), (False,), task.capture, judged=False)
    environments = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(program.ranks)]
    with ThreadPoolExecutor(program.ranks) as threads:
        results = list(threads.map(run_process, [alone] * program.ranks, environments))
    return list(results[0][0].qualities)


def alarms_of(url: str) -> Iterator[Alarm]:
    """What the default rules say of each attempt of a recorded run.

    Raises:
        ProgramFailedError: a rule could not be evaluated.
    """
    for number, attempt in enumerate(backtest_run(open_run(url), DEFAULT_RULES).attempts):
        fired = []
        for outcome in attempt.outcomes:
            if outcome.problem:
                raise ProgramFailedError(f"{outcome.config.name}: {outcome.problem}")
            stops = any(isinstance(action, StopAction) for action in outcome.config.actions)
            for change in outcome.fired:
                severity = outcome.config.severity
                finding = change.finding
                fired.append(
                    Alarm(
                        outcome.config.rule,
                        change.step,
                        str(severity),
                        stops,
                        number,
                        finding.tensor if finding else "",
                        finding.message if finding else "",
                    )
                )
        yield from sorted(fired, key=lambda alarm: (alarm.step, alarm.rule))


def main() -> None:
    """Run the task of a file."""
    given = Path(sys.argv[1])
    data = json.loads(given.read_text(encoding="utf-8"))
    task = Task(**{**data, "seeds": tuple(data["seeds"]), "faulty": tuple(data["faulty"])})
    try:
        results = run_here(task)
    except Exception:  # noqa: BLE001 - whatever a program raises is told
        traceback.print_exc()
        sys.exit(1)
    given.with_suffix(".results.json").write_text(
        json.dumps([asdict(result) for result in results]), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
