"""The session: objects that a hook and its watches share during a recording, and applying control documents to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from watchstep.capture.config import CaptureConfig
from watchstep.capture.health import RecorderHealth
from watchstep.capture.identity import Identity
from watchstep.capture.needs import not_provided, with_tensors
from watchstep.capture.samples.capture import SampleCapture
from watchstep.capture.schedule import Schedule
from watchstep.capture.steps.recent import RecentSteps
from watchstep.capture.steps.record import BoundedQueue, LossOnsets
from watchstep.capture.steps.recorder import Recorder
from watchstep.capture.stop import StopExchange
from watchstep.capture.system.sampler import Alongside, Sampler
from watchstep.capture.tensors.bundle_plan import BundlePlan
from watchstep.capture.tensors.collections import TensorCapture
from watchstep.capture.tensors.snapshots import SnapshotPlan, SnapshotWriter
from watchstep.format.capture_needs import CaptureNeed
from watchstep.format.control import ControlDocument, StopRequest
from watchstep.format.tensors import Mode
from watchstep.stopping import OnStop


@dataclass
class Session:
    """One recording, used on the training thread.

    Attributes:
        config: what to record.
        recorder: collects measurements.
        schedule: decides what is due.
        queue: queue to the writer.
        health: counts faults.
        snapshots: decides at which steps full tensors are saved.
        snapshot_writer: owns the memory of snapshots, and writes them to the store.
        full_tensors: saves full tensors of collections.
        bundles: decides which steps are bundled.
        system: connects the training thread and the sampler; None if the system is not sampled.
        onsets: checks training losses; None without a gate.
        mode: the program's current mode; train by default.
        used_collections: names of collections with at least one tensor.
        needs: needs of the run's rules, as the service stated them last.
        samples: records which samples a step was trained on.
    """

    config: CaptureConfig
    recorder: Recorder
    schedule: Schedule
    queue: BoundedQueue
    health: RecorderHealth
    snapshots: SnapshotPlan
    snapshot_writer: SnapshotWriter
    full_tensors: TensorCapture
    bundles: BundlePlan
    system: Alongside | None = None
    onsets: LossOnsets | None = None
    mode: Mode = "train"
    used_collections: set[str] = field(default_factory=set)
    needs: tuple[CaptureNeed, ...] = ()
    samples: SampleCapture = field(init=False)

    def __post_init__(self) -> None:
        self.samples = self.recorder.samples = SampleCapture(self.health)

    def empty_collections(self) -> list[str]:
        """Return the sorted names of collections with selectors that match no watched tensor, most likely because of a misspelling."""
        return sorted(
            name
            for name, collection in self.config.chosen.items()
            if collection.selects and name not in self.used_collections
        )

    def capture_for(self, needs: Sequence[CaptureNeed]) -> None:
        """Save the full tensors that rules need, and note what the recording cannot provide. Called on any thread."""
        if needs == self.needs:
            return
        self.needs = tuple(needs)
        self.full_tensors.configure(with_tensors(self.config.chosen, needs))
        if problem := not_provided(self.config, needs):
            self.health.note("capture", problem)
        else:
            self.health.withdraw("capture")

    @classmethod
    def begin(cls, config: CaptureConfig, worker: int, on_stop: OnStop, first_step: int = 0) -> Session:
        """Return a session without records."""
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
        writer = SnapshotWriter(config.snapshots, worker, health)
        if schedule.budget is not None:
            budget = schedule.budget
            recorder.recent = RecentSteps(worker, lambda: budget.step_time, writer.offer)
        recorder.full_tensors = TensorCapture(config, schedule, writer, health)
        return cls(
            config,
            recorder,
            schedule,
            queue,
            health,
            SnapshotPlan(config.snapshots, health),
            writer,
            recorder.full_tensors,
            BundlePlan(config.bundles, health),
            system,
            onsets,
        )


def apply_control(
    session: Session, stop_exchange: StopExchange, document: ControlDocument, attempt: str
) -> None:
    """Apply a newer document to an attempt. Called on any thread; never blocks."""
    if document.stop is not None and document.stop.attempt == attempt:
        stop_exchange.receive(document.stop, attempt)
    elif not document.admits(attempt):
        session.recorder.request_stop(
            StopRequest(attempt, 0, f"this run was stopped earlier: {document.tombstone}"), refused=True
        )
    session.schedule.override(dict(document.cadence))
    session.capture_for(document.needs)
    requested = [
        session.snapshots.request(request.id, request.step) for request in document.requests_of(attempt)
    ]
    for request, is_new in zip(document.requests_of(attempt), requested, strict=True):
        if is_new:
            session.bundles.request(request.id)
    if document.stop is not None or document.tombstone or any(requested):
        session.snapshot_writer.protect()
        session.samples.request_upload()
        session.recorder.is_recalling = True


def start_sampling(session: Session, identity: Identity) -> Sampler | None:
    """Start a sampler whose time counts against the recording's budget; None if sampling is off."""
    settings, alongside = session.config.sampling, session.system
    if settings is None or alongside is None:
        return None
    budget = session.schedule.budget
    cost = budget.written if budget is not None else None
    sampler = Sampler(settings, alongside, identity, session.health, cost)
    sampler.start()
    return sampler
