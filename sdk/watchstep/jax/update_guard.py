"""The gate policy in a compiled step: an update by gradients with NaN or infinity changes nothing.

The step selects on the device: updates are zero, and the optimizer's state is the one before. The host learns of it at the next dispatch.
Statistics that a forward pass has changed, such as those of batch normalization, are not part of the optimizer, and stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

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
    if update.withheld is None:
        leaves = [jnp.asarray(leaf) for leaf in jax.tree_util.tree_leaves(update.gradients)]
        is_finite = finite([leaf for leaf in leaves if is_measurable(leaf.dtype)])
        is_kept = is_finite if update.skipped is None else is_finite | update.skipped
    else:
        is_kept = jnp.logical_not(update.withheld)
    updates = jax.tree_util.tree_map(lambda leaf: jnp.where(is_kept, leaf, jnp.zeros_like(leaf)), updates)
    after = jax.tree_util.tree_map(lambda new, old: _selected(is_kept, new, old), after, state)
    withheld = jnp.logical_not(is_kept)
    # Accumulation does not go on either, so that the step has no other mark.
    emitted = None if update.emitted is None else update.emitted | withheld
    return replace(update, withheld=withheld, emitted=emitted), (updates, after)


def _selected(is_kept: Any, new: Any, old: Any) -> Any:
    """Return the new value of a part of the state, or the old one; the new one if they are not arrays of one shape."""
    if not (hasattr(new, "dtype") and hasattr(old, "dtype")) or new.shape != old.shape:
        return new
    selected = jnp.where(is_kept, new, old)
    return selected if selected.dtype == new.dtype else selected.astype(new.dtype)
