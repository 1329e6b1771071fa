"""``watchstep runs show``, ``stats`` and ``compact``, and ``watchstep export``: read a run from its store.

No service is needed. `locations` resolves run names of the command line, which may contain wildcards.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from watchstep.capture.steps.metric_names import WITHHELD
from watchstep.errors import NotFoundError
from watchstep.format.documents import EndDocument
from watchstep.format.layout import ENDS, RUN_DOCUMENT
from watchstep.format.tensors import LOSSES, MODES, Mode
from watchstep.reading.compaction import compact
from watchstep.reading.outcome import ended_after
from watchstep.reading.run import Run
from watchstep.reading.run_documents import ATTEMPT, DAMAGED, END, read_documents, read_state
from watchstep.reading.run_lookup import find_run
from watchstep.reading.tensorboard import export as export_events
from watchstep.store.store import Store
from watchstep_services.cli.connection import DEFAULT_STORE, JsonOption, ServiceOption, StoreOption, store_of
from watchstep_services.cli.runs.alerts import fired_alerts, print_incidents
from watchstep_services.core.console import console, figure, show, show_json, table

StoredRunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Run id, <project>/<run>, or the URL of the run.")
]


_SHOWN_ENVIRONMENT = frozenset(("command", "folder", "commit", "uncommitted changes", "host", "devices"))
"""The provenance that is shown by default; ``--json`` has all of it."""


def show_run(
    run: StoredRunArgument,
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the state of a run: steps, workers, losses, how it ended, incidents, and what was recorded.

    Incidents are shown if a service watches the run.

    Examples:
        watchstep runs show night-1
        watchstep runs show vision/night-1 --store s3://bucket/runs
        watchstep runs show night-1 --json
    """
    opened = find_run(run, store_of(store, run))
    if as_json:
        show_json(_as_data(opened, service))
        return
    out = console()
    steps = opened.steps()
    title = Text.assemble((f"{opened.document.project}/{opened.id}", "bold"), f"  {opened.location}")
    out.print(title, soft_wrap=True)
    recorded = f"{steps[0]} to {steps[-1]} ({len(steps)} recorded)" if steps else "none"
    stored = read_state(opened.store)
    out.print(f"state     {stored.state}")
    out.print(f"steps     {recorded}")
    out.print(f"attempts  {', '.join(opened.attempts) or 'none'}")
    out.print(f"workers   {len(opened.workers)} (ranks {', '.join(map(str, opened.workers)) or 'none'})")
    for name, value in opened.environment().items():
        if name in _SHOWN_ENVIRONMENT:
            out.print(f"{name:9} {value}", soft_wrap=True, highlight=False)
    for line in _seed_lines(opened):
        out.print(f"seeds     {line}", soft_wrap=True)
    _print_losses(opened)
    outcome = opened.outcome()
    if stop := outcome.rule_stop:
        end_words = ended_after(stop.step, outcome.last_step)
        out.print(f"bad       from step {stop.step}, by rule {stop.rule}; {end_words}", soft_wrap=True)
    if skipped := _skipped_steps(opened):
        shown = ", ".join(map(str, skipped[:_MOST_SKIPPED]))
        more = f" and {len(skipped) - _MOST_SKIPPED} more" if len(skipped) > _MOST_SKIPPED else ""
        out.print(f"skipped   the gate policy skipped the update of {len(skipped)} steps: {shown}{more}")
    for attempt, end in _ends(opened):
        reason = f": {end.reason}" if end.reason else ""
        out.print(
            f"ended     {attempt}worker {end.worker} {end.state}, ended after step {end.last_step}{reason}",
            soft_wrap=True,
        )
    if reason := _missing_records(opened, stored.state):
        out.print(f"reason    {reason}", soft_wrap=True)
    if stored.damage:
        out.print(f"damaged   {stored.damage}", soft_wrap=True)
    for name, problem in opened.damaged.items():
        out.print(f"damaged   {name}: {problem}", soft_wrap=True)
    alerts = fired_alerts(opened, service)
    if alerts is not None:
        print_incidents(alerts, opened.attempts, f"{opened.document.project}/{opened.id}")
    rows = table("COLLECTION", ">TENSORS", "FOR EXAMPLE")
    for collection, names in sorted(opened.collections.items()):
        rows.add_row(collection, str(len(names)), ", ".join(names[:3]))
    out.print()
    show(rows)


_MOST_SKIPPED = 10


def _ends(run: Run) -> list[tuple[str, EndDocument]]:
    """Return how workers ended, with the name of their attempt if there are several."""
    if len(run.attempts) < 2:
        return [("", end) for end in run.ends()]
    return [(f"attempt {attempt}, ", end) for attempt in run.attempts for end in run.ends(attempt)]


def _skipped_steps(run: Run) -> list[int]:
    """Return the steps whose update the gate policy skipped."""
    if all(info.name != WITHHELD for info in run.catalogue):
        return []
    rows = run.tensor(WITHHELD).statistics().to_pylist()
    return sorted({row["step"] for row in rows if row["mean"] > 0})


_NOT_ATTACHED = (
    "the program took no step of a PyTorch optimizer, its Python does not import Watchstep, or it was not attached"
    " for a reason that its standard error states"
)
_REASONS = {
    "created": "the program has not taken its first step of a PyTorch optimizer, or Watchstep is not attached to it",
    "ended": f"the program ended, and Watchstep was not attached to it: {_NOT_ATTACHED}",
    "open": "an attempt began; its first segment is not written yet, or waits on the disk of its machine",
    DAMAGED: "",
}
"""State of a run without segments → reason."""


def _missing_records(run: Run, state: str) -> str:
    """Return why nothing was recorded; empty if something was, or a document is damaged."""
    if run.steps() or run.collections:
        return ""
    reason = _REASONS.get(state, "the attempt ended before the end of its first step")
    return f"no segment was recorded: {reason}" if reason else ""


def _as_data(run: Run, service: str) -> dict[str, Any]:
    steps, stored, alerts = run.steps(), read_state(run.store), fired_alerts(run, service)
    outcome = run.outcome()
    stop = outcome.rule_stop
    losses = _losses_by_name(run)
    return {
        "project": run.document.project,
        "run": run.id,
        "url": run.location,
        "state": stored.state,
        "steps": {"first": steps[0], "last": steps[-1], "recorded": len(steps)} if steps else None,
        "reason": _missing_records(run, stored.state),
        "bad_from": None if stop is None else stop.step,
        "ended_after": outcome.last_step if run.ends() else None,
        "attempts": list(run.attempts),
        "workers": list(run.workers),
        "environment": run.environment(),
        "seeds": _seeds(run),
        "losses": {
            name: {"first": rows[0]["value"], "last": rows[-1]["value"], "derived": rows[-1]["derived"]}
            if rows
            else None
            for name, rows in losses.items()
        },
        "skipped_updates": _skipped_steps(run),
        "ends": [
            {"worker": end.worker, "state": end.state, "last_step": end.last_step, "reason": end.reason}
            for end in run.ends()
        ],
        "damage": [
            *([stored.damage] if stored.damage else []),
            *(f"{name}: {problem}" for name, problem in run.damaged.items()),
        ],
        "alerts": alerts,
        "collections": {collection: list(names) for collection, names in sorted(run.collections.items())},
    }


def _seeds(run: Run) -> dict[str, dict[str, Any]]:
    """Return the data of the last `watchstep.seed_all` of each attempt: of the end of its first worker, else of its start."""
    found = read_documents(run.store, ATTEMPT).documents
    seeds = {document.attempt: document.seeds for document in found}
    for attempt in seeds:
        ends = read_documents(run.store, END, f"{ENDS}{attempt}/").documents
        later = [end.health["seeds"] for end in ends if end.worker == 0 and end.health.get("seeds")]
        if later and isinstance(later[-1], dict):
            seeds[attempt] = later[-1]
    return seeds


def _seed_lines(run: Run) -> Iterator[str]:
    for attempt, seeds in _seeds(run).items():
        if not seeds:
            continue
        generators = seeds.get("generators")
        names = ", ".join(map(str, generators)) if isinstance(generators, list) else ""
        algorithms = ", deterministic algorithms" if seeds.get("deterministic") else ""
        yield f"attempt {attempt}: {seeds.get('seed')} ({names}){algorithms}, PYTHONHASHSEED {seeds.get('hash_seed')}"


def _losses_by_name(run: Run) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each loss; empty if only earlier attempts recorded the loss, at steps that a later attempt repeated."""
    by_name: dict[str, list[dict[str, Any]]] = {
        info.name: [] for info in run.catalogue if LOSSES in info.collections
    }
    for row in run.losses().to_pylist():
        by_name.setdefault(row["name"], []).append(row)
    return by_name


def _print_losses(run: Run) -> None:
    """Print the first and the last value of each loss; "derived" marks a loss that is the argument of ``backward()``."""
    for name, rows in _losses_by_name(run).items():
        if rows:
            derived = ", derived" if rows[-1]["derived"] else ""
            first, last = (figure(row["value"]) for row in (rows[0], rows[-1]))
            console().print(f"{name:9} {first} at first, {last} at last{derived}")
        else:
            console().print(f"{name:9} only in earlier attempts, at steps that a later attempt repeated")


def show_statistics(
    run: StoredRunArgument,
    tensor: Annotated[str, typer.Argument(help="Name of a tensor, for example conv1.weight:gradient.")],
    store: StoreOption = DEFAULT_STORE,
    mode: Annotated[str | None, typer.Option(help=f"Only rows of this mode: {', '.join(MODES)}.")] = None,
    last: Annotated[int, typer.Option(min=1, help="Number of rows to show, from the end.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Show the statistics of a tensor by step.

    Examples:
        watchstep runs stats night-1 conv1.weight:gradient
        watchstep runs stats night-1 loss --mode train --last 100 --json
    """
    if mode is not None and mode not in MODES:
        raise typer.BadParameter(f"use one of {', '.join(MODES)}", param_hint="--mode")
    chosen: Mode | None = mode
    statistics = find_run(run, store_of(store, run)).tensor(tensor).statistics(mode=chosen)
    recent = statistics.slice(max(0, statistics.num_rows - last)).to_pylist()
    if as_json:
        show_json(recent)
        return
    rows = table(
        ">STEP", "MODE", ">WORKER", ">COUNT", ">NAN", ">INF", ">MIN", ">MAX", ">MEAN", ">STD", ">L2", ">ZERO"
    )
    for row in recent:
        infinite = row["pos_inf"] + row["neg_inf"]
        whole = [row["step"], row["mode"], row["worker"], row["count"], row["nan"], infinite]
        real = [row[name] for name in ("min", "max", "mean", "std", "l2", "zero_share")]
        rows.add_row(*map(str, whole), *map(figure, real))
    show(rows)


def compact_run(
    run: StoredRunArgument,
    store: StoreOption = DEFAULT_STORE,
    delete_after: Annotated[
        float | None, typer.Option(help="Delete replaced segments that are older than this many seconds.")
    ] = None,
) -> None:
    """Rewrite a finished run sorted by tensor and step, so that a series is read with one request. Safe to repeat.

    Examples:
        watchstep runs compact night-1
        watchstep runs compact night-1 --delete-after 86400
    """
    result = compact(find_run(run, store_of(store, run)).location, delete_after=delete_after)
    console().print(f"generation {result.generation}: {result.written} written, {result.deleted} deleted")


_WILD = frozenset("*?[")


def locations(run: str, store: str) -> list[str]:
    """Return the locations of the runs that match a name.

    Args:
        run: id of a run, ``<project>/<run>`` or URL; each part may contain ``*``, ``?`` and ``[…]``. A name that ends in ``/``
            selects all runs of a project.
        store: store of runs that are specified without one.

    Raises:
        NotFoundError: no run matches.
        StoreError, ConfigError: the store cannot be read.
    """
    if run.endswith("/"):
        run += "*"
    if not _WILD & set(run):
        return [find_run(run, store_of(store, run)).location]
    root, project, name = _parts(run, store)
    opened = Store.open(root)
    matching = [
        f"{opened.location}/{project_name}/{run_name}"
        for project_name in sorted(opened.folders())
        if fnmatchcase(project_name, project)
        for run_name in sorted(opened.folders(f"{project_name}/"))
        if fnmatchcase(run_name, name) and _is_run(opened.child(f"{project_name}/{run_name}"))
    ]
    if not matching:
        raise NotFoundError(f"runs {run!r} in {root}: not found", "'watchstep runs list' shows all runs")
    return matching


def _parts(run: str, store: str) -> tuple[str, str, str]:
    parts = run.rsplit("/", 2)
    if len(parts) == 1:
        return store, "*", run
    if len(parts) == 2:
        return store, parts[0], parts[1]
    return (parts[0] or "/"), parts[1], parts[2]


def _is_run(folder: Store) -> bool:
    try:
        return folder.size(RUN_DOCUMENT) > 0
    except NotFoundError:
        return False


def short(location: str) -> str:
    """Return ``<project>/<run>`` of a location."""
    return "/".join(Path(location).parts[-2:])


def export(
    run: StoredRunArgument,
    tensorboard: Annotated[Path, typer.Option(help="New folder for the event files.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Write the statistics and histograms of a run as TensorBoard event files.

    Examples:
        watchstep export night-1 --tensorboard runs/night-1
    """
    written = export_events(find_run(run, store_of(store, run)), tensorboard)
    console().print(f"{written} events in {tensorboard}", soft_wrap=True)
