"""Whether training is damaged: parameters, optimizer state and normalization buffers that a step made non-finite.

A non-finite loss is no damage by itself: a program may skip the update, and the gradient of a batch without labels is zero. So where
a loss, a gradient or a gradient norm was non-finite, what the update wrote is looked at after it. In host memory all of it is
scanned, and only tensors that are non-finite are recorded; on a CUDA device all are measured, for nothing is waited for there.
Besides, a slice of everything is scanned every hundredth step: an overflow in the optimizer's second moments shows nowhere else.

Normalization modules of the program's own keep running statistics, too. They are known by name, of the class or of the buffer: a buffer that holds
figures of one batch, say, may be NaN now and then. Recorded is what was finite at the start, has changed at least twice since, and has changed since the last
look, of modules in training mode. Rows of them have the role ``buffer_check``, and the rule asks for more than one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # all that keep running statistics; has no public name
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from watchstep.capture.record import Group
from watchstep.capture.session import Session
from watchstep.format import tensors
from watchstep.format.statistics import Floats
from watchstep.format.tensors import Placement, TensorInfo
from watchstep.kernels.measurement import Cached, Kernel
from watchstep.pytorch.gate import GradientGate, any_is_nonfinite, any_is_nonfinite_on_host
from watchstep.pytorch.names import NamedParameter, Names, bases_of, dtype_name, standing
from watchstep.pytorch.observable import own_tensor
from watchstep.pytorch.parameters.parameters import Updated

_SUFFIX = ":finite_check"
_MOST_IN_A_ROW = 3
_SWEEP = 100  # steps from scan to scan where nothing is suspected
_BUFFER_SWEEP = 20  # the same for buffers, which are small
_LONGEST_GAP = 128  # steps between checks that follow one another up
_OWN_CLASSES = re.compile("norm|whiten|running|moving|standardi[sz]", re.IGNORECASE)
_OWN_BUFFERS = re.compile("(^|_)(running|moving|ema)(_|$)", re.IGNORECASE)
_MOST_ELEMENTS = 2**20
"""Of a buffer of the program's own: running statistics are small, and queues of examples are not."""

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
    """A running statistic of a module of the program's own."""

    def __init__(
        self, module: nn.Module, leaf: str, info: TensorInfo, place: Placement, values: Tensor
    ) -> None:
        self.key = (id(module), leaf)
        self._module, self._leaf, self._info, self._place = module, leaf, info, place
        self._shape = values.shape
        self._seen = _Version.of(values)
        self._first: _Version | None = self._seen

    def checked(self) -> _Checked | None:
        """As it is, if the module trains and the buffer has changed since the last look, and not only once since the start."""
        values = getattr(self._module, self._leaf, None)
        if not self._module.training or not isinstance(values, Tensor) or values.shape != self._shape:
            return None
        if self._first is not None and self._first.tensor is not values:
            self._first = None  # it was replaced, and need not be kept
        # One change in place is how a program restores it.
        restored = self._first is not None and self._first.changes_to(values) == 1
        if self._seen.changes_to(values) == 0 or restored:
            return None
        return _Checked(self.key, self._info, self._place, values)

    def looked_at(self) -> None:
        """A row of it is recorded, or it was seen to be finite."""
        values = getattr(self._module, self._leaf, None)
        if isinstance(values, Tensor):
            self._seen = _Version.of(values)


@dataclass(frozen=True)
class _Version:
    """Which tensor a buffer is, and how often it was changed in place; of an inference tensor that is not counted.

    No weak reference, as `torch.utils.swap_tensors` refuses tensors that have one.
    """

    tensor: Tensor
    changes: int

    @classmethod
    def of(cls, values: Tensor) -> _Version:
        return cls(values, _changes(values))

    def changes_to(self, values: Tensor) -> int:
        """How many changes lie between, as far as they are counted: -1 where it is another tensor."""
        return _changes(values) - self.changes if self.tensor is values else -1


def _changes(values: Tensor) -> int:
    return 0 if values.is_inference() else values._version  # noqa: SLF001 - has no public name


@dataclass(frozen=True)
class _Start:
    """A tensor as it was when it was first seen: one row of a measurement."""

    measured: Cached
    row: int

    def nonfinite(self) -> float:
        rows = self.measured.collect()
        return float(rows.nan[self.row] + rows.pos_inf[self.row] + rows.neg_inf[self.row])


@dataclass(frozen=True)
class _AtStart:
    """The column ``nonfinite_at_start``: how many elements of each tensor were non-finite before the first update."""

    starts: tuple[_Start | None, ...]

    def collect(self) -> dict[str, Floats]:
        counts = [0.0 if start is None else start.nonfinite() for start in self.starts]
        return {"nonfinite_at_start": np.array(counts, np.float64)}


class FiniteChecks:
    """Looks at what the updates of one model wrote. On the training thread.

    Rows are named ``fc.weight:finite_check``, ``fc.weight:exp_avg:finite_check`` and ``bn.running_var:finite_check``. Each has the column
    ``nonfinite_at_start``: a parameter may hold infinity on purpose, as a mask does, and is damaged only where it holds more later.
    """

    def __init__(self, session: Session, names: Names, kernel: Kernel) -> None:
        self._recorder = session.recorder
        self._schedule = session.schedule
        self._names = names
        self._kernel = kernel
        self._wanted = session.config.gate
        self._sweep, self._buffer_sweep = GradientGate(), GradientGate()
        self._starts: dict[_Key, _Start] = {}
        self._updated_before: MutableMapping[Optimizer, Updated] = WeakIdKeyDictionary()
        self._nonfinite: set[_Key] = set()
        self._recorded: tuple[int, set[_Key]] = (-1, set())
        self._suspected, self._in_a_row, self._due = -2, 0, -1
        self._gap, self._follow_up = 0, -1
        self._buffers = list(self._normalization_buffers()) if self._wanted else []
        self._own = list(self._own_buffers()) if self._wanted else []
        self._note_starts(list(self._current_buffers()))

    def suspect(self, step: int) -> None:
        """Something of a step is non-finite: look at what its updates write, less often where that goes on and on."""
        if step == self._suspected or not self._wanted:
            return
        self._in_a_row = self._in_a_row + 1 if step == self._suspected + 1 else 1
        self._suspected = step
        rare = self._in_a_row & (self._in_a_row - 1) and self._in_a_row % _SWEEP
        if self._in_a_row <= _MOST_IN_A_ROW or not rare:
            self._due = step

    def before_update(self, optimizer: Optimizer, updated: Updated) -> None:
        """See the parameters of an optimizer before it first changes them."""
        before = self._updated_before.get(optimizer)
        if before is updated or not self._wanted:
            return
        seen = frozenset() if before is None else frozenset(before.ids)
        new = [_parameter(named) for named in updated.parameters if id(named.parameter) not in seen]
        self._note_starts([checked for checked in new if checked.key not in self._starts])
        self._updated_before[optimizer] = updated

    def after_update(self, optimizer: Optimizer, updated: Updated, step: int) -> None:
        """Record what an update wrote, if that is due."""
        if self._wanted and (self._is_due(step) or self._finds(optimizer, updated, step)):
            since = self._schedule.now()
            written = [*self._written(optimizer, updated), *self._current_buffers()]
            self._record([*written, *self._changed_buffers(step)], step)
            self._schedule.report_extra(since)

    def has_damage(self, optimizer: Optimizer, updated: Updated) -> bool | None:
        """Whether a parameter or its state is non-finite that was finite at the start; None where that lies on a device."""
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
        """A forward pass has changed buffers, and its update may never be made: look at them where that is due."""
        if (self._buffers or self._own) and self._is_due(step):
            since = self._schedule.now()
            self._record([*self._current_buffers(), *self._changed_buffers(step)], step)
            self._schedule.report_extra(since)

    def _is_due(self, step: int) -> bool:
        return step == self._due or 0 <= self._follow_up <= step

    def _finds(self, optimizer: Optimizer, updated: Updated, step: int) -> bool:
        """Whether a slice of what is written at this step holds NaN or infinity, where it is its turn to be scanned."""
        if step % _SWEEP == _SWEEP - 1:
            gate, written = self._sweep, [*self._written(optimizer, updated), *self._scanned_buffers(step)]
        elif step % _BUFFER_SWEEP == _BUFFER_SWEEP - 1 and (self._buffers or self._own):
            gate, written = self._buffer_sweep, list(self._scanned_buffers(step))
        elif self._sweep.pending or self._buffer_sweep.pending:
            return self._sweep.has_nonfinite([]) | self._buffer_sweep.has_nonfinite([])
        else:
            return False
        since = self._schedule.now()
        usual = [
            checked.values for checked in written if not (checked.on_host and checked.key in self._starts)
        ]
        nonfinite = gate.has_nonfinite(usual)
        self._schedule.report_extra(since)
        return nonfinite

    def _record(self, written: Sequence[_Checked], step: int) -> None:
        """Record what is non-finite, and what was and is so no more; of devices all."""
        on_host = [checked for checked in written if checked.on_host]
        elsewhere = [checked for checked in written if not checked.on_host]
        bad: list[_Checked] = []
        if any_is_nonfinite_on_host([checked.values for checked in on_host]):
            bad = [checked for checked in on_host if any_is_nonfinite_on_host([checked.values])]
        keys = {checked.key for checked in bad}
        mended = [checked for checked in on_host if checked.key in self._nonfinite - keys]
        self._nonfinite -= {checked.key for checked in on_host}
        self._nonfinite |= keys
        if any(checked.info.role != "buffer_check" for checked in mended):
            self._schedule.demand(step + 1)  # what is judged otherwise is then seen to be finite, too
        self._add([*bad, *mended, *elsewhere], step)
        looked_at = {checked.key for checked in written}
        for buffer in self._own:
            if buffer.key in looked_at:
                buffer.looked_at()
        damaged = any(checked.key not in self._starts for checked in bad)
        unsettled = any(buffer.key in self._nonfinite for buffer in self._own)
        self._follow(step, goes_on=damaged or unsettled, asked=bool(elsewhere))

    def _follow(self, step: int, *, goes_on: bool, asked: bool) -> None:
        """Say when to look again: soon, then ever later, for a program may restore what was damaged.

        Args:
            step: of this look.
            goes_on: something in host memory is damaged.
            asked: a device was asked, whose answer is not waited for.
        """
        if step == self._due:
            self._gap = 0
        again = goes_on or (asked and self._gap < _LONGEST_GAP)
        self._gap = min(max(1, 2 * self._gap), _LONGEST_GAP)
        self._follow_up = step + self._gap if again else -1

    def _add(self, chosen: Sequence[_Checked], step: int) -> None:
        """Record rows, of each tensor once a step: a second row would be merged into the first."""
        at, keys = self._recorded
        if at != step:
            keys = set()
            self._recorded = (step, keys)
        left = [checked for checked in chosen if checked.key not in keys]
        keys.update(checked.key for checked in left)
        if left:
            group = Group(tuple(checked.info for checked in left), tuple(checked.place for checked in left))
            starts = _AtStart(tuple(self._starts.get(checked.key) for checked in left))
            self._recorder.add(
                group, self._kernel.measure([checked.values for checked in left]), probes=(starts,)
            )

    def _note_starts(self, new: Sequence[_Checked]) -> None:
        """Keep how tensors are before any update: in host memory of those alone that are non-finite."""
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
        """The parameters that an optimizer trains, and what it keeps for them."""
        for named in updated.parameters:
            if not (named.standing.records and named.parameter.requires_grad):
                continue
            yield _parameter(named)
            for key, values in optimizer.state.get(named.parameter, {}).items():
                if isinstance(values, Tensor) and values.dim() > 0 and _is_real(values):
                    info = replace(
                        _described(named.weight),
                        name=f"{named.weight.name}:{key}{_SUFFIX}",
                        dtype=dtype_name(values.dtype),
                    )
                    yield _Checked((id(named.parameter), str(key)), info, named.standing.weight, values)

    def _normalization_buffers(self) -> Iterator[tuple[_NormBase, str, TensorInfo, Placement]]:
        for order, (path, module) in enumerate(self._names.model.named_modules()):
            if isinstance(module, _NormBase):
                for leaf in ("running_mean", "running_var"):
                    values = own_tensor(module, leaf)
                    if isinstance(values, Tensor) and (stands := standing(values, self._names.whole)).records:
                        info = _described(self._names.buffer(path, leaf, module, order))
                        yield module, leaf, info, stands.weight

    def _own_buffers(self) -> Iterator[_OwnBuffer]:
        """Of modules that are not PyTorch's: named as running statistics are, saved with the model, and finite now."""
        own: list[tuple[_OwnBuffer, Tensor]] = []
        for order, (path, module) in enumerate(self._names.model.named_modules()):
            if isinstance(module, _NormBase) or type(module).__module__.startswith("torch."):
                continue
            normalizes = any(_OWN_CLASSES.search(base) for base in bases_of(module))
            for leaf, values in module.named_buffers(recurse=False):
                if not (normalizes or _OWN_BUFFERS.search(leaf)):
                    continue
                is_saved = leaf not in module._non_persistent_buffers_set  # noqa: SLF001 - has no public name
                is_small = 0 < values.numel() <= _MOST_ELEMENTS and values.device.type in ("cpu", "cuda")
                stands = standing(values, self._names.whole)
                if is_saved and is_small and values.is_floating_point() and stands.records:
                    described = _described(self._names.buffer(path, leaf, module, order))
                    info = replace(described, role="buffer_check")
                    own.append((_OwnBuffer(module, leaf, info, stands.weight, values), values.detach()))
        any_bad = any_is_nonfinite([values for _, values in own])
        for buffer, values in own:
            if not (any_bad and any_is_nonfinite([values])):
                yield buffer

    def _scanned_buffers(self, step: int) -> Iterator[_Checked]:
        yield from self._current_buffers()
        yield from self._changed_buffers(step)

    def _changed_buffers(self, step: int) -> Iterator[_Checked]:
        """Buffers of the program's own that training has changed since they were last looked at, in an earlier step."""
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
        (id(named.parameter), ""), _described(named.weight), named.standing.weight, named.parameter
    )


def _described(info: TensorInfo) -> TensorInfo:
    return replace(
        info, name=f"{info.name}{_SUFFIX}", role="finite_check", collections=(tensors.FINITE_CHECKS,)
    )


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
