"""The distribution of a tensor's elements through the steps, as an animation."""

from __future__ import annotations

import base64
import io
import os
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from watchstep.errors import ConfigError
from watchstep.plots.binned import HistogramRows, dense, shares
from watchstep.plots.tensor_plot import power_label, zero_shares

if TYPE_CHECKING:
    from PIL.Image import Image

_WIDTH, _HEIGHT = 560, 340
_MAX_LABELS = 12
_LAST_FRAME_MS = 1500


class DistributionAnimation:
    """An animation with one frame per row of a histogram. Notebooks show it, and `save` writes it as GIF.

    Args:
        name: name of the tensor.
        histogram: the distribution over the steps. Rows without elements are omitted.
        frame_ms: time of one frame in milliseconds. The last one stays longer.
    """

    def __init__(self, name: str, histogram: HistogramRows, frame_ms: int = 120) -> None:
        if not 20 <= frame_ms <= 10_000:
            raise ConfigError(f"invalid frame_ms={frame_ms!r}", "use 20 to 10000 milliseconds")
        self.name = name
        self._histogram = dense(histogram)
        self._frame_ms = frame_ms

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the animation.

        Args:
            path: file that ends in ``.gif``.

        Returns:
            The path.

        Raises:
            ConfigError: the name has another ending, the file cannot be written, or matplotlib is not installed.
        """
        from watchstep.plots.plot_figure import checked_target, write_picture

        return write_picture(checked_target(path, ("gif",)), self.encode())

    def encode(self) -> bytes:
        """Return the animation as the bytes of a GIF.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        images = self._frames()
        buffer = io.BytesIO()
        times = [self._frame_ms] * (len(images) - 1) + [max(self._frame_ms, _LAST_FRAME_MS)]
        images[0].save(
            buffer,
            format="gif",
            save_all=True,
            append_images=images[1:],
            duration=times,
            loop=0,
            optimize=True,
        )
        return buffer.getvalue()

    def _frames(self) -> list[Image]:
        from watchstep.plots.plot_figure import BLUE, PLAIN, label, new_figure, style_axes

        histogram = self._histogram
        share = np.nan_to_num(shares(histogram))
        zero, bad = zero_shares(histogram)
        rows = np.flatnonzero(np.isfinite(zero))
        figure = new_figure(_WIDTH, _HEIGHT)
        axes = figure.subplots()
        style_axes(axes)
        columns = np.arange(share.shape[1])
        bars = axes.bar(columns, np.zeros(len(columns)), width=0.9, color=BLUE)
        axes.set_ylim(0, 1.05 * (float(share.max()) if share.size else 0.0) or 1.0)
        ticks = range(0, len(columns), max(1, -(-len(columns) // _MAX_LABELS)))
        axes.set_xticks(list(ticks), [power_label(histogram, tick) for tick in ticks], fontsize=7, **PLAIN)
        axes.set_ylabel("share of elements", fontsize=8)
        figure.suptitle(label(self.name, 64), fontsize=10, x=0.01, ha="left", fontweight="bold", **PLAIN)
        title = axes.set_title(" ", fontsize=9, loc="left", **PLAIN)
        images = []
        for row in rows:
            for bar, height in zip(bars, share[row], strict=True):
                bar.set_height(height)
            first, last = int(histogram.edges[row]), int(histogram.edges[row + 1]) - 1
            steps = f"step {first}" if last <= first else f"steps {first} to {last}"
            title.set_text(f"{steps}: {zero[row]:.1%} zeros, {bad[row]:.1%} not finite")
            images.append(figure.image().quantize(32))
            figure.set_layout_engine("none")  # the layout of the first frame is that of all
        return images

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.encode()).decode()
        return f'<img alt="distribution of {escape(self.name)} over the steps" src="data:image/gif;base64,{data}">'
