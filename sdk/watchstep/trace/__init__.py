"""Traces of single operations: what each one read and wrote, in which module and source line, and which one failed first.

Nothing here is imported when a run is recorded. `Tracer` needs PyTorch; reading a trace does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from watchstep.trace.alerts import InfNanAlert, alerts_of
    from watchstep.trace.comparison import OperationDifference, TraceDifference, TraceParting, compare_traces
    from watchstep.trace.debugger_v2 import read_debugger_v2
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
    from watchstep.trace.report import render_diagnosis, render_trace_difference
    from watchstep.trace.stored_traces import open_trace, saved_traces
    from watchstep.trace.trace_file import read_trace, write_trace
    from watchstep.trace.tracer import TraceConfig, Tracer

__all__ = [
    "BadOrigin",
    "CallSite",
    "Diagnosis",
    "FramesConfig",
    "InfNanAlert",
    "ModuleFrame",
    "Operation",
    "OperationDifference",
    "OverflowDetectedError",
    "OverflowFrames",
    "TensorHealth",
    "Trace",
    "TraceConfig",
    "TraceDifference",
    "TraceMode",
    "TraceParting",
    "TracedTensor",
    "Tracer",
    "alerts_of",
    "compare_traces",
    "detect_overflow",
    "diagnose",
    "frames_of",
    "open_trace",
    "read_debugger_v2",
    "read_trace",
    "render_diagnosis",
    "render_frames",
    "render_trace_difference",
    "saved_traces",
    "write_trace",
]

_MODULES = {
    "InfNanAlert": "alerts",
    "alerts_of": "alerts",
    "read_debugger_v2": "debugger_v2",
    "open_trace": "stored_traces",
    "saved_traces": "stored_traces",
    "OperationDifference": "comparison",
    "TraceDifference": "comparison",
    "TraceParting": "comparison",
    "compare_traces": "comparison",
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
    "render_trace_difference": "report",
    "write_trace": "trace_file",
}


def __getattr__(name: str) -> Any:
    """Load a name's module on first use."""
    if name in _MODULES:
        return getattr(import_module(f"watchstep.trace.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'watchstep.trace' has no attribute {name!r}")
