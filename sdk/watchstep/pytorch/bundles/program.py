"""The devices and the flags of PyTorch that a bundle records, and setting those flags again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch


def device_data() -> dict[str, Any]:
    """Return the processor and the GPUs that the running program computes on."""
    return {
        "processor": torch.backends.cpu.get_cpu_capability(),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


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
