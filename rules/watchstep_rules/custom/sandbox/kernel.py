"""Linux system calls that have no Python function: numbers, calls through the C library, and Landlock.

Numbers are for x86_64 and aarch64, from ``arch/x86/entry/syscalls/syscall_64.tbl`` and ``include/uapi/asm-generic/unistd.h``; None if
an architecture lacks the call. Landlock permanently removes a process's access to files and ports, see
https://docs.kernel.org/userspace-api/landlock.html.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
from collections.abc import Sequence
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522


def call(name: str, *arguments: int | ctypes.c_void_p | None) -> int:
    """Make a system call.

    Raises:
        OSError: the kernel refuses the call or lacks it.
    """
    call_number = number(name)
    if call_number is None:
        raise OSError(38, f"{name}: not known on this machine")
    c_arguments = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = int(_LIBC.syscall(ctypes.c_long(call_number), *c_arguments))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def die_with(parent: int) -> bool:
    """Have the kernel kill this process when the thread that started it ends; return whether the kernel accepted.

    A parent that ended before the call sends no signal, so this function compares `os.getppid` afterwards and exits the
    process if the parent changed.

    Args:
        parent: process id of the parent.
    """
    accepted = hasattr(_LIBC, "prctl") and _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(0)
    return accepted


def no_new_privileges() -> bool:
    """Stop programs that this process starts from gaining privileges; return whether the kernel accepted."""
    return _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def not_dumpable() -> bool:
    """Disable core dumps and inspection by other processes of this user; return whether the kernel accepted."""
    return _prctl(_PR_SET_DUMPABLE, 0)


def drop_capabilities() -> bool:
    """Drop all superuser capabilities; return whether the kernel accepted."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    no_capabilities = (ctypes.c_uint32 * 6)()
    try:
        call("capset", _address_of_words(header), _address_of_words(no_capabilities))
    except OSError:
        return False
    return True


def _prctl(option: int, value: int) -> bool:
    zero = ctypes.c_ulong(0)
    return bool(_LIBC.prctl(option, ctypes.c_ulong(value), zero, zero, zero) == 0)


def _address_of_words(data: ctypes.Array[ctypes.c_uint32]) -> ctypes.c_void_p:
    return ctypes.cast(data, ctypes.c_void_p)


_MACHINES = ("x86_64", "aarch64")
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "access": (21, None),
    "arch_prctl": (158, None),
    "brk": (12, 214),
    "capset": (126, 91),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "clone": (56, 220),
    "clone3": (435, 435),
    "close": (3, 57),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_pwait": (281, 22),
    "epoll_wait": (232, None),
    "eventfd2": (290, 19),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "fadvise64": (221, 223),
    "fcntl": (72, 25),
    "fstat": (5, 80),
    "fstatfs": (138, 44),
    "futex": (202, 98),
    "get_robust_list": (274, 100),
    "getcpu": (309, 168),
    "getcwd": (79, 17),
    "getdents64": (217, 61),
    "getegid": (108, 177),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getrandom": (318, 278),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "getuid": (102, 174),
    "ioctl": (16, 29),
    "kill": (62, 129),
    "landlock_add_rule": (445, 445),
    "landlock_create_ruleset": (444, 444),
    "landlock_restrict_self": (446, 446),
    "lseek": (8, 62),
    "lstat": (6, None),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "mincore": (27, 232),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "newfstatat": (262, 79),
    "open": (2, None),
    "openat": (257, 56),
    "openat2": (437, 437),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "poll": (7, None),
    "ppoll": (271, 73),
    "pread64": (17, 67),
    "prlimit64": (302, 261),
    "pselect6": (270, 72),
    "read": (0, 63),
    "readv": (19, 65),
    "restart_syscall": (219, 128),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigpending": (127, 136),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigtimedwait": (128, 137),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "seccomp": (317, 277),
    "select": (23, None),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "sigaltstack": (131, 132),
    "stat": (4, None),
    "statx": (332, 291),
    "sysinfo": (99, 179),
    "tgkill": (234, 131),
    "times": (100, 153),
    "umask": (95, 166),
    "uname": (63, 160),
    "write": (1, 64),
    "writev": (20, 66),
}

ALLOWED = (
    "access",
    "arch_prctl",
    "brk",
    "clock_getres",
    "clock_gettime",
    "clock_nanosleep",
    "close",
    "dup",
    "dup2",
    "dup3",
    "epoll_create1",
    "epoll_ctl",
    "epoll_pwait",
    "epoll_wait",
    "eventfd2",
    "exit",
    "exit_group",
    "faccessat",
    "faccessat2",
    "fadvise64",
    "fstat",
    "fstatfs",
    "futex",
    "get_robust_list",
    "getcpu",
    "getcwd",
    "getdents64",
    "getegid",
    "geteuid",
    "getgid",
    "getpid",
    "getppid",
    "getrandom",
    "getrlimit",
    "getrusage",
    "gettid",
    "gettimeofday",
    "getuid",
    "lseek",
    "lstat",
    "madvise",
    "membarrier",
    "mincore",
    "mmap",
    "mprotect",
    "mremap",
    "munmap",
    "nanosleep",
    "newfstatat",
    "pipe",
    "pipe2",
    "poll",
    "ppoll",
    "pread64",
    "pselect6",
    "read",
    "readv",
    "restart_syscall",
    "rseq",
    "rt_sigaction",
    "rt_sigpending",
    "rt_sigprocmask",
    "rt_sigreturn",
    "rt_sigtimedwait",
    "sched_getaffinity",
    "sched_yield",
    "select",
    "set_robust_list",
    "set_tid_address",
    "sigaltstack",
    "stat",
    "statx",
    "sysinfo",
    "times",
    "umask",
    "uname",
    "write",
    "writev",
)
"""System calls that a confined program may make with any arguments: memory, time, its own files and threads. None opens a file."""


def machine() -> str | None:
    """Return this machine's architecture; None if its system call numbers are unknown."""
    name = platform.machine()
    return name if name in _MACHINES else None


def number(name: str) -> int | None:
    """Return the number of a system call on this machine; None if the machine lacks the call or is unknown."""
    architecture = machine()
    return None if architecture is None else _NUMBERS[name][_MACHINES.index(architecture)]


_VERSION = 1
_PATH_BENEATH = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_ALL_FILE_RIGHTS = 16  # from ABI 5 on
_BIND_AND_CONNECT = 0b11
_SOCKETS_AND_SIGNALS = 0b11


def abi() -> int:
    """Return the Landlock version of the kernel; 0 if it has none or Landlock is disabled."""
    try:
        return call("landlock_create_ruleset", None, 0, _VERSION)
    except OSError:
        return 0


def restrict(readable: Sequence[Path]) -> int:
    """Restrict this thread, and threads that it starts, to reading some files and folders.

    Where the kernel supports it, also forbid binding and connecting TCP sockets, and signalling other processes.

    Returns:
        The Landlock version in use; 0 if there is no restriction.
    """
    version = abi()
    if version < 1:
        return 0
    rights = (1 << _FILE_RIGHTS.get(version, _ALL_FILE_RIGHTS)) - 1
    fields = [rights]
    if version >= 4:
        fields.append(_BIND_AND_CONNECT)
    if version >= 6:
        fields.append(_SOCKETS_AND_SIGNALS)
    attributes = ctypes.create_string_buffer(struct.pack(f"={len(fields)}Q", *fields), 8 * len(fields))
    try:
        ruleset = call("landlock_create_ruleset", _address(attributes), 8 * len(fields), 0)
    except OSError:
        return 0
    try:
        for folder in readable:
            _allow(ruleset, folder)
        call("landlock_restrict_self", ruleset, 0)
    except OSError:
        return 0
    finally:
        os.close(ruleset)
    return version


def _allow(ruleset: int, folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # the folder does not exist
    try:
        rights = _READ_FILE | _READ_DIR if folder.is_dir() else _READ_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor), 12)
        call("landlock_add_rule", ruleset, _PATH_BENEATH, _address(rule), 0)
    finally:
        os.close(descriptor)


def _address(data: ctypes.Array[ctypes.c_char]) -> ctypes.c_void_p:
    return ctypes.cast(data, ctypes.c_void_p)
