"""A picture as a notebook's cell takes it."""

from __future__ import annotations

import io

from rich.console import RenderableType
from rich.terminal_theme import TerminalTheme

from watchstep_launch.view.terminal import TerminalConsole

_TEXT_WIDTH = 100
_HTML_WIDTH = 1000  # the browser folds what does not fit
# Between light and dark: of each the contrast is 4 : 1 on white and on #111111, and 3.6 : 1 on #1e1e1e.
_RED, _GREEN, _YELLOW, _BLUE = (214, 69, 69), (40, 138, 74), (158, 114, 0), (58, 122, 214)
_MAGENTA, _CYAN, _GREY = (178, 84, 190), (0, 132, 150), (118, 118, 118)
_BLACK, _WHITE = (0, 0, 0), (255, 255, 255)
_COLOURS = [_BLACK, _RED, _GREEN, _YELLOW, _BLUE, _MAGENTA, _CYAN, _GREY]
_THEME = TerminalTheme(_WHITE, _BLACK, _COLOURS, _COLOURS)
# Jupyter shows <pre> in the font of its text; bars and columns need one of equal widths.
_FRAME = (
    "<pre style='font-family: var(--jp-code-font-family, var(--vscode-editor-font-family, monospace)), monospace; "
    "font-size: var(--jp-code-font-size, inherit); line-height: 1.35; margin: 0; white-space: pre-wrap; "
    "overflow-wrap: anywhere; word-break: normal'>{}</pre>"
)
_LINE = "<div style='padding-left: 6em; text-indent: -6em'>{}</div>"
"""What goes on below stands to the right of the events' times."""


def notebook_data(drawn: RenderableType) -> dict[str, str]:
    """A picture as Jupyter takes it: in colours, and as plain text for where there are none."""
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
