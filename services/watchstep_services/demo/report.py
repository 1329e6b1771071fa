"""Output of the demo: the progress of both runs, the explanation of the alert, and the format of ``watchstep demo --json``.

Picture of the evidence: losses of both runs, and the gradients of the faulty run by layer.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from watchstep.errors import ServiceError
from watchstep.format.tensors import GRADIENTS
from watchstep.platform.terminal_text import printable
from watchstep.plots.binned import NamedSeries, PlotMark
from watchstep.reading.binning import bin_values
from watchstep.reading.pictures import heat_cells
from watchstep.reading.run import Run
from watchstep_services.core.console import figure, table
from watchstep_services.demo.digits import STEPS
from watchstep_services.demo.trainings import WatchedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MARGIN = 0.01
_TITLE_COLUMNS = 140
_WIDTH, _HEIGHT = 1000, 660
"""Size of the PNG in pixels."""

_HEALTHY_ANSI, _FAULTY_ANSI = "green", "red"
"""Colours of the runs on a terminal, in the table and in the plot."""


@dataclass(frozen=True)
class Evidence:
    """Data of the picture.

    Attributes:
        healthy: the run without alerts.
        faulty: the stopped run.
        bad_step: step at which the rule fired.
        stopped_at: last finished step of the faulty run.
        title: the finding in one line.
    """

    healthy: Run
    faulty: Run
    bad_step: int
    stopped_at: int
    title: str


def losses(run: Run) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the steps and losses of a run; NaN for a loss that is not finite."""
    table = run.losses()
    order = np.argsort(table["step"].to_numpy(), kind="stable")
    return table["step"].to_numpy()[order], table["value"].to_numpy()[order].astype(np.float64)


def draw_png(evidence: Evidence, path: Path) -> None:
    """Draw the evidence as a PNG.

    Args:
        evidence: the data.
        path: output file, a PNG of about 1000 by 660 pixels.
    """
    from watchstep.plots.plot_figure import new_figure, write_picture
    from watchstep.plots.run_plot import draw_heatmap, draw_lines, draw_marks

    figure = new_figure(_WIDTH, _HEIGHT)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.15))
    _set_title(figure, evidence.title)
    lines = [
        NamedSeries(f"{label} run: loss", bin_values(*losses(run), _WIDTH))
        for run, label in ((evidence.healthy, "healthy"), (evidence.faulty, "faulty"))
    ]
    draw_lines(top, lines, "loss")
    marks = [
        PlotMark(evidence.bad_step, "faulty run", "fired"),
        PlotMark(evidence.stopped_at, "stopped", "stopped"),
    ]
    draw_marks(top, marks, with_labels=True)
    names = [name for name in evidence.faulty.tensors(GRADIENTS) if name.endswith("weight:gradient")]
    cells = heat_cells(evidence.faulty.index, names, "rms", _WIDTH // 4)
    if cells is not None:
        draw_heatmap(bottom, cells, "rms of the gradients of the faulty run")
    draw_marks(bottom, marks)
    bottom.set_xlabel("step")
    write_picture(path, figure.encode("png"))


def _set_title(figure: Figure, text: str) -> None:
    """Set a title that fits the width of the picture, in several lines if necessary, without interpreting markup."""
    title = figure.suptitle("", fontsize=11, x=_MARGIN, ha="left", fontweight="bold", parse_math=False)
    available = (1 - 2 * _MARGIN) * figure.bbox.width
    for columns in range(_TITLE_COLUMNS, 0, -4):
        title.set_text(textwrap.fill(printable(text), columns))
        if title.get_window_extent().width <= available:
            return


def draw_text(evidence: Evidence, width: int, *, colours: bool) -> str:
    """Draw the losses with characters.

    Args:
        evidence: the data.
        width: width in columns.
        colours: whether to use terminal escape codes.
    """
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, 16)
    figure.theme("simple" if colours else "colorless")
    right = 0.0
    for run, colour, label in (
        (evidence.healthy, _HEALTHY_ANSI, "healthy"),
        (evidence.faulty, _FAULTY_ANSI, "faulty"),
    ):
        steps, values = _thinned(*losses(run), width // 2)
        right = max(right, *steps.tolist())
        marker = plotext.marker("hd", colour)
        signal = figure.signal(steps.tolist(), np.log10(values).tolist(), marker=marker)
        signal.lines()
        signal.label(label)
        figure.draw(signal)
    figure.line(evidence.bad_step, orientation="vertical")
    figure.legend(x=right, ha="right", relative=True)  # the loss falls, so there is space at the upper right
    figure.title(f"log10 of the loss by step; | step {evidence.bad_step}: bad")
    text = str(figure.build())
    return text if colours else plotext.uncolorize(text)


def _thinned(
    steps: NDArray[np.int64], values: NDArray[np.float64], points: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return means of the finite values over equal spans of steps, so that a line of few characters is readable."""
    drawable = np.isfinite(values) & (values > 0)  # the scale is logarithmic
    steps, values = steps[drawable], values[drawable]
    if not len(steps):
        return steps.astype(np.float64), values
    span = (steps * points) // (int(steps[-1]) + 1)
    counts = np.bincount(span)
    filled = counts > 0
    return np.bincount(span, steps)[filled] / counts[filled], np.bincount(span, values)[filled] / counts[
        filled
    ]


class _Outcome(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")


class AlertOutcome(_Outcome):
    """An alert that fired."""

    rule: str
    tensor: str
    step: int
    value: float
    threshold: float
    severity: str


class TrainingOutcome(_Outcome):
    """Outcome of one training."""

    run_id: str
    state: str
    steps: int = Field(description="Number of recorded steps.")
    alerts: tuple[AlertOutcome, ...]
    stopped_at_step: int | None = Field(description="Last finished step of a stopped run.")


class DemoOutcome(_Outcome):
    """Outcome of both trainings."""

    runs: tuple[TrainingOutcome, ...]


def outcome_of(watched: WatchedRun) -> TrainingOutcome:
    """Return the outcome of a settled run."""
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
    return TrainingOutcome(
        run_id=watched.run_id,
        state=watched.state,
        steps=len(watched.run.steps()) if watched.run is not None else 0,
        alerts=alerts,
        stopped_at_step=watched.last_step if watched.state == "stopped" else None,
    )


_PLOT_COLUMNS = 96


def explain(
    console: Console, runs: list[WatchedRun], outcomes: dict[str, TrainingOutcome], picture: Path
) -> None:
    """Print the explanation and draw the picture.

    Args:
        console: output.
        runs: the healthy and the faulty run, settled.
        outcomes: outcomes by run id.
        picture: PNG to write.

    Raises:
        ServiceError: the demo failed: the faulty run has no alert, or the healthy run has one.
    """
    healthy, faulty = runs
    outcome = outcomes[faulty.run_id]
    if healthy.alerts or not faulty.alerts or healthy.run is None or faulty.run is None:
        raise ServiceError(
            f"demo: {len(healthy.alerts)} alerts on the healthy run, {len(faulty.alerts)} on the faulty one",
            "see the logs in the folder of the demo",
        )
    alert = min(faulty.alerts, key=lambda candidate: int(candidate["finding"]["time_ns"]))
    finding = alert["finding"]
    stopped_at = outcome.stopped_at_step if outcome.stopped_at_step is not None else faulty.last_step
    evidence = Evidence(
        healthy.run, faulty.run, finding["step"], stopped_at, f"{alert['rule']}: {finding['message']}"
    )
    console.print()
    console.print(Text.from_ansi(draw_text(evidence, _PLOT_COLUMNS, colours=console.is_terminal)))
    draw_png(evidence, picture)
    for name, text in _lines(alert, faulty, healthy, picture):
        console.print(Text.assemble((f"{name:9}", "bold"), f" {text}"), soft_wrap=True)
    console.print()
    console.print(Text(_CODE_FOLLOWS), soft_wrap=True)
    console.print()
    gradients = [name for name in faulty.run.tensors(GRADIENTS) if name.endswith("weight:gradient")]
    console.print(Text(evidence_lines(faulty.run.location, gradients[-1])), soft_wrap=True)


_CODE_FOLLOWS = (
    "Code that reads the same evidence later (it needs pandas: pip install -e '.[pandas]' in the clone):"
)


def evidence_lines(run: str, tensor: str) -> str:
    """Return three lines of Python that read the evidence."""
    return (
        "    import watchstep\n"
        f"    run = watchstep.open_run({run!r})\n"
        f"    print(run.tensor({tensor!r}).statistics().to_pandas().query('nan > 0')"
        "[['step', 'nan', 'count', 'min', 'max']])\n"
    )


def _lines(
    alert: dict[str, Any], faulty: WatchedRun, healthy: WatchedRun, picture: Path
) -> list[tuple[str, str]]:
    finding = alert["finding"]
    step = int(finding["step"])
    # The message is "the gate policy stopped the training at step 158: …; … at digits.py:65 in main: …".
    _, _, reason = finding["message"].partition(": ")
    found, _, line = reason.partition("; ")
    before = f"before the update of step {step}, with the weights of step {step - 1}"
    return [
        ("rule", f"{alert['rule']} ({alert['severity']})"),
        ("found", found),
        ("line", line),
        ("ended", before if faulty.state == "stopped" else f"{faulty.state}, not stopped"),
        ("healthy", f"the same program on clean data: {healthy.state}, no alert"),
        ("trace", f"watchstep trace {faulty.run.location if faulty.run else ''} --step {step}"),
        ("picture", str(picture)),
    ]


_BAR = 30
_PLAIN_EVERY = 4  # updates per printed line if the output is not a terminal


class Display:
    """Shows the progress: a table that updates in place on a terminal, lines elsewhere."""

    def __init__(self, console: Console, runs: list[WatchedRun]) -> None:
        self._console = console
        self._runs = runs
        self._updates = 0
        self._live = Live(console=console, refresh_per_second=8) if console.is_terminal else None

    def __enter__(self) -> Display:  # noqa: PYI034 - Self requires Python 3.11
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self) -> None:
        """Show the current state of the runs."""
        if self._live is not None:
            self._live.update(self._table())
            return
        if self._updates % _PLAIN_EVERY == 0 or all(watched.settled for watched in self._runs):
            line = "  ".join(
                f"{watched.label}: step {watched.last_step} loss {figure(watched.loss)} {watched.state}"
                if watched.last_step >= 0
                else f"{watched.label}: {watched.state}"
                for watched in self._runs
            )
            self._console.print(line, soft_wrap=True, highlight=False)
        self._updates += 1

    def _table(self) -> Table:
        rows = table("RUN", "PROGRESS", ">STEP", ">LOSS", "STATE", "ALERT")
        for watched in self._runs:
            done = round(_BAR * (watched.last_step + 1) / STEPS)
            colour = _FAULTY_ANSI if watched.alerts else _HEALTHY_ANSI
            alerts = ", ".join(alert["rule"] for alert in watched.alerts) or "none"
            rows.add_row(
                watched.label,
                Text("━" * done, style=colour) + Text("━" * (_BAR - done), style="bright_black"),
                str(watched.last_step),
                figure(watched.loss),
                watched.state,
                Text(alerts, style=colour),
            )
        return rows
