"""Answers of the service as plain data, arrays and Arrow tables. Unknown fields of later versions are only in ``raw``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from watchstep.errors import ServiceError

if TYPE_CHECKING:
    from watchstep.plots.plot_figure import PlotFigure

Document = TypeVar("Document")


@dataclass(frozen=True)
class RunInfo:
    """A run in a list. ``alerts`` maps phases to numbers; ``notes`` is the number of firing alerts with severity info. Times are nanoseconds since the epoch."""

    project: str
    run: str
    url: str
    state: str
    attempt: str
    last_step: int
    created_ns: int
    ended_ns: int | None
    alerts: Mapping[str, int]
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class RuleStatus:
    """Status of a run's rule config. Its health (ok, no_data, error) is separate from its alert's phase."""

    name: str
    rule: str
    origin: str
    granted_stop: bool
    health: str
    problem: str
    warnings: tuple[str, ...]
    phase: str
    config: Mapping[str, Any]
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class RunState:
    """A run with its control document, job, rules and health."""

    info: RunInfo
    control: Mapping[str, Any]
    job: Mapping[str, Any] | None
    rules: tuple[RuleStatus, ...]
    health: Mapping[str, Any]


class RecordedRun(Protocol):
    """A recorded run that can draw an alert: `watchstep.Run`."""

    def plot_alert(self, rule: str, finding: Mapping[str, Any]) -> PlotFigure:
        """Draw an alert."""


@dataclass(frozen=True)
class Alert:
    """An alert: a rule config on one attempt. ``details`` is set once it has fired."""

    run: str
    name: str
    rule: str
    attempt: str
    severity: str
    phase: str
    since_step: int
    since_ns: int
    fired_ns: int | None
    resolved_ns: int | None
    finding: Mapping[str, Any] | None
    details: Mapping[str, Any] | None
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    def plot(self, run: RecordedRun) -> PlotFigure:
        """Draw the series that the alert is about, with the threshold, around its step; needs the extra ``plots``.

        Args:
            run: the recorded run of the alert, as `watchstep.open_run` returns it.

        Raises:
            ConfigError: matplotlib is not installed, or the alert has no finding yet.
            StoreError: the store cannot be read.
        """
        return run.plot_alert(self.name, self.finding or {})

    def _repr_html_(self) -> str:
        from watchstep.plots.notebook import notebook_html

        finding, details = self.finding or {}, self.details or {}
        explanation = details.get("explanation") or {}
        facts = [
            ("rule", self.rule),
            ("run", f"{self.run}, attempt {self.attempt}"),
            ("phase", f"{self.phase} ({self.severity})"),
            ("where", str(explanation.get("where") or finding.get("tensor") or "")),
            ("against", str(explanation.get("against", ""))),
            ("since", f"step {self.since_step}"),
        ]
        lists = [
            ("Usual causes", [str(cause) for cause in explanation.get("usual_causes", ())]),
            ("What to try", [str(remedy) for remedy in explanation.get("what_to_try", ())]),
        ]
        seen = str(details.get("message") or finding.get("message") or "no finding yet")
        return notebook_html(f"{self.name} {self.phase}: {seen}", facts, lists=lists)


@dataclass(frozen=True)
class Event:
    """A CloudEvent. ``place`` is the position to resume from, 0 if the list does not include it."""

    id: str
    type: str
    subject: str
    time: str
    data: Mapping[str, Any]
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    place: int = 0


@dataclass(frozen=True)
class Action:
    """An action that an event caused, with all of its tries."""

    id: int
    kind: str
    event_id: str
    state: str
    outcome: str
    created_ns: int
    finished_ns: int | None
    tries: tuple[Mapping[str, Any], ...]
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class SnapshotInfo:
    """Full tensors of one step of one worker.

    Attributes:
        collection: the collection; empty for a snapshot of weights and gradients.
    """

    attempt: str
    worker: int
    step: int
    mode: str
    collection: str
    bytes: int
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class RunToken:
    """A token that records one run, without its secret. Times are nanoseconds since 1970.

    Attributes:
        state: active, expired or revoked.
        created_by: creator of the token.
        expires_ns: at the latest 14 days after the end of the run.
    """

    id: str
    name: str
    state: str
    created_ns: int
    created_by: str
    expires_ns: int
    revoked_ns: int | None
    last_used_ns: int | None
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Stop:
    """The answer to a stop request; it is not accepted if a stop of the attempt was requested already."""

    accepted: bool
    attempt: str
    raw: Mapping[str, Any] = field(repr=False, compare=False)


def read(kind: type[Document], data: Any, **more: Any) -> Document:
    """Parse a document from an answer.

    Raises:
        ServiceError: the answer has another form.
    """
    names = [entry.name for entry in fields(kind) if entry.name != "raw"]  # type: ignore[arg-type]
    try:
        values = {name: data[name] for name in names if name in data}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        constructor: Callable[..., Document] = kind
        return constructor(**values, **more, raw=data)
    except (TypeError, KeyError, AttributeError) as error:
        raise ServiceError(
            f"an answer is not a {kind.__name__} ({error})", "use a client of the service's version"
        ) from error
