"""Small models and data for trainers: seeded, on the host, made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.sdk.programs import run_program
from tests.sdk.training import small_model
from watchstep import Hook, Run, open_run
from watchstep.format.control import ControlDocument, StopRequest
from watchstep.format.documents import last_good
from watchstep.store.store import Store


class Classifier(nn.Module):
    """As the Trainer of transformers wants it: keyword arguments in, loss and logits out."""

    def __init__(self, bad_batch: int | None = None) -> None:
        super().__init__()
        self.net = small_model()
        self._bad_batch = bad_batch
        self._batches = 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            x = x * float("nan") if self._batches == self._bad_batch else x
            self._batches += 1
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Examples(Dataset[dict[str, Tensor]]):
    """Random inputs and labels, the same for the same seed."""

    def __init__(self, number: int, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(number, 8, generator=generator)
        self.labels = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


def loader(number: int, batch: int = 8) -> DataLoader[Any]:
    examples = Examples(number)
    return DataLoader(TensorDataset(examples.x, examples.labels), batch_size=batch)


def column(run: Run, name: str, figure: str = "mean", mode: str = "train") -> dict[int, float]:
    """A figure by step."""
    rows = run.tensor(name).statistics().to_pydict()
    entries = zip(rows["step"], rows[figure], rows["mode"], strict=True)
    return {step: value for step, value, row_mode in entries if row_mode == mode}


def request_stop(hook: Hook, step: int) -> None:
    """As the service does it: by the control document."""
    attempt = hook._identity.attempt
    stop = StopRequest(attempt, step, "nan_or_inf: 3 NaN")
    hook._control_changed(ControlDocument().with_stop(stop), attempt)


def run_of_ranks(folder: Path, program: str, ranks: int = 0) -> Run:
    """The run that a program of two ranks recorded and stopped after step 2; of the replicas one has recorded weights."""
    run_program(folder, program, folder, ranks=ranks)
    (place,) = [found for found in (folder / "runs" / "default").iterdir() if found.is_dir()]
    run = open_run(place)
    assert {(end.worker, end.state, end.last_step) for end in run.ends()} == {
        (rank, "stopped", 2) for rank in range(2)
    }
    return run


def last_good_of(hook: Hook | None, judged: int = 3) -> tuple[Path, int]:
    """The path and step of the last good checkpoint of a run that was judged up to a step."""
    assert hook is not None
    found = last_good(Store.open(hook.store_url).child(f"{hook.project}/{hook.run}"), judged)
    assert found is not None
    return Path(found.path), found.step
