"""A child: bend objects of one kind, read each, and say what came of it.

``python -m benchmarks.fuzz_objects.reading FOLDER KIND SEED COUNT MIB``: the folder holds whole objects, and takes the one
that is being read, so that it is known if this process dies of it. COUNT 0 reads only what claims to be large.
"""

from __future__ import annotations

import hashlib
import json
import random
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fuzz_objects.bending import BENDS
from benchmarks.fuzz_objects.bending_streams import STREAM_BENDS
from benchmarks.fuzz_objects.bending_tables import TABLE_BENDS
from benchmarks.fuzz_objects.bombs import compacted_bombs, document_bombs, manifest_bombs, snapshot_bombs
from benchmarks.fuzz_objects.segment_bombs import segment_bombs
from watchstep.errors import FormatError, NotFoundError
from watchstep.format import documents, journal, segment
from watchstep.format.control import ControlDocument
from watchstep.format.documents import AttemptDocument, EndDocument, RunDocument
from watchstep.format.parquet.table import to_block
from watchstep.format.snapshot import open_snapshot
from watchstep.reading import compacted
from watchstep.reading.arrow_object import open_segment
from watchstep.reading.parquet_object import Catalogues, open_object
from watchstep.store.store import Store

SEGMENT = "stats/a1/node/w0/0000000000-0-0.arrow"
COMPACTED = "compacted/0000000001/a1/000000.parquet"
KEY = "tensors/a1/0/00000001-train.safetensors"


def read_segment(data: bytes, store: Store) -> None:
    """As the evaluator reads it, with histograms and without, as the recorder does, and as a reader that fetches columns."""
    damage: FormatError | None = None
    for histograms in (True, False):
        try:
            segment.decode(data, "fuzzed", histograms=histograms)
        except FormatError as error:
            damage = error
    try:
        segment.metadata_of(data, "fuzzed")
    except FormatError as error:
        damage = error
    store.put(SEGMENT, data)
    found = open_segment(store, SEGMENT, len(data), Catalogues())
    to_block(found.read(found.columns), found.catalogue, SEGMENT)
    if damage is not None:
        raise damage


def figures(data: bytes) -> bytes:
    """A digest of all that a segment says.

    Raises:
        FormatError: It is refused.
    """
    block = segment.decode(data, "fuzzed")
    digest = hashlib.blake2b(repr((block.catalogue, sorted(block.probes))).encode())
    bins = block.statistics.histogram
    rows = {**vars(block), **vars(block.places), **vars(block.statistics), **block.probes, **vars(bins)}
    for name in sorted(rows):
        if isinstance(rows[name], np.ndarray):
            digest.update(rows[name].tobytes())
    return digest.digest()


def read_compacted(data: bytes, store: Store) -> None:
    """As a reader that fetches columns."""
    store.put(COMPACTED, data)
    found = open_object(store, COMPACTED, len(data), Catalogues())
    to_block(found.read(found.columns), found.catalogue, COMPACTED)


def read_snapshot(data: bytes, store: Store) -> None:
    """Its header and all its tensors."""
    store.put(KEY, data)
    held = open_snapshot(store, KEY)
    for name in list(held.tensors)[:50]:
        held.values(name)


def read_document(data: bytes, _store: Store) -> None:
    """As each kind of document."""
    kinds: tuple[type[Any], ...] = (RunDocument, AttemptDocument, EndDocument)
    refused = 0
    for kind in kinds:
        try:
            documents.decode(kind, data, "fuzzed")
        except FormatError:
            refused += 1
    if refused == 3:
        raise FormatError("no document", "")


def read_control(data: bytes, _store: Store) -> None:
    """As a worker reads it."""
    ControlDocument.decode(data)


def read_manifest(data: bytes, _store: Store) -> None:
    """As a reader of compacted runs reads it."""
    compacted.decode(data, "fuzzed")


def read_journal(data: bytes, _store: Store) -> None:
    """As a backtest reads it."""
    journal.decode(data, "fuzzed")


READERS: dict[str, Callable[[bytes, Store], None]] = {
    "segment": read_segment,
    "compacted": read_compacted,
    "snapshot": read_snapshot,
    "document": read_document,
    "control": read_control,
    "manifest": read_manifest,
    "journal": read_journal,
}


def bombs(kind: str, whole: list[bytes], dice: random.Random) -> list[bytes]:
    """What claims to be large."""
    if kind == "segment":
        return segment_bombs(whole[0])
    if kind == "compacted":
        return compacted_bombs(whole[0])
    if kind == "manifest":
        return [*manifest_bombs(whole[0]), *document_bombs(dice)]
    return snapshot_bombs() if kind == "snapshot" else document_bombs(dice)


FORM_BENDS = {"segment": STREAM_BENDS, "compacted": TABLE_BENDS}
"""Bends of a kind that leave it a valid file of its format."""

SEEDS_OF_A_RUN = 1_000_000
"""Seeds of one run's children: those of a run with seed S begin at S times this."""


def main(folder: Path, kind: str, seed: int, count: int, mib: int) -> None:
    """Read so many bent objects, and the bombs where this is the first of the kind's children."""
    whole = [file.read_bytes() for file in sorted((folder / kind).iterdir())]
    dice, store, at = (
        random.Random(seed),
        Store.open(folder / f"store-{kind}-{seed}", create=True),
        folder / f"{kind}-{seed}.at",
    )
    read = READERS[kind]
    for one in whole:
        read(one, store)  # all is imported, and what is whole is read
    true = {figures(data) for data in whole} if kind == "segment" else set()
    made = bombs(kind, whole, dice) if seed % SEEDS_OF_A_RUN == 0 else []
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here: making bombs took memory, too
    before = peak_mib()
    held = Path("/proc/self/statm").read_text().split()[0]
    limit = int(held) * resource.getpagesize() + mib * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    told = {"read": 0, "refused": 0}
    failures: list[str] = []
    for number in range(count or len(made)):
        bends = (*BENDS, *FORM_BENDS.get(kind, ()))
        bend = dice.choice(bends)
        bent = made[number] if number < len(made) else bend(dice, dice.choice(whole))
        if dice.random() < 0.1 and number >= len(made) and bent:
            bent = dice.choice(BENDS)(dice, bent)
        at.write_bytes(bent)
        try:
            read(bent, store)
            told["read"] += 1
            # Segments have checksums: damaged bytes may not be read as other figures.
            if kind == "segment" and number >= len(made) and bend in BENDS and figures(bent) not in true:
                failures.append(f"{bend.__name__}: read with other figures")
                (folder / f"{kind}-{seed}-{number}.changed").write_bytes(bent)
        except (FormatError, NotFoundError):
            told["refused"] += 1
        except Exception as error:  # noqa: BLE001 - that none comes is what is measured
            failures.append(f"{type(error).__name__}: {str(error)[:200]}")
            (folder / f"{kind}-{seed}-{number}.failed").write_bytes(bent)
    print(json.dumps({**told, "failures": failures, "before": before, "peak": peak_mib()}))


def peak_mib() -> int:
    """The most that was resident, MiB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *(int(text) for text in sys.argv[3:6]))
