"""Importing watchstep is cheap: it loads nothing large before it is used, and names the extra that installs what is missing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import watchstep

HEAVY = {
    "torch",
    "pyarrow",
    "boto3",
    "botocore",
    "pandas",
    "duckdb",
    "obstore",
    "safetensors",
    "pydantic",
    "numpy",
    "urllib3",
}


def loaded_after(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_loads_nothing_heavy() -> None:
    assert not loaded_after("import watchstep") & HEAVY


def test_what_capture_builds_on_loads_numpy_and_nothing_else() -> None:
    modules = [
        "errors",
        "format.block",
        "format.control",
        "format.documents",
        "format.layout",
        "format.segment",
        "format.snapshot",
        "format.statistics",
        "format.tensors",
        "platform.process",
        "store.store",
    ]
    loaded = loaded_after("\n".join(f"import watchstep.{module}" for module in modules))
    assert loaded & HEAVY == {"numpy"}


def test_what_is_offered_is_there() -> None:
    assert all(getattr(watchstep, name) for name in watchstep.__all__)


def test_arrays_are_recorded_and_models_of_other_frameworks_refused_without_pytorch(tmp_path: Path) -> None:
    loaded = loaded_after(
        "import watchstep, watchstep.errors\n"
        f"hook = watchstep.Hook({str(tmp_path)!r})\n"
        "hook.record(x=[1.0, 2.0])\n"
        "try:\n"
        "    hook.watch(object())\n"
        "except watchstep.errors.ConfigError as error:\n"
        "    assert 'does not use PyTorch' in str(error)\n"
        "else:\n"
        "    raise AssertionError\n"
        "hook.close()\n"
        "assert not hook.health['faults']"
    )
    assert "torch" not in loaded


@pytest.mark.parametrize(
    ("module", "library"),
    [
        ("transformers", "transformers"),
        ("lightning", "lightning"),
        ("accelerate", "accelerate"),
        ("optuna", "optuna"),
        ("ray_tune", "ray"),
    ],
)
def test_what_is_missing_names_its_extra(module: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == library or name.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"watchstep.integrations.{module}", raising=False)
    with pytest.raises(ImportError, match=rf"watchstep\[{library}\]"):
        importlib.import_module(f"watchstep.integrations.{module}")
