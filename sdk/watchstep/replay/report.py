"""The result of a replay as text and as JSON data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from watchstep.platform.terminal_text import printable
from watchstep.replay.replayer import GradientDifference, ReplayResult
from watchstep.trace.report import render_diagnosis

_MAX_LOST = 5
_MAX_MISSING = 3


def render_replay(result: ReplayResult, *, verbose: bool = False) -> str:
    """Render a result: whether the step is reproduced, how exactly, and its first bad operation.

    Args:
        result: The result.
        verbose: Whether all lost values, further origins and whole stacks are shown.
    """
    text = "\n".join(map(printable, _lines(result, verbose=verbose))) + "\n"
    if result.trace is not None and result.diagnosis is not None:
        if not result.is_reproduced:
            text += "of the replay, whose failure is not known to be that of the step:\n"
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
        "verdict": _verdict(result, verbose=True),
        "unrestored": list(result.unrestored),
        "uncompared": list(result.uncompared),
        "has_finite": result.has_finite,
        "has_drawn": result.has_drawn,
        "captured": result.captured,
        "trace_difference": result.trace_difference,
        "losses": [
            [None if before is None else _number(before), _number(after)] for before, after in result.losses
        ],
        "gradients": result.gradients,
        "equal_gradients": result.equal_gradients,
        "uncomputed": list(result.uncomputed),
        "undetermined": list(result.undetermined),
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
        recorded = "not observed" if before is None else f"{before:.6g} recorded"
        yield f"  loss of micro-batch {number}: {recorded}, {after:.6g} replayed"
    yield f"  gradients: {result.equal_gradients} of {result.gradients} are equal bit for bit"
    if result.uncomputed:
        yield f"  {len(result.uncomputed)} gradients are recorded and were not computed, as {result.uncomputed[0]}"
    if result.undetermined:
        yield f"  {len(result.undetermined)} gradients differ by an unknown amount, as {result.undetermined[0]}: the bundle has only their digests"
    if result.largest is not None:
        yield f"  largest difference: {_difference(result.largest)}"
    if result.update_is_nonfinite is not None:
        yield f"  the update makes parameters {'non-finite' if result.update_is_nonfinite else 'finite'}"
    yield f"reproduced: {_verdict(result, verbose=verbose)}"
    if result.trace_difference:
        yield (
            "no first bad operation: the step was computed again for the trace, and differs from the computation that was compared: "
            f"{result.trace_difference}"
        )
    yield from (f"note: {problem}" for problem in result.problems)
    yield from (f"hint: {hint}" for hint in _hints(result))
    lost = document.lost if verbose else document.lost[:_MAX_LOST]
    yield from (f"lost: {each.path}: {each.reason}" for each in lost)
    if len(lost) < len(document.lost):
        yield f"lost: {len(document.lost) - len(lost)} more values (--verbose)"


def _difference(largest: GradientDifference) -> str:
    if math.isinf(largest.relative):
        return f"{largest.name} has elements that are finite, NaN or infinite in one of them only"
    return f"{largest.relative:.3g} of {largest.name}"


def _hints(result: ReplayResult) -> Iterator[str]:
    """Yield likely causes of a difference, for a replay with the recorded precision."""
    if result.trace_difference:
        yield (
            "keep state that a step changes in attributes of the model, not in globals or in the loss function; use deterministic operations, and a model "
            "without torch.compile"
        )
    if result.are_equal or result.precision != "captured":
        return
    if result.uncomputed:
        yield "the program computes gradients that ReplayStep.loss does not; return the sum of all losses"
    elif not result.losses_are_equal:
        yield (
            "a loss differs: the step depends on something that the bundle does not have, such as a counter or a schedule of the program; give it to "
            "hook.batch((batch, value)), or set it in the function that returns the ReplayStep"
        )
    elif result.gradients and not result.has_before_update:
        yield "the losses are equal and the gradients are not: if the program or its trainer clips gradients, do so in ReplayStep.before_update"


def _verdict(result: ReplayResult, *, verbose: bool) -> str:
    verdict = _verdict_of_failure(result) if result.has_failed else _verdict_of_values(result)
    for what, names in (("restored", result.unrestored), ("compared", result.uncompared)):
        if names:
            shown = names if verbose else names[:_MAX_MISSING]
            more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
            verdict += f"; not {what}: {', '.join(shown)}{more}"
    return verdict


def _verdict_of_values(result: ReplayResult) -> str:
    if result.is_exact:
        return (
            "yes, bit for bit"
            if result.gradients
            else "yes: the losses are equal bit for bit; no gradients are recorded"
        )
    if result.are_equal:
        return "yes, all compared values are equal bit for bit"
    if result.difference is not None:
        return f"yes, within {result.difference:.3g}"
    if result.undetermined:
        return "not known: the bundle has only digests of gradients that differ"
    if not result.has_compared and not result.uncomputed:
        return "not known: neither losses nor gradients are recorded"
    return "no: the losses differ" if not result.losses_are_equal else "no: the gradients differ"


_NOTHING_FINITE = "all compared values are NaN, infinite or zero, and their equality does not show that it is the same failure"


def _verdict_of_failure(result: ReplayResult) -> str:
    if result.fails_again:
        return _verdict_of_repeated_failure(result)
    if result.is_nonfinite or result.update_is_nonfinite:
        return "no: the step fails in another way: a loss is finite, NaN or infinite in one of them only, or other gradients are not finite"
    if result.precision != "captured":
        return f"no: the step is finite in {result.precision}{_role_of_precision(result)}"
    return "no: the step is finite in the replay"


def _role_of_precision(result: ReplayResult) -> str:
    """Return what is known of the part that the captured precision has in a failure that is not in another precision."""
    if result.captured == "finite":
        return "; the replay in the captured precision is finite, too"
    if result.captured != "fails again":
        return ", and the replay in the captured precision is not known to fail as recorded"
    if result.has_drawn:
        return "; it draws random numbers, which may be others in this precision"
    if result.unrestored:
        return ""
    return ", and fails again in the captured precision, which is a part of the cause"


def _verdict_of_repeated_failure(result: ReplayResult) -> str:
    if not result.is_reproduced:
        differ = _NOTHING_FINITE if result.are_near else "the compared values differ"
        if not result.has_compared:
            differ = "neither losses nor gradients are compared"
        return f"not known: the step fails again, but {differ}"
    if result.is_exact:
        verdict = "yes, bit for bit"
    elif result.are_equal:
        verdict = "yes, the step is not finite again"
        verdict += ", and all compared values are equal bit for bit" if result.has_finite else ""
    else:
        verdict = "yes, the step is not finite again, but not bit for bit"
    return verdict if result.has_finite else f"{verdict}; {_NOTHING_FINITE}"
