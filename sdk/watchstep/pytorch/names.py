"""Names of parameters and modules in the author's model, and their placement: whole, replica or shard.

Shards are detected by `torch.distributed.tensor.DTensor`, which FSDP2 and tensor parallelism use. Along a sharding mesh
dimension, workers have disjoint parts, which are merged. Along a replicating one, they have the same values, which are compared
and never merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from watchstep.capture.config import Collection, placed
from watchstep.errors import ConfigError
from watchstep.format import tensors
from watchstep.format.tensors import Placement, Stage, TensorInfo
from watchstep.pytorch import internals

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ParameterPlacement:
    """Placement of one parameter.

    Attributes:
        weight: Placement of the parameter and its optimizer state.
        gradient: Placement of its gradient as passed to the optimizer.
        replicas: Number of workers with the same part.
    """

    weight: Placement = field(default_factory=Placement)
    gradient: Placement = field(default_factory=Placement)
    replicas: int = 1

    @property
    def records(self) -> bool:
        """Return whether this worker records statistics of the parameter: only the first of equal replicas does."""
        return self.weight.replica == 0


def replicated(model: Any) -> ParameterPlacement:
    """Return the placement of a model. Under DistributedDataParallel each rank has a replica, and gradients are reduced."""
    return (
        replica(model.process_group)
        if isinstance(model, nn.parallel.DistributedDataParallel)
        else ParameterPlacement()
    )


def replica(group: ProcessGroup | None = None) -> ParameterPlacement:
    """Return the placement of a model with a replica on each rank of a group, or of the world; gradients are reduced."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return ParameterPlacement()
    rank = torch.distributed.get_rank(group)
    return ParameterPlacement(
        Placement(replica=rank),
        Placement(replica=rank, stage="reduced"),
        torch.distributed.get_world_size(group),
    )


def placement_of(parameter: torch.Tensor, whole: ParameterPlacement) -> ParameterPlacement:
    """Return the placement of one parameter.

    Args:
        parameter: The parameter or buffer.
        whole: Placement of the model, for a parameter without a device mesh.
    """
    mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", None)
    if mesh is None or placements is None:
        return whole
    replicas, index, count, replica = 1, 0, 1, 0
    for dimension, kind in enumerate(placements):
        size, here = mesh.size(dimension), mesh.get_local_rank(dimension)
        if is_sharding(kind):
            index, count = index * size + here, count * size
        else:
            replica, replicas = replica * size + here, replicas * size
    stage: Stage = "reduced" if count * replicas > 1 else "local"
    return ParameterPlacement(
        Placement(index, count, replica), Placement(index, count, replica, stage), replicas
    )


def is_sharding(placement: Any) -> bool:
    """Return whether workers along a mesh dimension have disjoint parts.

    PyTorch's placement of FSDP2 over tensor parallelism, `_StridedShard`, does not call itself a shard.
    """
    return not placement.is_replicate() and not placement.is_partial()


_PARAMETRIZATIONS = "parametrizations"
"""Name of the child in which `torch.nn.utils.parametrize` keeps what computes a module's weights."""
_MOMENTA = {"exp_avg", "momentum_buffer", "momentum"}
_SUFFIXES = (
    "gradient",
    "update",
    "checksum",
    "not_in_optimizer",
    "exp_avg",
    "exp_avg_sq",
    "momentum_buffer",
    "step",
)
_SECOND_MOMENTS = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta"}


def unwrap(model: nn.Module) -> nn.Module:
    """Return the author's model inside wrappers for compilation and distributed training.

    Raises:
        ConfigError: The model is not a module, or is `nn.DataParallel`, which creates new replicas for each forward pass.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"watch({type(model).__name__})", "give a torch.nn.Module")
    if isinstance(model, nn.DataParallel):
        raise ConfigError(
            "watch: nn.DataParallel makes new replicas in every forward pass; they cannot be watched",
            "use nn.parallel.DistributedDataParallel, as PyTorch recommends, or watch the module inside",
        )
    inner = internals.original_of(model)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner = model.module
    return unwrap(inner) if isinstance(inner, nn.Module) else model


@dataclass(frozen=True)
class NamedParameter:
    """A parameter and the descriptions under which it, its gradient, its update and its checksum are recorded.

    ``not_in_optimizer`` describes the gradient while the parameter is in no optimizer.
    """

    parameter: nn.Parameter
    weight: TensorInfo
    gradient: TensorInfo
    update: TensorInfo
    checksum: TensorInfo
    not_in_optimizer: TensorInfo
    placement: ParameterPlacement
    bases: tuple[str, ...]


class Names:
    """Describes tensors of one watched model.

    Attributes:
        model: The model inside its wrappers.
        whole: Placement of the model among the workers.
    """

    def __init__(
        self,
        model: Any,
        prefix: str,
        collections: Mapping[str, Collection],
        used_collections: set[str],
        *,
        replicated: bool = False,
    ) -> None:
        self.model = unwrap(model)
        _check_modules(self.model)
        self.whole = replica() if replicated else _placement_of_wrapped(model)
        self._prefix = prefix
        self._collections = collections
        self._used_collections = used_collections

    def path(self, path: str) -> str:
        """Return a module's path, prefixed with the name of its model if it has one."""
        return f"{self._prefix}.{path}" if self._prefix and path else self._prefix or path

    def parameters(self) -> dict[int, NamedParameter]:
        """Return the model's parameters by id. A shared parameter has the name of its first owner."""
        named: dict[int, NamedParameter] = {}
        for order, (path, module) in enumerate(self.model.named_modules()):
            for leaf, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in named:
                    named[id(parameter)] = self._parameter(path, leaf, module, order, parameter)
        return named

    def has_all(self, named: Mapping[int, NamedParameter]) -> bool:
        """Return whether these are the model's parameters by id, without the description of new ones, which takes long."""
        return named.keys() == {id(parameter) for parameter in self.model.parameters()}

    def _parameter(
        self, path: str, leaf: str, module: nn.Module, order: int, parameter: nn.Parameter
    ) -> NamedParameter:
        module_path = self.path(path)
        name = f"{module_path}.{leaf}" if module_path else leaf
        is_bias = leaf == "bias" or leaf.endswith("_bias") or leaf.startswith("bias_")
        bases = bases_of(module)
        plain = TensorInfo(
            name=name,
            collections=(),
            role="bias" if is_bias else "weight",
            module=module_path,
            module_type=type(module).__name__,
            order=order,
            shape=tuple(parameter.shape),
            dtype=dtype_name(parameter.dtype),
        )
        gradient = replace(plain, name=f"{name}:gradient", role="gradient")
        update = replace(plain, name=f"{name}:update", role="update")
        not_in_optimizer = replace(plain, name=f"{name}:not_in_optimizer", role="not_in_optimizer")
        placement = placement_of(parameter, self.whole)
        # Each shard has its own checksum, because checksums cannot be merged.
        shard = f"_{placement.weight.shard_index}" if placement.weight.shard_count > 1 else ""
        checksum = replace(plain, name=f"{name}:checksum{shard}", role="checksum", shape=(), dtype="float64")
        return NamedParameter(
            parameter,
            weight=self._with_collections(plain, bases, tensors.BIASES if is_bias else tensors.WEIGHTS),
            gradient=self._with_collections(gradient, bases, tensors.GRADIENTS),
            update=self._with_collections(update, bases, tensors.UPDATES, tensors.OPTIMIZER_STATE),
            checksum=self._with_collections(checksum, bases, tensors.CHECKSUMS),
            not_in_optimizer=self._with_collections(not_in_optimizer, bases, tensors.NOT_IN_OPTIMIZER),
            placement=placement,
            bases=bases,
        )

    def state(self, named: NamedParameter, key: str, state: torch.Tensor) -> TensorInfo:
        """Describe a tensor of the optimizer state of a parameter.

        Args:
            named: The parameter.
            key: Key in the optimizer state, e.g. ``exp_avg``.
            state: The tensor.
        """
        role = "momentum" if key in _MOMENTA else "second_moment" if key in _SECOND_MOMENTS else "state"
        info = replace(
            named.weight, name=f"{named.weight.name}:{key}", role=role, dtype=dtype_name(state.dtype)
        )
        return self._with_collections(info, named.bases, tensors.OPTIMIZER_STATE)

    def of_module(
        self, path: str, module: nn.Module, order: int, role: str, built_in: tuple[str, ...]
    ) -> TensorInfo:
        """Describe the output or input of a module. Its shape and dtype are not known yet.

        Args:
            path: Path of the module.
            module: The module.
            order: Its index in the order of registration.
            role: ``output`` or ``input``.
            built_in: Built-in collections that include the tensor.
        """
        info = TensorInfo(
            name=f"{self.path(path) or 'model'}:{role}",
            collections=(),
            role=role,
            module=self.path(path),
            module_type=type(module).__name__,
            order=order,
        )
        return self._with_collections(info, bases_of(module), *built_in)

    def buffer(self, path: str, leaf: str, module: nn.Module, order: int) -> TensorInfo:
        """Describe a buffer of a module.

        Args:
            path: Path of the module.
            leaf: Name of the buffer in the module.
            module: The module.
            order: Its index in the order of registration.
        """
        tensor = module.get_buffer(leaf)
        module_path = self.path(path)
        info = TensorInfo(
            name=f"{module_path}.{leaf}" if module_path else leaf,
            collections=(),
            role="buffer",
            module=module_path,
            module_type=type(module).__name__,
            order=order,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
        )
        return self._with_collections(info, bases_of(module), tensors.BUFFERS)

    def _with_collections(self, info: TensorInfo, bases: tuple[str, ...], *built_in: str) -> TensorInfo:
        placed_info = placed(info, built_in, self._collections, bases)
        self._used_collections.update(placed_info.collections)
        return placed_info


def is_layer(path: str, module: nn.Module) -> bool:
    """Return whether a module is a layer, whose output is an activation: one without modules inside.

    Modules that compute a parametrized weight, as those of `torch.nn.utils.parametrizations.weight_norm`, are parts of their layer.

    Args:
        path: its path in the model.
        module: the module.
    """
    return _PARAMETRIZATIONS not in path.split(".") and all(
        name == _PARAMETRIZATIONS for name, _ in module.named_children()
    )


def _check_modules(model: nn.Module) -> None:
    """Raise `ConfigError` for modules that do not support hooks, and for parameters without a shape."""
    for path, module in model.named_modules():
        description = (
            f"watch({type(model).__name__}): module {path!r}" if path else f"watch({type(model).__name__})"
        )
        if isinstance(module, internals.script_module.value) and not isinstance(
            module, internals.traced_module.value
        ):
            raise ConfigError(
                f"{description} is a script module, which takes no hooks",
                "script the model after it is watched",
            )
        if any(map(torch.nn.parameter.is_lazy, module.parameters(recurse=False))):
            raise ConfigError(
                f"{description} has parameters without a shape", "watch the model after one forward pass"
            )


def _placement_of_wrapped(model: Any) -> ParameterPlacement:
    """Return the placement of a model, also if its DistributedDataParallel wrapper is compiled."""
    inner = internals.original_of(model) if isinstance(model, nn.Module) else None
    return _placement_of_wrapped(inner) if inner is not None else replicated(model)


def bases_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's class and its base classes in method resolution order."""
    return tuple(kind.__name__ for kind in type(module).__mro__)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, e.g. ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
