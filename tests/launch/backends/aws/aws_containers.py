"""Processes of this machine in the place of containers, for `aws_stand_in`: signals, exit codes and output as a container's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import boto3

from tests.launch.backends.aws.aws_stand_in import REGION

_OWN = ("AWS_", "HOME", "LANG", "TMPDIR", "WATCHSTEP_SPILL", "TRITON_INTERPRET")
NO_SUCH_PROGRAM = 127


class Container:
    """One process, started at once; ``ended`` is called with its exit code once all that it wrote can be read."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        stream: tuple[str, str],
        ended: Callable[[int], None],
    ) -> None:
        self._group, self._stream = stream
        self._logs = boto3.client("logs", region_name=REGION)
        self._ended = ended
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(self._logs.exceptions.ResourceAlreadyExistsException):
            self._logs.create_log_group(logGroupName=self._group)
        self._logs.create_log_stream(logGroupName=self._group, logStreamName=self._stream)
        kept = {name: value for name, value in os.environ.items() if name.startswith(_OWN)}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        try:
            self._process = subprocess.Popen(
                list(command),
                env={**kept, "PATH": path, **environment},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._write(f"exec: {command[0]!r}: {error.strerror}")
        self._reader = threading.Thread(target=self._read)
        self._waiter = threading.Thread(target=self._wait)
        self._reader.start()
        self._waiter.start()

    def send(self, number: int) -> None:
        """Send a signal: SIGTERM to the first process, as container agents do, SIGKILL to all."""
        if self._process is None or self._process.returncode is not None:
            return
        # Popen.poll and Popen.send_signal would collect the exit code that the other thread waits for.
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                os.kill(self._process.pid, number)

    def join(self) -> None:
        """Wait until it has ended."""
        self._waiter.join()

    def _read(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            for line in self._process.stdout:
                self._write(line.rstrip(b"\n").decode(errors="replace"))

    def _wait(self) -> None:
        code = NO_SUCH_PROGRAM
        if self._process is not None:
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            with contextlib.suppress(ProcessLookupError):  # what it leaves behind ends with the container
                os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
        self._reader.join()
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
        self._ended(128 - code if code < 0 else code)

    def _write(self, line: str) -> None:
        event = {"timestamp": time.time_ns() // 1_000_000, "message": line or " "}
        self._logs.put_log_events(logGroupName=self._group, logStreamName=self._stream, logEvents=[event])
