"""How fast a run of 500 tensors and 10,000 steps is read, before and after compaction; and full tensors of a step of a gigabyte.

``python -m benchmarks.reading [--quick] [--json FILE] [--only statistics|tensors]``. The run lies in a local folder whose pages are in memory, so
that what is measured is the reader. "First" is in a process that has just started and imported what it needs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Figure, Report, arguments
from watchstep import open_run
from watchstep.format import documents
from watchstep.format.block import Block, Places
from watchstep.format.catalogue import catalogue_bytes
from watchstep.format.layout import RUN_DOCUMENT, SegmentKey, SnapshotKey, WriterId
from watchstep.format.segment import encode
from watchstep.format.snapshot import Described, TensorPart, header, parts_metadata
from watchstep.format.statistics import Histograms, StatisticsBatch
from watchstep.format.tensors import TensorInfo
from watchstep.reading.compaction import compact
from watchstep.store.store import Store

TENSORS = 500
STEPS = 10_000
STEPS_OF_A_SEGMENT = 100  # 50,000 rows, the most that a writer puts into one
BINS_OF_A_HISTOGRAM = 16
NAME = "layer.7.weight:gradient"
SAVED_TENSORS, SHARDS = 25, 5
SAVED_SHAPE = (10_000, 1_000)  # 40 MB of float32
TARGETS = {"first series": 0.15, "series": 0.05, "heatmap": 0.2, "latest step": 0.02}
"""Seconds; "first series" before compaction, the others after it."""

ONE_TENSOR = "one 40 MB tensor of a step of 1 GB"
TENSOR_TARGETS = {ONE_TENSOR: 0.06}
"""Seconds."""

MOST_READ = 1.1
"""Bytes read for one tensor, as a multiple of its own."""

_FIRST = """
import json, sys, time
import pyarrow.parquet, watchstep.reading.run as reading
start = time.perf_counter()
run = reading.open_run(sys.argv[1])
opened = time.perf_counter()
assert run.series(sys.argv[2], "mean").num_rows == int(sys.argv[3])
print(json.dumps([opened - start, time.perf_counter() - start]))
"""


def make_run(folder: Path, steps: int) -> Path:
    store = Store.open(folder, create=True).child("bench/run")
    store.put(RUN_DOCUMENT, documents.encode(documents.RunDocument("bench", "run", 1)))
    names = [f"layer.{place}.weight:gradient" for place in range(TENSORS)]
    catalogue = tuple(
        TensorInfo(name, ("gradients",), "gradient", name.rpartition(".")[0], "Linear", place, (64, 64))
        for place, name in enumerate(names)
    )
    packed = catalogue_bytes(catalogue)
    random = np.random.default_rng(0)
    for seq, first in enumerate(range(0, steps, STEPS_OF_A_SEGMENT)):
        key = SegmentKey(WriterId("a", "node", "w0"), seq, first, first + STEPS_OF_A_SEGMENT - 1)
        store.put(key.path, encode(_block(first, catalogue, random), packed))
    return folder / "bench" / "run"


def _block(first: int, catalogue: tuple[TensorInfo, ...], random: np.random.Generator) -> Block:
    rows = TENSORS * STEPS_OF_A_SEGMENT
    step = np.repeat(np.arange(first, first + STEPS_OF_A_SEGMENT), TENSORS)
    counts = np.zeros((rows, 6), np.int64)
    counts[:, 0], counts[:, 5] = 4096, random.integers(1900, 2200, rows)
    values = np.abs(random.standard_normal((rows, 7)))
    bins = np.tile(np.arange(-40, BINS_OF_A_HISTOGRAM - 40, dtype=np.int16), rows)
    histogram = Histograms(
        np.arange(rows + 1, dtype=np.int64) * BINS_OF_A_HISTOGRAM, bins, random.integers(1, 500, len(bins))
    )
    zeros = np.zeros(rows, np.int32)
    return Block(
        step=step,
        mode=zeros.astype(np.int8),
        worker=zeros,
        time_ns=step * 100_000_000,
        tensor=np.tile(np.arange(TENSORS, dtype=np.int32), STEPS_OF_A_SEGMENT),
        catalogue=catalogue,
        places=Places(zeros, zeros + 1, zeros, zeros.astype(np.int8)),
        statistics=StatisticsBatch.from_matrices(counts, values, histogram),
    )


def measure(url: Path, steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by question; each asked of a run opened anew."""
    found: dict[str, list[float]] = {"open": [], "first series": []}
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-c", _FIRST, str(url), NAME, str(steps)],
            capture_output=True,
            text=True,
            check=True,
        )
        opened, whole = json.loads(done.stdout)
        found["open"].append(opened)
        found["first series"].append(whole)
    questions: dict[str, Callable[[], object]] = {
        "series": lambda: open_run(url).series(NAME, "mean"),
        "series of a derived figure": lambda: open_run(url).series(NAME, "std"),
        "heatmap": lambda: open_run(url).heatmap("gradients", "mean", 100),
        "latest step": lambda: open_run(url).at_step(["mean", "std"]),
        "histogram over time": lambda: open_run(url).histogram(NAME),
        "SQL, one tensor": lambda: open_run(url).sql(
            f"SELECT avg(rms) FROM statistics WHERE tensor = '{NAME}'"
        ),
        "SQL, all": lambda: open_run(url).sql("SELECT tensor, max(abs_max) FROM statistics GROUP BY tensor"),
    }
    for name, ask in questions.items():
        ask()
        found[name] = []
    for _ in range(rounds):
        for name, ask in questions.items():
            start = time.perf_counter()
            ask()
            found[name].append(time.perf_counter() - start)
    return found


def add(report: Report, when: str, measured: dict[str, list[float]], met_here: set[str]) -> None:
    for name, times in measured.items():
        note = f"median {statistics.median(times):.4g}, most {max(times):.4g} of {len(times)}"
        target = TARGETS.get(name) if name in met_here else None
        report.add(f"{name}, {when}", Figure(min(times), "s", target, note=note))


def make_saved(folder: Path) -> Path:
    """A run with one object of 25 tensors, and one tensor in the shards of five workers."""
    store = Store.open(folder, create=True).child("bench/saved")
    store.put(RUN_DOCUMENT, documents.encode(documents.RunDocument("bench", "saved", 1)))
    random = np.random.default_rng(0)
    names = [f"layer.{place}.weight" for place in range(SAVED_TENSORS)]
    arrays = [random.standard_normal(SAVED_SHAPE, np.float32) for _ in names]
    described = [Described(name, "F32", SAVED_SHAPE) for name in names]
    key = SnapshotKey("a", 0, 0, "train", "weights")
    _save(store, key, described, {}, arrays)
    rows = SAVED_SHAPE[0] // SHARDS
    for worker in range(SHARDS):
        shard = arrays[0][worker * rows : (worker + 1) * rows]
        part = TensorPart(SAVED_SHAPE, (worker * rows, 0), is_shard=True)
        key = SnapshotKey("a", worker, 1, "train", "weights")
        _save(store, key, [Described(names[0], "F32", shard.shape)], {names[0]: part}, [shard])
    return folder / "bench" / "saved"


def _save(
    store: Store,
    key: SnapshotKey,
    described: list[Described],
    parts: dict[str, TensorPart],
    arrays: list[NDArray[np.float32]],
) -> None:
    pieces = [
        memoryview(header(described, parts_metadata(parts))),
        *(array.data.cast("B") for array in arrays),
    ]
    store.create_in_parts(key.path, sum(map(len, pieces)), pieces)


def measure_saved(url: Path, rounds: int) -> tuple[dict[str, list[float]], float | None]:
    """Seconds of each round, by question, each asked of a run opened anew; and the bytes read per byte of one tensor."""
    name = f"layer.{SAVED_TENSORS // 2}.weight"
    questions: dict[str, Callable[[], object]] = {
        ONE_TENSOR: lambda: open_run(url).tensor(name).value(0),
        "the same, for torch": lambda: open_run(url).tensor(name).value(0, framework="torch"),
        "100 rows of it": lambda: open_run(url).tensor(name).saved(0)[5000:5100],
        "one column of it": lambda: open_run(url).tensor(name).saved(0)[:, 7],
        "40 MB of the shards of 5 workers": lambda: open_run(url).tensor("layer.0.weight").value(1),
    }
    found: dict[str, list[float]] = {}
    for question, ask in questions.items():
        ask()
        found[question] = []
        for _ in range(rounds):
            start = time.perf_counter()
            ask()
            found[question].append(time.perf_counter() - start)
    before = _bytes_read()
    questions[ONE_TENSOR]()
    after = _bytes_read()
    own = SAVED_SHAPE[0] * SAVED_SHAPE[1] * 4
    return found, None if before is None or after is None else (after - before) / own


def _bytes_read() -> int | None:
    """Bytes that this process has read by system calls; None where the system does not count them."""
    counters = Path("/proc/self/io")
    if not counters.exists():
        return None
    return int(counters.read_text().split("rchar:")[1].split()[0])


def add_saved(report: Report, folder: Path, rounds: int) -> None:
    found, ratio = measure_saved(make_saved(folder), rounds)
    for name, times in found.items():
        note = f"median {statistics.median(times):.4g}, most {max(times):.4g} of {len(times)}"
        report.add(name, Figure(min(times), "s", TENSOR_TARGETS.get(name), note=note))
    report.add("bytes read for it, per byte of its own", Figure(ratio, "ratio", MOST_READ))


def main() -> None:
    parser = arguments("How fast a run is read, before and after compaction.")
    parser.add_argument("--only", choices=("statistics", "tensors"), help="measure only these")
    parsed = parser.parse_args()
    steps, rounds = (2_000, 3) if parsed.quick else (STEPS, 7)
    title = (
        f"Reading {TENSORS} tensors x {steps} steps" if parsed.only != "tensors" else "Reading full tensors"
    )
    report = Report(title, parsed.quick, ("duckdb",))
    if parsed.only != "statistics":
        with tempfile.TemporaryDirectory() as folder:
            add_saved(report, Path(folder), rounds)
    if parsed.only != "tensors":
        add_statistics(report, steps, rounds)
    report.remark(
        "Values are the least of the rounds, and each but 'first series' and 'open' is of a warm process; opening the "
        "run is part of each. The store is a local folder, in the page cache."
    )
    report.finish(parsed.json)


def add_statistics(report: Report, steps: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = make_run(Path(folder), steps)
        add(report, "before", measure(url, steps, rounds), {"first series"})
        start = time.perf_counter()
        compact(url)
        report.add(
            "compaction", Figure(time.perf_counter() - start, "s", note=f"{TENSORS * steps} rows, once")
        )
        add(report, "after", measure(url, steps, rounds), set(TARGETS) - {"first series"})
        for name in ("stats", "compacted"):
            size = sum(path.stat().st_size for path in (url / name).rglob("*.*"))
            report.add(f"size of {name}", Figure(size / 2**20, "MiB"))


if __name__ == "__main__":
    main()
