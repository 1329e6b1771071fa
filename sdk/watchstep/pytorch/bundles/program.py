"""The program and the flags of PyTorch that a bundle records, and setting those flags again."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    "torch",
    "numpy",
    "watchstep",
    "transformers",
    "accelerate",
    "lightning",
    "pytorch-lightning",
    "timm",
)
_MAX_PARENTS = 32
_MAX_REFERENCES = 4 * 1024 * 1024
_COMMIT_DIGITS = 40


def program_data() -> dict[str, Any]:
    """Return the arguments, the working folder, the git commit and the versions of the running program."""
    return {
        "argv": list(sys.argv),
        "folder": str(Path.cwd()),
        "git_commit": git_commit(Path.cwd()),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def git_commit(folder: Path) -> str:
    """Return the commit that is checked out in a folder, read from git's files; empty if there is none.

    No process is started: a training process may have threads and devices that a fork would disturb.
    """
    try:
        for parent in [folder, *list(folder.parents)[:_MAX_PARENTS]]:
            place = parent / ".git"
            if place.is_file():  # a worktree or submodule
                place = parent / place.read_text().removeprefix("gitdir:").strip()
            if (place / "HEAD").is_file():
                return _commit_of(place)
    except (OSError, ValueError):
        pass
    return ""


def _commit_of(place: Path) -> str:
    head = (place / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head[:_COMMIT_DIGITS]
    name = head.removeprefix("ref:").strip()
    common = place / "commondir"
    base = place / common.read_text().strip() if common.is_file() else place
    for folder in (place, base):
        if (folder / name).is_file():
            return (folder / name).read_text().strip()[:_COMMIT_DIGITS]
    packed = base / "packed-refs"
    if packed.is_file() and packed.stat().st_size < _MAX_REFERENCES:
        for line in packed.read_text().splitlines():
            if line.endswith(f" {name}"):
                return line[:_COMMIT_DIGITS]
    return ""


_DEFAULT_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_FLAGS: dict[str, tuple[Any, str]] = {
    "cudnn_enabled": (torch.backends.cudnn, "enabled"),
    "cudnn_benchmark": (torch.backends.cudnn, "benchmark"),
    "cudnn_deterministic": (torch.backends.cudnn, "deterministic"),
    "cudnn_allow_tf32": (torch.backends.cudnn, "allow_tf32"),
    "matmul_allow_tf32": (torch.backends.cuda.matmul, "allow_tf32"),
    "mkldnn_enabled": (torch.backends.mkldnn, "enabled"),
}


def precision_data() -> dict[str, Any]:
    """Return the flags of PyTorch that change results."""
    return {
        "default_dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
        **{name: bool(getattr(owner, flag)) for name, (owner, flag) in _FLAGS.items()},
    }


def restore_precision(data: Mapping[str, Any]) -> list[str]:
    """Set the flags as a bundle records them. Returns what could not be set, as sentences.

    Raises:
        ValueError: the data is damaged.
    """
    problems = []
    threads = data.get("threads")
    if type(threads) is int and 1 <= threads <= 4096:
        torch.set_num_threads(threads)
    dtype = getattr(torch, str(data.get("default_dtype", "")).removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype) and dtype in _DEFAULT_DTYPES:
        torch.set_default_dtype(dtype)
    precision = data.get("float32_matmul_precision")
    if not isinstance(precision, str | None):
        raise ValueError(f"float32_matmul_precision is {str(precision)[:40]!r}")  # noqa: TRY004 - reported like other damage
    if precision in {"highest", "high", "medium"}:
        torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(
        data.get("deterministic") is True, warn_only=data.get("deterministic_warn_only") is True
    )
    for name, (owner, flag) in _FLAGS.items():
        if isinstance(value := data.get(name), bool) and getattr(owner, flag) != value:
            try:
                setattr(owner, flag, value)
            except RuntimeError as error:
                problems.append(f"{name} could not be set to {value}: {error}")
    workspace = data.get("cublas_workspace")
    if workspace and os.environ.get("CUBLAS_WORKSPACE_CONFIG", "") != workspace:
        problems.append(
            f"set CUBLAS_WORKSPACE_CONFIG={str(workspace)[:40]} before the start for equal results on a GPU"
        )
    return problems
