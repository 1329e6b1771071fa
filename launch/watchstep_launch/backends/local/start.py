"""Starting a local job through its supervisor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from watchstep.errors import NotFoundError
from watchstep.platform.process import ProcessIdentity
from watchstep_launch.backend import Launch
from watchstep_launch.backends.local import supervisor
from watchstep_launch.backends.local.records import Records
from watchstep_launch.errors import SubmissionRejectedError

_KEEPER = (sys.executable, "-I", "-S", "-X", "utf8", supervisor.__file__)


def start(launch: Launch, log: Path, records: Records) -> ProcessIdentity:
    """Start a program; it is known to the records when this returns.

    Raises:
        SubmissionRejectedError: it cannot be started; nothing of it runs.
    """
    records.prepare()
    asked = {
        "command": launch.command,
        "environment": {**os.environ, **launch.environment, **launch.secrets},
        "folder": str(launch.folder),
        "log": str(log),
    }
    watched = subprocess.Popen(  # noqa: S603 - this package's own script
        _KEEPER,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,
        encoding="utf-8",
    )
    # Reaped by whoever started it, and by init should that end first.
    threading.Thread(target=watched.wait, name=f"reaper-{watched.pid}", daemon=True).start()
    assert watched.stdin is not None
    assert watched.stdout is not None
    with watched.stdin, watched.stdout:
        return _settle(watched.stdin, watched.stdout, (launch, asked, log, records))


def _settle(
    said: IO[str], heard: IO[str], what: tuple[Launch, dict[str, Any], Path, Records]
) -> ProcessIdentity:
    launch, asked, log, records = what
    try:
        said.write(json.dumps(asked) + "\n")
        said.flush()
        answer = json.loads(heard.readline() or '{"error": "its supervisor ended"}')
        if "error" in answer:
            raise SubmissionRejectedError(
                f"command {launch.command[0]!r} in {launch.folder}: cannot be started ({answer['error']})",
                "check the program's name, the folder and the log's path",
            )
        # The supervisor does not let the process go before it is told where to write: its entry in /proc stays.
        identity = ProcessIdentity.of(int(answer["pid"]))
        records.keep(identity, log)
        said.write(f"{records.exit_of(identity)}\n")
        said.flush()
    except (OSError, NotFoundError) as error:
        raise SubmissionRejectedError(
            f"command {launch.command[0]!r}: its record in {records.folder} cannot be written ({error})",
            "see to the space and the permissions of that folder",
        ) from error
    return identity
