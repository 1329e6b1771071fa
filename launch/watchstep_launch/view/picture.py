"""A sight as a picture for terminals and notebooks. Every word of a program's own is plain text: none is markup.

A loss as a line of bars.
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
from watchstep_launch.view.run_status import Loss, Sight, time_of, words_of

_STATES = {"running": "cyan", "completed": "green", "failed": "red", "stopped": "red", "stopping": "yellow", "lost": "red"}  # fmt: skip
_GOING_ON = frozenset(("created", "running", "stopping"))
_PHASES = {"firing": "bold red", "pending": "yellow", "error": "magenta", "resolved": "green"}
_MOST_RULES = 8


def picture(sight: Sight, job: str = "") -> RenderableType:
    """The whole of it.

    Args:
        sight: of the run.
        job: how its job is, in words.
    """
    return Group(_head(sight, job), _figures(sight), *_rules(sight), *_events(sight), *_trouble(sight))


def _head(sight: Sight, job: str) -> Text:
    head = Text(printable(sight.name), style="bold", overflow="fold")
    head.append(f"  {sight.state}", style=_STATES.get(sight.state, ""))
    if sight.state != "waiting":
        word = "for" if sight.state in _GOING_ON else "after"
        head.append(f" {word} {span(sight.seconds)}", style="not bold")
    if job:
        head.append(f"  {printable(job)}", style="dim not bold")
    return head


def _figures(sight: Sight) -> Table:
    shown = Table.grid(padding=(0, 2))
    shown.add_column(style="dim", no_wrap=True)
    shown.add_column(justify="right", no_wrap=True)
    shown.add_column(overflow="fold")  # where there is little room, this column alone is narrower
    known = sight.steps_per_second is not None and sight.state in _GOING_ON
    pace = f"{_short(sight.steps_per_second or 0.0)} steps/s" if known else ""
    shown.add_row("step", f"{sight.step:,}" if sight.step >= 0 else "-", pace)
    for loss in sight.losses:
        shown.add_row(Text(printable(loss.name)), _last(loss), Bars(loss.points))
    if sight.overhead is not None:
        share, budget = sight.overhead
        bound = (
            f"of the program's time; budget {budget:.1%}"
            if math.isfinite(budget)
            else "of the program's time"
        )
        shown.add_row("recording", f"{share:.2%}", bound)
    if sight.amiss:
        shown.add_row("amiss", "", Text(", ".join(sight.amiss), style="yellow"))
    return shown


def _rules(sight: Sight) -> Iterator[RenderableType]:
    if not sight.rules:
        return
    counts: dict[str, int] = {}
    for phase in sight.rules.values():
        counts[phase] = counts.get(phase, 0) + 1
    line = Text("rules  ", style="dim")
    line.append(", ".join(f"{number} {phase}" for phase, number in sorted(counts.items())), style="not dim")
    yield line
    told = [(name, phase) for name, phase in sight.rules.items() if phase in _PHASES]
    for name, phase in told[:_MOST_RULES]:
        yield Text.assemble(("  ● ", _PHASES[phase]), f"{printable(name)}  ", (phase, _PHASES[phase]))
    if len(told) > _MOST_RULES:
        yield Text(f"  and {len(told) - _MOST_RULES} more", style="dim")


def _events(sight: Sight) -> Iterator[RenderableType]:
    if not sight.events:
        return
    shown = Table.grid(padding=(0, 2))
    shown.add_column(style="dim", no_wrap=True)
    shown.add_column(overflow="fold")
    for event in sight.events:
        shown.add_row(Text(printable(time_of(event))), Text(printable(words_of(event))))
    yield shown


def _trouble(sight: Sight) -> Iterator[RenderableType]:
    if sight.trouble:
        yield Text(f"the service tells nothing: {printable(sight.trouble)}", style="yellow", overflow="fold")


def _last(loss: Loss) -> str:
    if not loss.points:
        return "-"
    return "not finite" if loss.points[-1] is None else f"{loss.points[-1]:.4g}"


def span(seconds: float) -> str:
    """``3 min 12 s``: the two largest units."""
    units: Sequence[tuple[str, int]] = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    left = int(seconds)
    parts: list[str] = []
    for name, size in units:
        number, left = divmod(left, size)
        if number or (name == "s" and not parts):
            parts.append(f"{number} {name}")
    return " ".join(parts[:2])


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_NOT_FINITE = "\N{MULTIPLICATION SIGN}"
_HEIGHTS = "▁▂▃▄▅▆▇█"
_FEWEST = 8

Points = Sequence[float | None]
"""Values, None where there is none that is finite."""


@dataclass(frozen=True)
class Bars:
    """A bar for each point; where they do not fit, one for several points."""

    points: tuple[float | None, ...]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """From a few bars to all of them."""
        return Measurement(min(_FEWEST, len(self.points)), len(self.points))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As many as there is room for."""
        yield Text(line_of_bars(fewer(self.points, options.max_width)), no_wrap=True, overflow="crop")


def line_of_bars(points: Points) -> str:
    """From the least to the largest; a cross where something is not finite."""
    finite = [value for value in points if value is not None and math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_bar(value, low, high) for value in points)


def fewer(points: Points, most: int) -> Points:
    """Their means in at most so many points; none of several of which one is not finite."""
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
