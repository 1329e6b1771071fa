"""Programs that train several times in a process of each backend, and the figures of the runs that they record."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.processes import environment_of, run_python
from watchstep import Run, open_run


class RecordedPrograms:
    """The results that a script writes for each kind of program on a backend, and the runs that they recorded."""

    def __init__(self, script: Path, folder: Path) -> None:
        self._script, self._folder = script, folder

    @cache  # noqa: B019 - one object for the module
    def results(self, backend: str) -> dict[str, Any]:
        """What the script states of each kind."""
        own = self._folder / backend
        own.mkdir()
        environment = environment_of(own, KERAS_BACKEND=backend)
        run_python(self._script, own / "runs", own / "results.json", env=environment, timeout=400)
        results: dict[str, Any] = json.loads((own / "results.json").read_text())
        return results

    def run(self, backend: str, kind: str) -> Run:
        """The run of a kind of program."""
        self.results(backend)
        return open_run(self._folder / backend / "runs" / "default" / kind)


def unmodified_run(folder: Path, program: str, injected: Path, **variables: str) -> Run:
    """The run of a program that does not name Watchstep, and that prints the same with and without it."""
    environments = [
        environment_of(
            folder,
            first,
            WATCHSTEP_STORE=str(folder / "runs"),
            WATCHSTEP_RUN="unmodified",
            WATCHSTEP_OVERHEAD_BUDGET="none",
            **variables,
        )
        for first in ("", injected)
    ]
    plain, recorded = (
        run_python("-c", program, env=environment, timeout=120) for environment in environments
    )
    assert plain == recorded
    return open_run(folder / "runs" / "default" / "unmodified")


def figures(run: Run, name: str, column: str = "mean", mode: str = "train") -> dict[int, Any]:
    """A column of a tensor's statistics by step."""
    table = run.tensor(name).statistics().to_pydict()
    rows = zip(table["step"], table["mode"], table[column], strict=True)
    return {step: value for step, own, value in rows if own == mode}


def values(run: Run, name: str, column: str = "mean") -> list[float]:
    """A column of a tensor's statistics, in the order of steps."""
    found: list[float] = run.tensor(name).statistics().column(column).to_pylist()
    return found
