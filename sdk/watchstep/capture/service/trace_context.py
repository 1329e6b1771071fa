"""W3C's ``traceparent``, by which a service's trace continues the program's; made by hand, with no library."""

from __future__ import annotations

import secrets
import sys

HEADER = "traceparent"


def current_span() -> str:
    """The ``traceparent`` of this thread's current span; empty without one, or where OpenTelemetry was not loaded."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    try:
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return ""
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    except Exception:  # noqa: BLE001 - whatever somebody put in its place, recording goes on
        return ""


def new_trace() -> str:
    """The ``traceparent`` of a trace that begins here. Takes nothing from the program's random generators."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
