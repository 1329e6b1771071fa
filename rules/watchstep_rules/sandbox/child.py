"""The child: ``python -I -m watchstep_rules.sandbox.child``. It shuts itself in, then runs a rule of the user's.

Requests come on descriptor 0, answers go out on what was descriptor 1. What the program prints goes nowhere.
"""

from __future__ import annotations

import os
import resource
from typing import Any

import numpy as np

from watchstep.block import Block, concatenate
from watchstep_rules.sandbox import program, wire
from watchstep_rules.sandbox.confinement import CPU_SECONDS, shut_files, shut_in
from watchstep_rules.sandbox.frames import pack, read_blocking, write_blocking


def main() -> None:
    """Serve until the parent closes its end."""
    incoming, outgoing = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    setup, _ = read_blocking(incoming)
    files = shut_files((incoming, outgoing))
    _warm_up()
    reached = shut_in(setup["memory_mb"], files)
    write_blocking(outgoing, pack(reached.model_dump()))
    try:
        setup, _ = read_blocking(incoming)
        rule = _tried(program.load, setup)
        _tell(outgoing, {} if not isinstance(rule, str) else {"error": rule})
        while True:
            request, parts = read_blocking(incoming)
            said = _tried(program.answer, rule, request, parts)
            _tell(outgoing, said if isinstance(said, dict) else {"error": said})
    except EOFError:
        return


def _tried(function: Any, *arguments: Any) -> Any:
    """What it gives, or what went wrong in one line."""
    try:
        return function(*arguments)
    except BaseException as error:  # noqa: BLE001 - whatever a program raises is an answer
        return program.told(error)


def _tell(outgoing: int, answer: dict[str, Any]) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    retire = used.ru_utime + used.ru_stime > CPU_SECONDS / 2
    write_blocking(outgoing, pack({**answer, "retire": retire}))


def _warm_up() -> None:
    """Load what is loaded when first used: its memory is not the program's."""
    import pyarrow as pa  # here: it starts a thread

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    block = wire.from_bytes(wire.to_bytes(Block.empty()))
    concatenate([block, block]).ordered()
    np.linalg.norm(np.ones((2, 2)))
    np.random.default_rng(0).normal()


if __name__ == "__main__":
    main()
