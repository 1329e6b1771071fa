"""What is done before SIGTERM or ``os._exit`` ends a process that records.

A signal may come while the main thread is inside a call that does not return, a collective for instance, and must end
the process then as it would have without Watchstep. So a thread of its own is told of the signal by the interpreter
itself, through a socket; it has what is left written, for as long as that may take, and then takes the signal's default
action. It needs nothing of the main thread, which stands still meanwhile: whatever locks that holds, the time is bounded.

The first process of a PID namespace, as a container's program often is, has no default action: the kernel drops what it does not
handle, whoever sends it. Such a process goes on without Watchstep, and so it does with it. As SIGKILL is likely to follow, what is there
is written at once; it goes on being recorded until then.
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
_STANDING_SECONDS = 0.1
_LEAVING, _WITHDRAWN = 0, 255  # no signals have these numbers
_ENDING_SECONDS = 1.0
_FIRST = 1  # id of the first process of a PID namespace, in there
_SENDER = struct.Struct("3i")  # process, user, group


class Ends(Protocol):
    """What a process does about its recordings."""

    def within(self, seconds: float, reason: str, *, failed: bool) -> None:
        """End them all within some seconds."""

    def bound(self) -> float:
        """How many seconds SIGTERM may be put off."""

    def noted(self, reason: str) -> None:
        """The program was told to end, and will see to it itself: write what is there, wait for nothing."""

    def survived(self) -> None:
        """The program's handler returned: the program goes on."""

    def urged(self) -> None:
        """The program may be killed soon, and goes on until then: write what is there, wait for nothing."""


class Termination:
    """Stands between one process and its end. Made on the thread that starts to record."""

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
        self._standing = threading.Event()
        self._leaving = threading.Event()
        self._exit_code = 0
        self._exit = os._exit
        self._exit_hook = self._exit_process
        os._exit = self._exit_hook
        self._took_sigterm = False
        self._listener = threading.Thread(target=self._listen, name="watchstep-end", daemon=True)
        self._listener.start()

    def take_sigterm(self) -> None:
        """Be told of SIGTERM, where the program has left it alone, or has a handler, which is called as before."""
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
                signal.set_wakeup_fd(taken)  # an event loop's: only the main thread will hear of the signal

    @property
    def calls_program(self) -> bool:
        """Whether SIGTERM is the program's to handle, which had a handler before."""
        return self._previous is not None

    def withdraw(self) -> None:
        """Nothing is recorded any more: leave everything as it was found, where it is still ours."""
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
        """This is a forked child: it ends as if nothing had been recorded."""
        self._restore_exit()
        self._close()

    def _close(self) -> None:
        self._sender.close()
        self._receiver.close()

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        """On the main thread, as soon as that runs Python again."""
        if self._previous is not None:
            self._ends.noted(TERMINATED)
            self._previous(number, frame)
            self._ends.survived()
            return
        if os.getpid() == self._pid:
            if not self._has_default:
                self._ends.urged()
                return
            self._standing.set()
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
        with contextlib.suppress(OSError):  # full: it is told already
            self._sender.send(bytes([number]))

    def _listen(self) -> None:
        while True:
            try:
                number = self._receive()
            except OSError:
                return
            if number == signal.SIGTERM:
                ours = signal.getsignal(signal.SIGTERM) is self._handler
                if not ours and not self._standing.is_set():
                    continue  # the program has put its own handler there since, and sees to it
                if not self._has_default:
                    self._ends.urged()
                    continue
                self._standing.wait(
                    _STANDING_SECONDS
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
        """The next number that this process sent itself: a child between fork and exec shares the socket."""
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
    """Keep a SIGTERM that the program handles from interrupting what is done in here; the handler is called after it.

    A handler may raise, or close the hook itself: halfway through a close the one loses what is left to write, and the other
    waits for itself. Where the program has been told to end, for its handler runs already, say, it is not told again.
    Without a handler of the program's this does nothing, and so it does on other threads than the main one.

    Args:
        hurry: called when a SIGTERM comes; must not wait.
        repeated: whether the program has been told before.
        ends: the program ends right after this, so that nobody is left to be told.
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
    """What the program does about SIGTERM; None where it leaves that to the system or to the recorder, or on another thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler):
        return None
    owner = getattr(handler, "__self__", None)
    return None if isinstance(owner, Termination) and not owner.calls_program else handler


def _is_running(handler: Any, frame: FrameType | None) -> bool:
    """Whether a handler is among the calls that a frame is in."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def take_default_action(number: int) -> None:
    """End this process by a signal, from any thread, as if nobody had handled it; not the first of a PID namespace."""
    ctypes.pythonapi.PyOS_setsig.argtypes = [ctypes.c_int, ctypes.c_void_p]
    ctypes.pythonapi.PyOS_setsig.restype = ctypes.c_void_p
    ctypes.pythonapi.PyOS_setsig(number, None)  # signal.signal works on the main thread alone
    os.kill(os.getpid(), number)
