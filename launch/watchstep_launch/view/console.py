"""Consoles for terminals and notebooks. Text of others is shown as it is: no markup, no escape sequences, no additional lines."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from watchstep.platform.terminal_text import printable, printable_lines

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


class TerminalConsole(Console):
    """Everything that is shown passes here, so that no caller can forget it.

    A string is one line and holds no markup; styles and several lines are said by a `Text`, whose characters are replaced in
    the same way, but for ends of lines.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as `Console.print` does; each string on its own line, numbers coloured in a terminal unless ``highlight=False``."""
        coloured = self.is_terminal and options.get("highlight", True)
        super().print(*(self._line(each, coloured) for each in objects), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as `Console.render` does, without characters that a terminal would act on."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable_lines(segment.text), segment.style)

    def _line(self, shown: Any, coloured: bool) -> Any:
        if not isinstance(shown, str):
            return shown
        line = Text(printable(shown))
        return self.highlighter(line) if coloured else line
