"""``watchstep runs``: what a store holds, read from the store itself; no service is needed.

Runs as they are named on the command line: one, or many by a pattern.

``watchstep export``: a run in the form of another tool.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from watchstep.client import Client
from watchstep.errors import ConfigError, NotFoundError, ServiceError
from watchstep.format.layout import RUN_DOCUMENT
from watchstep.format.tensors import LOSSES, MODES, Mode
from watchstep.reading.compaction import compact
from watchstep.reading.diff import diff
from watchstep.reading.run import Run, open_run
from watchstep.reading.run_documents import RunEntry, find_runs, read_state
from watchstep.reading.tensorboard import export as export_events
from watchstep.store.store import Store, checked_scheme
from watchstep_services.cli.connection import DEFAULT_STORE, client_of, service_of
from watchstep_services.cli.runs.alerts import print_incidents
from watchstep_services.core.console import console, echo, figure, show, table

StoreOption = Annotated[
    str, typer.Option(envvar="WATCHSTEP_STORE", help="Folder or URL that holds the runs.")
]
RunArgument = Annotated[str, typer.Argument(help="The run's id, or <project>/<run>, or its whole URL.")]


def list_runs(
    store: StoreOption = DEFAULT_STORE,
    service: Annotated[str, typer.Option(help="Ask the service at this URL instead of the store.")] = "",
    project: Annotated[str, typer.Option(help="Of the service: which project.")] = "default",
) -> None:
    """List the runs of a store, the newest first, with their alerts where a service of this machine watches it; or those that a service knows. Token for the latter: WATCHSTEP_TOKEN."""
    if service:
        _list_known(client_of(store, service, project))
        return
    entries = find_runs(Store.open(store))
    firing = _firing(store, {entry.project for entry in entries})
    shown = table("=PROJECT", "=RUN", "STARTED", "STATE", *([] if firing is None else [">FIRING"]))
    for entry in entries:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.created_ns / 1e9))
        alerts = [] if firing is None else [firing.get((entry.project, entry.run), "-")]
        shown.add_row(entry.project, entry.run, started, entry.state, *alerts)
    show(shown)
    for entry in entries:
        if entry.damage:
            echo(f"watchstep: {entry.project}/{entry.run} is damaged: {entry.damage}", err=True)


def _firing(store: str, projects: set[str]) -> dict[tuple[str, str], str] | None:
    """How many alerts fire, by project and run; None where no service of this machine watches a local store."""
    if checked_scheme(store) not in ("", "file"):
        return None
    try:
        url, token = service_of(store, "")
    except ServiceError:
        return None
    except ConfigError as error:
        echo(f"watchstep: alerts are not shown: {error.what}", err=True)
        return None
    found: dict[tuple[str, str], str] = {}
    try:
        for project in sorted(projects):
            for run in Client(url, token, project).runs():
                found[project, run.run] = _number_firing(run.alerts)
    except ServiceError as error:
        echo(f"watchstep: alerts are not shown: {error.what}", err=True)
        return None
    return found


def _number_firing(alerts: Mapping[str, int]) -> str:
    """How many alerts fire, without notes of severity info."""
    return str(alerts.get("firing", 0) - alerts.get("notes", 0))


def _list_known(client: Client) -> None:
    shown = table("=PROJECT", "=RUN", "STARTED", "STATE", ">STEP", ">FIRING")
    for run in client.runs():
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.created_ns / 1e9))
        firing = _number_firing(run.alerts)
        shown.add_row(run.project, run.run, started, run.state, str(run.last_step), firing)
    show(shown)


def show_run(
    run: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    service: Annotated[
        str,
        typer.Option(
            envvar="WATCHSTEP_SERVICE",
            help="URL of the service that knows its incidents; the one of a local store if left out.",
        ),
    ] = "",
) -> None:
    """Show a run: its state, steps, workers, losses, how it ended, its incidents where a service watches it, and what was recorded."""
    opened = find_run(run, store)
    out = console()
    steps = opened.steps()
    title = Text.assemble((f"{opened.document.project}/{opened.id}", "bold"), f"  {opened.location}")
    out.print(title, soft_wrap=True)
    reach = f"{steps[0]} to {steps[-1]} ({len(steps)} recorded)" if steps else "none"
    stored = read_state(opened.store)
    out.print(f"state     {stored.state}")
    out.print(f"steps     {reach}")
    out.print(f"attempts  {', '.join(opened.attempts) or 'none'}")
    out.print(f"workers   {len(opened.workers)} (ranks {', '.join(map(str, opened.workers)) or 'none'})")
    _print_losses(opened)
    for end in opened.ends():
        reason = f": {end.reason}" if end.reason else ""
        out.print(
            f"ended     worker {end.worker} {end.state} after step {end.last_step}{reason}",
            soft_wrap=True,
        )
    if stored.damage:
        out.print(f"damaged   {stored.damage}", soft_wrap=True)
    for name, why in opened.damaged.items():
        out.print(f"damaged   {name}: {why}", soft_wrap=True)
    print_incidents(opened, service)
    shown = table("COLLECTION", ">TENSORS", "FOR EXAMPLE")
    for collection, names in sorted(opened.collections.items()):
        shown.add_row(collection, str(len(names)), ", ".join(names[:3]))
    out.print()
    show(shown)


def _print_losses(run: Run) -> None:
    """The first and the last of each loss; of a derived one, that it is as ``backward()`` was given it."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in run.losses().to_pylist():
        by_name.setdefault(row["name"], []).append(row)
    for name in run.tensors(LOSSES):
        rows = by_name.get(name, [])
        if rows:
            derived = ", derived" if rows[-1]["derived"] else ""
            first, last = (figure(row["value"]) for row in (rows[0], rows[-1]))
            console().print(f"{name:9} {first} at first, {last} at last{derived}")
        else:
            console().print(
                f"{name:9} only in earlier attempts, at steps that a later attempt recorded again"
            )


def show_statistics(
    run: RunArgument,
    tensor: Annotated[str, typer.Argument(help="A tensor's name, e.g. conv1.weight:gradient.")],
    store: StoreOption = DEFAULT_STORE,
    mode: Annotated[str | None, typer.Option(help=f"Only one of {', '.join(MODES)}.")] = None,
    last: Annotated[int, typer.Option(min=1, help="How many of the last rows.")] = 20,
) -> None:
    """Show figures of one tensor by step."""
    if mode is not None and mode not in MODES:
        raise typer.BadParameter(f"use one of {', '.join(MODES)}", param_hint="--mode")
    chosen: Mode | None = mode
    rows = find_run(run, store).tensor(tensor).statistics(mode=chosen)
    shown = table(
        ">STEP", "MODE", ">WORKER", ">COUNT", ">NAN", ">INF", ">MIN", ">MAX", ">MEAN", ">STD", ">L2", ">ZERO"
    )
    for row in rows.slice(max(0, rows.num_rows - last)).to_pylist():
        infinite = row["pos_inf"] + row["neg_inf"]
        whole = [row["step"], row["mode"], row["worker"], row["count"], row["nan"], infinite]
        real = [row[name] for name in ("min", "max", "mean", "std", "l2", "zero_share")]
        shown.add_row(*map(str, whole), *map(figure, real))
    show(shown)


def compact_run(
    run: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    delete_after: Annotated[
        float | None, typer.Option(help="Delete what is replaced once it is so many seconds old.")
    ] = None,
) -> None:
    """Write a finished run anew, by tensor and step: a series is then read at once. Safe to repeat."""
    done = compact(find_run(run, store).location, delete_after=delete_after)
    console().print(f"generation {done.generation}: {done.written} written, {done.deleted} deleted")


def diff_runs(
    a: RunArgument,
    b: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    tolerance: Annotated[float, typer.Option(help="Relative difference that is none.")] = 0.0,
    most: Annotated[int, typer.Option(min=1, help="How many rows to show.")] = 20,
) -> None:
    """Show the first step and tensor at which two runs differ, and what differs. Exit code 1 where they do."""
    found = diff(find_run(a, store), find_run(b, store), tolerance)
    out = console()
    for names, of in ((found.only_a, a), (found.only_b, b)):
        if names:
            out.print(f"only in {of}: {', '.join(names)}")
    if found.step is None:
        out.print(f"no difference in {found.compared} rows")
        return
    out.print(f"first difference: step {found.step}, {found.tensor}")
    shown = table(">STEP", "MODE", ">WORKER", "=TENSOR", "FIGURE", ">A", ">B", ">RELATIVE")
    for row in found.table.slice(0, most).to_pylist():
        numbers = [figure(row[name]) for name in ("a", "b", "relative")]
        shown.add_row(
            str(row["step"]), row["mode"], str(row["worker"]), row["tensor"], row["figure"], *numbers
        )
    show(shown)
    raise typer.Exit(1)


def find_run(run: str, store: str) -> Run:
    """A run by its URL, by project and id, or by its id alone where that is clear."""
    parts = run.split("/")
    if len(parts) > 2:
        return open_run(run)
    if len(parts) == 1:
        found: list[RunEntry] = [entry for entry in find_runs(Store.open(store)) if entry.run == run]
        if len(found) != 1:
            many = f"in projects {', '.join(entry.project for entry in found)}" if found else "not found"
            raise NotFoundError(
                f"run {run!r} in {store}: {many}", "name it <project>/<run>; 'watchstep runs list' shows all"
            )
        parts = [found[0].project, run]
    return open_run("/".join([Store.open(store).location, *parts]))


_WILD = frozenset("*?[")


def locations(run: str, store: str) -> list[str]:
    """Where the runs lie that a name stands for.

    Args:
        run: a run's id, ``<project>/<run>`` or its whole URL; each part may hold ``*``, ``?`` and ``[…]``, and a name that
            ends in ``/`` is that of a project.
        store: where runs lie that are named without a store.

    Raises:
        NotFoundError: there is no such run.
        StoreError, ConfigError: the store cannot be read.
    """
    if run.endswith("/"):
        run += "*"
    if not _WILD & set(run):
        return [find_run(run, store).location]
    root, project, name = _parts(run, store)
    opened = Store.open(root)
    found = [
        f"{opened.location}/{held}/{each}"
        for held in sorted(opened.folders())
        if fnmatchcase(held, project)
        for each in sorted(opened.folders(f"{held}/"))
        if fnmatchcase(each, name) and _is_run(opened.child(f"{held}/{each}"))
    ]
    if not found:
        raise NotFoundError(f"runs {run!r} in {root}: none", "'watchstep runs list' shows all")
    return found


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
    """``<project>/<run>``."""
    return "/".join(Path(location).parts[-2:])


def export(
    run: RunArgument,
    tensorboard: Annotated[Path, typer.Option(help="A new folder for TensorBoard's event files.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Write a run's figures and histograms as TensorBoard's event files."""
    written = export_events(find_run(run, store), tensorboard)
    console().print(f"{written} events in {tensorboard}", soft_wrap=True)
