"""Build the wheels for x86-64 and AArch64 Linux, and check that they run wherever their tags say.

    python infra/wheels.py [FOLDER]     (default: dist)

The kernel knows nothing of Python, so one wheel a platform serves every version. It is compiled by this machine's compiler where that
is for the platform, because GCC also compiles the variants that Clang cannot dispatch, and by Zig's Clang otherwise. auditwheel
reads the versions of glibc's symbols; the build fails where they are newer than the tag says.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MACHINES = ("x86_64", "aarch64")
PAGE = "services/watchstep_services/page"  # built by `make page`, and not a part of the repository
GLIBC = "2.17"  # manylinux2014: every distribution that Python 3.10 runs on


def tag(machine: str) -> str:
    """The wheel's platform tag."""
    return f"manylinux_{GLIBC.replace('.', '_')}_{machine}"


def compiler(machine: str) -> str:
    """A C compiler for a machine, with its arguments."""
    if machine == platform.machine():
        return os.environ.get("CC", "cc")
    return f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{GLIBC} -s"


def build(machine: str, folder: Path) -> Path:
    """Build a machine's wheel into a folder."""
    environment = {**os.environ, "CC": compiler(machine), "WATCHSTEP_WHEEL_PLATFORM": tag(machine)}
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # A copy of the sources, so that the kernel of the editable installation stays.
    source = folder / f"source-{machine}"
    source.mkdir(parents=True)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    wanted = (
        "sdk/",
        "rules/",
        "launch/",
        "services/",
        "hatch_build.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    )
    for name in names.stdout.split("\0"):
        if name.startswith(wanted) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    shutil.copytree(ROOT / PAGE, source / PAGE)
    try:
        command += ["--no-build-isolation", "--wheel-dir", str(folder), str(source)]
        subprocess.run(command, env=environment, check=True)
    finally:
        subprocess.run(["rm", "-rf", str(source)], check=True)
    (wheel,) = folder.glob(f"watchstep-*-{tag(machine)}.whl")
    return wheel


def check(wheel: Path, machine: str) -> None:
    """Check by auditwheel that a wheel's symbols are as old as its tag says.

    Raises:
        SystemExit: they are newer, or of another machine.
    """
    done = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True, check=False
    )
    print(done.stdout)
    # auditwheel names the oldest tag that fits, which is this one or an older one.
    consistent = "is consistent with" in done.stdout or "constrains the platform tag to" in done.stdout
    fits = [f"manylinux_{version}_{machine}" for version in ("2_5", "2_12", "2_17")]
    if done.returncode or not consistent or not any(f'"{each}"' in done.stdout for each in fits):
        raise SystemExit(
            f"{wheel.name}: its kernel does not run everywhere that {tag(machine)} names\n{done.stderr}"
        )


def main(folder: Path) -> None:
    """Build and check both wheels."""
    folder.mkdir(parents=True, exist_ok=True)
    for machine in MACHINES:
        for old in folder.glob(f"watchstep-*-{tag(machine)}.whl"):
            old.unlink()
        check(build(machine, folder.resolve()), machine)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist")
