"""The Triton programs without a GPU: Triton's interpreter runs them, on tensors in host memory.

Whether Triton compiles or interprets is settled when it is imported. So it interprets in the whole process, and on a
machine with a GPU the same tests run the compiled programs there. `tests.conftest` sees to it.
"""

from __future__ import annotations

import functools

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytest.importorskip("triton", reason="Triton is not installed: it has builds for Linux alone")

from triton.runtime.interpreter import InterpretedFunction  # noqa: E402 - as above

from watchstep.pytorch.cuda import programs  # noqa: E402 - as above
from watchstep.pytorch.cuda.measuring import TritonKernel  # noqa: E402 - as above


@functools.cache
def kernel() -> TritonKernel:
    """The kernel of this process."""
    if DEVICE == "cpu":
        assert isinstance(programs.measure_spans, InterpretedFunction), (
            "Triton was imported before this module"
        )
    return TritonKernel()
