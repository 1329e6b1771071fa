"""The session: the objects that a hook and its watches share during a recording, and applying a control document to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from watchstep.capture.config import CaptureConfig
from watchstep.capture.health import RecorderHealth
from watchstep.capture.identity import Identity
from watchstep.capture.record import BoundedQueue, LossOnsets
from watchstep.capture.recorder import Recorder
from watchstep.capture.schedule import Schedule
from watchstep.capture.snapshots import SnapshotPlan, SnapshotWriter
from watchstep.capture.stop import StopTalk
from watchstep.capture.system.sampler import Alongside, Sampler
from watchstep.format.control import ControlDocument, StopRequest
from watchstep.format.tensors import Mode
from watchstep.stopping import OnStop


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
    health: RecorderHealth
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
        health, queue = RecorderHealth(), BoundedQueue(config.bounds.queue_bytes)
        system = Alongside() if config.sampling is not None else None
        schedule = Schedule(config, health)
        if schedule.budget is not None:
            health.account("overhead", schedule.budget.shares)
        recorder = Recorder(worker, queue, health, on_stop, first_step, system)
        onsets = None
        if config.gate:
            onsets = LossOnsets(lambda excess: schedule.onset(recorder.step, excess))
            recorder.watch_onsets(onsets)
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


def apply_control(session: Session, stop_talk: StopTalk, document: ControlDocument, attempt: str) -> None:
    """Take over what a newer document asks of an attempt. On whatever thread heard of it; never waits."""
    if document.stop is not None and document.stop.attempt == attempt:
        stop_talk.receive(document.stop, attempt)
    elif not document.admits(attempt):
        session.recorder.ask_to_stop(
            StopRequest(attempt, 0, f"this run was stopped before: {document.tombstone}"), refused=True
        )
    session.schedule.override(dict(document.cadence))
    asked = [session.snapshots.request(request.id, request.step) for request in document.asked_of(attempt)]
    if document.stop is not None or document.tombstone or any(asked):
        session.snapshot_writer.protect()


def start_sampling(session: Session, identity: Identity) -> Sampler | None:
    """A sampler that has begun, whose time counts against the recording's budget; None where none is wanted."""
    settings, alongside = session.config.sampling, session.system
    if settings is None or alongside is None:
        return None
    budget = session.schedule.budget
    cost = budget.written if budget is not None else None
    sampler = Sampler(settings, alongside, identity, session.health, cost)
    sampler.start()
    return sampler
