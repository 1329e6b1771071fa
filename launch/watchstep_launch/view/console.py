"""The picture as a notebook takes it."""

from __future__ import annotations

import io

from rich.console import RenderableType
from rich.terminal_theme import TerminalTheme

from watchstep.platform.terminal_console import TerminalConsole

_TEXT_WIDTH = 100
_HTML_WIDTH = 1000  # the browser wraps long lines
# Medium brightness: each color has a contrast of 4 : 1 on white and on #111111, and of 3.6 : 1 on #1e1e1e.
_RED, _GREEN, _YELLOW, _BLUE = (214, 69, 69), (40, 138, 74), (158, 114, 0), (58, 122, 214)
_MAGENTA, _CYAN, _GREY = (178, 84, 190), (0, 132, 150), (118, 118, 118)
_BLACK, _WHITE = (0, 0, 0), (255, 255, 255)
_COLORS = [_BLACK, _RED, _GREEN, _YELLOW, _BLUE, _MAGENTA, _CYAN, _GREY]
_THEME = TerminalTheme(_WHITE, _BLACK, _COLORS, _COLORS)
# Jupyter shows <pre> in its text font; bars and columns need a monospace font.
_FRAME = (
    "<pre style='font-family: var(--jp-code-font-family, var(--vscode-editor-font-family, monospace)), monospace; "
    "font-size: var(--jp-code-font-size, inherit); line-height: 1.35; margin: 0; white-space: pre-wrap; "
    "overflow-wrap: anywhere; word-break: normal'>{}</pre>"
)
_LINE = "<div style='padding-left: 6em; text-indent: -6em'>{}</div>"
"""Continuation lines are indented to the right of the events' times."""


def notebook_data(drawn: RenderableType) -> dict[str, str]:
    """Return a picture in the form that Jupyter takes: with colors, and as plain text."""
    html = _printed(drawn, _HTML_WIDTH).export_html(
        theme=_THEME, inline_styles=True, clear=False, code_format="{code}"
    )
    shown = "".join(_LINE.format(line.rstrip()) for line in html.splitlines())
    text = _printed(drawn, _TEXT_WIDTH).export_text()
    return {
        "text/html": _FRAME.format(shown),
        "text/plain": "\n".join(line.rstrip() for line in text.splitlines()),
    }


def _printed(drawn: RenderableType, width: int) -> TerminalConsole:
    console = TerminalConsole(
        file=io.StringIO(), record=True, width=width, highlight=False, force_jupyter=False, force_terminal=True,
        color_system="truecolor", no_color=False,
    )  # fmt: skip
    console.print(drawn)
    return console
