"""What a hook and its watches share while they record."""

from __future__ import annotations

from dataclasses import dataclass

from watchstep.capture.bounded_queue import BoundedQueue
from watchstep.capture.config import CaptureConfig
from watchstep.capture.health import Health
from watchstep.capture.recorder import Recorder
from watchstep.capture.schedule import Schedule
from watchstep.stopping import OnStop
from watchstep.tensors import Mode


@dataclass
class Session:
    """One recording, on the training thread.

    Attributes:
        config: what to record.
        recorder: collects what is measured.
        schedule: says what is due.
        queue: to the writer.
        health: counts what went wrong.
        snapshot_asked: write the full tensors of the next step that is updated.
        mode: as the program last said; train where it said nothing.
    """

    config: CaptureConfig
    recorder: Recorder
    schedule: Schedule
    queue: BoundedQueue
    health: Health
    snapshot_asked: bool = False
    mode: Mode = "train"

    @classmethod
    def begin(cls, config: CaptureConfig, worker: int, on_stop: OnStop) -> Session:
        """A session in which nothing has been recorded."""
        health, queue = Health(), BoundedQueue(config.bounds.queue_bytes)
        return cls(config, Recorder(worker, queue, health, on_stop), Schedule(config, health), queue, health)
