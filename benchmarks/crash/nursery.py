"""The harness's start program: it has imported what production's processes need, and forks one when it is told to.

``python -m benchmarks.crash.nursery FOLDER HARNESS``. A child runs the very command that docker-compose.yml names, by the
same entry point as its console script; it only has a listener at the service's points, and knows the harness's backend.
Reads lines of JSON: ``{"name", "command", "folder"}``; writes ``{"name", "pid"}`` for each child that it has started and
``{"name", "pid", "status"}`` for each that has ended. When its input ends, so do its children.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from benchmarks.crash.clock import follow_jumps
from benchmarks.crash.counting import NAME, CountingBackend
from benchmarks.crash.listener import PointListener

_IMPORTED_ONCE = (
    "celery.apps.worker", "celery.bin.celery", "celery.bin.worker", "celery.bin.beat", "celery.concurrency.prefork",
    "celery.worker.consumer", "celery.fixups.django", "celery.app.amqp", "kombu.transport.redis", "psycopg", "redis",
    "pyarrow.parquet", "sqlalchemy.dialects.postgresql.psycopg", "alembic.command", "uvicorn.main",
    "uvicorn.protocols.http.auto", "uvicorn.loops.auto", "uvicorn.lifespan.on", "watchstep_services.api.app", "watchstep_services.cli.main",
    "watchstep_services.scheduler.sweep", "watchstep_services.scheduler.work",
    "watchstep_services.scheduler.production",
)  # fmt: skip


def main() -> None:
    """Serve until the input ends."""
    folder, harness = Path(sys.argv[1]), sys.argv[2]
    for name in _IMPORTED_ONCE:
        importlib.import_module(name)
    os.register_at_fork(after_in_child=_name_connections)
    children: dict[int, str] = {}
    pending = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.02)
        if readable:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if not pid:
                    _child(order, folder, harness)
                children[pid] = order["name"]
                _say(name=order["name"], pid=pid)
        _bury(children)
    for pid in children:
        os.killpg(pid, signal.SIGKILL)


def _say(**facts: Any) -> None:
    os.write(1, json.dumps(facts).encode() + b"\n")


def _bury(children: dict[int, str]) -> None:
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _say(name=children.pop(pid), pid=pid, status=os.waitstatus_to_exitcode(status))


def _name_connections() -> None:
    """So that the database knows which process wrote a row."""
    os.environ["PGAPPNAME"] = f"pid-{os.getpid()}"


def _child(order: dict[str, Any], folder: Path, harness: str) -> None:
    code = 1
    try:
        _name_connections()
        os.setsid()
        place = Path(order["folder"])
        place.mkdir(exist_ok=True)
        os.chdir(place)
        log = os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        code = _run(order["command"], folder, harness)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:  # noqa: BLE001 - it ends here, and its log says why
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(command: list[str], folder: Path, harness: str) -> int:
    follow_jumps(folder)
    from watchstep_services.core import failpoints
    from watchstep_services.scheduler import production

    made = production.production_service

    def with_backend(*arguments: Any) -> Any:
        service = made(*arguments)
        return replace(service, backends={**service.backends, NAME: CountingBackend(harness)})

    setattr(production, "production_service", with_backend)  # noqa: B010 - whoever imports it from now on gets this one
    with ExitStack() as stack:
        stack.enter_context(failpoints.listening(PointListener(folder, harness)))
        sys.argv = list(command)
        # A worker that executes its program again would become a nursery. It ends instead, and its supervisor starts it.
        setattr(os, "execv", _end_instead)  # noqa: B010 - whoever calls it from now on
        (script,) = (found for found in entry_points(group="console_scripts") if found.name == command[0])
        time.tzset()
        return int(script.load()() or 0)


def _end_instead(*_command: Any) -> None:
    os._exit(1)


if __name__ == "__main__":
    main()
