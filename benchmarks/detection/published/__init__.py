"""Faults that were published, each as a small training beside its mended twin: ``PROGRAMS``."""

from benchmarks.detection.published import (
    attention_and_embeddings,
    autoencoders,
    convolutional,
    data_faults,
    dense,
    explosions,
    initial_weights,
    left_behind,
    recurrent,
    small_steps,
    swings,
    training_loops,
)
from benchmarks.detection.published.pairs import PAIRS as PROGRAMS

__all__ = [
    "PROGRAMS",
    "attention_and_embeddings",
    "autoencoders",
    "convolutional",
    "data_faults",
    "dense",
    "explosions",
    "initial_weights",
    "left_behind",
    "recurrent",
    "small_steps",
    "swings",
    "training_loops",
]
