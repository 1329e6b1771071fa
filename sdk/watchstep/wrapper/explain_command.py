"""``watchstep explain``: start a program again, let it compute a bundled step in its own loop, and name the first bad operation."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.bundle import Bundle
from watchstep.hook_arguments import EXPLAINED_BUNDLE
from watchstep.reading.run import open_run
from watchstep.stopping import NOT_AGAIN
from watchstep.wrapper.environment import AttemptLaunch, environment, find_program
from watchstep.wrapper.replay_command import add_store, find_bundle

_EXIT_NOT_COMPUTED = 1


def parser() -> argparse.ArgumentParser:
    """Return the options of ``watchstep explain``."""
    parsed = argparse.ArgumentParser(
        prog="watchstep explain",
        description="Start a program again with its arguments, give the batches, weights, buffers and random states of a bundled step to its loop after the "
        "first update, and name the first bad operation of that step with its source line. The program ends then. Nothing is recorded. "
        "Exit code 0 if the step was computed, 1 if not.",
    )
    parsed.add_argument(
        "bundle", metavar="BUNDLE", help="a bundle's file, or a run: its id, PROJECT/ID, folder or URL"
    )
    add_store(parsed)
    parsed.add_argument(
        "--step", type=int, help="of a run: the bundle of this step (default: the first failing one)"
    )
    parsed.add_argument("--worker", type=int, help="of a run: the bundle of this rank (default: RANK, or 0)")
    parsed.add_argument("--attempt", help="of a run: the attempt (default: the newest with such a bundle)")
    parsed.add_argument(
        "program", nargs="*", metavar="-- PROGRAM …", help="the program to start, with its arguments"
    )
    return parsed


def main(arguments: Sequence[str]) -> NoReturn:
    """Start the program, and exit when it has ended.

    Raises:
        ConfigError: an option is invalid.
        NotFoundError, FormatError, StoreError: the bundle cannot be read.
    """
    place = list(arguments).index("--") if "--" in arguments else len(arguments)
    options, program = parser().parse_args(arguments[:place]), arguments[place + 1 :]
    if not program or options.program:
        raise ConfigError(
            "watchstep explain: no program given", "use watchstep explain RUN -- python train.py"
        )
    executable = find_program("watchstep explain", program[0])
    bundle = find_bundle(options.bundle, options.store, options.step, options.worker, options.attempt)
    if bundle.document.program.get("framework") == "jax":
        raise ConfigError(
            "a step of JAX is not computed in its program", "use watchstep replay with a function"
        )
    with tempfile.TemporaryDirectory(prefix="watchstep-explain-") as folder:
        is_computed = _run(bundle, Path(folder), executable, program)
    raise SystemExit(0 if is_computed else _EXIT_NOT_COMPUTED)


def _run(bundle: Bundle, folder: Path, executable: str, program: Sequence[str]) -> bool:
    """Run the program. Returns whether the step was computed in it."""
    launch = AttemptLaunch(
        store_url=(folder / "runs").as_uri(),
        project="explain",
        run="explained",
        attempt="explained",
        on_nonfinite="stop",
    )
    launch = replace(launch, explain=True)
    path = folder / "step.safetensors"
    path.write_bytes(bundle.content())
    variables = environment(launch, os.environ) | {EXPLAINED_BUNDLE: str(path)}
    done = subprocess.run([executable, *program[1:]], env=variables, check=False)  # noqa: S603 - this is the command's purpose
    try:
        ends = open_run(f"{launch.store_url}/{launch.project}/{launch.run}").ends()
    except NotFoundError:
        ends = []
    if any(NOT_AGAIN in end.reason for end in ends):
        return False
    if not any(end.state == "stopped" for end in ends):
        sys.stderr.write(
            f"watchstep: the program ended with exit code {done.returncode} before step {bundle.document.step} was computed in it\n"
        )
        return False
    return True
