"""GPUs by NVML. Selecting the GPUs of a program needs no GPU; the other tests do."""

from __future__ import annotations

import pytest

from watchstep.capture.system.sources import Gpus, driver_is_there, visible
from watchstep.format.system_figures import is_gpu, is_gpu_memory

NAMES = ["GPU-aa11", "GPU-ab22", "GPU-cc33"]


@pytest.mark.parametrize(
    ("variable", "due"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        (" 1 , 2", [1, 2]),
        ("1,7,2", [1]),  # what follows one that is none does not count
        ("1,1", [1]),
        ("GPU-cc", [2]),
        ("GPU-a", []),  # two begin so
        ("MIG-123", []),
        ("NoDevFiles", []),
    ],
)
def test_a_program_uses_what_cuda_shows_it(variable: str | None, due: list[int]) -> None:
    assert visible(NAMES, variable) == due


@pytest.mark.skipif(
    not driver_is_there(), reason="NO GPU HERE: what NVML says of one is not proven by this run"
)
def test_a_gpu_reports_its_utilization_and_memory() -> None:
    source = Gpus()
    figures = source.sample(1.0)
    source.close()
    assert any(is_gpu_memory(name) for name in figures)
    assert all(is_gpu(name) or is_gpu_memory(name) for name in figures)
    assert all(0 <= share <= 1 for share in figures.values())
