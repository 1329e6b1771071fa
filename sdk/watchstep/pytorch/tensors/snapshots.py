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

from watchstep.capture.tensors.snapshots import Occasion, TakenSnapshot, fitting
from watchstep.format.snapshot import Described, TensorPart, aligned_order, parts_metadata
from watchstep.format.tensors import bounded_word
from watchstep.pytorch.probes.staging import has_all_memory
from watchstep.pytorch.tensors.full_tensors import FORMAT_NAMES, shard_of, swap_bytes

if TYPE_CHECKING:
    from watchstep.capture.steps.session import Session
    from watchstep.pytorch.names import NamedParameter


@dataclass(frozen=True)
class _TensorCopy:
    """A tensor to copy, its description in the snapshot, and its place if it is a shard."""

    described: Described
    tensor: Tensor
    part: TensorPart | None = None


def pin_memory(session: Session, parameters: Sequence[NamedParameter]) -> None:
    """Let full tensors of a model on a CUDA device be copied to pinned memory."""
    if any(named.parameter.is_cuda for named in parameters):
        session.snapshot_writer.memory.allocate = _allocate_pinned


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
    parts = {copy.described.name: copy.part for copy in ordered if copy.part is not None}
    writer.offer(
        TakenSnapshot(
            step=step,
            mode="train",
            occasion=occasion,
            parameters=state,
            tensors=tensors,
            data=(memory[:size],),
            memory=(memory,),
            missing=missing,
            ready=ready,
            describe=lambda: parts_metadata(parts),
        )
    )


def _copies_of(parameters: Sequence[NamedParameter]) -> list[_TensorCopy]:
    copies = []
    for named in parameters:
        copies.append(_copy_of(named.weight.name, named.parameter))
        if named.parameter.grad is not None:
            copies.append(_copy_of(named.gradient.name, named.parameter.grad))
    return [copy for copy in copies if copy is not None]


def _copy_of(name: str, tensor: Any) -> _TensorCopy | None:
    """Return None for a dtype or layout that a snapshot does not support, and for a tensor whose storage the program has freed."""
    local, part = shard_of(tensor)
    dtype = None if local is None else FORMAT_NAMES.get(local.dtype)
    if local is None or dtype is None or local.layout is not torch.strided or not has_all_memory(local):
        return None
    return _TensorCopy(Described(bounded_word(name), dtype, tuple(local.shape)), local.detach(), part)


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
    places: list[tuple[int, int]] = []
    place = 0
    for copy in copies:
        length = copy.described.length
        places.append((place, place + length))
        if length:
            target = whole[place : place + length].view(copy.tensor.dtype).view(copy.tensor.shape)
            target.copy_(copy.tensor, non_blocking=copy.tensor.is_cuda)
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
            for copy, (start, end) in zip(copies, places, strict=True):
                values = copy.tensor
                swap_bytes(memory[start:end], values.element_size(), is_complex=values.is_complex())

    return ready
