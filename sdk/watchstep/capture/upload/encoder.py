"""From finished steps to the bytes of segments."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from watchstep.capture.health import RecorderHealth
from watchstep.capture.record import FinishedStep, join, merge_repeats
from watchstep.capture.upload.backlog import Backlog
from watchstep.format.block import Block, concatenate
from watchstep.format.segment import catalogue_bytes, encode
from watchstep.format.tensors import MAX_WORD_BYTES, TensorInfo

Catalogue = tuple[TensorInfo, ...]

_CATALOGUES = 4
"""The same few come again and again: of losses alone, of all layers, with what is sampled of the system beside them. To
encode one takes 16 µs a tensor."""


@dataclass(frozen=True)
class _Steps:
    """Some steps as one block, which takes few objects of Python's however many records they had."""

    first: int
    last: int
    number: int
    rows: int
    block: Block


_ROW_BYTES = 60
"""Of a row's step, mode, worker, time, tensor and placement."""


class SegmentEncoder:
    """Takes steps in as they come, and makes one segment of them; keeps the last encoded catalogues, for they come again.

    Records are objects of Python's. Those that wait for the next segment are seen by each run of the collector of cycles, and
    after some ten thousand it looks at all objects of the process, which stops training for a tenth of a second and more. So
    they are made into arrays a few steps at a time.

    Attributes:
        rows: that were taken in and wait for their segment.
        bytes: of their arrays; making the segment takes about twice as much again.
    """

    def __init__(self, backlog: Backlog, health: RecorderHealth) -> None:
        self._backlog = backlog
        self._health = health
        self._catalogues: deque[tuple[Catalogue, Catalogue, bytes]] = deque(maxlen=_CATALOGUES)
        self._taken: list[_Steps] = []
        self.rows = 0
        self.bytes = 0

    def take_in(self, steps: list[FinishedStep]) -> None:
        """Make arrays of some steps, for the next segment. A step of which none can be made is dropped and counted."""
        try:
            block = join([record for step in steps for record in step.records])
        except Exception as error:  # noqa: BLE001 - counted; other steps may well be taken in
            if len(steps) > 1:
                for step in steps:
                    self.take_in([step])
                return
            self._drop(len(steps), sum(step.rows for step in steps), error)
            return
        if len(block):
            rows = sum(step.rows for step in steps)
            self._taken.append(_Steps(steps[0].step, steps[-1].step, len(steps), rows, block))
            self.rows += rows
            self.bytes += block.statistics.bytes + _ROW_BYTES * len(block)

    def encode(self) -> None:
        """Put a segment of what was taken in into the backlog. Steps that cannot be encoded are dropped and counted."""
        taken = self._take_out()
        if taken:
            self._encode(taken)

    def drop_rest(self) -> None:
        """Count what was taken in and cannot be written any more."""
        for steps in self._take_out():
            self._drop(steps.number, steps.rows)

    def _take_out(self) -> list[_Steps]:
        taken, self._taken, self.rows, self.bytes = self._taken, [], 0, 0
        return taken

    def _encode(self, taken: list[_Steps]) -> None:
        try:
            block = merge_repeats(concatenate([steps.block for steps in taken]))
            catalogue, packed = self._encoded(block.catalogue)
            data = encode(replace(block, catalogue=catalogue), packed)
        except Exception as error:  # noqa: BLE001 - counted; other steps may well encode
            if len(taken) > 1:
                for steps in taken:
                    self._encode([steps])
                return
            self._drop(taken[0].number, taken[0].rows, error)
            return
        self._backlog.add(taken[0].first, taken[-1].last, len(block), data)

    def _drop(self, steps: int, rows: int, error: Exception | None = None) -> None:
        if error is not None:
            self._health.fault("encoding", error)
        self._health.count("dropped_rows", rows)
        self._health.count("dropped_steps", steps)

    def _encoded(self, catalogue: Catalogue) -> tuple[Catalogue, bytes]:
        """The catalogue with words that readers take, and its bytes."""
        for known, bounded, data in self._catalogues:
            if known == catalogue:
                return bounded, data
        bounded = tuple(info.bounded() for info in catalogue)
        shortened = [info.name for info, whole in zip(bounded, catalogue, strict=True) if info is not whole]
        if shortened:
            self._health.reached("shortened_names", len(shortened))
            self._health.note(
                "names",
                f"{len(shortened)} tensors have names of more than {MAX_WORD_BYTES} bytes, which are recorded shortened;"
                f" the first is {shortened[0][:80]}",
            )
        data = catalogue_bytes(bounded)
        self._catalogues.appendleft((catalogue, bounded, data))
        return bounded, data
