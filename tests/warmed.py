"""A process that has imported what trainings import, and forks for each program: most take longer to import than to run."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

_SERVER = """
import gc, importlib, json, os, runpy, signal, sys, warnings
import pandas, torch, torch._dynamo, watchstep.hook, watchstep.pytorch
import watchstep_rules.backtest.backtest
for line in sys.stdin:
    request = json.loads(line)
    for module in request["modules"]:
        importlib.import_module(module)
    gc.freeze()
    ranks = {}
    for number, environment in enumerate(request["environments"]):
        if pid := os.fork():
            ranks[pid] = number
            continue
        # The child ends as any program does, with what is registered for the end of the interpreter.
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(request["folder"])
        nothing = os.open(os.devnull, os.O_RDONLY)
        output, errors = (
            os.open(f"{request['output']}.{kind}{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for kind in ("out", "err")
        )
        os.dup2(nothing, 0), os.dup2(output, 1), os.dup2(errors, 2)
        program, *arguments = request["command"]
        sys.argv = [program, *arguments]
        sys.path[:1] = [os.path.dirname(program), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        if request["warnings"]:
            warnings.simplefilter(request["warnings"])
        runpy.run_path(program, run_name="__main__")
        sys.exit()
    codes, seconds = [0] * len(ranks), 0.0
    while ranks:
        pid, status, usage = os.wait4(-1, 0)
        if pid not in ranks:
            continue
        codes[ranks.pop(pid)] = code = os.waitstatus_to_exitcode(status)
        seconds += usage.ru_utime + usage.ru_stime
        if code:  # as torchrun does
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    print(json.dumps([codes, seconds]), flush=True)
"""


class WarmedProcess:
    """Runs programs one after the other, each in a process of its own. Close it.

    Attributes:
        cpu_seconds: processor time of the programs that have ended, of which this process's own children are told
            only once it is closed.
    """

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.cpu_seconds = 0.0

    def run(
        self,
        program: Path,
        *arguments: object,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        ranks: int = 0,
        modules: Sequence[str] = (),
        warnings: str = "",
    ) -> str:
        """Run a program in a folder, in so many ranks as torchrun starts, and return its output.

        Args:
            modules: that are imported for it and for all later programs.

        Raises:
            AssertionError: It ended with another code than 0; the text is its output.
        """
        output = program.with_suffix("")
        variables = dict(os.environ if environment is None else environment)
        request = {
            "command": [str(program), *map(str, arguments)],
            "folder": str(folder),
            "output": str(output),
            "modules": list(modules),
            "warnings": warnings,
            "environments": [variables | rank for rank in _rank_variables(ranks)] if ranks else [variables],
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        codes, seconds = json.loads(self._server.stdout.readline())
        self.cpu_seconds += seconds
        texts = {
            kind: "".join(Path(f"{output}.{kind}{n}").read_text(encoding="utf-8") for n in range(len(codes)))
            for kind in ("out", "err")
        }
        assert not any(codes), f"{program.name} ended with code {codes}\n{texts['out']}{texts['err']}"
        return texts["out"]

    def close(self) -> None:
        """End the process."""
        self._server.communicate()


def _rank_variables(ranks: int) -> list[dict[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    same = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": str(uuid.uuid4()),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    return [same | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


@functools.cache
def warmed() -> WarmedProcess:
    """The process that this process's tests share; `end` ends it."""
    return WarmedProcess()


def cpu_seconds() -> float:
    """Processor time of the programs that the process has run."""
    return warmed().cpu_seconds if warmed.cache_info().currsize else 0.0


def end() -> None:
    """End the process, if there is one. Its processor time counts as that of a child from now on."""
    if warmed.cache_info().currsize:
        warmed().close()
        warmed.cache_clear()
