"""``watchstep demo``: a healthy and a faulty training, recorded and evaluated; the faulty one is stopped and explained."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from watchstep.errors import ConfigError
from watchstep_services.core.console import console, echo_json
from watchstep_services.core.settings import load_settings

_NEEDS = {"torch": "torch", "sklearn": "scikit-learn", "matplotlib": "matplotlib", "plotext": "plotext"}


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Seed of both trainings.")] = 0,
    folder: Annotated[Path, typer.Option(help="Folder for runs, logs and the picture.")] = Path(
        "watchstep-demo"
    ),
    json: Annotated[
        bool, typer.Option("--json", help="Print the outcome as one JSON object at the end.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the service running, and print its URL.")
    ] = False,
) -> None:
    """Run the demo: a healthy training that completes, and a faulty one that is stopped and explained.

    Examples:
        watchstep demo
        watchstep demo --folder /tmp/demo --keep
    """
    missing = [package for module, package in _NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(f"demo: {', '.join(missing)} not installed", "pip install 'watchstep[demo,torch]'")
    from watchstep_services.demo.report import DemoOutcome, Display, explain, outcome_of
    from watchstep_services.demo.trainings import Demo, DemoWatcher, launch_both, watch_until_settled
    from watchstep_services.serve.embedded import EmbeddedService

    demo_run = Demo(folder.expanduser().absolute(), seed)
    settings = load_settings(
        store=str(demo_run.store), home=demo_run.store / ".watchstep", port=0, sweep_seconds=0.5
    )
    out = console()
    with EmbeddedService(settings) as service:
        out.print(f"service   {service.url}, store {demo_run.store}", soft_wrap=True, highlight=False)
        runs = launch_both(demo_run, service)
        watcher = DemoWatcher(service, runs)
        with Display(out, runs) as display:
            watch_until_settled(service, watcher, display.show)
        watcher.close()
        outcomes = {watched.run_id: outcome_of(watched) for watched in runs}
        explain(out, runs, outcomes, demo_run.folder / f"{runs[1].run_id}.png")
        if json:
            echo_json(DemoOutcome(runs=tuple(outcomes.values())).model_dump_json())
        if keep:
            out.print()
            out.print(f"The service continues at {service.url}. Press Ctrl-C to end it.")
            out.print(
                f"Open {service.page_link}",
                soft_wrap=True,
                highlight=False,
            )
            service.wait()
