"""Outputs and inputs of modules, measured as they are computed.

Inside regions that `torch.compile` traces, the hook traces to nothing, so that compiled code and losses stay as they
were; such modules are reported as not observed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from watchstep import tensors
from watchstep.capture.record import Group, Probe
from watchstep.capture.session import Session
from watchstep.kernels.interface import Kernel
from watchstep.pytorch.device_kernel import capturing
from watchstep.pytorch.forward_passes import ForwardPasses
from watchstep.pytorch.gate import LiveOutputs
from watchstep.pytorch.module_hook import ModuleHook
from watchstep.pytorch.names import Names, dtype_name
from watchstep.pytorch.observable import dense_values
from watchstep.pytorch.placement import standing
from watchstep.pytorch.probes.channel_sums import ChannelSums
from watchstep.pytorch.probes.channels import ChannelProbe
from watchstep.pytorch.probes.since_earlier import Unchanged
from watchstep.pytorch.probes.token_shares import TokenProbe
from watchstep.pytorch.probes.unit_activity import UnitActivity, activation_kind
from watchstep.tensors import Mode, TensorInfo

_Look = Callable[[list[Tensor], int, Mode], tuple[Probe, ...]]

_HOOK_SECONDS = 3.5e-6  # one call of a hook with nothing due; measured at 3.4 microseconds on an EPYC (Zen 4)


@dataclass
class _Flow:
    """What goes into a module, or comes out of it.

    Attributes:
        info: as it is described; shape and dtype are not known yet.
        groups: the tensors that it was found to be, by their number.
    """

    info: TensorInfo
    groups: dict[int, Group] = field(default_factory=dict)

    @property
    def takes_integers(self) -> bool:
        """Whether tensors of whole numbers count too: token ids, say, but not what modules hand to each other."""
        return self.info.role == "input" or tensors.OUTPUTS in self.info.collections


@dataclass
class _Observed:
    """One module."""

    path: str
    output: _Flow
    input: _Flow
    channels: ChannelProbe | None
    tokens: TokenProbe | None
    activity: UnitActivity | None

    def probes(self, given: Any, output: list[Tensor], step: int, mode: Mode) -> tuple[Probe, ...]:
        """Figures of one pass besides the output's row.

        Args:
            given: what the module was called with.
            output: the tensors that it gave.
            step: of the run.
            mode: of the pass.
        """
        found: list[Probe | None] = []
        if len(output) == 1:
            if self.channels is not None:
                found.append(self.channels.look(output[0], step, mode))
            if self.activity is not None:
                held = _real(given)
                found.append(self.activity.look(held[0] if len(held) == 1 else None, output[0], step, mode))
        if self.tokens is not None and (held := _numeric(given)):
            found.append(self.tokens.look(held[0]))
        return tuple(probe for probe in found if probe is not None)


class ActivationHooks:
    """Forward hooks on the modules of a model whose outputs or inputs are recorded.

    Attributes:
        live: outputs of the pass under way, for the case that its loss is bad.
        idle_seconds: about what the hooks cost a pass in which nothing is due.
    """

    def __init__(
        self,
        session: Session,
        names: Names,
        kernel: Kernel,
        passes: ForwardPasses,
        handles: list[RemovableHandle],
        part_called: Callable[[str, Mode], None],
    ) -> None:
        """Put them on.

        Args:
            session: the recording.
            names: of the model's modules.
            kernel: measures.
            passes: says which calls are recorded.
            handles: gets what takes the hooks off, one by one, so that those of a model that fails halfway come off, too.
            part_called: a bound method; called with the path and mode of each recorded call outside of the model's own ``forward``.
        """
        self.live = LiveOutputs()
        self._session = session
        self._schedule = session.schedule
        self._recorder = session.recorder
        self._whole = names.whole
        self._kernel = kernel
        self._passes = passes
        self._part_called = weakref.WeakMethod(part_called)  # a cycle would keep the model until a collection
        self._unseen: set[str] = set()
        self._decided_for, self._decided_in = -1, ""
        self._decided: dict[tuple[str, ...], str | None] = {}
        probes = session.config.probes
        self._unchanged = Unchanged(probes)
        self._sums = ChannelSums(probes)
        hooked = 0
        for order, (path, module) in enumerate(names.model.named_modules()):
            try:
                hooked += self._listen(names, order, path, module, handles)
            except Exception as error:  # noqa: BLE001 - a module whose attributes raise: the others are recorded
                session.health.fault("activations", error)
        self._hooked = hooked
        self.idle_seconds = _HOOK_SECONDS * hooked

    def _listen(
        self, names: Names, order: int, path: str, module: nn.Module, handles: list[RemovableHandle]
    ) -> bool:
        """Put a hook on a module; whether it has anything to record."""
        config = self._session.config
        probes = config.probes
        is_leaf, is_model = next(module.children(), None) is None, not path
        outputs = [tensors.ACTIVATIONS] * is_leaf + [tensors.OUTPUTS] * is_model
        channels, tokens = ChannelProbe(module), TokenProbe(module, config.token_values, probes)
        in_place = bool(getattr(module, "inplace", False))
        activity = UnitActivity(activation_kind(module), probes, in_place=in_place)
        observed = _Observed(
            names.path(path) or "model",
            _Flow(names.of_module(path, module, order, "output", tuple(outputs))),
            _Flow(names.of_module(path, module, order, "input", (tensors.INPUTS,) * is_model)),
            channels if "channels" in probes and channels.applies else None,
            tokens if tokens.applies else None,
            activity if activity.applies else None,
        )
        if not (observed.output.info.collections or observed.input.info.collections):
            return False
        handles.append(module.register_forward_hook(ModuleHook(self._hook(observed)), with_kwargs=True))
        if is_leaf:
            self._unseen.add(observed.path)
        return True

    @property
    def unseen(self) -> list[str]:
        """Modules whose hook has not been called: compiled, or not part of the forward pass."""
        return sorted(self._unseen)

    def new_pass(self) -> None:
        """A forward pass of the whole model begins: decide anew what is due."""
        self._decided.clear()

    def record_live(self) -> None:
        """Measure the outputs that are still there, unless this pass was measured anyway."""
        for group, outputs, time_ns in self.live.alive():
            self._recorder.add(group, self._kernel.measure(outputs), time_ns=time_ns)

    def _hook(self, observed: _Observed) -> Callable[[nn.Module, Any, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if capturing():
                return
            self._unseen.discard(observed.path)
            try:
                self._observe(observed, module, (args, kwargs), output)
            except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
                self._session.health.fault("activations", error)

        return hook

    def _observe(self, observed: _Observed, module: nn.Module, given: Any, output: Any) -> None:
        mode = self._passes.mode_of_call()
        if mode is None:
            return
        if self._passes.outside:
            part_called = self._part_called()
            if part_called is not None:
                part_called(observed.path, mode)
        if self._decided_for != self._recorder.step or self._decided_in != mode:
            if self._decided_for != self._recorder.step:
                self.live.forget()  # nothing else does where the model itself is never called
            self._decided_for, self._decided_in = self._recorder.step, mode
            self._decided.clear()
        collections = observed.output.info.collections
        if collections:
            charged = self._due(collections, mode)
            if charged is not None:
                self._measure(
                    observed.output, output, mode, charged, functools.partial(observed.probes, given)
                )
            elif module.training and mode == "train" and tensors.ACTIVATIONS in collections:
                found = _real(output)
                if found:
                    self.live.note(self._group(observed.output, found), found)
        collections = observed.input.info.collections
        if collections:
            charged = self._due(collections, mode)
            if charged is not None:
                self._measure(observed.input, given, mode, charged, self._sums_of)
            elif module.training and mode == "train" and tensors.INPUTS in collections:
                found = _numeric(given)
                if found:
                    self.live.note(self._group(observed.input, found), found)

    def _due(self, collections: tuple[str, ...], mode: Mode) -> str | None:
        """As the schedule says, asked once a pass for each set of collections."""
        if collections not in self._decided:
            self._decided[collections] = self._schedule.due(collections, self._recorder.step, mode)
        return self._decided[collections]

    def _measure(self, flow: _Flow, held: Any, mode: Mode, charged: str, look: _Look = lambda *_: ()) -> None:
        found = _numeric(held) if flow.takes_integers else _real(held)
        if not found:
            return
        since = self._schedule.now()
        probes = look(found, self._recorder.step, mode)
        group = self._group(flow, found)
        if self._unchanged.applies:
            names = [f"{info.name}/{mode}" for info in group.tensors]
            same = self._unchanged.look(names, found, max(1, self._hooked))
            probes = probes if same is None else (*probes, same)
        self._recorder.add(group, self._kernel.measure(found), mode, probes)
        self._schedule.spent(charged, since)

    def _sums_of(self, found: list[Tensor], _step: int, _mode: Mode) -> tuple[Probe, ...]:
        """Sums by channel, where a model is given images and nothing else."""
        sums = self._sums.look(found[0]) if self._sums.applies and len(found) == 1 else None
        return () if sums is None else (sums,)

    def _group(self, flow: _Flow, found: list[Tensor]) -> Group:
        group = flow.groups.get(len(found))
        if group is None:
            several = len(found) > 1
            infos = tuple(
                replace(
                    flow.info,
                    name=f"{flow.info.name}_{place}" if several else flow.info.name,
                    shape=tuple(tensor.shape),
                    dtype=dtype_name(tensor.dtype),
                )
                for place, tensor in enumerate(found)
            )
            places = tuple(standing(tensor, self._whole).weight for tensor in found)
            group = flow.groups[len(found)] = Group(infos, places)
        return group


def _real(held: Any) -> list[Tensor]:
    """The floating-point and complex tensors in what a module gives."""
    found = list(_flat(held))
    return [tensor for tensor in found if tensor.is_floating_point() or tensor.is_complex()]


def _numeric(held: Any) -> list[Tensor]:
    """All tensors but truth values, which are masks."""
    return [tensor for tensor in _flat(held) if tensor.dtype is not torch.bool]


def _flat(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        values = dense_values(held)
        if values is not None:
            yield values
    elif isinstance(held, dict):
        for value in held.values():
            yield from _flat(value)
    elif isinstance(held, list | tuple):
        for value in held:
            yield from _flat(value)
