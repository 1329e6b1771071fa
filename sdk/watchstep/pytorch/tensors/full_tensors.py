"""Full tensors of collections: PyTorch tensors copied in their own dtype, without waiting for a device.

A tensor in host memory is copied at once. One on a device is copied on its current stream while training continues: later
operations that change or free it are ordered after the copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from watchstep.capture.config import TensorLimits
from watchstep.capture.tensors.collections import SELECTABLE, Copy, DueTensor, TensorCapture
from watchstep.format.snapshot import TensorPart
from watchstep.format.tensors import Mode, TensorInfo
from watchstep.platform.program_errors import is_of_program
from watchstep.pytorch import internals
from watchstep.pytorch.names import is_sharding
from watchstep.pytorch.observable import dense_values
from watchstep.pytorch.probes.staging import has_all_memory

FORMAT_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of PyTorch's dtypes in a safetensors header."""


def save(
    capture: TensorCapture,
    collections: Collection[str],
    step: int,
    mode: Mode,
    tensors: Sequence[tuple[TensorInfo, Tensor]],
) -> None:
    """Save tensors of the same collections, if they are due.

    Args:
        capture: The tensors of the session.
        collections: Names of their collections.
        step: Step of the run.
        mode: Mode of the pass.
        tensors: Descriptions and values. The shape and dtype of the values count.
    """
    collection = capture.due(collections, step, mode)
    if collection is not None:
        for info, tensor in tensors:
            save_one(capture, collection, step, mode, info, tensor)


def save_one(  # noqa: PLR0913 - where a tensor is saved, and what it is
    capture: TensorCapture,
    collection: str,
    step: int,
    mode: Mode,
    info: TensorInfo,
    tensor: Tensor,
    *,
    change: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Save a tensor in a collection that is due. One that cannot be saved is counted, and named in health.

    A shard is saved with its place in the whole tensor.

    Args:
        capture: The tensors of the session.
        collection: Name of the collection.
        step: Step of the run.
        mode: Mode of the pass.
        info: Its description.
        tensor: Its values.
        change: Returns the values that are saved, for the local values of a tensor. They have the same shape.
    """
    try:
        found = _saved(capture, collection, info, tensor, change)
    except Exception as error:  # the operations of a tensor of the program's own class may raise anything
        if is_of_program(error):
            raise
        found = f"could not be copied ({type(error).__name__})"
    if isinstance(found, str):
        capture.unsupported(collection, info.name, found)
    else:
        capture.add(collection, step, mode, *found)


def save_number(  # noqa: PLR0913 - the arguments of `TensorCapture.add_number`
    capture: TensorCapture,
    step: int,
    mode: Mode,
    info: TensorInfo,
    value: Tensor,
    *,
    derived: bool,
    replaces: bool,
) -> None:
    """Save a tensor of one element that is logged on a device, if it is due.

    Args:
        capture: The tensors of the session.
        step: Step of the run.
        mode: Mode of the number.
        info: Its description.
        value: Its value.
        derived: As in `DueTensor`.
        replaces: As in `DueTensor`.
    """
    collection = capture.due(info.collections, step, mode)
    if collection is None:
        return
    found = _saved(capture, collection, info, value.detach().reshape(()))
    if isinstance(found, str):
        capture.unsupported(collection, info.name, found)
        return
    due, copy = found
    capture.add(collection, step, mode, replace(due, derived=derived, replaces=replaces), copy)


@torch.no_grad()
def _saved(
    capture: TensorCapture,
    collection: str,
    info: TensorInfo,
    tensor: Tensor,
    change: Callable[[Tensor], Tensor] | None = None,
) -> tuple[DueTensor, Copy] | str:
    """Return what is saved of a tensor, or why it cannot be saved."""
    local, part = shard_of(tensor)
    if local is None:
        return "are partial sums, whose total is on no worker"
    dense = dense_values(local)
    dtype = None if dense is None else FORMAT_NAMES.get(dense.dtype)
    if dense is None or dtype is None or dense.layout is not torch.strided:
        return f"have a dtype or layout that is not saved ({local.dtype})"
    if not has_all_memory(dense):
        return "had no memory when they were due, because the program had freed it"
    values = dense.detach()
    if change is not None:
        values = change(values)
        dtype = FORMAT_NAMES[values.dtype]
    if info.role in SELECTABLE and part is None:
        values, part = _selected(values, capture.limits(collection))
    return DueTensor(info, dtype, tuple(values.shape), part), _copy_of(values)


def shard_of(tensor: Tensor) -> tuple[Tensor | None, TensorPart | None]:
    """Return the local values of a tensor, and their place if it is a shard; no values for a partial sum."""
    placements, mesh = getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)
    if placements is None or mesh is None:
        return tensor, None
    if any(placement.is_partial() for placement in placements):
        return None, None
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    if not any(map(is_sharding, placements)):
        return local, None
    start = internals.offset_of_shard(tensor.shape, mesh, placements)
    if start is None:
        return None, None
    # An empty shard may start behind the end.
    within = tuple(min(index, size) for index, size in zip(start, tensor.shape, strict=True))
    return local, TensorPart(tuple(tensor.shape), within, is_shard=True)


def _selected(values: Tensor, limits: TensorLimits) -> tuple[Tensor, TensorPart | None]:
    """Return the rows and channels that the limits select, and their place."""
    whole, start = tuple(values.shape), [0] * values.dim()
    for dimension, part in enumerate((limits.rows, limits.channels)):
        if part is not None and dimension < values.dim():
            start[dimension] = min(part[0], values.shape[dimension])
            values = values.narrow(
                dimension, start[dimension], min(part[1], values.shape[dimension]) - start[dimension]
            )
    if tuple(values.shape) == whole:
        return values, None
    return values, TensorPart(whole, tuple(start), is_shard=False)


def _copy_of(values: Tensor) -> Copy:
    def copy(memory: NDArray[np.uint8]) -> Callable[[], None] | None:
        target = torch.from_numpy(memory).view(values.dtype).view(values.shape)
        # Copies from devices other than CUDA's have no event that shows their end.
        target.copy_(values, non_blocking=values.is_cuda)
        swaps = sys.byteorder == "big"
        if not values.is_cuda:
            if swaps:
                swap_bytes(memory, values.element_size(), is_complex=values.is_complex())
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(values.device))

        def ready() -> None:
            event.synchronize()
            if swaps:
                swap_bytes(memory, values.element_size(), is_complex=values.is_complex())

        return ready

    return copy


def swap_bytes(memory: NDArray[np.uint8], width: int, *, is_complex: bool) -> None:
    """Convert elements of ``width`` bytes to little-endian, as the snapshot format requires."""
    element = width // 2 if is_complex else width
    memory[:] = memory.reshape(-1, element)[:, ::-1].reshape(-1)
