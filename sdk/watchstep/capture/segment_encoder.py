"""From finished steps to the bytes of segments."""

from __future__ import annotations

from collections import deque

from watchstep.capture.backlog import Backlog
from watchstep.capture.bounded_queue import FinishedStep
from watchstep.capture.health import Health
from watchstep.capture.record import join
from watchstep.segment import catalogue_bytes, encode
from watchstep.tensors import TensorInfo

_CATALOGUES = 4
"""The same few come again and again: of losses alone, of all layers, with what is sampled of the system beside them. To
encode one takes 16 µs a tensor."""


class SegmentEncoder:
    """Makes one segment of several steps; keeps the last encoded catalogues, for they come again."""

    def __init__(self, backlog: Backlog, health: Health) -> None:
        self._backlog = backlog
        self._health = health
        self._catalogues: deque[tuple[tuple[TensorInfo, ...], bytes]] = deque(maxlen=_CATALOGUES)

    def encode(self, steps: list[FinishedStep]) -> None:
        """Put a segment of these steps into the backlog. A step that cannot be encoded is dropped and counted."""
        try:
            block = join([record for step in steps for record in step.records])
            if not len(block):
                return
            data = encode(block, self._encoded(block.catalogue))
        except Exception as error:  # noqa: BLE001 - counted; other steps may well encode
            if len(steps) > 1:
                for step in steps:
                    self.encode([step])
                return
            self._health.fault("encoding", error)
            self._health.count("dropped_rows", sum(step.rows for step in steps))
            self._health.count("dropped_steps", len(steps))
            return
        self._backlog.add(steps[0].step, steps[-1].step, len(block), data)

    def _encoded(self, catalogue: tuple[TensorInfo, ...]) -> bytes:
        for known, data in self._catalogues:
            if known == catalogue:
                return data
        data = catalogue_bytes(catalogue)
        self._catalogues.appendleft((catalogue, data))
        return data
