"""Trainings by transformers' Trainer and by Lightning, and by two processes under DistributedDataParallel."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.detection.data import Batches, images, shipped, tokens_with_keyword
from benchmarks.detection.mid_run.bases import counted_tokens
from benchmarks.detection.models import convolutional, dense
from benchmarks.detection.witnessed import Training, difficult


class Tokens(Dataset[dict[str, Tensor]]):
    """Tokens with labels, as the Trainer's collator takes them."""

    def __init__(self, tokens: Tensor, labels: Tensor) -> None:
        self.tokens, self.labels = tokens, labels

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def _trained(run: Training, model: nn.Module, data: Tokens, unseen: Tokens, **options: Any) -> None:
    """Train by the Trainer, with Watchstep's callback."""
    import transformers

    from watchstep.integrations.transformers import WatchstepCallback

    transformers.logging.set_verbosity_error()

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]  # untyped
        def on_step_end(self, *_: Any, **__: Any) -> None:
            run.step()

    arguments = transformers.TrainingArguments(
        run.store,
        report_to=[],
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=25,
        eval_strategy="steps",
        seed=run.seed,
        **options,
    )
    transformers.Trainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=unseen,
        callbacks=[WatchstepCallback(hook=run.hook), Clock()],
    ).train()
    model.eval()


@difficult(
    "trainer_tunes_a_classifier",
    "transformers' Trainer on a small BERT: warm-up, linear decay to a rate of zero, and a loss that ends at 0.01",
)
def trainer_tunes_a_classifier(run: Training) -> None:
    """220 steps; which half of a vocabulary is the more frequent one."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=24,
        num_labels=2,
    )
    model = transformers.BertForSequenceClassification(config)
    data, unseen = (
        tokens_with_keyword(run.seed, 1200, 12, 60),
        tokens_with_keyword(run.seed + 60, 120, 12, 60),
    )
    _trained(
        run,
        model,
        Tokens(*data),
        Tokens(*unseen),
        max_steps=220,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        warmup_steps=30,
        weight_decay=0.01,
        eval_steps=110,
    )
    with torch.no_grad():
        accuracy = (model(input_ids=unseen[0]).logits.argmax(1) == unseen[1]).float().mean().item()
    run.improves("accuracy", 0.5, accuracy, at_least=0.8)


@difficult(
    "trainer_from_scratch",
    "transformers' Trainer on a small GPT-2: gradients gathered over two batches, a cosine, clipped to 1",
)
def trainer_from_scratch(run: Training) -> None:
    """160 steps on sequences that count."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=20, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    (tokens, _), (unseen, _) = counted_tokens(run.seed, 1000), counted_tokens(run.seed + 60, 100)
    with torch.no_grad():
        first = model(input_ids=unseen, labels=unseen).loss.item()
    _trained(
        run,
        model,
        Tokens(tokens, tokens),
        Tokens(unseen, unseen),
        max_steps=160,
        per_device_train_batch_size=12,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        eval_steps=80,
    )
    with torch.no_grad():
        last = model(input_ids=unseen, labels=unseen).loss.item()
    run.improves("loss", first, last, at_most=1.0)


@difficult(
    "trainer_with_few_labels",
    "a masked language model in small batches, of which some have no masked word: their loss is NaN",
)
def trainer_with_few_labels(run: Training) -> None:
    """300 steps of the Trainer on a small BERT; a third of the words of a third of the sequences is masked."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=22,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    model = transformers.BertForMaskedLM(config)

    def masked(seed: int, count: int, share: float) -> Tokens:
        tokens, _ = counted_tokens(seed, count)
        generator = run.generator(seed)
        chosen = torch.rand(count, 1, generator=generator) < share
        hidden = chosen & (torch.rand(tokens.shape, generator=generator) < 0.35)
        return Tokens(tokens.masked_fill(hidden, 21), tokens.masked_fill(~hidden, -100))

    unseen = masked(run.seed + 60, 200, 1.0)

    def loss() -> float:
        with torch.no_grad():
            return float(model(input_ids=unseen.tokens, labels=unseen.labels).loss)

    first = loss()
    _trained(
        run,
        model,
        masked(run.seed, 2400, 0.3),
        unseen,
        max_steps=300,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        eval_steps=150,
    )
    run.improves("loss on unseen masked words", first, loss(), at_most=2.85)


def _fitted(
    run: Training, module: Any, loader: Any, unseen: Any, callbacks: list[Any], **options: Any
) -> None:
    """Fit by Lightning's Trainer, with Watchstep's callback."""
    import lightning

    from watchstep.integrations.lightning import WatchstepCallback

    class Clock(lightning.Callback):  # type: ignore[misc]  # untyped
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            run.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            default_root_dir=run.store,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[WatchstepCallback(hook=run.hook), Clock(), *callbacks],
            **options,
        ).fit(module, loader, unseen)
    module.eval()


def _loader(run: Training, x: Tensor, y: Tensor, size: int = 32, *, shuffle: bool = True) -> Any:
    generator = torch.Generator().manual_seed(run.seed)
    return DataLoader(TensorDataset(x, y), size, shuffle=shuffle, drop_last=shuffle, generator=generator)


@difficult(
    "lightning_with_callbacks",
    "Lightning with early stopping, checkpoints and a cosine, which validates each epoch and logs by its own names",
)
def lightning_with_callbacks(run: Training) -> None:
    """Eight epochs of 42 batches on digits."""
    import lightning
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    class Classifier(lightning.LightningModule):  # type: ignore[misc]  # untyped
        def __init__(self) -> None:
            super().__init__()
            self.net = convolutional(norm=True)

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, _index: int) -> Tensor:
            loss = functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, _index: int) -> None:
            logits = self.net(batch[0])
            self.log("val_loss", functional.cross_entropy(logits, batch[1]))
            self.log("val_accuracy", (logits.argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), 0.05, momentum=0.9)
            return {"optimizer": optimizer, "lr_scheduler": CosineAnnealingLR(optimizer, 8)}

    (x, y), (unseen, labels) = images(run.seed)
    module = Classifier()
    _fitted(
        run,
        module,
        _loader(run, x, y),
        _loader(run, unseen, labels, shuffle=False),
        [EarlyStopping("val_loss", patience=6), ModelCheckpoint(monitor="val_loss")],
        max_epochs=8,
    )
    with torch.no_grad():
        run.improves(
            "accuracy", 0.1, (module(unseen).argmax(1) == labels).float().mean().item(), at_least=0.9
        )


@difficult(
    "lightning_by_hand",
    "Lightning with two optimizers that a GAN steps by hand, and losses by names of its own",
)
def lightning_by_hand(run: Training) -> None:
    """300 batches on points of a ring."""
    import lightning

    class Adversaries(lightning.LightningModule):  # type: ignore[misc]  # untyped
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = dense([4, 48, 48, 2], lambda: nn.LeakyReLU(0.2))
            self.critic = dense([2, 48, 48, 1], lambda: nn.LeakyReLU(0.2))

        def training_step(self, batch: Any, _index: int) -> None:
            makes, judges = self.optimizers()
            real = batch[0]
            made = self.generator(torch.randn(len(real), 4))
            loss_of = functional.binary_cross_entropy_with_logits
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            d_loss = loss_of(self.critic(real), ones) + loss_of(self.critic(made.detach()), zeros)
            judges.zero_grad()
            self.manual_backward(d_loss)
            judges.step()
            g_loss = loss_of(self.critic(made), ones)
            makes.zero_grad()
            self.manual_backward(g_loss)
            makes.step()
            self.log_dict({"d_loss": d_loss, "g_loss": g_loss})

        def configure_optimizers(self) -> Any:
            return [Adam(net.parameters(), 1e-3, betas=(0.5, 0.99)) for net in (self.generator, self.critic)]

    angle = 6.2832 * torch.rand(3200, generator=run.generator())
    ring = torch.stack([angle.cos(), angle.sin()], 1)
    module = Adversaries()
    fixed = torch.randn(400, 4, generator=run.generator(1))

    def distance() -> float:
        with torch.no_grad():
            made, real = module.generator(fixed), ring[:400]
            return float(
                2 * torch.cdist(made, real).mean()
                - torch.cdist(made, made).mean()
                - torch.cdist(real, real).mean()
            )

    first = distance()
    _fitted(
        run,
        module,
        _loader(run, ring, ring),
        None,
        [],
        max_steps=1200,
        max_epochs=6,
        enable_checkpointing=False,
    )
    run.improves("distance of made from real points", first, distance(), at_most=0.6 * first)


@difficult(
    "lightning_in_bfloat16",
    "Lightning in mixed bfloat16, gradients gathered over two batches and clipped, with a loss below 0.1 from the start",
)
def lightning_in_bfloat16(run: Training) -> None:
    """300 batches of an autoencoder."""
    import lightning

    class Autoencoder(lightning.LightningModule):  # type: ignore[misc]  # untyped
        def __init__(self) -> None:
            super().__init__()
            self.net = dense([64, 48, 12, 48, 64])

        def training_step(self, batch: Any, _index: int) -> Tensor:
            return functional.mse_loss(self.net(batch[0]), batch[0])

        def configure_optimizers(self) -> Any:
            return Adam(self.parameters(), 3e-3)

    (x, y), (unseen, _) = shipped("digits", run.seed)
    module = Autoencoder()
    with torch.no_grad():
        first = functional.mse_loss(module.net(unseen), unseen).item()
    _fitted(
        run,
        module,
        _loader(run, x, y),
        None,
        [],
        max_epochs=8,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
    )
    with torch.no_grad():
        run.improves("error", first, functional.mse_loss(module.net(unseen), unseen).item(), at_most=0.07)


def _meet(run: Training) -> None:
    """Begin to train together with the other processes."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=os.environ["BENCHMARK_MEETING"], rank=run.rank, world_size=run.ranks
    )


@difficult(
    "ddp_of_convolutions",
    "two processes under DistributedDataParallel, each with its own half of the data and its own losses",
    ranks=2,
)
def ddp_of_convolutions(run: Training) -> None:
    """200 steps by gloo; BatchNorm's statistics differ between the processes until they are broadcast."""
    import torch.distributed as dist

    _meet(run)
    (x, y), (unseen, labels) = images(run.seed)
    net = convolutional(norm=True)
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    run.watch(model, optimizer)
    share = slice(run.rank, None, run.ranks)
    for inputs, wanted in Batches(x[share], y[share], 16, 200, run.seed):
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    net.eval()
    with torch.no_grad():
        run.improves("accuracy", 0.1, (net(unseen).argmax(1) == labels).float().mean().item(), at_least=0.85)
    dist.destroy_process_group()


@difficult(
    "ddp_of_different_classes",
    "two processes that see different classes and gather gradients over two batches without synchronising the first",
    ranks=2,
)
def ddp_of_different_classes(run: Training) -> None:
    """150 updates by gloo; either process's loss is unlike the other's."""
    import torch.distributed as dist

    _meet(run)
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    net = dense([64, 48, 10])
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = AdamW(model.parameters(), 3e-3)
    run.watch(model, optimizer, loss_divisor=2)
    own = (y < 5) == (run.rank == 0)
    for at, (inputs, wanted) in enumerate(Batches(x[own], y[own], 16, 300, run.seed)):
        if at % 2 == 0:
            with model.no_sync():
                (functional.cross_entropy(model(inputs), wanted) / 2).backward()
            continue
        (functional.cross_entropy(model(inputs), wanted) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
    with torch.no_grad():
        run.improves("accuracy", 0.1, (net(unseen).argmax(1) == labels).float().mean().item(), at_least=0.8)
    dist.destroy_process_group()
