"""What the commands print: tables and figures, plain where the output is no terminal."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table


def console() -> Console:
    """A console for standard output; a pipe gets 100 columns and no colours."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=100, highlight=False)


def table(*columns: str) -> Table:
    """A table with a header line and no frame; columns that start with ``>`` stand to the right."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    return made


def figure(value: float | None) -> str:
    """A number in four digits; a dash where there is none."""
    return "-" if value is None else f"{value:.4g}"


def moment(at_ns: int) -> str:
    """Nanoseconds since the epoch as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ns / 1e9))
