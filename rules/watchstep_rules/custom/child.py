"""The sandbox's child process: ``python -I -m watchstep_rules.custom.child PARENT``. It confines itself, then runs user code.

User code is a Python rule or SQL. Requests arrive on descriptor 0; responses leave on the original descriptor 1. Output that the
program prints is discarded.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from watchstep.format.block import Block, concatenate
from watchstep_rules.custom.sandbox import program, protocol
from watchstep_rules.custom.sandbox.confinement import CPU_SECONDS, AddressSpace, shut_files, shut_in
from watchstep_rules.custom.sandbox.kernel import die_with
from watchstep_rules.custom.sandbox.protocol import pack, read_blocking, write_blocking

_READABLE = {"sql": (Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))}
"""DuckDB reads its limits there whenever it opens a database, and aborts if it may not. No query can name a file."""

_Answer = tuple[dict[str, Any], bytes]


class _Server(Protocol):
    """Answers requests in the child."""

    def load(self, setup: dict[str, Any]) -> None:
        """Load the program."""

    def answers(self, request: dict[str, Any], parts: list[bytearray]) -> Iterator[_Answer]:
        """Answer a request with one or more messages."""


class _PythonRule:
    def load(self, setup: dict[str, Any]) -> None:
        self._rule = program.load(setup)

    def answers(self, request: dict[str, Any], parts: list[bytearray]) -> Iterator[_Answer]:
        yield program.answer(self._rule, request, parts)


def main(parent: int) -> None:
    """Serve requests until the parent closes the pipe or dies."""
    die_with(parent)
    incoming, outgoing = os.dup(0), os.dup(1)
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(devnull, descriptor)
    setup, _ = read_blocking(incoming)
    landlock_abi, space = shut_files((incoming, outgoing), _READABLE.get(setup["kind"], ()))
    _warm_up()
    server = _server(setup["kind"], incoming, outgoing, space)
    # DuckDB starts threads itself, and a query cannot. A rule class could start thousands.
    isolation = shut_in(setup["memory_mb"], landlock_abi, space, threads=setup["kind"] != "python")
    if setup["kind"] == "python":
        space.close()
    write_blocking(outgoing, pack(isolation.model_dump()))
    try:
        setup, _ = read_blocking(incoming)
        if _loads(server, setup, outgoing):
            while True:
                request, parts = read_blocking(incoming)
                _answer(server, request, parts, outgoing)
    except EOFError:
        return


def _server(kind: str, incoming: int, outgoing: int, space: AddressSpace) -> _Server:
    """Return the server of a kind, with all its libraries loaded."""
    if kind == "python":
        return _PythonRule()
    from watchstep_rules.custom.sql.server import SqlServer  # imported here: DuckDB may be missing

    return SqlServer(incoming, outgoing, space)


def _loads(server: _Server, setup: dict[str, Any], outgoing: int) -> bool:
    try:
        server.load(setup)
    except BaseException as error:  # noqa: BLE001 - any error of a program is a reply
        _reply(outgoing, {"error": program.error_text(error)})
        return False
    _reply(outgoing, {})
    return True


def _answer(server: _Server, request: dict[str, Any], parts: list[bytearray], outgoing: int) -> None:
    try:
        for document, payload in server.answers(request, parts):
            _reply(outgoing, document, payload)
    except BaseException as error:  # noqa: BLE001 - any error of a program is a reply
        _reply(outgoing, {"error": program.error_text(error)})


def _reply(outgoing: int, document: dict[str, Any], payload: bytes = b"") -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    retire = document.get("retire") is True or used.ru_utime + used.ru_stime > CPU_SECONDS / 2
    write_blocking(outgoing, pack({**document, "retire": retire}, [payload] if payload else ()))


def _warm_up() -> None:
    """Load everything that is loaded lazily, so that its memory does not count against the program."""
    import pyarrow as pa  # imported here: it starts a thread

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    block = protocol.from_bytes(protocol.to_bytes(Block.empty()))
    concatenate([block, block]).ordered()
    np.linalg.norm(np.ones((2, 2)))
    np.random.default_rng(0).normal()


if __name__ == "__main__":
    main(int(sys.argv[1]))
