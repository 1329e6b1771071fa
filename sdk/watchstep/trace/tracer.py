"""Records every PyTorch operation of chosen steps, forward, backward and in the optimizer.

Operations are observed below autograd, by a dispatch mode. A backward function is attributed to the forward operation that created it by
autograd's sequence numbers, so a backward operation has the module and source line of the forward one. Activation checkpointing runs
forward passes within a backward pass; these have the phase ``recomputation``.

In host memory the compiled kernel checks each output at once and exactly. Where an output is not finite, the elements of the outputs and
inputs are counted. On other devices the smallest and largest element of each output is computed on the device, and read once at the end
of the step, so that tracing adds no synchronization.

Compiled regions run eagerly while a step is traced, because their operations cannot be observed otherwise. A step that is not traced
costs nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from watchstep.capture.steps.own_work import own_work
from watchstep.errors import ConfigError
from watchstep.kernels import native_kernel
from watchstep.pytorch import internals
from watchstep.pytorch.observable import ModuleHook
from watchstep.trace.call_stacks import CallStacks
from watchstep.trace.operations import (
    COLLECTIVES,
    Operation,
    Phase,
    TensorHealth,
    Trace,
    TracedTensor,
    TraceMode,
)
from watchstep.trace.tensor_health import (
    checksums_of,
    extremes,
    health_of,
    health_of_extremes,
    host_memory,
    is_checkable,
    is_on_host,
    values_of,
)

_OPERATION_BYTES = 400
"""Approximate memory of an operation's record."""
_TENSOR_BYTES = 200
_MAX_NUMBERS = 8
_MAX_DEPTH, _MAX_ITEMS = 4, 100
"""Limits of the arguments of a model in which tensors are named."""
_MAX_NAMED, _MAX_NAMED_WITHOUT_GRADIENTS = 10_000, 16
"""Maximum number of named arguments in a step, and the number after which those of passes without gradients are not named. Each name pins
a small block between the batches of an evaluation, which the system's allocator then cannot reuse as a whole."""


@dataclass(frozen=True)
class TraceConfig:
    """What a tracer records.

    Attributes:
        mode: what is recorded of each output.
        steps: numbers of the steps to trace; None for all.
        operations: regular expression that must match at the start of an operation's name, as ``aten.(log|sqrt)``; empty for all.
        modules: regular expression that must match at the start of a module's path; empty for all, and for operations outside of the model.
        dtypes: only operations with an output of one of these, as ``float16``; empty for all.
        ring_steps: number of traced steps that are kept; older ones are dropped.
        ring_bytes: approximate memory of the steps that are kept; older ones are dropped, and the operations of one step beyond it.
        checksums: also record a checksum of the bits of what each operation wrote, and of what it read if no operation wrote it before, of any dtype;
            and numeric arguments. `watchstep.trace.compare_traces` finds single bits by them. Waits for devices.
    """

    mode: TraceMode = TraceMode.CURT_HEALTH
    steps: Collection[int] | None = None
    operations: str = ""
    modules: str = ""
    dtypes: tuple[str, ...] = ()
    ring_steps: int = 2
    ring_bytes: int = 256 * 2**20
    checksums: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a value is invalid.
        """
        for name in ("operations", "modules"):
            try:
                re.compile(getattr(self, name))
            except re.error as error:
                raise ConfigError(
                    f"TraceConfig({name}={getattr(self, name)!r}): {error}", "use a valid regular expression"
                ) from None
        for name in ("ring_steps", "ring_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"TraceConfig({name}={getattr(self, name)})", "use a number from 1")
        unknown = [name for name in self.dtypes if not isinstance(getattr(torch, name, None), torch.dtype)]
        if unknown:
            raise ConfigError(f"TraceConfig(dtypes={unknown!r})", "use names of torch dtypes, as float16")


class Tracer:
    """Traces steps of a training.

    Example::

        tracer = Tracer(model)
        for batch in batches:
            with tracer.step():
                train(batch)
        trace = tracer.trace()
        print(render_diagnosis(trace, diagnose(trace)))
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        config: TraceConfig | None = None,
        *,
        finds_modules: bool = False,
        keeps_hooks: bool = False,
    ) -> None:
        """Create a tracer; nothing is observed until a step begins.

        Args:
            model: Its modules and parameters are named in the trace. None: operations have no module.
            config: What to record.
            finds_modules: Whether all modules of the process are followed instead, for a step that begins before there is a model. The first
                module with parameters that is called from outside of a module is the model; names in another such module begin with its class. Hooks on
                optimizers remain until the process ends, so that a step can end within one.
            keeps_hooks: Whether hooks on optimizers remain also with a model, so that steps can begin and end within one.

        Raises:
            ConfigError: This version of PyTorch lacks a private name that tracing needs.
        """
        if lacking := internals.lacks_for_traces():
            raise ConfigError(
                f"operations cannot be traced: PyTorch {torch.__version__} has no {lacking[0]}",
                "use a version of PyTorch that the page on frameworks lists",
            )
        self.config = config or TraceConfig()
        self._model = model
        self._found = _FoundModules() if finds_modules else None
        self._current: _StepTrace | None = None
        self._leave_eager: Callable[[], None] = _nothing
        self._keeps_hooks = finds_modules or keeps_hooks
        if self._keeps_hooks:
            _observe_optimizers(self)
        self._next_step = 0
        self._steps: deque[_StepTrace] = deque()
        self._stacks = CallStacks()
        self._operations = 0
        self._left_out = 0
        self._notes: dict[str, None] = {}

    @contextmanager
    def step(self, number: int | None = None) -> Iterator[None]:
        """Trace what runs in this block, if the step is chosen.

        Args:
            number: Number of the step. Default: one more than the last one, from 0.
        """
        step = self._next_step if number is None else number
        self._next_step = step + 1
        if self.config.steps is not None and step not in self.config.steps:
            yield
            return
        model = self._model if self._found is None else self._found.model
        recording = _StepTrace(step, self.config, self._stacks, self._operations, _NamedTensors(model))
        try:
            with ExitStack() as stack:
                stack.enter_context(
                    recording.modules(model, follows_optimizers=not self._keeps_hooks)
                    if self._found is None
                    else recording.found_modules(self._found)
                )
                if _compiles_nothing():
                    pass
                elif _eager.enter():
                    self._leave_eager = _once(_eager.leave)
                    stack.callback(self._leave_eager)
                else:
                    recording.notes.append(
                        "operations in compiled code are not observed by this version of PyTorch"
                    )
                stack.enter_context(recording)
                self._current = recording
                try:
                    yield
                except BaseException:
                    recording.raised = True
                    raise
        finally:
            self._current = None
            recording.finish()
            self._operations = recording.next_index
            self._left_out += recording.left_out
            self._notes.update(dict.fromkeys(recording.notes))
            self._steps.append(recording)
            self._drop_old()

    @property
    def current(self) -> _StepTrace | None:
        """The step that runs; None if none does."""
        return self._current

    def stop(self, *, discards: bool = False) -> None:
        """Record no more of the step that runs, whose block ends later. Any thread may call this.

        Args:
            discards: Whether what was recorded of the step is dropped, and compiled code is no longer kept from running.
        """
        if (current := self._current) is not None:
            current.stop(discards=discards)
        if discards:
            self.leave_eager()

    def leave_eager(self) -> None:
        """Let compiled code run although the block of the step that runs has not ended. Any thread may call this."""
        self._leave_eager()

    def release_model(self) -> None:
        """Drop the model, once no step follows."""
        self._model = None

    def trace(self) -> Trace:
        """Return the steps that are kept."""
        return self._trace_of(tuple(self._steps), self._left_out, tuple(self._notes))

    def take(self) -> Callable[[], Trace]:
        """Remove the steps that are kept. Returns a function that returns their trace, for any thread."""
        taken = functools.partial(self._trace_of, tuple(self._steps), self._left_out, tuple(self._notes))
        self._steps.clear()
        self._left_out, self._notes = 0, {}
        return taken

    @property
    def kept_bytes(self) -> int:
        """Approximate memory of the steps that are kept."""
        return sum(step.bytes for step in self._steps)

    def _trace_of(self, steps: tuple[_StepTrace, ...], left_out: int, notes: tuple[str, ...]) -> Trace:
        operations = [operation for step in steps for operation in step.operations]
        return Trace(
            operations,
            self._stacks.resolved(),
            self._stacks.sources(),
            self.config.mode,
            tuple(loss for step in steps for loss in step.losses),
            left_out,
            f"torch {torch.__version__}",
            notes,
            tuple(step.number for step in steps if step.raised),
        )

    def _drop_old(self) -> None:
        while len(self._steps) > 1 and (
            len(self._steps) > self.config.ring_steps
            or sum(step.bytes for step in self._steps) > self.config.ring_bytes
        ):
            self._left_out += self._steps.popleft().count


def _nothing() -> None:
    return None


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls another one the first time."""
    remaining = [call]

    def first() -> None:
        try:
            pending = remaining.pop()  # in one operation, as threads may call this at the same time
        except IndexError:
            return
        pending()

    return first


_observing: list[weakref.ref[Tracer]] = []
_observed: list[Any] = []


def _observe_optimizers(tracer: Tracer) -> None:
    """Follow when optimizers begin and end a step, until the tracer is gone.

    Hooks for all tracers are added once and remain: PyTorch raises if one is added while it calls those of a step, as where a second training is found at its first step.
    """
    _observing[:] = [reference for reference in _observing if reference() is not None]
    _observing.append(weakref.ref(tracer))
    if not _observed:
        _observed.append(register_optimizer_step_pre_hook(_optimizer_begins))
        _observed.append(register_optimizer_step_post_hook(_optimizer_ends))


def _running() -> list[_StepTrace]:
    tracers = [reference() for reference in tuple(_observing)]
    return [tracer.current for tracer in tracers if tracer is not None and tracer.current is not None]


def _optimizer_begins(optimizer: Any, *_: Any) -> None:
    for recording in _running():
        recording.optimizer_begins(optimizer)


def _optimizer_ends(*_: Any) -> None:
    for recording in _running():
        recording.optimizer_ends()


def _compiles_nothing() -> bool:
    """Whether the environment makes `torch.compile` return the function itself. PyTorch's compiler, which takes long to import, is then not needed."""
    return os.environ.get("TORCH_COMPILE_DISABLE") == "1"


class _EagerStance:
    """Compiled code runs eagerly while any step of the process is traced. PyTorch's stance is one for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps = 0
        self._stance: Any = None

    def enter(self) -> bool:
        """Begin a step. Returns whether this version of PyTorch can run compiled code eagerly."""
        if not hasattr(torch.compiler, "set_stance"):  # since PyTorch 2.6
            return False
        with self._lock:
            self._steps += 1
            if self._steps == 1:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
        return True

    def leave(self) -> None:
        """End a step."""
        with self._lock:
            self._steps -= 1
            if not self._steps:
                self._stance.__exit__(None, None, None)
                self._stance = None


_eager = _EagerStance()


_AUTOGRAD = tuple(str(Path(torch.autograd.__file__).with_name(name)) for name in ("graph.py", "__init__.py"))


def _is_engine(frame: FrameType | None) -> bool:
    """Whether autograd's engine runs an operation by itself, and no hook or function of the program. It runs in threads without Python, too."""
    return frame is None or frame.f_code.co_filename in _AUTOGRAD


class _NamedTensors:
    """Names of parameters, buffers and the model's arguments by their memory."""

    def __init__(self, model: nn.Module | None) -> None:
        self.parameters: dict[int, str] = {}
        self._models: list[weakref.ref[nn.Module]] = []
        self.by_storage: dict[int, str] = {}
        self.arguments = 0  # number of those that are no parameters or buffers
        # A weak reference keeps the address, and not the memory, so that no address is used again within the step.
        self._storages: list[Any] = []
        if model is not None:
            self.add_model(model)

    def add_model(self, model: nn.Module) -> None:
        """Name the parameters and buffers of a model."""
        self._models.append(weakref.ref(model))
        for name, parameter in model.named_parameters():
            self.parameters[id(parameter)] = name
            self._add(name, parameter)
        for name, buffer in model.named_buffers():
            self._add(name, buffer)

    def current(self) -> Iterator[tuple[str, Tensor]]:
        """Return the parameters and buffers that the models have now, with their names."""
        for reference in self._models:
            if (model := reference()) is not None:
                yield from model.named_parameters()
                yield from model.named_buffers()

    def _add(self, name: str, tensor: Tensor) -> None:
        key = _storage_key(tensor)
        if key is not None and key not in self.by_storage:
            self.by_storage[key] = name
            self._storages.append(internals.storage_reference.value(tensor.untyped_storage()))

    def add_nested(self, name: str, value: Any, depth: int = 0) -> None:
        """Name the tensors in an argument or result of the model, to a limited depth and number."""
        if isinstance(value, Tensor):
            self._add(name, value)
        elif depth >= _MAX_DEPTH:
            return
        elif isinstance(value, Mapping):
            for key, item in itertools.islice(value.items(), _MAX_ITEMS):
                self.add_nested(f"{name}[{key}]", item, depth + 1)
        elif isinstance(value, (list, tuple)):
            for place, item in enumerate(value[:_MAX_ITEMS]):
                self.add_nested(f"{name}[{place}]", item, depth + 1)


class _FoundModules:
    """Names of modules that are found when they are called.

    Attributes:
        model: the first one with parameters that was called from outside of a module; None before.
    """

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self._paths: MutableMapping[nn.Module, str] = internals.weak_id_dictionary.value()

    def path_of(self, module: nn.Module, *, is_outermost: bool) -> str:
        """Return the name of a module that is being called."""
        path = self._paths.get(module)
        if path is not None:
            return path
        prefix = type(module).__name__
        if not is_outermost:
            return prefix
        if self.model is None and any(True for _ in module.parameters()):
            self.model, prefix = module, ""
        for name, inner in module.named_modules():
            self._paths.setdefault(inner, f"{prefix}.{name}".strip("."))
        return self._paths[module]


def _storage_key(tensor: Tensor) -> int | None:
    try:
        storage = tensor.untyped_storage()
    except Exception:  # noqa: BLE001 - sparse, lazy and other tensors without one memory raise various exceptions
        return None
    return internals.address_of(storage)


@dataclass(frozen=True)
class _Schema:
    """What the schema of an operation says about its arguments and results.

    Attributes:
        name: e.g. ``aten.log.default``.
        written: positions of arguments that it changes.
        written_names: names of keyword arguments that it changes.
        is_view: whether its results only show memory of arguments.
        is_uninitialized: whether its results have no values yet.
        is_constant: whether it makes a tensor of numbers of the program.
        is_ignored: whether it computes nothing.
        has_results: whether its results are new tensors, although it changes arguments.
        changes_statistics: whether it changes running statistics in training, which its schema does not state.
    """

    name: str
    written: tuple[int, ...]
    written_names: tuple[str, ...]
    is_view: bool
    is_uninitialized: bool
    is_constant: bool
    is_ignored: bool
    has_results: bool
    changes_statistics: bool

    @classmethod
    def of(cls, function: Any) -> _Schema:
        schema = internals.schema_of(function)
        arguments = schema.arguments
        written = [
            (place, argument)
            for place, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        returns = schema.returns
        base = schema.name.rpartition("::")[2]
        return cls(
            str(function),
            tuple(place for place, argument in written if not argument.kwarg_only),
            tuple(argument.name for _, argument in written),
            bool(returns) and not written and all(each.alias_info is not None for each in returns),
            base.startswith(("empty", "new_empty")) or base in {"resize_", "set_"},
            base == "lift_fresh",
            str(function).startswith(("profiler.", "prim.", "prims.device")),
            any(each.alias_info is None for each in returns),
            base in _CHANGING_STATISTICS and "out" not in schema.overload_name,
        )


_MOST_SAMPLES = 4096


def _may_be_of_samples(tensor: Tensor) -> bool:
    """Return whether a result may have one number for each sample of a batch, such as losses."""
    return (
        tensor.is_floating_point() and tensor.dim() > 0 and 1 < tensor.numel() == len(tensor) <= _MOST_SAMPLES
    )


_CHANGING_STATISTICS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
_STATISTICS, _TRAINING = slice(3, 5), 5
"""Places of the running statistics, and of whether they change, among the arguments of these operations."""

_schemas: dict[Any, _Schema] = {}


def _written(schema: _Schema, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> list[Tensor]:
    if not schema.written and not schema.written_names and not schema.changes_statistics:
        return _results(result)
    changed = _changed(schema, args, kwargs)
    return _results(result) + changed if schema.has_results else changed


def _changed(schema: _Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation changes."""
    values = [args[place] for place in schema.written if place < len(args)]
    values.extend(kwargs[name] for name in schema.written_names if name in kwargs)
    if schema.changes_statistics and len(args) > _TRAINING and args[_TRAINING]:
        values.extend(args[_STATISTICS])
    return _tensors_in(values)


def _results(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return _tensors_in(result) if isinstance(result, (list, tuple)) else []


def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found


def _has_infinite_number(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, float) and not math.isfinite(value) for value in (*args, *kwargs.values()))


def _numbers_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, ...]:
    numbers = (value for value in (*args, *kwargs.values()) if type(value) in {int, float})
    return tuple(
        float(value) for value in itertools.islice(numbers, _MAX_NUMBERS) if abs(value) <= sys.float_info.max
    )


def _text_of(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:500] if lines else ''}"


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(slots=True)
class _Raw:
    """An operation as it is recorded. Conversion to an `Operation` takes longer, and waits until the trace is read.

    Attributes:
        index: its position among all operations.
        schema: of the operation.
        phase, module, node: as in `Operation`.
        forward: place of the forward operation; None if unknown.
        stack: number of its stack.
        first: place of its first tensor in `_TensorTable`; inputs come first.
        inputs: number of inputs.
        outputs: number of outputs.
        infinite_argument: as in `Operation`.
        error: as in `Operation`.
        names: names of outputs with a name of their own, by position.
        numbers: as in `Operation`.
        input_health: of each input, where an output is not finite.
        output_health: of each output, where it was counted.
        values: of each output, in the mode with full tensors.
    """

    index: int
    schema: _Schema
    phase: Phase
    module: str
    node: str
    forward: int | None
    stack: int
    first: int
    inputs: int
    outputs: int
    infinite_argument: bool
    error: str
    names: dict[int, str] | None = None
    numbers: tuple[float, ...] = ()
    input_health: list[TensorHealth | None] | None = None
    output_health: list[TensorHealth | None] | None = None
    values: list[Any] | None = None

    @property
    def first_output(self) -> int:
        """Place of its first output in `_TensorTable`."""
        return self.first + self.inputs


class _TensorTable:
    """Tensors that operations read and wrote, in order. One object for each would make Python collect garbage several times in a step.

    Attributes:
        ids, shapes, dtypes, devices: of each.
        flags: whether each is not finite; None if not checked.
        checksums: place → checksum, where it was computed.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.shapes: list[torch.Size] = []
        self.dtypes: list[torch.dtype] = []
        self.devices: list[torch.device] = []
        self.flags: list[bool | None] = []
        self.checksums: dict[int, int] = {}
        self._known_shapes: dict[torch.Size, torch.Size] = {}

    def add(self, number: int, tensor: Tensor) -> None:
        """Add a tensor.

        Args:
            number: its id.
            tensor: the tensor.
        """
        shape = tensor.shape
        self.ids.append(number)
        self.shapes.append(self._known_shapes.setdefault(shape, shape))
        self.dtypes.append(tensor.dtype)
        self.devices.append(tensor.device)
        self.flags.append(None)


class _RunningModules(threading.local):
    """Paths of the modules whose forward passes run in this thread, the innermost last; and the health of what an operation changes before it.

    On a device, where that is read later, its extremes.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.before: dict[int, TensorHealth] = {}
        self.extremes: dict[int, Tensor] = {}


_DispatchMode: Any = internals.dispatch_mode_class.value


class _StepTrace(_DispatchMode):  # type: ignore[misc]
    """The operations of one step while it runs."""

    supports_higher_order_operators = True

    def __init__(
        self, step: int, config: TraceConfig, stacks: CallStacks, first_index: int, names: _NamedTensors
    ) -> None:
        super().__init__()
        self.next_index = first_index
        self.left_out = 0
        self.bytes = 0
        self.notes: list[str] = []
        self.number = step
        self.raised = False
        self._step = step
        self._config = config
        self._mode = config.mode
        self._stacks = stacks
        self._names = names
        self._records: list[_Raw] = []
        self._tensors = _TensorTable()
        self._examined: dict[int, int] = {}  # id → place in the table of the input that a device has examined
        self._late_health: dict[
            int, TensorHealth
        ] = {}  # place in the table → what a device reported at the end
        self._loss_records: list[tuple[int, int]] = []
        self._running = _RunningModules()
        self._optimizers = 0
        self._is_checking = False
        self._is_stopped = False
        self._process = os.getpid()
        self._optimizer_stack: int | None = None
        self._updated: dict[
            int, tuple[Tensor, int, int]
        ] = {}  # id → parameter, place of its last writer, place of its output
        self._flags: dict[int, bool | None] = {}  # id → whether the last checked values are not finite
        self._bad: set[int] = set()  # ids of memory that may have values that are not finite
        self._states: dict[
            int, tuple[str, bool | Tensor | None]
        ] = {}  # id → name of an optimizer's state, and whether it is not finite when its step begins; on a device, its extremes
        self._of_gradients: set[int] = set()  # ids of gradients, and of what the program computes of them
        self._summed: set[int] = set()  # ids whose checksum is recorded where they were written or first read
        self._last_sequence = internals.sequence_number.value()
        self._forward_of: dict[int, int] = {}  # autograd's sequence number → place in records
        self._ids: dict[int, int] = {}
        self._id_names: dict[int, str] = {}
        self._state_names: dict[int, str] = {}  # as above, of the optimizer's state
        self._next_id = 0
        self._was_backward = False
        self._storages: dict[int, Any] = {}  # keeps the addresses of freed memory from being used again
        self._matches_operation = re.compile(config.operations).match if config.operations else None
        self._matches_module = re.compile(config.modules).match if config.modules else None
        self._native = native_kernel.load()
        self._pending: list[tuple[int, Tensor]] = []  # place in the table, extremes
        self._lock = threading.RLock()  # backward passes on several devices run in several threads

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled while a step is traced, so PyTorch need not wrap the handler, which costs more than the handler's own work.
        return False

    @property
    def operations(self) -> list[Operation]:
        """The operations, once the step has ended."""
        return [self._converted(record) for record in self._records]

    @property
    def count(self) -> int:
        """Number of operations."""
        return len(self._records)

    @property
    def losses(self) -> list[tuple[int, int]]:
        """Tensors whose backward pass began, as in `Trace`."""
        return self._loss_records

    @contextmanager
    def modules(self, model: nn.Module | None, *, follows_optimizers: bool = True) -> Iterator[None]:
        """Follow which module runs, and whether an optimizer does."""
        handles: list[Any] = []
        try:
            for path, module in model.named_modules() if model is not None else ():
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # takes no such hooks; its operations belong to the module around it
                # The program may copy and save its model meanwhile: a copy of these hooks does nothing.
                enter, leave = ModuleHook(self._enter(path)), ModuleHook(self._leave(path))
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
                handles.append(module.register_forward_hook(leave, always_call=True))
            if follows_optimizers:
                handles.append(register_optimizer_step_pre_hook(self.optimizer_begins))
                handles.append(register_optimizer_step_post_hook(self.optimizer_ends))
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def found_modules(self, found: _FoundModules) -> Iterator[None]:
        """Follow which modules run, without a model."""

        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            model = found.model
            path = found.path_of(module, is_outermost=not self._running.paths)
            if model is None and found.model is not None:
                self._names.add_model(found.model)
            if not self._running.paths and not path:
                self._name_arguments(args, {})
            self._running.paths.append(path)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._leave(found.path_of(module, is_outermost=False))(module, args, output)

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _name_ids(self) -> None:
        """Name tensors also in operations that ran before their names were known, such as those that initialized parameters."""
        for key, name in self._names.by_storage.items():
            if key in self._ids:
                self._id_names.setdefault(self._ids[key], name)

    def _name_current(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Name the memory that parameters, buffers and gradients have now: the program may have replaced it, or written to it."""
        gradients: dict[int, list[tuple[str, torch.Size]]] = {}
        for name, tensor in tensors:
            if (number := self._id_of_written(tensor)) is not None:
                self._id_names.setdefault(number, name)
            gradient = tensor.grad if tensor.is_leaf else None
            if gradient is not None and (number := self._id_of_written(gradient)) is not None:
                gradients.setdefault(number, []).append((f"{name}:gradient", gradient.shape))
        for record in reversed(self._records):
            if not gradients:
                break
            if record.phase == "optimizer" or (record.schema.is_view and not record.names):
                continue
            for position in range(record.outputs):
                entry = record.first_output + position
                number, shape = self._tensors.ids[entry], self._tensors.shapes[entry]
                if (named := gradients.get(number)) is None:
                    continue
                # Gradients may be parts of one memory.
                choice = next((each for each in named if each[1] == shape), named[0])
                is_named = record.names is not None and position in record.names
                if not is_named:
                    record.names = {**(record.names or {}), position: choice[0]}
                # What was written before the gradient was accumulated, or written as a whole, is no part of it.
                if is_named or shape.numel() >= choice[1].numel():
                    named.remove(choice)
                    if not named:
                        del gradients[number]

    def _id_of_written(self, tensor: Tensor) -> int | None:
        """Return the id of a tensor's memory; None if no operation of the step wrote it."""
        key = _storage_key(tensor)
        number = self._ids.get(key) if key is not None else None
        return number if number in self._flags else None

    def _name_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        limit = _MAX_NAMED if torch.is_grad_enabled() else _MAX_NAMED_WITHOUT_GRADIENTS
        if self._is_stopped or self._names.arguments >= limit:
            return
        before = len(self._names.by_storage)
        for place, argument in enumerate(args):
            self._names.add_nested(f"input[{place}]", argument)
        for name, argument in kwargs.items():
            self._names.add_nested(f"input[{name}]", argument)
        self._names.arguments += len(self._names.by_storage) - before
        if self._config.checksums:
            self._name_ids()

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._running.paths and not path:
                self._name_arguments(args, kwargs)
            self._running.paths.append(path)

        return enter

    def _leave(self, path: str) -> Callable[..., None]:
        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            # A forward pass that raised leaves the paths of inner modules whose hooks were not called.
            while self._running.paths and self._running.paths.pop() != path:
                pass
            if not self._running.paths and not path:
                with self._lock:
                    if not self._is_stopped:
                        self._name_outputs(output)

        return leave

    def _name_outputs(self, output: Any) -> None:
        names = _NamedTensors(None)
        names.add_nested("output", output)
        named = {self._ids[key]: name for key, name in names.by_storage.items() if key in self._ids}
        for record in reversed(self._records):
            if not named:
                break
            if record.schema.is_view:
                continue
            for position in range(record.outputs):
                if (name := named.pop(self._tensors.ids[record.first_output + position], None)) is not None:
                    record.names = {**(record.names or {}), position: name}

    def optimizer_begins(self, optimizer: Any, *_: Any) -> None:
        """Handle the start of an optimizer's step."""
        if self._is_stopped:
            return
        try:
            with self._lock:
                self._examine_optimizer(optimizer)
        except Exception as fault:  # noqa: BLE001 - the recorder's faults never reach training
            self.notes.append(f"gradients: not named: {type(fault).__name__}: {fault}")
        self._optimizers += 1
        if type(optimizer).__module__.startswith("torch."):
            # All frames within it are hidden, so its operations have one stack.
            self._optimizer_stack = self._stacks.current(sys._getframe(1))  # noqa: SLF001 - the documented way to a frame

    def _examine_optimizer(self, optimizer: Any) -> None:
        """Name what an optimizer is about to read, and check its state: its arithmetic is not checked, so that bad values cannot be found later."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = self._names.parameters
        named = [(names[id(each)], each) for each in parameters if id(each) in names]
        self._name_current(named)
        if not self._mode.has_health:
            return
        self._is_checking = True
        try:
            for name, parameter in named:
                state = optimizer.state.get(parameter)
                for kind, tensor in state.items() if isinstance(state, Mapping) else ():
                    key = _storage_key(tensor) if isinstance(tensor, Tensor) and tensor.dim() else None
                    if key is None or not is_checkable(tensor):
                        continue
                    number = self._id_of_input(key)
                    if number not in self._flags:
                        self._states[number] = (
                            f"{name}:{kind}",
                            self._is_bad_on_host(tensor) if is_on_host(tensor) else extremes(tensor),
                        )
        finally:
            self._is_checking = False

    def optimizer_ends(self, *_: Any) -> None:
        """Handle the end of an optimizer's step."""
        if self._is_stopped:
            return
        self._optimizers = max(0, self._optimizers - 1)  # a step may begin within that of an optimizer
        self._optimizer_stack = None
        try:
            self._check_updates()
        except Exception as fault:  # noqa: BLE001 - the recorder's faults never reach training
            self.notes.append(f"updates: not checked: {type(fault).__name__}: {fault}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and record it."""
        named = kwargs or {}
        # Operations of the tracer and of the recorder, those of a forked process, and operators that run other operations.
        if (
            self._is_checking
            or self._is_stopped
            or own_work.depth
            or os.getpid() != self._process
            or internals.schema_of(func) is None
        ):
            return func(*args, **named)
        self._running.before = self._health_before(func, args, named)
        try:
            result = func(*args, **named)
        except Exception as error:
            self._observe(func, args, named, None, error)
            raise
        self._observe(func, args, named, result, None)
        return result

    def _health_before(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[int, TensorHealth]:
        """Return the health of tensors that an operation is about to change, by id, unless they are finite because of what the step wrote to them.

        Afterwards it is too late: what they contain then, the operation wrote.
        """
        self._running.extremes = {}
        schema = _schemas.get(func) or _schemas.setdefault(func, _Schema.of(func))
        changes = schema.written or schema.written_names or schema.changes_statistics
        if not changes or self._optimizers or not self._mode.has_health:
            return {}
        before: dict[int, TensorHealth] = {}
        try:
            for tensor in _changed(schema, args, kwargs):
                key = _storage_key(tensor)
                number = self._ids.get(key) if key is not None else None
                is_known = number is not None and number in self._flags and number not in self._bad
                if is_known or not is_checkable(tensor):
                    continue
                self._is_checking = True
                if not is_on_host(tensor):
                    if key in self._names.by_storage:
                        self._running.extremes[id(tensor)] = extremes(tensor)
                else:
                    health = health_of(tensor, counts=False)
                    if health is not None:
                        before[id(tensor)] = health
        except Exception as fault:  # noqa: BLE001 - the recorder's faults never reach training
            self.notes.append(f"{func}: not checked: {type(fault).__name__}: {fault}")
        finally:
            self._is_checking = False
        return before

    def _observe(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, error: Exception | None
    ) -> None:
        try:
            with self._lock:
                if not self._is_stopped:
                    self._record(func, args, kwargs, result, error)
        except Exception as fault:  # noqa: BLE001 - the recorder's faults never reach training
            self.notes.append(f"{func}: not recorded: {type(fault).__name__}: {fault}")

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, error: Exception | None
    ) -> None:
        schema = _schemas.get(func)
        if schema is None:
            schema = _schemas[func] = _Schema.of(func)
        if schema.is_ignored:
            return
        frame = sys._getframe(2).f_back  # noqa: SLF001 - the documented way to a frame
        phase, module, node, forward, gradient = self._where(frame)
        index = self.next_index
        self.next_index += 1
        written = _written(schema, args, kwargs, result)
        if self._is_left_out(schema, module, written):
            self.left_out += 1
            return
        read = _tensors_in(args)
        if kwargs:
            read += _tensors_in(kwargs.values())
        place = len(self._records)
        table, first = self._tensors, len(self._tensors.ids)
        keys = [_storage_key(tensor) for tensor in read]
        finite_before = self._add_read(read, keys, phase)
        first_output = first + len(read)
        if phase == "forward" and not module and self._computes_of_gradients(read, table.ids[first:]):
            phase = "gradients"
        is_bad = False
        for position, tensor in enumerate(written):
            key = _storage_key(tensor)
            # An operation allocates what it returns, unless that shares memory with an input.
            number = self._ids[key] if key is not None and key in keys else self._new_id(key)
            table.add(number, tensor)
            if phase == "optimizer":
                if number in self._id_names:
                    self._updated[number] = (tensor, place, position)
                continue
            if schema.is_view:
                flag = self._flags.get(number) if gradient else None
            else:
                flag = self._flags[number] = (
                    None if schema.is_uninitialized else self._is_bad(tensor, first_output + position)
                )
            table.flags[-1] = flag
            is_bad = is_bad or flag is True
            self._note_memory(number, tensor, flag)
            if gradient or (phase == "gradients" and number not in self._id_names):
                self._of_gradients.add(number)
        record = _Raw(
            index,
            schema,
            phase,
            module,
            node,
            forward,
            self._stack(phase, forward, frame),
            first,
            len(read),
            len(written),
            _has_infinite_number(args, kwargs),
            "" if error is None else _text_of(error),
            dict.fromkeys(range(len(written)), gradient) if gradient else None,
        )
        if is_bad or error is not None:
            self._add_inputs(record, read, finite_before)
        if is_bad or (self._mode.has_health and self._mode is not TraceMode.CURT_HEALTH):
            self._add_details(record, written)
        if self._config.checksums:
            self._add_checksums(record, read, written, gradient)
            record.numbers = _numbers_in(args, kwargs)
        self._records.append(record)
        self._note_phase(phase, place)
        self.bytes += _OPERATION_BYTES + _TENSOR_BYTES * (len(read) + len(written))

    def _add_read(self, read: list[Tensor], keys: list[int | None], phase: Phase) -> list[bool]:
        """Add inputs to the table. Returns for each whether its memory is finite because of what the step wrote to it before."""
        table, before = self._tensors, self._running.before
        finite_before = []
        for tensor, key in zip(read, keys, strict=True):
            number = self._id_of_input(key)
            table.add(number, tensor)
            if before and id(tensor) in before:
                table.flags[-1] = not before[id(tensor)].is_finite
            if phase == "optimizer" and number in self._states:
                self._note_state(number, len(table.ids) - 1)
            finite_before.append(self._flags.get(number) is False and number not in self._bad)
            if number in self._id_names and number not in self._flags:
                self._check_on_device(number, tensor, len(table.ids) - 1)
        return finite_before

    def _note_state(self, number: int, entry: int) -> None:
        """Note what is known of an optimizer's state where it is first read."""
        name, is_bad = self._states.pop(number)
        self._state_names[number] = name
        if isinstance(is_bad, Tensor):
            self._pending.append((entry, is_bad))
        else:
            self._tensors.flags[entry] = is_bad

    def _computes_of_gradients(self, read: list[Tensor], ids: list[int]) -> bool:
        """Whether an operation outside of modules computes something of gradients that is no part of a loss."""
        if self._of_gradients.isdisjoint(ids):
            return False
        return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in read))

    def _note_memory(self, number: int, tensor: Tensor, flag: bool | None) -> None:
        """Note whether memory has values that are not finite, after a part of it was written."""
        if flag:
            self._bad.add(number)
        elif flag is False and number in self._bad:
            is_whole = tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
            self._bad.difference_update((number,) if is_whole else ())

    def _add_inputs(self, record: _Raw, read: list[Tensor], finite_before: list[bool]) -> None:
        """Count the elements of inputs; of those that the operation has changed only what is known from before."""
        table = self._tensors
        outputs = table.ids[record.first_output : record.first_output + record.outputs]
        changed = set() if record.schema.is_view else set(outputs)
        record.input_health = []
        for position, tensor in enumerate(read):
            entry = record.first + position
            health = self._running.before.get(id(tensor))
            if health is None and table.ids[entry] not in changed:
                health = health_of(tensor)
            elif finite_before[position]:
                table.flags[entry] = False
            record.input_health.append(None if table.flags[entry] is False else health)

    def _note_phase(self, phase: Phase, place: int) -> None:
        """Find the losses, and attribute backward functions to forward operations."""
        if phase == "backward":
            if not self._was_backward and place:
                # Autograd begins with the gradient of the loss, of ones.
                before = self._records[place - 1]
                if before.schema.name == "aten.ones_like.default" and before.inputs:
                    self._loss_records.append((self._tensors.ids[before.first], before.index))
        elif phase != "optimizer":
            self._note_sequence(place)
        self._was_backward = phase in {"backward", "recomputation"}

    def _is_left_out(self, schema: _Schema, module: str, written: list[Tensor]) -> bool:
        if self._matches_operation is not None and not self._matches_operation(schema.name):
            return True
        if self._matches_module is not None and module and not self._matches_module(module):
            return True
        if self._config.dtypes and not any(_name_of(each.dtype) in self._config.dtypes for each in written):
            return True
        return self.bytes > self._config.ring_bytes

    def _where(self, frame: FrameType | None) -> tuple[Phase, str, str, int | None, str]:
        """Phase, module, backward function, place of its forward operation, and the name of a gradient that is being accumulated.

        Args:
            frame: What called the operation.
        """
        node = internals.current_node.value()
        module = self._running.paths[-1] if self._running.paths else ""
        if node is None:
            # A closure runs with gradients within an optimizer's step; the optimizer's own arithmetic runs without.
            is_update = self._optimizers > 0 and not torch.is_grad_enabled()
            return "optimizer" if is_update else "forward", module, "", None, ""
        if self._running.paths:
            return "recomputation", module, "", None, ""
        name = str(node.name())
        if name.endswith("AccumulateGrad"):
            parameter = self._names.parameters.get(id(getattr(node, "variable", None)), "")
            # A hook may compute other things of the gradient.
            gradient = f"{parameter}:gradient" if parameter and _is_engine(frame) else ""
            return "backward", parameter.rpartition(".")[0], "AccumulateGrad", None, gradient
        forward = self._forward_of.get(internals.number_of(node))
        module = "" if forward is None else self._records[forward].module
        if not _is_engine(frame) and not isinstance(node, internals.python_backward.value):
            forward = None  # a hook computes no gradient of the forward operation
        return "backward", module, name, forward, ""

    def _note_sequence(self, place: int) -> None:
        """Attribute the backward functions that were created since the last operation to this one."""
        sequence = internals.sequence_number.value()
        for number in range(self._last_sequence, sequence):
            self._forward_of[number] = place
        self._last_sequence = sequence

    def _id_of_input(self, key: int | None) -> int:
        number = self._ids.get(key) if key is not None else None
        if number is not None:
            return number
        number = self._new_id(key)
        if key is not None and (name := self._names.by_storage.get(key)):
            self._id_names[number] = name
        return number

    def _new_id(self, key: int | None) -> int:
        """Return an id for memory that is seen for the first time, or was allocated at an address that was used before."""
        number = self._next_id
        self._next_id += 1
        if key is not None:
            self._ids[key] = number
        return number

    def _stack(self, phase: Phase, forward: int | None, frame: FrameType | None) -> int:
        if forward is not None and _is_engine(frame):
            return self._records[forward].stack
        if phase == "optimizer" and self._optimizer_stack is not None:
            return self._optimizer_stack
        return self._stacks.current(frame)

    def _check_updates(self) -> None:
        """Check each parameter once after its optimizer's step: the arithmetic before it is several times as large."""
        self._is_checking = True
        try:
            self._examine_updates()
        finally:
            self._is_checking = False

    def _examine_updates(self) -> None:
        for tensor, place, position in self._updated.values():
            record = self._records[place]
            flag = self._tensors.flags[record.first_output + position] = self._is_bad(
                tensor, record.first_output + position
            )
            if flag:
                record.output_health = record.output_health or [None] * record.outputs
                record.output_health[position] = health_of(tensor, counts=False)
        self._updated = {}

    def _is_bad(self, tensor: Tensor, entry: int) -> bool | None:
        """Whether a tensor is not finite; None if it is not checked, or a device's result is pending.

        Args:
            tensor: The tensor.
            entry: Its place in the table.
        """
        if not self._mode.has_health or not is_checkable(tensor):
            return None
        if not is_on_host(tensor):
            self._pending.append((entry, extremes(tensor)))
            return None
        return self._is_bad_on_host(tensor)

    def _is_bad_on_host(self, tensor: Tensor) -> bool | None:
        memory = host_memory(tensor) if self._native is not None else None
        if memory is not None and self._native is not None:
            return self._native.is_nonfinite(memory)
        health = health_of(tensor, counts=False)
        return None if health is None else not health.is_finite

    def _check_on_device(self, number: int, tensor: Tensor, entry: int) -> None:
        """Check a parameter, buffer or argument of the model when it is first read, as it cannot be counted once a result is known to be bad."""
        if self._mode.has_health and not is_on_host(tensor) and is_checkable(tensor):
            self._flags[number] = None
            self._examined[number] = entry
            before = self._running.extremes.get(id(tensor))
            self._pending.append((entry, extremes(tensor) if before is None else before))

    def _add_details(self, record: _Raw, written: list[Tensor]) -> None:
        mode = self._mode
        counts = mode not in {TraceMode.CURT_HEALTH, TraceMode.CONCISE_HEALTH}
        flags = self._tensors.flags[record.first_output : record.first_output + record.outputs]
        record.output_health = [
            None
            if flag is None or (mode is TraceMode.CURT_HEALTH and not flag)
            else health_of(tensor, counts=counts, statistics=mode is TraceMode.STATISTICS)
            for tensor, flag in zip(written, flags, strict=True)
        ]
        if record.schema.is_view:
            return
        if mode is TraceMode.FULL_TENSOR:
            record.values = [values_of(tensor) for tensor in written]
        elif mode is TraceMode.STATISTICS and record.phase == "forward":
            record.values = [values_of(tensor) if _may_be_of_samples(tensor) else None for tensor in written]
        if record.values is not None:
            self.bytes += sum(values.nbytes for values in record.values if values is not None)

    def _add_checksums(self, record: _Raw, read: list[Tensor], written: list[Tensor], gradient: str) -> None:
        """Record checksums of new outputs, and of inputs that nothing in this step wrote."""
        for tensor in (*read, *written):
            key = _storage_key(tensor)
            if key is not None and key not in self._storages:
                self._storages[key] = internals.storage_reference.value(tensor.untyped_storage())
        if record.schema.name.startswith("aten.set_."):
            return  # shows memory that something else has filled, such as a data loader's worker
        ids = self._tensors.ids
        if record.schema.name.startswith(COLLECTIVES):
            # It may still be running. Its result is recorded where it is read.
            self._summed.difference_update(ids[record.first : record.first_output + record.outputs])
            return
        outputs = ids[record.first_output : record.first_output + record.outputs]
        places, tensors = [], []
        for place, tensor in enumerate(read, record.first):
            if ids[place] not in self._summed and ids[place] not in outputs:
                places.append(place)
                tensors.append(tensor)
        if not record.schema.is_view or gradient:
            places.extend(range(record.first_output, record.first_output + record.outputs))
            tensors.extend(written)
        self._summed.update(outputs if record.schema.is_uninitialized else (ids[place] for place in places))
        if record.schema.is_uninitialized:
            return
        for place, checksum in zip(places, checksums_of(tensors), strict=True):
            if checksum is not None:
                self._tensors.checksums[place] = checksum

    def _converted(self, record: _Raw) -> Operation:
        forward = record.forward
        return Operation(
            record.index,
            self._step,
            record.schema.name,
            record.phase,
            record.module,
            tuple(
                self._converted_tensor(record.first + position, None, self._health_of_input(record, position))
                for position in range(record.inputs)
            ),
            tuple(
                self._converted_tensor(
                    record.first_output + position,
                    (record.names or {}).get(position),
                    _item(record.output_health, position),
                    _item(record.values, position),
                )
                for position in range(record.outputs)
            ),
            record.stack,
            record.node,
            None if forward is None else self._records[forward].index,
            is_view=record.schema.is_view,
            infinite_argument=record.infinite_argument,
            is_constant=record.schema.is_constant,
            error=record.error,
            numbers=record.numbers,
        )

    def _health_of_input(self, record: _Raw, position: int) -> TensorHealth | None:
        health: TensorHealth | None = _item(record.input_health, position)
        # A parameter is unchanged until its optimizer's step.
        if health is None and record.phase != "optimizer":
            examined = self._examined.get(self._tensors.ids[record.first + position], -1)
            health = self._late_health.get(examined)
        return health

    def _converted_tensor(
        self, entry: int, name: str | None, health: TensorHealth | None, values: Any = None
    ) -> TracedTensor:
        table = self._tensors
        number, flag = table.ids[entry], table.flags[entry]
        return TracedTensor(
            number,
            tuple(table.shapes[entry]),
            _name_of(table.dtypes[entry]),
            str(table.devices[entry]),
            name if name is not None else self._id_names.get(number) or self._state_names.get(number, ""),
            not health.is_finite if flag is None and health is not None else flag,
            health or self._late_health.get(entry),
            values,
            table.checksums.get(entry),
        )

    def stop(self, *, discards: bool) -> None:
        """Record no more, and with `discards` drop what was recorded, though PyTorch calls this until its mode is left."""
        with self._lock:
            if not discards:
                self.finish()
            self._is_stopped = True
            if discards:
                self._records, self._tensors, self._loss_records, self._pending = [], _TensorTable(), [], []
                self._examined, self._late_health, self.bytes = {}, {}, 0
                self._ids, self._flags, self._updated, self._forward_of = {}, {}, {}, {}
                self._names, self._storages = _NamedTensors(None), {}

    def finish(self) -> None:
        """Read the results of devices, and release what is needed only while the step runs."""
        if self._optimizers:  # the step ends within that of its optimizer
            self.optimizer_ends()
        try:
            self._name_current(self._names.current())
        except Exception as fault:  # noqa: BLE001 - the recorder's faults never reach training
            self.notes.append(f"gradients: not named: {type(fault).__name__}: {fault}")
        self._ids, self._storages = {}, {}
        self._forward_of, self._flags, self._updated = {}, {}, {}
        self._bad, self._of_gradients, self._states = set(), set(), {}
        self._names = _NamedTensors(None)
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for entry in self._pending:
            by_device.setdefault(entry[1].device, []).append(entry)
        self._pending = []
        for entries in by_device.values():
            found = torch.stack([each for _, each in entries]).tolist()
            for (place, _), (smallest, largest) in zip(entries, found, strict=True):
                health = health_of_extremes(self._tensors.shapes[place].numel(), smallest, largest)
                self._tensors.flags[place] = not health.is_finite
                if not health.is_finite:
                    self._late_health[place] = health


def _item(items: list[Any] | None, position: int) -> Any:
    return None if items is None else items[position]
