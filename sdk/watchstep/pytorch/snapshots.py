"""Full tensors of a model's weights and gradients, copied out of training's way."""

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
"""PyTorch's dtypes by their names in a safetensors header."""


@dataclass(frozen=True)
class _TensorCopy:
    """A tensor to be copied, and how the snapshot describes it."""

    described: Described
    tensor: Tensor


def prepare(session: Session, parameters: Sequence[NamedParameter]) -> None:
    """Have memory for a model's snapshots made off the training thread, where a cadence says that there will be some."""
    trained = [named.parameter for named in parameters if named.parameter.requires_grad]
    if any(parameter.is_cuda for parameter in trained):
        session.snapshot_writer.memory.allocate = _pinned
    if session.config.snapshots.every is not None:
        copies = [_copy_of("", parameter) for parameter in trained]
        session.snapshot_writer.prepare(2 * sum(copy.described.length for copy in copies if copy is not None))


def take(
    session: Session, occasion: Occasion, step: int, parameters: Sequence[NamedParameter], state: str
) -> None:
    """Copy the weights, and the gradients that there are, each in its own dtype, and hand them over.

    One copy on the training thread, into memory that is kept; a device copies while training goes on. What does not
    fit is left out and named; of a bad step the bad tensors come first then.

    Args:
        session: the recording.
        occasion: why.
        step: the step.
        parameters: in the model's order.
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
        ready = _copied(ordered, memory)
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
    """None for a dtype or layout that a snapshot cannot hold."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a shard, as this worker holds it
    dtype = _FORMAT_NAMES.get(local.dtype)
    if dtype is None or local.layout is not torch.strided:
        return None
    return _TensorCopy(Described(bounded_word(name), dtype, tuple(local.shape)), local.detach())


def _is_finite(copy: _TensorCopy) -> bool:
    """Whether a tensor holds only finite numbers; not asked of a device, for it would have to be waited for."""
    tensor = copy.tensor
    if tensor.device.type != "cpu":
        return True
    # PyTorch has no isfinite for fp8.
    return bool(torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all())


def _pinned(size: int) -> NDArray[np.uint8]:
    memory: NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


def _copied(copies: Sequence[_TensorCopy], memory: NDArray[np.uint8]) -> Callable[[], None]:
    """Copy tensors one behind the other; returns what waits until they are there."""
    whole = torch.from_numpy(memory)
    place = 0
    for copy in copies:
        length = copy.described.length
        if length:
            into = whole[place : place + length].view(copy.tensor.dtype).view(copy.tensor.shape)
            into.copy_(copy.tensor, non_blocking=True)
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
            _turn_bytes([copy.described for copy in copies], memory)

    return ready


def _turn_bytes(tensors: Sequence[Described], memory: NDArray[np.uint8]) -> None:
    """A snapshot's elements are little-endian."""
    place = 0
    for tensor in tensors:
        part = memory[place : place + tensor.length]
        width = tensor.itemsize // 2 if tensor.dtype.startswith("C") else tensor.itemsize
        part[:] = part.reshape(-1, width)[:, ::-1].reshape(-1)
        place += tensor.length
