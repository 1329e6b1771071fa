"""A recorded run and its tensors, also while it is being recorded."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import ConfigError, MissingStoreError, NotFoundError
from watchstep.format import documents
from watchstep.format.block import Block, concatenate
from watchstep.format.layout import ENDS, RUN_DOCUMENT, SNAPSHOTS, SnapshotKey, check_name
from watchstep.format.segment import to_table
from watchstep.format.snapshot import Snapshot, open_snapshot
from watchstep.format.statistics import DERIVED
from watchstep.format.tensors import MODES, Mode, TensorInfo
from watchstep.platform.folders import absolute_path
from watchstep.reading import queries
from watchstep.reading.budget import ReadBudget
from watchstep.reading.columns import Columns, Selection
from watchstep.reading.index import RunIndex
from watchstep.reading.queries import Heatmap, HistogramSeries, Reduce, losses_of
from watchstep.reading.run_documents import END, read_documents, read_state
from watchstep.reading.sql import query
from watchstep.store.store import Store

if TYPE_CHECKING:
    import pyarrow as pa


class Tensor:
    """Statistics of one tensor over the steps, and its values from snapshots.

    Attributes:
        info: description of the tensor.
    """

    def __init__(self, run: Run, info: TensorInfo, rows: Block) -> None:
        self._run = run
        self._rows = rows
        self.info = info

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.info.name

    @property
    def rows(self) -> Block:
        """The tensor's rows, by step, worker and mode."""
        return self._rows

    def steps(self, mode: Mode | None = None) -> list[int]:
        """Return the steps at which it was measured, ascending."""
        return [int(step) for step in np.unique(self._of_mode(mode).step)]

    @property
    def workers(self) -> list[int]:
        """Workers that measured it, ascending."""
        return [int(worker) for worker in np.unique(self._rows.worker)]

    def statistics(self, mode: Mode | None = None, worker: int | None = None) -> pa.Table:
        """Return one row for each step, mode and worker.

        Args:
            mode: only rows of this mode.
            worker: only rows of this worker.

        Returns:
            A table with the columns of a segment, and the derived figures (`watchstep.format.statistics.DERIVED`). A probe
            without any value in these rows has a column of nulls, or none.
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
        """Read the tensor itself from a snapshot.

        Args:
            step: a step with a snapshot (`Run.snapshots`).
            worker: the worker that wrote it.
            mode: the mode it was written in.

        Returns:
            An array of the tensor's shape; see `watchstep.format.snapshot` for bfloat16 and fp8.

        Raises:
            NotFoundError: no snapshot of that step and worker contains it.
            FormatError: the snapshot is damaged.
        """
        for snapshot in self._run.snapshots():
            if (snapshot.step, snapshot.worker, snapshot.mode) == (step, worker, mode):
                return self._run.open_snapshot(snapshot).read(self.name)
        steps = sorted({snapshot.step for snapshot in self._run.snapshots() if snapshot.worker == worker})
        available = ", ".join(map(str, steps[:10])) or "none"
        raise NotFoundError(
            f"tensor {self.name!r}: no snapshot at step {step} of worker {worker}",
            f"use a step with a snapshot ({available}), or record snapshots with CaptureConfig(snapshots=Snapshots(every=…))",
        )

    def _of_mode(self, mode: Mode | None) -> Block:
        return self._rows if mode is None else self._rows.where(self._rows.mode == MODES.index(mode))

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {len(self.steps())} steps)"


_FIRST_PAUSE = 0.05
_MAX_PAUSE = 2.0


def wait_for_steps(run: Run, steps: list[int], mode: Mode | None, timeout: float | None) -> list[int]:
    """Implement `watchstep.Run.wait_for_steps`."""
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    pause = _FIRST_PAUSE
    while True:
        ended = _has_ended(run)
        if run.refresh():
            pause = _FIRST_PAUSE
        seen = set(run.steps(mode))
        recorded = [step for step in steps if step in seen]
        if len(recorded) == len(steps) or ended or time.monotonic() >= deadline:
            return recorded
        time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        pause = min(_MAX_PAUSE, 2 * pause)


def _has_ended(run: Run) -> bool:
    """Whether every attempt with records has an ended worker."""
    ended = {entry.key.removeprefix(ENDS).split("/")[0] for entry in run.store.entries(ENDS)}
    return bool(run.attempts) and set(run.attempts) <= ended


def open_run(url: str | os.PathLike[str] | Store) -> Run:
    """Open a run, during or after its recording.

    Args:
        url: path or URL of the run, ``<store>/<project>/<run>``; or the run's store.

    Raises:
        NotFoundError: the run does not exist.
        StoreError: the store cannot be read.
        FormatError: the run has a later version.
    """
    if isinstance(url, Store):
        return _read(Run(url, _document(url, url.location)))
    text = os.fspath(url).rstrip("/")
    scheme = urlsplit(text).scheme
    parts = (text if scheme else str(absolute_path(text))).rsplit("/", 2)
    if len(parts) != 3 or not parts[0]:
        raise ConfigError(f"{text!r} is not the URL of a run", "use <store>/<project>/<run>")
    root, project, run = parts
    missing = NotFoundError(f"run {text}: not found", "check the URL: <store>/<project>/<run>")
    try:
        store = Store.open(root).child(f"{check_name('project', project)}/{check_name('run', run)}/")
        document = _document(store, text)
    except NotFoundError:
        raise missing from None
    except MissingStoreError:
        if scheme not in {"", "file"}:
            raise  # the bucket's name is more informative than the run's
        raise missing from None
    return _read(Run(store, document))


def _read(run: Run) -> Run:
    run.refresh()
    return run


def _document(store: Store, location: str) -> documents.RunDocument:
    data = store.get(RUN_DOCUMENT, limit=documents.MAX_BYTES)
    return documents.decode(documents.RunDocument, data, f"{location}/{RUN_DOCUMENT}")


class Run:
    """A recorded run. `refresh` reads new objects; queries read only the columns that they need.

    The default view is the newest attempt of each step; `attempts` and `rows` give access to the others. A run that was not opened with
    `open_run` has no data before its first `refresh`.

    Attributes:
        document: the run's identity, rules and configuration.
    """

    def __init__(
        self, store: Store, document: documents.RunDocument, budget: ReadBudget | None = None
    ) -> None:
        self._store = store
        self._index = RunIndex(store, budget)
        self._steps: NDArray[np.int64] | None = None
        self._damaged_ends: dict[str, str] = {}
        self.document = document

    @property
    def id(self) -> str:
        """The run's id."""
        return self.document.run

    @property
    def index(self) -> RunIndex:
        """The index of its objects and their columns, for other queries."""
        return self._index

    @property
    def store(self) -> Store:
        """The run's store."""
        return self._store

    @property
    def location(self) -> str:
        """The run's path or URL, as for `open_run`."""
        return self._store.location

    def refresh(self) -> bool:
        """Read new objects. Returns whether there were any.

        Raises:
            StoreError: the store cannot be read.
        """
        new = self._index.refresh()
        if new:
            self._steps = None
        return new

    @property
    def damaged(self) -> dict[str, str]:
        """Segments and documents that could not be read, and why."""
        return {**self._index.damaged, **self._damaged_ends}

    @property
    def attempts(self) -> list[str]:
        """Attempts, oldest first."""
        return self._index.attempts()

    def rows(self, attempt: str | None = None) -> Block:
        """Return all rows of one attempt, by default of the newest attempt of each step. The rows are not cached."""
        return self._index.consistently(
            lambda: concatenate(self._index.blocks(attempt, Selection(()))).ordered()
        )

    @property
    def workers(self) -> list[int]:
        """Workers that recorded, ascending."""
        return [int(worker) for worker in np.unique(self._steps_seen()[:, 2])]

    def _steps_seen(self) -> NDArray[np.int64]:
        """Return distinct (step, mode, worker), shape (n, 3), ascending; cached until the next refresh with new data."""
        if self._steps is None:
            self._steps = self._index.consistently(self._read_steps)
        return self._steps

    def _read_steps(self) -> NDArray[np.int64]:
        parts = [np.empty((0, 3), np.int64)]
        for columns in self._index.scan(Selection(())):
            part = np.stack([columns["step"], columns["mode"], columns["worker"]], axis=1).astype(np.int64)
            changes = np.ones(len(part), np.bool_)
            changes[1:] = (part[1:] != part[:-1]).any(axis=1)
            parts.append(np.unique(part[changes], axis=0))
        return np.unique(np.concatenate(parts), axis=0)

    @property
    def collections(self) -> dict[str, list[str]]:
        """Collection → names of its tensors."""
        names: dict[str, list[str]] = {}
        for info in self._infos():
            for collection in info.collections:
                names.setdefault(collection, []).append(info.name)
        return names

    def steps(self, mode: Mode | None = None) -> list[int]:
        """Return recorded steps, ascending; of one mode if given."""
        seen = self._steps_seen()
        chosen = seen if mode is None else seen[seen[:, 1] == MODES.index(mode)]
        return [int(step) for step in np.unique(chosen[:, 0])]

    def tensors(self, collection: str | None = None, regex: str | None = None) -> list[str]:
        """Return names of tensors, in the model's order.

        Args:
            collection: only those of this collection.
            regex: only those whose name contains a match of this pattern.

        Raises:
            ConfigError: the pattern is not a valid regular expression.
        """
        try:
            pattern = re.compile(regex or "")
        except re.error as error:
            raise ConfigError(
                f"regex {regex!r} is not a valid regular expression: {error}", "correct the expression"
            ) from error
        return [
            info.name
            for info in self._infos()
            if (collection is None or collection in info.collections) and pattern.search(info.name)
        ]

    def tensor(self, name: str) -> Tensor:
        """Return one tensor.

        Raises:
            NotFoundError: no tensor of that name was recorded.
        """
        self.check_tensors([name])
        selection = Selection((), frozenset([name]))
        rows = self._index.consistently(lambda: concatenate(self._index.blocks(None, selection)).ordered())
        return Tensor(self, next(info for info in self._index.tensors() if info.name == name), rows)

    def losses(self) -> pa.Table:
        """All losses: step, mode, worker, name, value, count and derived.

        If a step and mode has several losses (micro-batches, or the batches of an evaluation), ``value`` is their mean and ``count``
        their number; the value is infinite or NaN if the loss of one batch was. ``derived`` losses were read at ``backward()`` and
        not logged. If the program divides its loss for accumulation by an unknown number, they are the divided losses.
        """
        return losses_of(self._index)

    def series(
        self,
        tensor: str,
        figure: str,
        worker: int | None = None,
        mode: Mode | None = None,
        *,
        merge: bool = True,
    ) -> pa.Table:
        """One figure of one tensor over the steps.

        Args:
            tensor: its name.
            figure: a recorded figure, a derived one (`watchstep.format.statistics.DERIVED`), or a probe (``update_ratio``, or
                ``probe.update_ratio`` as in SQL).
            worker: only rows of this worker, as it measured them.
            mode: only rows of this mode.
            merge: merge shards into the figure of the whole tensor. Replicas and workers with whole tensors stay separate.
                Probes do not merge: they are null for merged shards.

        Returns:
            step, mode, tensor, worker (the lowest of merged shards), replica, stage, and the figure, by step; null where
            it does not exist.

        Raises:
            ConfigError: the figure does not exist.
            NotFoundError: the tensor does not exist.
        """
        self.check_tensors([tensor])
        merge = merge and worker is None
        selection = Selection((), frozenset([tensor]))
        columns = self._columns([figure], selection, merge=merge)
        chosen = np.ones(len(columns["step"]), np.bool_) if worker is None else columns["worker"] == worker
        if mode is not None:
            chosen &= columns["mode"] == MODES.index(mode)
        return queries.as_table(self._index, columns, [figure], chosen)

    def at_step(
        self, figures: Sequence[str], step: int | None = None, mode: Mode | None = None, *, merge: bool = True
    ) -> pa.Table:
        """Return figures of all tensors at one step, by default the newest, with columns as for `series`.

        Raises:
            ConfigError: a figure does not exist.
        """
        if step is None:
            step = self._index.step_range()[1] if mode is None else max(self.steps(mode), default=-1)
        columns = self._columns(figures, Selection((), None, step, step), merge=merge)
        chosen = (
            np.ones(len(columns["step"]), np.bool_) if mode is None else columns["mode"] == MODES.index(mode)
        )
        return queries.as_table(self._index, columns, figures, chosen)

    def heatmap(
        self,
        tensors: str | Sequence[str],
        figure: str,
        bins: int = 100,
        mode: Mode | None = "train",
        reduce: Reduce = "mean",
    ) -> Heatmap:
        """One figure of many tensors over the steps: a matrix of tensors and bins, independent of the number of steps.

        Args:
            tensors: a collection, or names.
            figure: as for `series`.
            bins: maximum number of bins. A run with fewer steps has one bin for each step.
            mode: only rows of this mode.
            reduce: how the finite values of a bin (its steps, and workers with whole tensors) are combined.

        Raises:
            ConfigError: the figure or collection does not exist.
            NotFoundError: a tensor does not exist.
        """
        names = self.tensors(tensors) if isinstance(tensors, str) else list(tensors)
        if isinstance(tensors, str) and not names:
            raise ConfigError(
                f"collection {tensors!r} has no tensor",
                "see Run.collections for the names, or GET …/tensors of the service",
            )
        self.check_tensors(names)
        return self._index.consistently(
            lambda: queries.heatmap(self._index, names, figure, bins, (mode, reduce))
        )

    def histogram(
        self, tensor: str, steps: int = 100, worker: int | None = None, mode: Mode | None = "train"
    ) -> HistogramSeries:
        """The distribution of a tensor's elements over powers of two, over the steps.

        Args:
            tensor: its name.
            steps: maximum number of rows; the histograms of several steps are added up in one row.
            worker: only rows of this worker. Default: all shards of the first replica, or the first worker.
            mode: only steps of this mode.

        Raises:
            NotFoundError: the tensor does not exist, or has no such rows.
        """
        self.check_tensors([tensor])
        return self._index.consistently(lambda: queries.histogram(self._index, tensor, steps, worker, mode))

    def _columns(self, figures: Sequence[str], selection: Selection, *, merge: bool) -> Columns:
        return self._index.consistently(
            lambda: queries.columns_of(self._index, figures, selection, merge=merge)
        )

    def check_tensors(self, names: Sequence[str]) -> None:
        """Check that tensors were recorded.

        Raises:
            NotFoundError: a tensor was not recorded.
        """
        recorded = {info.name for info in self._index.tensors()}
        for name in names:
            if name not in recorded:
                raise NotFoundError(
                    f"tensor {name!r} was not recorded in run {self.id}",
                    "see Run.tensors() for the names, or GET …/tensors of the service",
                )

    def sql(self, text: str) -> pa.Table:
        """Run one SELECT over the run, in DuckDB (the extra ``sql``).

        Tables: ``statistics`` (each row with its derived figures and probes), ``tensors`` (name, module, module_type,
        role, order, shape, dtype, collections) and ``losses`` (step, mode, worker, name, value). Only the columns
        that the query needs are read. The query cannot read files or load extensions.

        Raises:
            ConfigError: DuckDB is not installed, or refuses the query.
        """
        return self._index.consistently(lambda: query(self._index, text))

    def snapshots(self) -> list[SnapshotKey]:
        """The run's snapshots, by attempt, worker and step."""
        return sorted(SnapshotKey.parse(entry.key) for entry in self._store.entries(SNAPSHOTS))

    def open_snapshot(self, key: SnapshotKey) -> Snapshot:
        """Open a snapshot; its tensors are read one by one.

        Raises:
            NotFoundError, FormatError: it does not exist, or is damaged.
        """
        return open_snapshot(self._store, key.path)

    def ends(self) -> list[documents.EndDocument]:
        """How the workers of all attempts ended. Documents that cannot be read are listed in `damaged` instead."""
        result = read_documents(self._store, END)
        self._damaged_ends = result.damaged
        return result.documents

    def state(self) -> str:
        """Return the run's current state; see `watchstep.reading.run_documents.StoredState`."""
        return read_state(self._store).state

    def wait_for_steps(
        self, steps: list[int], mode: Mode | None = None, timeout: float | None = None
    ) -> list[int]:
        """Wait until steps are recorded. The polling interval grows to two seconds while nothing arrives.

        Args:
            steps: the steps to wait for.
            mode: count only rows of this mode.
            timeout: seconds; None waits until the run ends.

        Returns:
            The recorded steps; fewer than requested if the run ended or the time limit is exceeded. A step counts as recorded
            as soon as one worker recorded it.
        """
        return wait_for_steps(self, steps, mode, timeout)

    def _infos(self) -> list[TensorInfo]:
        return sorted(self._index.tensors(), key=lambda info: (info.order, info.name))

    def __repr__(self) -> str:
        return f"Run({self._store.location!r}, {len(self.steps())} steps)"
