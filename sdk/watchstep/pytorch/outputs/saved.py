"""Outputs of modules that the autograd graph of a loss keeps in memory, found without a hook of each module.

A pass with hooks shows which backward function has made the output of a module, and which functions have saved it. Graphs of the same form
have the same functions in the same order of execution, with the same inputs and parameters. So the outputs of a later pass are named by the plan of an
earlier one. Layers without a trainable parameter look alike in a graph: a program whose graph contains such layers with tensors of their own needs its hooks, and
so does one in which graphs of the same form had different outputs.

Nothing of a graph is kept: functions are known by their sequence numbers, and outputs by the addresses of their memory, while their pass lasts. A function
can only have saved an output that existed when it ran, so that the address of its input identifies it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from watchstep.pytorch import internals
from watchstep.pytorch.gate import Describe, is_own, version_of

_MAX_FUNCTIONS = 50_000
"""Maximum number of functions of a graph that is searched: a recurrent network over many steps has more than it has layers."""

_MAX_FORMS = 16
"""Maximum number of forms of graphs. A program with more of them, such as one that chooses layers at random, needs its hooks."""

_FIRST_PASSES = 3
"""Number of measured passes whose graphs are searched before hooks are removed."""

_VIEWS = frozenset(
    (
        "View", "UnsafeView", "ReshapeAlias", "T", "Transpose", "Permute", "Alias", "Squeeze", "Unsqueeze",
        "Split", "SplitWithSizes", "Slice", "Select", "Unbind", "AsStrided",
    )
)  # fmt: skip
"""Functions whose results share the memory of their inputs, by their names before ``Backward``."""

_LEAF = "torch::autograd::AccumulateGrad"

_Memory = tuple[int, int, Any]
"""Address, number of elements and type of a tensor."""


@dataclass(frozen=True)
class _Noted:
    """The output of a module that its hook has seen.

    Attributes:
        describe: Describes it, see `Describe`.
        number: Sequence number of the function that made it.
        memory: Its memory.
        version: Number of its changes in place.
    """

    describe: Describe
    number: int
    memory: _Memory
    version: int


@dataclass(frozen=True)
class _Place:
    """Where the output of a module is found in a graph.

    Attributes:
        describe: Describes it.
        function: Place of the function that saved it, in the order of execution; of the one that made it if it is the output of the model.
        attribute: Name of the saved tensor; empty if it is the output of the model.
        is_base: Whether the output is the tensor of which the saved one is a view.
    """

    describe: Describe
    function: int
    attribute: str = ""
    is_base: bool = False


class SavedOutputs:
    """Outputs of the modules of one model in graphs of known forms.

    Attributes:
        is_ready: Whether the graphs of this program have one of few known forms, so that hooks need not note outputs.
    """

    def __init__(self) -> None:
        self.is_ready = False
        self._gives_up = not internals.reads_graphs()
        self._passes = 0
        self._is_learning = False
        self._noted: list[_Noted] = []
        self._number_of_model = -1
        self._plans: dict[tuple[Any, ...], list[_Place]] = {}

    def begin(self) -> bool:
        """Begin a training pass in which layers have hooks. Graphs of the first ones are searched, and then ever fewer. Returns whether this one's is."""
        self._noted.clear()
        self._number_of_model = -1
        self._passes += 1
        is_power = not self._passes & (self._passes - 1)
        self._is_learning = not self._gives_up and (self._passes <= _FIRST_PASSES or is_power)
        return self._is_learning

    def note(self, describe: Describe, module: nn.Module, output: Any) -> None:
        """Note the output of a module."""
        if not self._is_learning:
            return
        if internals.packs_saved_tensors():
            self.give_up()
        elif type(output) is Tensor and output.layout is torch.strided and output.grad_fn is not None:
            if _is_frozen(module):
                self.give_up()
                return
            number = internals.number_of(output.grad_fn)
            self._noted.append(_Noted(describe, number, _memory_of(output), version_of(output)))

    def note_model(self, output: Any) -> None:
        """Note the output of the model itself, which the program may keep: often that of its last layer."""
        if self._is_learning and type(output) is Tensor and output.grad_fn is not None:
            self._number_of_model = internals.number_of(output.grad_fn)

    def learn(self, root: Any) -> None:
        """Learn where the noted outputs are in the graph of their loss.

        Args:
            root: Backward function of the loss; None without one.
        """
        noted = list(self._noted)
        self._noted.clear()
        if not noted or root is None:
            return
        functions = _functions(root)
        if functions is None:
            self.give_up()
            return
        form = _form(functions)
        plan = _plan(functions, noted, self._number_of_model)
        if self._plans.setdefault(form, plan) != plan or len(self._plans) > _MAX_FORMS:
            self.give_up()
            return
        self.is_ready = self._passes >= _FIRST_PASSES and any(self._plans.values())

    def give_up(self) -> None:
        """Learn no more: the hooks of modules stay."""
        self.is_ready, self._is_learning, self._gives_up = False, False, True
        self._plans.clear()
        self._noted.clear()

    def of(self, root: Any, model_output: Tensor | None = None) -> list[tuple[Describe, Tensor]] | None:
        """Return the outputs that the graph of a loss has saved, in the order of execution; None for a graph of an unknown form.

        Args:
            root: Backward function of the loss; None without one.
            model_output: Output of the model; None if it no longer exists.
        """
        functions = None if root is None else _functions(root)
        plan = None if functions is None else self._plans.get(_form(functions))
        if functions is None or plan is None:
            return None
        found = []
        for place in plan:
            function = functions[place.function]
            if place.attribute:
                saved = _saved(function, place.attribute)
                output = internals.base_of(saved) if saved is not None and place.is_base else saved
            else:
                output = model_output if _is_made_by(model_output, function) else None
            if output is not None:
                found.append((place.describe, output.detach()))
        return found


def _is_frozen(module: nn.Module) -> bool:
    """Return whether a module has tensors of its own, none of which is trained: its functions do not show that they are of this module."""
    own = (*internals.parameters_of(module).values(), *internals.buffers_of(module).values())
    trained = [tensor.requires_grad for tensor in own if tensor is not None]
    return bool(trained) and not any(trained)


def _is_made_by(output: Tensor | None, function: Any) -> bool:
    """Return whether a tensor is the result of a function: the program may have called the model again since."""
    maker = None if output is None else output.grad_fn
    return maker is not None and internals.number_of(maker) == internals.number_of(function)


def _name(function: Any) -> str:
    """Return the kind of a function. One of the program's may have an attribute ``name``."""
    return str(type(function).name(function))


def _functions(root: Any) -> list[Any] | None:
    """Return the functions of a graph in the order of execution, without those that accumulate gradients.

    Returns None if there are too many, or if several threads have made them, whose sequence numbers are not of one order.
    """
    seen, waiting = {id(root): root}, [root]
    while waiting:
        for function, _ in waiting.pop().next_functions:
            if function is not None and id(function) not in seen and _name(function) != _LEAF:
                if len(seen) >= _MAX_FUNCTIONS:
                    return None
                seen[id(function)] = function
                waiting.append(function)
    functions = sorted(seen.values(), key=internals.number_of)
    numbers = {internals.number_of(function) for function in functions}
    return functions if len(numbers) == len(functions) else None


def _form(functions: list[Any]) -> tuple[Any, ...]:
    """Return what graphs of the same form have in common: the kinds of their functions, and the functions and parameters whose results each of them uses."""
    place_of = {internals.number_of(function): place for place, function in enumerate(functions)}
    return tuple(
        (_name(function), *(_input(other, place_of) for other, _ in function.next_functions))
        for function in functions
    )


def _input(function: Any, place_of: dict[int, int]) -> tuple[str, int] | None:
    """Return the place of a function, or the identity of a parameter; None for an input without gradients."""
    if function is None:
        return None
    if _name(function) == _LEAF:
        return "parameter", id(function.variable)
    return "function", place_of[internals.number_of(function)]


def _plan(functions: list[Any], noted: Iterable[_Noted], number_of_model: int) -> list[_Place]:
    """Return the places of the noted outputs that are saved, or that the model returns, in the order of execution.

    An output that is noted several times, as that of a layer that returns its input, has one place.
    """
    place_of = {internals.number_of(function): place for place, function in enumerate(functions)}
    inputs = [_inputs(function, place_of) for function in functions]
    roots = _roots(functions, inputs)
    saved_at = _saved_at(functions)
    plan = []
    for output in dict.fromkeys(noted):
        maker = place_of.get(output.number)
        if maker is None:  # the output is not used for the loss
            continue
        for place, name, is_base, tensor in saved_at.get(output.memory, ()):
            is_used = any(roots[other] == roots[maker] for other in (place, *inputs[place]))
            if is_used and is_own(tensor, output.version):
                plan.append(_Place(output.describe, place, name, is_base=is_base))
                break
        else:
            if output.number == number_of_model:
                plan.append(_Place(output.describe, maker))
    return plan


def _inputs(function: Any, place_of: dict[int, int]) -> list[int]:
    """Return the places of the functions whose results a function uses."""
    return [
        place_of[internals.number_of(other)]
        for other, _ in function.next_functions
        if other is not None and _name(other) != _LEAF
    ]


def _roots(functions: list[Any], inputs: list[list[int]]) -> list[int]:
    """Return, for each function, the place of the one that made the memory of its result: another one if the result is a view."""
    roots: list[int] = []
    for place, function in enumerate(functions):
        is_view = _name(function).partition("Backward")[0] in _VIEWS
        roots.append(
            roots[inputs[place][0]] if is_view and min(inputs[place], default=place) < place else place
        )
    return roots


def _saved_at(functions: list[Any]) -> dict[_Memory, list[tuple[int, str, bool, Tensor]]]:
    """Return what functions have saved, by its memory: the place of the function, the name, whether it is the base of what is saved, and the tensor."""
    names: dict[type, list[str]] = {}
    saved_at: defaultdict[_Memory, list[tuple[int, str, bool, Tensor]]] = defaultdict(list)
    for place, function in enumerate(functions):
        kind = type(function)
        if kind not in names:
            names[kind] = [
                name for name in dir(function) if name.startswith("_saved_") and "_sym_" not in name
            ]
        for name in names[kind]:
            saved = _saved(function, name)
            base = None if saved is None else internals.base_of(saved)
            for tensor, is_base in ((saved, False), (base, True)):
                if tensor is not None:
                    saved_at[_memory_of(tensor)].append((place, name, is_base, tensor))
    return saved_at


def _memory_of(tensor: Tensor) -> _Memory:
    return tensor.data_ptr(), tensor.numel(), tensor.dtype


def _saved(function: Any, name: str) -> Tensor | None:
    """Return what a function has saved under a name, if it is a tensor with memory of its own kind.

    What the program has packed is not read: to unpack it may compute it again, or release it.
    """
    try:
        if internals.is_packed(getattr(function, f"_raw{name}", None)):
            return None
        saved = getattr(function, name, None)
    except RuntimeError:  # it has been released, or was changed in place
        return None
    if type(saved) is not Tensor or saved.layout is not torch.strided:
        return None
    return None if saved.is_nested or saved.is_meta else saved
