"""Who a rank is, as a framework knows it: launchers other than torchrun do not say so in the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from watchstep.capture.identity import ATTEMPT, RUN, new_nonce
from watchstep.hook import Hook


@dataclass(frozen=True)
class Ranks:
    """One rank among several.

    Attributes:
        rank: from 0.
        world_size: how many there are, at least 2.
        local_rank: among those of this machine, from 0.
        local_size: how many there are on this machine; 0 where nobody says.
        broadcast: gives every rank what rank 0 has; a collective.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    broadcast: Callable[[tuple[str, str]], tuple[str, str]]

    def agreed(self, run: str | None) -> tuple[str, str]:
        """The run and the attempt that all ranks record, by rank 0. Call it on every rank, or none.

        Args:
            run: as this rank would have it.
        """
        attempt = os.environ.get(ATTEMPT) or new_nonce()
        return self.broadcast((run or os.environ.get(RUN) or f"run-{attempt}", attempt))

    @contextmanager
    def told(self, attempt: str) -> Iterator[None]:
        """Within this the environment says what a launcher would have said."""
        said = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            ATTEMPT: attempt,
        }
        if self.local_size:
            said["LOCAL_WORLD_SIZE"] = str(self.local_size)
        before = {name: os.environ.get(name) for name in said}
        os.environ.update(said)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def opened(ranks: Ranks | None, run: str | None, options: Mapping[str, Any]) -> Hook:
    """A hook for this rank; of several ranks all record one run and attempt. On several ranks a collective.

    Args:
        ranks: None where there is one.
        run: its run, if it is named; of several ranks rank 0's counts.
        options: the rest of what `Hook` takes, by name.

    Raises:
        ConfigError: an argument or variable is wrong.
    """
    if ranks is None:
        return Hook(run=run, **options)
    agreed, attempt = ranks.agreed(run)
    with ranks.told(attempt):
        return Hook(run=agreed, **options)
