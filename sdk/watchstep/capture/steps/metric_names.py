"""Names of metrics that adapters of frameworks record and rules read."""

from __future__ import annotations

NONFINITE_APPLIED = "gradients:nonfinite_applied"
"""1 at a step whose update applied NaN or infinite gradients, 0 at one that did not."""

WITHHELD = "updates:skipped"
"""1 at a step with an update that the gate policy left out, 0 at the first step after it without one."""

STOPPED = "training:stopped"
"""Start of the name of a metric, before ``@`` and the reason: 1 at the step at which the gate policy or a guard stopped the training."""

LOADED = "weights:loaded"
"""1 at a step after which the program loaded a state dictionary into a watched model."""

SCALE = "gradient_scaler:scale"
"""The scale of the loss under a gradient scaler."""

SKIPPED = "gradient_scaler:skipped"
"""1 at a step whose update the gradient scaler skipped."""

RECOMPUTED = "recomputed"
"""End of the names of metrics: the difference between an output and the same one, computed again by activation checkpointing in the backward pass."""

HAS_STATE = "has_state"
"""End of the name of an optimizer's metric: whether it has momentum or other state before its first and its second update, 1 or 0."""

STALLED = "training:stalled"
"""Start of the name of a metric, before ``@`` and the line: seconds without the end of a step, at the last step that was handed over, of a training whose thread does not move."""

IN_PROCESS = "training:in_process"
"""1 at the first step of a training that follows another one in the same process: a resume, another phase with a copy of the model, or a fold of a cross-validation."""
