"""Reading the samples that steps were trained on.

A worker's records of a step may be in several objects: a request uploads those of an accumulation so far. Listing and reading are
bounded; what exceeds the bounds, or cannot be read, is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from watchstep.errors import FormatError, NotFoundError
from watchstep.format.layout import SAMPLES, SamplesKey
from watchstep.format.samples.samples import MAX_OBJECT_BYTES, SampleBatch, decode_object
from watchstep.reading.run_documents import get_document
from watchstep.store.store import Store

_MAX_KEYS = 100_000
_MAX_BYTES = 256 * 1024 * 1024
"""Maximum size of the objects that one query reads."""

_MAX_SAMPLES = 8_000_000
"""Maximum number of samples that one query returns."""


@dataclass
class FoundSamples:
    """Batches of some steps, and errors of objects that could not be read.

    Attributes:
        batches: by worker, in the order of training.
        damaged: key → error.
    """

    batches: list[SampleBatch] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SampleIndex:
    """Objects with samples of a run.

    Attributes:
        keys: their names, by attempt, worker and number.
        damaged: other keys below the prefix → error.
    """

    keys: tuple[SamplesKey, ...]
    damaged: dict[str, str]

    @property
    def steps(self) -> list[range]:
        """Ranges of steps of the objects; not each step of a range has samples."""
        return sorted({range(key.first, key.last + 1) for key in self.keys}, key=lambda steps: steps.start)


def list_samples(store: Store, check: Callable[[], None] = lambda: None) -> SampleIndex:
    """List a run's objects with samples.

    Args:
        store: the run's store.
        check: called for each object; may raise.

    Raises:
        StoreError: the store cannot be read.
    """
    keys: list[SamplesKey] = []
    damaged: dict[str, str] = {}
    for number, entry in enumerate(store.entries(SAMPLES)):
        check()
        if number >= _MAX_KEYS:
            damaged[SAMPLES] = f"more than {_MAX_KEYS} objects; the rest is not read"
            break
        try:
            keys.append(SamplesKey.parse(entry.key))
        except FormatError as error:
            damaged[entry.key] = error.what
    return SampleIndex(tuple(sorted(keys)), damaged)


def read_samples(
    store: Store, attempts: Sequence[str], steps: range | None = None, worker: int | None = None
) -> FoundSamples:
    """Read the samples of steps, of the newest attempt that has samples of each step.

    Args:
        store: the run's store.
        attempts: the run's attempts, oldest first; others are older.
        steps: the steps; all if None.
        worker: only of this rank.

    Raises:
        StoreError: the store cannot be read.
    """
    index = list_samples(store)
    found = FoundSamples(damaged=dict(index.damaged))
    place = {attempt: number for number, attempt in enumerate(attempts)}
    newest: dict[int, str] = {}
    batches: list[SampleBatch] = []
    for attempt in sorted({key.attempt for key in index.keys}, key=lambda name: (place.get(name, -1), name)):
        for batch in _read_attempt(store, index, attempt, steps, worker, found):
            newest[batch.step] = attempt
            batches.append(batch)
    found.batches = [batch for batch in batches if newest[batch.step] == batch.attempt]
    found.batches.sort(key=lambda batch: (batch.step, batch.worker))
    return found


def _read_attempt(
    store: Store,
    index: SampleIndex,
    attempt: str,
    steps: range | None,
    worker: int | None,
    found: FoundSamples,
) -> Iterator[SampleBatch]:
    bytes_left, samples_left = _MAX_BYTES, _MAX_SAMPLES
    for key in index.keys:
        if key.attempt != attempt or (worker is not None and key.worker != worker):
            continue
        if steps is not None and (not steps or key.first > steps[-1] or key.last < steps[0]):
            continue
        try:
            data = get_document(store, key.path, min(bytes_left, MAX_OBJECT_BYTES))
            bytes_left -= len(data)
            for batch in batches_of(data, key, steps):
                samples_left -= len(batch.ids)
                if samples_left < 0:
                    found.damaged[SAMPLES] = f"more than {_MAX_SAMPLES} samples; the rest is not read"
                    return
                yield batch
        except NotFoundError:
            continue  # removed after listing
        except FormatError as error:
            found.damaged[key.path] = error.what


def batches_of(data: bytes, key: SamplesKey, steps: range | None) -> Iterator[SampleBatch]:
    """Yield the batches of an object with the attempt and the worker that its key names.

    Args:
        data: bytes of the object.
        key: its key.
        steps: only batches of these steps; all if None.

    Raises:
        FormatError: it is damaged.
    """
    for batch in decode_object(data, key.path, steps):
        yield replace(batch, worker=key.worker, attempt=key.attempt)
