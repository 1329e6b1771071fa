"""From finished steps to the bytes of segments."""

from __future__ import annotations

from watchstep.capture.backlog import Backlog
from watchstep.capture.bounded_queue import FinishedStep
from watchstep.capture.health import Health
from watchstep.capture.record import join
from watchstep.segment import catalogue_bytes, encode
from watchstep.tensors import TensorInfo


class SegmentEncoder:
    """Makes one segment of several steps; keeps the encoded catalogue, which seldom changes."""

    def __init__(self, backlog: Backlog, health: Health) -> None:
        self._backlog = backlog
        self._health = health
        self._catalogue: tuple[tuple[TensorInfo, ...], bytes] = ((), b"")

    def encode(self, steps: list[FinishedStep]) -> None:
        """Put a segment of these steps into the backlog. A step that cannot be encoded is dropped and counted."""
        try:
            block = join([record for step in steps for record in step.records])
            if not len(block):
                return
            if self._catalogue[0] != block.catalogue:
                self._catalogue = (block.catalogue, catalogue_bytes(block.catalogue))
            data = encode(block, self._catalogue[1])
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
