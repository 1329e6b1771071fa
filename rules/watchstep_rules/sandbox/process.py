"""One child, from the parent's side. It is started clean, never forked from a process with threads."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from watchstep.errors import RuleError
from watchstep_rules.sandbox.frames import FrameError, kept, pack, receive, send
from watchstep_rules.sandbox.isolation import Isolation, why_not

_START_SECONDS = 30.0
_LOAD_SECONDS = 10.0
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
"""All that it gets of an environment: no credentials, and one thread for each library."""


@dataclass(frozen=True)
class Program:
    """A rule of the user's.

    Attributes:
        class_name: the class.
        file: what its source was called.
        source: its text; empty where it is a module's.
        module: the module, of an installed package; empty where there is a source.
        memory_mb: memory that it may take, in MiB.
    """

    class_name: str
    file: str
    source: str
    module: str
    memory_mb: int

    @property
    def called(self) -> str:
        """What to call it in an error."""
        return f"Python rule {self.class_name} of {self.file or self.module or 'its source'}"


class DeadError(RuleError):
    """The child ended, or was ended."""


class Child:
    """A process with one program, and how far it is shut off."""

    def __init__(self, program: Program) -> None:
        """Start it.

        Raises:
            DeadError: it does not start, or ends.
            RuleError: the isolation is not what is asked for, or the program is at fault.
        """
        self.program = program
        self.retired = False
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-m", "watchstep_rules.sandbox.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_ENVIRONMENT,
            cwd="/",
            close_fds=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._outgoing, self._incoming = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._outgoing, False)
        os.set_blocking(self._incoming, False)
        try:
            self.isolation = self._confined()
            self._check(self._exchange(self._setup(), (), _LOAD_SECONDS))
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether it still runs; one that waits may have been killed."""
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], parts: tuple[bytes, ...], seconds: float) -> dict[str, Any]:
        """One answer.

        Raises:
            DeadError: it ended, or took too long and was killed.
            RuleError: the program is at fault.
        """
        return self._check(self._exchange(request, parts, seconds))

    def close(self) -> None:
        """End it, whatever it does."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._close_pipes()

    def abandon(self) -> None:
        """Let go of another process's child."""
        self._process.returncode = 0  # nothing to wait for here
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _confined(self) -> Isolation:
        """What it reached; said before it is told anything of the program."""
        said = self._exchange({"memory_mb": self.program.memory_mb}, (), _START_SECONDS)
        try:
            reached = Isolation.model_validate(said)
        except ValidationError as error:
            raise DeadError(
                f"{self.program.called}: its process does not start", "see if Python runs"
            ) from error
        reason = why_not(reached)
        if reason:
            raise RuleError(f"{self.program.called}: {reason}", "see docs/python-rules.md, 'Isolation'")
        return reached

    def _setup(self) -> dict[str, Any]:
        held = asdict(self.program)
        return {**held, "class": held.pop("class_name")}

    def _exchange(self, document: dict[str, Any], parts: tuple[bytes, ...], seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        try:
            send(self._outgoing, pack(document, parts), deadline)
            return receive(self._incoming, deadline)
        except FrameError as error:
            reason = str(error)
            if reason == "took too long":
                reason = f"took more than {seconds:g} s and was ended"
            elif reason == "ended":
                reason = self._end()
            self.close()
            raise DeadError(
                f"{self.program.called}: {reason}", "correct the rule; a new process is started after a pause"
            ) from error

    def _check(self, said: Any) -> dict[str, Any]:
        if not isinstance(said, dict):
            raise DeadError(f"{self.program.called}: sent what is no answer", "correct the rule")
        self.retired = said.get("retire") is True
        error = said.get("error")
        if error is not None:
            raise RuleError(
                f"{self.program.called}: {kept(str(error)[:500])}", "correct the rule, or its parameters"
            )
        return said

    def _end(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its end"
        return f"its process died of {_signal(-code)}" if code < 0 else f"its process ended with {code}"


def _signal(number: int) -> str:
    """Its name; those of real time have none but the first and the last."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
