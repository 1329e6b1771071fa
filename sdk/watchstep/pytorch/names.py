"""The names of a model's parameters and modules, as its author knows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from watchstep import tensors
from watchstep.errors import ConfigError
from watchstep.tensors import Placement, TensorInfo


def unwrap(model: nn.Module) -> nn.Module:
    """The author's model inside wrappers for compiling and distributed training.

    Raises:
        ConfigError: `nn.DataParallel`, whose replicas live for one forward pass only, or no module at all.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"watch({type(model).__name__})", "give a torch.nn.Module")
    if isinstance(model, nn.DataParallel):
        raise ConfigError(
            "watch: nn.DataParallel makes new replicas in every forward pass; they cannot be watched",
            "use nn.parallel.DistributedDataParallel, as PyTorch recommends, or watch the module inside",
        )
    inner = getattr(model, "_orig_mod", None)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner = model.module
    return unwrap(inner) if isinstance(inner, nn.Module) else model


@dataclass(frozen=True)
class NamedParameter:
    """A parameter, and how it and its gradient are recorded."""

    parameter: nn.Parameter
    weight: TensorInfo
    gradient: TensorInfo


def name_parameters(model: nn.Module) -> dict[int, NamedParameter]:
    """The model's parameters by id. A shared parameter has the name of its first owner."""
    named: dict[int, NamedParameter] = {}
    for order, (path, module) in enumerate(model.named_modules()):
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) in named:
                continue
            name = f"{path}.{leaf}" if path else leaf
            bias = leaf == "bias" or leaf.endswith("_bias") or leaf.startswith("bias_")
            weight = TensorInfo(
                name=name,
                collections=(tensors.BIASES if bias else tensors.WEIGHTS,),
                role="bias" if bias else "weight",
                module=path,
                module_type=type(module).__name__,
                order=order,
                shape=tuple(parameter.shape),
                dtype=dtype_name(parameter.dtype),
            )
            gradient = TensorInfo(
                name=f"{name}:gradient",
                collections=(tensors.GRADIENTS,),
                role="gradient",
                module=path,
                module_type=weight.module_type,
                order=order,
                shape=weight.shape,
                dtype=weight.dtype,
            )
            named[id(parameter)] = NamedParameter(parameter, weight, gradient)
    return named


def activation_info(
    path: str, module: nn.Module, order: int, place: int | None, output: torch.Tensor
) -> TensorInfo:
    """How an output of a module is recorded.

    Args:
        path: the module's path.
        module: the module.
        order: its rank in the order of registration.
        place: which of several outputs; None where there is one.
        output: the output.
    """
    name = f"{path or 'model'}:output" + ("" if place is None else f"_{place}")
    return TensorInfo(
        name=name,
        collections=(tensors.ACTIVATIONS,),
        role="output",
        module=path,
        module_type=type(module).__name__,
        order=order,
        shape=tuple(output.shape),
        dtype=dtype_name(output.dtype),
    )


def placements(model: Any) -> tuple[Placement, Placement]:
    """Where this worker's copy of a model stands: for what it computes itself, and for its gradients.

    Under DistributedDataParallel each rank holds a replica, and gradients are reduced when the optimizer sees them.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        rank = torch.distributed.get_rank(model.process_group)
        return Placement(replica=rank), Placement(replica=rank, stage="reduced")
    return Placement(), Placement()


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
