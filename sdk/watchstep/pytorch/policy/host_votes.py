"""Votes of ranks before an update: the highest number of all ranks, reduced on the host.

The votes use their own process group, with gloo: they do not mix with the training's collectives.
"""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed import ProcessGroup

VOTE_TIMEOUT = timedelta(minutes=5)
"""Timeout of a vote for the other ranks, shorter than the ten minutes of NCCL's own collectives."""


class HostVotes:
    """The process group of one kind of votes. All ranks must vote in the same order."""

    def __init__(self) -> None:
        self._world: weakref.ref[ProcessGroup] | None = None
        self._group: ProcessGroup | None = None

    def highest(self, vote: int) -> int:
        """Return the highest vote of all ranks, or this rank's vote without a process group. Waits for the other ranks.

        Raises:
            RuntimeError: A rank has ended, or has not voted within `VOTE_TIMEOUT`.
        """
        if not distributed.is_available() or not distributed.is_initialized():
            return vote
        number = torch.tensor([vote], dtype=torch.int32, device="cpu")
        distributed.all_reduce(number, op=distributed.ReduceOp.MAX, group=self._own_group())
        return int(number.item())

    def close(self) -> None:
        """Close the connections, so that ranks that wait for this rank's vote fail at once.

        Raises:
            RuntimeError: The group could not be closed.
        """
        group, self._group = self._group, None
        if group is not None and distributed.is_initialized():
            distributed.destroy_process_group(group)

    def _own_group(self) -> ProcessGroup:
        """Return the process group, created at the first vote, which all ranks reach, and again after the program recreates its groups."""
        world = distributed.group.WORLD
        assert world is not None
        if self._group is None or self._world is None or self._world() is not world:
            self._world = weakref.ref(world)
            self._group = distributed.new_group(backend="gloo", timeout=VOTE_TIMEOUT)
        return self._group
