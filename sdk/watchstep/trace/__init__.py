"""Traces of single operations: what each one read and wrote, in which module and source line, and which one failed first.

Nothing here is imported when a run is recorded. `Tracer` needs PyTorch; reading a trace does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from watchstep.trace.frames import (
        FramesConfig,
        ModuleFrame,
        OverflowDetectedError,
        OverflowFrames,
        detect_overflow,
        frames_of,
        render_frames,
    )
    from watchstep.trace.operations import CallSite, Operation, TensorHealth, Trace, TracedTensor, TraceMode
    from watchstep.trace.origins import BadOrigin, Diagnosis, diagnose
    from watchstep.trace.report import render_diagnosis
    from watchstep.trace.trace_file import read_trace, write_trace
    from watchstep.trace.tracer import TraceConfig, Tracer

__all__ = [
    "BadOrigin",
    "CallSite",
    "Diagnosis",
    "FramesConfig",
    "ModuleFrame",
    "Operation",
    "OverflowDetectedError",
    "OverflowFrames",
    "TensorHealth",
    "Trace",
    "TraceConfig",
    "TraceMode",
    "TracedTensor",
    "Tracer",
    "detect_overflow",
    "diagnose",
    "frames_of",
    "read_trace",
    "render_diagnosis",
    "render_frames",
    "write_trace",
]

_MODULES = {
    "FramesConfig": "frames",
    "ModuleFrame": "frames",
    "OverflowDetectedError": "frames",
    "OverflowFrames": "frames",
    "detect_overflow": "frames",
    "frames_of": "frames",
    "render_frames": "frames",
    "BadOrigin": "origins",
    "CallSite": "operations",
    "Diagnosis": "origins",
    "Operation": "operations",
    "TensorHealth": "operations",
    "Trace": "operations",
    "TraceConfig": "tracer",
    "TraceMode": "operations",
    "TracedTensor": "operations",
    "Tracer": "tracer",
    "diagnose": "origins",
    "read_trace": "trace_file",
    "render_diagnosis": "report",
    "write_trace": "trace_file",
}


def __getattr__(name: str) -> Any:
    """Load a name's module on first use."""
    if name in _MODULES:
        return getattr(import_module(f"watchstep.trace.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'watchstep.trace' has no attribute {name!r}")
