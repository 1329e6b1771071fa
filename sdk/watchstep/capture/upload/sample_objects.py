"""The folder of a ring of samples, and the objects on the store that its records become."""

from __future__ import annotations

from typing import TYPE_CHECKING

from watchstep.capture.samples.ring import MAX_RING_BYTES, RingRecord, SampleRing, map_file, read_ring
from watchstep.capture.upload.spill import SpillFolder, SpillOwner, spill_roots
from watchstep.format.layout import SamplesKey
from watchstep.format.samples.samples import encode_object

if TYPE_CHECKING:
    from watchstep.store.store import Store

RING = "samples.ring"
"""Name of the file in its folder."""

_FOLDER_MARK = "-samples"
_MAX_FILE_BYTES = MAX_RING_BYTES + 4096
_RUN_CHARACTERS = 60


def folder_prefix(run: str) -> str:
    """Return what the names of the folders of a run's recorders begin with."""
    return f"{run[:_RUN_CHARACTERS]}-"


def is_ring_folder(name: str) -> bool:
    """Return whether a folder is one of a ring, by its name."""
    return _FOLDER_MARK in name


def make_ring(about: SpillOwner, size: int, steps: int) -> tuple[SpillFolder, SampleRing]:
    """Create a folder with an empty ring, in the first place that can be used.

    Args:
        about: the owner.
        size: bytes for records.
        steps: number of steps.

    Raises:
        OSError: no place can be used.
    """
    identity = about.identity
    name = f"{folder_prefix(identity.run)}{identity.attempt[:40]}-w{identity.worker}{_FOLDER_MARK}"
    failure: OSError = FileNotFoundError("this system has no temporary folder")
    for root in spill_roots():
        try:
            folder = SpillFolder.make(root, name, about)
        except OSError as error:
            failure = error
            continue
        try:
            with folder.created(RING) as file:
                memory = map_file(file, size)
        except OSError as error:
            remove_ring(folder)
            failure = error
            continue
        return folder, SampleRing(memory, steps)
    raise failure


def remove_ring(folder: SpillFolder) -> None:
    """Remove a ring with its folder, because its records are on the store."""
    folder.drop(RING)
    folder.remove()


def object_of(records: list[RingRecord], attempt: str, worker: int) -> tuple[SamplesKey, bytes] | None:
    """Return key and bytes of the object of some records; None without records."""
    if not records:
        return None
    steps = [record.step for record in records]
    key = SamplesKey(attempt, worker, records[0].number, min(steps), max(steps))
    return key, encode_object((record.number, record.payload) for record in records)


def upload_left_ring(folder: SpillFolder, store: Store, attempt: str, worker: int) -> int | None:
    """Upload the ring of an ended process, and remove its file.

    Args:
        folder: the locked folder.
        store: the run's store.
        attempt: the attempt of the process.
        worker: its rank.

    Returns:
        The size of the object; None if the folder has no ring, or the ring no record.

    Raises:
        StoreError: the store refuses.
        OSError, FormatError: the file cannot be read, or is not a ring.
    """
    try:
        data = folder.contents(RING, _MAX_FILE_BYTES)
    except FileNotFoundError:
        return None
    made = object_of(read_ring(data, str(folder.path / RING)), attempt, worker)
    if made is not None:
        key, content = made
        store.create(
            key.path, content
        )  # an object with this name has the same first record, of the same process
    folder.drop(RING)
    return None if made is None else len(made[1])
