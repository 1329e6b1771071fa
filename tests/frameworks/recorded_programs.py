"""Programs that train several times in a process of each backend, and the figures of the runs that they record."""

from __future__ import annotations

import io
import json
import runpy
from contextlib import redirect_stdout
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


def printed_by(program: Path) -> str:
    """What a program prints in this process."""
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(program), run_name="__main__")
    return printed.getvalue()


def unmodified_run(folder: Path, program: Path, injected: Path, **variables: str) -> tuple[Run, str]:
    """The run of a program that does not name Watchstep, and what it prints."""
    variables |= {
        "WATCHSTEP_STORE": str(folder / "runs"),
        "WATCHSTEP_RUN": "unmodified",
        "WATCHSTEP_OVERHEAD_BUDGET": "none",
    }
    printed = run_python(program, env=environment_of(folder, injected, **variables), timeout=120)
    return open_run(folder / "runs" / "default" / "unmodified"), printed


def figures(run: Run, name: str, column: str = "mean", mode: str = "train") -> dict[int, Any]:
    """A column of a tensor's statistics by step."""
    table = run.tensor(name).statistics().to_pydict()
    rows = zip(table["step"], table["mode"], table[column], strict=True)
    return {step: value for step, own, value in rows if own == mode}


def values(run: Run, name: str, column: str = "mean") -> list[float]:
    """A column of a tensor's statistics, in the order of steps."""
    found: list[float] = run.tensor(name).statistics().column(column).to_pylist()
    return found
