"""Pictures of alerts: the series that the rule looked at, around the step at which it fired.

The rows are read from the store when a message is sent or a picture is requested, never while a run is evaluated, with no transaction
open, and within limits of time, memory and points. A notification waits for its picture for a limited time, and is sent without it
if there is none.

The figure of the series is the one whose value at the step is the finding's value. Rules that compare derived values, such as a ratio of
losses, have none; then the tensor's size is shown, without a threshold. So it is for NaN and infinity: the series is marked where
elements are not finite.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as PictureTimeoutError
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError, NotFoundError, WatchstepError
from watchstep.format import documents
from watchstep.format.control import ControlDocument
from watchstep.format.layout import RUN_DOCUMENT
from watchstep.format.tensors import MODES
from watchstep.plots.alert_evidence import AlertEvidence, alert_png
from watchstep.reading import queries
from watchstep.reading.budget import ReadBudget
from watchstep.reading.columns import Columns, Selection
from watchstep.reading.run import Run
from watchstep_rules.rule import Finding
from watchstep_rules.signals.deviations import STATISTICS, deviations_of
from watchstep_services.channels.delivery import MessagePicture
from watchstep_services.channels.notification import Notification, NotifiedAlert
from watchstep_services.channels.receiver import Receiver
from watchstep_services.core.fair_threads import FairThreads
from watchstep_services.core.store_location import StorePlace
from watchstep_services.db.models import AlertInstanceRow, RunRow
from watchstep_services.notify.picture_links import PictureName, picture_link
from watchstep_services.runs.discovery import corrupt_segments
from watchstep_services.service.context import Service

_FIGURES = ("l2", "rms", "abs_max", "mean", "max", "min", "std", "abs_mean", "zero_share")
"""Figures in the order in which they are compared with the finding's value, if several are equal."""

_OF_NUMBER = ("mean",)
"""Figures of a tensor of one element, such as a loss: all others follow from its value."""

_READ = ("count", "nonfinite_share")
"""Figures that are read, and not drawn: where elements are not finite, the series is marked, which shows more than their share."""

_BEFORE, _AFTER = 300, 60
"""Points before and after the step."""

_FEWEST = 50
_READ_STEPS = (200, 2_000, 20_000)
"""Steps before the alert that are read, until they have enough rows."""

_MEGABYTES = 64.0
_MOST_BYTES = 400_000
"""Limit of a picture; those of alerts have 10 to 30 kilobytes."""

_THREADS, _THREADS_OF_PROJECT = 2, 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AlertToDraw:
    """An alert as the database has it.

    Attributes:
        picture: name of its picture.
        run_id: id of its run.
        event_id: id of the event of its last change, which a later change replaces.
        name: name of the rule config.
        attempt: attempt on which it fired.
        message: one line for people.
        finding: the finding.
        place: the location of the run.
        corrupt: segments that evaluations skipped: path to problem.
        stopped_at: the step at which the attempt was stopped; None if it was not.
    """

    picture: PictureName
    run_id: int
    event_id: str
    name: str
    attempt: str
    message: str
    finding: Finding
    place: StorePlace
    corrupt: dict[str, str]
    stopped_at: int | None


def can_draw() -> bool:
    """Whether this process can draw pictures. It does not import matplotlib."""
    return importlib.util.find_spec("matplotlib") is not None


def find_alert_to_draw(session: Session, picture: PictureName) -> AlertToDraw:
    """Read what the database has of an alert.

    Raises:
        NotFoundError: the alert does not exist, or its finding is about no tensor, so that it has no series.
    """
    found = session.execute(
        select(AlertInstanceRow, RunRow)
        .join(RunRow, RunRow.id == AlertInstanceRow.run_id)
        .where(
            RunRow.project == picture.project,
            RunRow.run == picture.run,
            AlertInstanceRow.fingerprint == picture.fingerprint,
        )
    ).one_or_none()
    if found is None:
        raise NotFoundError(
            f"alert {picture.fingerprint!r} of run {picture.project}/{picture.run}: not found",
            "list the alerts of the run to get their fingerprints",
        )
    row, run = found
    finding = Finding.model_validate_json(json.dumps(row.finding))
    if not finding.tensor:
        raise NotFoundError(
            f"alert {row.name}: is about no tensor, so that it has no picture", "see its data"
        )
    stop = ControlDocument.from_data(run.control).stop
    stopped = stop is not None and stop.attempt == row.attempt and stop.step >= finding.step
    return AlertToDraw(
        picture, run.id, row.event_id, row.name, row.attempt, row.message, finding, run.place,
        corrupt_segments(session, run.id), stop.step if stop is not None and stopped else None,
    )  # fmt: skip


def draw_picture(
    service: Service, alert: AlertToDraw, open_run: Callable[[], AbstractContextManager[Run]]
) -> bytes:
    """Draw the picture of an alert as a PNG, or return it from the cache. No transaction may be open.

    Args:
        service: the service.
        alert: the alert.
        open_run: opens its run, with a budget.

    Raises:
        ConfigError: matplotlib is not installed.
        NotFoundError: the store has no rows of the alert.
        FormatError, OverBudgetError, StoreError: the rows cannot be read.
    """
    key = (alert.picture, alert.event_id, alert.stopped_at)
    png = service.pictures.get(key)
    if png is None:
        with open_run() as run:
            evidence = read_evidence(run, alert)
        png = alert_png(evidence)
        if len(png) > _MOST_BYTES:
            raise ConfigError(
                f"picture of alert {alert.name}: {len(png)} bytes, over the limit of {_MOST_BYTES}",
                "this is a fault of Watchstep; please report it",
            )
        service.pictures.put(key, png)
    return png


@contextmanager
def opened_run(service: Service, alert: AlertToDraw) -> Iterator[Run]:
    """Open the run of an alert, without a cache, with the time limit of a notification's picture."""
    budget = ReadBudget(service.settings.picture_seconds, _MEGABYTES)
    store = service.stores.of_run(alert.place, alert.picture.run)
    data = store.get(RUN_DOCUMENT, limit=documents.MAX_BYTES)
    run = Run(store, documents.decode(documents.RunDocument, data, store.location), budget)
    run.index.exclude(alert.corrupt)
    run.refresh()
    yield run


def picture_for(
    service: Service, receiver: Receiver, notification: Notification, now_ns: int
) -> MessagePicture | None:
    """The picture that a message to a receiver carries; None for none. Never raises, and waits for a limited time.

    Args:
        service: the service.
        receiver: the receiver.
        notification: the notification; its first alert is shown.
        now_ns: the database's time.
    """
    seconds = service.settings.picture_seconds
    if receiver.picture == "none" or notification.status == "resolved" or not seconds or not can_draw():
        return None
    first = notification.alerts[0]
    try:
        name = PictureName(notification.project, first.labels["run"], first.fingerprint)
        with service.database.read() as session:
            alert = find_alert_to_draw(session, name)
        picture = MessagePicture(first.fingerprint, _caption(first, alert), first.url)
        if receiver.picture == "link":
            url = picture_link(service.settings, name, now_ns)
            return replace(picture, url=url) if url else None
        work = functools.partial(draw_picture, service, alert, functools.partial(opened_run, service, alert))
        png = _threads().draw(notification.project, work, seconds)
        if png is not None:
            return replace(picture, png=png)
        _log.warning("picture of alert %s: not drawn within %g s; it is left out", first.name, seconds)
    except NotFoundError as error:
        _log.info("no picture of alert %s: %s", first.name, error.what)
    except WatchstepError as error:
        _log.warning("picture of alert %s: %s; it is left out", first.name, error.what)
    except Exception:  # noqa: BLE001 - the notification is sent without its picture
        _log.exception("picture of alert %s: failed; it is left out", first.name)
    return None


def read_evidence(run: Run, alert: AlertToDraw) -> AlertEvidence:
    """Read the series of an alert around its step.

    Raises:
        NotFoundError: the store has no rows of the tensor, or a later attempt has repeated the step.
        OverBudgetError, StoreError: the rows cannot be read.
    """
    finding = alert.finding
    index = run.index
    attempts = index.attempts()
    later = attempts[attempts.index(alert.attempt) + 1 :] if alert.attempt in attempts else []
    if any(located.object.first <= finding.step for name in later for located in index.objects(name)):
        raise NotFoundError(
            f"alert {alert.name}: a later attempt has repeated step {finding.step}",
            "read the rows of the alert's attempt",
        )
    run.check_tensors([finding.tensor])
    figures = (*_FIGURES, *index.probes())
    needed = (*figures, *_READ)
    columns: Columns = {}
    rows: NDArray[np.intp] = np.array([], np.intp)
    for window in _READ_STEPS:
        selection = Selection(
            (), frozenset([finding.tensor]), max(0, finding.step - window), finding.step + window // 4
        )
        columns = index.consistently(
            functools.partial(queries.columns_of, index, needed, selection, merge=True)
        )
        rows = _line(columns, finding, figures)
        if window >= finding.step or len(rows) >= _FEWEST:
            break
    if not len(rows):
        raise NotFoundError(
            f"tensor {finding.tensor!r}: no rows near step {finding.step}", "read the run's statistics"
        )
    shown = _around(columns["step"][rows], finding.step)
    return _evidence(alert, columns, rows[shown], figures, [info.name for info in index.tensors()])


def _line(columns: Columns, finding: Finding, figures: Sequence[str]) -> NDArray[np.intp]:
    """Rows of the finding's mode, worker, replica and stage, by step."""
    candidates = np.flatnonzero(columns["mode"] == MODES.index(finding.mode))
    if not len(candidates):
        return candidates
    order = np.lexsort([columns[name][candidates] for name in ("stage", "replica", "worker", "step")])
    candidates = candidates[order]
    is_own = (columns["worker"][candidates] == finding.worker) | (
        columns["replica"][candidates] == finding.worker
    )
    own = candidates[is_own] if is_own.any() else candidates
    at_step = own[columns["step"][own] == finding.step]
    equal = [row for row in at_step if _equal_figure(columns, int(row), finding, figures)]
    first = (equal or list(at_step) or list(own))[0]
    same = np.ones(len(candidates), np.bool_)
    for name in ("worker", "replica", "stage"):
        same &= columns[name][candidates] == columns[name][first]
    return candidates[same]


def _equal_figure(columns: Columns, row: int, finding: Finding, figures: Sequence[str]) -> str:
    """The figure whose value in a row is the finding's; empty for none."""
    if not math.isfinite(finding.value):
        return ""
    names = _OF_NUMBER if columns["count"][row] == 1 else figures
    return next((name for name in names if _is_equal(float(columns[name][row]), finding.value)), "")


def _is_equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6)


def _around(steps: NDArray[np.integer], step: int) -> slice:
    end = int(np.searchsorted(steps, step, side="right"))
    return slice(max(0, end - _BEFORE), end + _AFTER)


def _evidence(
    alert: AlertToDraw,
    columns: Columns,
    rows: NDArray[np.intp],
    figures: Sequence[str],
    names: Sequence[str],
) -> AlertEvidence:
    finding = alert.finding
    steps = columns["step"][rows].astype(np.int64)
    at_step = rows[steps == finding.step]
    equal = _equal_figure(columns, int(at_step[0]), finding, figures) if len(at_step) else ""
    figure = equal or ("mean" if int(columns["count"][rows[-1]]) == 1 else "rms")
    values = columns[figure][rows].astype(np.float64)
    values[columns["nonfinite_share"][rows] > 0] = np.nan
    own = {name: columns[name][rows] for name in columns}
    usual = next(
        (
            (entry.low, entry.high)
            for entry in deviations_of([own], names, finding.step)
            if entry.statistic == figure and figure in STATISTICS
        ),
        None,
    )
    return AlertEvidence(
        rule=alert.name,
        tensor=finding.tensor,
        figure=figure,
        steps=steps.tolist(),
        values=values.tolist(),
        step=finding.step,
        thresholds=finding.threshold if equal and math.isfinite(finding.threshold) else None,
        usual_range=usual,
        stopped_at=alert.stopped_at,
        message=alert.message,
        run=alert.picture.run,
    )


def _caption(alert: NotifiedAlert, drawn: AlertToDraw) -> str:
    return f"{alert.name}: {drawn.finding.tensor} around step {drawn.finding.step}"


class PictureThreads:
    """Threads that draw pictures for messages, which wait for a limited time. Thread-safe.

    A store that does not answer occupies a thread until its client gives up. Until then, no other message of the project waits.
    """

    def __init__(self) -> None:
        self._threads = FairThreads(_THREADS, "watchstep-picture", per_project=_THREADS_OF_PROJECT)
        self._lock = threading.Lock()
        self._late: set[str] = set()

    def draw(self, project: str, work: Callable[[], bytes], seconds: float) -> bytes | None:
        """The result of work for a project; raises its exceptions.

        Args:
            project: name of the project.
            work: draws the picture; may continue after the caller has left.
            seconds: how long to wait.

        Returns:
            The picture; None if it is not drawn in time, or an earlier one of the project still is not.
        """
        with self._lock:
            if project in self._late:
                return None
        future = self._threads.submit(project, work)
        try:
            return future.result(seconds)
        except (PictureTimeoutError, CancelledError):
            if not future.cancel():
                with self._lock:
                    self._late.add(project)
                future.add_done_callback(functools.partial(self._ended, project))
            return None

    def _ended(self, project: str, _future: Future[bytes]) -> None:
        with self._lock:
            self._late.discard(project)


@functools.lru_cache(maxsize=1)
def _threads() -> PictureThreads:
    return PictureThreads()
