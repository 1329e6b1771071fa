"""A run's status as a picture for terminals and notebooks, with losses as lines of bars.

A program's own words are plain text, never markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from watchstep.platform.terminal_text import printable
from watchstep_launch.view.run_status import Loss, RunStatus, time_of, words_of

_STATES = {"running": "cyan", "completed": "green", "failed": "red", "stopped": "red", "stopping": "yellow", "lost": "red"}  # fmt: skip
_ACTIVE = frozenset(("created", "running", "stopping"))
_PHASES = {"firing": "bold red", "pending": "yellow", "error": "magenta", "resolved": "green"}
_MAX_RULES = 8


def picture(status: RunStatus, job: str = "") -> RenderableType:
    """Return the picture.

    Args:
        status: status of the run.
        job: text for the job's status.
    """
    return Group(_head(status, job), _figures(status), *_rules(status), *_events(status), *_trouble(status))


def _head(status: RunStatus, job: str) -> Text:
    head = Text(printable(status.name), style="bold", overflow="fold")
    head.append(f"  {status.state}", style=_STATES.get(status.state, ""))
    if status.state != "waiting":
        word = "for" if status.state in _ACTIVE else "after"
        head.append(f" {word} {span(status.seconds)}", style="not bold")
    if job:
        head.append(f"  {printable(job)}", style="dim not bold")
    return head


def _figures(status: RunStatus) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")  # in a narrow terminal, only this column shrinks
    is_active = status.steps_per_second is not None and status.state in _ACTIVE
    pace = f"{_short(status.steps_per_second or 0.0)} steps/s" if is_active else ""
    table.add_row("step", f"{status.step:,}" if status.step >= 0 else "-", pace)
    for loss in status.losses:
        table.add_row(Text(printable(loss.name)), _last(loss), Bars(loss.points))
    if status.overhead is not None:
        share, budget = status.overhead
        bound = (
            f"of the program's time; budget {budget:.1%}"
            if math.isfinite(budget)
            else "of the program's time"
        )
        table.add_row("recording", f"{share:.2%}", bound)
    if status.problems:
        table.add_row("problems", "", Text(", ".join(status.problems), style="yellow"))
    return table


def _rules(status: RunStatus) -> Iterator[RenderableType]:
    if not status.rules:
        return
    counts: dict[str, int] = {}
    for phase in status.rules.values():
        counts[phase] = counts.get(phase, 0) + 1
    line = Text("rules  ", style="dim")
    line.append(", ".join(f"{number} {phase}" for phase, number in sorted(counts.items())), style="not dim")
    yield line
    rules = [(name, phase) for name, phase in status.rules.items() if phase in _PHASES]
    for name, phase in rules[:_MAX_RULES]:
        yield Text.assemble(("  ● ", _PHASES[phase]), f"{printable(name)}  ", (phase, _PHASES[phase]))
    if len(rules) > _MAX_RULES:
        yield Text(f"  and {len(rules) - _MAX_RULES} more", style="dim")


def _events(status: RunStatus) -> Iterator[RenderableType]:
    if not status.events:
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for event in status.events:
        table.add_row(Text(printable(time_of(event))), Text(printable(words_of(event))))
    yield table


def _trouble(status: RunStatus) -> Iterator[RenderableType]:
    if status.trouble:
        yield Text(
            f"no answer from the service: {printable(status.trouble)}", style="yellow", overflow="fold"
        )


def _last(loss: Loss) -> str:
    if not loss.points:
        return "-"
    return "not finite" if loss.points[-1] is None else f"{loss.points[-1]:.4g}"


def span(seconds: float) -> str:
    """Format seconds in the two largest units: ``3 min 12 s``."""
    units: Sequence[tuple[str, int]] = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    rest = int(seconds)
    parts: list[str] = []
    for name, size in units:
        number, rest = divmod(rest, size)
        if number or (name == "s" and not parts):
            parts.append(f"{number} {name}")
    return " ".join(parts[:2])


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_NOT_FINITE = "\N{MULTIPLICATION SIGN}"
_HEIGHTS = "▁▂▃▄▅▆▇█"
_MIN_BARS = 8

Points = Sequence[float | None]
"""Values; None stands for a value that is not finite."""


@dataclass(frozen=True)
class Bars:
    """A bar for each point; if they do not fit, one for several points."""

    points: tuple[float | None, ...]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Measure: from a few bars to all of them."""
        return Measurement(min(_MIN_BARS, len(self.points)), len(self.points))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw as many bars as fit."""
        yield Text(line_of_bars(fewer(self.points, options.max_width)), no_wrap=True, overflow="crop")


def line_of_bars(points: Points) -> str:
    """Return bars scaled from the smallest to the largest value, with a cross for values that are not finite."""
    finite = [value for value in points if value is not None and math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_bar(value, low, high) for value in points)


def fewer(points: Points, most: int) -> Points:
    """Average points down to at most ``most`` points; None if one of the averaged values is not finite."""
    count, most = len(points), max(1, most)
    if count <= most:
        return points
    return [_mean(points[count * place // most : count * (place + 1) // most]) for place in range(most)]


def _mean(points: Points) -> float | None:
    finite = [value / len(points) for value in points if value is not None and math.isfinite(value)]
    return math.fsum(finite) if len(finite) == len(points) else None


def _bar(value: float | None, low: float, high: float) -> str:
    if value is None or not math.isfinite(value):
        return _NOT_FINITE
    share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.0
    return _HEIGHTS[min(len(_HEIGHTS) - 1, int(share * len(_HEIGHTS)))]
