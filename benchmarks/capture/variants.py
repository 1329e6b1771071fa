"""The variants, and what each is to cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.capture import instruments, peers
from benchmarks.capture.instruments import Instrument
from benchmarks.capture.models import Training
from watchstep import CaptureConfig


@dataclass(frozen=True)
class Variant:
    """One way to look at a training.

    Attributes:
        title: in the table.
        make: puts it on a training.
        targets: workload → the highest ratio of process CPU time to the uninstrumented training.
        period: steps after which what it does repeats; a round is a multiple of it.
        mean: whether the mean over all rounds counts, and not the least: for what is measured at some steps only, a
            round with few of them would tell too little.
        memory_bound: bytes that it says it takes at most; None where nothing is said.
        thread_targets: workload → the highest ratio of the training thread's CPU time.
        workloads: where it is measured; empty for everywhere.
        peer: whether it is no part of Watchstep, and gets fewer rounds.
    """

    title: str
    make: Callable[[Training, Path], Instrument]
    targets: Mapping[str, float] = field(default_factory=dict)
    period: int = 1
    mean: bool = False
    memory_bound: int | None = CaptureConfig().memory_bound
    thread_targets: Mapping[str, float] = field(default_factory=dict)
    workloads: tuple[str, ...] = ()
    peer: bool = False


BASE = "none"
AGAIN = "none_again"

VARIANTS = {
    BASE: Variant("uninstrumented", instruments.Nothing, memory_bound=None),
    AGAIN: Variant("uninstrumented, once more: the noise", instruments.Nothing, memory_bound=None),
    "gate": Variant(
        "gate alone",
        instruments.Gate,
        {"transformer": 1.01, "transformer_small": 1.02, "mlp": 1.01, "cnn": 1.01, "gpt": 1.01},
    ),
    "budget": Variant(
        "defaults, budget 1 %",
        instruments.Budget,
        {"transformer": 1.01, "transformer_small": 1.01, "mlp": 1.01, "cnn": 1.01, "gpt": 1.01},
        period=10,
        mean=True,
    ),
    "everything": Variant("defaults, all at every step", instruments.Everything),
    "everything_tensorboard": Variant(
        "the same, with TensorBoard files during the run", instruments.EverythingInTensorBoard
    ),
    "statistics": Variant(
        "all statistics of weights and gradients",
        instruments.Statistics,
        {"transformer": 1.03, "transformer_small": 1.08, "mlp": 1.08},
    ),
    "statistics_tensors": Variant(
        "the same, full tensors every 10 steps",
        instruments.StatisticsAndTensors,
        {"mlp": 1.15},
        period=10,
        thread_targets={"mlp": 1.02},
    ),
    "activations_tensors": Variant(
        "all activations in full every 10 steps",
        instruments.ActivationsInFull,
        {"cnn": 1.15, "transformer_small": 1.15},
        period=10,
        memory_bound=instruments.ACTIVATIONS_IN_FULL.memory_bound,
        thread_targets={"cnn": 1.05, "transformer_small": 1.05},
        workloads=("cnn", "transformer_small"),
    ),
    "state_tensors": Variant(
        "weights, gradients, Adam's state in full every 10 steps",
        instruments.StateInFull,
        {"mlp": 1.20},
        period=10,
        memory_bound=instruments.STATE_IN_FULL.memory_bound,
        thread_targets={"mlp": 1.10},
        workloads=("mlp",),
    ),
    "separate_operations": Variant(
        "separate torch operations", instruments.SeparateOperations, memory_bound=None, peer=True
    ),
    "wandb": Variant("wandb.watch, log_freq=1, offline", peers.Wandb, memory_bound=None, peer=True),
    "tensorboard": Variant("TensorBoard add_histogram", peers.TensorBoard, memory_bound=None, peer=True),
    "underflow_overflow": Variant(
        "transformers DebugUnderflowOverflow", peers.UnderflowOverflow, memory_bound=None, peer=True
    ),
}
