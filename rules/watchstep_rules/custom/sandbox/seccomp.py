"""A seccomp filter: the kernel checks every system call of the process with a classic BPF program.

Calls that are not on the list are refused with EPERM: sockets, processes, programs, tracing, mounting, other processes' memory and
signals, io_uring, and calls that later kernels add. See https://docs.kernel.org/userspace-api/seccomp_filter.html.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from dataclasses import dataclass

from watchstep_rules.custom.sandbox.kernel import ALLOWED, call, machine, number

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_SET_FILTER, _ALL_THREADS = 1, 1
_CLONE_THREAD = 0x00010000
_WRITING = (
    os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | 0x400000
)  # the last: the bit of O_TMPFILE itself
_PATH_ONLY = 0x200000  # O_PATH, which Landlock does not check
_FCNTL = (0, 1, 2, 3, 4, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC
_IOCTL = (
    0x5401,
    0x5413,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX


@dataclass(frozen=True)
class _Step:
    """A BPF instruction: code, constant, and the number of instructions to skip if the test is true or false."""

    code: int
    constant: int
    if_so: int = 0
    if_not: int = 0

    def packed(self) -> bytes:
        return struct.pack("=HBBI", self.code, self.if_so, self.if_not, self.constant)


def restrict(*, threads: bool) -> bool:
    """Apply the filter to every thread of this process; return whether the kernel accepted.

    Call `no_new_privileges` before.

    Args:
        threads: whether more threads may be started. ``RLIMIT_NPROC`` does not limit the threads of root.
    """
    architecture = machine()
    if architecture is None:
        return False
    code = b"".join(
        step.packed() for step in program(_ARCHITECTURE[architecture], os.getpid(), threads=threads)
    )
    steps = ctypes.create_string_buffer(code, len(code))
    filter_ = ctypes.create_string_buffer(
        struct.pack("@HP", len(code) // 8, ctypes.addressof(steps)), struct.calcsize("@HP")
    )
    try:
        return call("seccomp", _SET_FILTER, _ALL_THREADS, ctypes.cast(filter_, ctypes.c_void_p)) == 0
    except OSError:
        return False


def program(architecture: int, pid: int, *, threads: bool) -> list[_Step]:
    """Build the filter.

    Args:
        architecture: the kernel's number of the architecture. A call in the convention of another architecture kills the process.
        pid: the only process that may receive signals.
        threads: whether more threads may be started.
    """
    steps = [
        _Step(_LOAD, _ARCHITECTURE_AT),
        _Step(_EQUAL, architecture, 1, 0),
        _Step(_RETURN, _KILL),
        _Step(_LOAD, _NUMBER_AT),
    ]
    for name in ALLOWED:
        steps += _if_call(name, [_Step(_RETURN, _ALLOW)])
    for name, argument in (("open", 1), ("openat", 2)):
        steps += _if_call(name, [_argument(argument), *_unless_any_bit(_WRITING | _PATH_ONLY)])
    if threads:
        steps += _if_call("clone", [_argument(0), *_if_bit(_CLONE_THREAD)])
    steps += _if_call("fcntl", [_argument(1), *_if_one_of(_FCNTL)])
    steps += _if_call("ioctl", [_argument(1), *_if_one_of(_IOCTL)])
    for name in ("kill", "tgkill"):
        steps += _if_call(name, [_argument(0), *_if_one_of((pid,))])
    # Limits may be read (no new limits: both halves of the pointer are zero), not set.
    steps += _if_call("prlimit64", [_argument(2), _Step(_EQUAL, 0, 0, 2), _argument(2, 4), *_if_one_of((0,))])
    for name in (
        "clone3",
        "openat2",
    ):  # a filter cannot inspect their arguments; libraries fall back to the older call
        steps += _if_call(name, [_refusal(errno.ENOSYS)])
    return [*steps, _refusal(errno.EPERM)]


def _if_call(name: str, then: list[_Step]) -> list[_Step]:
    """Return the instructions for one system call. Every path must end in a return."""
    call_number = number(name)
    return [] if call_number is None else [_Step(_EQUAL, call_number, 0, len(then)), *then]


def _argument(index: int, half: int = 0) -> _Step:
    return _Step(_LOAD, _ARGUMENTS_AT + 8 * index + half)


def _if_one_of(values: tuple[int, ...]) -> list[_Step]:
    chain = [_Step(_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)]
    return [*chain, _refusal(errno.EPERM), _Step(_RETURN, _ALLOW)]


def _if_bit(bit: int) -> list[_Step]:
    return [_Step(_ANY_BIT, bit, 1, 0), _refusal(errno.EPERM), _Step(_RETURN, _ALLOW)]


def _unless_any_bit(bits: int) -> list[_Step]:
    return [_Step(_ANY_BIT, bits, 0, 1), _refusal(errno.EPERM), _Step(_RETURN, _ALLOW)]


def _refusal(error_number: int) -> _Step:
    return _Step(_RETURN, _ERRNO | error_number)
