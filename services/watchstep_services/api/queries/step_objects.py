"""Objects on the store with data of a step: snapshots, traces, samples and bundles; and the commands that show them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence

from watchstep.errors import FormatError, NotFoundError
from watchstep.format.documents import Checkpoint, last_good
from watchstep.format.layout import (
    BUNDLES,
    SAMPLES,
    SNAPSHOTS,
    TRACES,
    BundleKey,
    SamplesKey,
    SnapshotKey,
    TraceKey,
    check_name,
)
from watchstep.store.store import Store
from watchstep_services.api.schemas.alert_page import CommandLines, RecordedObject

_MAX_KEYS = 100_000
"""Objects of one kind and attempt that are listed; any recorder can write very many."""

_CHECKED = 1000
MAX_OBJECTS = 200


def find_objects(
    store: Store, attempt: str, steps: range, step: int, check: Callable[[], None]
) -> list[RecordedObject]:
    """Return objects of an attempt with data of some steps, those closest to a step first; at most `MAX_OBJECTS`.

    Args:
        store: the run's store.
        attempt: the attempt.
        steps: the steps.
        step: the step of interest.
        check: raises if the query takes too long.

    Raises:
        StoreError: the store cannot be read.
    """
    parts = [
        part
        for prefix, parse in _KINDS.items()
        for part in _listed(store, f"{prefix}{check_name('attempt', attempt)}/", parse, check)
        if part.first < steps.stop and part.last >= steps.start
    ]

    def distance(part: RecordedObject) -> tuple[int, str, str]:
        away = max(part.first - step, step - part.last, 0)
        return away, part.kind, part.path

    return sorted(parts, key=distance)[:MAX_OBJECTS]


def _listed(
    store: Store, prefix: str, parse: Callable[[str], RecordedObject], check: Callable[[], None]
) -> Iterator[RecordedObject]:
    for place, entry in enumerate(store.entries(prefix)):
        if place % _CHECKED == 0:
            check()
        if place >= _MAX_KEYS:
            return
        try:
            yield parse(entry.key)
        except FormatError:
            continue  # anything else below the prefix


def _snapshot(path: str) -> RecordedObject:
    key = SnapshotKey.parse(path)
    return RecordedObject(
        kind="snapshot",
        path=path,
        attempt=key.attempt,
        worker=key.worker,
        first=key.step,
        last=key.step,
        mode=key.mode,
        collection=key.collection,
    )


def _trace(path: str) -> RecordedObject:
    key = TraceKey.parse(path)
    return RecordedObject(
        kind="trace", path=path, attempt=key.attempt, worker=key.worker, first=key.first, last=key.last
    )


def _samples(path: str) -> RecordedObject:
    key = SamplesKey.parse(path)
    return RecordedObject(
        kind="samples", path=path, attempt=key.attempt, worker=key.worker, first=key.first, last=key.last
    )


def _bundle(path: str) -> RecordedObject:
    key = BundleKey.parse(path)
    return RecordedObject(
        kind="bundle",
        path=path,
        attempt=key.attempt,
        worker=key.worker,
        first=key.step,
        last=key.step,
        reason=key.reason,
    )


_KINDS: dict[str, Callable[[str], RecordedObject]] = {
    SNAPSHOTS: _snapshot,
    TRACES: _trace,
    SAMPLES: _samples,
    BUNDLES: _bundle,
}


def checkpoint_before(store: Store, step: int) -> Checkpoint | None:
    """Return the last checkpoint that the program reported before a step; None without one.

    Raises:
        StoreError: the store cannot be read.
    """
    try:
        return last_good(store, step)
    except NotFoundError:
        return None


def commands_for(
    location: str, tensor: str, figure: str, step: int, worker: int, objects: Sequence[RecordedObject]
) -> list[CommandLines]:
    """Return commands that show an alert's step, and Python lines. Names in them are quoted.

    Args:
        location: path or URL of the run.
        tensor: the tensor of the finding; empty for none.
        figure: the figure of the evidence.
        step: the step of the finding.
        worker: the worker of the finding, whose bundle is preferred.
        objects: the objects with data of steps near it.
    """
    run = shlex.quote(location)
    at_step = [part for part in objects if part.first <= step <= part.last]
    kinds = {part.kind for part in at_step}
    commands = [_shell("Show the run", f"watchstep runs show {run}")]
    if "samples" in kinds:
        commands.append(_shell("Show the samples of the step", f"watchstep samples {run} --step {step}"))
    if "trace" in kinds:
        commands.append(
            _shell("Find the operation that made the first bad value", f"watchstep trace {run} --step {step}")
        )
    bundles = [part for part in objects if part.kind == "bundle"]
    bundle = next((part for part in bundles if part.worker == worker), bundles[0] if bundles else None)
    if bundle is not None:
        text = f"watchstep replay {run} --program train.py --step {bundle.first} --worker {bundle.worker}"
        commands.append(_shell(f"Compute step {bundle.first} again", text))
    lines = ["import watchstep", f"run = watchstep.open_run({location!r})"]
    if tensor:
        lines.append(f"run.series({tensor!r}, {figure!r})")
        if any(part.kind == "snapshot" for part in at_step):
            lines.append(f"run.tensor({tensor!r}).value({step})")
    else:
        lines.append(f"run.at_step(['mean'], {step})")
    commands.append(CommandLines(title="Read the statistics", language="python", text="\n".join(lines)))
    return commands


def _shell(title: str, text: str) -> CommandLines:
    return CommandLines(title=title, language="sh", text=text)
