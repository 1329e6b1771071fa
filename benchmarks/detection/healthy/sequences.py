"""Transformers and recurrent networks."""

from __future__ import annotations

from torch import nn
from torch.nn import functional
from torch.optim import Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.detection.data import Batches, copied_tokens, tokens_with_keyword, waves
from benchmarks.detection.healthy.trainings import healthy
from benchmarks.detection.models import LanguageModel, LastOfRecurrent
from benchmarks.detection.programs import Clock, Recorder, loop


@healthy(
    "transformer_copies",
    "half of each sequence cannot be known: the loss has a floor, and a plateau before it",
)
def transformer_copies(recorder: Recorder, seed: int, clock: Clock) -> None:
    """900 steps with a warm-up of 100."""
    x, y = copied_tokens(seed, 4000, 12, 12)
    model = LanguageModel(12, 12, norm_first=True)
    optimizer = AdamW(model.parameters(), 3e-3)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
    recorder.watch(model, optimizer)
    for inputs, labels in Batches(x, y, 32, 900, seed):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        recorder.log(loss=loss)
        recorder.record(labels=labels)
        clock.step()


@healthy("gated_recurrent_waves", "frequencies are told apart after a plateau")
def gated_recurrent_waves(recorder: Recorder, seed: int, clock: Clock) -> None:
    """800 steps of a GRU."""
    data, unseen = waves(seed, 3000, 20), waves(seed + 50, 300, 20)
    model = LastOfRecurrent(nn.GRU(1, 24, batch_first=True), 24, 2)
    optimizer = Adam(model.parameters(), 3e-3)
    loop(recorder, clock, (model, optimizer, functional.cross_entropy, Batches(*data, 32, 800, seed, unseen)))


@healthy("long_memory_tokens", "an LSTM over embeddings, with clipping left out and none needed")
def long_memory_tokens(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,000 steps."""
    data, unseen = tokens_with_keyword(seed, 20_000, 16, 60), tokens_with_keyword(seed + 50, 500, 16, 60)
    cell = LastOfRecurrent(nn.LSTM(16, 32, batch_first=True), 32, 2)
    model = nn.Sequential(nn.Embedding(60, 16), cell)
    optimizer = Adam(model.parameters(), 3e-3)
    loop(
        recorder, clock, (model, optimizer, functional.cross_entropy, Batches(*data, 32, 1000, seed, unseen))
    )
