"""A child process as seen by the parent. It starts as a new interpreter, never as a fork of a process with threads."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from pydantic import ValidationError

from watchstep.errors import RuleError
from watchstep_rules.custom.sandbox.confinement import Isolation, why_not
from watchstep_rules.custom.sandbox.protocol import (
    SHORT,
    FrameError,
    FrameLimits,
    Parts,
    Reply,
    kept,
    pack,
    receive,
    send,
)

_START_SECONDS = 30.0
_LOAD_SECONDS = 10.0
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
"""The complete environment of a child: no credentials, and one thread and one heap for each library."""


class Runnable(Hashable, Protocol):
    """The program of a child. It is hashable, because children are cached by program."""

    @property
    def kind(self) -> str:
        """``python`` or ``sql``: the part of the package that the child loads before it is confined."""

    @property
    def memory_mb(self) -> int:
        """Memory that the child may use in addition to its libraries, in MiB."""

    @property
    def called(self) -> str:
        """Name of the program in errors."""

    def setup(self) -> dict[str, Any]:
        """Return the document that the child receives once it is confined."""

    def refusal(self, isolation: Isolation) -> str:
        """Return why the program must not run under this isolation; empty if it may run."""


@dataclass(frozen=True)
class SandboxedRule:
    """A user's Python rule.

    Attributes:
        class_name: name of the class.
        file: name of the source file.
        source: text of the source; empty for a module.
        module: module of an installed package; empty if there is a source.
        memory_mb: memory that the rule may use, in MiB.
    """

    class_name: str
    file: str
    source: str
    module: str
    memory_mb: int

    @property
    def kind(self) -> str:
        """See `Runnable`."""
        return "python"

    @property
    def called(self) -> str:
        """Name of the rule in errors."""
        return f"Python rule {self.class_name} of {self.file or self.module or 'its source'}"

    def setup(self) -> dict[str, Any]:
        """Return the class and its source."""
        fields = asdict(self)
        return {**fields, "class": fields.pop("class_name")}

    def refusal(self, isolation: Isolation) -> str:
        """Return why a rule must not run: it needs the isolation that the settings require."""
        return why_not(isolation)


class DeadError(RuleError):
    """The child ended or was killed."""


class StartError(DeadError):
    """No child could be started: the machine failed, not the program."""


class Child:
    """A process with one program, and its isolation."""

    def __init__(self, program: Runnable) -> None:
        """Start the process.

        Raises:
            StartError: the process does not start.
            DeadError: the process ended.
            RuleError: the isolation is insufficient, or the program failed.
        """
        self.program = program
        self.retired = False
        try:
            self._process = _STARTER.run(_popen)
        except OSError as error:
            raise StartError(
                f"{program.called}: no process can be started ({error})", "look at the limits of the service"
            ) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._outgoing, self._incoming = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._outgoing, False)
        os.set_blocking(self._incoming, False)
        try:
            self.isolation = self._confined()
            self.request(program.setup(), (), _LOAD_SECONDS)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs. An idle child may have been killed."""
        return self._process.poll() is None

    def request(
        self, request: dict[str, Any], parts: Parts, seconds: float, bounds: FrameLimits = SHORT
    ) -> Reply:
        """Send a request that has a single reply, and return the reply.

        Args:
            request: the document.
            parts: binary parts of the request.
            seconds: timeout after which the child is killed.
            bounds: size limits of the reply.

        Raises:
            DeadError: the child ended, or timed out and was killed.
            RuleError: the program failed.
        """
        deadline = time.monotonic() + seconds
        self.send(request, parts, deadline, seconds)
        return self.receive(deadline, seconds, bounds)

    def send(self, request: dict[str, Any], parts: Parts, deadline: float, seconds: float) -> None:
        """Send a message.

        Args:
            request: the document.
            parts: binary parts of the message.
            deadline: as `time.monotonic`.
            seconds: timeout that an error reports.

        Raises:
            DeadError: the child ended, or does not read and was killed.
        """
        try:
            send(self._outgoing, pack(request, parts), deadline)
        except FrameError as error:
            raise self._dead(error, seconds) from error

    def receive(self, deadline: float, seconds: float, bounds: FrameLimits = SHORT) -> Reply:
        """Read the next message.

        Args:
            deadline: as `time.monotonic`; the child is killed then.
            seconds: timeout that an error reports.
            bounds: size limits of the message.

        Raises:
            DeadError: the child ended, timed out and was killed, or sent an invalid message.
            RuleError: the program failed.
        """
        try:
            reply = receive(self._incoming, deadline, bounds)
        except FrameError as error:
            raise self._dead(error, seconds) from error
        self._check(reply.document)
        return reply

    def close(self) -> None:
        """Kill the process."""
        if self._process.returncode is None:  # else its process id may belong to another process by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
        self._close_pipes()

    def abandon(self) -> None:
        """Release a child that belongs to another process."""
        self._process.returncode = 0  # not a child of this process, so there is nothing to wait for
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _confined(self) -> Isolation:
        """Return the isolation of the child, which reports it before it receives the program."""
        try:
            request = {"kind": self.program.kind, "memory_mb": self.program.memory_mb}
            isolation = Isolation.model_validate(self.request(request, (), _START_SECONDS).document)
        except (DeadError, ValidationError) as error:
            raise StartError(
                f"{self.program.called}: its process does not start ({error})", "see if Python runs"
            ) from error
        reason = self.program.refusal(isolation)
        if reason:
            raise RuleError(
                f"{self.program.called}: {reason}", "see docs/guides/python-rules.md, 'Isolation'"
            )
        return isolation

    def _dead(self, error: FrameError, seconds: float) -> DeadError:
        reason = str(error)
        if reason == "took too long":
            reason = f"took more than {seconds:g} s and was ended"
        elif reason == "ended":
            reason = self._end()
        self.close()
        return DeadError(
            f"{self.program.called}: {reason}", "correct the rule; a new process is started after a pause"
        )

    def _check(self, document: Any) -> None:
        if not isinstance(document, dict):
            self.close()
            raise DeadError(f"{self.program.called}: sent what is not an answer", "correct the rule")
        self.retired = document.get("retire") is True
        error = document.get("error")
        if error is not None:
            raise RuleError(
                f"{self.program.called}: {kept(str(error)[:500])}", "correct the rule, or its parameters"
            )

    def _end(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its end"
        return f"its process died of {_signal(-code)}" if code < 0 else f"its process ended with {code}"


class _Starter:
    """A thread that starts children and runs until the process ends.

    The kernel kills a child when the *thread* that started it ends, not the process (``PR_SET_PDEATHSIG``). Threads that
    answer requests or evaluate runs are short-lived.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Run a function in the thread; return its result or raise its error."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="watchstep-children", daemon=True)
                self._thread.start()
        future: Future[subprocess.Popen[bytes]] = Future()
        self._waiting.put((work, future))
        return future.result()

    def _serve(self) -> None:
        while True:
            work, future = self._waiting.get()
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                future.set_exception(error)


def _popen() -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - this interpreter
        [sys.executable, "-I", "-B", "-m", "watchstep_rules.custom.child", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_ENVIRONMENT,
        cwd="/",
        close_fds=True,
        start_new_session=True,
    )


def _signal(number: int) -> str:
    """Return the name of a signal. Real-time signals have none, except the first and the last."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_STARTER = _Starter()


def _new_starter() -> None:
    """Replace the starter in a forked process, which does not have the thread."""
    global _STARTER  # noqa: PLW0603 - one for each process
    _STARTER = _Starter()


os.register_at_fork(after_in_child=_new_starter)
