"""Figures of matplotlib without global state: how they are made, styled, saved and shown in notebooks.

A figure does not use pyplot, so it belongs to no window, is freed like any object, and can be made on any thread. matplotlib itself does
not promise that two figures can be drawn at the same time; drawing takes a lock. Text is never interpreted as mathematics or TeX, because
names of tensors are data.

Import this module inside of functions: it loads matplotlib.
"""

from __future__ import annotations

import io
import os
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from watchstep.errors import ConfigError
from watchstep.platform.terminal_text import printable

try:
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties, findfont, get_font
except ImportError as error:
    raise ConfigError(f"pictures need matplotlib ({error})", "pip install 'watchstep[plots]'") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL.Image import Image

BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, GREY = "#CC79A7", "#56B4E9", "#000000", "#6b7280"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, BLACK)
"""The palette of Okabe and Ito, whose colours differ for people with any common colour blindness."""

HEAT = "viridis"
"""The colours of a heatmap: its lightness rises evenly, so that it is also readable in grey."""

DPI = 100
PICTURES = ("png", "svg")

_drawing = threading.RLock()
_MAX_LABEL = 60


class PlotFigure(Figure):
    """A matplotlib figure that belongs to no window. Notebooks show it, and `save` writes it as PNG or SVG."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture.

        Args:
            path: file that ends in ``.png`` or ``.svg``.

        Returns:
            The path.

        Raises:
            ConfigError: the name has another ending, or the file cannot be written.
        """
        target = checked_target(path, PICTURES)
        return write_picture(target, self.encode(target.suffix[1:].lower()))

    def encode(self, picture_format: str = "png") -> bytes:
        """Return the picture as bytes of a format of `PICTURES`."""
        buffer = io.BytesIO()
        metadata = {"Date": None} if picture_format == "svg" else {"Software": None}
        with _drawing:
            self.savefig(buffer, format=picture_format, dpi=self.dpi, facecolor="white", metadata=metadata)
        return buffer.getvalue()

    def encode_small(self, colours: int = 64) -> bytes:
        """Return a PNG with a palette of few colours, which has a third of the size; for messages."""
        buffer = io.BytesIO()
        self.image().quantize(colours).save(buffer, format="png", optimize=True)
        return buffer.getvalue()

    def image(self) -> Image:
        """Return the picture as an image of Pillow."""
        from PIL import Image

        buffer = io.BytesIO()
        with _drawing:
            self.savefig(buffer, format="rgba", dpi=self.dpi, facecolor="white")
            size = int(self.bbox.width), int(self.bbox.height)
        return Image.frombytes("RGBA", size, buffer.getvalue()).convert("RGB")

    def _repr_png_(self) -> bytes:
        return self.encode("png")


def new_figure(width: float, height: float) -> PlotFigure:
    """Return an empty figure of a size in pixels."""
    return PlotFigure(figsize=(width / DPI, height / DPI), dpi=DPI, layout="constrained", facecolor="white")


def style_axes(axes: Axes) -> None:
    """Remove what carries no data, and add a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.tick_params(labelsize=8)
    axes.margins(x=0.01)


def add_legend(axes: Axes, **arguments: Any) -> None:
    """Add a legend whose texts contain no markup; arguments as for ``Axes.legend``."""
    for text in axes.legend(fontsize=8, loc="best", **arguments).get_texts():
        text.set_parse_math(False)
        text.set_usetex(False)


PLAIN: dict[str, Any] = {"parse_math": False, "usetex": False}
"""Arguments of texts: they contain no markup."""


def label(text: str, length: int = _MAX_LABEL) -> str:
    """Return text that the font can draw, without control characters, shortened in the middle: names differ at their ends."""
    shown = _drawable(text)
    if len(shown) <= length:
        return shown
    head = (length - 1) // 3
    return f"{shown[:head]}…{shown[len(shown) - (length - 1 - head) :]}"


def legend_label(text: str, length: int = _MAX_LABEL) -> str:
    """Return `label` for a legend, which omits texts that begin with an underscore."""
    shown = label(text, length)
    return f" {shown}" if shown.startswith("_") else shown


def shortened(text: str, length: int) -> str:
    """Return text that the font can draw, without control characters, shortened at its end."""
    shown = _drawable(text)
    return shown if len(shown) <= length else f"{shown[: length - 1]}…"


def _drawable(text: str) -> str:
    known = _characters()
    return "".join(c if ord(c) in known else "\N{REPLACEMENT CHARACTER}" for c in printable(text))


@cache
def _characters() -> frozenset[int]:
    """Return the characters of the default font. matplotlib warns for each character that its font does not have."""
    family = FontProperties(family=rcParams["font.family"])
    return frozenset(get_font(findfont(family)).get_charmap())


def checked_target(path: str | os.PathLike[str], formats: tuple[str, ...]) -> Path:
    """Return the path of a picture.

    Raises:
        ConfigError: the name does not end in a format.
    """
    target = Path(path)
    if target.suffix.lower().removeprefix(".") not in formats:
        endings = " or ".join(f".{name}" for name in formats)
        raise ConfigError(f"picture {os.fspath(path)!r}", f"use a name that ends in {endings}")
    return target


def write_picture(target: Path, data: bytes) -> Path:
    """Write a picture.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        target.write_bytes(data)
    except OSError as error:
        raise ConfigError(
            f"picture {target}: {error.strerror}", "use a file in a folder that exists and is writable"
        ) from error
    return target
