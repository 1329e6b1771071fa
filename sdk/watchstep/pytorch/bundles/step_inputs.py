"""What the current step was computed from: references to its batches and arguments, random states, and buffers before its first pass.

Nothing of a model is copied but its buffers that passes change, as running statistics, up to a limit. Batches and arguments are
referenced, and their versions noted: those of a batch when the data loader yields it or the program gives it, those of arguments at the forward
pass. A tensor that was changed in place since is reported as lost. References are dropped when the next step begins; of a step with many
micro-batches, those beyond the limits of memory and file descriptors are dropped earlier.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections import UserDict
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from watchstep.capture.config import Bundles
from watchstep.pytorch import internals
from watchstep.pytorch.bundles.random_states import RandomStateCopies, RandomStates, TorchStates
from watchstep.pytorch.probes.staging import has_all_memory

try:
    import resource
except ImportError:  # Windows has none; shared memory has no file descriptors there
    resource = None  # type: ignore[assignment]

_MAX_DEPTH, _MAX_VISITS = 6, 512
"""Limits of the values that are looked at at each pass."""

_EMPTY = {tuple, dict}
_MAX_MICRO_BATCHES = 4096
_MAX_LOSSES = 16
"""Losses of a micro-batch that are referenced."""

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - only its free space is read
_MIN_SHARED_BYTES = 256 * 2**20
_SHARED_FACTOR = 8
"""Earlier micro-batches in the shared memory of loader workers stay referenced only while so many bytes of it, and so many times their size, are
free: a container has 64 MiB of it by default, and workers that find it full end the program."""

_MAX_SHARED_TENSORS = 1024
_DESCRIPTOR_SHARE = 16
"""Tensors of earlier micro-batches in shared memory have one file descriptor each. At most this part of the limit of open files is kept by them."""


@dataclasses.dataclass
class Contents:
    """What a value of a program refers to, as far as it was looked at.

    Attributes:
        tensors: the tensors in it.
        bytes: their size, and that of arrays and text.
        is_complete: whether all of it was looked at, and understood.
        shared: ids of the tensors in shared memory.
    """

    tensors: list[Tensor] = dataclasses.field(default_factory=list)
    bytes: int = 0
    is_complete: bool = True
    shared: set[int] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, *values: Any) -> Contents:
        """Look at values: at lists, tuples, dictionaries and dataclasses, not deeper than `_MAX_DEPTH`, and `_MAX_VISITS` values in all.

        No method of the program's own classes is called, because a container may load or compute what it returns.
        """
        contents = cls()
        waiting = [(value, 0) for value in values if type(value) not in _EMPTY or value]
        visits = 0
        while waiting:
            value, depth = waiting.pop()
            visits += 1
            entries = contents._add(value)
            if entries is None:
                continue
            room = _MAX_VISITS - visits - len(waiting)
            if depth >= _MAX_DEPTH or room <= 0:
                contents.is_complete = False
                continue
            taken = list(islice(entries, room + 1))
            contents.is_complete &= len(taken) <= room
            waiting += [(entry, depth + 1) for entry in taken[:room]]
        return contents

    def _add(self, value: Any) -> Iterator[Any] | None:
        """Add a value without entries, or return the entries of any other."""
        if isinstance(value, Tensor):
            if value.layout is torch.strided and not value.is_nested:
                self.bytes += value.numel() * value.element_size()
                # `Tensor.is_shared` makes an object of a deprecated class, which takes ten times as long.
                if value.is_cpu and type(value) is Tensor and value.untyped_storage().is_shared():
                    self.shared.add(id(value))
            else:
                self.is_complete = False
            self.tensors.append(value)
        elif type(value) is np.ndarray:
            self.bytes += value.nbytes
        elif type(value) in {str, bytes}:
            self.bytes += len(value)
        elif value is not None and type(value) not in {bool, int, float}:
            entries = _entries_of(value)
            self.is_complete &= entries is not None
            return entries
        return None


def _plain(values: tuple[Any, ...]) -> Contents | None:
    """Return the contents of values without containers but tuples and lists of ordinary tensors in memory that is not shared; None for others.

    These are the arguments of most models, and are looked at in each pass.
    """
    contents = Contents()
    for value in values:
        if type(value) in _EMPTY and not value:
            continue
        if type(value) is not tuple and type(value) is not list:
            return None
        for tensor in value:
            if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
                return None
            if tensor.is_cpu and tensor.untyped_storage().is_shared():
                return None
            contents.bytes += tensor.nbytes
            contents.tensors.append(tensor)
    return contents


def _entries_of(value: Any) -> Iterator[Any] | None:
    """Return the entries of a container without a call of the program's own methods; None for another value."""
    if isinstance(value, dict):
        return iter(dict.values(value))
    if isinstance(value, list):
        return list.__iter__(value)
    if isinstance(value, tuple):
        return tuple.__iter__(value)
    if isinstance(value, UserDict) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        own = _own_attributes(value)
        return None if own is None else iter(own.values())
    return None


def _own_attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object; None for a class with slots."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return own if isinstance(own, dict) else None


def version_of(tensor: Tensor) -> int:
    """Return the number of changes in place; 0 for inference tensors, for which PyTorch does not count them."""
    return 0 if tensor.is_inference() else internals.version(tensor)


class TensorVersions:
    """Versions of referenced tensors, which are kept alive by the references.

    Attributes:
        bytes: size of what is referenced.
        is_complete: whether all of it is counted.
        shared: ids of the tensors in shared memory.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[list[Tensor], list[int]]] = []
        self.bytes = 0
        self.is_complete = True
        self.shared: set[int] = set()

    def note(self, *values: Any) -> None:
        """Note the versions of the tensors in values."""
        if not (contents := _plain(values)):
            contents = Contents.of(*values)
        self.bytes += contents.bytes
        self.is_complete &= contents.is_complete
        self.shared |= contents.shared
        self._noted.append((contents.tensors, [version_of(tensor) for tensor in contents.tensors]))

    def add(self, other: TensorVersions) -> None:
        """Add what was noted earlier."""
        self.bytes += other.bytes
        self.is_complete &= other.is_complete
        self.shared |= other.shared
        self._noted += other._noted

    def are_of(self, *values: Any) -> bool:
        """Return whether values have the tensors that were noted, or equal copies of them, and no others. Waits for devices if there are copies.

        A program may replace, add or remove entries of a container. Some containers replace theirs when they are moved to a device. True if not all of
        the values is known.
        """
        contents = Contents.of(*values)
        if not (self.is_complete and contents.is_complete):
            return True
        noted = [tensor for tensors, _ in self._noted for tensor in tensors]
        if {id(tensor) for tensor in contents.tensors} == {id(tensor) for tensor in noted}:
            return True
        return len(noted) == len(contents.tensors) and all(map(_is_copy, contents.tensors, noted))

    def is_changed(self, tensor: Tensor) -> bool:
        """Return whether a tensor was changed in place since its version was noted. False for one that was not noted."""
        for tensors, versions in self._noted:
            for noted, version in zip(tensors, versions, strict=True):
                if noted is tensor:
                    return version_of(tensor) != version
        return False


@dataclasses.dataclass
class MicroBatch:
    """The forward passes of training up to a backward pass, and what they were computed from.

    Attributes:
        random: states of the generators before the first of them.
        batch_versions: versions of the tensors of the batch, when it was yielded or given.
        argument_versions: versions of the tensors of the arguments, at the forward pass.
        autocast: whether autocast was enabled, and its dtype, by device type.
        syncs: whether `DistributedDataParallel` averages its gradients; None without it.
        batch: the batch as the data loader yielded it, or as the program gave it.
        has_batch: whether there is one.
        random_at_batch: states of PyTorch's generators when it was yielded or given; None without one.
        arguments: positional arguments of the model; None if the model itself was not called.
        keywords: keyword arguments of the model.
        losses: losses at ``backward()``, one element each.
        is_dropped: whether the references were dropped, because the step has too many.
    """

    random: RandomStates
    autocast: dict[str, tuple[bool, torch.dtype]]
    syncs: bool | None
    batch: Any = None
    has_batch: bool = False
    random_at_batch: TorchStates | None = None
    batch_versions: TensorVersions = dataclasses.field(default_factory=TensorVersions)
    argument_versions: TensorVersions = dataclasses.field(default_factory=TensorVersions)
    arguments: tuple[Any, ...] | None = None
    keywords: Mapping[str, Any] | None = None
    losses: list[Tensor] = dataclasses.field(default_factory=list)
    is_dropped: bool = False

    def drop(self) -> None:
        """Drop the references."""
        self.batch = self.arguments = self.keywords = None
        self.batch_versions, self.argument_versions = TensorVersions(), TensorVersions()
        self.is_dropped = True

    @property
    def bytes(self) -> int:
        """Size of what it refers to, at most."""
        return self.batch_versions.bytes + self.argument_versions.bytes

    @property
    def is_complete(self) -> bool:
        """Whether all of what it refers to is counted."""
        return self.batch_versions.is_complete and self.argument_versions.is_complete

    @property
    def shared(self) -> int:
        """Number of tensors in shared memory."""
        return len(self.batch_versions.shared | self.argument_versions.shared)


_SMALL_BUFFER = 8192
"""Elements of running statistics; tables of positions and masks, which do not change, are larger."""


def _are_alike(first: Tensor, second: Tensor) -> bool:
    return (first.shape, first.dtype, first.device) == (second.shape, second.dtype, second.device)


@dataclasses.dataclass
class _RepeatedCopy:
    """A copy of the same buffers into the same tensors as in the last step, all of which are copied at each step.

    Attributes:
        owners: dictionary of each buffer in its module, and its key.
        buffers: the buffers.
        targets: their copies.
    """

    owners: list[tuple[Mapping[str, Tensor | None], str]]
    buffers: list[Tensor]
    targets: list[Tensor]

    def __post_init__(self) -> None:
        self._shapes = [target.shape for target in self.targets]
        self._bytes = [buffer.untyped_storage().nbytes() for buffer in self.buffers]

    def make(self) -> bool:
        """Copy. Returns False, and copies nothing, if the program has replaced a buffer, or changed its shape or the size of its storage."""
        checked = zip(self.owners, self.buffers, self._shapes, self._bytes, strict=True)
        for (owner, leaf), buffer, shape, size in checked:
            if owner.get(leaf) is not buffer or buffer.shape != shape:
                return False
            if buffer.untyped_storage().nbytes() != size:
                return False
        internals.copy_each(self.targets, self.buffers)
        return True


class BufferCopies:
    """Copies of the buffers of a model before the first pass of a step. Only those that may have changed since are copied again.

    PyTorch's batch normalization changes running statistics without counting it as a change in place. So all small buffers of floating-point
    numbers are copied at each step, and those of its layers of any size. Those of its layers are the first within the limit.
    """

    def __init__(self, model: nn.Module, limit: int) -> None:
        self._limit = limit
        self.list_places(model)

    def list_places(self, model: nn.Module) -> None:
        """Find the buffers of the modules that the model has now, and drop all copies."""
        places = [
            (f"{path}.{leaf}" if path else leaf, module, leaf)
            for path, module in model.named_modules()
            for leaf in internals.buffers_of(module)
        ]
        self._places = sorted(places, key=lambda place: not isinstance(place[1], internals.norm_base.value))
        self._copies: dict[str, tuple[Tensor, int, Tensor]] = {}
        self._repeat: _RepeatedCopy | None = None
        self.left_out: set[str] = set()

    @torch.no_grad()
    def update(self) -> None:
        """Copy the buffers that have changed."""
        if self._repeat is None or not self._repeat.make():
            self._repeat = None
            self._update_each()

    def _update_each(self) -> None:
        targets, sources = [], []
        is_repeatable = True
        size = 0
        for name, module, leaf in self._places:
            buffer = internals.buffers_of(module).get(leaf)
            if buffer is None or buffer.is_meta:
                self._copies.pop(name, None)
                continue
            is_ordinary = buffer.layout is torch.strided and not buffer.is_nested and type(buffer) is Tensor
            if not (is_ordinary and has_all_memory(buffer)):
                self.left_out.add(name)
                self._copies.pop(name, None)
                continue
            length = buffer.numel() * buffer.element_size()
            if size + length > self._limit:
                self._copies.pop(name, None)
                self.left_out.add(name)
                continue
            size += length
            self.left_out.discard(name)
            copy = self._copies.get(name)
            version = version_of(buffer)
            is_small = buffer.numel() <= _SMALL_BUFFER and buffer.is_floating_point()
            is_counted = not (
                is_small or buffer.is_inference() or isinstance(module, internals.norm_base.value)
            )
            is_repeatable &= not is_counted and not buffer.requires_grad
            if copy is not None and copy[0] is buffer and copy[1] == version and is_counted:
                continue
            if copy is not None and copy[0] is buffer and _are_alike(copy[2], buffer):
                targets.append(copy[2])
                sources.append(buffer.detach())
                self._copies[name] = (buffer, version, copy[2])
            else:
                self._copies[name] = (buffer, version, buffer.detach().clone())
        if targets:
            internals.copy_each(targets, sources)
        if targets and is_repeatable and len(targets) == len(self._places) and internals.stores_buffers():
            owners = [(internals.buffers_of(module), leaf) for _, module, leaf in self._places]
            self._repeat = _RepeatedCopy(owners, [copy[0] for copy in self._copies.values()], targets)

    def forget(self) -> None:
        """Drop all references to the model."""
        self._places, self._copies, self._repeat = [], {}, None

    def values(self) -> dict[str, Tensor]:
        """Return the copies by name."""
        return {name: copy for name, (_, _, copy) in self._copies.items()}


class StepInputs:
    """The inputs of the current step of one watched model. Used on the training thread.

    Attributes:
        micro_batches: forward passes of the step, in order.
        buffers: copies of the model's buffers before the first of them.
        step: the step; -1 before the first.
        loader: the position of the data loader after its last batch: epoch, number, ids of its samples. The data loader itself is not
            referenced, because it ends its worker processes when it is no longer used.
    """

    def __init__(self, model: nn.Module, outer: Any, config: Bundles) -> None:
        self._outer = outer if isinstance(outer, nn.parallel.DistributedDataParallel) else None
        self._config = config
        self._random = RandomStateCopies()
        self._next_batches: dict[int, tuple[Any, TensorVersions]] = {}
        self._next_random: TorchStates | None = None
        self._given = False
        self._parameters = _counted(model)
        self._parameter_versions: list[int] = []
        self._bytes: float = 0  # of earlier micro-batches; infinite if they are not all counted
        self.micro_batches: list[MicroBatch] = []
        self.buffers = BufferCopies(model, config.buffer_bytes)
        self.step = -1
        self.loader: tuple[int, int, Any] | None = None

    def modules_changed(self, model: nn.Module) -> None:
        """Handle modules that the program has replaced, before the first pass of a step."""
        self._parameters = _counted(model)
        self.buffers.list_places(model)

    def begin_pass(self, step: int) -> None:
        """Handle the start of a forward pass of training."""
        if step != self.step:
            self.step = step
            self.micro_batches = []
            self._bytes = 0
            self._parameter_versions = internals.versions(self._parameters)
            self.buffers.update()
        elif len(self.micro_batches) >= _MAX_MICRO_BATCHES:
            return
        elif self.micro_batches and not self.micro_batches[-1].losses and not self._next_batches:
            return  # another pass for the same loss
        batch = MicroBatch(
            self._random.capture(),
            _autocast(),
            None if self._outer is None else bool(self._outer.require_backward_grad_sync),
        )
        if self._next_batches:
            yielded, self._next_batches = list(self._next_batches.values()), {}
            batch.random_at_batch, self._next_random = self._next_random, None
            batches = tuple(each for each, _ in yielded)
            batch.batch, batch.has_batch = batches[0] if len(batches) == 1 else batches, True
            for _, versions in yielded:
                batch.batch_versions.add(versions)
        self.micro_batches.append(batch)
        self._drop_old()

    def other_pass(self) -> None:
        """Handle the start of a pass in another mode: the batches so far were for it."""
        self._next_batches.clear()

    def called(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Handle the arguments of the model in the current pass. Of several calls, the first counts."""
        if not self.micro_batches:
            return
        batch = self.micro_batches[-1]
        if batch.arguments is None and not batch.is_dropped:
            batch.arguments, batch.keywords = arguments, dict(keywords)
            batch.argument_versions.note(arguments, batch.keywords)

    def backward(self, loss: Tensor) -> None:
        """Handle a loss at ``backward()``, detached from its graph."""
        if self.micro_batches and loss.numel() == 1 and len(self.micro_batches[-1].losses) < _MAX_LOSSES:
            self.micro_batches[-1].losses.append(loss)

    def give_batch(self, batch: Any) -> None:
        """Set the batch of the next pass, by the program. From now on those of data loaders are ignored."""
        self._given = True
        self._next_batches = {0: (batch, _noted(batch))}
        self._next_random = TorchStates.capture()

    def batch_yielded(self, loader: Any, batch: Any, sample_ids: Any, epoch: int, number: int) -> None:
        """Handle a batch that a data loader yields: it is taken for that of the next pass of training. Those of several loaders are a tuple."""
        if not self._given and torch.is_grad_enabled():
            self._next_batches.pop(id(loader), None)  # so that the order is that of the last batches
            self._next_batches[id(loader)] = batch, _noted(batch)
            self._next_random = TorchStates.capture()
            self.loader = (epoch, number, sample_ids)

    def forget(self) -> None:
        """Drop all references to the program, at the end of the recording."""
        self.micro_batches, self._parameters, self._next_batches = [], [], {}
        self._outer, self.loader = None, None
        self.buffers.forget()

    def failed(self, error: Exception) -> None:
        """Ignore a failure of the observation of data loaders: the recording of samples counts it."""

    def changed_parameters(self) -> set[int]:
        """Return the ids of parameters that were changed in place since the first pass of the step."""
        return {
            id(parameter)
            for parameter, version in zip(self._parameters, self._parameter_versions, strict=False)
            if version_of(parameter) != version
        }

    def _drop_old(self) -> None:
        """Drop references of the oldest micro-batches beyond the limits. Those of the current pass are alive anyway."""
        if len(self.micro_batches) < 2:
            return
        last = self.micro_batches[-2]
        self._bytes += last.bytes if last.is_complete and not last.shared else math.inf
        if self._bytes <= self._config.reference_bytes:
            return
        size = shared = 0
        for batch in reversed(self.micro_batches[:-1]):
            if batch.is_dropped:
                return  # as are all before it
            size += batch.bytes
            is_kept = batch.is_complete and size <= self._config.reference_bytes
            if is_kept and batch.shared:
                shared += batch.shared
                is_kept = shared <= _most_shared_tensors() and _free_shared_bytes() >= max(
                    _MIN_SHARED_BYTES, _SHARED_FACTOR * size
                )
            if not is_kept:
                batch.drop()
                size = self._config.reference_bytes + 1


@torch.no_grad()
def _is_copy(tensor: Tensor, original: Tensor) -> bool:
    """Return whether a tensor has the values of another one; NaN equals NaN."""
    if tensor is original:
        return True
    if (tensor.shape, tensor.dtype) != (original.shape, original.dtype):
        return False
    moved = tensor.detach().to(original.device)
    return bool(((moved == original) | ((moved != moved) & (original != original))).all())  # noqa: PLR0124 - true for NaN, of any dtype


def _counted(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model without those of inference tensors, which do not change, and have no versions."""
    return [parameter for parameter in model.parameters() if not parameter.is_inference()]


def _noted(batch: Any) -> TensorVersions:
    versions = TensorVersions()
    versions.note(batch)
    return versions


def _most_shared_tensors() -> int:
    if resource is None:
        return _MAX_SHARED_TENSORS
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = limit == resource.RLIM_INFINITY
    return _MAX_SHARED_TENSORS if unlimited else min(_MAX_SHARED_TENSORS, limit // _DESCRIPTOR_SHARE)


def _free_shared_bytes() -> int:
    try:
        free = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return 0
    return free.f_bavail * free.f_frsize


def _autocast() -> dict[str, tuple[bool, torch.dtype]]:
    cpu = {"cpu": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))}
    if not _has_cuda():
        return cpu
    return {**cpu, "cuda": (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))}


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()
