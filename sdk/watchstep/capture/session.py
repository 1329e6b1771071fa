"""What a hook and its watches share while they record."""

from __future__ import annotations

from dataclasses import dataclass, field

from watchstep.capture.bounded_queue import BoundedQueue
from watchstep.capture.config import CaptureConfig
from watchstep.capture.health import Health
from watchstep.capture.loss_onset import LossOnsets
from watchstep.capture.recorder import Recorder
from watchstep.capture.schedule import Schedule
from watchstep.capture.snapshot_plan import SnapshotPlan
from watchstep.capture.snapshots import SnapshotWriter
from watchstep.capture.system.alongside import Alongside
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
        snapshots: says at which steps full tensors are taken.
        snapshot_writer: has the memory for them, and sees them onto the store.
        system: between the training thread and the sampler; None where the system is not sampled.
        onsets: looks at training losses; None without a gate.
        mode: as the program last said; train where it said nothing.
        held: names of collections that hold some tensor.
    """

    config: CaptureConfig
    recorder: Recorder
    schedule: Schedule
    queue: BoundedQueue
    health: Health
    snapshots: SnapshotPlan
    snapshot_writer: SnapshotWriter
    system: Alongside | None = None
    onsets: LossOnsets | None = None
    mode: Mode = "train"
    held: set[str] = field(default_factory=set)

    def empty_collections(self) -> list[str]:
        """Collections with selectors that nothing which was watched meets, sorted; a word is misspelt, most likely."""
        return sorted(
            name
            for name, collection in self.config.chosen.items()
            if collection.selects and name not in self.held
        )

    @classmethod
    def begin(cls, config: CaptureConfig, worker: int, on_stop: OnStop, first_step: int = 0) -> Session:
        """A session in which nothing has been recorded."""
        health, queue = Health(), BoundedQueue(config.bounds.queue_bytes)
        system = Alongside() if config.sampling is not None else None
        schedule = Schedule(config, health)
        if schedule.budget is not None:
            health.account("overhead", schedule.budget.shares)
        recorder = Recorder(worker, queue, health, on_stop, first_step, system)
        onsets = None
        if config.gate:
            onsets = LossOnsets(lambda excess: schedule.onset(recorder.step, excess))
            recorder.tell_onsets(onsets)
        return cls(
            config,
            recorder,
            schedule,
            queue,
            health,
            SnapshotPlan(config.snapshots),
            SnapshotWriter(config.snapshots, worker, health),
            system,
            onsets,
        )
