"""Activations: inputs and outputs of modules, measured during recorded forward passes.

`passes` decides which passes are recorded.

In regions that `torch.compile` traces, the hook traces to nothing, so that compiled code and losses stay as they
were; such modules are reported as not observed.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from watchstep.capture.steps.record import Group, Probe
from watchstep.capture.steps.session import Session
from watchstep.format import tensors
from watchstep.format.tensors import Mode, TensorInfo
from watchstep.kernels.measurement import Kernel
from watchstep.pytorch import internals
from watchstep.pytorch.device_kernel import capturing
from watchstep.pytorch.gate import Describe, LiveOutputs
from watchstep.pytorch.names import Names, dtype_name, is_layer, placement_of
from watchstep.pytorch.observable import dense_values
from watchstep.pytorch.outputs.batched import BatchedOutputs, LayerOutputs, Stability
from watchstep.pytorch.outputs.layer_hooks import (
    EVALUATES_FASTER,
    REMOVED,
    EncoderCalls,
    NotingHook,
    UnmeasuredPass,
    sees_passes_of,
)
from watchstep.pytorch.outputs.pass_hooks import CallCount, PassHook
from watchstep.pytorch.outputs.passes import ForwardPasses, recomputes
from watchstep.pytorch.outputs.recomputed import RecomputedOutputs
from watchstep.pytorch.outputs.saved import SavedOutputs
from watchstep.pytorch.probes.activations import (
    ChannelProbe,
    ChannelSums,
    SpreadProbe,
    TokenProbe,
    UnitActivity,
    activation_kind,
    ends_of_parts,
)
from watchstep.pytorch.probes.weights import Unchanged
from watchstep.pytorch.tensors import full_tensors

_DEEPEST = 20
"""Maximum nesting of containers that are searched."""

_MOST_NOTED = 64
"""Maximum number of tensors of an input or output that are noted in case the loss is not finite: a batch may be a list of hundreds."""


_Look = Callable[[list[Tensor], int, Mode], tuple[Probe, ...]]

_DISPATCH_SECONDS = 4e-6
"""Time that PyTorch takes for calling one hook, which the hook itself cannot measure: 1 µs in a loop, 15 to 20 between two convolutions, whose data have
replaced PyTorch's code and the module in the caches. With 4 µs the account of PPO and of 400 small modules is that of paired blocks (EPYC, Zen 5); most hooks are
absent in passes of other programs."""


@dataclass
class _Flow:
    """An input or output of a module.

    Attributes:
        info: Description of the tensor; shape and dtype are not known yet.
        groups: Groups of its tensors by their number.
        stability: Whether they can be measured together with others.
    """

    info: TensorInfo
    groups: dict[int, Group] = field(default_factory=dict)
    stability: Stability = field(default_factory=Stability)

    @property
    def takes_integers(self) -> bool:
        """Return whether integer tensors are included, e.g. token ids, but not values passed between modules."""
        return self.info.role == "input" or tensors.OUTPUTS in self.info.collections


@dataclass
class _Observed:
    """An observed module.

    Attributes:
        path: Path of the module.
        is_model: Whether it is the watched model itself, whose own hooks begin and end its passes.
        calls: Counts its calls in training, and has its hook.
        output: Its output.
        input: Its input.
        channels, tokens, activity: Probes of its output and input.
        spread: Measures how far the examples of its output differ; None if it is not at the end of a part.
        measured: Step and pass in which it was measured last.
        describe: Describes its output for `SavedOutputs`.
    """

    path: str
    is_model: bool
    calls: CallCount
    output: _Flow
    input: _Flow
    channels: ChannelProbe | None
    tokens: TokenProbe | None
    activity: UnitActivity | None
    spread: SpreadProbe | None
    measured: tuple[int, int] = (-1, -1)
    describe: Describe | None = None

    def probes(self, given: Any, output: list[Tensor], step: int, mode: Mode) -> tuple[Probe, ...]:
        """Return probes of one pass in addition to the output's row, except those of channels.

        Args:
            given: Arguments of the module's call.
            output: Tensors of its output.
            step: Step of the run.
            mode: Mode of the pass.
        """
        probes: list[Probe | None] = []
        if len(output) == 1 and self.activity is not None:
            inputs = _real(given)
            probes.append(
                self.activity.measure(inputs[0] if len(inputs) == 1 else None, output[0], step, mode)
            )
        if self.tokens is not None and (inputs := _numeric(given)):
            probes.append(self.tokens.measure(inputs[0]))
        if self.spread is not None and len(output) == 1:
            probes.append(self.spread.measure(output[0], step, mode))
        return tuple(probe for probe in probes if probe is not None)


class ActivationHooks:
    """Forward hooks on those modules of a model that have recorded outputs or inputs.

    Layers have their hooks in passes in which something is due, and as long as they are needed to name outputs: until the graphs of the
    program are known, in programs that call layers outside of the model's own ``forward``, and where graphs cannot be read.

    Attributes:
        live: Outputs of the current pass, for the case that its loss is not finite.
    """

    def __init__(
        self,
        session: Session,
        names: Names,
        kernel: Kernel,
        passes: ForwardPasses,
        pass_hooks: list[PassHook],
        part_called: Callable[[str, Mode], None],
    ) -> None:
        """Register the hooks.

        Args:
            session: The recording.
            names: Names of the model's modules.
            kernel: Kernel for the measurements.
            passes: Decides which calls are recorded.
            pass_hooks: Hooks of the model and of its layers. Receives each hook at once, so that the hooks are also removed after an error halfway.
            part_called: Bound method, called with the path and mode of each recorded call outside the model's own ``forward``.
        """
        self.live = LiveOutputs()
        self._unmeasured = UnmeasuredPass(session, self.live)
        self._session = session
        self._schedule = session.schedule
        self._recorder = session.recorder
        self._whole = names.whole
        self._kernel = kernel
        self._passes = passes
        self._part_called = weakref.WeakMethod(part_called)  # a cycle would keep the model until a collection
        self._pass_hooks = pass_hooks
        self._layers: list[PassHook] = []
        self._encoder_of: dict[int, str] = {}
        self._encoders: list[EncoderCalls] = []
        self._around_encoders: list[nn.Module] = []
        self._has_hooks, self._has_parts = True, False
        self._measured = (-1, 0)
        self._saved_outputs = SavedOutputs()
        self._batched = BatchedOutputs(session, kernel)
        self._recomputed = RecomputedOutputs(session, kernel)
        self._unseen: set[str] = set()
        self._hooked_collections: set[tuple[str, ...]] = set()
        self._pass = 0
        self._decided_for, self._decided_in = -1, ""
        self._decided: dict[tuple[str, ...], str | None] = {}
        self._saved: dict[tuple[str, ...], str | None] = {}
        probes = session.config.probes
        self._unchanged = Unchanged(probes)
        self._sums = ChannelSums(probes)
        self._names = names
        self._hooks_of: dict[int, PassHook] = {}
        self._hooked = 0
        self._is_reported = False
        self.list_modules()

    def list_modules(self) -> None:
        """Register hooks on the modules that the model has now, and remove those of modules that it had before."""
        modules = list(self._names.model.named_modules()) if sees_passes_of(self._names.model) else []
        present = {id(module) for _, module in modules}
        measures_spread = modules and "example_spread" in self._session.config.probes
        self._ends = ends_of_parts(self._names.model) if measures_spread else set()
        self._encoder_of = {
            id(inner): path
            for path, module in modules
            if isinstance(module, EVALUATES_FASTER)
            for inner in module.modules()
        }
        self.resume()
        for key in [key for key in self._hooks_of if key not in present]:
            hook = self._hooks_of.pop(key)
            for hooks in (self._pass_hooks, self._layers):
                hooks[:] = [each for each in hooks if each is not hook]
            hook.detach()
        for order, (path, module) in enumerate(modules):
            try:
                if id(module) not in self._hooks_of:
                    self._listen(self._names, order, path, module)
            except Exception as error:  # noqa: BLE001 - a module whose attributes raise: the others are recorded
                self._session.health.fault("activations", error)
        self._list_encoders(dict(modules))
        self._hooked = len(self._hooks_of)
        self._hooked_names = frozenset(itertools.chain(*self._hooked_collections))
        self._saved_outputs = SavedOutputs()  # graphs have another form now
        self._keep_hooks(needed=True)
        if self._is_reported:
            self._unseen.clear()

    def _list_encoders(self, modules: Mapping[str, nn.Module]) -> None:
        for each in self._encoders:
            self._pass_hooks.remove(each.hook)
            each.hook.detach()
        self._encoders.clear()
        hooks: dict[str, list[PassHook]] = {}
        for key, hook in self._hooks_of.items():
            if key in self._encoder_of:
                hooks.setdefault(self._encoder_of[key], []).append(hook)
        for path, inside in hooks.items():
            calls = CallCount(self._unmeasured.repeated, self._names.path(path))
            self._encoders.append(
                EncoderCalls(modules[path], inside, self._passes, calls, self._session.health)
            )
            self._pass_hooks.append(self._encoders[-1].hook)
        self._around_encoders = [
            module
            for path, module in modules.items()
            if any(not path or each == path or each.startswith(f"{path}.") for each in hooks)
        ]

    @property
    def dispatch_seconds(self) -> float:
        """Approximate seconds that PyTorch takes for calling the present hooks in a pass."""
        return _DISPATCH_SECONDS * (self._hooked if self._has_hooks else self._hooked - len(self._layers))

    def detach(self) -> None:
        """Drop what refers to the hooks, which are removed: a cycle would keep the model until a collection."""
        self._layers.clear()
        self._pass_hooks.clear()
        self._hooks_of.clear()
        self._encoders.clear()
        self._around_encoders.clear()
        self._unmeasured.repeated.forget()
        self.live.forget()
        self._saved_outputs = SavedOutputs()

    def _listen(self, names: Names, order: int, path: str, module: nn.Module) -> None:
        """Register a hook on a module if there is anything to record."""
        config = self._session.config
        probes = config.probes
        is_leaf, is_model = is_layer(path, module), not path
        outputs = [tensors.ACTIVATIONS] * is_leaf + [tensors.OUTPUTS] * is_model
        channels, tokens = ChannelProbe(module), TokenProbe(module, config.token_values, probes)
        in_place = bool(module.__dict__.get("inplace", False))  # not a property of the program's
        activity = UnitActivity(activation_kind(module), probes, in_place=in_place)
        observed = _Observed(
            names.path(path) or "model",
            is_model,
            CallCount(self._unmeasured.repeated, names.path(path) or "model"),
            _Flow(names.of_module(path, module, order, "output", tuple(outputs))),
            _Flow(names.of_module(path, module, order, "input", (tensors.INPUTS,) * is_model)),
            channels if "channels" in probes and channels.applies else None,
            tokens if tokens.applies else None,
            activity if activity.applies else None,
            SpreadProbe() if id(module) in self._ends else None,
        )
        if not (observed.output.info.collections or observed.input.info.collections):
            return
        self._hooked_collections |= {observed.output.info.collections, observed.input.info.collections} - {()}
        noted = [
            flow
            for flow, collection in (
                (observed.output, tensors.ACTIVATIONS),
                (observed.input, tensors.INPUTS),
            )
            if collection in flow.info.collections
        ]
        describe = self._describe(noted[0]) if len(noted) == 1 else None
        of_input = describe is not None and noted[0] is observed.input
        noting = NotingHook(
            self._hook(observed), self._unmeasured, describe, observed.calls, of_input=of_input
        )
        if tensors.ACTIVATIONS in observed.output.info.collections:
            observed.describe = self._describe(observed.output)
        register = functools.partial(module.register_forward_hook, noting, with_kwargs=True)
        in_encoder = id(module) in self._encoder_of
        hook = observed.calls.hook = PassHook(register, of_layer=not is_model, in_passes_only=in_encoder)
        self._pass_hooks.append(hook)
        self._hooks_of[id(module)] = hook
        if not (in_encoder or is_model):
            self._layers.append(hook)
        if is_leaf:
            self._unseen.add(observed.path)

    def take_unseen(self) -> list[str]:
        """Return modules without a call of their hook: compiled, or not part of the forward pass. Calls are no longer noted."""
        unseen = sorted(self._unseen)
        self._is_reported = True
        self._unseen.clear()
        return unseen

    def new_pass(self) -> None:
        """Begin a forward pass of the whole model, and recompute which measurements are due."""
        self._pass += 1
        self._unmeasured.step = -1
        self._decided.clear()
        self._saved.clear()

    def enter(self, mode: Mode | None) -> None:
        """Begin the model's own ``forward``. If nothing is due in this pass, layers have no hooks, or hooks that only note their outputs.

        Args:
            mode: Mode of the pass; None if it is not recorded.
        """
        self._unmeasured.step = -1
        if mode is not None and self._hooked:
            self._decide_for(mode)
            is_due = self._session.full_tensors.active or self._any_due(mode)
            self._keep_hooks(is_due or self._has_parts or not self._saved_outputs.is_ready)
            if self._has_hooks and mode == "train":
                self._hook_encoders()
            learns = mode == "train" and self._has_hooks and self._saved_outputs.begin()
            if mode == "train" and not (is_due or learns or self._unseen):
                self._unmeasured.begin(of_parts=False)
        self._schedule.dispatched(self.dispatch_seconds)

    def end_pass(self) -> None:
        """End a pass that the program makes by calling modules, with the update at the latest."""
        self._unmeasured.step = -1
        self.end_turn()

    def end_turn(self) -> None:
        """Handle a backward pass or an update, between which the calls of a module are counted."""
        self._recomputed.end_turn()
        self._unmeasured.repeated.end_turn(has_layer_hooks=self._has_hooks)

    def model_called(self) -> bool:
        """Count a training pass of the model. Returns whether it is not observed, because the model is called too often."""
        self._recomputed.model_called()
        return self._unmeasured.repeated.model_called(self._pass_hooks)

    def other_pass(self, mode: Mode | None, sentinel: Callable[[], RemovableHandle]) -> bool:
        """Count a pass of the model that is not of training, or has no gradients. Returns whether it is not observed.

        Args:
            mode: Mode of the pass; None if it is not recorded.
            sentinel: Registers a hook that calls `resume` in the next pass with gradients.
        """
        if mode is not None and torch.is_grad_enabled():
            self._recomputed.model_called()
        if mode is not None and not self._schedule.is_adaptive(self._hooked_names, mode):
            return False
        return self._unmeasured.repeated.other_pass(self._pass_hooks, sentinel)

    def resume(self) -> None:
        """Register the hooks that `other_pass` has removed."""
        self._unmeasured.repeated.resume(has_layer_hooks=self._has_hooks)

    def _any_due(self, mode: Mode) -> bool:
        """Return whether something is due for a module in a pass that begins."""
        step = self._recorder.step
        if mode == "train" and not self._schedule.any_due(self._hooked_names, step):
            return False
        due = [
            charged for chosen in self._hooked_collections if (charged := self._due(chosen, mode)) is not None
        ]
        if mode != "train" or self._measured != (step, self._hooked):
            return bool(due)
        return not all(self._schedule.is_sampled(charged, step) for charged in due)

    def _only_notes(self) -> bool:
        """Return whether hooks only note outputs in the rest of a pass that the program makes by calling modules."""
        return not (self._unseen or self._session.full_tensors.active or self._any_due("train"))

    def _keep_hooks(self, needed: bool) -> None:
        """Register the hooks of layers, or remove those that have been called."""
        if needed == self._has_hooks:
            return
        self._has_hooks = needed
        self._fix_compiled()
        for layer in self._layers:
            if needed:
                layer.register()
            elif layer.is_called:
                layer.remove()

    def _fix_compiled(self) -> None:
        """Let the hooks in compiled modules be as they are for good."""
        compiled = [module for module in self._names.model.modules() if internals.is_compiled(module)]
        for module in {inner for each in compiled for inner in each.modules()}:
            if (hook := self._hooks_of.get(id(module))) is not None:
                hook.fix()

    def _hook_encoders(self) -> None:
        """Observe the layers that compute other numbers in evaluation if they have hooks, for this pass.

        Code that calls such a layer and was compiled elsewhere would be compiled anew, so nothing changes once something was compiled.
        """
        if not self._encoders or internals.has_compiled():
            return
        compiled = [module for module in self._around_encoders if internals.is_compiled(module)]
        inside = {id(inner) for module in compiled for inner in module.modules()}
        for each in self._encoders:
            if id(each.encoder) not in inside:
                each.hook.register()

    def leave(self) -> None:
        """End the model's own ``forward``."""
        self._unmeasured.step = -1
        for each in self._encoders:
            if each.hook.is_called:
                each.hook.remove()
        self.measure_waiting()

    def measure_waiting(self) -> None:
        """Measure outputs that wait for others, and record what was computed again. Their faults never reach training."""
        try:
            self._batched.measure()
            self._recomputed.record()
        except Exception as error:  # noqa: BLE001 - as stated
            self._session.health.fault("activations", error)

    def learn(self, root: Any) -> None:
        """Learn where the outputs of a measured pass are in the graph of its loss, given its backward function."""
        try:
            self._saved_outputs.learn(root)
        except Exception as error:  # noqa: BLE001 - the loss of this graph is recorded nevertheless
            self._saved_outputs.give_up()
            self._session.health.fault("activations", error)

    def record_live(self, root: Any) -> None:
        """Measure the outputs that still exist, unless this pass has already been measured.

        Args:
            root: Backward function of the loss of the pass; None if it is not known.
        """
        outputs = [] if self._has_hooks else self._outputs_in_graph(root)
        for group, tensors_of_group, time_ns in (*outputs, *self.live.alive()):
            self._recorder.add(group, self._kernel.measure(tensors_of_group), time_ns=time_ns)

    def _outputs_in_graph(self, root: Any) -> list[tuple[Group, list[Tensor], int]]:
        """Return the outputs of this pass that its graph has saved, with their groups and the time of the pass."""
        model_output = self._unmeasured.output
        saved = self._saved_outputs.of(root, None if model_output is None else model_output())
        if saved is None:  # in the next pass of such a form, hooks note the outputs
            self._saved_outputs.give_up()
            return []
        described = (describe(output) for describe, output in saved)
        return [(*found, self._unmeasured.time_ns) for found in described if found is not None]

    def _hook(self, observed: _Observed) -> Callable[[nn.Module, Any, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any = REMOVED) -> None:
            if capturing():
                return
            if output is REMOVED:
                return
            self._unseen.discard(observed.path)
            if observed.calls.hook is not None:
                observed.calls.hook.is_called = True
            try:
                self._observe(observed, module, (args, kwargs), output)
            except Exception as error:  # noqa: BLE001 - errors of the recorder never reach training
                self._session.health.fault("activations", error)

        return hook

    def _observe(self, observed: _Observed, module: nn.Module, given: Any, output: Any) -> None:
        mode = self._passes.mode_of_call()
        if mode is None:
            if recomputes():
                self._recomputed.again(observed.output.info, _real(output), observed.calls)
            else:
                self._unmeasured.repeated.unrecorded_call(self._hooked)
            return
        if mode == "train" and observed.calls.is_surplus():
            return
        if mode != "train" and torch.is_grad_enabled():
            self._recomputed.forget(observed.output.info)
        if self._passes.outside and not observed.is_model:
            part_called = self._part_called()
            if part_called is not None:
                part_called(observed.path, mode)
            self._has_parts = True
        self._decide_for(mode)
        if self._passes.outside and mode == "train" and not observed.is_model and self._only_notes():
            self._unmeasured.begin(of_parts=True)
        if self._session.full_tensors.active:
            self._save(observed.output, output, mode)
            self._save(observed.input, given, mode)
        if mode == "train":
            if observed.describe is not None:
                self._saved_outputs.note(observed.describe, module, output)
            if observed.is_model:
                self._saved_outputs.note_model(output)
        collections = observed.output.info.collections
        if collections:
            charged = self._due_of(observed, collections, mode)
            if charged is not None:
                look = functools.partial(observed.probes, given)
                self._measure(observed.output, output, mode, charged, look, observed.channels)
                if mode == "train" and self._recomputed.is_active:
                    self._recomputed.first(observed.output.info, _real(output), observed.calls)
            elif module.training and mode == "train" and tensors.ACTIVATIONS in collections:
                outputs = _real(output)
                if 0 < len(outputs) <= _MOST_NOTED:
                    self.live.note(self._group(observed.output, outputs), outputs)
        collections = observed.input.info.collections
        if collections:
            charged = self._due_of(observed, collections, mode)
            if charged is not None:
                self._measure(observed.input, given, mode, charged, self._sums_of)
            elif module.training and mode == "train" and tensors.INPUTS in collections:
                outputs = _numeric(given)
                if 0 < len(outputs) <= _MOST_NOTED:
                    self.live.note(self._group(observed.input, outputs), outputs)

    def _decide_for(self, mode: Mode) -> None:
        """Recompute what is due if this call is of another step or mode than the last one."""
        if self._decided_for != self._recorder.step or self._decided_in != mode:
            if self._decided_for != self._recorder.step:
                self.live.forget()  # nothing else does where the model itself is never called
            self._decided_for, self._decided_in = self._recorder.step, mode
            self._decided.clear()
            self._saved.clear()

    def _describe(self, flow: _Flow) -> Describe:
        def describe(output: Tensor) -> tuple[Group, list[Tensor]] | None:
            outputs = _numeric(output) if flow.takes_integers else _real(output)
            return (self._group(flow, outputs), outputs) if outputs else None

        return describe

    def _save(self, flow: _Flow, value: Any, mode: Mode) -> None:
        """Save the full tensors of an input or output if they are due."""
        collections, capture = flow.info.collections, self._session.full_tensors
        if not collections:
            return
        if collections not in self._saved:
            self._saved[collections] = capture.due(collections, self._recorder.step, mode)
        collection = self._saved[collections]
        if collection is None:
            return
        since = self._schedule.now()
        outputs = _numeric(value) if flow.takes_integers else _real(value)
        if outputs:
            for info, tensor in zip(self._group(flow, outputs).tensors, outputs, strict=True):
                full_tensors.save_one(capture, collection, self._recorder.step, mode, info, tensor)
        self._schedule.report_extra(since)

    def _due_of(self, observed: _Observed, collections: tuple[str, ...], mode: Mode) -> str | None:
        """Return the collection that is due for a module. By the budget, a module is measured in the first pass of a step that calls it."""
        charged = self._due(collections, mode)
        if charged is None or mode != "train":
            return charged
        place = (self._recorder.step, self._pass)
        if observed.measured == place:
            return charged
        if observed.measured[0] == place[0] and self._schedule.is_sampled(charged, place[0]):
            return None
        if observed.measured[0] != place[0]:
            step, modules = self._measured
            self._measured = (place[0], modules + 1 if step == place[0] else 1)
        observed.measured = place
        return charged

    def _due(self, collections: tuple[str, ...], mode: Mode) -> str | None:
        """Query the schedule, once per pass for each set of collections."""
        if collections not in self._decided:
            self._decided[collections] = self._schedule.due(collections, self._recorder.step, mode)
        return self._decided[collections]

    def _measure(
        self,
        flow: _Flow,
        value: Any,
        mode: Mode,
        charged: str,
        look: _Look,
        channels: ChannelProbe | None = None,
    ) -> None:
        outputs = _numeric(value) if flow.takes_integers else _real(value)
        if not outputs:
            return
        since = self._schedule.now()
        step = self._recorder.step
        probes = look(outputs, step, mode)
        group = self._group(flow, outputs)
        if self._unchanged.applies:
            names = [f"{info.name}/{mode}" for info in group.tensors]
            same = self._unchanged.measure(names, outputs, max(1, self._hooked))
            probes = probes if same is None else (*probes, same)
        channels = channels if len(outputs) == 1 else None
        if mode == "train" and not self._passes.outside:
            layer = LayerOutputs(flow.stability, group, outputs, probes, channels)
            if self._batched.add(layer, charged, since):
                return
        counts = None if channels is None else channels.measure(outputs[0], step, mode)
        probes = probes if counts is None else (*probes, counts)
        self._recorder.add(group, self._kernel.measure(outputs), mode, probes)
        self._schedule.spent(charged, since)

    def _sums_of(self, outputs: list[Tensor], _step: int, _mode: Mode) -> tuple[Probe, ...]:
        """Return sums by channel, if images are the only input of a model."""
        sums = self._sums.measure(outputs[0]) if self._sums.applies and len(outputs) == 1 else None
        return () if sums is None else (sums,)

    def _group(self, flow: _Flow, outputs: list[Tensor]) -> Group:
        group = flow.groups.get(len(outputs))
        if group is None:
            several = len(outputs) > 1
            infos = tuple(
                replace(
                    flow.info,
                    name=f"{flow.info.name}_{place}" if several else flow.info.name,
                    shape=tuple(tensor.shape),
                    dtype=dtype_name(tensor.dtype),
                )
                for place, tensor in enumerate(outputs)
            )
            places = tuple(placement_of(tensor, self._whole).weight for tensor in outputs)
            group = flow.groups[len(outputs)] = Group(infos, places)
        return group


def _real(value: Any) -> list[Tensor]:
    """Return the floating-point and complex tensors in a module's output."""
    outputs = list(_flat(value))
    return [tensor for tensor in outputs if tensor.is_floating_point() or tensor.is_complex()]


def _numeric(value: Any) -> list[Tensor]:
    """All tensors but truth values, which are masks."""
    return [tensor for tensor in _flat(value) if tensor.dtype is not torch.bool]


def _flat(output: Any, within: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """Tensors of nested containers, as the built-in types hold them: a method of the program's own may compute something."""
    if isinstance(output, Tensor):
        values = dense_values(output)
        if values is not None:
            yield values
        return
    if id(output) in within or len(within) == _DEEPEST:  # it holds itself
        return
    if isinstance(output, dict):
        members: Iterable[Any] = dict.values(output)
    elif isinstance(output, list):
        members = list.__iter__(output)
    elif isinstance(output, tuple):
        members = tuple.__iter__(output)
    else:
        return
    for value in members:
        yield from _flat(value, (*within, id(output)))
