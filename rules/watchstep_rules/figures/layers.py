"""What kind of layer a row speaks of, by the type of its module."""

from __future__ import annotations

from watchstep.tensors import TensorInfo

_WEIGHTED = ("Linear", "Bilinear", "Conv", "LSTM", "GRU", "RNN")


def is_weighted(info: TensorInfo) -> bool:
    """Whether the module multiplies its input by weights: linear, convolution, recurrent."""
    kind = info.module_type.removeprefix("Lazy").removeprefix("NonDynamicallyQuantizable")
    return kind.startswith(_WEIGHTED)


def is_normalisation(info: TensorInfo) -> bool:
    """Whether the module normalises: ``BatchNorm2d``, ``LayerNorm``, ``LlamaRMSNorm``."""
    return "Norm" in info.module_type
