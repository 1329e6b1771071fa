"""Programs of tests that run in processes of their own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.warmed import warmed

ROOT = Path(__file__).parents[2]


def run_program(folder: Path, source: str, *arguments: str | Path, ranks: int = 0, **environment: str) -> str:
    """Run a Python program, in ranks as torchrun starts them where a number is given. It must succeed. Returns its output."""
    program = folder / "train.py"
    program.write_text(source)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    return warmed().run(program, *arguments, folder=ROOT, environment=variables, ranks=ranks)


_WATCHSTEP_RUN = """
import os, runpy, sys
from watchstep import command
from watchstep.wrapper.attach import wait_for_first_step

def execute(executable, program, environment):
    os.environ.clear()
    os.environ.update(environment)
    wait_for_first_step()  # as the start-up code does, after the import of PyTorch
    sys.argv = program[1:]
    sys.path[:1] = [os.path.dirname(sys.argv[0])]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()

os.execve = execute
command.main()
"""


@dataclass(frozen=True)
class Printed:
    """The output and the errors of a program."""

    output: str
    errors: str


def record_program(
    program: Path,
    *arguments: str | Path,
    folder: Path,
    options: tuple[str | Path, ...] = (),
    **environment: str,
) -> Printed:
    """Run a program by ``watchstep run``, which must succeed, in a process that has imported PyTorch: the program is not executed anew."""
    wrapper = program.with_name("watchstep_run.py")
    wrapper.write_text(_WATCHSTEP_RUN)
    words = ("run", *options, "--", "python", program, *arguments)
    output = warmed().run(wrapper, *words, folder=folder, environment={**os.environ, **environment})
    return Printed(output, wrapper.with_suffix(".err0").read_text(encoding="utf-8"))
