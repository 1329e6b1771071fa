"""A process that has imported what programs of the docs import, and forks for each: most take longer to import than to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_SERVER = """
import json, os, runpy, sys, warnings
import torch
import watchstep, watchstep_rules
for line in sys.stdin:
    request = json.loads(line)
    if pid := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    # The child ends as any program does, with what is registered for the end of the interpreter.
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(request["output"], os.O_WRONLY | os.O_CREAT)
    os.dup2(nothing, 0), os.dup2(output, 1), os.dup2(output, 2)
    sys.argv, sys.path[0] = [request["program"]], os.path.dirname(request["program"])
    warnings.simplefilter("error")
    runpy.run_path(request["program"], run_name="__main__")
    break
"""


class WarmedProcess:
    """Runs programs one after the other, with warnings as errors, each in a process of its own. Close it."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, program: Path, folder: Path) -> str:
        """Run a program in a folder and return its output.

        Raises:
            AssertionError: It ended with another code than 0; the text is its output.
        """
        output = program.with_suffix(".output")
        request = {
            "program": str(program),
            "folder": str(folder),
            "output": str(output),
            "environment": dict(os.environ),
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        code = self._server.stdout.readline().strip()
        text = output.read_text(encoding="utf-8") if output.exists() else ""
        assert code == "0", f"{program.name} ended with code {code or 'none'}\n{text}"
        return text

    def close(self) -> None:
        """End the process."""
        self._server.communicate()
