"""Dry run of a capture document: what a model's training would record, and its cost, without a recording.

One step of the model is measured by the recorder itself, in a collection that includes everything recordable. Which of these tensors the
document's collections include follows from their selectors. Without an input the step has no forward pass: gradients are zeros, and the
shapes of activations are unknown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from watchstep.capture.config import BUILT_IN, ROLES, Bounds, Cadence, CaptureConfig, Collection, placed
from watchstep.capture.steps.session import Session
from watchstep.capture.tensors.collections import SELECTABLE
from watchstep.errors import ConfigError
from watchstep.format import tensors
from watchstep.format.tensors import TensorInfo
from watchstep.pytorch.kernel import TorchKernel
from watchstep.pytorch.names import Names, bases_of, is_layer
from watchstep.pytorch.tensors.full_tensors import FORMAT_NAMES
from watchstep.pytorch.watch import Watch

_EVERYTHING = "everything recordable"
_UNSAVED_ROLES = frozenset({"update", "checksum", "not_in_optimizer"})
"""Roles that are measured, and never saved in full."""

_BY_PROGRAM = frozenset({tensors.LOSSES, tensors.METRICS, tensors.LABELS, tensors.CUSTOM, tensors.CONFUSION})

_SAMPLED = 16_384
"""Elements of an update that are measured."""

_ROW_SECONDS = 2e-6
"""Cost of one tensor in addition to that of its elements: measured at 2.1 microseconds each for 1,000 tensors of 64 elements."""

_QUEUE_BYTES = 1 << 40
_PROBE_ELEMENTS = 1 << 20
_PROBE_SECONDS = 0.05
_HOUR_SECONDS = 3600.0


class Recordable(NamedTuple):
    """A tensor that can be recorded.

    Attributes:
        info: its description.
        built_in: the built-in collections that include it.
        bases: names of its module's class and base classes.
        is_measured: whether the step computed it. Otherwise its shape is unknown.
    """

    info: TensorInfo
    built_in: tuple[str, ...]
    bases: tuple[str, ...]
    is_measured: bool = True

    @property
    def elements(self) -> int:
        """Number of elements that are measured; 0 if the shape is unknown."""
        if not self.is_measured:
            return 0
        size = math.prod(self.info.shape)
        return min(size, _SAMPLED) if self.info.role == "update" else size


@dataclass(frozen=True)
class CollectionPlan:
    """What one collection records.

    Attributes:
        name: name of the collection.
        tensors: names of its tensors, in the model's order.
        unknown: how many of them have an unknown shape.
        rows_per_step: rows of statistics per training step on average; None if the overhead budget decides.
        object_tensors: number of full tensors in each of its objects; 0 if none are saved.
        object_bytes: size of their elements.
        hour_bytes: size that is written within an hour at the given step time; None if it is unknown.
        faults: selectors that match nothing, and limits that no tensor fits into.
    """

    name: str
    tensors: tuple[str, ...]
    unknown: int = 0
    rows_per_step: float | None = None
    object_tensors: int = 0
    object_bytes: int = 0
    hour_bytes: float | None = None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class DryRun:
    """What a model's training would record.

    Attributes:
        collections: the collections by name, except those that the program itself fills.
        by_program: names of collections that the program fills: losses, metrics, `hook.record`.
        has_input: whether the step had a forward pass.
        rows: rows of one step at which everything is due.
        elements: elements that are measured at such a step.
        elements_per_second: throughput of the kernel on this machine's CPU.
        fixed_rows_per_step: average rows per step of collections with a number of steps.
        fixed_seconds_per_step: estimated CPU time per step for these.
        full_seconds: estimated CPU time of a step at which everything is due.
        device: type of the model's device.
    """

    collections: tuple[CollectionPlan, ...]
    by_program: tuple[str, ...]
    has_input: bool
    rows: int
    elements: int
    elements_per_second: float
    fixed_rows_per_step: float
    fixed_seconds_per_step: float
    full_seconds: float
    device: str

    @property
    def faults(self) -> list[str]:
        """Faults of all collections, each with its path in the document."""
        return [fault for plan in self.collections for fault in plan.faults]


@dataclass
class _Model:
    """A model with its optimizer and input."""

    module: nn.Module
    optimizer: Optimizer | None
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    has_input: bool = False


def dry_run(
    config: CaptureConfig, made: Any, given: Any, *, has_input: bool, step_seconds: float | None = None
) -> DryRun:
    """Return what a configuration records of a model.

    Args:
        config: the configuration.
        made: the model, or the model and its optimizer. The model makes a step.
        given: the input: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        has_input: whether there is an input.
        step_seconds: time of a training step.

    Raises:
        ConfigError: the model is none, or its forward pass fails.
    """
    model = _model_of(made, given, has_input=has_input)
    recordables = _recordables(model, config.probes)
    members: dict[str, list[Recordable]] = {name: [] for name in config.chosen}
    rates: dict[str, float] = {}
    measured: dict[str, Recordable] = {}
    for recordable in recordables:
        name = recordable.info.name
        for collection_name in _collections(recordable, config):
            members[collection_name].append(recordable)
            collection = config.chosen[collection_name]
            if collection.cadence is not None:
                measured[name] = recordable
                rates[name] = max(rates.get(name, 0.0), _rate(collection.in_mode("train")))
    plans, by_program = [], []
    for name, collection in config.chosen.items():
        if name in _BY_PROGRAM or not (collection.selects or name in BUILT_IN):
            by_program.append(name)
            continue
        plans.append(_plan(name, collection, members[name], recordables, step_seconds))
    speed = _elements_per_second()
    fixed_rows = sum(rates.values())
    fixed_elements = sum(rate * measured[name].elements for name, rate in rates.items())
    elements = sum(recordable.elements for recordable in measured.values())
    parameter = next(model.module.parameters(), None)
    return DryRun(
        collections=tuple(plans),
        by_program=tuple(by_program),
        has_input=has_input,
        rows=len(measured),
        elements=elements,
        elements_per_second=speed,
        fixed_rows_per_step=fixed_rows,
        fixed_seconds_per_step=fixed_elements / speed + fixed_rows * _ROW_SECONDS,
        full_seconds=elements / speed + len(measured) * _ROW_SECONDS,
        device="cpu" if parameter is None else parameter.device.type,
    )


def _model_of(made: Any, given: Any, *, has_input: bool) -> _Model:
    module, optimizer = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"--model: the factory returned a {type(module).__name__}",
            "return a torch.nn.Module, or a module and its optimizer",
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"--model: the factory returned a module and a {type(optimizer).__name__}",
            "return a torch.nn.Module and a torch.optim.Optimizer",
        )
    if isinstance(given, Mapping):
        return _Model(module, optimizer, (), given, has_input)
    arguments = tuple(given) if isinstance(given, tuple | list) else (given,)
    return _Model(module, optimizer, arguments if has_input else (), {}, has_input)


def _recordables(model: _Model, probes: tuple[str, ...]) -> list[Recordable]:
    """Return everything that can be recorded of one step of a model, in the order of its modules."""
    everything = {
        **{name: Collection(Cadence()) for name in BUILT_IN},
        _EVERYTHING: Collection(Cadence(), roles=ROLES),
    }
    config = CaptureConfig(
        collections=everything,
        overhead_budget=None,
        gate=False,
        probes=probes,
        system=None,
        bounds=Bounds(queue_bytes=_QUEUE_BYTES),
    )
    session = Session.begin(config, 0, "ignore")
    watch = Watch(session, model.module, model.optimizer, counts_steps=True)
    try:
        _step(model)
        session.recorder.hand_over()
    finally:
        watch.detach()
    found: dict[str, TensorInfo] = {}
    while (item := session.queue.take()) is not None:
        for record in item.records:
            found.update((info.name, info) for info in record.group.tensors)
    modules = dict(watch.model.named_modules())
    bases = {path: bases_of(module) for path, module in modules.items()}
    recordables = [Recordable(info, _built_in(info), bases.get(info.module, ())) for info in found.values()]
    if not model.has_input:
        recordables += _outputs(watch.model, everything, bases)
    return sorted(recordables, key=lambda recordable: recordable.info.order)


def _step(model: _Model) -> None:
    """Make one training step."""
    module = model.module
    module.train()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = model.optimizer
    if optimizer is None and parameters:
        optimizer = torch.optim.SGD(parameters, lr=0.0)
    if model.has_input:
        try:
            loss = _loss_of(module(*model.arguments, **model.keywords))
            if loss is not None and loss.requires_grad:
                loss.backward()
        except Exception as error:
            raise ConfigError(
                f"--input: the model's forward or backward pass fails ({type(error).__name__}: {error})"[
                    :500
                ],
                "return a tensor, a tuple of arguments or a mapping of keyword arguments that the model accepts",
            ) from error
    else:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    if optimizer is not None:
        optimizer.step()


def _loss_of(output: Any) -> Tensor | None:
    """Return the sum of the floating-point tensors in an output; None if it has none."""
    if isinstance(output, Tensor):
        return output.float().sum() if output.is_floating_point() else None
    parts = list(output.values()) if isinstance(output, Mapping) else output
    if not isinstance(parts, tuple | list):
        return None
    losses = [loss for part in parts if (loss := _loss_of(part)) is not None]
    return torch.stack(losses).sum() if losses else None


def _built_in(info: TensorInfo) -> tuple[str, ...]:
    return tuple(name for name in info.collections if name in BUILT_IN)


def _outputs(
    module: nn.Module, everything: Mapping[str, Collection], bases: Mapping[str, tuple[str, ...]]
) -> list[Recordable]:
    """Return the inputs and outputs of the modules of a model, whose shapes are unknown."""
    names = Names(module, "", everything, set())
    found = []
    for order, (path, part) in enumerate(module.named_modules()):
        is_leaf, is_model = is_layer(path, part), not path
        outputs = (*(tensors.ACTIVATIONS,) * is_leaf, *(tensors.OUTPUTS,) * is_model)
        for role, built_in in (("output", outputs), ("input", (tensors.INPUTS,) * is_model)):
            info = names.of_module(path, part, order, role, built_in)
            found.append(Recordable(info, _built_in(info), bases[path], is_measured=False))
    return found


def _collections(recordable: Recordable, config: CaptureConfig) -> tuple[str, ...]:
    info = recordable.info
    if info.role not in ROLES:  # losses and metrics, which no selector names
        return tuple(name for name in recordable.built_in if name in config.chosen)
    return placed(info, recordable.built_in, config.chosen, recordable.bases).collections


def _rate(cadence: Cadence | None) -> float:
    """Return the share of training steps at which a cadence is due; 0 if the overhead budget decides."""
    return 0.0 if cadence is None or cadence.every is None else 1.0 / cadence.every


def _plan(
    name: str,
    collection: Collection,
    members: Sequence[Recordable],
    recordables: Sequence[Recordable],
    step_seconds: float | None,
) -> CollectionPlan:
    cadence = collection.in_mode("train")
    adaptive = cadence is not None and cadence.every is None
    plan = CollectionPlan(
        name=name,
        tensors=tuple(member.info.name for member in members),
        unknown=sum(not member.is_measured for member in members),
        rows_per_step=None if adaptive else len(members) * _rate(cadence),
    )
    path = f"collections.{name}"
    faults = [f"{path}{fault}" for fault in _unmatched(collection, members, recordables)]
    if collection.tensors is None:
        return replace(plan, faults=tuple(faults))
    sizes = [size for member in members if (size := _saved_bytes(member, collection)) is not None]
    limit = collection.tensor_limits.hour_bytes
    fits = limit is None or not sizes or min(sizes) <= limit
    if not fits:
        faults.append(
            f"{path}.tensor_limits.hour_bytes: {limit} is less than the smallest tensor, of {min(sizes)} bytes"
        )
    if members and not sizes and not plan.unknown:
        faults.append(f"{path}.tensors: none of its tensors is saved in full")
    per_hour = None
    if step_seconds is not None and collection.tensors.applies_in("train"):
        objects = _HOUR_SECONDS / step_seconds * _rate(collection.tensors)
        per_hour = min(objects * sum(sizes), math.inf if limit is None else limit) if fits else 0.0
    return replace(
        plan,
        object_tensors=len(sizes),
        object_bytes=sum(sizes),
        hour_bytes=per_hour,
        faults=tuple(faults),
    )


def _saved_bytes(recordable: Recordable, collection: Collection) -> int | None:
    """Return the size of a full tensor; None if it is not saved, or its shape is unknown."""
    info, limits = recordable.info, collection.tensor_limits
    dtype = getattr(torch, info.dtype, None)
    if not recordable.is_measured or info.role in _UNSAVED_ROLES or dtype not in FORMAT_NAMES:
        return None
    shape = list(info.shape)
    if info.role in SELECTABLE:
        for dimension, part in enumerate((limits.rows, limits.channels)):
            if part is not None and dimension < len(shape):
                shape[dimension] = max(0, min(part[1], shape[dimension]) - part[0])
    return math.prod(shape) * torch.empty(0, dtype=dtype).element_size()


def _unmatched(
    collection: Collection, members: Sequence[Recordable], recordables: Sequence[Recordable]
) -> list[str]:
    """Return the selectors that match nothing."""
    selectors: list[tuple[str, str, Collection]] = []
    if collection.include is not None:
        selectors.append(("include", repr(collection.include), Collection(include=collection.include)))
    if collection.exclude is not None:
        selectors.append(("exclude", repr(collection.exclude), Collection(include=collection.exclude)))
    for field_name in ("modules", "module_types", "roles"):
        selectors += [
            (field_name, repr(word), Collection(**{field_name: (word,)}))  # type: ignore[arg-type]
            for word in getattr(collection, field_name)
        ]
    unmatched = [
        f".{field_name}: {shown} matches no tensor"
        for field_name, shown, alone in selectors
        if not any(alone.matches(recordable.info, recordable.bases) for recordable in recordables)
    ]
    if not unmatched and not members and collection.selects:
        return [": no tensor matches all of its selectors"]
    return unmatched


def _elements_per_second(clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the throughput of the recorder's kernel on float32 in host memory."""
    kernel, values = TorchKernel(), torch.linspace(-1.0, 1.0, _PROBE_ELEMENTS)
    kernel.measure([values]).collect()  # loads the library
    rounds, since = 0, clock()
    while (spent := clock() - since) < _PROBE_SECONDS or not rounds:
        kernel.measure([values]).collect()
        rounds += 1
    return rounds * _PROBE_ELEMENTS / spent
