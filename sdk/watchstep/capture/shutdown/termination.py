"""Writes remaining data before SIGTERM or ``os._exit`` ends a process that records.

A signal may arrive while the main thread is in a call that does not return, e.g. a collective, and must then end
the process as it would without Watchstep. So the interpreter notifies a separate thread of the signal
through a socket. The thread writes the remaining data within the time limit, and then executes the signal's default
action. It does not depend on the main thread, which is blocked meanwhile: the time is bounded regardless of its locks.

The first process of a PID namespace, often a container's program, has no default action: the kernel drops signals that it does not
handle. Such a process continues, with and without Watchstep. Because SIGKILL is likely to follow, the available data
is written at once. Recording continues until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, Protocol

from watchstep.format.documents import TERMINATED

_EXIT_SECONDS = 2.0
_MAIN_WAIT_SECONDS = 0.1
_LEAVING, _WITHDRAWN = 0, 255  # no signals have these numbers
_ENDING_SECONDS = 1.0
_FIRST = 1  # id of the first process of a PID namespace, in there
_SENDER = struct.Struct("3i")  # process, user, group


class Ends(Protocol):
    """Operations on the recordings of a process."""

    def within(self, seconds: float, reason: str, *, failed: bool) -> None:
        """End all recordings within some seconds."""

    def bound(self) -> float:
        """Return the seconds by which SIGTERM may be deferred."""

    def noted(self, reason: str) -> None:
        """Write the available data without a wait: the program was requested to end, and handles that itself."""

    def survived(self) -> None:
        """Handle the return of the program's handler: the program continues."""

    def urged(self) -> None:
        """Write the available data without a wait: the program may be killed soon, and continues until then."""


class Termination:
    """Handles the termination of one process. It is created on the thread that starts recording."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._pid = os.getpid()
        self._has_default = self._pid != _FIRST
        self._receiver, self._sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sender.setblocking(False)
        self._tells_sender = hasattr(socket, "SO_PASSCRED")
        if self._tells_sender:
            self._receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._handler = self._signalled  # one object: it is compared with what is installed
        self._main_waits = threading.Event()
        self._leaving = threading.Event()
        self._exit_code = 0
        self._exit = os._exit
        self._exit_hook = self._exit_process
        os._exit = self._exit_hook
        self._took_sigterm = False
        self._listener = threading.Thread(target=self._listen, name="watchstep-end", daemon=True)
        self._listener.start()

    def take_sigterm(self) -> None:
        """Handle SIGTERM. A handler of the program is still called."""
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGTERM)
        if handler is self._handler or handler in {signal.SIG_IGN, None}:
            return
        self._previous = handler if callable(handler) else None
        signal.signal(signal.SIGTERM, self._handler)
        self._took_sigterm = True
        if self._previous is None and self._tells_sender:
            taken = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
            if taken not in {-1, self._sender.fileno()}:
                signal.set_wakeup_fd(taken)  # an event loop's: only the main thread receives the signal

    @property
    def calls_program(self) -> bool:
        """Return whether the program has a handler of SIGTERM."""
        return self._previous is not None

    def withdraw(self) -> None:
        """Restore the original handlers after the last recording, unless the program has replaced them."""
        self._restore_exit()
        on_main = threading.current_thread() is threading.main_thread()
        if on_main or not self._took_sigterm:  # else the interpreter still tells it of signals
            self._send(_WITHDRAWN)
            self._listener.join(_ENDING_SECONDS)

    def _restore_exit(self) -> None:
        if os._exit is self._exit_hook:
            os._exit = self._exit
        if threading.current_thread() is not threading.main_thread():
            return
        taken = signal.set_wakeup_fd(-1)
        if taken not in {-1, self._sender.fileno()}:
            signal.set_wakeup_fd(taken)
        if signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)

    def forget(self) -> None:
        """Detach in a forked child, which ends as without a recording."""
        self._restore_exit()
        self._close()

    def _close(self) -> None:
        self._sender.close()
        self._receiver.close()

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal on the main thread, when it next runs Python."""
        if self._previous is not None:
            self._ends.noted(TERMINATED)
            self._previous(number, frame)
            self._ends.survived()
            return
        if os.getpid() == self._pid:
            if not self._has_default:
                self._ends.urged()
                return
            self._main_waits.set()
            self._send(number)
            time.sleep(self._ends.bound() + 1.0)  # the other thread ends the process before
        take_default_action(number)

    def _exit_process(self, status: int) -> NoReturn:
        if os.getpid() == self._pid:
            self._exit_code = status
            self._send(_LEAVING)
            self._leaving.wait(_EXIT_SECONDS + 0.5)
        self._exit(status)

    def _send(self, number: int) -> None:
        with contextlib.suppress(OSError):  # full: it has already been notified
            self._sender.send(bytes([number]))

    def _listen(self) -> None:
        while True:
            try:
                number = self._receive()
            except OSError:
                return
            if number == signal.SIGTERM:
                ours = signal.getsignal(signal.SIGTERM) is self._handler
                if not ours and not self._main_waits.is_set():
                    continue  # the program has put its own handler there since, and sees to it
                if not self._has_default:
                    self._ends.urged()
                    continue
                self._main_waits.wait(
                    _MAIN_WAIT_SECONDS
                )  # so that it records nothing meanwhile, if it runs Python
                self._write_rest(self._ends.bound(), TERMINATED, failed=True)
                take_default_action(number)
            elif number == _WITHDRAWN:
                self._close()
                self._leaving.set()
                return
            elif number == _LEAVING:
                code = self._exit_code
                self._write_rest(_EXIT_SECONDS, f"os._exit({code})", failed=code != 0)
                self._leaving.set()

    def _receive(self) -> int:
        """Return the next number sent by this process itself: a child between fork and exec shares the socket."""
        while True:
            data, ancillary, _, _ = self._receiver.recvmsg(16, socket.CMSG_SPACE(_SENDER.size))
            senders = [_SENDER.unpack(data)[0] for _, kind, data in ancillary if len(data) == _SENDER.size]
            if data and (not self._tells_sender or senders == [self._pid]):
                return data[0]

    def _write_rest(self, seconds: float, reason: str, *, failed: bool) -> None:
        def work() -> None:
            self._ends.within(0.8 * seconds, reason, failed=failed)

        worker = threading.Thread(target=work, name="watchstep-last", daemon=True)
        try:
            worker.start()
        except RuntimeError:
            return  # the interpreter is being torn down: what is open has been closed by now
        worker.join(seconds)


@contextlib.contextmanager
def deferred_sigterm(
    hurry: Callable[[], None], *, repeated: Callable[[], bool] = lambda: False, ends: bool = False
) -> Iterator[None]:
    """Defer a SIGTERM with a handler of the program for the block. The handler is called after the block.

    A handler may raise, or close the hook itself. Halfway through a close the former loses the remaining data, and the latter
    waits for itself. If the program has already been notified, e.g. because its handler is running, it is not notified again.
    Without a handler of the program, and on threads other than the main thread, this does nothing.

    Args:
        hurry: Called on a SIGTERM; must not wait.
        repeated: Whether the program has already been notified.
        ends: Whether the program ends directly after this, so that it is not notified.
    """
    handler = _program_handler()
    if handler is None:
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    again = repeated()

    def defer(number: int, frame: FrameType | None) -> None:
        hurry()
        if not (again or ends or _is_running(handler, frame)):
            came[:] = [(number, frame)]

    signal.signal(signal.SIGTERM, defer)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is defer:
            signal.signal(signal.SIGTERM, handler)
        if came:
            handler(*came[0])


def _program_handler() -> Callable[[int, FrameType | None], Any] | None:
    """Return the program's handler of SIGTERM; None without one, or on another thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler):
        return None
    owner = getattr(handler, "__self__", None)
    return None if isinstance(owner, Termination) and not owner.calls_program else handler


def _is_running(handler: Any, frame: FrameType | None) -> bool:
    """Return whether a handler is in the call stack of a frame."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def take_default_action(number: int) -> None:
    """End this process by a signal from any thread as if it had no handler, except for the first process of a PID namespace."""
    ctypes.pythonapi.PyOS_setsig.argtypes = [ctypes.c_int, ctypes.c_void_p]
    ctypes.pythonapi.PyOS_setsig.restype = ctypes.c_void_p
    ctypes.pythonapi.PyOS_setsig(number, None)  # signal.signal works only on the main thread
    os.kill(os.getpid(), number)
