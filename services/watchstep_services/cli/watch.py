"""``watchstep watch``: how a run goes, until it has ended. It needs none of the service's packages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from watchstep.capture.service.location import find_service
from watchstep.client import Client
from watchstep.errors import ServiceError
from watchstep.store.store import checked_scheme
from watchstep_launch.job import ENDED
from watchstep_launch.view.run_status import Watcher
from watchstep_launch.view.show import Showing, kind_of
from watchstep_services.cli.attach import DEFAULT_STORE, ServiceOption, StoreOption

_LOOK_SECONDS = 0.5


def watch(
    run: Annotated[str, typer.Argument(help="The run's id, or <project>/<run>.")],
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
    lines: Annotated[bool, typer.Option("--lines", help="A line for each event, in a terminal too.")] = False,
) -> None:
    """Show how a run goes: steps, losses, rules, alerts and stops, until it has ended or Ctrl-C. Token: WATCHSTEP_TOKEN."""
    project, _, name = run.strip("/").rpartition("/")
    url = store if checked_scheme(store) else Path(store).expanduser().absolute().as_uri()
    found = find_service(service, url)
    if found is None:
        raise ServiceError(
            f"no service runs for {store}",
            "start 'watchstep serve' on it, or give --service and WATCHSTEP_TOKEN",
        )
    client = Client(found.operator.url, found.operator.token, project or "default")
    client.run(name)  # whether there is such a run
    watcher = Watcher(lambda: client, client.project, name)
    try:
        with Showing(watcher, kind_of(False if lines else None)) as showing:
            while watcher.sight.state not in ENDED:
                showing.turn()
                time.sleep(_LOOK_SECONDS)
            showing.turn(last=True)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
