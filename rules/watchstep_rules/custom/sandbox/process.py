"""One child, from the parent's side. It is started clean, never forked from a process with threads."""

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
"""All that it gets of an environment: no credentials, and one thread and one heap for each library."""


class Runnable(Hashable, Protocol):
    """What a child is started for. Children are kept by it, so it is hashable."""

    @property
    def kind(self) -> str:
        """``python`` or ``sql``: which part of the package the child loads before it is confined."""

    @property
    def memory_mb(self) -> int:
        """How much memory the child may take beyond what its libraries take, in MiB."""

    @property
    def called(self) -> str:
        """What to call it in an error."""

    def setup(self) -> dict[str, Any]:
        """What the child is told once it is confined."""

    def refusal(self, isolation: Isolation) -> str:
        """Why it must not run under this isolation; empty where it may."""


@dataclass(frozen=True)
class SandboxedRule:
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
    def kind(self) -> str:
        """See `Runnable`."""
        return "python"

    @property
    def called(self) -> str:
        """What to call it in an error."""
        return f"Python rule {self.class_name} of {self.file or self.module or 'its source'}"

    def setup(self) -> dict[str, Any]:
        """The class and where it comes from."""
        fields = asdict(self)
        return {**fields, "class": fields.pop("class_name")}

    def refusal(self, isolation: Isolation) -> str:
        """Programs need the isolation that the settings ask for."""
        return why_not(isolation)


class DeadError(RuleError):
    """The child ended, or was ended."""


class StartError(DeadError):
    """No child could be started: the machine is at fault, not what should have been run."""


class Child:
    """A process with one program, and how far it is shut off."""

    def __init__(self, program: Runnable) -> None:
        """Start it.

        Raises:
            StartError: it does not start.
            DeadError: it ends.
            RuleError: the isolation is not what is asked for, or the program is at fault.
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
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs; one that waits may have been killed."""
        return self._process.poll() is None

    def request(
        self, request: dict[str, Any], parts: Parts, seconds: float, bounds: FrameLimits = SHORT
    ) -> Reply:
        """Send a request and return the only reply.

        Args:
            request: the document.
            parts: bytes that go with it.
            seconds: after so long the child is killed.
            bounds: the longest reply.

        Raises:
            DeadError: it ended, or took too long and was killed.
            RuleError: the program is at fault.
        """
        deadline = time.monotonic() + seconds
        self.send(request, parts, deadline, seconds)
        return self.receive(deadline, seconds, bounds)

    def send(self, request: dict[str, Any], parts: Parts, deadline: float, seconds: float) -> None:
        """Send a message.

        Args:
            request: the document.
            parts: bytes that go with it.
            deadline: by `time.monotonic`.
            seconds: what to say that it took.

        Raises:
            DeadError: it ended, or does not read and was killed.
        """
        try:
            send(self._outgoing, pack(request, parts), deadline)
        except FrameError as error:
            raise self._dead(error, seconds) from error

    def receive(self, deadline: float, seconds: float, bounds: FrameLimits = SHORT) -> Reply:
        """Read its next message.

        Args:
            deadline: by `time.monotonic`; then it is killed.
            seconds: what to say that it took.
            bounds: the longest message.

        Raises:
            DeadError: it ended, took too long and was killed, or sends what is not a message.
            RuleError: the program is at fault.
        """
        try:
            reply = receive(self._incoming, deadline, bounds)
        except FrameError as error:
            raise self._dead(error, seconds) from error
        self._check(reply.document)
        return reply

    def close(self) -> None:
        """End it, whatever it does."""
        if self._process.returncode is None:  # else its process id may be another's by now
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
        try:
            request = {"kind": self.program.kind, "memory_mb": self.program.memory_mb}
            reached = Isolation.model_validate(self.request(request, (), _START_SECONDS).document)
        except (DeadError, ValidationError) as error:
            raise StartError(
                f"{self.program.called}: its process does not start ({error})", "see if Python runs"
            ) from error
        reason = self.program.refusal(reached)
        if reason:
            raise RuleError(
                f"{self.program.called}: {reason}", "see docs/guides/python-rules.md, 'Isolation'"
            )
        return reached

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
    """A thread that lives as long as the process and starts its children.

    The kernel kills a child when the *thread* that started it ends, not the process (``PR_SET_PDEATHSIG``). Threads that
    answer requests or evaluate runs come and go.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Run it in the thread, and return what it returns or raise what it raises."""
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
            except BaseException as error:  # noqa: BLE001 - raised where it was asked for
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
    """Its name; those of real time have none but the first and the last."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_STARTER = _Starter()


def _new_starter() -> None:
    """In a forked process there is no such thread."""
    global _STARTER  # noqa: PLW0603 - one for each process
    _STARTER = _Starter()


os.register_at_fork(after_in_child=_new_starter)
