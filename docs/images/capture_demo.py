"""The picture of ``watchstep demo`` in the README: ``python -m docs.images.capture_demo`` runs it and draws what it printed.

The demo runs in a pseudo-terminal. Lines with paths of this machine are left out.
"""

from __future__ import annotations

import os
import pty
import re
import struct
import sys
import tempfile
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

import watchstep_services

COLUMNS = 100
PICTURE = Path(__file__).with_name("demo.svg")
_PACKAGES = f"{Path(watchstep_services.__file__).parents[1]}/"
_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")
_FONT = '"Fira Code", "DejaVu Sans Mono", Menlo, Consolas, monospace'
_SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>What watchstep demo prints</title>
<style>
.{unique_id}-matrix {{ font-family: FONT; font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
<rect fill="#0d1117" stroke="#30363d" rx="8" width="{width}" height="{height}"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
""".replace("FONT", _FONT)


def run_in_terminal(command: list[str], folder: Path) -> str:
    """Run a command in a pseudo-terminal of `COLUMNS` columns; what it wrote."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES="60")
        os.environ.pop("CI", None)
        os.execvp(command[0], command)  # noqa: S606 - the command is this module's own
    ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))
    written = bytearray()
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # Linux ends a pseudo-terminal so
            break
        if not piece:
            break
        written += piece
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"{command[0]} ended with {os.waitstatus_to_exitcode(status)}")
    return written.decode("utf-8")


def final_screen(written: str) -> list[str]:
    """The lines that are left on the terminal, with their colours: tables that change in place are shown once."""
    lines, row = [""], 0
    for token in _TOKEN.finditer(written):
        parameters, command = token.group(1), token.group(2)
        if command == "A":
            row = max(0, row - int(parameters or 1))
        elif command == "K":
            lines[row] = ""
        elif token.group() == "\n":
            row += 1
            lines.extend([""] * (row + 1 - len(lines)))
        elif command in {None, "m"} and token.group() != "\r":
            lines[row] += token.group()
    return lines


def _without_background(style: str | Style) -> str | Style:
    return style if isinstance(style, str) else Style(color=style.color, bold=style.bold)


def picture(lines: list[str]) -> str:
    """The lines as an SVG picture that loads nothing."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(
            record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor"
        )
        console.print(Text("$ watchstep demo", style="bold"))
        for line in lines:
            text = Text.from_ansi(line)
            text.spans = [span._replace(style=_without_background(span.style)) for span in text.spans]
            console.print(text, soft_wrap=False)
        return console.export_svg(theme=MONOKAI, code_format=_SVG, unique_id="demo", font_aspect_ratio=0.6)


def main() -> None:
    """Run the demo and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        lines = final_screen(
            run_in_terminal([str(Path(sys.executable).with_name("watchstep")), "demo"], Path(folder))
        )
    end = next(index for index, line in enumerate(lines) if "the same evidence" in line)
    shown = [
        line.replace(_PACKAGES, "")
        for line in lines[:end]
        if not Text.from_ansi(line).plain.startswith(("service ", "picture ", "trace "))
    ]
    while shown and not shown[-1].strip():
        shown.pop()
    PICTURE.write_text(picture(shown), encoding="utf-8")


if __name__ == "__main__":
    main()
