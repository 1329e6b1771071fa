"""Console output of the commands: tables and numbers, plain if the output is not a terminal."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from watchstep.platform.terminal_console import TerminalConsole
from watchstep.platform.terminal_text import escaped_json, number_text, printable

_PIPE = 100
_NARROW = 12
"""Minimum width of columns that may be folded."""


def console(least: int = 0, *, stderr: bool = False) -> TerminalConsole:
    """A console for standard output or standard error of at least this width; a pipe gets 100 columns and no colours."""
    plain = TerminalConsole(stderr=stderr)
    if not plain.is_terminal:
        return TerminalConsole(stderr=stderr, width=max(least, _PIPE))
    return plain if plain.width >= least else TerminalConsole(stderr=stderr, width=least)


def echo(line: str, *, err: bool = False) -> None:
    """Write one line without wrapping and colours."""
    typer.echo(printable(line), err=err)


def echo_json(text: str) -> None:
    """Write JSON so that a terminal interprets nothing in it; its meaning for programs is unchanged."""
    typer.echo(escaped_json(text))


def show_json(data: object) -> None:
    """Write data as JSON. Non-finite numbers become null, as in the API."""
    echo_json(json.dumps(_finite(data), indent=2, default=str))


def _finite(data: object) -> object:
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def echo_own(text: str) -> None:
    """Write Watchstep's own text unchanged, such as a schema or a new key."""
    typer.echo(text.removesuffix("\n"))


class PlainTable(Table):
    """A table that shows text literally, because it comes from training programs and other people."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row; texts are not markup, and cannot move the cursor."""
        super().add_row(
            *(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells), **options
        )


def table(*columns: str) -> Table:
    """A table with a header line and no frame.

    Args:
        columns: their headers. ``>`` as the first character aligns a column to the right. ``=`` marks ids and names for copying:
            `show` never wraps or truncates them, however narrow the terminal is.
    """
    plain_table = PlainTable(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        plain_table.add_column(
            Text(printable(column.lstrip(">="))),
            justify="right" if column.startswith(">") else "left",
            no_wrap=column.startswith("="),
            overflow="fold",
        )
    return plain_table


def show(shown: Table) -> None:
    """Print a table. Lines are longer than the terminal's width if unwrapped columns need it."""
    console(sum(_least(column) + 1 for column in shown.columns)).print(shown)


def figure(value: float | None) -> str:
    """A number as `number_text` formats it; a dash for None."""
    return "-" if value is None else number_text(value)


def moment(at_ns: int) -> str:
    """Nanoseconds since the epoch as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ns / 1e9))


def _least(column: Column) -> int:
    lines = [line for cell in (column.header, *column.cells) for line in str(cell).splitlines()]
    widest = max(map(cell_len, lines), default=0)
    return widest if column.no_wrap else min(widest, max(_NARROW, cell_len(str(column.header))))
