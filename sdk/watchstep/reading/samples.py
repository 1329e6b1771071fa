"""Reading the samples that steps were trained on.

A worker's records of a step may be in several objects: a request uploads those of an accumulation so far. Listing and reading are
bounded; what exceeds the bounds, or cannot be read, is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from watchstep.errors import FormatError, NotFoundError
from watchstep.format.layout import SAMPLES, SamplesKey
from watchstep.format.samples.samples import (
    MAX_OBJECT_BYTES,
    SampleBatch,
    decode_batch,
    payloads_of,
    step_of,
)
from watchstep.reading.run_documents import get_document
from watchstep.store.store import Store

_MAX_KEYS = 100_000
_MAX_BYTES = 256 * 1024 * 1024
"""Maximum size of the objects that one query reads."""

_MAX_SAMPLES = 8_000_000
"""Maximum number of samples, and of batches, that one query returns."""


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
    by_attempt = keys_by_attempt(
        key
        for key in index.keys
        if (worker is None or key.worker == worker)
        and (steps is None or (steps and key.first <= steps[-1] and key.last >= steps[0]))
    )
    reading = _Reading(store, steps, found)
    for attempt in sorted(by_attempt, key=lambda name: (place.get(name, -1), name), reverse=True):
        if not reading.read_attempt(by_attempt[attempt]):
            break
    found.batches.sort(key=lambda batch: (batch.step, batch.worker))
    return found


def keys_by_attempt(keys: Iterable[SamplesKey]) -> dict[str, list[SamplesKey]]:
    """Return keys by their attempt, in their order."""
    grouped: dict[str, list[SamplesKey]] = {}
    for key in keys:
        grouped.setdefault(key.attempt, []).append(key)
    return grouped


class _Reading:
    """One query, with its limits. The newest attempt is read first; of older ones, only steps that no newer one has."""

    def __init__(self, store: Store, steps: range | None, found: FoundSamples) -> None:
        self._store, self._steps, self._found = store, steps, found
        self._newer: set[int] = set()
        self._bytes_left, self._samples_left = _MAX_BYTES, _MAX_SAMPLES

    def read_attempt(self, keys: Sequence[SamplesKey]) -> bool:
        """Read the objects of an attempt. Returns whether the limit of samples allows more."""
        own: set[int] = set()
        for key in keys:
            try:
                data = get_document(self._store, key.path, min(self._bytes_left, MAX_OBJECT_BYTES))
                self._bytes_left -= len(data)
                for payload in payloads_of(data, key.path, self._steps):
                    if step_of(payload) in self._newer:
                        continue
                    batch = decode_batch(payload, key.path)
                    self._samples_left -= len(batch.ids) + 1
                    if self._samples_left < 0:
                        self._found.damaged[SAMPLES] = (
                            f"more than {_MAX_SAMPLES} samples; the rest is not read"
                        )
                        return False
                    own.add(batch.step)
                    self._found.batches.append(replace(batch, worker=key.worker, attempt=key.attempt))
            except NotFoundError:
                continue  # removed after listing
            except FormatError as error:
                self._found.damaged[key.path] = error.what
        self._newer |= own
        return True
