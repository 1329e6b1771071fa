"""Options that commands about a running service share."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_STORE = "watchstep-runs"

Store = Annotated[str, typer.Option(envvar="WATCHSTEP_STORE", help="Folder or URL that holds the runs.")]
Service = Annotated[
    str,
    typer.Option(envvar="WATCHSTEP_SERVICE", help="URL of the service; the one of the store if left out."),
]
Project = Annotated[str, typer.Option(envvar="WATCHSTEP_PROJECT", help="The project.")]
Reason = Annotated[str, typer.Option(help="Why; for those who read it later.")]
