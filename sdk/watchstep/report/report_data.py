"""The data of a report: what happened to a run, its alerts, and the charts that explain them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from itertools import islice
from typing import Any, Literal, Protocol

from watchstep.client import Client
from watchstep.client.documents import Alert, Event, RuleStatus
from watchstep.errors import NotFoundError, WatchstepError
from watchstep.format.documents import EndDocument
from watchstep.format.tensors import ACTIVATIONS, GRADIENTS, WEIGHTS
from watchstep.plots.binned import NamedSeries, PlotMark
from watchstep.plots.html_chart import HeatChart, Lane, LaneState, LineChart
from watchstep.reading import pictures
from watchstep.reading.binning import SeriesRequest
from watchstep.reading.boosting import BoostedRun, read_boosting
from watchstep.reading.outcome import RunOutcome
from watchstep.reading.run import Run

HEATMAPS = (
    (GRADIENTS, "l2"),
    (GRADIENTS, "abs_max"),
    (GRADIENTS, "zero_share"),
    (ACTIVATIONS, "rms"),
    (ACTIVATIONS, "zero_share"),
    (WEIGHTS, "rms"),
)
"""Collection and statistic of the heatmaps that a reader can choose from."""

_POINTS, _COLUMNS, _HISTOGRAM_ROWS = 800, 160, 160
_MAX_TENSORS, _MAX_HISTOGRAMS = 6, 3
_MAX_ALERTS, _MAX_LANES, _MAX_EVENTS = 50, 60, 5000
_DEVIATIONS = "watchstep.deviations"


class DeviationValue(Protocol):
    """A tensor that left its usual range; see `watchstep_rules.signals.deviations.Deviation`."""

    tensor: str
    statistic: str
    worker: int
    step: int
    value: float
    low: float
    high: float
    spreads: float

    def as_line(self) -> str:
        """Format it as one line."""


@dataclass(frozen=True, kw_only=True)
class ReportedAlert:
    """An alert of the report.

    Attributes:
        name: name of the rule config.
        severity: its severity; empty if unknown.
        phase: pending, firing or resolved.
        step: the step from which the run is bad, the first one of its findings.
        message: the finding.
        where: the tensor and its module.
        causes: the usual causes.
        remedies: what to try.
        finding: the finding as data; empty if unknown.
    """

    name: str
    severity: str = ""
    phase: str = "firing"
    step: int = -1
    message: str = ""
    where: str = ""
    causes: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    finding: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExplainedTensor:
    """A tensor that explains what happened.

    Attributes:
        name: its name.
        why: why it is in the report, in one line.
        series: its series.
        histogram: its distribution over the steps; None for tensors after the first ones.
    """

    name: str
    why: str
    series: LineChart
    histogram: HeatChart | None = None


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The data of a report.

    Attributes:
        run: the run.
        outcome: what happened.
        span: first and last step; None for a run without records.
        has_service: whether a service stated the alerts.
        alerts: alerts, the first step first.
        lanes: the life of each rule's alert.
        quiet_rules: names of the rules that never fired, and their health if it is not ok.
        losses: the losses.
        boosting: what was recorded of gradient boosting; None for another run.
        rates: the learning rates.
        heatmaps: heatmaps to choose from.
        tensors: tensors that explain what happened.
        ends: how the workers ended.
        notes: what the report lacks, and why.
    """

    run: Run
    outcome: RunOutcome
    span: tuple[int, int] | None
    has_service: bool
    alerts: Sequence[ReportedAlert]
    lanes: Sequence[Lane]
    quiet_rules: Sequence[str]
    losses: LineChart
    boosting: BoostedRun | None
    rates: LineChart
    heatmaps: Sequence[HeatChart]
    tensors: Sequence[ExplainedTensor]
    ends: Sequence[EndDocument]
    notes: Sequence[str]


def collect_report(run: Run, service: Client | None = None) -> RunReport:
    """Collect the data of a report.

    Args:
        run: the run.
        service: a client of the service that evaluated it, with the run's project. Without one, the only alert is the one that stopped the
            run, which the store states.

    Raises:
        StoreError: the store cannot be read.
    """
    outcome = run.outcome()
    steps = run.steps()
    span = (steps[0], max(steps[-1], outcome.last_step)) if steps else None
    found = _alerts(run, outcome, service, span[1] if span is not None else 0)
    alerts = found.alerts
    marks = outcome.marks()
    marked = {mark.label for mark in marks}
    marks += [
        PlotMark(alert.step, alert.name, "fired")
        for alert in alerts
        if alert.step >= 0 and alert.phase != "pending" and alert.name not in marked
    ][:_MAX_TENSORS]
    index = run.index
    heats = []
    for collection, statistic in HEATMAPS:
        names = pictures.heatmap_names(index, collection)
        cells = pictures.heat_cells(index, names, statistic, _COLUMNS)
        if cells is not None:
            heats.append(HeatChart.of_tensors(f"{statistic} of {collection}", cells, marks))
    losses = pictures.loss_lines(index, _POINTS)
    tensors, more = _explained(run, alerts, marks, _onset(outcome, alerts, losses, span))
    return RunReport(
        run=run,
        outcome=outcome,
        span=span,
        has_service=found.has_service,
        alerts=alerts,
        lanes=found.lanes,
        quiet_rules=found.quiet_rules,
        losses=LineChart("", losses, marks, steps=span),
        boosting=read_boosting(index, _POINTS),
        rates=LineChart("", pictures.rate_lines(index, _POINTS), marks, steps=span),
        heatmaps=heats,
        tensors=tensors,
        ends=run.ends(),
        notes=[*found.notes, *more, *(f"{key}: {reason}" for key, reason in list(run.damaged.items())[:20])],
    )


@dataclass(frozen=True)
class _Alerts:
    """The alerts of a report, a lane for each rule with an alert, the other rules, and notes."""

    alerts: Sequence[ReportedAlert]
    lanes: Sequence[Lane]
    quiet_rules: Sequence[str] = ()
    notes: Sequence[str] = ()
    has_service: bool = False


def _alerts(run: Run, outcome: RunOutcome, service: Client | None, last: int) -> _Alerts:
    """Return the alerts of the newest attempt, from the service or else from the store."""
    if service is None:
        note = "No service was asked for alerts; the store states only an alert that stops a run."
        return _stored_alerts(outcome, last, note)
    attempt = run.attempts[-1] if run.attempts else ""
    try:
        rules = service.run(run.id).rules
        events = list(islice(service.events(run.id), _MAX_EVENTS))
        alerts = [_reported(alert) for alert in service.alerts(run.id) if alert.attempt == attempt]
    except WatchstepError as error:
        note = f"The service was not asked successfully for alerts: {error.what}"
        return _stored_alerts(outcome, last, note)
    lanes, quiet = _lanes(rules, [event for event in events if event.data.get("attempt") == attempt], last)
    alerts.sort(key=lambda alert: alert.step)
    return _Alerts(alerts[:_MAX_ALERTS], lanes, quiet, has_service=True)


def _stored_alerts(outcome: RunOutcome, last: int, note: str) -> _Alerts:
    """Return the alert that stopped the run, which the stop request states."""
    stop = outcome.rule_stop
    if stop is None:
        return _Alerts((), (), notes=[note])
    lane = Lane(stop.rule, [("fired", stop.step, max(last, stop.step))])
    return _Alerts(
        [ReportedAlert(name=stop.rule, step=stop.step, message=stop.message)], [lane], notes=[note]
    )


def _reported(alert: Alert) -> ReportedAlert:
    finding, details = alert.finding or {}, alert.details or {}
    explanation = details.get("explanation") or {}
    step = details.get("since_step", finding.get("step"))
    return ReportedAlert(
        name=alert.name,
        severity=alert.severity,
        phase=alert.phase,
        step=step if type(step) is int else alert.since_step,
        message=str(details.get("message") or finding.get("message") or ""),
        where=str(explanation.get("where") or finding.get("tensor") or ""),
        causes=_texts(explanation.get("usual_causes")),
        remedies=_texts(explanation.get("what_to_try")),
        finding=finding,
    )


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(str(value) for value in values) if isinstance(values, list | tuple) else ()


def _lanes(rules: Sequence[RuleStatus], events: Iterable[Event], last: int) -> tuple[list[Lane], list[str]]:
    """Return a lane for each rule with an alert or an error, and texts about the others."""
    changes: dict[str, list[tuple[str, int, int]]] = {}
    for event in events:
        kind, step, since = (
            event.type.rpartition(".")[2],
            event.data.get("step"),
            event.data.get("since_step"),
        )
        name = _rule_of(event)
        if name and kind in {"pending", "firing", "resolved"} and type(step) is int:
            changes.setdefault(name, []).append((kind, step, since if type(since) is int else step))
    lanes, quiet = [], []
    for rule in rules:
        health = "" if rule.health == "ok" else rule.health
        parts = _parts(changes.pop(rule.name, []), last)
        if parts or rule.health == "error":
            lanes.append(Lane(rule.name, parts, health))
        else:
            quiet.append(f"{rule.name} ({health.replace('_', ' ')})" if health else rule.name)
    lanes += [Lane(name, _parts(parts, last)) for name, parts in changes.items()]
    return lanes[:_MAX_LANES], quiet


def _rule_of(event: Event) -> str:
    """Return the name of the rule config of an event about an alert; empty for other events."""
    if ".alert." not in event.type:
        return ""
    config = event.data.get("rule_config")
    name = config.get("name") if isinstance(config, Mapping) else config
    return str(name or "")


def _parts(changes: Sequence[tuple[str, int, int]], last: int) -> list[tuple[LaneState, int, int]]:
    parts: list[tuple[LaneState, int, int]] = []
    begins: tuple[Literal["pending", "fired"], int] | None = None
    for kind, step, since in changes:
        if kind == "pending":
            begins = ("pending", step)
            continue
        if kind == "firing":
            pending_from = begins[1] if begins is not None else since
            if pending_from < step:
                parts.append(("pending", pending_from, step - 1))
            begins = ("fired", step)
            continue
        if begins is not None:
            parts.append((begins[0], begins[1], max(step - 1, begins[1])))
        parts.append(("resolved", step, step))
        begins = None
    if begins is not None:
        parts.append((begins[0], begins[1], max(last, begins[1])))
    return parts


def _onset(
    outcome: RunOutcome,
    alerts: Sequence[ReportedAlert],
    losses: Sequence[NamedSeries],
    span: tuple[int, int] | None,
) -> int | None:
    """Return the step whose deviations are ranked: the first of alerts, bundles and losses that are not finite; otherwise the last step."""
    candidates = [alert.step for alert in alerts if alert.step >= 0 and alert.phase != "pending"]
    candidates += outcome.bundle_steps[:1]
    candidates += [int(step) for line in losses for step in line.points.step[line.points.nonfinite > 0][:1]]
    if candidates:
        return min(candidates)
    return None if span is None else span[1]


def _explained(
    run: Run, alerts: Sequence[ReportedAlert], marks: Sequence[PlotMark], onset: int | None
) -> tuple[list[ExplainedTensor], list[str]]:
    """Return the tensors of the alerts and those that deviate most, and notes."""
    recorded = {info.name for info in run.catalogue}
    explained: dict[str, ExplainedTensor] = {}
    for alert in alerts:
        name = str(alert.finding.get("tensor") or "")
        if name in recorded and name not in explained and len(explained) < _MAX_TENSORS:
            evidence = pictures.alert_evidence(run.index, alert.name, alert.finding)
            limits = [("threshold", evidence.thresholds)] if isinstance(evidence.thresholds, float) else []
            figure = "mean" if evidence.figure == pictures.VALUE else evidence.figure
            chart = LineChart("", _series(run, name, figure), marks, limits)
            why = f"{alert.name}, bad from step {alert.step}: {alert.message}"
            explained[name] = ExplainedTensor(name, why, chart)
    deviations, notes = _deviations(run, onset)
    for deviation in deviations:
        if deviation.tensor in explained or len(explained) >= _MAX_TENSORS:
            continue
        usual = (deviation.low, deviation.high)
        chart = LineChart(
            "",
            _series(run, deviation.tensor, deviation.statistic),
            marks,
            usual=usual if all(map(math.isfinite, usual)) else None,
        )
        explained[deviation.tensor] = ExplainedTensor(deviation.tensor, deviation.as_line(), chart)
    tensors = []
    for position, entry in enumerate(explained.values()):
        heat = _histogram(run, entry.name, marks) if position < _MAX_HISTOGRAMS else None
        tensors.append(ExplainedTensor(entry.name, entry.why, entry.series, heat))
    return tensors, notes


def _series(run: Run, tensor: str, figure: str) -> list[NamedSeries]:
    lines = run.binned_series(SeriesRequest(tensor, figure, points=_POINTS)).lines
    return pictures.named_lines(lines[: pictures.MAX_LINES], figure)


def _histogram(run: Run, tensor: str, marks: Sequence[PlotMark]) -> HeatChart | None:
    if math.prod(run.tensor(tensor).info.shape) <= 1:
        return None
    try:
        histogram = run.histogram(tensor, _HISTOGRAM_ROWS)
    except NotFoundError:  # it has no rows of mode train
        return None
    if not len(histogram.lower):
        return None
    title = "Elements by power of two, share of a step"
    return HeatChart.of_histogram(title, histogram, marks)


def _deviations(run: Run, onset: int | None) -> tuple[list[DeviationValue], list[str]]:
    """Return the tensors that deviate most at a step, computed by the rules package, which is found by its entry point."""
    if onset is None or not run.attempts:
        return [], []
    for entry in entry_points(group=_DEVIATIONS):
        try:
            read = entry.load()
        except ImportError as error:
            note = f"Tensors are not ranked by deviation: {error}. Install it with: pip install 'watchstep[rules]'"
            return [], [note]
        return list(read(run, run.attempts[-1], onset).deviations), []
    return [], ["Tensors are not ranked by deviation, because the rules package is not installed."]
