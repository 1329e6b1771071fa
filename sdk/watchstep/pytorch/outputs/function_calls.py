"""Activations that a model calls as functions: `torch.relu`, `torch.tanh` and `torch.sigmoid`, including their aliases.

No module hook observes them. A `torch.overrides.TorchFunctionMode` does, but slows down every operation of a pass. So it is entered
only for passes in which activations are measured, and only if the probe ``function_calls`` is configured. Outputs are recorded as
``MODULE:relu_0``: the module that makes the call, and the number of the call in the pass.

Models with a compiled part are not observed, because another mode would recompile it. Programs that call parts of a model but
never the model itself are not observed either.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from watchstep.capture.config import FUNCTION_CALLS, of_kind
from watchstep.capture.steps.record import Group, Probe
from watchstep.capture.steps.session import Session
from watchstep.format import tensors
from watchstep.format.tensors import Mode, TensorInfo
from watchstep.kernels.measurement import Kernel
from watchstep.pytorch import internals
from watchstep.pytorch.names import Names, dtype_name, placement_of
from watchstep.pytorch.probes.activations import ChannelProbe, UnitActivity, activation_kind

_MODULES: dict[str, Callable[[], nn.Module]] = {"ReLU": nn.ReLU, "Tanh": nn.Tanh, "Sigmoid": nn.Sigmoid}
_KINDS: dict[Any, str] = {
    torch.relu: "ReLU",
    torch.Tensor.relu: "ReLU",
    functional.relu: "ReLU",
    torch.tanh: "Tanh",
    torch.Tensor.tanh: "Tanh",
    torch.sigmoid: "Sigmoid",
    torch.Tensor.sigmoid: "Sigmoid",
}
_IN_PLACE: dict[Any, str] = {
    torch.relu_: "ReLU",
    torch.Tensor.relu_: "ReLU",
    torch.tanh_: "Tanh",
    torch.Tensor.tanh_: "Tanh",
    torch.sigmoid_: "Sigmoid",
    torch.Tensor.sigmoid_: "Sigmoid",
}
_MAX_FRAMES = 64
"""Maximum number of frames that are searched for the calling module."""


@dataclass(frozen=True)
class _Call:
    """One call site of such a function in a model."""

    info: TensorInfo
    channels: ChannelProbe | None
    activity: UnitActivity | None


class FunctionCalls:
    """Observes the calls of one watched model, in the passes in which activations are due.

    Attributes:
        applies: Whether the probe and the collection are configured.
    """

    def __init__(self, session: Session, names: Names, kernel: Kernel) -> None:
        self._session = session
        self._names = names
        self._kernel = kernel
        probes = session.config.probes
        self.applies = bool(of_kind(probes, FUNCTION_CALLS)) and tensors.ACTIVATIONS in session.config.chosen
        self._modules: dict[int, tuple[str, int, nn.Module]] = {}
        self._calls: dict[tuple[str, str, int], _Call] = {}
        self._call_counts: Counter[tuple[str, str]] = Counter()
        self._mode: _FunctionMode | None = None
        self._depth = 0

    def enter(self, mode: Mode | None) -> None:
        """Handle the start of a pass of the model.

        Args:
            mode: Mode of the pass; None if it is not recorded.
        """
        if not self.applies:
            return
        if self._mode is not None:
            self._depth += 1
            return
        if mode is None:
            return
        charged = self._session.schedule.due((tensors.ACTIVATIONS,), self._session.recorder.step, mode)
        if charged is None or self._is_compiled():
            return
        self._modules = {
            id(module): (path, order, module)
            for order, (path, module) in enumerate(self._names.model.named_modules())
        }
        self._call_counts.clear()
        self._mode = _FunctionMode(self, mode, charged)
        self._mode.begin()

    def leave(self) -> None:
        """Handle the end of the pass, also after an exception."""
        if self._mode is None:
            return
        if self._depth:
            self._depth -= 1
            return
        function_mode, self._mode = self._mode, None
        self._modules = {}
        function_mode.end()

    def seen(self, kind: str, given: Tensor | None, output: Any, mode: Mode, charged: str) -> None:
        """Measure one call.

        Args:
            kind: Kind of the activation.
            given: Its input; None if the output overwrites it.
            output: Its output.
            mode: Mode of the pass.
            charged: The collection that is due.
        """
        try:
            if not isinstance(output, Tensor) or output.is_nested or not output.is_floating_point():
                return
            schedule, since = self._session.schedule, self._session.schedule.now()
            call = self._call(kind)
            if call is not None and call.info.collections:
                self._measure(call, given, output, mode)
            schedule.spent(charged, since)
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._session.health.fault("function calls", error)

    def _measure(self, call: _Call, given: Tensor | None, output: Tensor, mode: Mode) -> None:
        recorder = self._session.recorder
        info = replace(call.info, shape=tuple(output.shape), dtype=dtype_name(output.dtype))
        probes: list[Probe | None] = []
        if call.channels is not None:
            probes.append(call.channels.measure(output, recorder.step, mode))
        if call.activity is not None:
            probes.append(call.activity.measure(given, output, recorder.step, mode))
        used_probes = tuple(probe for probe in probes if probe is not None)
        group = Group.of((info,), placement_of(output, self._names.whole).weight)
        recorder.add(group, self._kernel.measure([output]), mode, used_probes)

    def _call(self, kind: str) -> _Call | None:
        owner = self._owner()
        if owner is None:
            return None
        path, order, module = owner
        number = self._call_counts[path, kind]
        self._call_counts[path, kind] += 1
        place = (path, kind, number)
        if place not in self._calls:
            probes = self._session.config.probes
            plain = self._names.of_module(path, module, order, "output", (tensors.ACTIVATIONS,))
            name = f"{self._names.path(path) or 'model'}:{kind.lower()}_{number}"
            activity = UnitActivity(kind, probes)
            self._calls[place] = _Call(
                replace(plain, name=name, module_type=kind),
                ChannelProbe(_MODULES[kind]()) if "channels" in probes else None,
                activity if activity.applies else None,
            )
        return self._calls[place]

    def _owner(self) -> tuple[str, int, nn.Module] | None:
        """Return path, order and module of the caller; None if the caller is an activation module, which its own hook observes."""
        frame: FrameType | None = sys._getframe(3)  # noqa: SLF001 - the documented way to a frame
        for _ in range(_MAX_FRAMES):
            if frame is None:
                return None
            caller = frame.f_locals.get("self")
            if isinstance(caller, nn.Module):
                if activation_kind(caller):
                    return None
                if id(caller) in self._modules:
                    return self._modules[id(caller)]
            frame = frame.f_back
        return None

    def _is_compiled(self) -> bool:
        compiled = any(map(internals.is_compiled, self._names.model.modules()))
        if compiled:
            self._session.health.note(
                "function_calls",
                "not observed: a part of the model is compiled, and a function mode would compile it anew",
            )
        return compiled


class _FunctionMode(TorchFunctionMode):
    """Reports calls of the activation functions to a `FunctionCalls`, without changing them."""

    def __init__(self, calls: FunctionCalls, mode: Mode, charged: str) -> None:
        super().__init__()
        self._calls = calls
        self._pass_mode = mode
        self._charged = charged

    def begin(self) -> None:
        """Start to observe calls on this thread."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Stop observing."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and report it if it is an activation. PyTorch calls this for each operation."""
        output = func(*args, **(kwargs or {}))
        kind = _KINDS.get(func)
        in_place = _IN_PLACE.get(func)
        if kind is not None or in_place is not None:
            overwritten = in_place is not None or bool((kwargs or {}).get("inplace"))
            given = args[0] if args and isinstance(args[0], Tensor) and not overwritten else None
            self._calls.seen(kind or in_place or "", given, output, self._pass_mode, self._charged)
        return output
