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
)  # the last: O_TMPFILE's own bit
_PATH_ONLY = 0x200000  # O_PATH, which Landlock does not look at
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
    """One instruction: what, how many to skip if so and if not, and its constant."""

    code: int
    constant: int
    if_so: int = 0
    if_not: int = 0

    def packed(self) -> bytes:
        return struct.pack("=HBBI", self.code, self.if_so, self.if_not, self.constant)


def restrict(*, threads: bool) -> bool:
    """From now on every thread of this process is held to the list; whether the kernel agreed.

    `no_new_privileges` must have been called.

    Args:
        threads: whether more threads may be started. ``RLIMIT_NPROC`` does not bound those of root.
    """
    here = machine()
    if here is None:
        return False
    code = b"".join(step.packed() for step in program(_ARCHITECTURE[here], os.getpid(), threads=threads))
    steps = ctypes.create_string_buffer(code, len(code))
    filter_ = ctypes.create_string_buffer(
        struct.pack("@HP", len(code) // 8, ctypes.addressof(steps)), struct.calcsize("@HP")
    )
    try:
        return call("seccomp", _SET_FILTER, _ALL_THREADS, ctypes.cast(filter_, ctypes.c_void_p)) == 0
    except OSError:
        return False


def program(architecture: int, pid: int, *, threads: bool) -> list[_Step]:
    """The filter.

    Args:
        architecture: as the kernel numbers it; calls in another's convention end the process.
        pid: the only process that may be signalled.
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
    # Limits may be read (no new ones given: both halves of the pointer are zero), not set.
    steps += _if_call("prlimit64", [_argument(2), _Step(_EQUAL, 0, 0, 2), _argument(2, 4), *_if_one_of((0,))])
    for name in (
        "clone3",
        "openat2",
    ):  # their arguments cannot be looked at; libraries then take the older call
        steps += _if_call(name, [_refusal(errno.ENOSYS)])
    return [*steps, _refusal(errno.EPERM)]


def _if_call(name: str, then: list[_Step]) -> list[_Step]:
    """Instructions for one system call, which must all end in an answer."""
    place = number(name)
    return [] if place is None else [_Step(_EQUAL, place, 0, len(then)), *then]


def _argument(index: int, half: int = 0) -> _Step:
    return _Step(_LOAD, _ARGUMENTS_AT + 8 * index + half)


def _if_one_of(values: tuple[int, ...]) -> list[_Step]:
    chain = [_Step(_EQUAL, value, len(values) - place, 0) for place, value in enumerate(values)]
    return [*chain, _refusal(errno.EPERM), _Step(_RETURN, _ALLOW)]


def _if_bit(bit: int) -> list[_Step]:
    return [_Step(_ANY_BIT, bit, 1, 0), _refusal(errno.EPERM), _Step(_RETURN, _ALLOW)]


def _unless_any_bit(bits: int) -> list[_Step]:
    return [_Step(_ANY_BIT, bits, 0, 1), _refusal(errno.EPERM), _Step(_RETURN, _ALLOW)]


def _refusal(number_: int) -> _Step:
    return _Step(_RETURN, _ERRNO | number_)
