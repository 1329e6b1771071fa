"""The result of a replay as text and as JSON data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from watchstep.platform.terminal_text import printable
from watchstep.replay.replayer import ReplayResult
from watchstep.trace.report import render_diagnosis

_MAX_LOST = 5


def render_replay(result: ReplayResult, *, verbose: bool = False) -> str:
    """Render a result: whether the step is reproduced, how exactly, and its first bad operation.

    Args:
        result: The result.
        verbose: Whether all lost values, further origins and whole stacks are shown.
    """
    text = "\n".join(map(printable, _lines(result, verbose=verbose))) + "\n"
    if result.trace is not None and result.diagnosis is not None:
        text += render_diagnosis(result.trace, result.diagnosis, verbose=verbose)
    return text


def replay_data(result: ReplayResult) -> dict[str, Any]:
    """Return a result as JSON data, without its trace."""
    document = result.bundle.document
    return {
        "bundle": result.bundle.name,
        "step": document.step,
        "reason": document.reason,
        "is_failing": document.is_failing,
        "device": result.device,
        "precision": result.precision,
        "is_reproduced": result.is_reproduced,
        "is_exact": result.is_exact,
        "losses": [[_number(before), _number(after)] for before, after in result.losses],
        "gradients": result.gradients,
        "equal_gradients": result.equal_gradients,
        "largest_difference": None
        if result.largest is None
        else {"name": result.largest.name, "relative": _number(result.largest.relative)},
        "was_nonfinite": result.was_nonfinite,
        "is_nonfinite": result.is_nonfinite,
        "update_is_nonfinite": result.update_is_nonfinite,
        "problems": list(result.problems),
        "lost": [[lost.path, lost.reason] for lost in document.lost],
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _lines(result: ReplayResult, *, verbose: bool) -> Iterator[str]:
    document = result.bundle.document
    run = document.run
    kind = "the failing step" if document.is_failing else "the next complete step after it was requested"
    yield (
        f"step {document.step} of {run.get('project')}/{run.get('run')}, attempt {run.get('attempt')}, "
        f"worker {run.get('worker')}: {kind} ({document.reason})"
    )
    yield f"replayed on {result.device} in {result.precision} precision"
    for number, (before, after) in enumerate(result.losses):
        yield f"  loss of micro-batch {number}: {before:.6g} recorded, {after:.6g} replayed"
    yield f"  gradients: {result.equal_gradients} of {result.gradients} are equal bit for bit"
    if result.largest is not None:
        yield f"  largest difference: {result.largest.relative:.3g} of {result.largest.name}"
    if result.update_is_nonfinite is not None:
        yield f"  the update makes parameters {'non-finite' if result.update_is_nonfinite else 'finite'}"
    yield f"reproduced: {_verdict(result)}"
    yield from (f"note: {problem}" for problem in result.problems)
    lost = document.lost if verbose else document.lost[:_MAX_LOST]
    yield from (f"lost: {each.path}: {each.reason}" for each in lost)
    if len(lost) < len(document.lost):
        yield f"lost: {len(document.lost) - len(lost)} more values (--verbose)"


def _verdict(result: ReplayResult) -> str:
    if result.is_exact:
        return "yes, bit for bit"
    failed = result.was_nonfinite or result.bundle.document.is_failing
    if not result.is_reproduced:
        if failed and result.precision != "captured":
            return f"no: the step is finite in {result.precision}, so the captured precision is a part of the cause"
        return "no: the step is finite in the replay" if failed else "no: the gradients differ"
    if failed:
        return "yes, the step is not finite again, but not bit for bit"
    assert result.largest is not None
    return f"yes, within {result.largest.relative:.3g}"
