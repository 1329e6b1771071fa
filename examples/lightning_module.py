"""Record Lightning: a convolutional network with batch normalization learns to classify generated shapes.

    python examples/lightning_module.py

A fault to try: with `--learning-rate 0` no weight changes, and `weight_not_updating` fires.
"""

import argparse

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from watchstep.integrations.lightning import WatchstepCallback
from watchstep_rules import DEFAULT_RULES, backtest_run

SIZE = 12


def generate_shapes(number: int) -> TensorDataset:
    """Noisy images of a square, a cross or a diagonal at a random position, with their classes."""
    shapes = torch.zeros(3, 5, 5)
    shapes[0, [0, -1], :] = shapes[0, :, [0, -1]] = 1
    shapes[1, 2, :] = shapes[1, :, 2] = 1
    shapes[2] = torch.eye(5)
    images, labels = 0.3 * torch.randn(number, 1, SIZE, SIZE), torch.randint(3, (number,))
    for image, label in zip(images, labels, strict=True):
        row, column = torch.randint(SIZE - 4, (2,)).tolist()
        image[0, row : row + 5, column : column + 5] += shapes[label]
    return TensorDataset(images, labels)


class ShapeClassifier(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 3 * 3, 3),
        )

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        scores = self.network(images)
        self.log("val_loss", nn.functional.cross_entropy(scores, labels))
        self.log("val_accuracy", (scores.argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--store", default="watchstep-runs", help="folder or bucket URL for recorded runs")
parser.add_argument("--learning-rate", type=float, default=2e-3)
options = parser.parse_args()

lightning.seed_everything(0)
callback = WatchstepCallback(options.store, on_stop="stop")
trainer = lightning.Trainer(
    accelerator="cpu",
    max_epochs=6,
    callbacks=[callback],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(
    ShapeClassifier(options.learning_rate),
    DataLoader(generate_shapes(960), batch_size=32, shuffle=True),
    DataLoader(generate_shapes(192), batch_size=64),
)
print(f"validation accuracy: {float(trainer.callback_metrics['val_accuracy']):.2f}")

assert callback.hook is not None
(attempt,) = backtest_run(callback.hook.run_url, DEFAULT_RULES).attempts
fired = {outcome.config.name: outcome.fired[0].step for outcome in attempt.outcomes if outcome.fired}
print("run:", callback.hook.run_url)
print("rules that fired, with their first step:", fired or "none")
