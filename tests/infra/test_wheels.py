"""The wheels of `make wheel`: their tags, and the kernel in them."""

from __future__ import annotations

import importlib.util
import os
import platform
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import watchstep
from infra import wheels

pytestmark = pytest.mark.ci

KERNEL = "watchstep/kernels/native/_statistics.so"
E_MACHINE = {"x86_64": 62, "aarch64": 183}
USES_KERNEL = """
import numpy as np
import watchstep
from watchstep.kernels.native_kernel import KINDS, MemoryRange, load

kernel = load()
assert kernel is not None
values = np.arange(1000, dtype=np.float32)
batch = kernel.measure([MemoryRange(values.ctypes.data, values.size, KINDS["float32"])]).collect()
assert kernel.has_nonfinite([MemoryRange(values.ctypes.data, values.size, KINDS["float32"])], 0, 1) is False
print(watchstep.__file__, watchstep.__version__, batch.max[0])
"""


def kernel_of(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(KERNEL)


@pytest.mark.parametrize("machine", wheels.MACHINES)
def test_the_kernel_is_for_the_machine_and_the_glibc_of_the_tag(machine: str, tmp_path: Path) -> None:
    if machine != platform.machine() and importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is installed by `make wheel` alone")
    wheel = wheels.build(machine, tmp_path)
    assert wheel.name == f"watchstep-{watchstep.__version__}-py3-none-{wheels.tag(machine)}.whl"
    kernel = kernel_of(wheel)
    assert kernel[:6] == b"\x7fELF\x02\x01"  # 64 bits, little-endian
    (found,) = struct.unpack_from("<H", kernel, 18)
    assert found == E_MACHINE[machine]
    if importlib.util.find_spec("auditwheel") is not None:
        wheels.check(wheel, machine)


@pytest.mark.skipif(platform.machine() not in wheels.MACHINES, reason="no wheel is built for this machine")
def test_the_kernel_runs_in_a_new_environment(tmp_path: Path) -> None:
    wheel = wheels.build(platform.machine(), tmp_path)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    program = environment / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(program),
        "install",
        "--quiet",
        "--no-deps",
        str(wheel),
    ]
    subprocess.run(pip, check=True)
    # Dependencies come from this environment, whose editable installation is not on that path.
    packages = {"PYTHONPATH": str(Path(np.__file__).parents[1])}
    done = subprocess.run(
        [program, "-c", USES_KERNEL],
        cwd=tmp_path,
        env={**os.environ, **packages},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    file, version, largest = done.stdout.split()
    assert Path(file).is_relative_to(environment)
    assert (version, float(largest)) == (watchstep.__version__, 999.0)
