"""Checks for damage: parameters, optimizer state and normalization buffers that a step made non-finite.

A non-finite loss is not damage by itself: a program may skip the update, and the gradient of a batch without labels is zero. So
after a non-finite loss, gradient or gradient norm, the tensors that the update wrote are checked. In host memory all of them are
scanned, and only non-finite ones are recorded. On a CUDA device all are measured, because nothing waits for a device. In
addition, a slice of all tensors is scanned every hundredth step: an overflow in the optimizer's second moments has no other symptom.

The program's own normalization modules also have running statistics. They are identified by the name of the class or buffer,
because other buffers, e.g. with values of one batch, may be NaN occasionally. A buffer is recorded if its module is in training
mode, and it was finite at the start, has changed at least twice since, and has changed since the last check. Its rows have the role
``buffer_check``, and the rule requires more than one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from watchstep.capture.steps.record import Group
from watchstep.capture.steps.session import Session
from watchstep.format import tensors
from watchstep.format.statistics import Floats
from watchstep.format.tensors import Placement, TensorInfo
from watchstep.kernels.measurement import Cached, Kernel
from watchstep.pytorch import internals
from watchstep.pytorch.gate import GradientGate, any_is_nonfinite, any_is_nonfinite_on_host
from watchstep.pytorch.names import NamedParameter, Names, dtype_name, placement_of
from watchstep.pytorch.observable import own_tensor
from watchstep.pytorch.optimizer_map import OptimizerMap
from watchstep.pytorch.parameters.parameters import Updated
from watchstep.pytorch.running_statistics import own_statistics

_SUFFIX = ":finite_check"
_MAX_CONSECUTIVE = 3
_SWEEP = 100  # steps between scans without a suspicion
_BUFFER_SWEEP = 20  # as above, for buffers, which are small
_MAX_DESCRIPTIONS = 4096  # cached descriptions: the periodic scan needs those of all tensors
_LONGEST_GAP = 128  # maximum number of steps between follow-up checks

_Key = tuple[int, str]


@dataclass(frozen=True)
class _Checked:
    """A tensor that training changes."""

    key: _Key
    info: TensorInfo
    place: Placement
    values: Tensor

    @property
    def on_host(self) -> bool:
        return self.values.device.type == "cpu"


class _OwnBuffer:
    """A running statistic of one of the program's own modules."""

    def __init__(
        self, module: nn.Module, leaf: str, info: TensorInfo, place: Placement, values: Tensor
    ) -> None:
        self.key = (id(module), leaf)
        self._module, self._leaf, self._info, self._place = module, leaf, info, place
        self._shape = values.shape
        self._last = _Version.of(values)
        self._first: _Version | None = self._last

    def checked(self) -> _Checked | None:
        """Return the buffer if its module is in training mode, it has changed since the last check, and more than once since the start."""
        values = getattr(self._module, self._leaf, None)
        if not self._module.training or not isinstance(values, Tensor) or values.shape != self._shape:
            return None
        if self._first is not None and self._first.tensor is not values:
            self._first = None  # it was replaced, so the first tensor is no longer needed
        # A single change in place may be a restored checkpoint.
        restored = self._first is not None and self._first.changes_to(values) == 1
        if self._last.changes_to(values) == 0 or restored:
            return None
        return _Checked(self.key, self._info, self._place, values)

    def mark_checked(self) -> None:
        """Note that the buffer was recorded, or was finite."""
        values = getattr(self._module, self._leaf, None)
        if isinstance(values, Tensor):
            self._last = _Version.of(values)


@dataclass(frozen=True)
class _Version:
    """Tensor of a buffer, and its number of changes in place, which PyTorch does not count for inference tensors.

    The reference is not weak, because `torch.utils.swap_tensors` refuses tensors with weak references.
    """

    tensor: Tensor
    changes: int

    @classmethod
    def of(cls, values: Tensor) -> _Version:
        return cls(values, _changes(values))

    def changes_to(self, values: Tensor) -> int:
        """Return the number of counted changes since this version; -1 for another tensor."""
        return _changes(values) - self.changes if self.tensor is values else -1


def _changes(values: Tensor) -> int:
    return 0 if values.is_inference() else internals.version(values)


@dataclass(frozen=True)
class _Start:
    """Statistics of a tensor before any update: one row of a measurement."""

    measured: Cached
    row: int

    def nonfinite(self) -> float:
        rows = self.measured.collect()
        return float(rows.nan[self.row] + rows.pos_inf[self.row] + rows.neg_inf[self.row])


@dataclass(frozen=True)
class _AtStart:
    """The column ``nonfinite_at_start``: number of non-finite elements of each tensor before the first update."""

    starts: tuple[_Start | None, ...]

    def collect(self) -> dict[str, Floats]:
        counts = [0.0 if start is None else start.nonfinite() for start in self.starts]
        return {"nonfinite_at_start": np.array(counts, np.float64)}


class FiniteChecks:
    """Checks the tensors that the updates of one model wrote. Runs on the training thread.

    Rows are named ``fc.weight:finite_check``, ``fc.weight:exp_avg:finite_check`` and ``bn.running_var:finite_check``. Each has the
    column ``nonfinite_at_start``: a parameter may contain infinity on purpose, as a mask does, and is damaged only if it contains
    more non-finite elements later.
    """

    def __init__(self, session: Session, names: Names, kernel: Kernel) -> None:
        self._recorder = session.recorder
        self._schedule = session.schedule
        self._names = names
        self._kernel = kernel
        self._enabled = session.config.gate
        self._sweep, self._buffer_sweep = GradientGate(), GradientGate()
        self._starts: dict[_Key, _Start] = {}
        self._updated_before: OptimizerMap[Updated] = OptimizerMap()
        self._nonfinite: set[_Key] = set()
        self._recorded: tuple[int, set[_Key]] = (-1, set())
        self._suspected, self._consecutive, self._due = -2, 0, -1
        self._gap, self._follow_up = 0, -1
        self._buffers: list[tuple[nn.Module, str, TensorInfo, Placement]] = []
        self._own: list[_OwnBuffer] = []
        self.list_buffers()

    def list_buffers(self) -> None:
        """Find the buffers of the modules that the model has now."""
        if not self._enabled:
            return
        noted = {checked.key for checked in self._current_buffers()}
        self._buffers = list(self._normalization_buffers())
        self._own = list(self._own_buffers())
        self._note_starts([checked for checked in self._current_buffers() if checked.key not in noted])

    def suspect(self, step: int) -> None:
        """Schedule a check of the updates of a step with a non-finite value. In a long sequence of such steps, checks become rarer."""
        if step == self._suspected or not self._enabled:
            return
        self._consecutive = self._consecutive + 1 if step == self._suspected + 1 else 1
        self._suspected = step
        skipped = self._consecutive & (self._consecutive - 1) and self._consecutive % _SWEEP
        if self._consecutive <= _MAX_CONSECUTIVE or not skipped:
            self._due = step

    def before_update(self, optimizer: Optimizer, updated: Updated) -> None:
        """Note non-finite parameters of an optimizer before it changes them for the first time."""
        before = self._updated_before.get(optimizer)
        if before is updated or not self._enabled:
            return
        noted = frozenset() if before is None else frozenset(before.ids)
        new = [_parameter(named) for named in updated.parameters if id(named.parameter) not in noted]
        self._note_starts([checked for checked in new if checked.key not in self._starts])
        self._updated_before[optimizer] = updated

    def after_update(self, optimizer: Optimizer, updated: Updated, step: int) -> None:
        """Check the tensors that an update wrote, if a check is due."""
        if self._enabled and (self._is_due(step) or self._scan_finds(optimizer, updated, step)):
            since = self._schedule.now()
            written = [*self._written(optimizer, updated), *self._current_buffers()]
            self._record([*written, *self._changed_buffers(step)], step)
            self._schedule.report_extra(since)

    @staticmethod
    def checks(updated: Updated) -> bool:
        """Return whether this worker checks any of the parameters that an optimizer updates. Of equal replicas only the first does."""
        return any(named.placement.records and named.parameter.requires_grad for named in updated.parameters)

    def has_damage(self, optimizer: Optimizer, updated: Updated) -> bool | None:
        """Return whether a parameter or its state that was finite at the start is non-finite; None if one of them is on a device."""
        written = [
            checked for checked in self._written(optimizer, updated) if checked.key not in self._starts
        ]
        if not all(checked.on_host for checked in written):
            return None
        since = self._schedule.now()
        damaged = any_is_nonfinite_on_host([checked.values for checked in written])
        self._schedule.report_extra(since)
        return damaged

    def check_buffers(self, step: int) -> None:
        """Check buffers that a forward pass has changed, if a check is due: the pass may have no update."""
        if (self._buffers or self._own) and self._is_due(step):
            since = self._schedule.now()
            self._record([*self._current_buffers(), *self._changed_buffers(step)], step)
            self._schedule.report_extra(since)

    def _is_due(self, step: int) -> bool:
        return step == self._due or 0 <= self._follow_up <= step

    def _scan_finds(self, optimizer: Optimizer, updated: Updated, step: int) -> bool:
        """Return whether the periodic scan of this step, if any, finds NaN or infinity in a slice of the written tensors."""
        if step % _SWEEP == _SWEEP - 1:
            gate, written = self._sweep, [*self._written(optimizer, updated), *self._scanned_buffers(step)]
        elif step % _BUFFER_SWEEP == _BUFFER_SWEEP - 1 and (self._buffers or self._own):
            gate, written = self._buffer_sweep, list(self._scanned_buffers(step))
        elif self._sweep.pending or self._buffer_sweep.pending:
            return self._sweep.has_nonfinite([]) | self._buffer_sweep.has_nonfinite([])
        else:
            return False
        since = self._schedule.now()
        scanned = [
            checked.values for checked in written if not (checked.on_host and checked.key in self._starts)
        ]
        nonfinite = gate.has_nonfinite(scanned)
        self._schedule.report_extra(since)
        return nonfinite

    def _record(self, written: Sequence[_Checked], step: int) -> None:
        """Record host tensors that are non-finite or have recovered, and all tensors of devices."""
        on_host = [checked for checked in written if checked.on_host]
        elsewhere = [checked for checked in written if not checked.on_host]
        bad: list[_Checked] = []
        if any_is_nonfinite_on_host([checked.values for checked in on_host]):
            bad = [checked for checked in on_host if any_is_nonfinite_on_host([checked.values])]
        keys = {checked.key for checked in bad}
        recovered = [checked for checked in on_host if checked.key in self._nonfinite - keys]
        self._nonfinite -= {checked.key for checked in on_host}
        self._nonfinite |= keys
        if any(checked.info.role != "buffer_check" for checked in recovered):
            self._schedule.demand(step + 1)  # so that all recorded tensors show that they are finite
        self._add([*bad, *recovered, *elsewhere], step)
        checked_keys = {checked.key for checked in written}
        for buffer in self._own:
            if buffer.key in checked_keys:
                buffer.mark_checked()
        damaged = any(checked.key not in self._starts for checked in bad)
        own_nonfinite = any(buffer.key in self._nonfinite for buffer in self._own)
        self._follow(step, is_damaged=damaged or own_nonfinite, on_device=bool(elsewhere))

    def _follow(self, step: int, *, is_damaged: bool, on_device: bool) -> None:
        """Schedule a follow-up check, at increasing intervals: a program may restore damaged tensors.

        Args:
            step: Step of this check.
            is_damaged: Whether a tensor in host memory is damaged.
            on_device: Whether tensors on a device were measured; their result is not known yet.
        """
        if step == self._due:
            self._gap = 0
        again = is_damaged or (on_device and self._gap < _LONGEST_GAP)
        self._gap = min(max(1, 2 * self._gap), _LONGEST_GAP)
        self._follow_up = step + self._gap if again else -1

    def _add(self, chosen: Sequence[_Checked], step: int) -> None:
        """Record each tensor once per step, because a second row would be merged with the first."""
        at, keys = self._recorded
        if at != step:
            keys = set()
            self._recorded = (step, keys)
        new = [checked for checked in chosen if checked.key not in keys]
        keys.update(checked.key for checked in new)
        if new:
            group = Group(tuple(checked.info for checked in new), tuple(checked.place for checked in new))
            starts = _AtStart(tuple(self._starts.get(checked.key) for checked in new))
            self._recorder.add(
                group, self._kernel.measure([checked.values for checked in new]), probes=(starts,)
            )

    def _note_starts(self, new: Sequence[_Checked]) -> None:
        """Keep statistics of tensors before any update: in host memory only of non-finite ones."""
        on_devices = [checked for checked in new if not checked.on_host]
        on_host = [checked for checked in new if checked.on_host]
        if any_is_nonfinite_on_host([checked.values for checked in on_host]):
            on_devices += [checked for checked in on_host if any_is_nonfinite_on_host([checked.values])]
        if on_devices:
            measured = Cached(self._kernel.measure([checked.values for checked in on_devices]))
            self._starts.update(
                {checked.key: _Start(measured, row) for row, checked in enumerate(on_devices)}
            )

    def _written(self, optimizer: Optimizer, updated: Updated) -> Iterator[_Checked]:
        """Yield the trained parameters of an optimizer, and their optimizer state."""
        for named in updated.parameters:
            if not (named.placement.records and named.parameter.requires_grad):
                continue
            yield _parameter(named)
            for key, values in optimizer.state.get(named.parameter, {}).items():
                if isinstance(values, Tensor) and values.dim() > 0 and _is_real(values):
                    info = _state_info(named.weight, str(key), dtype_name(values.dtype))
                    yield _Checked((id(named.parameter), str(key)), info, named.placement.weight, values)

    def _normalization_buffers(self) -> Iterator[tuple[nn.Module, str, TensorInfo, Placement]]:
        for order, (path, module) in enumerate(self._names.model.named_modules()):
            if isinstance(module, internals.norm_base.value):
                for leaf in ("running_mean", "running_var"):
                    values = own_tensor(module, leaf)
                    if (
                        isinstance(values, Tensor)
                        and (placement := placement_of(values, self._names.whole)).records
                    ):
                        info = _described(self._names.buffer(path, leaf, module, order))
                        yield module, leaf, info, placement.weight

    def _own_buffers(self) -> Iterator[_OwnBuffer]:
        """Yield the running statistics of the program's own modules that are finite."""
        own: list[tuple[_OwnBuffer, Tensor]] = []
        for order, path, module, leaf, values in own_statistics(self._names.model):
            placement = placement_of(values, self._names.whole)
            if placement.records:
                described = _described(self._names.buffer(path, leaf, module, order))
                info = replace(described, role="buffer_check")
                own.append((_OwnBuffer(module, leaf, info, placement.weight, values), values.detach()))
        any_bad = any_is_nonfinite([values for _, values in own])
        for buffer, values in own:
            if not (any_bad and any_is_nonfinite([values])):
                yield buffer

    def _scanned_buffers(self, step: int) -> Iterator[_Checked]:
        yield from self._current_buffers()
        yield from self._changed_buffers(step)

    def _changed_buffers(self, step: int) -> Iterator[_Checked]:
        """Return the program's own buffers that training has changed since their last check in an earlier step."""
        at, keys = self._recorded
        changed = (buffer.checked() for buffer in self._own if at != step or buffer.key not in keys)
        return (checked for checked in changed if checked is not None)

    def _current_buffers(self) -> Iterable[_Checked]:
        for module, leaf, info, place in self._buffers:
            values = own_tensor(module, leaf)
            if isinstance(values, Tensor):
                yield _Checked((id(module), leaf), info, place, values)


def _parameter(named: NamedParameter) -> _Checked:
    return _Checked(
        (id(named.parameter), ""), _described(named.weight), named.placement.weight, named.parameter
    )


@functools.lru_cache(maxsize=_MAX_DESCRIPTIONS)
def _state_info(weight: TensorInfo, key: str, dtype: str) -> TensorInfo:
    """Describe the check of a part of a parameter's optimizer state."""
    return replace(_described(weight), name=f"{weight.name}:{key}{_SUFFIX}", dtype=dtype)


@functools.lru_cache(maxsize=_MAX_DESCRIPTIONS)
def _described(info: TensorInfo) -> TensorInfo:
    return replace(
        info, name=f"{info.name}{_SUFFIX}", role="finite_check", collections=(tensors.FINITE_CHECKS,)
    )


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
