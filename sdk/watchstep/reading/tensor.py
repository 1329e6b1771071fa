"""One recorded tensor of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from watchstep.block import Block
from watchstep.derived import DERIVED
from watchstep.errors import NotFoundError
from watchstep.segment import to_table
from watchstep.tensors import MODES, Mode, TensorInfo

if TYPE_CHECKING:
    import pyarrow as pa

    from watchstep.reading.run import Run


class Tensor:
    """Figures of one tensor over the steps, and its values where a snapshot holds them.

    Attributes:
        info: what is known of it.
    """

    def __init__(self, run: Run, info: TensorInfo, rows: Block) -> None:
        self._run = run
        self._rows = rows
        self.info = info

    @property
    def name(self) -> str:
        """Its name."""
        return self.info.name

    @property
    def rows(self) -> Block:
        """Its rows, by step, worker and mode."""
        return self._rows

    def steps(self, mode: Mode | None = None) -> list[int]:
        """Steps at which it was measured, ascending."""
        return [int(step) for step in np.unique(self._of_mode(mode).step)]

    @property
    def workers(self) -> list[int]:
        """Workers that measured it, ascending."""
        return [int(worker) for worker in np.unique(self._rows.worker)]

    def statistics(self, mode: Mode | None = None, worker: int | None = None) -> pa.Table:
        """One row for each step, mode and worker.

        Args:
            mode: only rows of this mode.
            worker: only rows of this worker.

        Returns:
            A table with the columns of a segment, and the derived figures (`watchstep.derived.DERIVED`).
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

    def value(self, step: int, worker: int = 0, mode: Mode = "train") -> NDArray[Any]:
        """The tensor itself, from a snapshot.

        Args:
            step: a step with a snapshot (`Run.snapshots`).
            worker: the worker that wrote it.
            mode: the mode it was written in.

        Returns:
            An array of the tensor's shape; see `watchstep.snapshot` for bfloat16 and fp8.

        Raises:
            NotFoundError: no snapshot of that step and worker holds it.
            FormatError: the snapshot is damaged.
        """
        for snapshot in self._run.snapshots():
            if (snapshot.step, snapshot.worker, snapshot.mode) == (step, worker, mode):
                return self._run.open_snapshot(snapshot).read(self.name)
        steps = sorted({s.step for s in self._run.snapshots() if s.worker == worker})
        known = ", ".join(map(str, steps[:10])) or "none"
        raise NotFoundError(
            f"tensor {self.name!r}: no snapshot at step {step} of worker {worker}",
            f"use a step with one ({known}), or ask for snapshots by CaptureConfig(snapshots=Snapshots(every=…))",
        )

    def _of_mode(self, mode: Mode | None) -> Block:
        return self._rows if mode is None else self._rows.where(self._rows.mode == MODES.index(mode))

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {len(self.steps())} steps)"
