"""What happened to a run, as far as its store determines it: its state, its last step, what stopped it, and the steps of its bundles."""

from __future__ import annotations

from dataclasses import dataclass

from watchstep.errors import FormatError, NotFoundError
from watchstep.format import documents
from watchstep.format.bundle import bundle_keys
from watchstep.format.control import MAX_BYTES, RULE_REASON, ControlDocument, StopRequest
from watchstep.format.layout import CONTROL_DOCUMENT, ENDS
from watchstep.plots.binned import PlotMark
from watchstep.reading.run_documents import (
    ATTEMPT,
    END,
    get_document,
    newest_attempt,
    read_documents,
    read_state,
)
from watchstep.store.store import Store

_MAX_BUNDLES = 8
_OPEN = {
    "open": "is recording, or ended without an end document",
    "stopping": "is about to stop",
    "created": "has no records yet",
    "ended": "ended without records",
}


@dataclass(frozen=True)
class RuleStop:
    """The rule that stopped a run.

    Attributes:
        rule: name of the rule config.
        step: the step from which the run is bad, the first one of its findings.
        message: the finding in one line.
    """

    rule: str
    step: int
    message: str


def ended_after(bad_from: int, last_step: int) -> str:
    """Say what the end of a run that was bad cost: ``ended after step 308, 56 steps lost``.

    Args:
        bad_from: the step from which it was bad.
        last_step: the last step that it finished.
    """
    lost = max(0, last_step - bad_from + 1)
    return f"ended after step {last_step}, {lost:,} step{'' if lost == 1 else 's'} lost"


@dataclass(frozen=True)
class RunOutcome:
    """What happened to a run.

    Attributes:
        state: as in `watchstep.reading.run_documents.StoredState`.
        last_step: the last step that a worker of the newest attempt finished; of one without all ends, that any recorded; -1 without one.
        stop: the newest stop request; None without one.
        reason: why it stopped or failed, in one line; empty if it did neither.
        bundle_steps: steps whose inputs were saved because they went wrong, ascending.
    """

    state: str
    last_step: int
    stop: StopRequest | None = None
    reason: str = ""
    bundle_steps: tuple[int, ...] = ()

    @property
    def rule_stop(self) -> RuleStop | None:
        """The rule and the step from which the run was bad, if a rule stopped the run."""
        match = RULE_REASON.match(self.reason) if self.state in {"stopped", "stopping"} else None
        return None if match is None else RuleStop(match["rule"], int(match["step"]), match["message"])

    def as_sentence(self, run: str) -> str:
        """Say what happened to the run of this name, in one or two sentences."""
        last = f"the last step is {self.last_step}" if self.last_step >= 0 else "it has no step"
        ended = f"it ended after step {self.last_step}" if self.last_step >= 0 else "it has no step"
        if self.state == "completed":
            return f"Run {run} completed; {ended}."
        if self.state == "stopped":
            rule = self.rule_stop
            if rule is None:
                return f"Run {run} was stopped; {ended}. {_sentence(self.reason)}".strip()
            return (
                f"Run {run} was stopped by rule {rule.rule}: bad from step {rule.step}, "
                f"{ended_after(rule.step, self.last_step)}. {_sentence(rule.message)}"
            )
        if self.state == "failed":
            return f"Run {run} failed; {ended}. {_sentence(self.reason)}".strip()
        if self.state == "damaged":
            return f"Run {run} has a damaged document. {_sentence(self.reason)}"
        return f"Run {run} {_OPEN.get(self.state, self.state)}; {last}."

    def marks(self) -> list[PlotMark]:
        """Return its events for pictures: the alert that stopped it, its end, and bundled steps."""
        rule = self.rule_stop
        marks = [] if rule is None else [PlotMark(rule.step, rule.rule, "fired")]
        if self.state == "stopped":
            marks.append(PlotMark(self.last_step, "stopped", "stopped"))
        elif self.state == "failed":
            marks.append(PlotMark(self.last_step, "failed", "stopped"))
        fired = {mark.step for mark in marks}
        bundled = [step for step in self.bundle_steps if step not in fired]
        return marks + [PlotMark(step, "bundle") for step in bundled[:_MAX_BUNDLES]]


def _sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) or not text else ".")


def read_outcome(store: Store, recorded_step: int) -> RunOutcome:
    """Read what happened to a run. Damaged documents are omitted.

    Args:
        store: the run's store.
        recorded_step: the last step with records; -1 without one.

    Raises:
        StoreError: the store cannot be read.
    """
    state = read_state(store)
    newest = newest_attempt(read_documents(store, ATTEMPT).documents)
    # Steps of earlier attempts say nothing of where this one ended.
    ends = read_documents(store, END, "" if newest is None else f"{ENDS}{newest.attempt}/").documents
    last = max((end.last_step for end in ends), default=-1)
    if newest is None or len(ends) < newest.world_size:
        last = max(last, recorded_step)
    stop = _stop_request(store)
    bundles = tuple(sorted({key.step for key in bundle_keys(store)}))
    return RunOutcome(state.state, last, stop, _reason(state.state, state.damage, ends, stop), bundles)


def _reason(state: str, damage: str, ends: list[documents.EndDocument], stop: StopRequest | None) -> str:
    if state == "damaged":
        return damage
    reasons = [end.reason for end in sorted(ends, key=lambda end: end.ended_ns) if end.state == state]
    if state in {"stopped", "stopping"} and stop is not None:
        return stop.reason
    return next((reason for reason in reasons if reason), "")


def _stop_request(store: Store) -> StopRequest | None:
    try:
        return ControlDocument.decode(get_document(store, CONTROL_DOCUMENT, MAX_BYTES)).stop
    except (NotFoundError, FormatError):
        return None
