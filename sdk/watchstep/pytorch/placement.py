"""Where this worker's part of a model stands: whole, one of several replicas, or a shard.

Shards are told by their `torch.distributed.tensor.DTensor`, as FSDP2 and tensor parallelism make them: along a mesh
dimension that shards, workers hold disjoint parts, which merge; along one that replicates they hold the same, which is
compared and never merged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from watchstep.tensors import Placement, Stage

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Standing:
    """One parameter's part.

    Attributes:
        weight: placement of the parameter and of what the optimizer keeps for it.
        gradient: placement of its gradient, as the optimizer sees it.
        replicas: how many workers hold the same part.
    """

    weight: Placement = field(default_factory=Placement)
    gradient: Placement = field(default_factory=Placement)
    replicas: int = 1

    @property
    def records(self) -> bool:
        """Whether this worker records statistics of it: of equal replicas, the first does."""
        return self.weight.replica == 0


def replicated(model: Any) -> Standing:
    """How a whole model stands: under DistributedDataParallel each rank holds a replica, and gradients are reduced."""
    return (
        replica(model.process_group) if isinstance(model, nn.parallel.DistributedDataParallel) else Standing()
    )


def replica(group: ProcessGroup | None = None) -> Standing:
    """How a model stands of which each rank of a group, or of the world, holds a replica; gradients are reduced."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return Standing()
    rank = torch.distributed.get_rank(group)
    return Standing(
        Placement(replica=rank),
        Placement(replica=rank, stage="reduced"),
        torch.distributed.get_world_size(group),
    )


def standing(parameter: torch.Tensor, whole: Standing) -> Standing:
    """How one parameter stands.

    Args:
        parameter: of the model.
        whole: how the model stands where the parameter itself does not say.
    """
    mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", None)
    if mesh is None or placements is None:
        return whole
    replicas, index, count, replica = 1, 0, 1, 0
    for dimension, kind in enumerate(placements):
        size, here = mesh.size(dimension), mesh.get_local_rank(dimension)
        if kind.is_shard():
            index, count = index * size + here, count * size
        else:
            replica, replicas = replica * size + here, replicas * size
    stage: Stage = "reduced" if count * replicas > 1 else "local"
    return Standing(Placement(index, count, replica), Placement(index, count, replica, stage), replicas)
