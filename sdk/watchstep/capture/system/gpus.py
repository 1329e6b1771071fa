"""How busy NVIDIA's GPUs are, and how full, by NVML.

Written against the documented interface of NVML and of its binding ``nvidia-ml-py``; no GPU has run it yet.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from watchstep.format.system_figures import GPU, GPU_MEMORY

_DRIVER = Path("dev/nvidiactl")


class Gpus:
    """Those that the process may use, by ``CUDA_VISIBLE_DEVICES``.

    Numbers are NVML's, by the order on the bus; where a machine has unlike GPUs CUDA may number them otherwise.
    """

    def __init__(self) -> None:
        """Find them.

        Raises:
            ImportError: the binding is not installed.
            OSError: NVML finds no driver, or does not answer.
        """
        import pynvml

        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            names = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        except pynvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error
        chosen = visible(names, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._handles = {index: handles[index] for index in chosen}

    def sample(self, seconds: float) -> dict[str, float]:  # noqa: ARG002 - a source's; NVML averages by itself
        """Shares, by NVML over the last sixth of a second to second; what a GPU does not tell (MIG) is left out."""
        nvml, figures = self._nvml, {}
        for index, handle in self._handles.items():
            try:
                figures[f"{GPU}{index}"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            except nvml.NVMLError_NotSupported:
                pass
            except nvml.NVMLError as error:
                raise OSError(f"NVML: {error}") from error
            try:
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                figures[f"{GPU}{index}{GPU_MEMORY}"] = memory.used / memory.total
            except nvml.NVMLError_NotSupported:
                pass
            except nvml.NVMLError as error:
                raise OSError(f"NVML: {error}") from error
        return figures

    def close(self) -> None:
        """NVML counts who uses it."""
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error


def driver_is_there(root: Path = Path("/")) -> bool:
    """Whether this machine has a GPU of NVIDIA's that this process could use."""
    return (root / _DRIVER).exists()


def visible_count() -> int | None:
    """How many GPUs ``CUDA_VISIBLE_DEVICES`` names; None where it is not set."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if said is None else len([word for word in said.split(",") if word.strip()])


def visible(names: list[str], said: str | None) -> list[int]:
    """Places of the GPUs that CUDA shows to a program.

    Args:
        names: the UUID of each.
        said: the variable ``CUDA_VISIBLE_DEVICES``: numbers, or beginnings of UUIDs; what follows one that is none
            does not count (CUDA programming guide, environment variables). None where it is not set.
    """
    if said is None:
        return list(range(len(names)))
    chosen: list[int] = []
    for word in (part.strip() for part in said.split(",")):
        found = [index for index, name in enumerate(names) if str(index) == word or _begins(name, word)]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen.append(found[0])
    return chosen


def _begins(name: str, word: str) -> bool:
    return word.startswith("GPU-") and name.startswith(word)


def _text(name: Any) -> str:
    """Older bindings give bytes."""
    return name.decode() if isinstance(name, bytes) else str(name)
