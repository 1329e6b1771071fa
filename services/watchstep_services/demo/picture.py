"""Picture of the evidence: losses of both runs, and the gradients of the faulty run by layer."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from watchstep.format.tensors import GRADIENTS
from watchstep.platform.terminal_text import printable
from watchstep.reading.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARGIN = 0.01
_TITLE_COLUMNS = 140
_HEALTHY, _FAULTY, _BAD = "#1b7f5c", "#3256a8", "#c62f2f"


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
        path: output file, a PNG of about 1400 by 900 pixels.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.6), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.15))
    _set_title(figure, evidence.title)
    for run, colour, label in (
        (evidence.healthy, _HEALTHY, "healthy"),
        (evidence.faulty, _FAULTY, "faulty"),
    ):
        top.plot(*losses(run), color=colour, linewidth=1.3, label=f"{label} run: loss")
    top.set_yscale("log")
    top.set_ylabel("loss")
    _draw_gradients(bottom, evidence)
    for axes in (top, bottom):
        axes.axvline(evidence.bad_step, color=_BAD, linewidth=1.2, label=f"step {evidence.bad_step}: bad")
        axes.axvspan(evidence.bad_step, evidence.stopped_at, color=_BAD, alpha=0.10, linewidth=0)
        axes.axvline(
            evidence.stopped_at,
            color="black",
            linewidth=1.2,
            linestyle="--",
            label=f"{evidence.stopped_at}: stopped",
        )
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    top.legend(loc="upper right", fontsize=8, frameon=False)
    bottom.set_xlabel("step")
    figure.savefig(path)


def _set_title(figure: Figure, text: str) -> None:
    """Set a title that fits the width of the picture, in several lines if necessary, without interpreting markup."""
    title = figure.suptitle("", fontsize=11, x=_MARGIN, ha="left", fontweight="bold", parse_math=False)
    available = (1 - 2 * _MARGIN) * figure.bbox.width
    for columns in range(_TITLE_COLUMNS, 0, -4):
        title.set_text(textwrap.fill(printable(text), columns))
        if title.get_window_extent().width <= available:
            return


def _draw_gradients(axes: Axes, evidence: Evidence) -> None:
    names = [n for n in evidence.faulty.tensors(GRADIENTS) if n.endswith("weight:gradient")]
    rows = np.full((len(names), evidence.stopped_at + 1), np.nan)
    broken = np.zeros_like(rows, dtype=bool)
    for row, name in enumerate(names):
        table = evidence.faulty.tensor(name).statistics()
        steps = table["step"].to_numpy()
        keep = steps <= evidence.stopped_at
        rows[row, steps[keep]] = np.log10(np.maximum(table["rms"].to_numpy().astype(float)[keep], 1e-12))
        broken[row, steps[keep]] = table["nan"].to_numpy()[keep] > 0
    for step in range(1, rows.shape[1]):  # steps without a measurement keep the last value
        rows[:, step] = np.where(np.isnan(rows[:, step]), rows[:, step - 1], rows[:, step])
        broken[:, step] |= broken[:, step - 1]
    image = axes.imshow(rows, aspect="auto", cmap="viridis", interpolation="nearest", origin="upper")
    hidden = np.where(broken, 1.0, np.nan)
    axes.imshow(hidden, aspect="auto", cmap="autumn", interpolation="nearest", origin="upper", vmin=1, vmax=2)
    axes.set_yticks(range(len(names)), [name.removesuffix(":gradient") for name in names], fontsize=8)
    axes.set_title(
        "gradients of the faulty run, log10 of their root mean square; red: NaN", fontsize=9, loc="left"
    )
    axes.figure.colorbar(image, ax=axes, pad=0.01)


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
    for run, label in ((evidence.healthy, "healthy"), (evidence.faulty, "faulty")):
        steps, values = _thinned(*losses(run), width // 2)
        signal = figure.signal(steps.tolist(), np.log10(values).tolist())
        signal.lines()
        signal.label(label)
        figure.draw(signal)
    figure.line(evidence.bad_step, orientation="vertical")
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
