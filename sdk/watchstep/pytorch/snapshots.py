"""Snapshots: complete weights and gradients of a model, copied with little delay of training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from watchstep.capture.snapshots import Occasion, TakenSnapshot, fitting
from watchstep.format.snapshot import Described, aligned_order
from watchstep.format.tensors import bounded_word

if TYPE_CHECKING:
    from watchstep.capture.session import Session
    from watchstep.pytorch.names import NamedParameter

_FORMAT_NAMES = {
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
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of PyTorch's dtypes in a safetensors header."""


@dataclass(frozen=True)
class _TensorCopy:
    """A tensor to copy, and its description in the snapshot."""

    described: Described
    tensor: Tensor


def prepare(session: Session, parameters: Sequence[NamedParameter]) -> None:
    """Request memory for a model's snapshots, allocated outside the training thread, if a cadence for snapshots is configured."""
    trained = [named.parameter for named in parameters if named.parameter.requires_grad]
    if any(parameter.is_cuda for parameter in trained):
        session.snapshot_writer.memory.allocate = _allocate_pinned
    if session.config.snapshots.every is not None:
        copies = [_copy_of("", parameter) for parameter in trained]
        session.snapshot_writer.prepare(2 * sum(copy.described.length for copy in copies if copy is not None))


def take(
    session: Session, occasion: Occasion, step: int, parameters: Sequence[NamedParameter], state: str
) -> None:
    """Copy the weights and existing gradients, each in its own dtype, and pass them to the snapshot writer.

    This makes one copy on the training thread, into reused memory; a device copies while training continues. Tensors that do not
    fit are omitted and listed as missing. If not all fit for a snapshot of the gate, non-finite tensors take precedence.

    Args:
        session: The recording.
        occasion: Reason for the snapshot.
        step: Step of the run.
        parameters: Parameters in the model's order.
        state: "before the update" or "after the update".
    """
    writer, health = session.snapshot_writer, session.health
    copies = _copies_of(parameters)
    available = writer.memory.available
    if occasion.reason == "gate" and sum(copy.described.length for copy in copies) > available:
        copies.sort(key=_is_finite)
    chosen = set(fitting([copy.described.length for copy in copies], available))
    fitting_copies = [copies[place] for place in sorted(chosen)]
    missing = tuple(copy.described.name for place, copy in enumerate(copies) if place not in chosen)
    size = sum(copy.described.length for copy in fitting_copies)
    memory = writer.memory.take(size) if size else None
    if memory is None:
        health.count("dropped_snapshots")
        return
    if missing:
        health.count("truncated_snapshots")
    ordered = [fitting_copies[place] for place in aligned_order([copy.described for copy in fitting_copies])]
    try:
        ready = _start_copy(ordered, memory)
    except BaseException:
        writer.memory.release(memory)
        raise
    tensors = tuple(copy.described for copy in ordered)
    writer.offer(TakenSnapshot(step, "train", occasion, state, tensors, memory, missing, ready))


def _copies_of(parameters: Sequence[NamedParameter]) -> list[_TensorCopy]:
    copies = []
    for named in parameters:
        copies.append(_copy_of(named.weight.name, named.parameter))
        if named.parameter.grad is not None:
            copies.append(_copy_of(named.gradient.name, named.parameter.grad))
    return [copy for copy in copies if copy is not None]


def _copy_of(name: str, tensor: Any) -> _TensorCopy | None:
    """Return None for a dtype or layout that a snapshot does not support."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # the shard of this worker
    dtype = _FORMAT_NAMES.get(local.dtype)
    if dtype is None or local.layout is not torch.strided:
        return None
    return _TensorCopy(Described(bounded_word(name), dtype, tuple(local.shape)), local.detach())


def _is_finite(copy: _TensorCopy) -> bool:
    """Return whether a tensor is finite; True for a device, because the answer would require waiting."""
    tensor = copy.tensor
    if tensor.device.type != "cpu":
        return True
    # PyTorch has no isfinite for fp8.
    return bool(torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all())


def _allocate_pinned(size: int) -> NDArray[np.uint8]:
    memory: NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


def _start_copy(copies: Sequence[_TensorCopy], memory: NDArray[np.uint8]) -> Callable[[], None]:
    """Start to copy tensors one after another, and return a function that waits for the copies."""
    whole = torch.from_numpy(memory)
    place = 0
    for copy in copies:
        length = copy.described.length
        if length:
            target = whole[place : place + length].view(copy.tensor.dtype).view(copy.tensor.shape)
            target.copy_(copy.tensor, non_blocking=True)
        place += length
    events = []
    for device in {copy.tensor.device for copy in copies if copy.tensor.is_cuda}:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        events.append(event)

    def ready() -> None:
        for event in events:
            event.synchronize()
        if sys.byteorder == "big":
            _swap_bytes([copy.described for copy in copies], memory)

    return ready


def _swap_bytes(tensors: Sequence[Described], memory: NDArray[np.uint8]) -> None:
    """Convert elements to little-endian, as the snapshot format requires."""
    place = 0
    for tensor in tensors:
        part = memory[place : place + tensor.length]
        width = tensor.itemsize // 2 if tensor.dtype.startswith("C") else tensor.itemsize
        part[:] = part.reshape(-1, width)[:, ::-1].reshape(-1)
        place += tensor.length
