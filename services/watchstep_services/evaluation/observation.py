"""What is told of an evaluation: figures, log fields, and the span that leads from an announcement to what it caused."""

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
    """One evaluation as it goes on."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._began = time.perf_counter()
        self._began_ns = time.time_ns()

    def claimed(self, claim: Claim) -> None:
        """From now on the log names the run."""
        self._stack.enter_context(logs.fields(project=claim.project, run=claim.run))

    @contextmanager
    def committing(self, claim: Claim, outcome: EvaluationOutcome) -> Iterator[None]:
        """The commit, and with it the span of the whole evaluation: what is written in it belongs to its trace.

        Of several announcements that are judged together it continues the one that made an alert fire, or else the newest;
        it is linked to the others.
        """
        attempt = outcome.collected.attempt
        came = [entry.traceparent for entry, _ in outcome.collected.blocks if entry.traceparent]
        parent = _cause(outcome) or (came[-1] if came else "")
        named: dict[str, str | int] = {
            "project": claim.project, "run": claim.run, "attempt": attempt, "segments": len(outcome.collected.blocks),
        }  # fmt: skip
        links = [trace for trace in came if trace != parent]
        with (
            logs.fields(attempt=attempt),
            tracing.span("watchstep.evaluate", parent, named, links=links, began_ns=self._began_ns),
        ):
            yield

    def committed(self, claim: Claim, outcome: EvaluationOutcome) -> None:
        """It is in the database."""
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
                # The rule's name is one of those that there are, not the config's, which is the user's.
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
    """Count how an evaluation ended."""
    metrics.EVALUATIONS.labels(outcome).inc()
    if outcome == "fenced":
        metrics.LEASES_LOST.labels("evaluation").inc()


def _cause(outcome: EvaluationOutcome) -> str:
    """The trace of the segment whose step made an alert fire; empty for none."""
    for judged in outcome.judged:
        for transition in judged.transitions:
            if transition.phase is not Phase.FIRING or transition.revised:
                continue
            for entry, _ in outcome.collected.blocks:
                if entry.traceparent and entry.key.first <= transition.step <= entry.key.last:
                    return entry.traceparent
    return ""
