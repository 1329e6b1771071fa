"""What the adapter of each framework records: the source of the tables of docs/reference/frameworks.md.

``tests/frameworks/test_default_rules.py`` compares it with recordings of each framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from watchstep.format import tensors
from watchstep.format.tensors import TensorInfo
from watchstep_rules.config.rule_config import RuleConfig

Judged = Literal["yes", "opt-in", "with data", "no"]
Roles = Mapping[str, tuple[str, ...]]
"""The roles of the tensors in a collection, by the collection's name."""

OWN_INPUTS: Mapping[str, str] = {
    "missing_zero_grad": "gradients:stale",
    "optimizer_not_stepping": "updates:overdue",
    "recompute_mismatch": "recomputed",
    "representation_collapse": "example_spread",
    "scaler_skips": "gradient_scaler:skipped",
    "skipped_updates": "updates:skipped",
    "symmetric_units": "unit_spread",
}
"""Rules that judge one metric or probe, by name. Other tensors of the same collection do not suffice."""


@dataclass(frozen=True)
class FrameworkSupport:
    """What an adapter provides.

    Attributes:
        name: the framework.
        adapter: how a program records.
        step: what a step is.
        collections: collections that every recording of a network, or of trees, has.
        on_data: collections of programs that pass data to the adapter.
        on_choice: collections of programs that choose to record them.
        own_inputs: those of `OWN_INPUTS` that exist.
        probes: probes, as text.
        hyperparameters: which hyperparameters are recorded.
        saved: full tensors, as text.
        nonfinite_stop: state of the weights when ``on_nonfinite="stop"`` stops; empty if no gradients are checked.
        guard: when a guard stops by `nan_or_inf`, or by another rule if there are no gradients.
        nonfinite_skip: whether ``on_nonfinite="skip"`` is possible, as text.
    """

    name: str
    adapter: str
    step: str
    collections: Roles
    on_data: Roles = field(default_factory=dict)
    on_choice: Roles = field(default_factory=dict)
    own_inputs: tuple[str, ...] = ()
    probes: str = "none"
    hyperparameters: str = ""
    saved: str = ""
    nonfinite_stop: str = ""
    guard: str = ""
    nonfinite_skip: str = "no"

    def records(self, collection: str) -> Judged:
        """Return whether tensors of a collection are recorded."""
        if collection in self.collections:
            return "yes"
        if collection in self.on_choice:
            return "opt-in"
        return "with data" if collection in self.on_data else "no"

    def judges(self, config: RuleConfig) -> Judged:
        """Return whether a rule has tensors to judge."""
        if config.rule == "training_stopped":
            return "yes"  # the recorder itself records it
        own = OWN_INPUTS.get(config.rule)
        if own is not None and own not in self.own_inputs:
            return "no"
        if any(_is_judged(config, info) for info in _examples(self.collections)):
            return "yes"
        if any(_is_judged(config, info) for info in _examples(self.on_choice)):
            return "opt-in"
        return "with data" if any(_is_judged(config, info) for info in _examples(self.on_data)) else "no"


def _examples(collections: Roles) -> list[TensorInfo]:
    return [
        TensorInfo("example", (name,), role, module_type="Linear", shape=(4, 4))
        for name, roles in collections.items()
        for role in roles
    ]


def _is_judged(config: RuleConfig, info: TensorInfo) -> bool:
    needs = config.implementation.needed(config.parameters)
    return config.tensors.selects(info, needs) and not needs.is_evidence(info)


_NETWORK: Roles = {
    tensors.WEIGHTS: ("weight",),
    tensors.BIASES: ("bias",),
    tensors.GRADIENTS: ("gradient",),
    tensors.LOSSES: ("loss",),
}
_METRICS: Roles = {tensors.METRICS: ("metric",)}
_LABELS: Roles = {tensors.LABELS: ("label",)}
_BOOSTED: Roles = {
    tensors.LOSSES: ("loss",),
    **_METRICS,
    tensors.CUSTOM: ("tree_depth", "feature_importance"),
}
_BOOSTED_DATA: Roles = {
    tensors.OUTPUTS: ("output",),
    tensors.LABELS: ("label",),
    tensors.CONFUSION: ("confusion",),
    tensors.CUSTOM: ("custom",),
}
_SAVED = "weights and gradients"
_BEFORE, _AFTER = "before the bad update", "after the bad update"

FRAMEWORKS: tuple[FrameworkSupport, ...] = (
    FrameworkSupport(
        name="PyTorch",
        adapter="`hook.watch(model, optimizer)`",
        step="an update",
        collections={
            **_NETWORK,
            **_METRICS,
            tensors.ACTIVATIONS: ("output",),
            tensors.INPUTS: ("input",),
            tensors.OUTPUTS: ("output",),
            tensors.UPDATES: ("update",),
            tensors.OPTIMIZER_STATE: ("momentum", "second_moment", "state"),
            tensors.BUFFERS: ("buffer",),
            tensors.CHECKSUMS: ("checksum",),
            tensors.NOT_IN_OPTIMIZER: ("not_in_optimizer",),
        },
        on_data={tensors.LABELS: ("label",), tensors.CONFUSION: ("confusion",)},
        own_inputs=tuple(OWN_INPUTS.values()),
        probes="[all](../guides/recording.md#probes)",
        hyperparameters="of each parameter group",
        saved="weights, gradients, activations, inputs, outputs, optimizer state",
        nonfinite_stop=_BEFORE,
        guard=_BEFORE,
        nonfinite_skip="yes",
    ),
    FrameworkSupport(
        name="JAX",
        adapter="`watchstep.jax.Recording(hook)`",
        step="an update of optax",
        collections={**_NETWORK, **_METRICS},
        on_data=_LABELS,
        on_choice={tensors.ACTIVATIONS: ("output",)},
        probes="`channels` of activations",
        hyperparameters="of `optax.inject_hyperparams`",
        saved=f"{_SAVED}, on a CPU",
        nonfinite_stop=_BEFORE,
        guard=_AFTER,
        nonfinite_skip="yes",
    ),
    FrameworkSupport(
        name="Keras 3",
        adapter="`watchstep.keras.Recording(hook)`",
        step="a batch",
        collections={**_NETWORK, **_METRICS},
        own_inputs=("gradient_scaler:skipped",),
        hyperparameters="learning rate",
        saved=_SAVED,
        nonfinite_stop=f"{_AFTER}; before it in eager code",
        guard=f"{_AFTER}; before it in eager code",
        nonfinite_skip="no; `LossScaleOptimizer` does it",
    ),
    FrameworkSupport(
        name="TensorFlow 2",
        adapter="`watchstep.tensorflow.Recording(hook)`",
        step="an outermost `tape.gradient`",
        collections=_NETWORK,
        on_data=_LABELS,
        hyperparameters="none",
        saved=_SAVED,
        nonfinite_stop=f"{_AFTER}; before it in eager code",
        guard=f"{_AFTER}; before it in eager code",
    ),
    FrameworkSupport(
        name="XGBoost",
        adapter="`watchstep.xgboost.Recording(hook)`",
        step="a boosting round",
        collections=_BOOSTED,
        on_data=_BOOSTED_DATA,
        probes="of trees, importance and classes",
        hyperparameters="all numbers of the booster",
        saved="predictions, labels, residuals, SHAP values",
        guard="after the round",
    ),
    FrameworkSupport(
        name="LightGBM",
        adapter="`watchstep.lightgbm.Recording(hook)`",
        step="a boosting round",
        collections=_BOOSTED,
        on_data=_BOOSTED_DATA,
        probes="of trees, importance and classes",
        hyperparameters="all numbers of the booster",
        saved="predictions, labels, residuals, SHAP values",
        guard="after the round",
    ),
)
