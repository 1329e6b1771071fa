"""The seccomp filter for both architectures, run by a small interpreter of its instructions."""

from __future__ import annotations

import errno
import os
import struct

import pytest

from watchstep_rules.custom.sandbox import seccomp
from watchstep_rules.custom.sandbox.kernel import ALLOWED as ALLOWED_CALLS
from watchstep_rules.custom.sandbox.kernel import number as syscall_number

ALLOWED, REFUSED, KILLED = "allowed", "refused", "killed"
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@pytest.fixture(params=ARCHITECTURES)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    monkeypatch.setattr("platform.machine", lambda: name)
    return name


def run(
    machine: str, number: int, *arguments: int, architecture: int | None = None, threads: bool = True
) -> int:
    """What the filter answers to a call by process 77."""
    here = ARCHITECTURES[machine]
    data = struct.pack("<iIQ6Q", number, architecture or here, 0, *arguments, *[0] * (6 - len(arguments)))
    steps, place, accumulator = seccomp.program(here, 77, threads=threads), 0, 0
    while True:
        step = steps[place]
        place += 1
        if step.code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, step.constant)
        elif step.code == 0x06:
            return step.constant
        else:
            so = accumulator == step.constant if step.code == 0x15 else bool(accumulator & step.constant)
            place += step.if_so if so else step.if_not


def word(answer: int) -> str:
    return {0x7FFF0000: ALLOWED, 0x00050000 | errno.EPERM: REFUSED, 0x80000000: KILLED}.get(
        answer, str(answer)
    )


def call(machine: str, name: str, *arguments: int) -> str:
    number = syscall_number(name)
    assert number is not None
    return word(run(machine, number, *arguments))


def test_what_is_listed_is_allowed_and_nothing_else(machine: str) -> None:
    numbers = {syscall_number(name) for name in ALLOWED_CALLS} - {None}
    filtered_names = (
        "open",
        "openat",
        "fcntl",
        "ioctl",
        "kill",
        "tgkill",
        "clone",
        "prlimit64",
        "clone3",
        "openat2",
    )
    special = {syscall_number(name) for name in filtered_names}
    for number in range(1024):
        if number not in special:
            assert word(run(machine, number)) == (ALLOWED if number in numbers else REFUSED)


def test_another_architecture_ends_the_process(machine: str) -> None:
    assert word(run(machine, 0, architecture=0x40000003)) == KILLED
    assert word(run(machine, 0x40000000 + 41)) == REFUSED  # x32's sockets


def test_files_are_opened_to_be_read_only(machine: str) -> None:
    for flags in (os.O_RDONLY, os.O_CLOEXEC, os.O_DIRECTORY, os.O_NONBLOCK):
        assert call(machine, "openat", 0, 0, flags) == ALLOWED
    for flags in (os.O_WRONLY, os.O_RDWR, 3, os.O_CREAT, os.O_TRUNC, os.O_APPEND, os.O_TMPFILE, os.O_PATH):
        assert call(machine, "openat", 0, 0, flags | os.O_CLOEXEC) == REFUSED


def test_threads_but_no_processes(machine: str) -> None:
    assert call(machine, "clone", 0x003D0F00) == ALLOWED  # as a C library starts a thread
    assert call(machine, "clone", 17) == REFUSED  # as it forks
    clone = syscall_number("clone")
    assert clone is not None
    assert word(run(machine, clone, 0x003D0F00, threads=False)) == REFUSED
    for name in ("clone3", "openat2"):
        assert call(machine, name) == str(0x00050000 | errno.ENOSYS)


def test_signals_to_itself_alone(machine: str) -> None:
    for name in ("kill", "tgkill"):
        assert call(machine, name, 77, 9) == ALLOWED
        for pid in (1, 78, 0, 2**32 - 1, 2**32 - 77):
            assert call(machine, name, pid, 9) == REFUSED


def test_limits_are_read_not_set(machine: str) -> None:
    assert call(machine, "prlimit64", 0, 9, 0, 4096) == ALLOWED
    for pointer in (4096, 1 << 32, (1 << 32) + 4096):
        assert call(machine, "prlimit64", 0, 9, pointer) == REFUSED


def test_descriptors_get_no_owner_and_terminals_no_input(machine: str) -> None:
    assert call(machine, "fcntl", 3, 3) == ALLOWED
    assert call(machine, "fcntl", 3, 8, 1) == REFUSED  # F_SETOWN
    assert call(machine, "ioctl", 0, 0x5401) == ALLOWED
    assert call(machine, "ioctl", 0, 0x5412) == REFUSED  # TIOCSTI
