"""Rows of a healthy training that never was, as many as one likes: layers, losses, labels, and their probes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block, Places, concatenate
from watchstep.format.statistics import Floats, Histograms, StatisticsBatch
from watchstep.format.tensors import MODES, TensorInfo

WIDTH = 64
BATCH = 32
EVALUATE_EVERY = 10
BINS_OF_A_HISTOGRAM = 16
KINDS = ("Linear", "ReLU", "Linear", "Tanh")
ROLES = (
    ("{}.weight", "weights", "weight"),
    ("{}.bias", "biases", "bias"),
    ("{}.weight:gradient", "gradients", "gradient"),
    ("{}.bias:gradient", "gradients", "gradient"),
    ("{}.weight:update", "updates", "update"),
    ("{}.bias:update", "updates", "update"),
    ("{}:output", "activations", "output"),
)
PROBES = (
    "channels",
    "dead_channels",
    "saturated_channels",
    "update_ratio",
    "gradient_cosine",
    "labels_counted",
    "classes",
    "largest_class",
    "smallest_class",
    "rarest_class",
)


@dataclass(frozen=True)
class Shape:
    """Of a run.

    Attributes:
        layers: with seven tensors each.
        workers: that hold a shard of each of a layer's tensors; each logs its own losses.
    """

    layers: int = 71
    workers: int = 1


@functools.cache
def catalogue_of(shape: Shape) -> tuple[TensorInfo, ...]:
    """The tensors: those of layers, then the loss, that of validation, and labels."""
    found = []
    for layer in range(shape.layers):
        path = f"model.blocks.{layer}.linear"
        for name, collection, role in ROLES:
            kind = KINDS[layer % len(KINDS)] if role == "output" else "Linear"
            size = (WIDTH,) if name.startswith("{}.bias") else (WIDTH, WIDTH)
            found.append(TensorInfo(name.format(path), (collection,), role, path, kind, layer, size))
    for name, collection, role in (
        ("loss", "losses", "loss"),
        ("val_loss", "losses", "loss"),
        ("labels", "labels", "label"),
    ):
        found.append(TensorInfo(name, (collection,), role, dtype="float64"))
    return tuple(found)


def rows_of_steps(shape: Shape, first: int, steps: int) -> Block:
    """The rows of some steps, each worker's as its segments hold them, in canonical order."""
    return concatenate([_of_worker(shape, worker, first, steps) for worker in range(shape.workers)])


def _of_worker(shape: Shape, worker: int, first: int, steps: int) -> Block:
    catalogue = catalogue_of(shape)
    random = np.random.default_rng([first, worker])
    step = np.repeat(np.arange(first, first + steps), len(catalogue))
    tensor = np.tile(np.arange(len(catalogue), dtype=np.int32), steps)
    validation = len(catalogue) - 2
    kept = (tensor != validation) | (step % EVALUATE_EVERY == 0)
    step, tensor = step[kept], tensor[kept]
    mode = np.where(tensor == validation, MODES.index("eval"), MODES.index("train")).astype(np.int8)
    rows = len(step)
    of_layer = tensor < len(catalogue) - 3
    zeros = np.zeros(rows, np.int32)
    return Block(
        step=step,
        mode=mode,
        worker=np.full(rows, worker, np.int32),
        time_ns=step * 100_000_000 + worker,
        tensor=tensor,
        catalogue=catalogue,
        places=Places(
            np.where(of_layer, worker, 0).astype(np.int32),
            np.where(of_layer, shape.workers, 1).astype(np.int32),
            zeros,
            zeros.astype(np.int8),
        ),
        statistics=_statistics(catalogue, step, tensor, random),
        probes=_probes(catalogue, step, tensor, random),
    ).ordered()


def _figures_of(catalogue: tuple[TensorInfo, ...]) -> tuple[Floats, NDArray[np.int64]]:
    """Of each tensor the root mean square of its elements, and how many there are."""
    usual = {"weight": 0.1, "bias": 0.05, "gradient": 1e-3, "update": 1e-4, "output": 0.3}
    size = np.array([usual.get(info.role, 1.0) * (1 + info.order / 100) for info in catalogue])
    count = np.array(
        [BATCH * WIDTH if info.role == "output" else int(np.prod(info.shape)) for info in catalogue], np.int64
    )
    count[-1] = BATCH
    return size, count


def _statistics(
    catalogue: tuple[TensorInfo, ...],
    step: NDArray[np.int64],
    tensor: NDArray[np.int32],
    random: np.random.Generator,
) -> StatisticsBatch:
    size_of, count_of = _figures_of(catalogue)
    rows = len(step)
    size = size_of[tensor] * np.exp(0.1 * random.standard_normal(rows))
    count = count_of[tensor]
    mean = 0.05 * size * random.standard_normal(rows)
    of_loss = np.isin(tensor, [len(catalogue) - 3, len(catalogue) - 2])
    loss = (2.3 * np.exp(-step / 1000) + 0.2) * np.exp(0.05 * random.standard_normal(rows))
    mean = np.where(of_loss, loss, mean)
    square = np.where(of_loss, loss**2, size**2 * count)
    counts = np.zeros((rows, 6), np.int64)
    counts[:, 0] = count
    counts[:, 5] = np.where(of_loss, 0, count // 2)
    values = np.column_stack(
        [
            np.where(of_loss, loss, -3 * size),
            np.where(of_loss, loss, 3 * size),
            np.where(of_loss, loss, 1e-3 * size),
            mean,
            np.where(of_loss, 0.0, np.maximum(square - count * mean**2, 0)),
            np.where(of_loss, loss, 0.8 * size * count),
            square,
        ]
    )
    bins = np.tile(np.arange(-40, BINS_OF_A_HISTOGRAM - 40, dtype=np.int16), rows)
    offsets = np.arange(rows + 1, dtype=np.int64) * BINS_OF_A_HISTOGRAM
    histogram = Histograms(offsets, bins, np.full(len(bins), 256, np.int64))
    # Column by column, as a segment's are when it has been read.
    return StatisticsBatch.from_matrices(np.asfortranarray(counts), np.asfortranarray(values), histogram)


def _probes(
    catalogue: tuple[TensorInfo, ...],
    step: NDArray[np.int64],
    tensor: NDArray[np.int32],
    random: np.random.Generator,
) -> dict[str, Floats]:
    rows = len(step)
    roles = np.array([info.role for info in catalogue])[tensor]
    kinds = np.array([info.module_type for info in catalogue])[tensor]
    drawn = random.random(rows)
    seen = BATCH * (step + 1.0)
    figures = {
        "channels": ((roles == "output") & (kinds != "Linear"), np.full(rows, float(WIDTH))),
        "dead_channels": (kinds == "ReLU", np.floor(0.3 * WIDTH * drawn)),
        "saturated_channels": (kinds == "Tanh", np.floor(0.1 * WIDTH * drawn)),
        "update_ratio": (roles == "update", 3e-3 * (0.8 + 0.4 * drawn)),
        "gradient_cosine": (roles == "gradient", 2 * drawn - 1),
        "labels_counted": (roles == "label", seen),
        "classes": (roles == "label", np.full(rows, 10.0)),
        "largest_class": (roles == "label", np.ceil(0.11 * seen)),
        "smallest_class": (roles == "label", np.floor(0.09 * seen)),
        "rarest_class": (roles == "label", np.full(rows, 3.0)),
    }
    return {name: np.where(figures[name][0], figures[name][1], np.nan) for name in PROBES}
