"""The wheels, their extras, and the client alone."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import watchstep
from infra import client, wheels
from infra.version_matrix import ROOT, ROWS

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
OTHER_EXTRAS = (
    "accelerate", "aiosmtpd", "boto3", "botocore", "celery", "duckdb", "httptools", "httpx", "hypothesis", "kombu", "kubernetes",
    "lightning", "matplotlib", "mlflow", "optuna", "plotext", "psutil", "psycopg", "pynvml", "pytest", "ray", "redis",
    "safetensors", "sklearn", "tensorboardX", "trackio", "transformers", "triton", "uvloop", "wandb", "xgboost",
)  # fmt: skip
"""Packages that neither extra installs."""
WITHOUT = f"import sys\nsys.modules.update(dict.fromkeys({OTHER_EXTRAS!r}))\n"
"""Makes their imports raise, and `find_spec` find nothing."""
RECORDS = """
import torch, watchstep
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with watchstep.Hook(sys.argv[1], run="r") as hook:
    hook.watch(model, optimizer)
    for _ in range(5):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
assert not hook.health["faults"], hook.health["faults"]
assert watchstep.open_run(hook.run_url).tensor("0.weight:gradient").steps()[:3] == [0, 1, 2]
"""
RECORDS_ONLY = """
sys.modules.update(dict.fromkeys(("pyarrow", "pydantic", "yaml", "sqlalchemy", "fastapi", "pandas")))
import pathlib, torch, watchstep, watchstep.errors
from watchstep.format import segment
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = watchstep.CaptureConfig(collections={"biases": watchstep.Collection(include="bias")}, overhead_budget=None)
with watchstep.Hook(sys.argv[1], run="r", config=config) as hook:
    hook.watch(model, optimizer)
    for _ in range(5):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
assert not hook.health["faults"], hook.health["faults"]
paths = pathlib.Path(sys.argv[1]).rglob("*.arrow")  # more than one on a busy machine
assert {int(step) for path in paths for step in segment.decode(path.read_bytes(), path.name).step} == {0, 1, 2, 3, 4}
try:
    watchstep.open_run(hook.run_url)
except watchstep.errors.ConfigError as error:
    assert "reading a recorded run needs pyarrow" in str(error) and "watchstep[read]" in str(error)
else:
    raise AssertionError("read without pyarrow")
"""
SERVES = """
from watchstep_services.cli.main import main
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService
import watchstep_services.cli.serve
with EmbeddedService(load_settings(home=sys.argv[1] + "/home", store=sys.argv[1])) as service:
    assert service.url.startswith("http")
"""
STAND_IN = """
import pathlib, sys
arguments = sys.argv[1:]
assert "--fail-on-warning" in arguments
if {warns}:
    print("Warning(s) encountered while generating")
    sys.exit(1)
package = pathlib.Path(arguments[arguments.index("--output-path") + 1])
(package / "api" / "runs").mkdir(parents=True)
for name in {modules}:
    (package / name).write_text({text!r})
"""
PACKAGES = ["__init__.py", "api/__init__.py", "api/runs/__init__.py"]
BOTH = [*PACKAGES, "api/runs/list_runs.py", "api/runs/get_run.py"]


def kernel_of(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(KERNEL)


@pytest.mark.release
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


@pytest.mark.release
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


@pytest.mark.release
@pytest.mark.parametrize(
    "program", [RECORDS, RECORDS_ONLY, SERVES], ids=["records", "records-only", "serves"]
)
def test_no_package_of_another_extra_is_needed(tmp_path: Path, program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_lower_bounds_of_frameworks_are_versions_of_the_matrix() -> None:
    run = {
        requirement.replace("-cpu==", "==").partition("[")[0].partition("==")[0]: requirement
        for row in ROWS
        if row.name.endswith("-oldest") or row.name == "torch-2.4.1"
        for requirement in row.requirements
        if "==" in requirement and (row.name.startswith("torch") or not requirement.startswith("torch=="))
    }
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    chosen = extras.partition("\nkubernetes = ")[0]
    bounds = dict(re.findall(r'"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)', chosen))
    assert {"jax", "keras", "tensorflow", "xgboost", "lightgbm", "transformers", "torch"} <= run.keys()
    for name, requirement in run.items():
        version = requirement.partition("==")[2]
        assert f"{version}.".startswith(f"{bounds[name]}."), (requirement, bounds[name])


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "openapi.json"
    operations = {"/runs": {"get": {}, "parameters": []}, "/runs/{run}": {"get": {}}}
    path.write_text(json.dumps({"paths": operations}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("modules", "text", "warns", "fault"),
    [
        (BOTH, "", False, ""),
        (BOTH, "", True, "Warning(s) encountered"),
        (BOTH[:-1], "", False, "the client has 1 operations, the document 2"),
        (BOTH, "import nothing_like_it", False, "No module named 'nothing_like_it'"),
    ],
    ids=("complete", "warning", "operation-left-out", "import-fails"),
)
def test_client_is_complete_or_the_check_fails(
    tmp_path: Path, document: Path, modules: list[str], text: str, warns: bool, fault: str
) -> None:
    program = tmp_path / "generator.py"
    program.write_text(STAND_IN.format(modules=modules, text=text, warns=warns), encoding="utf-8")
    found = client.faults(document, tmp_path / "client", [sys.executable, str(program)])
    assert bool(found) == bool(fault)
    assert not fault or fault in found[0]


def test_the_documents_operations_are_counted() -> None:
    assert client.documented(client.DOCUMENT) > 80
