"""The gate policy in a compiled step: an update by gradients with NaN or infinity changes nothing.

The step selects on the device: updates are zero, and the optimizer's state is the one before. The host learns of it at the next dispatch.
Statistics that a forward pass has changed, such as those of batch normalization, are not part of the optimizer, and stay as they are.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from watchstep.jax.compiled_steps import plain_jit
from watchstep.jax.device_rows import finite, is_measurable
from watchstep.jax.traced_updates import TracedUpdate


def withheld_if_nonfinite(update: TracedUpdate, state: Any, result: Any) -> tuple[TracedUpdate, Any]:
    """Make an update depend on its gradients being finite. Called at trace time, or in an eager program.

    Args:
        update: the update; of accumulated gradients, those that are accumulated. If an earlier call of it was withheld, so is this one. One that
            the optimizer left out itself is as it returned it.
        state: the optimizer's state before it.
        result: updates and the optimizer's state after it, as the optimizer returned them.

    Returns:
        The update, which states whether it is withheld, and the result to return to the program.

    Raises:
        ValueError: the state has another structure after the update.
    """
    updates, after = result
    gradients = [jnp.asarray(leaf) for leaf in jax.tree_util.tree_leaves(update.gradients)]
    made, structure = jax.tree_util.tree_flatten(updates)
    # Of the state, what is no array of one shape stays as the optimizer returned it.
    new, new_structure = jax.tree_util.tree_flatten(after)
    old = new_structure.flatten_up_to(state)
    places = [place for place, pair in enumerate(zip(new, old, strict=True)) if _are_alike(*pair)]
    inputs = (
        [leaf for leaf in gradients if is_measurable(leaf.dtype)] if update.withheld is None else [],
        (update.withheld, update.skipped, update.emitted),
        made,
        [new[place] for place in places],
        [old[place] for place in places],
    )
    select = _select if any(map(_is_traced, jax.tree_util.tree_leaves(inputs))) else _compiled()
    withheld, emitted, made, selected = select(*inputs)
    for place, leaf in zip(places, selected, strict=True):
        new[place] = leaf
    updates, after = structure.unflatten(made), new_structure.unflatten(new)
    return replace(update, withheld=withheld, emitted=emitted), (updates, after)


def _select(
    gradients: list[Any], marks: tuple[Any, Any, Any], updates: list[Any], new: list[Any], old: list[Any]
) -> tuple[Any, Any, list[Any], list[Any]]:
    """Return whether an update is withheld and whether it is one, with the updates and the parts of the state that are selected."""
    withheld, skipped, emitted = marks
    if withheld is None:
        is_finite = finite(gradients)
        is_kept = is_finite if skipped is None else is_finite | skipped
    else:
        is_kept = jnp.logical_not(withheld)
    withheld = jnp.logical_not(is_kept)
    return (
        withheld,
        # Accumulation does not go on either, so that the step has no other mark.
        None if emitted is None else emitted | withheld,
        [jnp.where(is_kept, leaf, jnp.zeros_like(leaf)) for leaf in updates],
        [_selected(is_kept, *pair) for pair in zip(new, old, strict=True)],
    )


@functools.cache
def _compiled() -> Any:
    """Return `_select` compiled: outside of traces each ``cond`` in it would be compiled at each update, and each of its operations dispatched."""
    return plain_jit()(_select)


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.Tracer)


def _are_alike(new: Any, old: Any) -> bool:
    return hasattr(new, "dtype") and hasattr(old, "dtype") and bool(new.shape == old.shape)


def _selected(is_kept: Any, new: Any, old: Any) -> Any:
    """Return the new value of a part of the state, or the old one."""
    selected = jnp.where(is_kept, new, old)
    return selected if selected.dtype == new.dtype else selected.astype(new.dtype)
