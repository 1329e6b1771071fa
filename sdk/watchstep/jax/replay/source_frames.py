"""The source lines of a primitive: the frames of the user's program in which JAX traced it, and the phase of the step that it belongs to.

JAX keeps the source line of the forward operation for the operations that differentiation makes of it, and gives it also to those of a
backward pass that the program defines by ``custom_vjp``. `exact_lines` gives these their own lines.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from watchstep.jax.internals import jax_names
from watchstep.trace.operations import CallSite, Phase, is_library

_MAX_FRAMES = 16
_PACKAGE = f"{Path(__file__).parents[2]}/"
_REPLAY = f"{Path(__file__).parent}/"
_JAX = f"{Path(jax.__file__).parent}/"


_EVALUATORS = ("/interpreters/ad.py", "/state/discharge.py", "/checkify.py")
_EVALUATOR = "eval_jaxpr"
"""Files and a function of JAX that evaluate an operation that was traced before, at the line of which they set the source line."""
_tracing = threading.RLock()


@contextmanager
def exact_lines() -> Iterator[None]:
    """Give operations that the program's functions make within a transformation of JAX their own lines, while a program is traced.

    JAX has no public way to it. Where its internals are others than expected, such operations have the line of the call.
    """
    if not jax_names.has("source_lines", "source_context", "tracebacks"):
        yield
        return
    current, context = jax_names.find("source_lines"), jax_names.find("source_context")
    traceback_type, internal = jax_names.find("tracebacks"), sys.modules[current.__module__]

    def exact() -> Any:
        info = current()
        if context.context.traceback is None:  # then it is the line where Python is
            return info
        traceback = traceback_type.get_traceback()
        return info.replace(traceback=traceback) if _is_of_program(traceback) else info

    with _tracing:
        internal.current = exact  # type: ignore[attr-defined]
        try:
            yield
        finally:
            internal.current = current  # type: ignore[attr-defined]


def _is_of_program(traceback: Any) -> bool:
    """Whether a function of the program runs inside of the innermost evaluator, and not only around it."""
    for frame in traceback.frames:
        if not frame.file_name.startswith((_JAX, _PACKAGE)):
            return True
        if frame.file_name.endswith(_EVALUATORS) or frame.function_name == _EVALUATOR:
            return False
    return False


def call_sites(traceback: Any) -> tuple[CallSite, ...]:
    """Return the frames of a traceback of JAX, innermost first, without those of JAX and of Watchstep.

    Those of other installed packages, such as optax, are marked as of a library. At most 16.
    """
    sites: list[CallSite] = []
    for frame in () if traceback is None else traceback.frames:
        if frame.file_name == __file__:
            continue
        if frame.file_name.startswith(_REPLAY):
            break  # what is outside of it called the interpreter
        if frame.file_name.startswith((_PACKAGE, _JAX, "<frozen")):
            continue  # also what observes calls of the program, such as those of its optimizer
        function = str(frame.function_name).rpartition(".<locals>.")[2]
        sites.append(CallSite(frame.file_name, frame.line_num, function, is_library(frame.file_name)))
    return tuple(sites[:_MAX_FRAMES])


def phase_of(names: str) -> Phase:
    """Return the phase of an operation from JAX's name stack."""
    if "rematted_computation" in names:
        return "recomputation"
    return "backward" if "transpose(" in names else "forward"


def module_of(names: str) -> str:
    """Return the named scopes of a name stack, as ``encoder/attention``, without the transformations of JAX around them."""
    scopes = []
    for part in names.split("/"):
        inner = part.rpartition("(")[2].rstrip(")")
        if inner and not part.startswith(_PLUMBING) and inner not in _OWN_SCOPES:
            scopes.append(inner)
    return "/".join(scopes)


_PLUMBING = (
    "jit(",
    "pjit(",
    "checkpoint",
    "remat",
    "rematted_computation",
    "while",
    "cond",
    "scan",
    "body",
    "branch_",
)
_OWN_SCOPES = frozenset({"jvp", "transpose", "vmap", "checkpoint", "closed_call", "body", "cond", "while"})
