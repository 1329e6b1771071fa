"""The traces of a run on its store."""

from __future__ import annotations

import io

from watchstep.errors import FormatError, NotFoundError
from watchstep.format.layout import TRACES, TraceKey
from watchstep.reading.run import Run
from watchstep.store.store import Store
from watchstep.trace.operations import Trace
from watchstep.trace.trace_file import read_trace

MAX_OBJECT_BYTES = 1024 * 2**20
"""Maximum size of an object with a trace."""


def saved_traces(run: Run) -> list[TraceKey]:
    """List the traces of a run, by attempt, worker and step. Objects with other names are left out.

    Args:
        run: The run.

    Raises:
        StoreError: the store cannot be read.
    """
    return trace_keys(run.store, run.attempts)


def trace_keys(store: Store, attempts: list[str]) -> list[TraceKey]:
    """List the traces of a run.

    Args:
        store: The run's store.
        attempts: The run's attempts, oldest first; traces of others are listed before them.

    Raises:
        StoreError: the store cannot be read.
    """
    keys = []
    for entry in store.entries(TRACES):
        try:
            keys.append(TraceKey.parse(entry.key))
        except FormatError:
            continue  # not written by Watchstep
    order = {attempt: number for number, attempt in enumerate(attempts)}
    return sorted(keys, key=lambda key: (order.get(key.attempt, -1), key))


def open_trace(run: Run, key: TraceKey | int, worker: int | None = None) -> Trace:
    """Read a trace of a run.

    Args:
        run: The run.
        key: The trace, or a step: then that of the newest attempt that has it.
        worker: With a step, the worker; by default the lowest one.

    Raises:
        NotFoundError: there is no such trace.
        FormatError: it is damaged or too large.
        StoreError: the store cannot be read.
    """
    if isinstance(key, int):
        key = find_trace(saved_traces(run), key, worker, run.location)
    return read_saved(run.store, key)


def find_trace(keys: list[TraceKey], step: int | None, worker: int | None, location: str) -> TraceKey:
    """Return the trace of a step, of the newest attempt that has it.

    Args:
        keys: The run's traces, as `trace_keys` lists them.
        step: The step; by default any, the first trace.
        worker: The worker; by default the lowest one.
        location: URL of the run, for messages.

    Raises:
        NotFoundError: there is no such trace.
    """
    fitting = [
        key
        for key in keys
        if (step is None or key.first <= step <= key.last) and worker in {None, key.worker}
    ]
    if not fitting:
        shown = ", ".join(f"{key.first}:{key.last} of worker {key.worker}" for key in keys[:10])
        wanted = "trace" if step is None else f"trace of step {step}"
        raise NotFoundError(
            f"run {location} has no {wanted}{'' if worker is None else f' of worker {worker}'}",
            f"it has {shown}" if keys else "trace steps with Hook(trace='FIRST:LAST')",
        )
    newest = [key for key in fitting if key.attempt == fitting[-1].attempt]
    return min(newest, key=lambda key: (key.worker, key.first))


def read_saved(store: Store, key: TraceKey) -> Trace:
    """Read a trace from a run's store. The raised errors are those of `open_trace`."""
    return read_trace(io.BytesIO(store.get(key.path, limit=MAX_OBJECT_BYTES)))
