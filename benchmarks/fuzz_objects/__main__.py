"""See `benchmarks.fuzz_objects`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.fuzz_objects.reading import SEEDS_OF_A_RUN
from benchmarks.fuzz_objects.whole import KINDS, record
from benchmarks.report import Figure, Report, arguments

SHARES = {
    "segment": 0.4,
    "compacted": 0.15,
    "snapshot": 0.15,
    "document": 0.1,
    "control": 0.05,
    "manifest": 0.1,
    "journal": 0.05,
}
OF_A_CHILD = 2500
MIB = 1024
"""What a child may take beyond what it holds when all is imported: a segment at its bounds is some 500 MiB."""


@dataclass
class Told:
    """What came of one kind."""

    objects: int = 0
    refused: int = 0
    peak: int = 0
    failures: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)


def children(objects: int, seed: int = 0) -> list[tuple[str, int, int]]:
    """(kind, seed, count) of each child; those of runs with different seeds differ."""
    made = []
    for kind in KINDS:
        left, number = round(objects * SHARES[kind]), seed * SEEDS_OF_A_RUN
        while left > 0:
            made.append((kind, number, min(left, OF_A_CHILD)))
            left, number = left - OF_A_CHILD, number + 1
    return made


def run_child(folder: Path, kind: str, seed: int, count: int) -> tuple[str, int, str | dict[str, object]]:
    """What a child says, or how it died."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.fuzz_objects.reading",
        str(folder),
        kind,
        str(seed),
        str(count),
        str(MIB),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        kept = f"{folder}/{kind}-{seed}.at"
        return kind, count, f"exit code {done.returncode}, reading {kept}: {done.stderr[-300:]}"
    return kind, count, json.loads(done.stdout)


def measure(objects: int, folder: Path, seed: int) -> dict[str, Told]:
    """Read so many bent objects, in as many processes as there are cores."""
    for kind, whole in record(folder / "recorded").items():
        (folder / kind).mkdir()
        for number, data in enumerate(whole):
            (folder / kind / f"{number:04d}").write_bytes(data)
    told = {kind: Told() for kind in KINDS}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for kind, count, said in pool.map(lambda child: run_child(folder, *child), children(objects, seed)):
            mine = told[kind]
            if isinstance(said, str):
                mine.deaths.append(said)
                continue
            mine.objects += count
            mine.refused += int(str(said["refused"]))
            mine.peak = max(mine.peak, int(str(said["peak"])) - int(str(said["before"])))
            mine.failures += said["failures"]  # type: ignore[arg-type]
    return told


def main() -> None:
    parser = arguments("Bent segments, snapshots and documents, and what readers make of them.")
    parser.add_argument("--objects", type=int, default=120_000)
    parser.add_argument(
        "--seed", type=int, default=0, help="other objects than those of another seed, from 0"
    )
    given = parser.parse_args()
    objects = 3000 if given.quick else given.objects
    report = Report("Malformed objects", given.quick)
    with tempfile.TemporaryDirectory() as place:
        told = measure(objects, Path(place), given.seed)
    for kind, mine in told.items():
        note = f"{mine.refused} refused, {mine.objects - mine.refused} read"
        report.add(f"{kind}: objects", Figure(mine.objects, "objects", note=note))
        bad = [*mine.deaths, *mine.failures]
        report.add(f"{kind}: crashes and other exceptions", Figure(len(bad), "", 0, note="; ".join(bad[:3])))
        report.add(f"{kind}: peak memory", Figure(mine.peak, "MiB", MIB))
    total = sum(mine.objects for mine in told.values())
    target = None if given.quick else 100_000
    report.add("objects together", Figure(total, "objects", target, bound="at least"))
    report.finish(given.json)


if __name__ == "__main__":
    main()
