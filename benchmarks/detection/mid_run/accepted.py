"""Rules that are right about a fault, by what it does. A new rule joins the sets of the faults that it is made for."""

LOSS_RISES = frozenset(
    {
        "loss_spike",
        "lost_progress",
        "validation_loss_jump",
        "loss_not_decreasing",
        "oscillating_loss",
        "slow_convergence",
        "exploding_gradient",
    }
)
"""The loss leaps up, or back to where it began."""

EXPLODES = LOSS_RISES | {
    "invalid_objective",
    "nan_or_inf",
    "gradient_norm_spike",
    "weight_update_ratio",
    "dead_relu",
    "saturated_activation",
}
"""Weights, gradients or the loss grow without bound, or units die or saturate from updates that are far too large."""

RATE_RISES = EXPLODES | {"hyperparameter_jump", "learning_rate_scale"}
"""A rate or momentum is set far too high."""

STANDS_STILL = frozenset(
    {
        "weight_not_updating",
        "vanishing_gradient",
        "unchanged_tensor",
        "loss_not_decreasing",
        "slow_convergence",
        "absent_from_optimizer",
        "optimizer_not_stepping",
    }
)
"""Weights do not change any more."""

SHRINKS = LOSS_RISES | STANDS_STILL | {"all_zero", "hyperparameter_jump"}
"""Weights shrink to nothing."""

NOT_IN_OPTIMIZER = STANDS_STILL
"""Parameters are in no group of the optimizer that steps."""

COLLAPSES = frozenset({"representation_collapse"})
"""All examples get nearly the same output."""

STARVES = frozenset({"vanishing_gradient"})
"""A part gets no gradient beside another one that has won."""

NOT_FINITE = frozenset({"nan_or_inf", "non_finite_values", "exploding_gradient"})

SORTED = frozenset(
    {
        "oscillating_loss",
        "class_imbalance",
        "loss_spike",
        "lost_progress",
        "validation_loss_jump",
        "loss_not_decreasing",
    }
)
"""Batches of one class after the other."""

MEMORISED = frozenset({"overfit", "overtraining"})
