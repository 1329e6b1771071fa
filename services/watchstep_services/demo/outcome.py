"""What the demo reports: the form of ``watchstep demo --json``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from watchstep_services.demo.watching import WatchedRun


class _Reported(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")


class AlertOutcome(_Reported):
    """An alert that fired."""

    rule: str
    tensor: str
    step: int
    value: float
    threshold: float
    severity: str


class TrainingOutcome(_Reported):
    """How one training went."""

    run_id: str
    state: str
    steps: int = Field(description="Steps that were recorded.")
    alerts: tuple[AlertOutcome, ...]
    stopped_at_step: int | None = Field(description="The last finished step of a run that was stopped.")
    detect_to_stop_seconds: float | None = Field(
        description="From the record of the bad step to the end of the process."
    )


class DemoOutcome(_Reported):
    """Both trainings."""

    runs: tuple[TrainingOutcome, ...]


def outcome_of(watched: WatchedRun) -> TrainingOutcome:
    """What became of a run that has settled."""
    alerts = tuple(
        AlertOutcome(
            rule=alert["rule"],
            tensor=alert["finding"]["tensor"],
            step=alert["finding"]["step"],
            value=float(alert["finding"]["value"]),
            threshold=float(alert["finding"]["threshold"]),
            severity=alert["severity"],
        )
        for alert in watched.alerts
    )
    stops = [a for a in watched.actions if a["kind"] == "stop" and a["finished_ns"] is not None]
    stopped = watched.state == "stopped"
    return TrainingOutcome(
        run_id=watched.run_id,
        state=watched.state,
        steps=len(watched.run.steps()) if watched.run is not None else 0,
        alerts=alerts,
        stopped_at_step=watched.last_step if stopped else None,
        detect_to_stop_seconds=_seconds(watched, stops[0]["finished_ns"]) if stopped and stops else None,
    )


def _seconds(watched: WatchedRun, gone_ns: int) -> float | None:
    """From the record of the first bad step to the time at which the process was seen to be gone."""
    times = [int(alert["finding"]["time_ns"]) for alert in watched.alerts]
    return round((gone_ns - min(times)) / 1e9, 3) if times else None
