"""Observation of optax: the outermost transformation of a chain shows gradients as the program computed them, before clipping.

`install` changes the constructor of `optax.GradientTransformation`, so that optimizers that are created afterwards are observed. At
run time nothing is called: the wrapper runs when a step is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from watchstep.jax.internals import jax_names
from watchstep.jax.traced_updates import (
    TracedUpdate,
    is_observed,
    is_read,
    note_loss,
    note_not_observed,
    note_update,
    optimizer_call,
    report,
    withholds_nonfinite,
)
from watchstep.jax.update_parts import earlier_call, remember

_MARK = "_watchstep_observed"


def install() -> None:
    """Observe optimizers that are created from now on, and losses of `jax.value_and_grad`. Does nothing the second time."""
    import optax

    kind = optax.GradientTransformation
    if not hasattr(kind, _MARK):
        setattr(kind, _MARK, True)
        kind.__new__ = _observing_new(kind.__new__)
        multi = getattr(optax, "MultiSteps", None)
        if multi is not None:
            multi.update = _observing_method(multi.update)
    install_losses()


def install_losses() -> None:
    """Observe losses of `jax.value_and_grad` from now on. Does nothing the second time."""
    if not hasattr(jax.value_and_grad, _MARK):
        jax.value_and_grad = _noting_losses(jax.value_and_grad)
        setattr(jax.value_and_grad, _MARK, True)


def observed(optimizer: Any) -> Any:
    """Return an optimizer that is observed, of one that was created before this module was imported.

    Args:
        optimizer: an `optax.GradientTransformation`.
    """
    if hasattr(optimizer.update, _MARK):
        return optimizer
    return optimizer._replace(update=ObservedTransformation(optimizer.update))


def _observing_new(new: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(new)
    def create(kind: Any, *arguments: Any, **keywords: Any) -> Any:
        created = new(kind, *arguments, **keywords)
        try:
            if callable(created.update) and not hasattr(created.update, _MARK):
                return tuple.__new__(kind, (created.init, ObservedTransformation(created.update)))
        except Exception as error:  # noqa: BLE001 - never into the program
            report("optimizer", error)
        return created

    return create


class ObservedTransformation:
    """The update function of an optimizer, observed. Equal to that of an optimizer with an equal function, as programs compare optimizers."""

    def __init__(self, update: Callable[..., Any]) -> None:
        functools.update_wrapper(self, update)
        self._update = update
        setattr(self, _MARK, True)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Update, and note it."""
        return _observed_call(self._update, None, arguments, keywords)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObservedTransformation) and bool(other._update == self._update)

    def __hash__(self) -> int:
        return hash(self._update)

    def __reduce__(self) -> Any:
        # A callable that is read where Watchstep is not installed.
        return functools.partial, (self._update,)


def _observing_method(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return _observed_call(functools.partial(update, self), self, arguments, keywords)

    setattr(call, _MARK, True)
    return call


def _observed_call(
    update: Callable[..., Any], owner: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    with optimizer_call() as is_outermost:
        result = update(*arguments, **keywords)
    if not is_outermost:
        return result
    if not is_observed():
        note_not_observed()
        return result
    try:
        given = dict(zip(("updates", "state", "params"), arguments, strict=False)) | keywords
        if not {"updates", "state"} <= given.keys():
            return result  # a function of the program's own that is no optimizer's
        earlier = earlier_call(given["updates"], given.get("params"))
        if earlier is None and _averages(given["state"]):
            return result
        traced = _described(owner, given, result)
        if traced is None:
            return result
        if earlier is not None:
            traced = replace(traced, withheld=earlier.withheld)
        if withholds_nonfinite() and is_read():
            from watchstep.jax.update_guard import withheld_if_nonfinite

            traced, result = withheld_if_nonfinite(traced, given["state"], result)
        call = remember(result[0], given["updates"], given.get("params"), traced.withheld)
        note_update(replace(traced, returned=call), earlier)
    except Exception as error:  # noqa: BLE001 - never into the program
        report("update", error)
    return result


def _averages(state: Any) -> bool:
    """Return whether a state is that of `optax.ema` alone, by which programs average weights or losses: it makes no update by itself."""
    import optax

    return isinstance(state, optax.EmaState)


def _described(owner: Any, given: dict[str, Any], result: Any) -> TracedUpdate | None:
    """Describe a call of an optimizer; None if its gradients are unknown."""
    gradients, state, parameters = given["updates"], given["state"], given.get("params")
    _, after = result
    emitted = None
    if _accumulates(state):
        emitted = after.gradient_step != state.gradient_step
        gradients = _accumulated(owner, gradients, state)
        if gradients is None:
            return None
        if parameters is None:
            parameters = gradients
    skipped, unmoved = _left_out(given["updates"], state, result)
    return TracedUpdate(
        gradients,
        parameters,
        _hyperparameters(after),
        emitted=emitted,
        skipped=skipped,
        unmoved=unmoved,
        passed=given["updates"],
        state=state,
    )


def _left_out(gradients: Any, state: Any, result: Any) -> tuple[Any, Any]:
    """Return whether an optimizer left its update out by itself, and whether the update of each parameter is zero then, as `UpdateOutputs` has them.

    States do not tell all of it. `optax.apply_if_finite` applies NaN after some errors in a row, and parts of an `optax.partition` decide each for
    its parameters. An update is left out if a part says so, all updates are finite, and those by gradients with NaN or infinity are zero.
    """
    updates, after = result
    kinds = _parts(state, _may_leave_out), _parts(after, _may_leave_out)
    parts = zip(*([part for part in kind if _may_leave_out(part)] for kind in kinds), strict=False)
    left_out = [_left_out_by_state(before, part) for before, part in parts]
    if not left_out:
        return None, None
    is_any = functools.reduce(jnp.logical_or, left_out)
    if _accumulates(after):
        return is_any, None  # `optax.MultiSteps` leaves out all of a batch
    given, made = jax.tree_util.tree_leaves(gradients), jax.tree_util.tree_leaves(updates)
    is_known = jax.tree_util.tree_structure(gradients) == jax.tree_util.tree_structure(updates)

    def changes_nothing() -> Any:
        pairs = zip(given if len(given) == len(made) else [jnp.nan] * len(made), made, strict=True)
        return functools.reduce(jnp.logical_and, [_changes_nothing(*pair) for pair in pairs], is_any)

    def zeros() -> Any:
        return jnp.stack([jnp.all(jnp.asarray(update) == 0) for update in made])

    # A good step does not read its updates again. Outside of traces each `cond` would be compiled.
    if not isinstance(is_any, jax.core.Tracer):
        return changes_nothing(), None
    if not (is_known and made):
        return jax.lax.cond(is_any, changes_nothing, lambda: is_any), None
    none = jnp.zeros(len(made), bool)
    skipped, unmoved = jax.lax.cond(is_any, lambda: (changes_nothing(), zeros()), lambda: (is_any, none))
    return skipped, unmoved


def _left_out_by_state(before: Any, after: Any) -> Any:
    """Return whether a part of an optimizer left out its update, or would have before it gave up, as its state says."""
    if _accumulates(after):
        return (after.mini_step == before.mini_step) & (after.gradient_step == before.gradient_step)
    return jnp.logical_not(after.last_finite)


def _changes_nothing(gradient: Any, update: Any) -> Any:
    """Return whether an update is finite, and zero if its gradient is not, bool of shape ()."""
    gradient, update = jnp.asarray(gradient), jnp.asarray(update)
    if not jnp.issubdtype(update.dtype, jnp.inexact):
        return jnp.asarray(True)
    is_finite = not jnp.issubdtype(gradient.dtype, jnp.inexact) or jnp.all(jnp.isfinite(gradient))
    return jnp.all(jnp.where(is_finite, jnp.isfinite(update), update == 0))


def _accumulated(owner: Any, gradients: Any, state: Any) -> Any:
    """Return the gradients that `optax.MultiSteps` has accumulated, this call's included; None if that is unknown."""
    add = None if owner is None else jax_names.of(owner, "multi_steps_sum")
    if add is None:
        return gradients if owner is None else None
    return jax.tree_util.tree_map(
        lambda gradient, sum_: add(gradient, sum_, n_acc=state.mini_step), gradients, state.acc_grads
    )


def _hyperparameters(state: Any) -> dict[str, Any]:
    """Return the numbers that `optax.inject_hyperparams` keeps in the state, also within a chain; of several with one name, the first."""
    found: dict[str, Any] = {}
    for part in _parts(state, _has_hyperparameters):
        if _has_hyperparameters(part):
            numbers = {name: value for name, value in part.hyperparams.items() if jnp.ndim(value) == 0}
            found = {**numbers, **found}
    return found


def _parts(state: Any, is_part: Callable[[Any], bool]) -> list[Any]:
    """Return the parts of a state of a kind, also within a chain, and its other leaves."""
    return list(jax.tree_util.tree_leaves(state, is_leaf=is_part))


def _checks_finite(part: Any) -> bool:
    """Return whether a state is that of `optax.apply_if_finite`."""
    return hasattr(part, "last_finite") and hasattr(part, "notfinite_count")


def _accumulates(part: Any) -> bool:
    """Return whether a state is that of `optax.MultiSteps`."""
    return hasattr(part, "mini_step") and hasattr(part, "gradient_step")


def _may_leave_out(part: Any) -> bool:
    return _checks_finite(part) or _accumulates(part)


def _has_hyperparameters(part: Any) -> bool:
    return isinstance(getattr(part, "hyperparams", None), dict)


def _noting_losses(value_and_grad: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(value_and_grad)
    def transform(fun: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        differentiate = value_and_grad(fun, *arguments, **keywords)
        has_aux = keywords.get("has_aux", arguments[1] if len(arguments) > 1 else False)

        @functools.wraps(differentiate)
        def call(*values: Any, **named: Any) -> Any:
            result = differentiate(*values, **named)
            try:
                note_loss(result[0][0] if has_aux else result[0], result[1])
            except Exception as error:  # noqa: BLE001 - as above
                report("loss", error)
            return result

        return call

    return transform
