"""A recorded run and its tensors, also while it is being recorded."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import ConfigError, MissingStoreError, NotFoundError
from watchstep.format import documents
from watchstep.format.block import Block, concatenate
from watchstep.format.layout import ENDS, RUN_DOCUMENT, SnapshotKey, check_name
from watchstep.format.samples.samples import SampleBatch
from watchstep.format.snapshot import Snapshot
from watchstep.format.tensors import (
    BUILT_IN,
    FINITE_CHECKS,
    GRADIENTS,
    ROLES,
    SAVED,
    SYSTEM,
    Mode,
    TensorInfo,
    mode_index,
)
from watchstep.platform.folders import absolute_path
from watchstep.plots.html_chart import LineChart
from watchstep.plots.notebook import NOTEBOOK_POINTS, NotebookChart, notebook_html
from watchstep.reading import pictures, queries
from watchstep.reading.binning import Lines, SeriesRequest, read_lines
from watchstep.reading.boosting import read_boosting
from watchstep.reading.budget import ReadBudget
from watchstep.reading.columns import NO_CUT, Columns, Selection
from watchstep.reading.grid import Grid, GridRequest, read_grid, read_heatmap
from watchstep.reading.index import RunIndex
from watchstep.reading.outcome import RunOutcome, read_outcome
from watchstep.reading.queries import Heatmap, HistogramSeries, Reduce, losses_of
from watchstep.reading.run_documents import ATTEMPT, END, newest_attempt, read_documents, read_state
from watchstep.reading.samples import read_samples
from watchstep.reading.saved.saved_objects import SavedObjects
from watchstep.reading.sql import query
from watchstep.reading.steps import (
    StepRecords,
    StepState,
    checked_step,
    global_step,
    last_steps,
    mode_step,
    recorded_steps,
)
from watchstep.reading.tensor import Tensor
from watchstep.store.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

    from watchstep.plots.plot_figure import PlotFigure


_PREDEFINED = frozenset({*BUILT_IN, FINITE_CHECKS, SAVED, SYSTEM})
"""Collections that a run may have without configuring them."""

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


RangeSteps = tuple[int | None, int | None]
"""The first step, and the step behind the last; None for no limit."""


def open_run(url: str | os.PathLike[str] | Store, *, range_steps: RangeSteps | None = None) -> Run:
    """Open a run, during or after its recording.

    Args:
        url: path or URL of the run, ``<store>/<project>/<run>``; or the run's store.
        range_steps: restricts all queries (steps, statistics, losses, SQL, saved tensors) to steps from the first number to before the
            second. None in place of a number is no limit. The names of tensors, and the numbers of evaluations (`Run.mode_step`), remain those
            of the whole run.

    Raises:
        ConfigError: the range or the URL is not valid.
        NotFoundError: the run does not exist.
        StoreError: the store cannot be read.
        FormatError: the run has a later version.
    """
    if isinstance(url, Store):
        return _read(Run(url, _document(url, url.location), range_steps=range_steps))
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
    return _read(Run(store, document, range_steps=range_steps))


def _read(run: Run) -> Run:
    run.refresh()
    return run


def _range(steps: RangeSteps | None) -> tuple[int, int]:
    """Return the first step and the step behind the last.

    Raises:
        ConfigError: it is not a range.
    """
    if steps is None:
        return 0, NO_CUT
    if isinstance(steps, tuple) and len(steps) == 2 and all(s is None or type(s) is int for s in steps):
        first, end = steps[0] or 0, NO_CUT if steps[1] is None else steps[1]
        if 0 <= first < end:
            return first, end
    raise ConfigError(
        f"invalid range_steps={steps!r}",
        "use the first step and the step behind the last: range_steps=(100, 200)",
    )


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
        self,
        store: Store,
        document: documents.RunDocument,
        budget: ReadBudget | None = None,
        *,
        range_steps: RangeSteps | None = None,
    ) -> None:
        self._store = store
        self._index = RunIndex(store, budget, _range(range_steps))
        self._saved = SavedObjects(store, self._index)
        self._steps: NDArray[np.int64] | None = None
        self._workers: list[int] | None = None
        self._records: StepRecords | None = None
        self._ends: dict[str, dict[int, int]] = {}
        self._damaged_ends: dict[str, str] = {}
        self._damaged_samples: dict[str, str] = {}
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
            self._steps = self._workers = None
        self._records, self._ends = None, {}
        self._saved.forget()
        return new

    @property
    def damaged(self) -> dict[str, str]:
        """Segments, saved objects and documents that could not be read, and why."""
        return {**self._index.damaged, **self._saved.damaged, **self._damaged_ends, **self._damaged_samples}

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
        stated = self._index.stated_workers()
        if stated is not None:
            return stated
        if self._workers is None:
            self._workers = self._index.consistently(self._recorded_workers)
        return self._workers

    def _recorded_workers(self) -> list[int]:
        found: set[int] = set()
        for columns in self._index.scan(Selection(())):
            found.update(np.unique(columns["worker"]).tolist())
        return sorted(found)

    def _steps_seen(self) -> NDArray[np.int64]:
        """Return distinct (step, mode, worker), shape (n, 3), ascending; cached until the next refresh with new data."""
        if self._steps is None:
            self._steps = self._index.consistently(lambda: recorded_steps(self._index))
        return self._steps

    def _step_records(self) -> StepRecords:
        """Return the records of all steps, also of those outside a restricted range; cached like `_steps_seen`."""
        if self._records is None:
            index = self._index.unrestricted()
            is_restricted = self._index.is_restricted
            seen = index.consistently(lambda: recorded_steps(index)) if is_restricted else self._steps_seen()
            seen = np.unique(np.concatenate([seen, self._saved.records()]), axis=0)
            self._records = StepRecords(seen, self._saved.first_steps(), self._ends_of)
        return self._records

    def _ends_of(self, attempt: str) -> dict[int, int]:
        if attempt not in self._ends:
            self._ends[attempt] = last_steps(self._store, attempt)
        return self._ends[attempt]

    @property
    def catalogue(self) -> list[TensorInfo]:
        """Descriptions of all tensors with statistics, in the model's order, without the rows about saved objects."""
        tensors = [info for info in self._index.tensors() if SAVED not in info.collections]
        return sorted(tensors, key=lambda info: (info.order, info.name))

    @property
    def collections(self) -> dict[str, list[str]]:
        """Collection → names of its tensors, as for `tensors`."""
        names: dict[str, list[str]] = {}
        for info in self._infos():
            for collection in info.collections:
                names.setdefault(collection, []).append(info.name)
        return names

    def steps(self, mode: Mode | None = None, *, incomplete: bool = True) -> list[int]:
        """Return the steps with statistics, ascending; `Tensor.saved_steps` returns those with full tensors.

        Args:
            mode: only those of this mode.
            incomplete: include steps that only some of the workers have recorded (`step_state`).

        Raises:
            ConfigError: the mode is unknown.
            StoreError: the store cannot be read.
        """
        seen = self._steps_seen()
        chosen = seen if mode is None else seen[seen[:, 1] == mode_index(mode)]
        steps = [int(step) for step in np.unique(chosen[:, 0])]
        if incomplete or not steps:
            return steps
        complete = set(self._step_records().complete(mode))
        return [step for step in steps if step in complete]

    def step_state(self, step: int, mode: Mode | None = None) -> StepState:
        """Return how far a step is recorded, as of the last `refresh`.

        Args:
            step: the step of the run.
            mode: only records of this mode count.

        Returns:
            ``complete``: all workers that record have a record of it: statistics or a saved object. ``incomplete``: some have.
            ``missing``: none has, and the run has passed it. ``pending``: none has yet. The workers that record are those with records in
            this mode in the attempt of the step; one that has ended is not expected at later steps.

        Raises:
            ConfigError: the step is outside of the run's ``range_steps``, or the mode is unknown.
            StoreError: the store cannot be read.
        """
        self._check_step(step)
        return self._step_records().state(step, mode)

    def has_passed_step(self, step: int, mode: Mode | None = None) -> bool:
        """Return whether the run has passed a step, as of the last `refresh`.

        It has if each worker of the newest attempt has a record of this step and mode, or of a later step, or has ended.

        Args:
            step: the step of the run.
            mode: only records of this mode count at the step itself.

        Raises:
            ConfigError: the step is outside of the run's ``range_steps``, or the mode is unknown.
            StoreError: the store cannot be read.
        """
        self._check_step(step)
        return self._step_records().has_passed(step, mode)

    def mode_step(self, step: int, mode: Mode) -> int:
        """Return the number of a recorded evaluation of a mode, from 0: its position among the steps of the whole run with records.

        Statistics and saved objects are records.

        Args:
            step: the step of the run.
            mode: the mode. In modes train and global, the number is the step itself.

        Raises:
            ConfigError: the mode is unknown.
            NotFoundError: nothing was recorded at this step in this mode.
        """
        return mode_step(self._step_records(), checked_step(step), mode)

    def global_step(self, mode_step: int, mode: Mode) -> int:
        """Return the step of the run at which an evaluation of a mode was recorded; the inverse of `mode_step`.

        Args:
            mode_step: the number of the evaluation, from 0.
            mode: the mode.

        Raises:
            ConfigError: the mode is unknown.
            NotFoundError: fewer were recorded.
        """
        return global_step(self._step_records(), mode_step, mode)

    def _check_step(self, step: int) -> None:
        if not self._index.is_within(checked_step(step)):
            first, end = self._index.range_steps
            raise ConfigError(
                f"step {step} is outside of the run's range_steps",
                f"use a step from {first} to before {end}, or open the run without range_steps",
            )

    def tensors(
        self,
        collection: str | None = None,
        regex: str | None = None,
        *,
        role: str | None = None,
        step: int | None = None,
        mode: Mode | None = None,
    ) -> list[str]:
        """Return names of tensors, in the model's order, followed by those that only saved objects contain.

        Of saved objects, the headers of those at ``step`` are read. Without a step, these are the first and the last of each worker,
        mode and collection: a name that only others contain is omitted.

        Args:
            collection: only those of this collection.
            regex: only those whose name contains a match of this pattern.
            role: only those with this role (`TensorInfo.role`).
            step: only those that were measured or saved at this step.
            mode: only those that were measured or saved in this mode.

        Raises:
            ConfigError: the pattern is not a valid regular expression; the step is outside of the run's ``range_steps``; the mode or the
                role is unknown; or the collection is not built in, and the run has no tensor of it.
            StoreError: the store cannot be read.
        """
        try:
            pattern = re.compile(regex or "")
        except re.error as error:
            raise ConfigError(
                f"regex {regex!r} is not a valid regular expression: {error}", "correct the expression"
            ) from error
        if step is not None:
            self._check_step(step)
        if mode is not None:
            mode_index(mode)  # raises if it is unknown
        names = [
            info.name
            for info in self._infos(step, mode)
            if (collection is None or collection in info.collections)
            and (role is None or role == info.role)
            and pattern.search(info.name)
        ]
        if not names:
            self._check_words(collection, role)
        return names

    def _check_words(self, collection: str | None, role: str | None) -> None:
        """Check a collection and a role of which no tensor was found.

        Raises:
            ConfigError: this version and the run do not know one of them.
        """
        if role is not None and role not in ROLES and all(info.role != role for info in self._infos()):
            raise ConfigError(f"unknown role {role!r}", f"use one of {', '.join(ROLES)}")
        if collection is not None and collection not in _PREDEFINED and collection not in self.collections:
            recorded = ", ".join(sorted(self.collections))
            raise ConfigError(
                f"collection {collection!r} has no tensor in run {self.id}",
                f"use one of {recorded}" if recorded else "nothing was recorded yet",
            )

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, with statistics, saved values, or both.

        Raises:
            NotFoundError: no tensor of that name was recorded.
        """
        info = next((info for info in self._index.tensors() if info.name == name), None)
        if info is None:
            info = self._saved.info(name)
        if info is None:
            raise self._not_recorded(name)
        selection = Selection((), frozenset([name]))

        def read_rows() -> Block:
            return self._index.consistently(
                lambda: concatenate(self._index.blocks(None, selection)).ordered()
            )

        return Tensor(info, read_rows, self._saved, self._index)

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
            ConfigError: the figure does not exist, or the mode is unknown.
            NotFoundError: the tensor does not exist.
        """
        self.check_tensors([tensor])
        merge = merge and worker is None
        selection = Selection((), frozenset([tensor]))
        columns = self._columns([figure], selection, merge=merge)
        chosen = np.ones(len(columns["step"]), np.bool_) if worker is None else columns["worker"] == worker
        if mode is not None:
            chosen &= columns["mode"] == mode_index(mode)
        return queries.as_table(self._index, columns, [figure], chosen)

    def binned_series(self, request: SeriesRequest) -> Lines:
        """One figure of one tensor over the steps, with a limited number of points: lines of one mode, worker, replica and stage each.

        Raises:
            ConfigError: the figure does not exist, or the mode is unknown.
            NotFoundError: the tensor does not exist.
            OverBudgetError: the query exceeds the run's budget.
        """
        self.check_tensors([request.tensor])
        return read_lines(self._index, request)

    def at_step(
        self, figures: Sequence[str], step: int | None = None, mode: Mode | None = None, *, merge: bool = True
    ) -> pa.Table:
        """Return figures of all tensors at one step, by default the newest, with columns as for `series`.

        Raises:
            ConfigError: a figure does not exist, or the mode is unknown.
        """
        if step is None:
            is_exact = mode is None and not self._index.is_restricted
            step = self._index.step_range()[1] if is_exact else max(self.steps(mode), default=-1)
        columns = self._columns(figures, Selection((), None, step, step), merge=merge)
        chosen = (
            np.ones(len(columns["step"]), np.bool_) if mode is None else columns["mode"] == mode_index(mode)
        )
        return queries.as_table(self._index, columns, figures, chosen)

    def heatmap(
        self,
        tensors: str | Sequence[str],
        figure: str,
        bins: int = 100,
        mode: Mode | None = "train",
        reduce: Reduce = "mean",
        worker: int | None = None,
    ) -> Heatmap:
        """One figure of many tensors over the steps: a matrix of tensors and bins, independent of the number of steps.

        Args:
            tensors: a collection, or names.
            figure: as for `series`.
            bins: maximum number of bins. There are fewer if the tensors are measured less often.
            mode: only rows of this mode.
            reduce: how the finite values of a bin (its steps, and workers with whole tensors) are combined.
            worker: only rows of this worker, also of its shard of a tensor alone. Default: all workers, whose shards are merged.

        Raises:
            ConfigError: the figure or collection does not exist, or the mode is unknown.
            NotFoundError: a tensor does not exist.
        """
        if isinstance(tensors, str):
            names = [info.name for info in self.catalogue if tensors in info.collections]
        else:
            names = list(tensors)
        if isinstance(tensors, str) and not names:
            raise ConfigError(
                f"collection {tensors!r} has no tensor",
                "see Run.collections for the names, or GET …/tensors of the service",
            )
        self.check_tensors(names)
        unique = tuple(dict.fromkeys(names))
        request = GridRequest(unique, figure, bins, mode, reductions=(reduce,), worker=worker)
        return read_heatmap(self._index, names, request)

    def grid(self, request: GridRequest) -> Grid:
        """One figure of many tensors over a range of steps, in columns with mean, extremes and the number of elements that are not finite.

        Raises:
            ConfigError: the figure or the mode does not exist.
            NotFoundError: a tensor does not exist.
        """
        self.check_tensors(request.tensors)
        return read_grid(self._index, request)

    def histogram(
        self,
        tensor: str,
        steps: int = 100,
        worker: int | None = None,
        mode: Mode | None = "train",
        *,
        first: int = 0,
        last: int = NO_CUT,
    ) -> HistogramSeries:
        """The distribution of a tensor's elements over powers of two, over the steps.

        Args:
            tensor: its name.
            steps: maximum number of rows; the histograms of several steps are added up in one row.
            worker: only rows of this worker. Default: all shards of the first replica, or the first worker.
            mode: only steps of this mode.
            first: first step.
            last: last step.

        Raises:
            ConfigError: the mode is unknown.
            NotFoundError: the tensor does not exist, or has no such rows.
        """
        self.check_tensors([tensor])
        return self._index.consistently(
            lambda: queries.histogram(self._index, tensor, steps, worker, mode, (first, last))
        )

    def _columns(self, figures: Sequence[str], selection: Selection, *, merge: bool) -> Columns:
        return self._index.consistently(
            lambda: queries.columns_of(self._index, figures, selection, merge=merge)
        )

    def check_tensors(self, names: Sequence[str]) -> None:
        """Check that tensors have statistics.

        Raises:
            NotFoundError: a tensor has none.
        """
        recorded = {info.name for info in self._index.tensors()}
        for name in names:
            if name not in recorded:
                raise self._not_recorded(name)

    def _not_recorded(self, name: str) -> NotFoundError:
        return NotFoundError(
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
        """List the objects with full tensors, by attempt, worker and step: snapshots, and those of collections.

        Objects with other names are omitted, and listed in `damaged`.

        Raises:
            StoreError: the store cannot be read.
        """
        return self._saved.keys()

    def open_snapshot(self, key: SnapshotKey) -> Snapshot:
        """Open an object with full tensors; its tensors are read one by one. `Tensor.value` merges the shards of several objects.

        Raises:
            NotFoundError, FormatError: it does not exist, or is damaged.
        """
        return self._saved.open(key)

    def samples(self, step: int | range, worker: int | None = None) -> list[SampleBatch]:
        """Return the samples that a step was trained on: one entry for each batch and worker, by step and worker.

        They are on the store if something went wrong near the step, or the step is one of the last ones of its attempt. Of a
        step that several attempts made, those of the newest attempt with samples of it are returned. Objects that cannot be read are
        listed in `damaged`.

        Args:
            step: the step, or a range of steps.
            worker: only those of this worker.

        Raises:
            ConfigError: the step is outside of the run's ``range_steps``.
            StoreError: the store cannot be read.
        """
        steps = step if isinstance(step, range) else range(step, step + 1)
        for limit in steps[:1], steps[-1:]:
            for number in limit:
                self._check_step(number)
        found = read_samples(self._store, self.attempts, steps, worker)
        self._damaged_samples = found.damaged
        return found.batches

    def ends(self, attempt: str = "") -> list[documents.EndDocument]:
        """How the workers of an attempt, or of all, ended. Documents that cannot be read are listed in `damaged` instead.

        Args:
            attempt: the attempt; all if empty.
        """
        result = read_documents(self._store, END, f"{ENDS}{attempt}/" if attempt else "")
        self._damaged_ends = {**self._damaged_ends, **result.damaged} if attempt else result.damaged
        return result.documents

    def environment(self) -> dict[str, str]:
        """Return the provenance of the newest attempt, by the names in `watchstep.format.documents.AttemptDocument`; empty without one.

        Raises:
            StoreError: the store cannot be read.
        """
        newest = newest_attempt(read_documents(self._store, ATTEMPT).documents)
        return {} if newest is None else newest.environment

    def state(self) -> str:
        """Return the run's current state; see `watchstep.reading.run_documents.StoredState`."""
        return read_state(self._store).state

    def outcome(self) -> RunOutcome:
        """Return what happened to the run: its state, its last step, and what stopped it.

        Raises:
            StoreError: the store cannot be read.
        """
        return read_outcome(self._store, max(self.steps(), default=-1))

    def plot(self, statistic: str = "l2", collection: str = GRADIENTS, *, width: int = 1000) -> PlotFigure:
        """Draw losses with events, a figure of a collection by layer and step, and learning rates; needs the extra ``plots``.

        Each cell of the heatmap has the largest value of its steps; cells without a measurement are empty.

        Args:
            statistic: the figure of the heatmap, as for `series`.
            collection: the collection of the heatmap.
            width: width in pixels.

        Returns:
            A matplotlib figure that belongs to no window. Notebooks show it; ``save("run.png")`` or ``save("run.svg")`` writes it.

        Raises:
            ConfigError: matplotlib is not installed, or an argument is invalid.
            StoreError: the store cannot be read.
        """
        from watchstep.plots.run_plot import run_figure

        outcome = self.outcome()
        heading = (outcome.as_sentence(self.id), outcome.marks())
        return run_figure(pictures.run_picture(self._index, heading, statistic, collection, width), width)

    def plot_alert(self, rule: str, finding: Mapping[str, Any]) -> PlotFigure:
        """Draw the series that an alert is about, with the threshold, around its step; needs the extra ``plots``.

        Args:
            rule: name of the rule config.
            finding: the alert's finding, as data.

        Raises:
            ConfigError: matplotlib is not installed, or the finding has no step.
            StoreError: the store cannot be read.
        """
        from watchstep.plots.alert_evidence import alert_figure

        outcome = self.outcome()
        stopped_at = outcome.last_step if outcome.state == "stopped" else None
        evidence = pictures.alert_evidence(self._index, rule, finding, run=self.id, stopped_at=stopped_at)
        return alert_figure(evidence)

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

        Raises:
            ConfigError: the mode is unknown.
        """
        return wait_for_steps(self, steps, mode, timeout)

    def _infos(self, step: int | None = None, mode: Mode | None = None) -> list[TensorInfo]:
        """Return descriptions of tensors with statistics or saved values, at one step and in one mode if given."""
        recorded, saved = self.catalogue, self._saved.infos(step, mode)
        names = {info.name for info in recorded}
        if step is not None or mode is not None:
            measured = self._measured(step, mode)
            recorded = [info for info in recorded if info.name in measured or info.name in saved]
        return recorded + [info for name, info in saved.items() if name not in names]

    def _measured(self, step: int | None, mode: Mode | None) -> set[str]:
        """Return names of the tensors with rows at one step and in one mode; all steps or modes if None."""
        selection = Selection(()) if step is None else Selection((), None, step, step)

        def codes() -> set[int]:
            found: set[int] = set()
            for columns in self._index.scan(selection):
                tensor = columns["tensor"]
                if mode is not None:
                    tensor = tensor[columns["mode"] == mode_index(mode)]
                found |= {int(code) for code in np.unique(tensor)}
            return found

        found = self._index.consistently(codes)
        return {info.name for code, info in enumerate(self._index.tensors()) if code in found}

    def _repr_html_(self) -> str:
        outcome = self.outcome()
        facts = [
            ("run", self.id),
            ("project", self.document.project),
            ("state", outcome.state),
            ("steps", f"{len(self.steps())} recorded, the last is {outcome.last_step}"),
            ("workers", str(len(self.workers))),
            ("tensors", ", ".join(f"{len(names)} {name}" for name, names in self.collections.items())),
            ("location", self.location),
        ]
        lines = pictures.loss_lines(self._index, NOTEBOOK_POINTS)
        charts: list[NotebookChart] = [LineChart("loss", lines, outcome.marks())]
        boosting = read_boosting(self._index, NOTEBOOK_POINTS)
        charts += boosting.charts(outcome.marks()) if boosting is not None else []
        return notebook_html(outcome.as_sentence(self.id), facts, charts)

    def __repr__(self) -> str:
        return f"Run({self._store.location!r}, {len(self.steps())} steps)"
