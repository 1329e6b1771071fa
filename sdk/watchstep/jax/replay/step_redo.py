"""A failing step of a JAX program, computed again to name the operation and the line that failed.

The gate policy has withheld the update of the step, and the arguments of its call are kept (`watchstep.jax.replay.step_bundles`). The function is traced anew, so
that its operations have their own lines, and is evaluated operation by operation. If a bad number was in an argument, earlier calls without an update are evaluated
too: a program may compute gradients in one compiled function, and pass them to an optimizer in another one or outside of any.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from watchstep.capture.steps.own_work import own_work
from watchstep.capture.steps.session import Session
from watchstep.capture.tensors.snapshots import StoredFile
from watchstep.format.layout import TraceKey
from watchstep.jax import compiled_steps
from watchstep.jax.compiled_steps import CompiledStep
from watchstep.jax.internals import jax_names
from watchstep.jax.names import path_words
from watchstep.jax.replay.argument_trees import LostLeaf, own_array, parameter_names
from watchstep.jax.replay.first_bad import FirstBad
from watchstep.jax.replay.first_bad_trace import trace_of
from watchstep.jax.replay.interpreter import ProgramLimits, StepEvaluation, evaluate_program
from watchstep.jax.replay.source_frames import exact_lines
from watchstep.jax.replay.step_bundles import (
    MAX_REFERENCED_BYTES,
    OVERWRITTEN,
    BundledCall,
    StepBundles,
    updated_places,
)
from watchstep.jax.replay.value_health import has_nonfinite, is_reference
from watchstep.jax.stacked_layers import places_of_inputs
from watchstep.jax.traced_updates import UpdateOutputs, is_optimizing
from watchstep.trace.report import render_cause, render_diagnosis, suspects
from watchstep.trace.trace_file import encode_trace
from watchstep.updates.update_recorder import Update

_LIMITS = ProgramLimits(60.0, 2 * 2**30)
"""What the evaluation of a step may take, as for PyTorch."""

_SECONDS_AT_END = 10.0
"""The time at the end of the program, which may have to end soon."""

_ENDED = "it was not computed to its end: {}"

_OUTSIDE = "it was not computed again: what made its gradients NaN or infinite ran outside of compiled functions, or the arguments of their calls are not kept"

_CARRIED = " (parameter)", " (state)"
"""Ends of the names of arguments that no earlier call of the same step has made."""

_MAX_CALLS = 16
"""Number of calls without an update before one, whose arguments are kept, within `MAX_REFERENCED_BYTES`."""

_TOLERANCE = 1e-2
"""Difference of the results of two evaluations that round otherwise, relative to the largest element."""


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a call as far as they are known.

    Attributes:
        positional: positional arguments.
        keywords: keyword arguments.
        names: name of each leaf.
        kinds: of each leaf: parameter, state or data.
        notes: what is not as it was, as sentences.
    """

    positional: tuple[Any, ...]
    keywords: dict[str, Any]
    names: list[str]
    kinds: list[str]
    notes: tuple[str, ...]


@dataclass
class _Known:
    """What is known of a bad update besides the arguments of its call.

    Attributes:
        update: the update.
        unmoved: as in `UpdateOutputs`.
        leaves: value and kind of its parameters and of other arguments of its call, by the ids of the arrays that the program passed.
    """

    update: Update
    unmoved: Any
    leaves: dict[int, tuple[Any, str]]


class _NotAgainError(Exception):
    """A call cannot be computed again, for the reason that is the text."""


class CallRedo:
    """Computes the failing step of one hook again. Used on the training thread; its faults never reach training."""

    def __init__(self, session: Session, worker: int, bundles: StepBundles) -> None:
        """Start to keep the arguments of calls.

        Args:
            session: the recording.
            worker: the rank.
            bundles: keeps them.
        """
        self._session, self._worker, self._bundles = session, worker, bundles
        self._limits = _LIMITS
        self._recent: deque[BundledCall] = deque(maxlen=_MAX_CALLS)
        self._is_done = False
        if not bundles.keeps_all:
            session.health.note("explain", "no step is computed again, because 'bundles: null' keeps none")
            return
        compiled_steps.plain_calls.append(self._called)

    def program_ends(self) -> None:
        """Take less time from now on."""
        self._limits = replace(self._limits, seconds=min(self._limits.seconds, _SECONDS_AT_END))

    def close(self) -> None:
        """Keep no more arguments."""
        self._recent.clear()
        if self._called in compiled_steps.plain_calls:
            compiled_steps.plain_calls.remove(self._called)

    def _called(self, function: CompiledStep, arguments: Any, result: Any) -> None:
        """Keep the arguments of a call that made no update."""
        if own_work.depth or is_optimizing():  # optax compiles parts of its own
            return
        own_work.enter()
        try:
            self._recent.append(self._bundles.plain_called(function, arguments, result))
            if sum(call.plan.kept_bytes for call in self._recent) > MAX_REFERENCED_BYTES:
                self._drop_oldest()
        except Exception as error:  # noqa: BLE001 - never into the program
            self._session.health.fault("explain", error)
        finally:
            own_work.leave()

    def _drop_oldest(self) -> None:
        """Drop the oldest calls until the arrays of the others, each counted once, are within the limit."""
        while self._recent:
            arrays = {id(leaf): leaf for call in self._recent for leaf in call.leaves.values()}
            if sum(getattr(leaf, "nbytes", 0) for leaf in arrays.values()) <= MAX_REFERENCED_BYTES:
                return
            self._recent.popleft()

    def take_recent(self) -> tuple[BundledCall, ...]:
        """Return the calls without an update since the last one, and forget them."""
        recent = tuple(self._recent)
        self._recent.clear()
        return recent

    def explain(
        self,
        call: BundledCall | None,
        earlier: Sequence[BundledCall],
        step: int,
        update: Update,
        *,
        parameters: Sequence[Any],
        unmoved: Any,
    ) -> str:
        """Compute a step again, and print and record what it shows.

        Args:
            call: the call that made the update; None for an update outside of compiled functions, or whose arguments are not kept.
            earlier: calls without an update before it.
            step: the number of the step.
            update: the update.
            parameters: the parameters of an update outside of compiled functions.
            unmoved: as in `UpdateOutputs`.

        Returns:
            The end of the sentence that states why the training stops.
        """
        if self._is_done or not self._bundles.keeps_all:
            return ""
        self._is_done = True
        if jax.process_count() > 1:  # operations on divided arrays wait for all of them
            return f"it was not computed again: its arrays are divided among {jax.process_count()} processes"
        sys.stderr.write(f"watchstep: step {step} is not finite, and is computed again under a trace\n")
        known = _Known(update, unmoved, {id(each): (each, "parameter") for each in parameters})
        own_work.enter()
        try:
            with jax.transfer_guard("allow"):
                return self._explained(call, earlier, known, step)
        finally:
            own_work.leave()

    def _explained(
        self, call: BundledCall | None, earlier: Sequence[BundledCall], known: _Known, step: int
    ) -> str:
        """Return the sentence about the first of some calls that made NaN or infinity; about the first one if none has."""
        until = time.monotonic() + self._limits.seconds
        outcomes: list[Callable[[], str]] = []
        for each in [*([] if call is None else [call]), *sorted(earlier, key=_has_finite_outputs)]:
            try:
                arguments = self._arguments_of(each, known, is_update=each is call)
                evaluation = self._evaluated(each, arguments, max(0.0, until - time.monotonic()))
            except _NotAgainError as reason:
                outcomes.append(functools.partial("it was not computed again: {}".format, reason))
                continue
            first = evaluation.first_bad
            if first is not None:
                named = functools.partial(self._named, first, evaluation, arguments, step)
                if first.cause == "operation" or first.argument.endswith(_CARRIED):
                    return named()
                outcomes.insert(0, named)
            elif evaluation.ended:
                outcomes.append(functools.partial(f"{_ENDED}; all is finite so far".format, evaluation.ended))
            elif each is call:
                outcomes.append(functools.partial(self._finite, each, arguments, evaluation))
        return outcomes[0]() if outcomes else _OUTSIDE

    # --- Arguments ---------------------------------------------------------------------------------------------------------------

    def _arguments_of(self, call: BundledCall, known: _Known, *, is_update: bool) -> _Arguments:
        """Return the arguments of a call. A lost one that the program carries from call to call has its later value.

        Raises:
            _NotAgainError: one is lost, or was changed.
        """
        if call.is_overwritten:
            raise _NotAgainError(OVERWRITTEN)
        plan = call.plan
        values, carried = self._bundles.values_of(call, known.unmoved, known.update)
        positional, keywords = jax.tree_util.tree_unflatten(plan.kind[0], values)
        parameters = parameter_names(call.function.__wrapped__, positional, keywords)
        names = [plan.tree.name(place, parameters) for place in range(len(values))]
        later = self._bundles.later_values(call) if is_update else {}
        kinds = ["state" if place in carried | later.keys() else "data" for place in range(len(values))]
        for place in plan.parameters:
            kinds[place] = "parameter"
        if is_update:
            known.leaves |= {
                identity: (values[place], kinds[place]) for identity, place in call.identities.items()
            }
        notes: list[str] = []
        for place, own in enumerate(values):
            value, kind = own, kinds[place]
            if isinstance(own, jax.Array):
                value, kind = known.leaves.get(id(own), (own, kind))
                if isinstance(value, jax.Array) and value.is_deleted():
                    value = LostLeaf("the program donates it")
            if isinstance(value, LostLeaf):
                if place not in later or has_nonfinite(later[place]):
                    raise _NotAgainError(f"{kind} {names[place]} is lost, because {value.reason}")
                notes.append(f"{names[place]} is of after the step")
                value = later[place]
            is_kept_reference = place in plan.references and not is_reference(value)
            values[place] = jax_names.require("new_ref")(value) if is_kept_reference else value
            kinds[place] = kind
        if len(notes) > 1:
            notes = [f"{notes[0]}, and so are {len(notes) - 1} more, because the step donates them"]
        positional, keywords = jax.tree_util.tree_unflatten(plan.kind[0], values)
        return _Arguments(positional, keywords, names, kinds, tuple(notes))

    # --- Evaluation --------------------------------------------------------------------------------------------------------------

    def _evaluated(self, call: BundledCall, arguments: _Arguments, seconds: float) -> StepEvaluation:
        """Evaluate a call operation by operation, for some seconds."""
        positional, keywords = arguments.positional, arguments.keywords
        with exact_lines():
            traced = call.function.traced_again(positional, keywords)
        places = places_of_inputs(traced, positional, keywords)
        if places is None:
            raise _NotAgainError("its arguments are not those of its trace")
        leaves, kinds = jax.tree_util.tree_leaves((positional, keywords)), arguments.kinds
        for layout in [each.layout for each in traced.out_info[1] if isinstance(each, UpdateOutputs)]:
            for kind, own in zip(("parameter", "state"), updated_places(layout), strict=True):
                for place in own:
                    kinds[place] = kind
        return evaluate_program(
            traced.jaxpr,
            [own_array(leaves[place]) for place in places],
            [f"{arguments.names[place]} ({kinds[place]})" for place in places],
            traced.out_info,
            damages=_damages(traced.out_info),
            limits=replace(self._limits, seconds=seconds),
        )

    def _named(self, first: FirstBad, evaluation: StepEvaluation, arguments: _Arguments, step: int) -> str:
        """Print and record the first bad operation, and return the sentence about it."""
        notes = list(arguments.notes)
        if evaluation.ended:
            notes.append(
                f"the evaluation ended: {evaluation.ended}; whether it reached the gradients is not known"
            )
        if first.operation is None:
            cause = f"{first.argument} was not finite before the step"
        else:
            trace, diagnosis = trace_of(first, step)
            worker = self._worker
            self._session.snapshot_writer.offer(
                StoredFile(
                    lambda attempt: TraceKey(attempt, worker, step, step).path,
                    lambda: np.frombuffer(encode_trace(trace), np.uint8),
                    "traces",
                )
            )
            lines = render_diagnosis(trace, diagnosis).splitlines()
            sys.stderr.write("".join(f"watchstep: {line}\n" for line in lines))
            cause = render_cause(trace, diagnosis)
        return f"{cause}{' (approximate: ' + '; '.join(notes) + ')' if notes else ''}"

    def _finite(self, call: BundledCall, arguments: _Arguments, evaluation: StepEvaluation) -> str:
        """Return what a finite result means. The compiled function is called once more with the same arguments."""
        if arguments.notes:
            return f"it is finite when it is computed again, but not all of it was restored: {'; '.join(arguments.notes)}"
        again = None
        if not (evaluation.notes or call.plan.references):  # else it changes what is the program's
            copies = jax.tree_util.tree_map(_copy, (arguments.positional, arguments.keywords))
            again = call.function.called_again(*copies)
        if again is None:
            return "it is finite when it is computed again operation by operation; the compiled step was not called again"
        leaves, own = jax.tree_util.tree_leaves(again[0]), jax.tree_util.tree_leaves(evaluation.results[0])
        if any(map(has_nonfinite, jax.tree_util.tree_leaves(again))):
            return (
                "it is finite when it is computed again operation by operation, and not finite when the compiled step is called again: "
                "operations that XLA fuses or reorders round otherwise, so that a number near the limit of its type overflows or cancels in only one of them"
            )
        if not all(map(_are_near, leaves, own)):
            return "it is finite when it is computed again, with other results each time: it depends on what is no argument of the compiled step"
        losses = [update.loss for update in evaluation.results[1] if isinstance(update, UpdateOutputs)]
        values = ", ".join(f"{float(loss):.6g}" for loss in losses if loss is not None)
        return (
            "not reproducible: computed again operation by operation and by the compiled step from the same arguments, it is finite with equal "
            f"{f'losses ({values})' if values else 'results'}; {suspects(self._worker)}"
        )


def _damages(shapes: Any) -> list[dict[int, str]]:
    """Return the names of gradients and losses of updates among the results of a traced step, by their places: damage is looked for there first."""
    names: dict[int, str] = {}
    result, updates = shapes
    place = len(jax.tree_util.tree_leaves(result))
    for update in updates:
        if isinstance(update, UpdateOutputs):
            for number, path in enumerate(update.layout.paths):
                names[place + number] = f"gradient of {'.'.join(path_words(path)) or 'parameter'}"
            if update.loss is not None:
                names[place + len(update.gradients)] = "loss"
        place += len(jax.tree_util.tree_leaves(update))
    return [names] if names else []


def _has_finite_outputs(call: BundledCall) -> bool:
    """Return whether no result of a call that still exists is known to have NaN or infinity."""
    results = (reference() for reference in call.outputs.values())
    return not any(has_nonfinite(each) for each in results if each is not None and not each.is_deleted())


def _copy(leaf: Any) -> Any:
    """Return a copy of an array, which a call may delete."""
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def _are_near(first: Any, second: Any) -> bool:
    """Return whether two arrays are equal up to the rounding of a step."""
    if not jnp.issubdtype(first.dtype, jnp.inexact):
        return True
    a, b = np.asarray(first).astype(np.complex128), np.asarray(second).astype(np.complex128)
    return not a.size or float(np.abs(a - b).max()) <= _TOLERANCE * max(
        float(np.abs(b).max()), sys.float_info.min
    )
