"""Recording of JAX programs: ``from watchstep.jax import Recording``. First bad operations: ``find_first_bad``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from watchstep.jax.optimizers import observed
    from watchstep.jax.recording import Recording
    from watchstep.jax.replay.interpreter import evaluate_step, find_first_bad
    from watchstep.jax.replay.step_arguments import JaxStep, save_bundle

__all__ = ["JaxStep", "Recording", "evaluate_step", "find_first_bad", "observed", "save_bundle"]

_MODULES = {
    "JaxStep": "replay.step_arguments",
    "Recording": "recording",
    "evaluate_step": "replay.interpreter",
    "find_first_bad": "replay.interpreter",
    "observed": "optimizers",
    "save_bundle": "replay.step_arguments",
}
"""Module of each name. A program that is only observed for its first update does not import the others."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("jax")  # a program without JAX cannot go on
    try:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    except Exception as error:
        if name != "Recording":
            raise
        from watchstep.capture.framework_names import unrecorded

        return unrecorded("JAX", error)
