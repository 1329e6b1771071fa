"""``watchstep export``: a run in the form of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from watchstep.reading.tensorboard import export as export_events
from watchstep_services.cli.runs import RunArgument, StoreOption, find_run
from watchstep_services.cli.service_options import DEFAULT_STORE
from watchstep_services.core.console import console


def export(
    run: RunArgument,
    tensorboard: Annotated[Path, typer.Option(help="A new folder for TensorBoard's event files.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Write a run's figures and histograms as TensorBoard's event files."""
    written = export_events(find_run(run, store), tensorboard)
    console().print(f"{written} events in {tensorboard}", soft_wrap=True)
