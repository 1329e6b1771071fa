"""The optimizers of a program of which each has a recorder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.sdk.format.blocks import tensor
from watchstep import CaptureConfig, Hook, StopTraining, open_run
from watchstep.stopping import OnNonfinite
from watchstep.updates.program_updates import ProgramUpdates
from watchstep.updates.tensor_values import HostArrays
from watchstep.updates.update_recorder import Update


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


def test_a_fault_of_a_bundle_ends_neither_the_stop_nor_the_measurement(tmp_path: Path) -> None:
    def bundle(step: int, update: Update) -> None:
        raise ValueError(f"step {step} has no shape")

    optimizer, variable = Optimizer(), np.zeros(3)
    with Hook(tmp_path, run="run", config=CaptureConfig(overhead_budget=None)) as hook:
        updates = ProgramUpdates(hook._session, OnNonfinite("stop"))
        found = updates.recorder_of(optimizer, [variable], lambda: [tensor("dense.kernel", "weights")])
        assert found is not None
        recorder, _ = found
        recorder.bundle_bad_step = bundle
        with pytest.raises(StopTraining):
            recorder.record(Update(gradients=HostArrays((np.array([1, np.nan, 2]),)), losses={"loss": 2.0}))
        assert hook.health["counts"]["dropped_bundles"] == 1
        assert "step 0 has no shape" in hook.health["faults"]["bundle"]
    run = open_run(tmp_path / "default" / "run")
    assert run.tensor("dense.kernel:gradient").steps() == [0]
    assert run.tensor("loss").steps() == [0]
