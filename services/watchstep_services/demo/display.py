"""What the demo shows while the runs go on."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from watchstep_services.core.console import figure, table
from watchstep_services.demo.digits import STEPS
from watchstep_services.demo.watching import WatchedRun

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
