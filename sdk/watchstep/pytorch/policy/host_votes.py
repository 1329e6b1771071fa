"""Votes of ranks before an update: the highest number of all ranks, reduced on the host.

The votes have a gloo group of their own: they do not mix with the training's collectives. The group is not made by
`torch.distributed.new_group`, which all ranks would have to call: it counts groups, and a rank that never votes would wait in vain at the
next group of the program.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from watchstep.pytorch import internals

VOTE_TIMEOUT = timedelta(minutes=5)
"""Timeout of a vote for the other ranks, shorter than the ten minutes of NCCL's own collectives."""


class HostVotes:
    """The process group of one kind of votes. All ranks must vote in the same order."""

    def __init__(self, name: str) -> None:
        """Prepare votes; the group is created at the first vote.

        Args:
            name: Name of these votes, equal on all ranks, and different from that of all others of the program.
        """
        self._name = name
        self._world: weakref.ref[Any] | None = None
        self._group: Any = None
        self._groups = 0

    def highest(self, vote: int) -> int:
        """Return the highest vote of all ranks, or this rank's vote without a process group. Waits for the other ranks.

        Raises:
            RuntimeError: A rank has ended, or has not voted within `VOTE_TIMEOUT`.
        """
        if not distributed.is_available() or not distributed.is_initialized():
            return vote
        number = torch.tensor([vote], dtype=torch.int32, device="cpu")
        options = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.MAX  # type: ignore[assignment]
        self._own_group().allreduce([number], options).wait()
        return int(number.item())

    def close(self) -> None:
        """Close the connections, so that ranks that wait for this rank's vote fail at once."""
        self._group = None

    def _own_group(self) -> Any:
        """Return the process group, created at the first vote, which all ranks reach, and again after the program recreates its groups."""
        world = distributed.group.WORLD
        assert world is not None
        if self._group is None or self._world is None or self._world() is not world:
            self._world = weakref.ref(world)
            self._groups += 1
            store = internals.default_store(distributed.distributed_c10d)
            prefix = distributed.distributed_c10d.PrefixStore(
                f"watchstep/votes/{self._name}/{self._groups}", store
            )
            self._group = distributed.ProcessGroupGloo(
                prefix, distributed.get_rank(), distributed.get_world_size(), VOTE_TIMEOUT
            )
        return self._group
