"""One tensor of a run: its statistics over the steps, and its full values where they were saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from watchstep.errors import NotFoundError
from watchstep.format.block import Block
from watchstep.format.segment import to_table
from watchstep.format.statistics import DERIVED
from watchstep.format.tensors import Mode, TensorInfo, mode_index
from watchstep.reading.saved.saved_objects import SavedObjects, SavedRequest
from watchstep.reading.saved.saved_tensor import Framework, SavedTensor
from watchstep.reading.steps import checked_step

if TYPE_CHECKING:
    import pyarrow as pa


class Tensor:
    """Statistics of one tensor over the steps, and its full values at the steps at which they were saved.

    Attributes:
        info: description of the tensor. For one that only saved objects contain, it follows from these.
    """

    def __init__(self, info: TensorInfo, read_rows: Callable[[], Block], saved: SavedObjects) -> None:
        self._read_rows = read_rows
        self._saved = saved
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

    def _of_mode(self, mode: Mode | None) -> Block:
        return self.rows if mode is None else self.rows.where(self.rows.mode == mode_index(mode))

    def __repr__(self) -> str:
        return f"Tensor({self.name!r})"
