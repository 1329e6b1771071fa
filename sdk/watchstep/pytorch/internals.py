"""Names of PyTorch that are private or that a version may lack, looked up here once and nowhere else.

Each name has a cost: what is not recorded where PyTorch lacks it. Training and the rest of the recording go on, and health
has one line for each name that is missing. Where a question has no answer without its name, such as whether a forward pass runs inside
a backward pass, what depends on the answer is not recorded.

A `Name` is a function or class and is looked up when this module is imported. An `Attribute` belongs to objects that the program
creates, and is found to be missing when it is read.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from watchstep.capture.health import RecorderHealth

_MISSING = object()

INTERNALS: dict[str, Name | Attribute] = {}
"""All names by their place."""

_healths: weakref.WeakSet[RecorderHealth] = weakref.WeakSet()


class Name:
    """A function, class or other value of PyTorch.

    Attributes:
        place: Its module and name.
        cost: What is not recorded without it.
        value: The value, or the fallback if PyTorch lacks it.
        is_missing: Whether PyTorch lacks it.
    """

    __slots__ = ("_fallback", "_other", "cost", "is_missing", "place", "value")

    def __init__(self, place: str, cost: str, fallback: Any = None, *, other: str = "") -> None:
        """Look it up.

        Args:
            place: Its module and name.
            cost: What is not recorded without it.
            fallback: The value without it.
            other: Its place in other versions.
        """
        self.place, self.cost, self._fallback, self._other = place, cost, fallback, other
        INTERNALS[place] = self
        self.look_up(absent=())

    @property
    def name(self) -> str:
        """Return the name without its module."""
        return self.place.rpartition(".")[2]

    def look_up(self, absent: Collection[str]) -> None:
        """Look it up again, as if PyTorch lacked the absent names."""
        self.value, self.is_missing = self._fallback, True
        if self.place in absent:
            return
        for place in (self.place, self._other):
            if place and (found := _found(place)) is not _MISSING:
                self.value, self.is_missing = found, False
                return

    def replace(self, value: Any) -> None:
        """Let PyTorch use another value in its place."""
        owner = _found(self.place.rpartition(".")[0])
        setattr(owner, self.name, value)
        self.value = value


class Attribute:
    """An attribute of objects that the program creates.

    Attributes:
        place: The class and the name.
        cost: What is not recorded without it.
        name: The name.
        is_missing: Whether an object without it was found.
    """

    __slots__ = ("_is_absent", "cost", "is_missing", "name", "place")

    def __init__(self, place: str, cost: str) -> None:
        self.place, self.cost = place, cost
        self.name = place.rpartition(".")[2]
        INTERNALS[place] = self
        self.look_up(absent=())

    def look_up(self, absent: Collection[str]) -> None:
        """Forget what was found, and behave as if PyTorch lacked the absent names."""
        self._is_absent = self.is_missing = self.place in absent

    def of(self, owner: Any, fallback: Any = None) -> Any:
        """Return the attribute of an object that should have it, or the fallback, which health then states.

        An object of a class of the program's own may lack it in any version: that is no fault of PyTorch.
        """
        value = self.peek(owner, _MISSING)
        return self._lacks(owner, fallback) if value is _MISSING else value

    def stored(self, owner: Any) -> Any:
        """Return the attribute that an object should store, without calling properties of its class; None without it."""
        value = _MISSING if self._is_absent else owner.__dict__.get(self.name, _MISSING)
        return self._lacks(owner, None) if value is _MISSING else value

    def _lacks(self, owner: Any, fallback: Any) -> Any:
        self.lacks(owner.__name__ if isinstance(owner, ModuleType) else type(owner).__module__)
        return fallback

    def lacks(self, module: str) -> None:
        """Note that code of a module lacks it, if the module is PyTorch's: others may lack it in any version."""
        if not self.is_missing and (self._is_absent or module.partition(".")[0] == "torch"):
            self.is_missing = True
            for health in tuple(_healths):
                _note(health, self)

    def peek(self, owner: Any, fallback: Any = None) -> Any:
        """Return the attribute of an object that need not have it."""
        return fallback if self._is_absent else getattr(owner, self.name, fallback)


def look_up(absent: Collection[str] = ()) -> None:
    """Look up all names again, as if PyTorch lacked the absent ones."""
    for internal in INTERNALS.values():
        internal.look_up(absent)


def report_to(health: RecorderHealth) -> None:
    """Note in health what this version of PyTorch lacks, now and when it is found later."""
    _healths.add(health)
    for internal in INTERNALS.values():
        if internal.is_missing:
            _note(health, internal)


def _note(health: RecorderHealth, internal: Name | Attribute) -> None:
    health.note(internal.place, f"{internal.cost}: PyTorch {torch.__version__} has no {internal.place}")


def _found(place: str) -> Any:
    """Return a value by its place. Modules of PyTorch that are not loaded yet are imported."""
    value: Any = torch
    path = "torch"
    for name in place.split(".")[1:]:
        path = f"{path}.{name}"
        try:
            value = getattr(value, name, _MISSING)
            if value is _MISSING:
                value = importlib.import_module(path)
        except Exception:  # noqa: BLE001 - an import of PyTorch may raise anything; health states that the name is missing
            return _MISSING
    return value


# --- What the current thread does ---------------------------------------------------------------------------------------------

_NO_PASSES = "forward passes are not observed, so activations and bundles are not recorded"

graph_task_id = Name("torch._C._current_graph_task_id", _NO_PASSES, lambda: 0)
"""Returns -1 outside of a backward pass."""
functorch_level = Name("torch._C._functorch.maybe_current_level", _NO_PASSES, lambda: None)
"""Returns None outside of vmap, grad, jvp, …"""
_tracing_state = Name(
    "torch._C._get_tracing_state",
    "nothing is lost: torch.jit.is_tracing takes its place",
    lambda: torch.jit.is_tracing() or None,  # type: ignore[attr-defined,no-untyped-call]
)
_dispatch_mode = Name("torch._C._get_dispatch_mode", "dispatch modes of the program see one more operation")
_fake = Name("torch._C._TorchDispatchModeKey.FAKE", "dispatch modes of the program see one more operation")


def sees_passes() -> bool:
    """Return whether a hook of a module can know that its call is an ordinary forward pass."""
    return not (graph_task_id.is_missing or functorch_level.is_missing)


def computes_numbers() -> bool:
    """Return False while code is traced, transformed by `torch.func`, or run on fake tensors, by which programs estimate memory.

    Called for each pass and each step.
    """
    if _tracing_state.value() is not None or functorch_level.value() is not None:
        return False
    if _dispatch_mode.is_missing or _fake.is_missing:
        return type(torch.empty(0, device="cpu")) is Tensor
    return _dispatch_mode.value(_fake.value) is None


def runs_compiled(frame: FrameType | None) -> bool:
    """Return whether the code around a frame was called by a function of `torch.compile`, which restores the dispatcher when it ends."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("torch._dynamo"):
            return True
        frame = frame.f_back
    return False


# --- Tensors ------------------------------------------------------------------------------------------------------------------

_numbers = itertools.count(1)

_version = Name(
    "torch.Tensor._version",
    "tensors count as changed, so bundles lack values and stale gradients are not found",
)
undispatched = Name(
    "torch._C._DisableTorchDispatch",
    "losses that the program divides are recorded as divided, and samples of data loaders are not recorded",
)
"""Context in which dispatch modes of the program observe no operation; None if PyTorch lacks it."""
_wrapper_subclass = Name(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    "nothing is lost: tensors of wrappers are recognised by their methods",
    lambda tensor: hasattr(type(tensor), "__tensor_flatten__"),
)
_zero_tensor = Name(
    "torch.Tensor._is_zerotensor",
    "tensors of zeros without memory, as forward-mode differentiation makes them, are not measured",
)
_foreach_copy = Name("torch._foreach_copy_", "nothing is lost: buffers are copied one by one")
_foreach_norm = Name("torch._foreach_norm", "nothing is lost: norms are computed one by one")
_shard_offset = Attribute(
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
    "full values of shards are not recorded",
)
_SHARD_MODULES = ("torch.distributed.tensor._utils", "torch.distributed._tensor._utils")
"""The second is its place up to 2.4."""


def counts_changes() -> bool:
    """Return whether PyTorch counts the changes of a tensor in place."""
    return not _version.is_missing


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the number of changes in place of each tensor, as `version`."""
    if _version.is_missing:
        return [next(_numbers) for _ in tensors]
    return [tensor._version for tensor in tensors]  # noqa: SLF001 - as below


def version(tensor: Tensor) -> int:
    """Return the number of changes of a tensor in place; another number at each call if PyTorch does not count them."""
    return next(_numbers) if _version.is_missing else tensor._version  # noqa: SLF001 - has no public name


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor stores its values in inner tensors."""
    return bool(_wrapper_subclass.value(tensor))


def is_zero_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor has zeros and no memory."""
    if _zero_tensor.is_missing:
        return tensor.layout is torch.strided and bool(tensor.numel()) and not tensor.data_ptr()
    return tensor._is_zerotensor()  # noqa: SLF001 - as above


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors of equal shapes."""
    if not _foreach_copy.is_missing:
        _foreach_copy.value(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def largest_magnitudes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the largest magnitude of each tensor; NaN if it has one."""
    if not _foreach_norm.is_missing:
        return list(_foreach_norm.value(tensors, torch.inf))
    return [torch.linalg.vector_norm(tensor, torch.inf) for tensor in tensors]


def offset_of_shard(shape: Sequence[int], mesh: Any, placements: Any) -> Sequence[int] | None:
    """Return the indices of the first element of this process's shard; None if unknown."""
    for path in _SHARD_MODULES:
        try:
            module = importlib.import_module(path)
        except ImportError:
            continue
        if (compute := _shard_offset.peek(module)) is not None:
            return tuple(compute(shape, mesh, placements)[1])
    _shard_offset.lacks("torch")
    return None


# --- Graphs of autograd -------------------------------------------------------------------------------------------------------

_PERMANENT_HOOKS = "nothing is lost: hooks of layers stay in passes without measurements, which costs time"

_saved_hooks = Name("torch._C._autograd._top_saved_tensors_default_hooks", _PERMANENT_HOOKS)
_unpack_hook = Name("torch._C._autograd.SavedTensor.unpack_hook", _PERMANENT_HOOKS)
_base = Name("torch.Tensor._base", _PERMANENT_HOOKS)


def reads_graphs() -> bool:
    """Return whether the tensors that a graph has saved can be found."""
    needed = (_node_number, _saved_hooks, _unpack_hook, _base)
    return not any(internal.is_missing for internal in needed)


def packs_saved_tensors() -> bool:
    """Return whether what operations save for the backward pass is packed by the program, as in activation checkpointing."""
    return _saved_hooks.value(False) is not None


def is_packed(saved: Any) -> bool:
    """Return whether the program has packed what a function has saved, given as ``_raw_saved_…``, or that is unknown."""
    return getattr(saved, "unpack_hook", saved) is not None


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which another one is a view; None if it is none."""
    return tensor._base  # noqa: SLF001 - as above


# --- Modules ------------------------------------------------------------------------------------------------------------------

norm_base = Name(
    "torch.nn.modules.batchnorm._NormBase",
    "running statistics of layers that derive from other classes than PyTorch's public ones are not recorded",
    (
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
        nn.SyncBatchNorm,
        nn.InstanceNorm1d,
        nn.InstanceNorm2d,
        nn.InstanceNorm3d,
    ),
)
"""Base of layers with running statistics, for `isinstance`."""
script_module = Name("torch.jit.ScriptModule", "nothing is lost: this version has no script modules", ())
traced_module = Name(
    "torch.jit.TracedModule",
    "script modules are not refused, and their activations are not recorded",
    nn.Module,
    other="torch.jit._trace.TracedModule",
)
"""Script modules that support hooks, for `isinstance`."""
_script_compiler = Name(
    "torch.jit._recursive.create_script_module", "torch.jit.script may fail on modules of a watched model"
)
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Names of the dictionaries of hooks of a module that `torch.jit.script` compiles."""
_parameters = Attribute(
    "torch.nn.Module._parameters", "nothing is lost: parameters are listed by their modules"
)
_modules = Attribute("torch.nn.Module._modules", "nothing is lost: modules list their children")
_buffers = Attribute("torch.nn.Module._buffers", "nothing is lost: buffers are listed by their modules")
_unsaved = Attribute(
    "torch.nn.Module._non_persistent_buffers_set",
    "running statistics of the program's own modules are not recorded",
)
_compiled_call = Attribute(
    "torch.nn.Module._compiled_call_impl", "calls of activation functions are not observed"
)
_compiled_counters = Attribute(
    "torch._dynamo.utils.counters",
    "modules in nn.TransformerEncoderLayer are not observed in a process that has loaded the compiler",
)
_original = Attribute(
    "torch._dynamo.OptimizedModule._orig_mod",
    "nothing is lost: a compiled module is recognised by its only child",
)


def wrap_script_compiler(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the function by which `torch.jit.script` compiles a module, once per process."""
    compiler = _script_compiler.value
    if compiler is not None and not hasattr(compiler, "__wrapped__"):
        _script_compiler.replace(wrap(compiler))


def parameters_of(module: nn.Module) -> Mapping[str, Tensor | None]:
    """Return the parameters that a module stores. Reading them by name may run a parametrization of the program."""
    stored: Mapping[str, Tensor | None] | None = _parameters.stored(module)
    return dict(module.named_parameters(recurse=False)) if stored is None else stored


def modules_of(module: nn.Module) -> dict[int, nn.Module]:
    """Return a module and all modules inside it by id, without a call of the program's own methods, which may make modules."""
    modules: dict[int, nn.Module] = {}
    waiting = [module]
    while waiting:
        each = waiting.pop()
        if id(each) not in modules:
            modules[id(each)] = each
            waiting += [child for child in children_of(each).values() if child is not None]
    return modules


def children_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """Return the modules that a module stores, which may change later."""
    # A module whose constructor has not finished stores none: that is no fault of PyTorch, and its method raises.
    stored: Mapping[str, nn.Module | None] | None = (
        None if _modules.is_missing else module.__dict__.get(_modules.name)
    )
    return dict(module.named_children()) if stored is None else stored


def buffers_of(module: nn.Module) -> Mapping[str, Tensor | None]:
    """Return the buffers that a module stores, which may change later."""
    stored: Mapping[str, Tensor | None] | None = _buffers.stored(module)
    return dict(module.named_buffers(recurse=False)) if stored is None else stored


def stores_buffers() -> bool:
    """Return whether `buffers_of` returns the module's own dictionary, and not a copy."""
    return not _buffers.is_missing


def is_saved(module: nn.Module, buffer: str) -> bool:
    """Return whether a buffer is part of the module's state; False if unknown."""
    unsaved = _unsaved.stored(module)
    return unsaved is not None and buffer not in unsaved


def original_of(module: nn.Module) -> nn.Module | None:
    """Return the module inside a module that `torch.compile` returned; None for others.

    Others are not asked for the attribute: wrappers of the program's own may pass on that of a compiled module inside of them.
    """
    if not any(kind.__module__.startswith("torch._dynamo") for kind in type(module).__mro__):
        return None
    inner = _original.of(module)
    if inner is None:
        inner = next(module.children(), None)
    return inner if isinstance(inner, nn.Module) else None


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` or ``module.compile()`` compiles a module, or that is unknown."""
    compiled = _compiled_call.of(module, _MISSING)
    return not (compiled is None or isinstance(compiled, WrappedCalls)) or original_of(module) is not None


def has_compiled() -> bool:
    """Return whether `torch.compile` has compiled anything in this process, or that is unknown."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return False
    counters = _compiled_counters.of(utils)
    return counters is None or counters.get("frames", {}).get("total", 0) > 0


class WrappedCalls:
    """Passes the calls of a module that is not compiled through a function, until it is removed.

    It takes the place of a compiled call, so that PyTorch does not count it as a hook, and that copies of the module do not have it.
    """

    __slots__ = ("_call", "_module")

    def __init__(
        self, module: nn.Module, call: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
    ) -> None:
        """Wrap the calls.

        Args:
            module: The module.
            call: Called with the module's own call and the arguments of each call. Returns the output.
        """
        self._module, self._call = module, call
        module.__dict__[_compiled_call.name] = self

    @staticmethod
    def of(module: nn.Module) -> WrappedCalls | None:
        """Return what wraps the calls of a module; None if nothing does."""
        wrapped = module.__dict__.get(_compiled_call.name)
        return wrapped if isinstance(wrapped, WrappedCalls) else None

    def put_back(self) -> None:
        """Wrap the calls again after `remove`."""
        self._module.__dict__.setdefault(_compiled_call.name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. PyTorch calls this in place of the module."""
        if torch.compiler.is_compiling():
            return self._module._call_impl(*args, **kwargs)  # noqa: SLF001 - what `nn.Module` calls otherwise
        # A replica of `nn.DataParallel` has all attributes of the module.
        module = sys._getframe(1).f_locals.get("self")  # noqa: SLF001 - the documented way to a caller's frame
        if isinstance(module, nn.Module) and module is not self._module:
            return module._call_impl(*args, **kwargs)  # noqa: SLF001 - as above
        return self._call(self._module._call_impl, args, kwargs)  # noqa: SLF001 - as above

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave it out of a copy, which has the value of a module that is not compiled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def remove(self) -> None:
        """Let the module be called as before, unless the program has compiled it meanwhile."""
        if self._module.__dict__.get(_compiled_call.name) is self:
            del self._module.__dict__[_compiled_call.name]


# --- Losses -------------------------------------------------------------------------------------------------------------------

_saved_other = Attribute(
    "torch.autograd.graph.DivBackward0._raw_saved_other",
    "divisors of losses are not read: they are recorded as divided",
)
_saved_reduction = Attribute(
    "torch.autograd.graph.NllLossBackward0._saved_reduction",
    "the functions that computed losses are not recorded",
)
_HAVE_REDUCTIONS = ("NllLoss", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy")


def saved_other(node: Any) -> Any:
    """Return what autograd saved of the second factor or of the divisor; None if unknown."""
    return _saved_other.of(node)


def reduction_of(node: Any, name: str) -> int | None:
    """Return the reduction of a loss function's node by number; None if it has none; -1 if it is unknown.

    Args:
        node: Autograd's node.
        name: Its name without its number.
    """
    reduction: int | None = _saved_reduction.peek(node)
    if reduction is None and name.startswith(_HAVE_REDUCTIONS):
        return int(_saved_reduction.of(node, -1))
    return reduction


# --- Optimizers and gradient scalers --------------------------------------------------------------------------------------------

_step_body = Attribute("torch.optim.Optimizer.step.func", "updates by non-finite gradients are not skipped")
"""A free variable of PyTorch's wrapper of ``step``: the class's own ``step``."""
_step_owner = Attribute(
    "torch.optim.Optimizer.step.self",
    "a step that is tried again after an exception is not a step of its own",
)
"""A local variable of that wrapper."""
_clip_bodies = {
    "clip_grad_value_": Attribute(
        "torch.nn.utils.clip_grad_value_.func", "gradients before clipping by value are not recorded"
    ),
    "clip_grad_norm_": Attribute(
        "torch.nn.utils.clip_grad_norm_.func",
        "gradients before clipping by norm, and their norm, are not recorded",
    ),
}
"""Free variables of the functions that clip gradients: the functions that do the work."""
_clip_with_norm = Attribute(
    "torch.nn.utils.clip_grad._clip_grads_with_norm_",
    "gradients before clipping by norm, and their norm, are recorded where clip_grad_norm_ is called",
)
"""Called by clip_grad_norm_, since 2.6."""
_own_step_hooks = Attribute(
    "torch.optim.Optimizer._optimizer_step_pre_hooks",
    "nothing is lost: the gate policy checks gradients twice",
)
_all_step_hooks = Name(
    "torch.optim.optimizer._global_optimizer_pre_hooks",
    "nothing is lost: the gate policy checks gradients twice",
    (None,) * 2,
)
_STATES_LEFT_OUT = "states of optimizers are not part of bundles"
_state_hooks = (
    Attribute("torch.optim.Optimizer._optimizer_state_dict_pre_hooks", _STATES_LEFT_OUT),
    Attribute("torch.optim.Optimizer._optimizer_state_dict_post_hooks", _STATES_LEFT_OUT),
)
_takes_scale = Attribute(
    "torch.optim.Optimizer._step_supports_amp_scaling",
    "fused optimizers that are not PyTorch's are recorded with scaled gradients",
)
_scale = Attribute(
    "torch.amp.GradScaler._scale", "the scale and the skipped updates of gradient scalers are not recorded"
)
_scaler_states = Attribute(
    "torch.amp.GradScaler._per_optimizer_states", "skipped updates of gradient scalers are not recorded"
)
_initial_scale = Attribute(
    "torch.amp.GradScaler._init_scale",
    "nothing is lost: scaled gradients are divided before they are measured",
)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def step_body(wrapper: FrameType) -> Any:
    """Return the body of a step that has begun, by the frame of PyTorch's wrapper of ``step``; None if unknown."""
    return None if _step_body.is_missing else wrapper.f_locals.get(_step_body.name)


def step_body_cell(optimizer: Optimizer, wrapper: FrameType) -> CellType | None:
    """Return the cell of the body of a step that has begun; None if there is none.

    Args:
        optimizer: The optimizer.
        wrapper: Frame of PyTorch's wrapper of ``step``, before it calls the body.
    """
    names, body = wrapper.f_code.co_freevars, step_body(wrapper)
    if _step_body.name not in names or not callable(body):
        _step_body.lacks(_module_of(wrapper))
        return None
    place = names.index(_step_body.name)
    for function in _functions(optimizer, wrapper):
        cell = (function.__closure__ or ())[place]
        if function.__code__ is wrapper.f_code and cell.cell_contents is body:
            return cell
    return None


def _functions(optimizer: Optimizer, wrapper: FrameType) -> Iterator[FunctionType]:
    """Yield functions that may run in a frame: those of the optimizer's classes, and then all with its code, which takes some 100 ms."""
    for kind in type(optimizer).__mro__:
        step = kind.__dict__.get("step")
        while step is not None:
            if isinstance(step, FunctionType) and step.__code__ is wrapper.f_code:
                yield step
            step = getattr(step, "__wrapped__", None)
    yield from (
        function for function in gc.get_referrers(wrapper.f_code) if isinstance(function, FunctionType)
    )


def steps(frame: FrameType, optimizer: Optimizer) -> bool | None:
    """Return whether a frame of PyTorch's wrapper of ``step`` runs a step of an optimizer; None if unknown."""
    if _step_owner.is_missing or _step_owner.name not in frame.f_code.co_varnames:
        _step_owner.lacks(_module_of(frame))
        return None
    return frame.f_locals.get(_step_owner.name) is optimizer


def clipping_functions(clip_grad: Any) -> dict[str, CellType]:
    """Return the cells of the functions that do the work, by the names of PyTorch's functions that clip gradients.

    Args:
        clip_grad: The module `torch.nn.utils.clip_grad`.
    """
    cells = {}
    for name, body in _clip_bodies.items():
        called = _clip_with_norm.peek(clip_grad) if name == "clip_grad_norm_" else None  # since 2.6
        function = getattr(clip_grad, name, None) if called is None else called
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if body.is_missing or body.name not in names:
            body.lacks(getattr(function, "__globals__", {}).get("__name__", ""))
        elif callable((cell := function.__closure__[names.index(body.name)]).cell_contents):  # type: ignore[union-attr]
            cells[name if called is None else _clip_with_norm.name] = cell
    return cells


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether somebody else has hooks before the steps of an optimizer, or that is unknown."""
    return bool(_own_step_hooks.of(optimizer, (None,))) or len(_all_step_hooks.value) > 1


def has_state_hooks(optimizer: Any) -> bool:
    """Return whether hooks of the program run when the state of an object is read, or that is unknown."""
    if isinstance(optimizer, Optimizer):
        return any(hooks.of(optimizer, (None,)) for hooks in _state_hooks)
    return any(hooks.peek(optimizer) for hooks in _state_hooks)


def takes_scale(optimizer: Optimizer) -> bool:
    """Return whether an optimizer divides gradients by the scale itself, as fused ones do."""
    if _takes_scale.peek(optimizer, False):
        return True
    is_own = type(optimizer).__module__.startswith("torch.optim")
    return is_own and any(group.get("fused") for group in optimizer.param_groups)


def scale_of(scaler: Any) -> Tensor | None:
    """Return the scale of a gradient scaler; None before it scaled a loss, or if it is unknown."""
    scale = _scale.of(scaler)
    return scale if isinstance(scale, Tensor) else None


def scaler_state(scaler: Any, optimizer: Any) -> Mapping[str, Any]:
    """Return what a gradient scaler notes about an optimizer; empty if nothing is known."""
    state: Mapping[str, Any] = _scaler_states.of(scaler, {}).get(id(optimizer), {})
    return state


def first_scale(scaler: Any) -> float:
    """Return the initial scale of a gradient scaler; 0 if unknown."""
    return float(_initial_scale.of(scaler, 0.0))


_default_store = Attribute(
    "torch.distributed.distributed_c10d._get_default_store",
    "ranks do not agree on updates by non-finite gradients",
)


def default_store(distributed_c10d: Any) -> Any:
    """Return the store of the default process group.

    Raises:
        RuntimeError: This version of PyTorch lacks it.
    """
    get_store = _default_store.of(distributed_c10d)
    if get_store is None:
        raise RuntimeError(f"PyTorch {torch.__version__} has no {_default_store.place}, so ranks cannot vote")
    return get_store()


# --- Data loaders ---------------------------------------------------------------------------------------------------------------

_ITERATOR = "torch.utils.data.dataloader._BaseDataLoaderIter"
_WORKERS = "torch.utils.data.dataloader._MultiProcessingDataLoaderIter"
_NO_BATCHES = "samples and batches of data loaders are not recorded"
_NO_SAMPLES = "samples of data loaders are not recorded"
_NO_LOADED = "samples that worker processes load are not recorded"

loader_iterator = Name(_ITERATOR, _NO_BATCHES)
workers_iterator = Name(_WORKERS, _NO_LOADED)
loader_next_index = Name(f"{_ITERATOR}._next_index", _NO_SAMPLES)
loader_process_data = Name(f"{_WORKERS}._process_data", _NO_LOADED)
loader_send_idx = Attribute(f"{_WORKERS}._send_idx", _NO_LOADED)
loader_task_info = Attribute(f"{_WORKERS}._task_info", _NO_LOADED)
loader_rcvd_idx = Attribute(f"{_WORKERS}._rcvd_idx", _NO_LOADED)
loader_num_yielded = Attribute(f"{_ITERATOR}._num_yielded", _NO_BATCHES)
loader_dataset = Attribute(f"{_ITERATOR}._dataset", _NO_SAMPLES)
loader_auto_collation = Attribute(f"{_ITERATOR}._auto_collation", _NO_SAMPLES)
loader_sampler = Attribute(
    f"{_ITERATOR}._index_sampler", "epochs of samplers are not recorded: iterations are counted"
)

weak_id_dictionary = Name(
    "torch.utils.weak.WeakIdKeyDictionary", "nothing is lost: keys are compared", weakref.WeakKeyDictionary
)
"""Makes a dictionary with weak references to its keys, which it compares by identity."""


# --- Traces of operations -------------------------------------------------------------------------------------------------------

_NO_TRACES = "operations are not traced"

dispatch_mode_class = Name("torch.utils._python_dispatch.TorchDispatchMode", _NO_TRACES, object)
python_backward = Name("torch.autograd.function.BackwardCFunction", _NO_TRACES, ())
storage_reference = Name("torch.multiprocessing.reductions.StorageWeakRef", _NO_TRACES)
device_context = Name("torch.utils._device.DeviceContext", _NO_TRACES, ())
current_dispatch_mode = Name(
    "torch.utils._python_dispatch._get_current_dispatch_mode", _NO_TRACES, lambda: None
)
function_modes = Name("torch.overrides._get_current_function_mode_stack", _NO_TRACES, list)
current_node = Name("torch._C._current_autograd_node", _NO_TRACES, lambda: None)
sequence_number = Name("torch._C._autograd._get_sequence_nr", _NO_TRACES, lambda: 0)
_node_number = Name("torch._C._FunctionBase._sequence_nr", _NO_TRACES)
_storage_address = Name("torch.UntypedStorage._cdata", _NO_TRACES)
_schema = Attribute("torch._ops.OpOverload._schema", _NO_TRACES)


def lacks_for_traces() -> list[str]:
    """Return the names without which operations are not traced."""
    return [
        place for place, internal in INTERNALS.items() if internal.is_missing and internal.cost == _NO_TRACES
    ]


def schema_of(function: Any) -> Any:
    """Return the schema of an operation; None for operators that run other operations."""
    return _schema.peek(function)


def number_of(node: Any) -> int:
    """Return the sequence number of a backward function, which is that of the forward operation that made it."""
    return int(node._sequence_nr())  # noqa: SLF001 - as above


def address_of(storage: torch.UntypedStorage) -> int:
    """Return the identity of memory, which the storages of all its tensors have."""
    return int(storage._cdata)  # noqa: SLF001 - as above
