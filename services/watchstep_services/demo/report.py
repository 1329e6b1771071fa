"""What the demo reports: the form of ``watchstep demo --json``.

The explanation: what fired, where, against what, how fast it stopped, and how to fetch the evidence again.

What the demo shows while the runs go on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from watchstep.errors import ServiceError
from watchstep_services.core.console import figure, table
from watchstep_services.demo.digits import STEPS
from watchstep_services.demo.picture import Evidence, draw_png, draw_text
from watchstep_services.demo.trainings import WatchedRun


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


_PLOT_COLUMNS = 96


def explain(
    console: Console, runs: list[WatchedRun], outcomes: dict[str, TrainingOutcome], picture: Path
) -> None:
    """Print the explanation and draw the picture.

    Args:
        console: where to print.
        runs: the healthy and the faulty run, settled.
        outcomes: what became of them, by run id.
        picture: the PNG to write.

    Raises:
        ServiceError: the demo did not go as it should: no alert on the faulty run, or one on the healthy.
    """
    healthy, faulty = runs
    outcome = outcomes[faulty.run_id]
    if healthy.alerts or not faulty.alerts or healthy.run is None or faulty.run is None:
        raise ServiceError(
            f"demo: {len(healthy.alerts)} alerts on the healthy run, {len(faulty.alerts)} on the faulty one",
            "see the logs in its folder",
        )
    alert = min(faulty.alerts, key=lambda held: int(held["finding"]["time_ns"]))
    finding = alert["finding"]
    stopped_at = outcome.stopped_at_step if outcome.stopped_at_step is not None else faulty.last_step
    evidence = Evidence(
        healthy.run, faulty.run, finding["step"], stopped_at, f"{alert['rule']}: {finding['message']}"
    )
    console.print()
    console.print(Text.from_ansi(draw_text(evidence, _PLOT_COLUMNS, colours=console.is_terminal)))
    draw_png(evidence, picture)
    for name, text in _lines(alert, outcome, healthy, picture):
        console.print(Text.assemble((f"{name:9}", "bold"), f" {text}"), soft_wrap=True)
    console.print()
    console.print("The same evidence, any time after the run:")
    console.print()
    console.print(Text(evidence_lines(faulty.run.location, finding["tensor"])), soft_wrap=True)


def evidence_lines(run: str, tensor: str) -> str:
    """Three lines of Python that fetch the evidence."""
    return (
        "    import watchstep\n"
        f"    run = watchstep.open_run({run!r})\n"
        f"    print(run.tensor({tensor!r}).statistics().to_pandas().query('nan > 0')"
        "[['step', 'nan', 'count', 'min', 'max']])\n"
    )


def _lines(
    alert: dict[str, Any], outcome: TrainingOutcome, healthy: WatchedRun, picture: Path
) -> list[tuple[str, str]]:
    finding = alert["finding"]
    where = f"{finding['tensor']}, of module {finding['module']!r} ({finding['module_type']})"
    seconds = outcome.detect_to_stop_seconds
    took = "" if seconds is None else f", {seconds:.2f} s after the bad step"
    return [
        ("rule", f"{alert['rule']} ({alert['severity']})"),
        ("step", f"{finding['step']}"),
        ("layer", where if finding["module"] else finding["tensor"]),
        ("value", f"{finding['value']:g}, where {finding['threshold']:g} is tolerated: {finding['message']}"),
        ("why", _cause(finding)),
        ("stopped", f"after step {outcome.stopped_at_step}{took}"),
        ("healthy", f"the same program on clean data: {healthy.state}, no alert"),
        ("picture", str(picture)),
    ]


def _cause(finding: dict[str, Any]) -> str:
    """What the place of the first bad tensor says: a step reads weights, then computes forward, loss, backward."""
    if finding["upstream"]:
        return "the batch of this step was bad, and the update makes NaN of every weight that its gradient reaches"
    kind = {
        0: "the weights were bad before this step began: look at the update before it",
        1: "of the outputs that were measured or still in memory this is the first bad one, and the weights were"
        " still finite: look at this batch, this module, and those before it",
        2: "all outputs were still finite: look at the loss function and the labels",
        3: "the update makes NaN of every weight that this gradient reaches: look at the first bad tensor of its step",
    }
    return kind.get(finding["cause_rank"][0], "nothing before it in the step was bad")


_BAR = 30
_PLAIN_EVERY = 4  # looks between two printed lines where the output is no terminal


class Display:
    """A table that changes in place on a terminal; lines elsewhere."""

    def __init__(self, console: Console, runs: list[WatchedRun]) -> None:
        self._console = console
        self._runs = runs
        self._looks = 0
        self._live = Live(console=console, refresh_per_second=8) if console.is_terminal else None

    def __enter__(self) -> Display:  # noqa: PYI034 - Self comes with Python 3.11
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self) -> None:
        """Show the runs as they are known now."""
        if self._live is not None:
            self._live.update(self._table())
            return
        if self._looks % _PLAIN_EVERY == 0 or all(watched.settled for watched in self._runs):
            line = "  ".join(
                f"{w.label}: step {w.last_step} loss {figure(w.loss)} {w.state}" for w in self._runs
            )
            self._console.print(line, soft_wrap=True, highlight=False)
        self._looks += 1

    def _table(self) -> Table:
        shown = table("RUN", "PROGRESS", ">STEP", ">LOSS", "STATE", "ALERT")
        for watched in self._runs:
            done = round(_BAR * (watched.last_step + 1) / STEPS)
            colour = "red" if watched.alerts else "green"
            alerts = ", ".join(alert["rule"] for alert in watched.alerts) or "none"
            shown.add_row(
                watched.label,
                Text("━" * done, style=colour) + Text("━" * (_BAR - done), style="bright_black"),
                str(watched.last_step),
                figure(watched.loss),
                watched.state,
                Text(alerts, style=colour),
            )
        return shown
