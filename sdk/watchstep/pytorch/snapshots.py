"""Full tensors of a model's weights and gradients, encoded for the store."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from watchstep.pytorch.names import NamedParameter
from watchstep.snapshot import NamedArray, encode

_FORMAT_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""PyTorch's dtypes by their names in a safetensors header."""


def encode_parameters(parameters: list[NamedParameter]) -> bytes:
    """The weights, and the gradients that there are, as one safetensors object, each in its own dtype."""
    tensors = []
    for named in parameters:
        tensors.append(_raw(named.weight.name, named.parameter))
        if named.parameter.grad is not None:
            tensors.append(_raw(named.gradient.name, named.parameter.grad))
    return encode([tensor for tensor in tensors if tensor is not None], {})


def _raw(name: str, tensor: Tensor) -> NamedArray | None:
    """The tensor's bytes; None for a dtype or layout that a snapshot cannot hold."""
    if tensor.dtype not in _FORMAT_NAMES or tensor.layout is not torch.strided:
        return None
    held = tensor.detach().cpu().contiguous()
    data = held.reshape(-1).view(torch.uint8).numpy()
    if sys.byteorder == "big":
        data = data.reshape(-1, held.element_size())[:, ::-1]
    return NamedArray(name, _FORMAT_NAMES[tensor.dtype], tuple(tensor.shape), data.tobytes())
