"""A cluster with a command of its own: ``COMMAND PORT submit|status|stop|kill|logs|jobs|find …``.

Its scheduler is in the test's process, and the command only carries a call to it: tests make hundreds of calls.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

from watchstep_launch.backend import JobHandle, Launch, SubmissionRejectedError
from watchstep_launch.backends.local.backend import Local

CARRIER = """
import json, os, socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as link, link.makefile("rwb") as stream:
    stream.write(json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode() + b"\\n")
    stream.flush()
    code = int(stream.readline())
    (sys.stderr if code == 1 else sys.stdout).buffer.write(stream.read())
sys.exit(code)
"""


@contextmanager
def running_cluster(folder: Path) -> Iterator[str]:
    """Run a scheduler that keeps its jobs in a folder; yields the beginning of its command lines.

    A file ``down`` or ``expired`` in the folder makes all calls fail.
    """

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            code, output = answer(folder, *json.loads(self.rfile.readline()))
            self.wfile.write(b"%d\n%b" % (code, output))

    carrier = folder / "carrier.py"
    carrier.write_text(CARRIER)
    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"{sys.executable} -I -S {carrier} {server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def answer(home: Path, arguments: list[str], folder: str, environment: dict[str, str]) -> tuple[int, bytes]:
    """The exit code and the output of a call; those of code 1 are errors."""
    verb, *rest = arguments
    local = Local(folder=home / "jobs")
    if (home / "down").exists():
        return 1, b"cluster unreachable\n"
    if (home / "expired").exists():
        return 1, b"your ticket has expired\n"
    known = home / "known.json"
    table: dict[str, Any] = json.loads(known.read_text()) if known.exists() else {}
    if verb == "submit":
        name, *command = rest
        try:
            job = local.submit(Launch(tuple(command), environment, Path(folder)))
        except SubmissionRejectedError as error:
            return 1, f"{error.what}\n".encode()
        table[job.id] = {"name": name, **job.as_data()}
        known.write_text(json.dumps(table))
        return 0, f"submitted job {job.id}\n".encode()
    if verb == "jobs":
        return 0, "".join(f"{job_id}\n" for job_id in table).encode()
    if verb == "find":
        return 0, "".join(f"{job_id}\n" for job_id, job in table.items() if job["name"] == rest[0]).encode()
    if rest[0] not in table:
        return 3, b"no such job\n"
    return 0, act(local, verb, JobHandle.from_data(table[rest[0]]))


def act(local: Local, verb: str, job: JobHandle) -> bytes:
    if verb == "logs":
        return local.logs(job).data
    status = {"status": local.status, "stop": local.stop, "kill": local.kill}[verb](job)
    return f"state={status.state.upper()} started={job.identity['start_ticks']} code={status.exit_code}\n".encode()
