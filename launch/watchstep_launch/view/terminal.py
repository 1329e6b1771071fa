"""A console of rich that shows text of others as it is: no markup, no escape sequences, no lines that they make up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from watchstep.platform.terminal_text import printable, printable_lines


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
