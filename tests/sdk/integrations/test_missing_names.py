"""Trainings without each name of transformers, Lightning and Accelerate that another version may lack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.missing_names import remove_within_test
from tests.sdk.integrations.models import Classifier, Examples, loader
from tests.sdk.training import EVERY_STEP, small_model
from watchstep import Hook, open_run
from watchstep.capture.framework_names import FrameworkNames

accelerate: Any = pytest.importorskip("accelerate")
lightning: Any = pytest.importorskip("lightning")
transformers: Any = pytest.importorskip("transformers")
from watchstep.integrations.accelerate import accelerate_names, watch  # noqa: E402 - it needs accelerate
from watchstep.integrations.lightning import WatchstepCallback as LightningCallback  # noqa: E402
from watchstep.integrations.lightning import lightning_names  # noqa: E402
from watchstep.integrations.transformers import WatchstepCallback as TrainerCallback  # noqa: E402
from watchstep.integrations.transformers import trainer_names  # noqa: E402

pytestmark = [
    pytest.mark.release,
    # The trainers' advice on loaders, and their own use of what PyTorch deprecates.
    pytest.mark.filterwarnings("ignore"),
]

STEPS = 2


def _weights(model: nn.Module) -> list[str]:
    return [value.hex() for parameter in model.parameters() for value in parameter.flatten().tolist()[:4]]


def _with_accelerate(folder: Path, *, records: bool) -> tuple[list[str], Hook | None]:
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    model = small_model()
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader(16))
    hook = watch(accelerator, model, optimizer, store_url=folder, config=EVERY_STEP) if records else None
    for x, y in data:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.log({"accuracy": 0.5})
    accelerator.save_state(str(folder / "state"))
    accelerator.end_training()
    if hook is not None:
        hook.close()
    return _weights(model), hook


class _Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = small_model()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class _Stop(lightning.Callback):  # type: ignore[misc]
    """Requests a stop at the last step, as the service does."""

    def __init__(self, callback: LightningCallback) -> None:
        self._callback = callback

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            self._callback._recording.requested = object()  # type: ignore[assignment]


def _with_lightning(folder: Path, *, records: bool) -> tuple[list[str], Hook | None]:
    torch.manual_seed(0)
    callback = LightningCallback(folder, config=EVERY_STEP, on_stop="stop")
    module = _Module()
    trainer = lightning.Trainer(
        max_steps=STEPS,
        min_steps=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        log_every_n_steps=1,
        callbacks=[callback, _Stop(callback)] if records else [],
    )
    trainer.fit(module, loader(8 * STEPS), loader(8))
    return _weights(module), callback.hook


def _with_transformers(folder: Path, *, records: bool) -> tuple[list[str], Hook | None]:
    torch.manual_seed(0)
    callback = TrainerCallback(folder, config=EVERY_STEP)
    model = Classifier()
    arguments = transformers.TrainingArguments(
        str(folder / "output"),
        per_device_train_batch_size=8,
        max_steps=STEPS,
        logging_steps=1,
        save_steps=1,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=Examples(16),
        callbacks=[callback] if records else [],
    ).train()
    return _weights(model), callback.hook


Training = Callable[..., tuple[list[str], "Hook | None"]]
TABLES: tuple[tuple[FrameworkNames, Training], ...] = (
    (accelerate_names, _with_accelerate),
    (lightning_names, _with_lightning),
    (trainer_names, _with_transformers),
)
OF_TRAINERS = {"state", "distributed_type"}
"""Names of Accelerate that only the callback of transformers asks for."""

_plain: dict[Training, list[str]] = {}


@pytest.mark.parametrize(
    ("names", "train", "key"),
    [
        pytest.param(
            names, _with_transformers if key in OF_TRAINERS else train, key, id=f"{names.framework}-{key}"
        )
        for names, train in TABLES
        for key in names.table
    ],
)
def test_a_missing_name_costs_one_capability(
    names: FrameworkNames, train: Training, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if train not in _plain:
        _plain[train], _ = train(tmp_path / "plain", records=False)
    remove_within_test(names, key, monkeypatch)
    weights, hook = train(tmp_path / "recorded", records=True)
    assert weights == _plain[train]
    assert hook is not None
    assert not hook.health["faults"]
    assert f"{names.framework}: {names.table[key].cost}" in hook.health["notes"] or key in NOT_ASKED_FOR
    assert open_run(hook.run_url).tensor("loss").steps() == list(range(STEPS))


NOT_ASKED_FOR = {"broadcast", "best"}
"""Names that a training of one rank without a limit does not ask for."""
