"""A recorded run of 10,000 steps and 500 tensors: a transformer whose training goes wrong in some layers.

``python -m benchmarks.dashboard_run FOLDER [--steps N] [--project NAME] [--run NAME]`` records it and compacts it, as the service does after the end
of a run. The rows pass the SDK's own writer: its queue, its encoder and its uploader, so the store holds what a recorder leaves there. Nothing is
trained: the statistics are those of normally distributed elements whose scale follows the step. The rows are the same each time; only the
boundaries of the segments before compaction depend on time.

What goes wrong (`FAULTS`), at the same share of the run for any number of steps:

- gradients of the first block vanish slowly;
- gradients of one layer explode for some steps, and the loss jumps;
- more and more outputs of one layer are zero;
- the scale of one layer's weights approaches the largest number of fp16;
- the output layer and the loss contain NaN at some steps.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from watchstep.capture.config import Bounds, CaptureConfig
from watchstep.capture.health import RecorderHealth
from watchstep.capture.identity import Identity
from watchstep.capture.steps.record import BoundedQueue, FinishedStep, Group, Record
from watchstep.capture.stop import ControlReader
from watchstep.capture.tensors.snapshots import SnapshotWriter
from watchstep.capture.upload.access import UploadTarget
from watchstep.capture.writer import Writer
from watchstep.format import documents
from watchstep.format.layout import SnapshotKey, run_prefix
from watchstep.format.snapshot import Described, header
from watchstep.format.statistics import Floats, Histograms, StatisticsBatch, scalars
from watchstep.format.tensors import TensorInfo
from watchstep.kernels.measurement import Completed
from watchstep.reading.compaction import compact
from watchstep.store.local import StoreIdentity
from watchstep.store.store import Store

STEPS = 10_000
BLOCKS = 20
WIDTH = 256
HIDDEN = 4 * WIDTH
VOCABULARY = 4096
TOKENS = 512
PROJECT, RUN, ATTEMPT = "dashboard", "transformer-10k", "a1"
EVALUATE_EVERY = 100
STARTED_NS = 1_790_000_000_000_000_000
STEP_NS = 250_000_000

_PARTS = (
    ("attention.q_proj", "Linear", (WIDTH, WIDTH)),
    ("attention.k_proj", "Linear", (WIDTH, WIDTH)),
    ("attention.v_proj", "Linear", (WIDTH, WIDTH)),
    ("attention.o_proj", "Linear", (WIDTH, WIDTH)),
    ("norm1", "LayerNorm", (WIDTH,)),
    ("mlp.up_proj", "Linear", (HIDDEN, WIDTH)),
    ("mlp.down_proj", "Linear", (WIDTH, HIDDEN)),
    ("norm2", "LayerNorm", (WIDTH,)),
)
_EXPONENTS = 8
"""Powers of two below the largest element of a tensor that its histogram states; smaller elements are in the lowest."""
_STEPS_AT_ONCE = 100
_CLOSE_SECONDS = 120.0
_PAUSE_SECONDS = 0.002


@dataclass(frozen=True)
class Fault:
    """What goes wrong with some tensors.

    Attributes:
        kind: the fault.
        tensors: names.
        first: share of the run before it begins.
        last: share of the run after which it ends.
    """

    kind: str
    tensors: tuple[str, ...]
    first: float
    last: float

    def steps(self, steps: int) -> tuple[int, int]:
        """Return the first step and the step behind the last of a run of so many steps."""
        return int(self.first * steps), max(int(self.first * steps) + 1, int(self.last * steps))


FAULTS = (
    Fault(
        "vanishing",
        tuple(f"model.blocks.0.attention.{name}_proj.weight:gradient" for name in "qkvo"),
        0.3,
        1.0,
    ),
    Fault("dead", ("model.blocks.17.mlp.up_proj:output",), 0.5, 1.0),
    Fault("growing", ("model.blocks.9.mlp.down_proj.weight",), 0.55, 1.0),
    Fault(
        "exploding",
        ("model.blocks.13.mlp.down_proj.weight:gradient", "model.blocks.13.mlp.up_proj.weight:gradient"),
        0.72,
        0.724,
    ),
    Fault("nan", ("head:output", "head.weight:gradient", "loss"), 0.94, 0.9403),
)


@functools.cache
def catalogue() -> tuple[TensorInfo, ...]:
    """Return the 500 tensors in the order of their modules: those of layers first, then series of one number."""
    modules: list[tuple[str, str, tuple[int, ...]]] = [
        ("model.embed_tokens", "Embedding", (VOCABULARY, WIDTH)),
        ("model.embed_positions", "Embedding", (TOKENS, WIDTH)),
    ]
    for block in range(BLOCKS):
        modules += [(f"model.blocks.{block}.{path}", kind, shape) for path, kind, shape in _PARTS]
    modules += [("model.norm", "LayerNorm", (WIDTH,)), ("head", "Linear", (VOCABULARY, WIDTH))]
    infos: list[TensorInfo] = []
    for order, (path, kind, shape) in enumerate(modules):
        infos += _of_module(path, kind, order, shape)
    for name, collection, role in (
        ("loss", "losses", "loss"),
        ("val_loss", "losses", "loss"),
        ("optimizer:learning_rate/0", "metrics", "metric"),
        ("optimizer:weight_decay/0", "metrics", "metric"),
        ("accuracy", "metrics", "metric"),
        ("gradient_norm", "metrics", "metric"),
        ("tokens_per_second", "metrics", "metric"),
    ):
        kind = "CrossEntropyLoss" if role == "loss" else ""
        infos.append(TensorInfo(name, (collection,), role, module_type=kind, dtype="float64"))
    return tuple(infos)


def _of_module(path: str, kind: str, order: int, shape: tuple[int, ...]) -> Iterator[TensorInfo]:
    yield TensorInfo(
        f"{path}.weight", ("weights",), "weight", path, kind, order, shape, optimizer="optimizer"
    )
    yield TensorInfo(f"{path}.weight:gradient", ("gradients",), "gradient", path, kind, order, shape)
    if path == "head":
        yield TensorInfo(f"{path}.bias", ("biases",), "bias", path, kind, order, shape[:1])
        yield TensorInfo(f"{path}.bias:gradient", ("gradients",), "gradient", path, kind, order, shape[:1])
    if path != "model.embed_positions":
        size = shape[0] if kind == "Linear" else WIDTH
        yield TensorInfo(f"{path}:output", ("activations",), "output", path, kind, order, (TOKENS, size))


def _layers() -> tuple[TensorInfo, ...]:
    return tuple(info for info in catalogue() if info.module)


@functools.cache
def _scales() -> Floats:
    """Return the usual standard deviation of each layer's elements."""
    usual = {"weight": 0.02, "bias": 0.01, "gradient": 2e-4, "output": 0.8}
    random = np.random.default_rng(1)
    scales = np.array([usual[info.role] * (1.0 + 0.3 * math.sin(info.order)) for info in _layers()])
    scales[[info.role == "weight" and info.module_type == "LayerNorm" for info in _layers()]] = 1.0
    result: Floats = scales * np.exp(0.2 * random.standard_normal(len(scales)))
    return result


@functools.cache
def _templates() -> Floats:
    """Return the shares of elements by power of two, of shape (16, `_EXPONENTS`).

    Row i: elements of a normal distribution with standard deviation 2**(i / 16); column j: magnitudes of 2**(3 - j) … 2**(4 - j).
    """
    cumulated = np.vectorize(lambda x: math.erf(x / math.sqrt(2)))
    scale = 2.0 ** (np.arange(16) / 16)
    upper = np.array([cumulated(2.0 ** (4 - column) / scale) for column in range(_EXPONENTS)]).T
    lower = np.hstack([upper[:, 1:], np.zeros((16, 1))])
    upper[:, 0] = 1.0
    result: Floats = upper - lower
    return result


def _faulted(kind: str, steps: int, step: NDArray[np.int64]) -> tuple[NDArray[np.intp], Floats]:
    """Return the layers of a fault, and how far it has gone at each step: 0 before, 1 at its last step."""
    fault = next(fault for fault in FAULTS if fault.kind == kind)
    first, end = fault.steps(steps)
    names = set(fault.tensors)
    layers = np.flatnonzero([info.name in names for info in _layers()])
    inside = (step >= first) & (step < end)
    return layers, np.where(inside, (step - first + 1) / (end - first), 0.0)


def _chunk(steps: int, step: NDArray[np.int64], random: np.random.Generator) -> StatisticsBatch:
    """Return the statistics of all layers at some steps, by step and layer."""
    layers = _layers()
    scale = _scales() * np.exp(0.05 * random.standard_normal((len(step), len(layers))))
    roles = np.array([info.role for info in layers])
    progress = step[:, None] / steps
    scale *= np.where(roles == "gradient", 0.3 + 1.7 * np.exp(-6 * progress), 1.0 + 0.2 * progress)
    for kind, factor in (("vanishing", 1e-7), ("growing", 1e6)):
        chosen, done = _faulted(kind, steps, step)
        scale[:, chosen] *= factor ** done[:, None]
    chosen, done = _faulted("exploding", steps, step)
    scale[:, chosen] *= np.where(done > 0, 1e4 * (1 + done), 1.0)[:, None]
    zero_share = np.where(roles == "output", 0.02, 0.0) * np.ones((len(step), 1))
    chosen, done = _faulted("dead", steps, step)
    zero_share[:, chosen] += 0.97 * np.sqrt(done)[:, None]
    nan_share = np.zeros_like(zero_share)
    chosen, done = _faulted("nan", steps, step)
    nan_share[:, chosen] = np.where(done > 0, 0.25, 0.0)[:, None]
    size = np.array([math.prod(info.shape) for info in layers], np.int64)
    return _statistics(scale.ravel(), np.tile(size, len(step)), zero_share.ravel(), nan_share.ravel(), random)


def _statistics(
    scale: Floats,
    count: NDArray[np.int64],
    zero_share: Floats,
    nan_share: Floats,
    random: np.random.Generator,
) -> StatisticsBatch:
    """Return the statistics of tensors with normally distributed elements."""
    rows = len(scale)
    nan = (nan_share * count).astype(np.int64)
    zero = (zero_share * count).astype(np.int64)
    nonzero = count - nan - zero
    power = np.floor(np.log2(scale)).astype(np.int64)
    shape = np.minimum(15, (16 * (np.log2(scale) - power)).astype(np.int64))
    half = (_templates()[shape] * (nonzero / 2)[:, None]).astype(np.int64)
    half[:, 2] += nonzero // 2 - half.sum(axis=1)  # what rounding left
    exponents = power[:, None] + 4 - _EXPONENTS + np.arange(_EXPONENTS)
    bins = (2 * exponents[:, :, None] + np.array([0, 1])).reshape(rows, -1).astype(np.int16)
    counts = np.repeat(half[:, ::-1], 2, axis=1)
    counts[:, 2 * (_EXPONENTS - 3)] += nonzero % 2
    used = counts > 0
    top = power + 4 - np.argmax(half > 0, axis=1)  # the largest element is below 2**top
    finite = np.maximum(count - nan, 1)
    largest = np.ldexp(0.98, top)
    mean = 0.01 * scale * random.standard_normal(rows)
    square = scale**2 * nonzero
    values = np.column_stack(
        [
            -largest * (0.9 + 0.05 * random.random(rows)),
            largest * (0.9 + 0.05 * random.random(rows)),
            np.ldexp(1.01, power + 4 - _EXPONENTS),
            mean,
            np.maximum(square - finite * mean**2, 0.0),
            0.798 * scale * nonzero,
            square,
        ]
    )
    counted = np.zeros((rows, 6), np.int64)
    counted[:, 0], counted[:, 1], counted[:, 4], counted[:, 5] = count, nan, zero, counts[:, 1::2].sum(axis=1)
    offsets = np.concatenate([[0], np.cumsum(used.sum(axis=1))])
    return StatisticsBatch.from_matrices(counted, values, Histograms(offsets, bins[used], counts[used]))


def _scalars(steps: int, step: int, random: np.random.Generator) -> dict[str, float]:
    """Return the values of the series of one number at a step."""
    progress = step / steps
    loss = 8.3 * math.exp(-9 * progress) + 2.1 - 0.4 * progress + 0.04 * random.standard_normal()
    for fault in FAULTS:
        first, end = fault.steps(steps)
        if fault.kind == "exploding" and first <= step < end + (end - first):
            loss += 3.0 * math.exp(-max(0, step - end) / max(1, end - first))
        if fault.kind == "nan" and first <= step < end:
            loss = math.nan
    warm = min(1.0, (step + 1) / (0.05 * steps))
    return {
        "loss": loss,
        "optimizer:learning_rate/0": 3e-4 * warm * 0.5 * (1 + math.cos(math.pi * progress)),
        "optimizer:weight_decay/0": 0.1,
        "accuracy": 0.6 * (1 - math.exp(-5 * progress)) + 0.01 * random.standard_normal(),
        "gradient_norm": (0.4 + 2.0 * math.exp(-6 * progress)) * math.exp(0.1 * random.standard_normal()),
        "tokens_per_second": 8200 + 60 * random.standard_normal(),
    }


def finished_steps(steps: int = STEPS) -> Iterator[FinishedStep]:
    """Yield the steps of the run, as a recorder hands them to its writer."""
    random = np.random.default_rng(0)
    infos = {info.name: info for info in catalogue()}
    layers = Group.of(_layers())
    series: dict[tuple[str, ...], Group] = {}
    for begin in range(0, steps, _STEPS_AT_ONCE):
        step_numbers = np.arange(begin, min(steps, begin + _STEPS_AT_ONCE))
        rows = _chunk(steps, step_numbers, random)
        for place, step in enumerate(step_numbers.tolist()):
            time_ns = STARTED_NS + step * STEP_NS
            of_step = np.arange(place * len(layers.tensors), (place + 1) * len(layers.tensors))
            values = _scalars(steps, step, random)
            group = series.setdefault(tuple(values), Group.of(tuple(infos[name] for name in values)))
            records = [
                Record(step, "train", 0, time_ns, layers, Completed(rows.take(of_step))),
                Record(step, "train", 0, time_ns, group, Completed(scalars(list(values.values())))),
            ]
            if step % EVALUATE_EVERY == EVALUATE_EVERY - 1:
                loss = 8.3 * math.exp(-8 * step / steps) + 2.2 + 0.02 * random.standard_normal()
                evaluated = Group.of((infos["val_loss"],))
                records.append(Record(step, "eval", 0, time_ns, evaluated, Completed(scalars([loss]))))
            yield FinishedStep(step, tuple(records))


def record(store_url: Path, steps: int = STEPS, project: str = PROJECT, run: str = RUN) -> Path:
    """Record the run without compacting it, and return its folder.

    Raises:
        RuntimeError: rows were dropped, or did not reach the store.
    """
    root = Store.open(store_url, create=True)
    prefix = run_prefix(project, run)
    health = RecorderHealth()
    bounds = Bounds(spill_bytes=0, close_seconds=_CLOSE_SECONDS)
    queue = BoundedQueue(bounds.queue_bytes)
    snapshots = SnapshotWriter(CaptureConfig().snapshots, 0, health)
    target = UploadTarget(
        store_url=str(store_url),
        open_store=lambda: root.child(prefix),
        store_identity=StoreIdentity.of_launch(str(store_url)),
        identity=Identity(project, run, ATTEMPT),
        run=documents.RunDocument(
            project, run, STARTED_NS, (), {"learning_rate": 3e-4, "blocks": BLOCKS, "width": WIDTH}
        ),
        attempt=documents.AttemptDocument(ATTEMPT, STARTED_NS),
        service=None,
    )
    control = ControlReader(lambda _document, _attempt: None, health, 3600.0)
    writer = Writer(target, queue, snapshots, control, health, bounds)
    writer.start()
    for item in finished_steps(steps):
        while queue.room < item.bytes:  # a training is slower than its writer; this is not
            writer.wake()
            time.sleep(_PAUSE_SECONDS)
        if not queue.offer(item):
            raise RuntimeError(f"step {item.step} was dropped")
    end = documents.EndDocument(0, "completed", steps - 1, STARTED_NS + steps * STEP_NS, 0, "w0")
    if not writer.close(end, _CLOSE_SECONDS):
        raise RuntimeError(
            f"run {store_url}/{prefix} was not written in {_CLOSE_SECONDS:g} s: {health.counted()}"
        )
    if health.counted().get("dropped_rows"):
        raise RuntimeError(f"rows of run {store_url}/{prefix} were dropped: {health.counted()}")
    _write_snapshots(root.child(prefix), steps)
    return store_url / project / run


def _write_snapshots(store: Store, steps: int) -> None:
    """Write full tensors of the output layer at some steps, before and after its outputs contain NaN."""
    first, _ = FAULTS[-1].steps(steps)
    for step in sorted({0, steps // 2, first - 1, first}):
        random = np.random.default_rng(step)
        described, contents = [], []
        for info in catalogue():
            if info.module != "head" or info.role not in {"weight", "gradient", "bias"}:
                continue
            scale = 0.02 if info.role == "weight" else 2e-4
            values = (scale * random.standard_normal(info.shape)).astype(np.float32)
            if step == first and info.role == "gradient":
                values.reshape(-1)[::4] = np.nan
            described.append(Described(info.name, "F32", info.shape))
            contents.append(values)
        data = header(described, {}) + b"".join(values.tobytes() for values in contents)
        store.put(SnapshotKey(ATTEMPT, 0, step, "train").path, data)


def make_run(store_url: Path, steps: int = STEPS, project: str = PROJECT, run: str = RUN) -> Path:
    """Record and compact the run, and return its folder."""
    folder = record(store_url, steps, project, run)
    compact(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the store")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--project", default=PROJECT)
    parser.add_argument("--run", default=RUN)
    chosen = parser.parse_args()
    began = time.perf_counter()
    folder = record(chosen.folder, chosen.steps, chosen.project, chosen.run)
    recorded = time.perf_counter()
    compact(folder)
    print(
        f"{folder}: {chosen.steps} steps of {len(catalogue())} tensors;"
        f" recorded in {recorded - began:.1f} s, compacted in {time.perf_counter() - recorded:.1f} s"
    )


if __name__ == "__main__":
    main()
