"""System calls for which Python has no function, through the C library."""

from __future__ import annotations

import ctypes
import os
import signal

from watchstep_rules.custom.sandbox.syscalls import number

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522


def call(name: str, *arguments: int | ctypes.c_void_p | None) -> int:
    """One system call.

    Raises:
        OSError: the kernel refuses it, or does not have it.
    """
    place = number(name)
    if place is None:
        raise OSError(38, f"{name}: not known on this machine")
    passed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = int(_LIBC.syscall(ctypes.c_long(place), *passed))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def die_with(parent: int) -> bool:
    """Be killed when the thread that started this process ends; whether the kernel agreed.

    A parent that is gone before the call sends no signal, so the caller compares `os.getppid` afterwards: this function
    does, and ends the process.

    Args:
        parent: process id of the parent.
    """
    agreed = hasattr(_LIBC, "prctl") and _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(0)
    return agreed


def no_new_privileges() -> bool:
    """From now on no program that this one would start gains rights; whether the kernel agreed."""
    return _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def not_dumpable() -> bool:
    """No core is dumped, and no other process of this user may look into this one."""
    return _prctl(_PR_SET_DUMPABLE, 0)


def drop_capabilities() -> bool:
    """Give up what the super-user may do beyond others; whether the kernel agreed."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    try:
        call("capset", _address(header), _address(nothing))
    except OSError:
        return False
    return True


def _prctl(option: int, value: int) -> bool:
    zero = ctypes.c_ulong(0)
    return bool(_LIBC.prctl(option, ctypes.c_ulong(value), zero, zero, zero) == 0)


def _address(data: ctypes.Array[ctypes.c_uint32]) -> ctypes.c_void_p:
    return ctypes.cast(data, ctypes.c_void_p)
