"""One tensor of a run: its statistics over the steps, and its full values where they were saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.block import Block
from watchstep.format.parquet.table import to_table
from watchstep.format.statistics import DERIVED
from watchstep.format.tensors import Mode, TensorInfo, mode_index
from watchstep.plots.binned import NamedSeries
from watchstep.plots.distribution_animation import DistributionAnimation
from watchstep.plots.html_chart import LineChart
from watchstep.plots.notebook import NOTEBOOK_POINTS, notebook_html
from watchstep.reading import pictures, queries
from watchstep.reading.binning import SeriesRequest, read_lines
from watchstep.reading.index import RunIndex
from watchstep.reading.queries import HistogramSeries
from watchstep.reading.saved.saved_objects import SavedObjects, SavedRequest
from watchstep.reading.saved.saved_tensor import Framework, SavedTensor
from watchstep.reading.steps import checked_step

if TYPE_CHECKING:
    import pyarrow as pa

    from watchstep.plots.plot_figure import PlotFigure


class Tensor:
    """Statistics of one tensor over the steps, and its full values at the steps at which they were saved.

    Attributes:
        info: description of the tensor. For one that only saved objects contain, it follows from these.
    """

    def __init__(
        self, info: TensorInfo, read_rows: Callable[[], Block], saved: SavedObjects, index: RunIndex
    ) -> None:
        self._read_rows = read_rows
        self._saved = saved
        self._index = index
        self.info = info

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.info.name

    @cached_property
    def rows(self) -> Block:
        """The tensor's rows, by step, worker and mode; read at the first access. Empty without statistics."""
        return self._read_rows()

    def steps(self, mode: Mode | None = None) -> list[int]:
        """Return the steps with statistics, ascending.

        Raises:
            ConfigError: the mode is unknown.
        """
        return [int(step) for step in np.unique(self._of_mode(mode).step)]

    @property
    def workers(self) -> list[int]:
        """Workers that measured it, ascending."""
        return [int(worker) for worker in np.unique(self.rows.worker)]

    def statistics(self, mode: Mode | None = None, worker: int | None = None) -> pa.Table:
        """Return one row for each step, mode and worker.

        Args:
            mode: only rows of this mode.
            worker: only rows of this worker.

        Returns:
            A table with the columns of a segment, and the derived figures (`watchstep.format.statistics.DERIVED`). A probe
            without any value in these rows has a column of nulls, or none.

        Raises:
            ConfigError: the mode is unknown.
        """
        import pyarrow as pa

        rows = self._of_mode(mode)
        if worker is not None:
            rows = rows.where(rows.worker == worker)
        table = to_table(rows)
        with np.errstate(all="ignore"):
            for name, derive in DERIVED.items():
                table = table.append_column(name, pa.array(derive(rows.statistics), from_pandas=True))
        return table

    def saved_steps(self, mode: Mode | None = None) -> list[int]:
        """Return the steps at which the full tensor was saved, ascending.

        Reads the headers of saved objects, which are cached. Damaged objects are omitted, and listed in `Run.damaged`.

        Args:
            mode: only passes of this mode.

        Raises:
            ConfigError: the mode is unknown.
            StoreError: the store cannot be read.
        """
        return self._saved.steps(self.name, mode, self.info.collections)

    def saved(
        self,
        step: int,
        *,
        mode: Mode = "train",
        worker: int | None = None,
        attempt: str | None = None,
        collection: str | None = None,
    ) -> SavedTensor:
        """Open the full tensor of one step. Its values are read when they are accessed, in slices if requested.

        Shards of several workers are merged. Of equal tensors of several workers, that of the lowest worker is returned.

        Args:
            step: a step of `saved_steps`; in modes other than train, the step of the run at which the pass was made.
            mode: the mode.
            worker: only the part that this worker saved.
            attempt: the attempt; by default the newest one that has the step, as for statistics.
            collection: the collection whose object is read, empty for a snapshot; by default a collection of the tensor, else any
                other, else a snapshot.

        Raises:
            ConfigError: the step is not a whole number, or the mode is unknown.
            NotFoundError: it was not saved at this step, or a shard is missing; the message names its worker and elements.
            FormatError: an object that would contain it is damaged.
            StoreError: the store cannot be read.
        """
        return self._saved.find(
            SavedRequest(
                self.name, checked_step(step), mode, worker, attempt, collection, self.info.collections
            )
        )

    def value(
        self, step: int, *, mode: Mode = "train", worker: int | None = None, framework: Framework = "numpy"
    ) -> Any:
        """Read the full tensor of one step.

        Args:
            step: as for `saved`.
            mode: as for `saved`.
            worker: as for `saved`.
            framework: ``numpy``, with bfloat16 and fp8 as float32; ``torch`` or ``jax``, with the stored dtype.

        Returns:
            An array of the framework; that of numpy may be read-only.

        Raises:
            ConfigError: the framework is unknown, or not installed; or as for `saved`.
            NotFoundError, FormatError, StoreError: as for `saved`.
        """
        return self.saved(step, mode=mode, worker=worker).read(framework)

    def values(
        self,
        steps: Iterable[int] | None = None,
        *,
        mode: Mode = "train",
        worker: int | None = None,
        framework: Framework = "numpy",
    ) -> dict[int, Any]:
        """Read the full tensor of several steps.

        Args:
            steps: the steps; by default all at which it was saved. Steps whose object is deleted meanwhile, to make room for newer
                ones, are then omitted.
            mode: as for `value`.
            worker: as for `value`.
            framework: as for `value`.

        Returns:
            Step → array.

        Raises:
            NotFoundError: as for `value`; without ``steps``, also if the tensor was saved at no step in this mode.
            ConfigError, FormatError, StoreError: as for `value`.
        """
        if steps is not None:
            return {step: self.value(step, mode=mode, worker=worker, framework=framework) for step in steps}
        values = {}
        saved_steps = self.saved_steps(mode)
        if not saved_steps:
            raise self._saved.without_steps(SavedRequest(self.name, 0, mode, preferred=self.info.collections))
        for step in saved_steps:
            try:
                values[step] = self.value(step, mode=mode, worker=worker, framework=framework)
            except NotFoundError:
                self._saved.forget()
                if step in self.saved_steps(mode):
                    raise
        return values

    def shape(self, step: int, *, mode: Mode = "train", worker: int | None = None) -> tuple[int, ...]:
        """Return the shape of the saved tensor at a step, from headers only.

        Raises:
            ConfigError, NotFoundError, FormatError, StoreError: as for `saved`.
        """
        return self.saved(step, mode=mode, worker=worker).shape

    def plot(
        self,
        statistic: str = "rms",
        *,
        mode: Mode | None = "train",
        worker: int | None = None,
        width: int = 900,
    ) -> PlotFigure:
        """Draw a figure over the steps, and below it the distribution of the elements; needs the extra ``plots``.

        Args:
            statistic: the figure, as for `Run.series`.
            mode: only rows of this mode.
            worker: only rows of this worker; by default shards are merged.
            width: width in pixels.

        Returns:
            A matplotlib figure that belongs to no window. Notebooks show it; ``save("tensor.png")`` or ``save("tensor.svg")`` writes it.

        Raises:
            ConfigError: matplotlib is not installed, or an argument is invalid.
            NotFoundError: the tensor has no such rows.
            StoreError: the store cannot be read.
        """
        from watchstep.plots.tensor_plot import tensor_figure

        lines = self._lines(statistic, mode, worker, pictures.checked_width(width))
        return tensor_figure(
            self.name, statistic, lines, self._histogram(mode, worker, width // 4), width=width
        )

    def plot_ridges(
        self, *, mode: Mode | None = "train", worker: int | None = None, width: int = 900
    ) -> PlotFigure:
        """Draw the distribution of the elements at up to 24 ranges of steps as ridges; arguments and errors as for `plot`."""
        from watchstep.plots.tensor_plot import ridge_figure

        return ridge_figure(
            self.name, self._histogram(mode, worker, pictures.MAX_FRAMES), pictures.checked_width(width)
        )

    def animate(
        self,
        frames: int = 60,
        *,
        mode: Mode | None = "train",
        worker: int | None = None,
        frame_ms: int = 120,
    ) -> DistributionAnimation:
        """Return the distribution of the elements through the steps as an animation; needs the extra ``plots``.

        Args:
            frames: maximum number of frames, up to 240. A frame has the elements of a range of steps.
            mode: only steps of this mode.
            worker: only rows of this worker; by default shards are merged.
            frame_ms: time of one frame in milliseconds.

        Returns:
            An animation that notebooks show; ``save("tensor.gif")`` writes it.

        Raises:
            ConfigError: an argument is invalid.
            NotFoundError: the tensor has no such rows.
            StoreError: the store cannot be read.
        """
        if not 1 <= frames <= pictures.MAX_FRAMES:
            raise ConfigError(f"invalid frames={frames!r}", f"use 1 to {pictures.MAX_FRAMES}")
        return DistributionAnimation(self.name, self._histogram(mode, worker, frames), frame_ms)

    def _lines(self, statistic: str, mode: Mode | None, worker: int | None, points: int) -> list[NamedSeries]:
        request = SeriesRequest(self.name, statistic, worker, mode, points=points)
        lines = read_lines(self._index, request).lines
        if not lines:
            raise NotFoundError(
                f"tensor {self.name!r} has no row of mode {mode} and worker {worker}",
                "see Tensor.steps() and .workers",
            )
        return pictures.named_lines(lines[: pictures.MAX_LINES], statistic)

    def _histogram(self, mode: Mode | None, worker: int | None, rows: int) -> HistogramSeries:
        return self._index.consistently(lambda: queries.histogram(self._index, self.name, rows, worker, mode))

    def _repr_html_(self) -> str:
        facts = [
            ("tensor", self.name),
            ("shape", " x ".join(map(str, self.info.shape)) or "one number"),
            ("dtype", self.info.dtype),
            ("module", f"{self.info.module} ({self.info.module_type})" if self.info.module else ""),
            ("collections", ", ".join(self.info.collections)),
            ("recorded", f"{len(self.steps())} steps"),
        ]
        charts = []
        if len(self.rows):
            charts = [LineChart("rms", self._lines("rms", None, None, NOTEBOOK_POINTS))]
        return notebook_html(self.name, facts, charts)

    def _of_mode(self, mode: Mode | None) -> Block:
        return self.rows if mode is None else self.rows.where(self.rows.mode == mode_index(mode))

    def __repr__(self) -> str:
        return f"Tensor({self.name!r})"
