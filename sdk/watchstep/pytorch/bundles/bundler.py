"""Takes bundles: decides at which step, and writes the step as it is before its update.

While nothing happens, a step costs what `StepInputs` notes. A bundle is written on the training thread to an unnamed file of this machine,
one tensor after another, so that no second copy of the model is in memory; the thread that writes snapshots uploads it.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from watchstep.capture.config import Bundles
from watchstep.capture.identity import Identity
from watchstep.capture.provenance import program_data
from watchstep.capture.steps.session import Session
from watchstep.capture.tensors.bundle_plan import BundleOccasion
from watchstep.capture.tensors.snapshots import StoredFile
from watchstep.format.bundle import (
    BUFFERS,
    DIGEST_BYTES,
    DIGESTS,
    DOCUMENT,
    GRADIENTS,
    MAX_DOCUMENT,
    PARAMETERS,
    BundleDocument,
    LostValue,
)
from watchstep.format.layout import BundleKey
from watchstep.format.snapshot import Described, header
from watchstep.platform.program_errors import is_of_program
from watchstep.pytorch import internals
from watchstep.pytorch.bundles import random_states
from watchstep.pytorch.bundles.program import device_data, precision_data
from watchstep.pytorch.bundles.step_inputs import MicroBatch, StepInputs, TensorVersions
from watchstep.pytorch.bundles.values import ValueEncoder
from watchstep.pytorch.parameters import amp
from watchstep.pytorch.probes.staging import has_all_memory
from watchstep.pytorch.tensors.full_tensors import FORMAT_NAMES, swap_bytes

_log = logging.getLogger("watchstep")
_MAX_SAMPLE_IDS = 10_000


@dataclass(frozen=True)
class _Stored:
    """A tensor of a bundle: where its bytes come from, and how soon it is left out of a large bundle."""

    described: Described
    values: Tensor | NDArray[Any]
    priority: int


class Bundler:
    """The bundles of one attempt and worker. Used on the training thread.

    Attributes:
        inputs: the inputs of the current step.
    """

    def __init__(
        self, session: Session, identity: Identity, run_url: str, inputs: StepInputs, model: nn.Module
    ) -> None:
        assert session.config.bundles is not None
        self.inputs = inputs
        self._config = session.config.bundles
        self._process = os.getpid()
        self._session = session
        self._identity = identity
        self._run_url = run_url
        self._model = model
        self._objects: dict[str, Any] = {}

    def forget(self) -> None:
        """Drop all references to the program, at the end of the recording."""
        self._objects = {}
        self._model = nn.Module()
        self.inputs.forget()

    def include(self, objects: Mapping[str, Any]) -> None:
        """Also store the state dictionaries of these objects in later bundles."""
        self._objects.update(objects)

    def before_update(
        self, step: int, optimizers: Iterable[Optimizer], *, is_complete: bool | None = None
    ) -> None:
        """Write a bundle of a step if one is due. The update has not been made yet. Faults are counted.

        Args:
            step: The step.
            optimizers: The optimizers that update the model.
            is_complete: Whether all passes of the step were observed; None to find out. False: only a failing step is bundled.
        """
        plan, health = self._session.bundles, self._session.health
        if self._session.recorder.last_recorded is not None:
            return  # the step is computed again
        if not plan.is_pending or os.getpid() != self._process:
            return  # a forked child, such as a worker of a data loader, has no step of its own
        complete = self.inputs.step == step if is_complete is None else is_complete
        occasion = plan.due(step, is_complete=complete)
        if occasion is None:
            return
        since = self._session.schedule.now()
        try:
            self._write(step, occasion, list(optimizers))
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            health.fault("bundle", error)
            health.count("dropped_bundles")
        self._session.schedule.report_extra(since)

    def _write(self, step: int, occasion: BundleOccasion, optimizers: list[Optimizer]) -> None:
        content = _BundleContent(self._config, self.inputs, self._model)
        document = content.document(self._run_data(), step, occasion, optimizers, self._objects)
        file, size = content.write(document)
        with file:  # the memory map keeps it
            data = np.memmap(file, np.uint8, "r", shape=(size,))
        worker, reason = self._identity.worker, occasion.reason
        self._session.snapshot_writer.offer(
            StoredFile(lambda attempt: BundleKey(attempt, worker, step, reason).path, data, "bundles")
        )
        if reason == "gate":
            contains = f"without {len(document.lost)} values" if document.lost else "with its batch"
            _log.warning(
                "watchstep: step %d is not finite and is bundled, %s: watchstep replay %s --program FILE.py"
                " (capture 'bundles: null' stores no batches)",
                step,
                contains,
                self._run_url,
            )
        if document.lost:
            self._session.health.note(
                "bundles", f"the bundle of step {step} lacks {len(document.lost)} values"
            )

    def _run_data(self) -> dict[str, Any]:
        identity = self._identity
        return {
            "project": identity.project,
            "run": identity.run,
            "attempt": identity.attempt,
            "worker": identity.worker,
            "world_size": identity.world_size,
        }


class _NotedVersions:
    """The versions that were noted of the values that are encoded.

    An object of its own: if the content of a bundle and its encoder referred to each other, gradients would stay in memory until a garbage collection.
    """

    versions: TensorVersions | None = None

    def is_changed(self, tensor: Tensor) -> bool:
        """Return whether a tensor was changed in place since it was referenced."""
        return self.versions is not None and self.versions.is_changed(tensor)


class _BundleContent:
    """Collects the values of one bundle, and writes them."""

    def __init__(self, config: Bundles, inputs: StepInputs, model: nn.Module) -> None:
        self._config = config
        self._inputs = inputs
        self._model = model
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._left_out: dict[str, Tensor | NDArray[Any]] = {}
        self._noted = _NotedVersions()
        self._encoder = ValueEncoder(config.redact, self._noted.is_changed)
        self._stored: list[_Stored] = []
        self._gradients: list[str] = []
        self._values_before = 0

    def document(
        self,
        run: Mapping[str, Any],
        step: int,
        occasion: BundleOccasion,
        optimizers: list[Optimizer],
        objects: Mapping[str, Any],
    ) -> BundleDocument:
        """Collect everything, and return the document without what exceeds the limit."""
        encoder = self._encoder
        micro_batches = tuple(
            self._micro_batch(number, batch) for number, batch in enumerate(self._inputs.micro_batches)
        )
        if not micro_batches:
            self._lose("micro_batches", "no forward pass of the model was observed, as in compiled code")
        self._values_are(0)
        loader = self._loader()
        self._buffers()
        self._parameters()
        optimizer_values = tuple(
            {
                "class": type(optimizer).__name__,
                "state": encoder.encode(
                    self._state_of_torch(optimizer, f"optimizers/{number}"), f"optimizers/{number}"
                ),
                "parameters": self._names_of(optimizer),
                "scaled": amp.gradients_are_scaled(optimizer),
            }
            for number, optimizer in enumerate(optimizers)
        )
        states = {
            name: (each, self._state_of_torch(each, f"objects/{name}"))
            for name, each in _companions(optimizers).items()
        }
        states.update({name: (each, _state_of(each)) for name, each in objects.items()})
        object_values = {
            name: {"class": type(each).__name__, "state": encoder.encode(state, f"objects/{name}")}
            for name, (each, state) in states.items()
        }
        self._values_are(3)
        self._gradient_tensors()
        program = {
            name: value
            for name, value in {**program_data(), **device_data()}.items()
            if not encoder.is_redacted(f"program/{name}")
        }
        stored_names = self._fit()
        document = BundleDocument(
            run=run,
            step=step,
            time_ns=time.time_ns(),
            reason=occasion.reason,
            requests=occasion.requests,
            program=program,
            precision=precision_data(),
            model=_model_data(self._model),
            micro_batches=micro_batches,
            optimizers=optimizer_values,
            objects=object_values,
            loader=loader,
            gradients=tuple(self._gradients),
            lost=tuple(encoder.lost),
            redacted=self._config.redact,
        )
        self._stored = [stored for stored in self._stored if stored.described.name in stored_names]
        return document

    def write(self, document: BundleDocument) -> tuple[IO[bytes], int]:
        """Write the bundle to an unnamed file. Returns the file and its size in bytes."""
        content = document.encode()
        if len(content) > MAX_DOCUMENT:
            raise ValueError(f"the document has {len(content)} bytes; the limit is {MAX_DOCUMENT}")
        digests = np.zeros((len(self._gradients), DIGEST_BYTES), np.uint8)
        gradients = {f"{GRADIENTS}{name}": place for place, name in enumerate(self._gradients)}
        ordered = sorted(self._stored, key=lambda stored: -stored.described.itemsize)
        described = [
            *(stored.described for stored in ordered),
            Described(DOCUMENT, "U8", (len(content),)),
            Described(DIGESTS, "U8", digests.shape),
        ]
        file = tempfile.TemporaryFile(prefix="watchstep-bundle-")  # noqa: SIM115 - the caller closes it
        try:
            file.write(header(described, {"format": "watchstep.bundle"}))
            for stored in ordered:
                data = _bytes_of(stored.values)
                file.write(data)
                place = gradients.pop(stored.described.name, None)
                if place is not None:
                    digests[place] = _digest(data)
            for name, place in gradients.items():  # left out for their size
                digests[place] = _digest(_bytes_of(self._left_out[name]))
            file.write(content)
            file.write(digests.tobytes())
            file.flush()
            return file, file.tell()
        except BaseException:
            file.close()
            raise

    def _micro_batch(self, number: int, batch: MicroBatch) -> dict[str, Any]:
        path, encoder = f"micro_batches/{number}", self._encoder
        states = random_states.as_value(batch.random)
        if states["python"] is None:
            self._lose(
                f"{path}/random/python", "random numbers of Python or NumPy were drawn since the last copy"
            )
        data: dict[str, Any] = {
            "random": encoder.encode(states, f"{path}/random"),
            "autocast": {
                device: [enabled, str(dtype)] for device, (enabled, dtype) in batch.autocast.items()
            },
            "syncs": batch.syncs,
            "losses": encoder.encode(list(batch.losses), f"{path}/losses"),
        }
        at_batch = None if batch.random_at_batch is None else batch.random_at_batch.as_value(batch.random)
        if at_batch is not None:
            data["random_at_batch"] = encoder.encode(at_batch, f"{path}/random_at_batch")
        if batch.is_dropped:
            self._lose(path, "the micro-batches of the step exceed Bundles.reference_bytes")
        elif batch.has_batch:
            self._noted.versions = batch.batch_versions
            data["batch"] = self._input(
                batch.batch, f"{path}/batch", batch.batch_versions.are_of(batch.batch)
            )
        # The arguments of the model are the batch, or computed from it.
        if encoder.is_redacted(f"{path}/batch"):
            data |= {"arguments": {"redacted": "with the batch"}, "keywords": {"redacted": "with the batch"}}
        elif batch.arguments is not None:
            self._noted.versions = batch.argument_versions
            is_same = batch.argument_versions.are_of(batch.arguments, batch.keywords)
            data["arguments"] = self._input(batch.arguments, f"{path}/arguments", is_same)
            data["keywords"] = self._input(dict(batch.keywords or {}), f"{path}/keywords", is_same)
        self._noted.versions = None
        return data

    def _input(self, value: Any, path: str, is_same: bool) -> Any:
        """Encode an input of a pass. It is lost if the program has replaced entries of its containers since."""
        if is_same:
            return self._encoder.encode(value, path)
        return self._encoder.lose(value, path, "the program has replaced, added or removed entries of it")

    def _loader(self) -> dict[str, Any] | None:
        if self._inputs.loader is None:
            return None
        epoch, number, ids = self._inputs.loader
        data: dict[str, Any] = {"epoch": epoch, "batch": number}
        if ids is not None:
            data["sample_ids"] = self._encoder.encode(list(ids)[:_MAX_SAMPLE_IDS], "loader/sample_ids")
        return data

    def _buffers(self) -> None:
        for name, copy in self._inputs.buffers.values().items():
            self._store(f"{BUFFERS}{name}", copy, priority=1)
        for name in sorted(self._inputs.buffers.left_out):
            self._lose(f"{BUFFERS}{name}", "the buffers exceed Bundles.buffer_bytes")

    def _parameters(self) -> None:
        changed = self._inputs.changed_parameters()
        for path, parameter in self._model.named_parameters():
            name = f"{PARAMETERS}{path}"
            if id(parameter) in changed:
                self._lose(name, "it was changed in place after the forward pass read it")
            else:
                self._store(name, parameter, priority=2)

    def _gradient_tensors(self) -> None:
        for path, parameter in self._model.named_parameters():
            gradient = parameter.grad
            if gradient is not None and self._store(f"{GRADIENTS}{path}", gradient, priority=4):
                self._gradients.append(path)

    def _names_of(self, optimizer: Optimizer) -> list[str]:
        """Return the names of an optimizer's parameters, in the order of its state; empty for those of other models."""
        return [
            self._names.get(id(parameter), "")
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    def _values_are(self, priority: int) -> None:
        """Store the values that were encoded since the last call."""
        for referenced in self._encoder.tensors[self._values_before :]:
            described = Described(referenced.name, referenced.dtype, referenced.shape)
            self._stored.append(_Stored(described, referenced.values, priority))
        self._values_before = len(self._encoder.tensors)

    def _store(self, name: str, tensor: Any, *, priority: int) -> bool:
        if self._encoder.is_redacted(name):
            return False
        if hasattr(tensor, "device_mesh"):
            self._lose(name, "it is a shard of a larger tensor")
            return False
        dtype = FORMAT_NAMES.get(tensor.dtype)
        if not has_all_memory(tensor):
            self._lose(name, "the program has freed its memory")
            return False
        if dtype is None or tensor.layout is not torch.strided or tensor.is_meta:
            self._lose(name, f"tensors with layout {tensor.layout} and {tensor.dtype} are not stored")
            return False
        self._stored.append(_Stored(Described(name, dtype, tuple(tensor.shape)), tensor.detach(), priority))
        return True

    def _fit(self) -> set[str]:
        """Return the names of the tensors that fit, those of the smallest priority first. The others are lost."""
        room, names = self._config.limit_bytes, set()
        lost: dict[str, int] = {}
        for stored in sorted(self._stored, key=lambda each: each.priority):
            if stored.described.length <= room:
                room -= stored.described.length
                names.add(stored.described.name)
            else:
                group = stored.described.name.partition("/")[0]
                lost[group] = lost.get(group, 0) + 1
                self._left_out[stored.described.name] = stored.values
        for group, number in lost.items():
            self._lose(group, f"{number} tensors do not fit into Bundles.limit_bytes")
        return names

    def _state_of_torch(self, owner: Any, path: str) -> Any:
        """Return the state dictionary of an object whose class leaves it to PyTorch; None for others.

        The program's own code is not called here: it may compute, draw random numbers or wait for other ranks. Objects that the program
        names itself are asked for theirs.
        """
        method = type(owner).state_dict
        is_of_torch = str(getattr(method, "__module__", "")).startswith("torch.")
        if not is_of_torch or internals.has_state_hooks(owner):
            self._lose(
                path,
                f"{type(owner).__name__} has a state_dict of its own: name it by hook.include_in_bundles",
            )
            return None
        return _state_of(owner)

    def _lose(self, path: str, reason: str) -> None:
        self._encoder.lost.append(LostValue(path, reason))


class _Memory:
    """The memory of a tensor for NumPy. After `Tensor.numpy` the program could no longer resize the tensor, or free its storage."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor  # NumPy keeps this object
        place = tensor.data_ptr(), True
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (tensor.numel(),), "data": place}


def _bytes_of(values: Tensor | NDArray[Any]) -> memoryview:
    """Return the bytes of a tensor in order, little-endian; of a device after a copy to the host."""
    if isinstance(values, Tensor):
        if not values.numel():
            return memoryview(b"")
        flat = values.detach().cpu().contiguous().reshape(-1)
        if flat.is_conj() or flat.is_neg():
            flat = flat.resolve_conj().resolve_neg()
        data: NDArray[np.uint8] = np.asarray(_Memory(flat.view(torch.uint8)))
        if sys.byteorder == "little":
            return data.data
        data = data.copy()
        swap_bytes(data, values.element_size(), is_complex=values.is_complex())
        return data.data
    data = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
    return data.data


def digest(tensor: Tensor) -> bytes:
    """Return the digest of a tensor's bytes, as in ``gradient_digests``."""
    return bytes(_digest(_bytes_of(tensor)))


def _digest(data: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest(), np.uint8)


def _state_of(owner: Any) -> Any:
    """Return the state dictionary of an object, or the exception as text, which is stored as such."""
    try:
        # Not around the whole bundle: another thread of the program may draw random numbers meanwhile.
        with random_states.unchanged():
            return owner.state_dict()
    except Exception as error:  # the state of a program's object may not be available
        if is_of_program(error):
            raise
        return {"state_dict raised": f"{type(error).__name__}: {error}"[:500]}


def _companions(optimizers: Iterable[Optimizer]) -> dict[str, Any]:
    """Return the learning rate schedulers of optimizers and the gradient scalers of the process. Searches all objects once."""
    ids = {id(optimizer) for optimizer in optimizers}
    found: dict[str, Any] = {}
    for candidate in gc.get_objects():
        kind = type(candidate)
        if issubclass(kind, LRScheduler):
            if id(getattr(candidate, "optimizer", None)) in ids:
                found[f"scheduler_{sum(name.startswith('scheduler') for name in found)}"] = candidate
        elif issubclass(kind, torch.amp.GradScaler) and candidate.is_enabled():
            found[f"scaler_{sum(name.startswith('scaler') for name in found)}"] = candidate
    return found


def _model_data(model: nn.Module) -> dict[str, Any]:
    training = model.training
    return {
        "class": type(model).__name__,
        "training": training,
        "frozen": [path for path, parameter in model.named_parameters() if not parameter.requires_grad],
        "other_mode": [path for path, module in model.named_modules() if module.training != training],
    }
