"""What is told of the tries of actions: figures, log fields, spans."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from watchstep_services import logs, metrics, tracing
from watchstep_services.dispatcher.outbox import DueAction, Tried

_LONGEST = 500

_log = logging.getLogger(__name__)


class Trying:
    """One try as it goes on."""

    def __init__(self, due: DueAction, span: tracing.Spanned) -> None:
        self._due = due
        self._span = span

    def came_to(self, tried: Tried) -> None:
        """Tell what came of it; that it only waited is nothing to tell."""
        if tried.result == "waiting":
            self._span.drop()
            return
        metrics.ACTION_TRIES.labels(self._due.kind, tried.result).inc()
        if tried.result == "done" and self._due.kind in {"webhook", "notify"} and self._due.after_unknown:
            metrics.DUPLICATES.labels(self._due.kind).inc()
        self._span.say(outcome=tried.result, stage=tried.stage)
        if tried.result in {"error", "failed"}:
            self._span.fail(tried.result)  # the detail may hold what the receiver said
            _log.warning("%s not done: %s", self._due.kind, tried.detail[:_LONGEST])
        else:
            _log.info("%s %s", self._due.kind, tried.result)


@contextmanager
def trying(due: DueAction) -> Iterator[Trying]:
    """Observe a try; all that is done in it belongs to the trace of what caused the action."""
    attempt = str(due.payload["attempt"]) if "attempt" in due.payload else None
    named: dict[str, str | int] = {
        "action": due.id,
        "try": due.tries + 1,
        "project": due.project,
        "run": due.run,
    }
    with (
        logs.fields(project=due.project, run=due.run, attempt=attempt, action=due.id),
        tracing.span(f"watchstep.{due.kind}", due.traceparent, named) as span,
    ):
        yield Trying(due, span)


def lost() -> None:
    """Another worker has taken the action before the try was recorded."""
    metrics.LEASES_LOST.labels("action").inc()
