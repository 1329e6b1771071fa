"""Clock jumps of some of the service's processes, while the database's clock goes on.

With libfaketime (Debian's package of that name) the nursery of those processes runs under it, and every clock but the
monotonic one jumps, wherever it is read. Without it, `time.time` and `time.time_ns` jump, which datetime does not see.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

LIBRARIES = tuple(
    Path(f"/usr/lib/{machine}-linux-gnu/faketime/libfaketimeMT.so.1") for machine in ("x86_64", "aarch64")
)
JUMPS = ("+0", "+3600", "-3600", "+86400", "-600", "+30", "-5")
"""Seconds by which the clock is off."""

_WANTED = "WATCHSTEP_CRASH_CLOCK"


def library() -> Path | None:
    """Where libfaketime is; None where it is not installed."""
    return next((path for path in LIBRARIES if path.exists()), None)


def environment(folder: Path) -> dict[str, str]:
    """What a nursery needs in its environment for its processes' clocks to follow `jump`."""
    jump(folder, JUMPS[0])
    found = library()
    if found is None:
        return {_WANTED: "1"}
    return {
        "LD_PRELOAD": str(found),
        "FAKETIME_TIMESTAMP_FILE": str(_file(folder)),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_RESET": "1",
    }


def jump(folder: Path, seconds: str) -> None:
    """Set the clocks of those processes off by some seconds."""
    partial = folder / "clock.new"
    partial.write_text(f"{seconds}\n")
    partial.rename(_file(folder))


def follow_jumps(folder: Path) -> None:
    """In a process without libfaketime, where its nursery was asked for it: patch Python's clock."""
    if _WANTED not in os.environ:
        return
    real, real_ns = time.time, time.time_ns

    def off() -> int:
        try:
            return int(_file(folder).read_text())
        except (OSError, ValueError):
            return 0

    time.time = lambda: real() + off()
    time.time_ns = lambda: real_ns() + off() * 1_000_000_000


def _file(folder: Path) -> Path:
    return folder / "clock"
