"""Telemetry of an evaluation: metrics, log fields, and the span that links an announcement to its effects."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from watchstep_rules.engine.alert import Phase
from watchstep_rules.registry import RULES
from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.core.telemetry import logs, metrics, tracing
from watchstep_services.evaluation.commit import EvaluationOutcome
from watchstep_services.runs.claim import Claim


class Observation:
    """Telemetry of one evaluation in progress."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._began = time.perf_counter()
        self._began_ns = time.time_ns()

    def claimed(self, claim: Claim) -> None:
        """Add the run to the log fields."""
        self._stack.enter_context(logs.fields(project=claim.project, run=claim.run))

    @contextmanager
    def committing(self, claim: Claim, outcome: EvaluationOutcome) -> Iterator[None]:
        """The span of the commit and of the whole evaluation; outbox rows written in it belong to its trace.

        If several announcements are evaluated together, the span continues the trace of the one that made an alert
        fire, or else the newest trace, and links to the others.
        """
        attempt = outcome.collected.attempt
        traces = [entry.traceparent for entry, _ in outcome.collected.blocks if entry.traceparent]
        parent = _cause(outcome) or (traces[-1] if traces else "")
        named: dict[str, str | int] = {
            "project": claim.project, "run": claim.run, "attempt": attempt, "segments": len(outcome.collected.blocks),
        }  # fmt: skip
        links = [trace for trace in traces if trace != parent]
        with (
            logs.fields(attempt=attempt),
            tracing.span("watchstep.evaluate", parent, named, links=links, began_ns=self._began_ns),
        ):
            yield

    def committed(self, claim: Claim, outcome: EvaluationOutcome) -> None:
        """Record the metrics of a committed evaluation."""
        took = time.perf_counter() - self._began
        metrics.EVALUATION_SECONDS.observe(took)
        now_ns = claim.now_ns + int(took * NANOSECONDS)
        for entry, _ in outcome.collected.blocks:
            metrics.LAG_SECONDS.observe(max(0.0, (now_ns - entry.found_ns) / NANOSECONDS))
        metrics.SEGMENTS.labels("read").inc(len(outcome.collected.blocks))
        metrics.SEGMENTS.labels("corrupt").inc(len(outcome.collected.corrupt))
        metrics.SEGMENTS.labels("missing").inc(
            sum(gap.until - gap.start for gap in outcome.collected.missing)
        )
        for judged in outcome.judged:
            if judged.config is not None:
                # Only names of built-in rules become labels: a config's name is the user's.
                rule = judged.config.rule if judged.config.rule in RULES else "other"
                metrics.RULE_SECONDS.labels(rule).observe(judged.seconds)


@contextmanager
def observing() -> Iterator[Observation]:
    """Observe an evaluation; one that raises is counted as failed."""
    with ExitStack() as stack:
        try:
            yield Observation(stack)
        except Exception:
            metrics.EVALUATIONS.labels("failed").inc()
            raise


def count_outcome(outcome: str) -> None:
    """Count the outcome of an evaluation."""
    metrics.EVALUATIONS.labels(outcome).inc()
    if outcome == "fenced":
        metrics.LEASES_LOST.labels("evaluation").inc()


def _cause(outcome: EvaluationOutcome) -> str:
    """The trace of the segment that made an alert fire; empty for none."""
    for judged in outcome.judged:
        for transition in judged.transitions:
            if transition.phase is not Phase.FIRING or transition.revised:
                continue
            for entry, _ in outcome.collected.blocks:
                if entry.traceparent and entry.key.first <= transition.step <= entry.key.last:
                    return entry.traceparent
    return ""
