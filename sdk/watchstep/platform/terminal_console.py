"""A console for terminals. Foreign text is shown literally: no markup, no escape sequences, no additional lines.

Needs ``rich``, which `watchstep[launch]` and `watchstep[server]` install; nothing else of the SDK imports this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from watchstep.platform.terminal_text import printable, printable_lines


class TerminalConsole(Console):
    """A console that sanitizes everything it prints, so that no caller can forget to.

    A string is one line without markup. Styles and multiple lines need a `Text`, which is sanitized in the same way except for
    its line ends.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print like `Console.print`; each string on its own line, with numbers colored in a terminal unless ``highlight=False``."""
        is_colored = self.is_terminal and options.get("highlight", True)
        super().print(*(self._sanitize(item, is_colored) for item in objects), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render like `Console.render`, without characters that control a terminal."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable_lines(segment.text), segment.style)

    def _sanitize(self, item: Any, is_colored: bool) -> Any:
        if not isinstance(item, str):
            return item
        line = Text(printable(item))
        return self.highlighter(line) if is_colored else line
