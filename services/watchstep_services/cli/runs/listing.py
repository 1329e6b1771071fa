"""``watchstep runs list``. Imports little, so that it starts fast."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from watchstep.capture.service.location import live_services
from watchstep.errors import ConfigError, ServiceError
from watchstep.reading.run_documents import RunEntry, find_runs
from watchstep.store.store import Store
from watchstep_services.cli.connection import (
    DEFAULT_STORE,
    JsonOption,
    ProjectOption,
    ServiceOption,
    StoreOption,
    active_for,
    client_of,
    default_project,
    is_without_store,
    service_of,
)
from watchstep_services.core.console import echo, show, show_json, table


def list_runs(
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
    project: ProjectOption = "",
    as_json: JsonOption = False,
) -> None:
    """List the runs of a store, newest first, with the number of firing alerts if a service on this machine watches the store.

    With --service or a profile, lists the runs of a project of that service instead. Token: WATCHSTEP_TOKEN. Without a store, and without
    the folder watchstep-runs, lists those of the only service on this machine.

    Examples:
        watchstep runs list
        watchstep runs list --store s3://bucket/runs --json
        watchstep --profile lab runs list --project vision
    """
    if service or active_for(store) is not None or (is_without_store(store) and live_services()):
        _list_of_service(store, service, project or default_project(), as_json=as_json)
        return
    entries = find_runs(Store.open(store))
    firing = _firing_by_run(store, {entry.project for entry in entries})
    if as_json:
        show_json([_as_data(entry, firing) for entry in entries])
        return
    rows = table("=PROJECT", "=RUN", "STARTED", "STATE", *([] if firing is None else [">FIRING"]))
    for entry in entries:
        count = [] if firing is None else [str(firing.get((entry.project, entry.run), "-"))]
        rows.add_row(entry.project, entry.run, _started(entry.created_ns), entry.state, *count)
    show(rows)
    for entry in entries:
        if entry.damage:
            echo(f"watchstep: {entry.project}/{entry.run} is damaged: {entry.damage}", err=True)


def _as_data(entry: RunEntry, firing: Mapping[tuple[str, str], int] | None) -> dict[str, Any]:
    count = None if firing is None else firing.get((entry.project, entry.run))
    return {
        "project": entry.project,
        "run": entry.run,
        "created_ns": entry.created_ns,
        "state": entry.state,
        "damage": entry.damage,
        "firing": count,
    }


def _firing_by_run(store: str, projects: set[str]) -> dict[tuple[str, str], int] | None:
    """Return the number of firing alerts by project and run; None if no service on this machine watches the store."""
    try:
        service_of(store, "")
    except ServiceError:
        return None
    except ConfigError as error:
        echo(f"watchstep: alerts are not shown: {error.what}", err=True)
        return None
    firing: dict[tuple[str, str], int] = {}
    try:
        for project in sorted(projects):
            for run in client_of(store, "", project).runs():
                firing[project, run.run] = _count_firing(run.alerts)
    except ServiceError as error:
        echo(f"watchstep: alerts are not shown: {error.what}", err=True)
        return None
    return firing


def _count_firing(alerts: Mapping[str, int]) -> int:
    """Return the number of firing alerts, without those of severity info."""
    return alerts.get("firing", 0) - alerts.get("notes", 0)


def _list_of_service(store: str, service: str, project: str, *, as_json: bool) -> None:
    runs = client_of(store, service, project).runs()
    if as_json:
        show_json([dict(run.raw) for run in runs])
        return
    rows = table("=PROJECT", "=RUN", "STARTED", "STATE", ">STEP", ">FIRING", "EVALUATED")
    for run in runs:
        rows.add_row(
            run.project,
            run.run,
            _started(run.created_ns),
            run.state,
            str(run.last_step),
            str(_count_firing(run.alerts)),
            _evaluated(run.raw),
        )
    show(rows)


def _evaluated(run: Mapping[str, Any]) -> str:
    """Return since when nothing of a run in progress was evaluated; empty if it is evaluated, or over."""
    since = run["quiet_since_ns"]
    if since is None:
        return ""
    quiet = max(0.0, time.time() - since / 1e9)
    return f"nothing for {quiet:.0f} s" if run["evaluated_ns"] else f"nothing yet, for {quiet:.0f} s"


def _started(created_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created_ns / 1e9))
