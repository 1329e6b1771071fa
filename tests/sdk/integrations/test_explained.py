"""Trainers fetch batches ahead: the step that stops the training is computed again nevertheless, and its line is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sdk.programs import record_program

_COMMON = """
import torch

torch.manual_seed(0)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def forward(self, x=None, labels=None):
        output = self.layers(x)
        if labels is None:
            return output
        return {"loss": (output - labels.log()).square().mean(), "logits": output}  # bad in the trainer


x, y = torch.randn(160, 4), torch.rand(160, 1) + 0.5
y[100] = 0.0
samples = torch.utils.data.TensorDataset(x, y)
"""

_ACCELERATE = """
import accelerate

accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
model = Network()
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.Adam(model.parameters()), torch.utils.data.DataLoader(samples, batch_size=8, shuffle=True)
)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = (model(x) - y.log()).square().mean()  # bad in the loop
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""

_TRAINER = """
import transformers


class Mappings(torch.utils.data.Dataset):
    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        x, y = samples[index]
        return {"x": x, "labels": y}


arguments = transformers.TrainingArguments(
    "trained", per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=30, report_to=[], use_cpu=True, save_strategy="no",
    disable_tqdm=True, logging_steps=1000,
)
transformers.Trainer(Network(), arguments, train_dataset=Mappings()).train()
"""

_LIGHTNING = """
import lightning


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = Network()

    def training_step(self, batch, number):
        x, y = batch
        return (self.network(x) - y.log()).square().mean()  # bad in the module

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


trainer = lightning.Trainer(
    max_epochs=2, logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False
)
trainer.fit(Module(), torch.utils.data.DataLoader(samples, batch_size=8, shuffle=True))
"""


@pytest.mark.parametrize(
    ("trainer", "place"),
    [
        pytest.param(_ACCELERATE, "# bad in the loop", marks=pytest.mark.ci, id="accelerate"),
        pytest.param(_TRAINER, "# bad in the trainer", marks=pytest.mark.release, id="transformers"),
        pytest.param(_LIGHTNING, "# bad in the module", marks=pytest.mark.release, id="lightning"),
    ],
)
def test_the_line_of_a_step_in_a_trainer_is_named(trainer: str, place: str, tmp_path: Path) -> None:
    for package in ("accelerate", "transformers", "lightning"):
        if f"import {package}" in trainer:
            pytest.importorskip(package)
    program = tmp_path / "train.py"
    source = f"{_COMMON}\n\ntry:\n" + "".join(f"    {line}\n" for line in trainer.splitlines())
    program.write_text(f"{source}except SystemExit as stop:\n    print('exit code', stop.code)\n")
    line = next(number for number, text in enumerate(program.read_text().splitlines(), 1) if place in text)
    printed = record_program(program, folder=tmp_path, options=("--explain", "--store", tmp_path / "runs"))
    assert printed.output.endswith("exit code 86\n")
    assert f"aten.log.default made the first NaN or infinity at {program}:{line} in " in printed.errors
    assert "approximate" not in printed.errors
