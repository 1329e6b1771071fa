"""Run the tests of recording on several versions of the frameworks, each in an environment of its own, and print what passed.

    python infra/version_matrix.py [NAME …] [--folder FOLDER] [--keep]     (default: all rows, build/versions)

By hand before a release, and when a framework has a new version: the newest PyTorch alone needs 5 GB of CUDA packages. It needs `uv`. An
environment is deleted after its tests, unless it is kept.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = (
    "editables",
    "hatchling",
    "hypothesis>=6.110",
    "psutil>=6",
    "pytest-timeout>=2.3",
    "pytest>=8.3",
    "safetensors>=0.5",
)


@dataclass(frozen=True)
class Row:
    """Versions that are tested together.

    Attributes:
        name: of the row.
        python: version of Python.
        requirements: of the frameworks, as pip's.
        shown: distributions whose versions are printed.
        tests: paths and arguments of pytest.
        options: of `uv pip install`, such as an index.
    """

    name: str
    python: str
    requirements: tuple[str, ...]
    shown: tuple[str, ...]
    tests: tuple[str, ...]
    options: tuple[str, ...] = ()


PYTORCH = (
    # Identity.
    "tests/sdk/pytorch/test_unchanged_training.py",
    # What is recorded.
    "tests/sdk/pytorch/test_internals.py",
    "tests/sdk/pytorch/test_watch.py",
    "tests/sdk/pytorch/outputs/test_forward_passes.py",
    "tests/sdk/pytorch/loaders/test_loader_batches.py",
    "tests/sdk/pytorch/losses/test_losses_per_step.py",
    "tests/sdk/pytorch/parameters/test_clipping.py",
    "tests/sdk/pytorch/parameters/test_mixed_precision.py",
    "tests/sdk/pytorch/parameters/test_optimizers.py",
    "tests/sdk/wrapper/test_run_capture.py",
    # Stops and skipped updates.
    "tests/sdk/test_hook.py",
    "tests/sdk/pytorch/policy/test_update_policy.py",
    # Bundles, traces and replay.
    "tests/sdk/pytorch/bundles/test_bundles.py",
    "tests/sdk/trace/test_online.py",
    "tests/sdk/replay/test_replay.py",
)


def _torch(version: str, *options: str) -> Row:
    return Row(
        f"torch-{version}", "3.11", (f"torch=={version}", "setuptools<82"), ("torch",), PYTORCH, options
    )


JAX = (
    # Equinox uses what older versions of JAX deprecate.
    *("-W", "ignore::DeprecationWarning"),
    "tests/frameworks/jax/test_missing_names.py",
    "tests/frameworks/jax/test_recording.py",
    "tests/frameworks/jax/test_stop_and_replay.py",
)
KERAS = (
    "tests/frameworks/tensorflow/test_missing_names.py",
    "tests/frameworks/keras/test_recording.py",
    "tests/frameworks/tensorflow/test_tapes.py",
)
BOOSTING = ("tests/sdk/xgboost", "tests/frameworks/lightgbm")
TRAINERS = (
    "tests/sdk/integrations/test_missing_names.py",
    "tests/sdk/integrations/test_transformers.py",
    "tests/sdk/integrations/test_lightning.py",
    "tests/sdk/integrations/test_accelerate.py",
)
SWEEPS = ("tests/sdk/integrations/test_optuna.py", "tests/sdk/integrations/test_ray_tune.py")


def _row(name: str, python: str, tests: tuple[str, ...], *requirements: str) -> Row:
    shown = tuple(re.split(r"[=<>\[]", requirement)[0] for requirement in requirements)
    return Row(name, python, requirements, shown, tests)


ROWS = (
    _torch("2.4.1"),
    _torch("2.13.0"),
    _torch("2.14.1"),
    _torch("2.15.0"),
    _row("jax-oldest", "3.11", JAX, "jax==0.8.2", "optax==0.2.4", "flax", "equinox"),
    _row("jax-newest", "3.12", JAX, "jax", "optax", "flax", "equinox"),
    _row("keras-oldest", "3.11", KERAS, "keras==3.8.0", "tensorflow-cpu==2.18.0", "torch==2.13.0"),
    _row("keras-newest", "3.11", KERAS, "keras", "tensorflow-cpu", "jax", "optax", "torch==2.13.0"),
    _row(
        "boosting-oldest",
        "3.11",
        BOOSTING,
        "xgboost-cpu==3.0.0",
        "lightgbm==4.5.0",
        "scikit-learn<1.6",
        "torch==2.13.0",
    ),
    _row("boosting-newest", "3.12", BOOSTING, "xgboost-cpu", "lightgbm", "scikit-learn", "torch==2.13.0"),
    _row(
        "trainers-oldest",
        "3.11",
        TRAINERS,
        "transformers==4.50.0",
        "lightning==2.4.0",
        "accelerate==1.1.0",
        "torch==2.13.0",
    ),
    _row("trainers-newest", "3.11", TRAINERS, "transformers", "lightning", "accelerate", "torch==2.13.0"),
    _row("sweeps-oldest", "3.11", SWEEPS, "optuna==4.0.0", "ray[default,tune]==2.44.1", "torch==2.13.0"),
    _row("sweeps-newest", "3.11", SWEEPS, "optuna", "ray[default,tune]", "torch==2.13.0"),
)


@dataclass(frozen=True)
class Result:
    """What came of a row.

    Attributes:
        row: The row.
        versions: Distributions with their versions.
        summary: pytest's last line, or why it did not run.
        has_passed: Whether every test passed or was skipped.
    """

    row: Row
    versions: str
    summary: str
    has_passed: bool


def run(row: Row, folder: Path, *, keeps: bool) -> Result:
    """Make a row's environment unless it exists, and run its tests."""
    environment = folder / row.name
    python = environment / "bin" / "python"
    try:
        if not python.exists():
            _uv("venv", "--quiet", "--python", row.python, str(environment))
        install = ("pip", "install", "--quiet", "--python", str(python))
        _uv(*install, *row.options, *row.requirements, *TOOLS)
        _uv(*install, "--no-build-isolation", "--editable", f"{ROOT}[server]")
        command = [
            str(python),
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.forking",
            "--workers",
            "2",
            "-p",
            "no:cacheprovider",
            "--tb=short",
        ]
        log = folder / f"{row.name}.log"
        with log.open("w") as output:
            done = subprocess.run(
                [*command, *row.tests], cwd=ROOT, env=_variables(), stdout=output, stderr=output, check=False
            )
        lines = log.read_text().splitlines() or [""]
        return Result(row, _versions(environment, row), lines[-1].strip("= "), done.returncode == 0)
    except subprocess.CalledProcessError as error:
        return Result(row, _versions(environment, row), f"{' '.join(error.cmd[:4])} failed", has_passed=False)
    finally:
        if not keeps:
            shutil.rmtree(environment, ignore_errors=True)


def _uv(*arguments: str) -> None:
    subprocess.run(["uv", *arguments], cwd=ROOT, env=_variables(), check=True)


def _variables() -> dict[str, str]:
    """The environment without what names the project's own, and with compiled modules kept: compiling PyTorch takes longer than many tests."""
    left_out = {"VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"}
    return {name: value for name, value in os.environ.items() if name not in left_out}


def _versions(environment: Path, row: Row) -> str:
    found = distributions(path=[str(path) for path in environment.glob("lib/python*/site-packages")])
    versions = {_normal(each.metadata["Name"]): each.version for each in found}
    return ", ".join(f"{name} {versions.get(_normal(name), 'missing')}" for name in row.shown)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    """Run the chosen rows, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *(row.name for row in ROWS)])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = [row for row in ROWS if not options.names or row.name in options.names]
    results = []
    for row in rows:
        results.append(run(row, options.folder, keeps=options.keep))
        print(f"{row.name}: {results[-1].summary}", file=sys.stderr, flush=True)
    print("| row | Python | versions | tests |\n| --- | --- | --- | --- |")
    for result in results:
        print(f"| {result.row.name} | {result.row.python} | {result.versions} | {result.summary} |")
    return 0 if all(result.has_passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
