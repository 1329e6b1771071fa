"""Recording needs the base packages only, `watchstep serve` those of `server`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from infra.version_matrix import ROOT, ROWS

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
        requirement.replace("tensorflow-cpu", "tensorflow").partition("[")[0].partition("==")[0]: requirement
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
