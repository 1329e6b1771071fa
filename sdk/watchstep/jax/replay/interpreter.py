"""The first bad operation of a step of a JAX program: the step is traced to a jaxpr, which is evaluated operation by operation.

The evaluation goes into ``jit``, ``scan``, ``while``, ``cond``, ``checkpoint``, ``shard_map`` and functions with derivatives of their own. Each
output is checked. A value is freed after its last use, and the outputs of a scan are written into one array, so the memory is that of the
program without fusion. Nothing is donated, references of the program are copied, and callbacks with side effects are not called.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import numpy as np
from jax import numpy as jnp

from watchstep.jax.internals import jax_names
from watchstep.jax.replay.argument_trees import ArgumentTree, own_array, parameter_names, suffix
from watchstep.jax.replay.first_bad import FirstBad, JaxOperation, LoopIteration, ValueFigures
from watchstep.jax.replay.primitive_kinds import IDENTITIES, POSITIONAL
from watchstep.jax.replay.provenance import (
    WRITTEN,
    BadSource,
    InfinitySource,
    Provenance,
    Value,
    explain,
    merge,
)
from watchstep.jax.replay.shards import ShardedBody, bind_local
from watchstep.jax.replay.source_frames import call_sites, exact_lines, module_of, phase_of
from watchstep.jax.replay.value_health import contents, has_nonfinite, health_of_array, is_reference

_SKIPPED = frozenset({"debug_callback", "debug_print", "inspect_sharding"})
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
"""Parameters in which primitives that only call a function have it."""
_CALLS = frozenset(
    [
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "call",
        "checkpoint",
        "remat",
        "remat2",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "custom_vmap_call",
        "composite",
        "eval_jaxpr",
    ]
)


@dataclass(frozen=True)
class StepEvaluation:
    """An evaluated step.

    Attributes:
        results: what the function returned.
        first_bad: the first bad operation; None if no result is damaged.
        contained: number of operations whose non-finite values reached no result.
        evaluated: number of evaluated operations; an iteration counts each.
        notes: what was not evaluated as in the program, as sentences.
        ended: why it was not evaluated to its end; empty if it was.
    """

    results: Any
    first_bad: FirstBad | None
    contained: int
    evaluated: int
    notes: tuple[str, ...]
    ended: str = ""


@dataclass(frozen=True)
class ProgramLimits:
    """What an evaluation may take.

    Attributes:
        seconds: time, after which no more operations are evaluated.
        bytes: memory of arrays that is taken in addition.
    """

    seconds: float = math.inf
    bytes: float = math.inf


def find_first_bad(
    function: Callable[..., Any], *arguments: Any, static_argnums: int | Sequence[int] = (), **keywords: Any
) -> FirstBad | None:
    """Evaluate a step operation by operation, and return where the NaN and infinities in its results began.

    The step is not compiled as a whole, so its results may round otherwise than those of the program. It takes much longer: on a CPU
    about 0.5 ms for each operation, and 5 to 50 ms where the operation is compiled first.

    Args:
        function: The step, or a part of it: a function that ``jax.jit`` accepts, compiled or not. It is traced, and the program's state is
            not changed.
        arguments: Its arguments: trees of arrays, as of the bad step. Leaves that are not arrays or numbers are constants.
        static_argnums: Positions of arguments that are constants, such as sizes.
        keywords: Its keyword arguments.

    Returns:
        The first bad operation; None if all results are finite, or have only infinities that the program or its arguments contain as masks.

    Raises:
        ConfigError: an argument was donated to an earlier call, and has no values.
    """
    return evaluate_step(function, *arguments, static_argnums=static_argnums, **keywords).first_bad


def evaluate_step(
    function: Callable[..., Any], *arguments: Any, static_argnums: int | Sequence[int] = (), **keywords: Any
) -> StepEvaluation:
    """Evaluate a step operation by operation, and return its results too. See `find_first_bad`."""
    for name in ("programs", "source_info"):
        jax_names.require(name)
    tree = ArgumentTree.of(arguments, keywords, static_argnums)
    parameters = parameter_names(function, arguments, keywords)
    tree.check_present(parameters)
    inputs = [own_array(leaf) for leaf in tree.values]

    def flat(*dynamic: Any) -> Any:
        positional, by_name = tree.with_values(dynamic)
        return function(*positional, **by_name)

    with exact_lines():
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*inputs)
    return evaluate_program(closed, inputs, tree.names(parameters), shapes)


def evaluate_program(
    closed: Any,
    inputs: Sequence[Any],
    names: Sequence[str],
    shapes: Any,
    *,
    damages: Sequence[Mapping[int, str]] = (),
    limits: ProgramLimits | None = None,
) -> StepEvaluation:
    """Evaluate a traced program operation by operation.

    Args:
        closed: its jaxpr.
        inputs: an array for each of its inputs.
        names: names of these.
        shapes: tree of its results, as they were traced.
        damages: names of results by their places, in which damage is looked for first: of several, the first one with any. All results come last.
        limits: what it may take; None for no limits.
    """
    result_leaves, result_tree = jax.tree_util.tree_flatten_with_path(shapes)
    every = {place: f"result{suffix(path)}" for place, (path, _) in enumerate(result_leaves)}
    interpreter = _Interpreter(limits or ProgramLimits())
    try:
        results = interpreter.evaluate(closed, inputs, names)
    except _LimitReached as limit:
        first, results, ended = interpreter.first_made(), [], str(limit)
    else:
        found = (
            interpreter.first_bad([(name, results[place]) for place, name in damage.items()])
            for damage in (*damages, every)
        )
        first, ended = next((each for each in found if each is not None), None), ""
    return StepEvaluation(
        results=None
        if ended
        else jax.tree_util.tree_unflatten(result_tree, [each.array for each in results]),
        first_bad=first,
        contained=interpreter.contained if first is None else first.contained,
        evaluated=interpreter.evaluated,
        notes=tuple(interpreter.notes),
        ended=ended,
    )


class _LimitReached(Exception):  # noqa: N818 - no error
    """An evaluation has reached a limit, which is the text."""


@dataclass(frozen=True)
class _Scope:
    """The place of an equation: control flow, named scopes and devices around it."""

    path: tuple[str, ...] = ()
    iterations: tuple[LoopIteration, ...] = ()
    names: str = ""
    shards: ShardedBody | None = None

    def within(self, equation: Any) -> _Scope:
        names = str(equation.source_info.name_stack)
        return replace(self, names=f"{self.names}/{names}" if self.names and names else self.names or names)

    def iteration(self, loop: Literal["scan", "while"], number: int) -> _Scope:
        iterations = (*self.iterations, LoopIteration(loop, number))
        return replace(self, path=(*self.path, f"{loop}[{number}]"), iterations=iterations)


@dataclass
class _Interpreter:
    """Evaluates the equations of one step."""

    limits: ProgramLimits = field(default_factory=ProgramLimits)
    evaluated: int = 0
    contained: int = 0
    notes: dict[str, None] = field(default_factory=dict)
    _readers: dict[str, JaxOperation] = field(default_factory=dict)
    _references: list[tuple[str, Value]] = field(default_factory=list)
    _last_uses: dict[int, tuple[Any, list[list[Any]]]] = field(default_factory=dict)
    _bodies: dict[int, tuple[Any, ShardedBody]] = field(default_factory=dict)
    _updates: dict[int, Callable[..., Any]] = field(default_factory=dict)
    _first_made: JaxOperation | None = None
    _began: float = field(default_factory=time.monotonic)
    _before: int = 0
    _made_bytes: int = 0

    def evaluate(self, closed: Any, arguments: Sequence[Any], names: Sequence[str]) -> list[Value]:
        """Evaluate a whole program: the arguments are those of its jaxpr, in order."""
        if self.limits.bytes < math.inf:
            self._before = _live_bytes()
        inputs = []
        for array, name in zip(arguments, names, strict=True):
            value = self._given(array, name)
            if is_reference(array):
                self._references.append((name, value))
            inputs.append(value)
        constants = []
        for array in closed.consts:
            value = self._given(own_array(array), f"constant {_type_text(array)}")
            if is_reference(array):
                self._references.append((f"reference {_type_text(array)}", value))
            constants.append(value)
        return self._run(closed.jaxpr, constants, inputs, _Scope())

    def first_bad(self, results: Sequence[tuple[str, Value]]) -> FirstBad | None:
        """Return the first origin of what was damaged: results, else references, else results that are bad arguments."""
        for is_damage, values in (
            (_is_fault, results),
            (_is_fault, self._references),
            (_has_given_nan, results),
        ):
            damaged = [(name, value.provenance) for name, value in values if is_damage(value)]
            origins = {
                (origin.index, origin.argument): origin
                for _, provenance in damaged
                if provenance is not None
                for origin in provenance.origins
            }
            if origins:
                return self._first_of([origins[key] for key in sorted(origins)], damaged)
        return None

    def first_made(self) -> FirstBad | None:
        """Return the first operation that made NaN or infinity of finite values, of which it is not known whether they reach a result."""
        made, notes = self._first_made, tuple(self.notes)
        if made is None:
            return None
        return FirstBad("operation", made, "", None, ("not known",), (), 0, self.evaluated, notes)

    def _check_limits(self, equation: Any) -> None:
        seconds, size = self.limits.seconds, self.limits.bytes
        if time.monotonic() - self._began > seconds:
            raise _LimitReached(f"{seconds:.3g} seconds have passed after {self.evaluated} operations")
        if size == math.inf:
            return
        own = sum(_bytes_of(variable.aval) for variable in equation.outvars)
        self._made_bytes += own
        if self._made_bytes > size / 8:  # so much may have been made since the memory was looked at
            self._made_bytes = 0
            if _live_bytes() - self._before + own > size:
                raise _LimitReached(
                    f"it takes more than {size / 2**20:g} MiB after {self.evaluated} operations"
                )

    def _first_of(
        self, origins: list[BadSource], damaged: Sequence[tuple[str, Provenance | None]]
    ) -> FirstBad:
        first = origins[0]
        operations = [origin.operation for origin in origins if origin.operation is not None]
        return FirstBad(
            cause="argument" if first.operation is None else "operation",
            operation=first.operation or self._readers.get(first.argument),
            argument=first.argument,
            argument_figures=first.figures,
            reaches=tuple(name for name, each in damaged if each is not None and first in each.origins),
            others=tuple(each for each in operations if each is not first.operation),
            contained=self.contained - len(operations),
            evaluated=self.evaluated,
            notes=tuple(self.notes),
        )

    def _given(self, array: Any, name: str) -> Value:
        if not has_nonfinite(array):
            return Value(array)
        source = BadSource(-1, None, name, _figures(array, name))
        return Value(array, Provenance(InfinitySource.GIVEN, (source,)))

    # Evaluation

    def _run(self, jaxpr: Any, constants: Sequence[Value], inputs: list[Value], scope: _Scope) -> list[Value]:
        """Evaluate a jaxpr. The list of inputs is cleared, so that each is freed after its last use."""
        values: dict[Any, Value] = dict(zip(jaxpr.constvars, constants, strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))
        del constants
        inputs.clear()
        for equation, dying in zip(jaxpr.eqns, self._dying(jaxpr), strict=True):
            read = [_read(values, each) for each in equation.invars]
            for variable in dying:
                values.pop(variable, None)
            outputs = self._equation(equation, read, scope)
            read.clear()
            values.update(zip(equation.outvars, outputs, strict=True))
            del outputs
            for variable in equation.outvars:
                if type(variable).__name__ == "DropVar":
                    values.pop(variable, None)
        return [_read(values, each) for each in jaxpr.outvars]

    def _dying(self, jaxpr: Any) -> list[list[Any]]:
        """The variables that each equation is the last one to read."""
        if id(jaxpr) not in self._last_uses:
            dying: list[list[Any]] = [[] for _ in jaxpr.eqns]
            used = {each for each in jaxpr.outvars if not _is_literal(each)}
            for place in range(len(jaxpr.eqns) - 1, -1, -1):
                for each in jaxpr.eqns[place].invars:
                    if not _is_literal(each) and each not in used:
                        used.add(each)
                        dying[place].append(each)
            self._last_uses[id(jaxpr)] = (jaxpr, dying)
        return self._last_uses[id(jaxpr)][1]

    def _equation(self, equation: Any, inputs: list[Value], scope: _Scope) -> list[Value]:
        name = equation.primitive.name
        inner = scope.within(equation)
        if name in _CALLS and (called := self._called(equation, len(inputs), scope)) is not None:
            return self._run(*called, inputs, inner)
        if name == "scan" and equation.params["length"]:
            return self._scan(equation, inputs, inner)
        if name == "while":
            return self._while(equation, inputs, inner)
        if name == "cond":
            return self._cond(equation, inputs, inner)
        if name == "shard_map":
            return self._shard_map(equation, inputs, inner)
        if name in _SKIPPED:
            self.notes[f"{name} was not called"] = None
            return []
        if name == "io_callback":
            self.notes["io_callback was not called: its results are replaced by zeros"] = None
            return [Value(jnp.zeros(each.aval.shape, each.aval.dtype)) for each in equation.outvars]
        if name in IDENTITIES and len(inputs) == len(equation.outvars):
            return inputs[:]
        return self._operation(equation, inputs, inner)

    def _called(self, equation: Any, inputs: int, scope: _Scope) -> tuple[Any, list[Value]] | None:
        """The jaxpr and constants of a primitive that only calls a function; None if it has another form."""
        for parameter in _INNER:
            inner = equation.params.get(parameter)
            jaxpr = getattr(inner, "jaxpr", inner)
            if hasattr(jaxpr, "eqns") and len(jaxpr.invars) == inputs:
                return jaxpr, self._constants(inner, scope)
        return None

    def _constants(self, closed: Any, scope: _Scope) -> list[Value]:
        constants = getattr(closed, "consts", ())
        arrays = [scope.shards.repeat(each) for each in constants] if scope.shards else constants
        return [self._given(array, f"constant {_type_text(array)}") for array in arrays]

    def _operation(self, equation: Any, inputs: list[Value], scope: _Scope) -> list[Value]:
        """Evaluate one operation, and find out where what is not finite in its outputs comes from."""
        self._check_limits(equation)
        arrays = self._evaluated_arrays(equation, inputs, scope)
        index = self.evaluated
        self.evaluated += 1
        name = equation.primitive.name
        if name in {"swap", "addupdate"}:
            return self._written(equation, inputs, arrays, scope, index)
        if name in {"new_ref", "freeze"}:
            return [Value(arrays[0], inputs[0].provenance)]
        bad = [has_nonfinite(array) for array in arrays]
        if not any(bad):
            return [Value(array) for array in arrays]
        if name in POSITIONAL and len(arrays) == len(inputs):
            return [Value(array, each.provenance) for array, each in zip(arrays, inputs, strict=True)]
        provenance = self._explained(equation, inputs, arrays, scope, index)
        return [
            Value(array, provenance if is_bad else None) for array, is_bad in zip(arrays, bad, strict=True)
        ]

    def _explained(
        self, equation: Any, inputs: Sequence[Value], arrays: Sequence[Any], scope: _Scope, index: int
    ) -> Provenance:
        recorded: list[JaxOperation] = []

        def operation() -> JaxOperation:
            if not recorded:
                recorded.append(_record(equation, inputs, arrays, scope, index))
            return recorded[0]

        def record() -> BadSource:
            self.contained += 1
            self._first_made = self._first_made or operation()
            return BadSource(index, operation())

        def note_reader(source: BadSource) -> None:
            if source.argument not in self._readers:
                self._readers[source.argument] = operation()

        return explain(equation.primitive.name, inputs, arrays, record, note_reader)

    def _written(
        self, equation: Any, inputs: Sequence[Value], arrays: Sequence[Any], scope: _Scope, index: int
    ) -> list[Value]:
        """Note the provenance of a reference that an operation has changed."""
        reference, written = inputs[0], inputs[1]
        before = reference.provenance
        reference.provenance = None
        if has_nonfinite(reference.array):
            reference.provenance = merge((before, written.provenance)) or self._explained(
                equation, inputs, [contents(reference.array)], scope, index
            )
        return [Value(array, before if has_nonfinite(array) else None) for array in arrays]

    def _evaluated_arrays(self, equation: Any, inputs: Sequence[Value], scope: _Scope) -> list[Any]:
        arrays = [value.array for value in inputs]
        if scope.shards is not None:  # whose operations have the mesh of their own shard_map as context
            return scope.shards.evaluate(equation, lambda *local: bind_local(equation, local, _bind), arrays)
        with _place_of(equation):
            try:
                return _bind(equation, arrays)
            except NotImplementedError:  # a primitive that exists in compiled programs only
                return list(jax.jit(lambda *each: _bind(equation, each))(*arrays))

    # Control flow

    def _scan(self, equation: Any, inputs: list[Value], scope: _Scope) -> list[Value]:
        parameters = equation.params
        closed, length = parameters["jaxpr"], parameters["length"]
        first_carry, first_scanned = (
            parameters["num_consts"],
            parameters["num_consts"] + parameters["num_carry"],
        )
        constants, carry, scanned = (
            inputs[:first_carry],
            inputs[first_carry:first_scanned],
            inputs[first_scanned:],
        )
        inputs.clear()
        own = self._constants(closed, scope)
        stacked: list[Value] = []
        for turn in range(length):
            number = length - 1 - turn if parameters["reverse"] else turn
            slices = [self._slice(value, number, scope) for value in scanned]
            outputs = self._run(
                closed.jaxpr, own, [*constants, *carry, *slices], scope.iteration("scan", number)
            )
            del slices
            carry, made = outputs[: len(carry)], outputs[len(carry) :]
            if turn == 0:
                stacked = [Value(self._repeated(value, length, scope)) for value in made]
            for stack, value in zip(stacked, made, strict=True):
                stack.array = self._update(scope)(stack.array, value.array, number)
                stack.provenance = merge((stack.provenance, value.provenance))
        return [*carry, *stacked]

    def _slice(self, value: Value, number: int, scope: _Scope) -> Value:
        axis = 0 if scope.shards is None else 1
        array = jax.lax.dynamic_index_in_dim(value.array, number, axis, keepdims=False)
        return Value(array, value.provenance if value.provenance and has_nonfinite(array) else None)

    def _repeated(self, value: Value, length: int, scope: _Scope) -> Any:
        axis = 0 if scope.shards is None else 1
        array = jnp.expand_dims(self._local(value.array, scope), axis)
        return jnp.broadcast_to(array, (*array.shape[:axis], length, *array.shape[axis + 1 :]))

    def _local(self, array: Any, scope: _Scope) -> Any:
        """A literal that a body returns, as an array."""
        if scope.shards is not None and getattr(array, "ndim", 0) == 0:
            return scope.shards.repeat(array)
        return array

    def _update(self, scope: _Scope) -> Callable[..., Any]:
        """A compiled function that writes one element of a stacked output in place."""
        axis = 0 if scope.shards is None else 1
        if axis not in self._updates:
            self._updates[axis] = jax.jit(
                lambda stack, element, number: jax.lax.dynamic_update_index_in_dim(
                    stack, element, number, axis
                ),
                donate_argnums=0,
            )
        return self._updates[axis]

    def _while(self, equation: Any, inputs: list[Value], scope: _Scope) -> list[Value]:
        parameters = equation.params
        condition, body = parameters["cond_jaxpr"], parameters["body_jaxpr"]
        first_body = parameters["cond_nconsts"]
        first_carry = first_body + parameters["body_nconsts"]
        condition_constants, body_constants = inputs[:first_body], inputs[first_body:first_carry]
        initial = carry = inputs[first_carry:]
        if condition.out_avals[
            0
        ].shape:  # of a vmap: JAX repeats the body until no element continues, and selects
            return self._whole(equation, inputs, scope)
        number = 0
        while True:
            inner = scope.iteration("while", number)
            (predicate,) = self._run(
                condition.jaxpr, self._constants(condition, scope), [*condition_constants, *carry], inner
            )
            continues = _common_value(predicate.array)
            if continues is None:
                return self._whole(equation, [*condition_constants, *body_constants, *initial], scope)
            if not continues:
                return carry
            if scope.shards is None:
                initial = []  # only shards can disagree
            carry = self._run(body.jaxpr, self._constants(body, scope), [*body_constants, *carry], inner)
            number += 1

    def _cond(self, equation: Any, inputs: list[Value], scope: _Scope) -> list[Value]:
        branches = equation.params["branches"]
        index = _common_value(inputs[0].array)
        if index is None:
            return self._whole(equation, inputs, scope)
        number = min(max(int(index), 0), len(branches) - 1)
        inner = replace(scope, path=(*scope.path, f"cond[{number}]"))
        return self._run(branches[number].jaxpr, self._constants(branches[number], scope), inputs[1:], inner)

    def _shard_map(self, equation: Any, inputs: list[Value], scope: _Scope) -> list[Value]:
        parameters = equation.params
        mesh, jaxpr = parameters["mesh"], parameters["jaxpr"]
        manual = parameters.get("manual_axes", frozenset(mesh.axis_names))
        is_plain = isinstance(mesh, jax.sharding.Mesh) and set(manual) == set(mesh.axis_names)
        if scope.shards is not None or not is_plain or any(is_reference(each.array) for each in inputs):
            return self._whole(equation, inputs, scope)
        if id(jaxpr) not in self._bodies:
            self._bodies[id(jaxpr)] = (jaxpr, ShardedBody(mesh))
        body = self._bodies[id(jaxpr)][1]
        local = [
            Value(body.split(value.array, spec), value.provenance)
            for value, spec in zip(inputs, parameters["in_specs"], strict=True)
        ]
        inner = replace(scope, path=(*scope.path, "shard_map"), shards=body)
        try:
            outputs = self._run(jaxpr, [], local, inner)
        except (
            NotImplementedError,
            TypeError,
            ValueError,
        ) as error:  # an operation that needs the whole body
            self.notes[f"shard_map: {type(error).__name__}: {str(error).splitlines()[0][:200]}"] = None
            return self._whole(equation, inputs, scope)
        return [
            Value(body.join(self._local(value.array, inner), spec), value.provenance)
            for value, spec in zip(outputs, parameters["out_specs"], strict=True)
        ]

    def _whole(self, equation: Any, inputs: Sequence[Value], scope: _Scope) -> list[Value]:
        """Evaluate control flow as one operation."""
        name = equation.primitive.name
        where = " within shard_map, whose shards take different branches" if scope.shards is not None else ""
        self.notes[f"{name}{where} was evaluated as a whole: the operation inside is not named"] = None
        return self._operation(equation, list(inputs), scope)


def _live_bytes() -> int:
    """Return the size of all arrays of the process."""
    return sum(array.nbytes for array in jax.live_arrays())


def _bytes_of(kind: Any) -> int:
    return int(getattr(kind, "size", 0)) * int(getattr(getattr(kind, "dtype", None), "itemsize", 0))


def _bind(equation: Any, arrays: Sequence[Any]) -> list[Any]:
    parameters = equation.primitive.get_bind_params(equation.params)
    functions: Sequence[Any] = ()
    if isinstance(parameters, tuple):  # of JAX before 0.8
        functions, parameters = parameters
    result = equation.primitive.bind(*functions, *arrays, **parameters)
    return list(result) if equation.primitive.multiple_results else [result]


def _is_literal(variable: Any) -> bool:
    return isinstance(variable, jax_names.find("programs").Literal)


@contextmanager
def _place_of(equation: Any) -> Iterator[None]:
    """Settings of the program at an equation, and its line for errors."""
    with jax_names.find("source_info").user_context(equation.source_info.traceback), equation.ctx.manager:
        yield


def _record(
    equation: Any, inputs: Sequence[Value], outputs: Sequence[Any], scope: _Scope, index: int
) -> JaxOperation:
    shard = None
    if scope.shards is not None:
        health = next(
            (found for each in outputs if (found := health_of_array(each)) and found.first_bad), None
        )
        shard = None if health is None else health.first_bad[0]
    name = equation.primitive.name
    path = tuple(
        f"{part}[{shard}]" if part == "shard_map" and shard is not None else part for part in scope.path
    )
    return JaxOperation(
        index=index,
        primitive=name,
        path="/".join((*path, name)),
        iterations=scope.iterations,
        shard=shard,
        phase=phase_of(scope.names),
        module=module_of(scope.names),
        sites=call_sites(equation.source_info.traceback),
        inputs=tuple(_figures(value.array, _argument_of(value), shard) for value in inputs),
        outputs=tuple(_figures(each, "", shard) for each in outputs),
    )


def _argument_of(value: Value) -> str:
    provenance = value.provenance
    if provenance is None or provenance.source is not InfinitySource.GIVEN or len(provenance.origins) != 1:
        return ""
    return provenance.origins[0].argument


def _figures(value: Any, name: str = "", shard: int | None = None) -> ValueFigures:
    array = contents(value)
    if shard is not None and getattr(array, "ndim", 0) > 0:
        array = array[shard]
    dtype = getattr(array, "dtype", type(array).__name__)
    return ValueFigures(tuple(getattr(array, "shape", ())), str(dtype), health_of_array(array), name)


def _read(values: dict[Any, Value], each: Any) -> Value:
    if not _is_literal(each):
        return values[each]
    return Value(each.val, WRITTEN if has_nonfinite(each.val) else None, is_literal=True)


def _is_fault(value: Value) -> bool:
    return value.provenance is not None and value.provenance.source is InfinitySource.FAULT


def _has_given_nan(value: Value) -> bool:
    if value.provenance is None or value.provenance.source is not InfinitySource.GIVEN:
        return False
    health = health_of_array(value.array)
    return health is not None and health.nan > 0


def _common_value(array: Any) -> int | None:
    """The value of a predicate or branch; None if the shards differ."""
    values = np.asarray(array).reshape(-1)
    return int(values[0]) if (values == values[0]).all() else None


def _type_text(array: Any) -> str:
    return (
        f"{getattr(array, 'dtype', type(array).__name__)}[{'x'.join(map(str, getattr(array, 'shape', ())))}]"
    )
