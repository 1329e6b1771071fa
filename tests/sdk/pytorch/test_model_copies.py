"""Programs that copy, save, send, trace or export a watched model."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.sdk.training import EVERY_STEP, Training, batches, recorded, small_model
from watchstep import Hook

X = torch.randn(3, 8)


def through_file(model: nn.Module) -> nn.Module:
    """Saved whole, and loaded."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "file": through_file,
    "average": torch.optim.swa_utils.AveragedModel,
}
EXPORTS: dict[str, Callable[[nn.Module], Any]] = {
    "trace": lambda model: torch.jit.trace(model, X, check_trace=False),
    "export": lambda model: torch.export.export(model, (X,)).module(),
}


@pytest.mark.parametrize("name", [*COPIES, *EXPORTS])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_watched_model_is_copied_as_any_other(tmp_path: Path, name: str) -> None:
    hook, training = Hook(tmp_path, config=EVERY_STEP), Training()
    hook.watch(training.model, training.optimizer)
    training.run(2)
    training.model.eval()
    copied = {**COPIES, **EXPORTS}[name](training.model)
    assert torch.equal(copied(X), training.model(X))
    for _ in range(5):
        copied(X)
    run = recorded(hook)
    counts = run.tensor("0:output").statistics("eval")["count"].to_pylist()
    assert counts == [3 * 16]  # the model's own pass, and none of its copy's


def test_a_saved_model_loads_where_watchstep_is_not(tmp_path: Path) -> None:
    hook = Hook(tmp_path / "runs", config=EVERY_STEP)
    model = small_model()
    hook.watch(model)
    torch.save(model, tmp_path / "model.pt")
    hook.close()
    program = (
        "import sys; sys.modules['watchstep'] = None\n"
        "import torch; print(torch.load(sys.argv[1], weights_only=False)(torch.ones(1, 8)).shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "model.pt"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "torch.Size([1, 2])\n", done.stderr


def test_an_average_of_the_model_trains_on_beside_it(tmp_path: Path) -> None:
    hook, training = Hook(tmp_path, config=EVERY_STEP), Training()
    hook.watch(training.model, training.optimizer)
    average = torch.optim.swa_utils.AveragedModel(training.model)

    def follow(_step: int, _loss: torch.Tensor) -> None:
        average.update_parameters(training.model)
        average(X)

    losses = training.run(4, follow)
    plain = Training()
    assert losses == plain.run(4)
    assert (
        recorded(hook).tensor("0:output").statistics()["count"].to_pylist()
        == [len(batches(1)[0][0]) * 16] * 4
    )
