"""The view of the page about an alert, in one response."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query

from watchstep.format.documents import Checkpoint
from watchstep.reading.run import Run
from watchstep_rules.rule import cause_rank
from watchstep_rules.signals.deviations import ONSET_STEPS
from watchstep_services.api.lookup import find_alert, find_run, run_store
from watchstep_services.api.middleware.access import permits
from watchstep_services.api.middleware.etags import IfNoneMatch, etag_of_inputs, unchanged
from watchstep_services.api.queries.alert_evidence import (
    AlertWindow,
    deviations_at,
    hyperparameter_changes,
    read_evidence_lines,
)
from watchstep_services.api.queries.alert_records import AlertRecords, PriorWindow, read_alert
from watchstep_services.api.queries.forms import View, encode_model
from watchstep_services.api.queries.overview import RunRecords, read_records
from watchstep_services.api.queries.state import UNREADABLE, Queries, Querying
from watchstep_services.api.queries.step_objects import checkpoint_before, commands_for, find_objects
from watchstep_services.api.routes.alerts import Fingerprint
from watchstep_services.api.schemas.alert_page import (
    AlertDeviations,
    AlertPage,
    AlertSeries,
    EvidenceLine,
    OtherAlert,
    PriorEvent,
    RecordedObject,
)
from watchstep_services.api.schemas.binned_lines import Columns
from watchstep_services.api.views import ViewRequest, respond

router = APIRouter(prefix="/v1/projects/{project}/runs/{run}/alerts/{fingerprint}", tags=["alerts"])


@dataclass(frozen=True)
class _Listing:
    """What lies on the store near the step of an alert; listing it reads no statistics.

    Attributes:
        objects: objects with data of steps near it.
        checkpoint: the last checkpoint before it.
    """

    objects: Sequence[RecordedObject] = ()
    checkpoint: Checkpoint | None = None

    def inputs(self) -> list[Any]:
        """Return it as JSON-ready data."""
        checkpoint = None if self.checkpoint is None else self.checkpoint.as_data()
        return [checkpoint, *(part.path for part in self.objects)]


@dataclass(frozen=True)
class _Evidence:
    """What the statistics say about an alert."""

    lines: Sequence[EvidenceLine]
    changes: Sequence[PriorEvent]
    deviations: AlertDeviations
    computation: Sequence[str] = ()


@router.get("/page", summary="Read the page of an alert", response_model=AlertPage)
@permits("read")
def get_alert_page(
    project: str,
    run: str,
    fingerprint: Fingerprint,
    queries: Querying,
    points: Columns = 1000,
    before: Annotated[
        int, Query(ge=1, le=100_000, description="Number of steps before the alert that are shown.")
    ] = 200,
    after: Annotated[
        int, Query(ge=0, le=100_000, description="Number of steps after the alert that are shown.")
    ] = 50,
    minutes: Annotated[
        int, Query(ge=1, le=10_080, description="Number of minutes of events before the alert.")
    ] = 10,
    if_none_match: IfNoneMatch = None,
) -> Any:
    """Return an alert with its evidence: rule and advice, series with thresholds, deviating tensors, earlier events, actions, objects.

    The ETag is known before the statistics are read.
    """
    service = queries.service
    with queries.slots.acquire(project), service.database.read() as session:
        row = find_run(session, project, run)
        run_records = read_records(session, service.base_url, row)
        alert = find_alert(session, project, run, fingerprint)
        records = read_alert(session, row, alert, run_records, PriorWindow(before, minutes))
    since, step = records.since_step, records.finding.step
    window = AlertWindow(max(0, since - before), max(step, since) + after, since, points)
    location = run_store(service, project, run).location
    listing, problem = _list(queries, project, run, records.alert.attempt, window, step)

    def build(opened: Run) -> View:
        deviations = _deviations(queries, (project, run), opened, records.alert.attempt, since)
        bad = {entry.tensor for entry in deviations.deviations} | {entry.tensor for entry in records.findings}
        evidence = _Evidence(
            read_evidence_lines(opened, records.finding, window),
            hyperparameter_changes(opened, window.first, since),
            deviations,
            _in_flow(opened, bad),
        )
        return encode_model(_page(run_records, records, listing, evidence, window, location))

    stop = run_records.stop
    inputs = (
        run_records.facts.model_dump(mode="json"),
        None if stop is None else stop.model_dump(mode="json"),
        records.inputs(),
        listing.inputs(),
        [points, before, after, minutes],
        [other.model_dump(mode="json") for other in _others(run_records, fingerprint)],
        location,
        problem,
    )
    request = ViewRequest(project, run, AlertPage, "json", inputs, if_none_match)
    try:
        return respond(queries, request, build)
    except UNREADABLE as error:
        etag = etag_of_inputs(AlertPage, *inputs, error.what)
        unread = AlertDeviations(deviations=[], tensors_left_out=0, superseded=False, problem=error.what)
        page = _page(run_records, records, listing, _Evidence((), (), unread), window, location)
        return unchanged(if_none_match, etag) or encode_model(page).response(etag)


def _list(
    queries: Queries, project: str, run: str, attempt: str, window: AlertWindow, step: int
) -> tuple[_Listing, str]:
    """List objects near the step; return also why nothing can be listed."""
    try:
        with queries.open_store(project, run) as store:
            steps = range(window.first, window.last + 1)
            objects = find_objects(store, attempt, steps, step, queries.budget().check)
            return _Listing(objects, checkpoint_before(store, window.since)), ""
    except UNREADABLE as error:
        return _Listing(), error.what


def _deviations(
    queries: Queries, named: tuple[str, str], run: Run, attempt: str, step: int
) -> AlertDeviations:
    """Rank the tensors that deviate. Later steps do not change the result, so it is read once, also of a run that goes on."""
    stored = run.index.objects()
    earlier = [f"{part.object.key}<{part.cut}" for part in stored if part.object.first < step + ONSET_STEPS]
    inputs = (named, run.document.created_ns, run.attempts, sorted(run.index.damaged), earlier)
    etag = etag_of_inputs(AlertDeviations, *inputs, attempt, step)
    cached = queries.views.get(etag)
    if cached is None:
        cached = encode_model(deviations_at(run, attempt, step))
        queries.views.add(etag, cached)
    return AlertDeviations.model_validate_json(cached.content)


def _page(
    run_records: RunRecords,
    records: AlertRecords,
    listing: _Listing,
    evidence: _Evidence,
    window: AlertWindow,
    location: str,
) -> AlertPage:
    finding = records.finding
    fixed, parameter = records.threshold
    figure = next((line.figure for line in evidence.lines if line.tensor == finding.tensor), "mean")
    return AlertPage(
        run=run_records.facts,
        stop=run_records.stop,
        alert=records.alert,
        finding=finding,
        rule=records.rule,
        incident=records.incident,
        episodes=list(records.episodes),
        series=AlertSeries(
            first=window.first,
            last=window.last,
            lines=list(evidence.lines),
            findings=list(records.findings),
            fixed_threshold=fixed,
            fixed_parameter=parameter,
        ),
        deviations=evidence.deviations,
        computation=list(evidence.computation),
        before=[*evidence.changes, *_checkpoints(listing.checkpoint), *records.before],
        actions=list(records.actions),
        acknowledgement=records.acknowledgement,
        silence=records.silence,
        objects=list(listing.objects),
        commands=commands_for(
            location, finding.tensor, figure, finding.step, finding.worker, listing.objects
        ),
        others=_others(run_records, records.alert.fingerprint),
    )


def _in_flow(run: Run, names: AbstractSet[str]) -> list[str]:
    """Return the recorded ones of some tensors, in the order in which a step computes them."""
    chosen = [info for info in run.index.tensors() if info.name in names]
    return [info.name for info in sorted(chosen, key=lambda info: (cause_rank(info), info.name))]


def _others(run_records: RunRecords, fingerprint: str) -> list[OtherAlert]:
    firings = {
        mark.fingerprint: mark
        for mark in run_records.marks
        if mark.type == "io.watchstep.alert.firing" and not mark.superseded
    }
    others = []
    for lane in run_records.lanes:
        if lane.fingerprint in ("", fingerprint) or lane.phase not in ("pending", "firing", "resolved"):
            continue
        mark = firings.get(lane.fingerprint)
        others.append(
            OtherAlert(
                fingerprint=lane.fingerprint,
                name=lane.name,
                severity=lane.severity,
                phase=lane.phase,
                step=None if mark is None else mark.since_step,
                inhibited_by="" if mark is None else mark.inhibited_by,
            )
        )
    return others


def _checkpoints(checkpoint: Checkpoint | None) -> list[PriorEvent]:
    if checkpoint is None:
        return []
    title = f"last checkpoint before the alert: {checkpoint.path}"
    return [PriorEvent(kind="checkpoint", step=checkpoint.step, at_ns=checkpoint.saved_ns, title=title)]
