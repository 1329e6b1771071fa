"""`watchstep.Hook`: the interface of a training program to recording.

The boundary of a hook: containing faults of its methods, copies in other processes, and logged values of any type.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from watchstep import hook_arguments
from watchstep.capture.checkpoint_notes import CheckpointNotes
from watchstep.capture.config import CaptureConfig
from watchstep.capture.given.arriving_number import ArrivingNumber
from watchstep.capture.given.names import GivenNames
from watchstep.capture.given.values import GivenValues, TensorRecorder
from watchstep.capture.health import RecorderHealth
from watchstep.capture.identity import ATTEMPT, attempt_document, resolve, run_document
from watchstep.capture.mirror.mirrored_run import RunLinks
from watchstep.capture.mirror.settings import Mirror, mirror_of
from watchstep.capture.rank_claim import note_recorded
from watchstep.capture.service.client import ServiceClient, lent
from watchstep.capture.service.registration import LaunchState, RunRegistration
from watchstep.capture.service.run_store import RunStore
from watchstep.capture.shutdown import ending
from watchstep.capture.shutdown.ending import Ending
from watchstep.capture.steps.recorder import Guarding, Recorder, StepGuard
from watchstep.capture.steps.session import Session, apply_control, start_sampling
from watchstep.capture.steps.stalls import StallWatch, StepProgress
from watchstep.capture.stop import ControlReader, StopExchange
from watchstep.capture.tensorboard import TensorBoardSink
from watchstep.capture.upload.access import UploadTarget
from watchstep.capture.upload.sample_upload import SampleUpload
from watchstep.capture.writer import Writer
from watchstep.errors import ConfigError, WatchstepError
from watchstep.format.control import ControlDocument, StopRequest
from watchstep.format.documents import Checkpoint
from watchstep.format.layout import run_prefix
from watchstep.format.tensors import MODES, Mode
from watchstep.hook_arguments import (
    AUDIT,
    RequestedRules,
    checked_on_stop,
    checked_step,
    configured,
    first_step_of,
    loss_divisor_of,
    needing,
    tensorboard_folder,
)
from watchstep.platform.folders import absolute_path
from watchstep.platform.transport import ServiceAddress
from watchstep.seeds import recorded_seeds
from watchstep.stopping import AwaitsCheckpoint, OnNonfinite, OnStop, StopTraining
from watchstep.store.local import StoreIdentity
from watchstep.store.store import Store, checked_scheme

if TYPE_CHECKING:
    from watchstep.capture.mirror.run_mirror import RunMirror
    from watchstep.pytorch.bundles.bundler import Bundler
    from watchstep.pytorch.policy.host_votes import HostVotes
    from watchstep.pytorch.policy.stop_barrier import StopBarrier
    from watchstep.pytorch.policy.update_policy import UpdatePolicy
    from watchstep.pytorch.watch import Watch
    from watchstep.trace.trace_steps import TraceSteps


class _HasEnding(Protocol):
    @property
    def ended(self) -> bool: ...


class _Recording(Protocol):
    """The attributes that `contained` needs."""

    _ending: _HasEnding
    _health: RecorderHealth


_Method = TypeVar("_Method", bound=Callable[..., Any])


def contained(method: _Method) -> _Method:
    """Make a hook's method do nothing once the hook has ended, and count its faults in health.

    `StopTraining` and `ConfigError` are raised.
    """

    @functools.wraps(method)
    def call(self: _Recording, *args: Any, **kwargs: Any) -> Any:
        if self._ending.ended:
            return None
        try:
            return method(self, *args, **kwargs)
        except (StopTraining, ConfigError):
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._health.fault(method.__name__, error)
            return None

    return call  # type: ignore[return-value]


class CopiedHook:
    """Accepts every call of `watchstep.Hook` and records nothing. The process with the original hook records the run."""

    mode: str = "train"
    run = run_url = store_url = project = ""
    stopped: None = None

    @property
    def health(self) -> dict[str, Any]:
        """Empty: nothing was recorded."""
        return {"counts": {}, "faults": {}, "notes": {}}

    def watch(self, *_: Any, **__: Any) -> None:
        """Log that nothing is recorded in this process."""
        _log.warning(
            "watchstep: not recording: this hook was sent from another process; create one in this process"
        )

    def log(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    attach_updates = bundle = batch = include_in_bundles = record = samples = step = snapshot = guard_with = (
        begin_pass
    ) = checkpoint_saved = close = log

    def protected_checkpoints(self) -> frozenset[str]:
        """Return no paths."""
        return frozenset()

    def __enter__(self) -> CopiedHook:  # noqa: PYI034 - Self comes with Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""


def log_scalars(
    recorder: Recorder, health: RecorderHealth, values: Mapping[str, Any], mode: Mode, weight: int = 1
) -> None:
    """Record numbers at the current step, losses with a weight. An invalid value does not affect the others."""
    for name, value in values.items():
        try:
            _log_one(recorder, name, value, mode, weight)
        except Exception as error:  # noqa: BLE001 - as above
            health.fault(f"log {name!r}"[:80], error)


def _log_one(recorder: Recorder, name: str, value: Any, mode: Mode, weight: int) -> None:
    if not isinstance(name, str):
        raise TypeError("a name must be a string")
    name.encode()
    if hasattr(value, "detach"):
        from watchstep.pytorch.losses import record_tensor

        record_tensor(recorder, name, value, mode, weight=weight)
    elif hasattr(value, "copy_to_host_async"):
        recorder.device_scalar(name, ArrivingNumber.of(value), mode, weight=weight)
    else:
        recorder.scalar(name, value, mode, weight=weight)


STORE = "WATCHSTEP_STORE"

_MAX_EXAMPLES = 2**31

_numbers = itertools.count()
"""Numbers of the hooks of this process."""

_log = logging.getLogger("watchstep")


class Hook:
    """Records one worker of one run.

    Failures of the store, the service or the recorder never reach the program; `health` reports them.

    Example::

        hook = watchstep.Hook("s3://bucket/runs")
        hook.watch(model, optimizer)
        for x, y in batches:
            ...
            hook.log(loss=loss)
        hook.close()
    """

    def __init__(  # noqa: PLR0913 - all arguments of a recording; all but the first by name
        self,
        store_url: str | os.PathLike[str] | None = None,
        *,
        project: str | None = None,
        run: str | None = None,
        rules: str | os.PathLike[str] | None = None,
        on_stop: OnStop | None = None,
        overhead_budget: float | None = None,
        config: CaptureConfig | str | os.PathLike[str] | None = None,
        first_step: int | None = None,
        guard: Any = None,
        on_nonfinite: OnNonfinite | str | None = None,
        explain: bool | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        trace: TraceSteps | str | None = None,
        mirror: Mirror | str | Sequence[Any] | Any = None,
    ) -> None:
        """Start recording.

        Args:
            store_url: folder or bucket URL that runs are written to. Default: ``WATCHSTEP_STORE``, or ``./watchstep-runs``.
            project: the project. Default: ``WATCHSTEP_PROJECT``, or ``default``.
            run: the run's id. Default: ``WATCHSTEP_RUN``, or a new id.
            rules: a rule file that the service evaluates for this run in addition to its own rules. What its rules need is captured: collections, probes and full tensors.
            on_stop: the effect of a stop. ``"ignore"`` (default); ``"raise"`` raises `StopTraining` at the end of a step;
                ``"check"`` only sets `stopped`, which the program checks after each step; a function is called with the
                `StopRequest`. ``WATCHSTEP_ON_STOP`` sets a default: "ignore", "raise" (or "stop"), or "checkpoint": the
                function saves a checkpoint, and `StopTraining` is raised when it returns.
            overhead_budget: share of the program's own time that recording may take. Default: ``WATCHSTEP_OVERHEAD_BUDGET``, or
                0.01. "none" in the variable measures everything at every step.
            config: what to record, and how often: a `CaptureConfig`, or the path of a capture file, YAML or JSON. Default:
                ``WATCHSTEP_CAPTURE``, a path or a JSON document, or the built-in configuration.
            first_step: the number of the first step, for a training that resumes from a checkpoint. Earlier steps of earlier
                attempts remain part of the run. Default: ``WATCHSTEP_FIRST_STEP``, or 0.
            guard: rules that are evaluated in this process and may stop it before an update, by raising `StopTraining`: a rule
                file, True for the default rules, or a `watchstep_rules.Guard`.
            on_nonfinite: the gate policy: what happens with an update by NaN or infinite gradients. ``"record"`` (default) changes
                nothing; ``"skip"`` leaves the model, the optimizer and its state as they are; ``"skip:N"`` stops the training before
                the next one after N skipped updates in a row; ``"stop"`` stops it before the first. It stops by raising
                `StopTraining`. With several ranks, all decide alike. Default: ``WATCHSTEP_ON_NONFINITE``, or "record".
            explain: whether a step that ends the training by this policy, ``"stop"`` by default, is first computed again in the program's
                loop under a trace, to name the operation and the source line that failed. Default: ``WATCHSTEP_EXPLAIN=1``, or not.
            tensorboard: a folder of this machine for TensorBoard event files, which are written during the run. They contain the same
                scalars and histograms as ``watchstep export --tensorboard``. Default: ``WATCHSTEP_TENSORBOARD``, or none.
            trace: steps whose PyTorch operations are traced and written to the run: a `TraceSteps`, or steps and ranges of steps with
                their last one, as ``"100:103,5000"``. Default: ``WATCHSTEP_TRACE``, or none.
            mirror: the program's own run that alerts and some series are mirrored into: ``"wandb"``, ``"mlflow"``, ``"trackio"``,
                ``"tensorboard:FOLDER"`` or a ``SummaryWriter``, several of them as a list, or a `Mirror`. Without an active run nothing
                is mirrored. Default: ``WATCHSTEP_MIRROR``, or none.

        Raises:
            ConfigError, RuleError: an argument or variable is invalid. A store that cannot be reached raises nothing.
        """
        of_subclass = dict(self.__dict__)
        if AUDIT in os.environ:  # nothing of an audited program reaches the places that it names
            store_url = project = run = tensorboard = mirror = None
        self.store_url = _checked_url(store_url)
        requested = hook_arguments.load_rule_file(rules) if rules is not None else RequestedRules()
        rules_here = None if guard is None else hook_arguments.make_guard(guard)
        self.config = needing(
            configured(config, overhead_budget), (*requested.needs, *getattr(rules_here, "needs", ()))
        )
        self._explains = hook_arguments.explains(explain)
        self._on_nonfinite = hook_arguments.policy_of(on_nonfinite, explain=self._explains)
        self._tensorboard = tensorboard_folder(tensorboard)
        self._trace = hook_arguments.traced_steps(trace)
        mirrored = None if AUDIT in os.environ else mirror_of(mirror)
        self._identity = resolve(project, run)
        self._number = next(_numbers)
        self._watches: list[Watch] = []
        self._count_by_hand: list[Callable[[], None]] = []
        self._given: GivenValues | None = None
        self._guarding: Guarding | None = None
        self._stop_barrier: StopBarrier | None = None
        self._update_policy: UpdatePolicy | None = None
        self._bundler: Bundler | None = None
        self._on_stop, stop_note = self._stop_of(on_stop)
        step = first_step_of(first_step)
        try:
            self._begin(requested, rules_here, mirrored, step, stop_note)
        except WatchstepError:
            raise
        except Exception as error:  # noqa: BLE001 - what is odd about an installation must not keep a program from training
            self._record_nothing(error, of_subclass)

    def _begin(
        self,
        requested: RequestedRules,
        rules_here: Any,
        mirrored: Mirror | None,
        first_step: int,
        stop_note: str,
    ) -> None:
        """Start to record, with checked arguments."""
        address = ServiceAddress.from_environment()
        note_recorded()
        ending.end_left()
        self._session = Session.begin(self.config, self._identity.worker, self._on_stop, first_step)
        self._health, self._recorder = self._session.health, self._session.recorder
        self._run_store = RunStore(
            self.store_url,
            StoreIdentity.of_launch(self.store_url),
            (self.project, self.run),
            requested.configs,
            self._health,
        )
        if stop_note:
            self._health.note("on_stop", stop_note)
        launch = LaunchState.from_environment(self._health)
        self._recorder.launched_unverified = not launch.verified
        self._service = self._service_client(address, launch)
        self._run_store.follow(self._service, self.config.bounds.close_seconds)
        self._mirror = self._make_mirror(mirrored)
        if rules_here is not None:
            self._set_up("guard", lambda: rules_here.attach(self))
        control = ControlReader(self._control_changed, self._health, self.config.bounds.control_seconds)
        self._stop_exchange = StopExchange(self._recorder.stops, control, self._run_store.open, self._health)
        self._checkpoints = CheckpointNotes(self._open_store, self._health)
        self._ending = self._begin_writing(control, launch, requested)
        self._start_background(control, launch)
        _log.info("watchstep: recording %s", self.run_url)

    def _record_nothing(self, error: Exception, of_subclass: dict[str, Any]) -> None:
        """Become a hook that accepts every call and records nothing, after a fault of the start.

        Args:
            error: The fault.
            of_subclass: Attributes that a subclass of the program's has set before.
        """
        health = RecorderHealth()
        health.fault("start", error)
        if "_ending" in self.__dict__:
            try:
                self._ending.end("failed", ending.described(error))
            except Exception as another:  # noqa: BLE001 - as above
                health.fault("end", another)
            ending.ended()
        # Nothing of a recording that began in part remains: adapters of frameworks would record into it.
        self.__dict__ = {**of_subclass, "config": self.config, "store_url": self.store_url, "_health": health}
        kind = type(self)
        failed: Any = _FailedHook if kind is Hook else type(kind.__name__, (_FailedHook, kind), {})
        self.__class__ = failed

    def _stop_of(self, on_stop: OnStop | None) -> tuple[OnStop, str]:
        """The effect of a stop, and a note for health if it differs from what the environment requests."""
        checked = checked_on_stop(on_stop, self.config.bounds.checkpoint_seconds)
        if isinstance(checked, AwaitsCheckpoint) and self._identity.world_size > 1:
            # A rank that continued alone would wait for the others forever.
            return "raise", "all ranks stop at one step: no checkpoint is waited for"
        return checked, ""

    def _service_client(self, address: ServiceAddress | None, launch: LaunchState) -> ServiceClient | None:
        """The client of the service; None if neither the environment nor the launch names a service."""
        if address is None and launch.location is None:
            return None
        locate = functools.partial(launch.recorder_address, self._health)
        return ServiceClient(address, self._identity.project, locate)

    def _make_mirror(self, mirror: Mirror | None) -> RunMirror | None:
        """The mirror of this worker; None if it mirrors into no tool."""
        if mirror is None:
            return None
        from watchstep.capture.mirror.run_mirror import RunMirror

        created = RunMirror(mirror, self._identity.worker, self._links, self._health)
        if not created.is_needed:
            return None
        if not created.search():
            self._recorder.search_mirrors = created.search
        return created

    def _links(self) -> RunLinks:
        """Where this run is found."""
        page = self._service.page_url if self._service is not None else ""
        return RunLinks(self.project, self.run, self.run_url, page)

    def _mirror_stop(self) -> None:
        """Mirror a stop that ends the training, unless it was mirrored when it was requested."""
        stopped = self._recorder.stopped
        if self._mirror is not None and stopped is not None and self._recorder.acknowledged:
            self._mirror.training_stopped(stopped.step, stopped.reason)

    def _begin_writing(
        self, control: ControlReader, launch: LaunchState, requested: RequestedRules
    ) -> Ending:
        """Start the writer; the process's end ends it."""
        session = self._session
        target = UploadTarget(
            store_url=self.store_url,
            open_store=self._open_store,
            store_identity=self._run_store.identity,
            identity=self._identity,
            run=run_document(self._identity, (*launch.rules, *requested.configs), self.config),
            attempt=attempt_document(self._identity, self._on_stop, self.config),
            service=self._service,
            open_attempt=self._run_store.open if lent() else None,
            requested_rules=requested.configs,
            # `watchstep run` and launchers check this themselves.
            warns_of_reuse=session.recorder.step == 0 and ATTEMPT not in os.environ and not lent(),
        )
        writer = Writer(
            target, session.queue, session.snapshot_writer, control, self._health, self.config.bounds
        )
        if self._tensorboard is not None:
            attempt, first_step = self._identity.attempt, session.recorder.step
            writer.write_tensorboard(TensorBoardSink(self._tensorboard, attempt, first_step, self._health))
        if self._mirror is not None:
            writer.mirror_rows(self._mirror)
            if self._service is not None and self._identity.worker == 0:
                from watchstep.capture.mirror.service_alerts import ServiceAlerts

                registration = {"run": self.run, "rules": list(requested.configs), "store": self.store_url}
                self._mirror.follow(
                    ServiceAlerts(self._service, registration, lambda: control.attempt, self._health)
                )
        if session.schedule.budget is not None and self.config.clock is time.perf_counter:
            writer.report_cost(session.schedule.budget.written)
        if (seconds := self.config.bounds.stall_seconds) > 0:
            recorder = session.recorder
            writer.watch_stalls(
                StallWatch(
                    lambda: StepProgress(recorder.step, recorder.last_finished, recorder.thread),
                    self._health,
                    seconds,
                )
            )
        samples = SampleUpload(target, self.config.bounds, self._health)
        session.samples.open_ring, session.samples.request_upload = samples.ring, samples.request
        writer.pass_store(samples.open)
        writer.start()
        end = Ending(
            self.run_url, session.recorder, writer, self._health, lambda: self.health, self._run_store.gate
        )
        end.detach_with(samples.close, samples.join)
        end.detach_with(self._mirror_stop)
        ending.watch(end)
        ending.remember(end)
        return end

    def _start_background(self, control: ControlReader, launch: LaunchState) -> None:
        """Start the background threads other than the writer. Each ends with the recording."""
        self._ending.detach_with(self._checkpoints.close, self._checkpoints.join)
        self._ending.detach_with(self._stop_exchange.close, self._stop_exchange.join)
        if launch.run == self.run and self._identity.worker == 0 and self._service is not None:
            registration = RunRegistration(launch, self.project, self._service, control, self._health)
            self._ending.detach_with(registration.close, registration.join)
            registration.start()
        if (sampler := start_sampling(self._session, self._identity)) is not None:
            self._ending.detach_with(sampler.close)

    @property
    def run(self) -> str:
        """The run's id."""
        return self._identity.run

    @property
    def project(self) -> str:
        """The run's project."""
        return self._identity.project

    @property
    def run_url(self) -> str:
        """The URL of this run, for `watchstep.open_run`."""
        return f"{self.store_url.rstrip('/')}/{run_prefix(self._identity.project, self._identity.run).rstrip('/')}"

    @property
    def health(self) -> dict[str, Any]:
        """Counters, faults and notes of the recorder: what was written, dropped, and not observed."""
        data = self._health.as_data()
        budget = self._session.schedule.budget
        if budget is not None:
            data["overhead"] = budget.as_data()
        if self._guarding is not None:
            data["guard"] = self._guarding.as_data()
        if seeds := recorded_seeds():
            data["seeds"] = seeds
        return data

    @property
    def mode(self) -> Mode:
        """The mode of values that are logged from now on: train, eval, predict or global."""
        return self._session.mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        if mode not in MODES:
            raise ConfigError(f"mode {mode!r}", f"use one of {', '.join(MODES)}")
        self._session.mode = mode

    @property
    def stopped(self) -> StopRequest | None:
        """The stop that was requested of this program and has taken effect, by the service or by the guard; None without one.

        Reading it changes nothing. With ``on_stop="check"`` a program that then ends is recorded as stopped, otherwise as completed.
        """
        return self._recorder.stopped

    def watch(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        name: str | None = None,
        replicated: bool = False,
        sum_losses: bool = False,
        loss_divisor: float | Callable[[], float] = 1.0,
    ) -> None:
        """Record a PyTorch model's weights, gradients and activations.

        Args:
            model: a `torch.nn.Module`, also compiled or wrapped for distributed training.
            optimizer: the optimizer whose steps count. Default: the first one that updates the model.
            name: prefix of the names of the model's tensors. Default: none for the first model, then ``model_2``, ``model_3``, ….
            replicated: whether every rank has the whole model and gradients are averaged over all ranks, as under
                DistributedDataParallel. Set it for data parallelism that the model's wrapper does not show.
            sum_losses: record the sum of the losses that a step's backward passes start from, if they are terms of one loss.
            loss_divisor: the number that the program divides each loss by before ``backward()``, such as the number of
                micro-batches, or a function that returns it. The undivided losses are recorded; their mean is the step's loss.

        Any other failure, such as in a model that overrides methods of `torch.nn.Module`, is counted in `health`, and the
        model is not recorded.

        Raises:
            ConfigError: an argument is invalid: not a module, not an optimizer, `nn.DataParallel`, a script module, or a lazy
                module without shapes.
        """
        if self._ending.ended:
            return
        if "torch" not in sys.modules:
            raise ConfigError(
                f"watch({type(model).__name__}): this program does not use PyTorch",
                "give a torch.nn.Module; the guides of JAX, Keras and boosting state how their programs are recorded",
            )
        number = len(self._watches) + 1
        divisor = loss_divisor_of(loss_divisor)
        prefix = (f"model_{number}" if number > 1 else "") if name is None else name

        def start() -> None:
            from watchstep.pytorch.losses import SummedLosses
            from watchstep.pytorch.watch import Watch

            watch = Watch(
                self._session, model, optimizer, counts_steps=number == 1, name=prefix, replicated=replicated
            )
            watch.loss_divisor = divisor
            if self._watches:
                watch.loss_names = self._watches[0].loss_names
            watch.summed_losses = SummedLosses() if sum_losses else None
            self._watches.append(watch)
            self._ending.detach_with(watch.detach)

        self._set_up(f"watch {type(model).__name__}"[:80], start)
        if len(self._watches) < number:
            return
        watch = self._watches[-1]
        if number == 1:
            self._set_up("samples", self._record_samples)
            self._set_up("bundle", lambda: self._bundle_steps_of(watch, model))
            self._set_up("trace", lambda: self._trace_steps(watch.model))
        if (barrier := self._stop_barrier) is not None:
            self._set_up("guard", lambda: barrier.watch(watch.model))
        self._set_up("update policy", lambda: self._decide_updates_of(watch, optimizer))

    def _set_up(self, where: str, work: Callable[[], None]) -> None:
        """Set up a part of the recording of a model. Its faults, also those of its import, cost no other part."""
        try:
            work()
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - what is odd about a model or an installation must not keep it from training
            self._health.fault(where, error)

    def _record_samples(self) -> None:
        """Record the samples of the batches of data loaders."""
        if self.config.bounds.sample_bytes:
            from watchstep.pytorch.loaders.loader_samples import LoaderSamples

            self._ending.detach_with(LoaderSamples(self._session).detach)

    def _decide_updates_of(self, watch: Watch, optimizer: Any) -> None:
        """Let the gate policy decide about the updates of a model, if there is one."""
        policy = self._policy_of_updates()
        if policy is None:
            return
        watch.update_policy = policy
        watch.running_statistics = policy.watch(watch.model, optimizer)
        if self._explains and self._bundler is None:
            self._health.note("explain", "no step is computed again, because 'bundles: null' keeps none")
        elif self._explains and self._bundler is not None and policy.redo is None:
            from watchstep.trace.redo import StepRedo

            policy.redo = redo = StepRedo(
                self._session, watch.model, self._bundler.inputs, self._identity, self.run_url
            )
            if path := os.environ.get(hook_arguments.EXPLAINED_BUNDLE):
                from watchstep.replay.program_step import inputs_of_file

                redo.recorded = inputs_of_file(path, watch.model)

    def _trace_steps(self, model: Any) -> None:
        """Trace the chosen steps. The first one may begin now."""
        if self._trace is None:
            return
        from watchstep.pytorch import internals
        from watchstep.trace.online import OnlineTracing

        if internals.lacks_for_traces():
            return  # health has a line for the name that is missing

        writer = self._session.snapshot_writer
        tracing = OnlineTracing(self._trace, model, self._identity.worker, self._health, writer)
        self._recorder.tracing = tracing
        self._ending.detach_with(tracing.close)
        tracing.start(self._recorder.last_finished + 1)

    def _votes_of(self, kind: str) -> HostVotes:
        """Votes of one kind. Their name is that of this hook on all ranks: its number among the hooks of the process.

        The attempt is not part of it: ranks without a common launcher may have attempts of their own, and they share a process group anyway.
        """
        from watchstep.pytorch.policy.host_votes import HostVotes

        return HostVotes(f"{kind}/{self._number}")

    def _bundle_steps_of(self, watch: Watch, model: Any) -> None:
        """Let a watch take bundles of its steps."""
        if self.config.bundles is None:
            return
        from watchstep.pytorch.bundles.bundler import Bundler
        from watchstep.pytorch.bundles.step_inputs import StepInputs
        from watchstep.pytorch.loaders import loader_batches

        inputs = StepInputs(watch.model, model, self.config.bundles)
        watch.bundler = self._bundler = Bundler(
            self._session, self._identity, self.run_url, inputs, watch.model
        )
        loader_batches.listen(inputs)

        self._ending.detach_with(watch.end_bundles)
        self._ending.detach_with(lambda: loader_batches.forget(inputs))

    def _policy_of_updates(self) -> UpdatePolicy | None:
        """The gate policy, created at the first watch; None if updates are only recorded."""
        if self._on_nonfinite.action != "record" and self._update_policy is None:
            from watchstep.pytorch.policy.update_policy import UpdatePolicy

            votes = self._votes_of("updates") if self._identity.world_size > 1 else None
            self._update_policy = UpdatePolicy(self._on_nonfinite, self._recorder, self._health, votes=votes)
            self._ending.detach_with(self._update_policy.close)
        return self._update_policy

    @contained
    def log(
        self,
        values: Mapping[str, Any] | None = None,
        /,
        *,
        mode: Mode | None = None,
        examples: int = 1,
        **scalars: Any,
    ) -> None:
        """Record numbers at the current step. Names with "loss" in them are losses, others metrics.

        Several losses of one name and mode in a step, such as those of micro-batches or of the batches of an evaluation, are
        recorded as one row with their mean, weighted by ``examples``, and the sum of the weights as its count. For a metric the last
        value of the step is recorded.

        Args:
            values: name → number, for names that are not Python identifiers.
            mode: overrides the hook's mode.
            examples: number of examples that the losses are the mean of, as their weight in the mean of the step. Pass it if batches
                have different sizes, such as the last one of an evaluation.
            **scalars: name=number; a tensor of one element is read without waiting for its device.
        """
        chosen = mode or self.mode
        if chosen not in MODES:
            raise ValueError(f"mode {chosen!r}: use one of {', '.join(MODES)}")
        if (
            isinstance(examples, bool)
            or not isinstance(examples, Integral)
            or not 0 < examples < _MAX_EXAMPLES
        ):
            raise ValueError(f"examples={examples!r}: use the number of examples of the batch, from 1")
        log_scalars(self._recorder, self._health, {**(values or {}), **scalars}, chosen, int(examples))

    @contained
    def record(
        self,
        values: Mapping[str, Any] | None = None,
        /,
        *,
        collection: str | None = None,
        role: str | None = None,
        mode: Mode | None = None,
        **given: Any,
    ) -> None:
        """Record arrays of your own at the current step, when their collection is due.

        Call it between the forward pass and the update. Several calls within a step are merged, as micro-batches are. A value that
        cannot be recorded is reported in `health`, and does not affect the others.

        Args:
            values: name → array, for names that are not Python identifiers, or that are arguments of this method.
            collection: a configured collection. Default: the built-in collection of the role; without a role, ``inputs``,
                ``outputs`` and ``labels`` for these names, and ``custom`` for others.
            role: what the arrays are: ``weight``, ``bias``, ``gradient``, ``momentum``, ``second_moment``, ``state``, ``output``,
                ``input``, ``label``, ``loss`` or ``custom``. Rules for this role judge them. Default: that of the name or the
                collection.
            mode: overrides the hook's mode.
            **given: name=array; a PyTorch tensor, an array of NumPy or of a framework with ``__array__`` or ``__dlpack__``, such as
                JAX and TensorFlow, or anything that NumPy converts to an array of numbers. Only tensors need PyTorch.
        """
        self._given = self._given or GivenValues(self._session, _tensor_recorder)
        self._given.record_all({**(values or {}), **given}, collection, role, mode or self.mode)

    def attach_updates(
        self, count_by_hand: Callable[[], None], close: Callable[[], None], *, explains: bool = False
    ) -> None:
        """Let an adapter of a framework record updates until this hook is closed.

        Args:
            count_by_hand: called when the program calls `step`: from then on updates are not counted as steps.
            close: called when the recording ends, to record the last update, or in a forked child. Never raises.
            explains: whether it computes the step that stops the training again, where `explain` is set.
        """
        if self._explains and not explains:
            self._health.note(
                "explain",
                "only steps of PyTorch and of JAX with optax are computed again: the stop names no line",
            )
        self._count_by_hand.append(count_by_hand)
        self._ending.detach_with(close)

    def guard_with(self, guard: StepGuard, *, agree: bool = False) -> None:
        """Pass each step to a guard at once, and let it raise `StopTraining`. Called by `watchstep_rules.Guard.attach`.

        Args:
            guard: evaluates steps on the training thread.
            agree: with several ranks, reduce one number before each update until all have closed, so that all stop together.

        Raises:
            ConfigError: the hook has a guard already, or there are several ranks and ``agree`` is not set.
        """
        if self._guarding is not None:
            raise ConfigError("the hook has a guard already", "pass all rules to one guard")
        ranks = self._identity.world_size
        if ranks > 1 and not agree:
            raise ConfigError(
                f"a guard that stops one of {ranks} ranks would leave the others waiting for it",
                "set Guard(…, agree=True): the ranks agree before each update, at the cost of one reduced number",
            )
        if ranks > 1:  # first, because a guard without a barrier would stop one rank alone
            from watchstep.pytorch.policy.stop_barrier import StopBarrier

            watched = [watch.model for watch in self._watches]
            self._stop_barrier = StopBarrier(self._recorder, self._health, self._votes_of("guard"), watched)
        self._guarding = self._recorder.guarding = Guarding(guard, self._health, agrees=ranks > 1)
        if self._mirror is not None and hasattr(guard, "report_alerts"):
            guard.report_alerts(self._mirror.alert)

    @contained
    def samples(self, ids: Any, /) -> None:
        """Name the samples of the batch that the program is about to train on. Several calls within a step add up.

        Batches of `torch.utils.data.DataLoader` are recorded without this method. After its first call only this method records samples. In
        modes other than train it does nothing.

        Args:
            ids: an id, or a list, array or tensor of ids: indices, file names, pairs such as (file, offset), or dictionaries such as
                ``{"file": …, "offset": …}``. A tensor on a device is waited for.
        """
        if self.mode == "train":
            self._session.samples.add(ids, self._recorder.last_finished + 1)

    @contained
    def step(self) -> None:
        """Mark the end of a step, for programs without an optimizer. After the first call only this method counts steps.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        for watch in self._watches:
            watch.step_by_hand()
        for count_by_hand in self._count_by_hand:
            count_by_hand()
        try:
            self._recorder.finish()
        finally:
            self._recorder.begin()

    @contained
    def begin_pass(self) -> None:
        """Mark the beginning of a forward pass, for programs that call parts of the watched models instead of the models.

        After the first call only this method marks passes.

        Raises:
            StopTraining: a guard requests it, now that all of the last step is known.
        """
        for watch in self._watches:
            watch.begin_pass()

    @contained
    def checkpoint_saved(self, path: str | os.PathLike[str], step: int | None = None) -> None:
        """Report that a checkpoint has been saved. A stop names the last checkpoint that was saved before its first bad step.

        Args:
            path: of the checkpoint; shown to people, and passed to a training that resumes from it.
            step: the last step whose update it contains. Default: the last finished step.
        """
        last_step = self._recorder.last_finished if step is None else checked_step(step)
        identity = self._identity
        saved = Checkpoint(
            os.fspath(path), max(0, last_step), identity.attempt, identity.worker, time.time_ns()
        )
        self._checkpoints.add(saved)
        self._recorder.checkpoint_saved()

    def protected_checkpoints(self) -> frozenset[str]:
        """Paths, as passed to `checkpoint_saved`, that a rotation must not delete, since one may be the last good checkpoint.

        They are the checkpoints of the last two minutes, whose steps may not have been evaluated yet, and the newest before them.
        """
        return self._checkpoints.protected()

    def snapshot(self) -> None:
        """Write the full weights and gradients of the next step that is updated."""
        self._session.snapshots.request_next()

    def bundle(self) -> None:
        """Bundle the next complete step: everything from which ``watchstep replay`` computes it again."""
        self._session.bundles.request_next()

    @contained
    def batch(self, batch: Any, /) -> None:
        """Name the batch of the next forward pass, for bundles. From now on the batches of data loaders are ignored.

        A program needs it only if its batches do not come from `torch.utils.data.DataLoader`, or it changes them before the pass.

        Args:
            batch: tensors, arrays, numbers and text in lists, tuples, mappings and dataclasses. It is referenced, not copied.
        """
        if self._bundler is not None:
            self._bundler.inputs.give_batch(batch)

    @contained
    def include_in_bundles(self, **objects: Any) -> None:
        """Also store the state of these objects in bundles, such as the average of the weights.

        Learning rate schedulers and gradient scalers of PyTorch are found without this method.

        Args:
            **objects: name=object; with a ``state_dict`` method.
        """
        if self._bundler is not None:
            self._bundler.include(objects)

    def close(self) -> None:
        """Write the remaining rows and how the run ended, and stop recording. Waits for the store within bounds."""
        self._ending.end()
        self._release()

    def __enter__(self) -> Hook:  # noqa: PYI034 - Self comes with Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._is_planned_exit(error):
            self.close()
        else:
            self._ending.end("failed", ending.described(error))
            self._release()

    def _is_planned_exit(self, error: BaseException) -> bool:
        """Whether an exception is a planned exit: after a requested stop, with any code, or with code 0."""
        if not isinstance(error, SystemExit):
            return False
        return self._ending.is_requested or (not error.code and not self._ending.fails)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        """The hook itself: programs copy models and trainers that refer to it, and there is one recording."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A `CopiedHook`, which records nothing, for another process or a file."""
        return CopiedHook, ()

    def _release(self) -> None:
        """Drop the models and optimizers: the program may keep a closed hook for its health."""
        self._watches, self._given, self._bundler = [], None, None
        self._run_store.identity.release()
        ending.ended()

    def _open_store(self) -> Store:
        return self._run_store.open(self._identity.attempt)

    def _control_changed(self, document: ControlDocument, attempt: str) -> None:
        apply_control(self._session, self._stop_exchange, document, attempt)
        if self._mirror is not None and document.stop is not None and document.stop.attempt == attempt:
            self._mirror.stop(document.stop.step, document.stop.reason)


class _FailedHook(CopiedHook, Hook):  # type: ignore[misc]
    """A hook whose start failed. It records nothing, and its health states the fault."""

    _health: RecorderHealth

    @property
    def health(self) -> dict[str, Any]:
        """Counters and faults of the start."""
        return self._health.as_data()

    def watch(self, *_: Any, **__: Any) -> None:
        """Do nothing: the fault is logged."""


def _tensor_recorder(session: Session, names: GivenNames) -> TensorRecorder:
    from watchstep.pytorch.tensors.given_tensors import GivenTensors

    return GivenTensors(session, names)


def _checked_url(store_url: str | os.PathLike[str] | None) -> str:
    """The store's URL, by the argument, the environment, or the default; raises `ConfigError`."""
    url = os.fspath(store_url or os.environ.get(STORE) or "watchstep-runs")
    return url if checked_scheme(url) else absolute_path(url).as_uri()
