"""Attribution of samples to training steps, on the training thread.

A batch belongs to the step whose forward pass, in mode train, is the next one after the data loader yielded it. Where forward passes
are not observed, as in a compiled model, it belongs to the step whose update is next. Batches of an evaluation belong to no step:

- batches that are yielded while gradients are disabled, or while the program's mode is not train
- batches that are waiting when a forward pass in another mode begins, of the data loader that yielded last

An epoch of a data loader with a batch of a training step is an epoch of training. Its waiting batches stay, because a program may call its
model in another mode between receiving a batch and training on it. Before an epoch is known to be one, its batches are set aside. They
belong to the next training pass after all if no other batch is yielded before it.

A program that names samples itself (`Hook.samples`) is believed: from then on batches of data loaders are not recorded.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from watchstep.capture.health import RecorderHealth
from watchstep.capture.samples.ring import SampleRing
from watchstep.format.samples.samples import SampleBatch, SampleId, plain_id
from watchstep.format.tensors import Mode

_MAX_WAITING = 256
"""Batches that wait for their step: of accumulation, or of data loaders that are iterated without training."""


@dataclass
class _Loader:
    """A data loader.

    Attributes:
        source: name of its dataset's class.
        training_epoch: the last epoch with a batch of a training step; -1 before.
    """

    source: str
    training_epoch: int = -1


@dataclass(frozen=True)
class _Waiting:
    """A batch that was yielded, and whose step has not begun."""

    loader: _Loader
    ids: Sequence[Any] | None
    epoch: int
    number: int

    @property
    def trains(self) -> bool:
        return self.loader.training_epoch == self.epoch


class SampleCapture:
    """Records which samples each step was trained on, in a ring that is created with the first record.

    Attributes:
        open_ring: returns the ring, or None if samples are not recorded; called once.
        request_upload: called when the samples of recent steps should be written to the store.
    """

    def __init__(self, health: RecorderHealth) -> None:
        """Start without samples. Faults are counted in health."""
        self.open_ring: Callable[[], SampleRing | None] = _no_ring
        self.request_upload: Callable[[], None] = _nothing
        self._health = health
        self._ring: SampleRing | None = None
        self._is_open = False
        self._names_samples = False
        self._had_pass = False
        self._waiting: deque[_Waiting] = deque(maxlen=_MAX_WAITING)
        self._aside: list[_Waiting] = []
        # By identity, because comparing data loaders may run methods of the program.
        self._loaders: dict[int, tuple[weakref.ref[Any], _Loader]] = {}
        self._unknown_loader = _Loader("")

    def add(self, ids: Any, step: int) -> None:
        """Record samples of a training step that the program names. From now on batches of data loaders are not recorded.

        Args:
            ids: an id, or an array, a tensor or an iterable of ids: whole numbers, strings, paths, pairs or dictionaries.
            step: the step.

        Raises:
            TypeError, ValueError: an id is of another kind.
        """
        self._names_samples = True
        self._waiting.clear()
        self._record(SampleBatch(step, _listed(ids)))

    def yielded(self, loader: Any, ids: Sequence[Any] | None, epoch: int, number: int) -> None:
        """Handle a batch that a data loader yields in mode train while gradients are enabled.

        Args:
            loader: the data loader; None if unknown.
            ids: the ids of its samples; None if unknown.
            epoch: epoch of the data loader, from 0.
            number: number of the batch in the epoch, from 0.
        """
        if self._names_samples:
            return
        self._aside = []
        self._waiting.append(_Waiting(self._loader_of(loader), ids, epoch, number))

    def pass_begins(self, mode: Mode, step: int) -> None:
        """Handle the beginning of a forward pass of a watched model. Never raises.

        Args:
            mode: its mode.
            step: the step that is not finished.
        """
        if mode == "train":
            self._had_pass = True
            if self._waiting or self._aside:
                self._record_waiting(list(self._waiting) or self._aside, step)
        elif self._waiting:
            self._set_aside()

    def finished(self, step: int) -> None:
        """Handle the end of the update of a step. If no forward pass was observed, the waiting batches belong to it. Never raises.

        If batches of several data loaders wait, those of known epochs of training do, or else those of the last one.
        """
        had_pass, self._had_pass = self._had_pass, False
        if had_pass:
            return
        if self._waiting:
            last = self._waiting[-1]
            training = [batch for batch in self._waiting if batch.trains]
            of_last = [batch for batch in self._waiting if batch.loader is last.loader]
            self._record_waiting(training or of_last, step)
        elif self._aside:
            self._record_waiting(self._aside, step)

    def _loader_of(self, loader: Any) -> _Loader:
        if loader is None:
            return self._unknown_loader
        loaders, key = self._loaders, id(loader)
        known = loaders.get(key)
        if known is None or known[0]() is not loader:
            reference = weakref.ref(loader, lambda _: loaders.pop(key, None))
            # A property of the program is not read.
            dataset = getattr(loader, "__dict__", {}).get("dataset")
            known = loaders[key] = (reference, _Loader(type(dataset).__name__))
        return known[1]

    def _set_aside(self) -> None:
        """Take back the batches of the data loader that yielded last: an evaluation has begun."""
        last = self._waiting[-1]
        if last.trains:
            return
        remaining = [batch for batch in self._waiting if batch.loader is not last.loader]
        self._aside = [batch for batch in self._waiting if batch.loader is last.loader]
        self._waiting.clear()
        self._waiting.extend(remaining)

    def _record_waiting(self, batches: list[_Waiting], step: int) -> None:
        self._waiting.clear()
        self._aside = []
        for batch in batches:
            batch.loader.training_epoch = batch.epoch
            self._record_batch(step, batch)

    def _record_batch(self, step: int, batch: _Waiting) -> None:
        if batch.ids is None:
            self._health.count("batches_without_sample_ids")
            return
        try:
            ids = _listed(batch.ids)
            self._record(SampleBatch(step, ids, batch.loader.source, batch.epoch, batch.number))
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._health.fault("samples", error)

    def _record(self, batch: SampleBatch) -> None:
        if not self._is_open:
            self._is_open = True
            self._ring = self.open_ring()
        if self._ring is not None:
            self._ring.append(batch)


def _listed(ids: Any) -> tuple[SampleId, ...]:
    """Return ids of any library's types as plain ones."""
    if isinstance(ids, list | tuple):
        if set(map(type, ids)) == {int}:  # the fastest of such tests
            return tuple(ids)
    elif hasattr(ids, "tolist"):  # arrays and tensors
        ids = ids.tolist()
        ids = ids if isinstance(ids, list) else [ids]
    elif isinstance(ids, Iterable) and not isinstance(ids, str | bytes | Mapping):
        ids = list(ids)
    else:
        ids = [ids]
    return tuple(plain_id(value) for value in ids)


def _no_ring() -> None:
    return None


def _nothing() -> None:
    return None
