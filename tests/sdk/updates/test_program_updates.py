"""The optimizers of a program of which each has a recorder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.sdk.format.blocks import tensor
from watchstep import Hook
from watchstep.stopping import OnNonfinite
from watchstep.updates.program_updates import ProgramUpdates


class Optimizer:
    """What identifies an optimizer."""


def test_health_names_optimizers_beyond_those_that_are_recorded(tmp_path: Path) -> None:
    optimizers, variable = [Optimizer() for _ in range(9)], np.zeros(3)
    with Hook(tmp_path, run="run") as hook:
        updates = ProgramUpdates(hook._session, OnNonfinite())
        found = [
            updates.recorder_of(optimizer, [variable], lambda: [tensor("dense.kernel", "weights")])
            for optimizer in optimizers
        ]
        assert [recorder is None for recorder in found] == [False] * 8 + [True]
        assert hook.health["counts"]["unobserved_optimizers"] == 1
        assert "more than 8 optimizers" in hook.health["notes"]["trainings"]
