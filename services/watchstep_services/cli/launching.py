"""The commands of those who launch jobs and watch them: where a service runs elsewhere, none of its packages is needed."""

from __future__ import annotations

import typer

from watchstep_services.cli import attach, watch

app = typer.Typer(
    name="watchstep", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
app.command("attach")(attach.attach)
app.command("watch")(watch.watch)


@app.callback()
def _options() -> None:
    """Watches training jobs from the inside: records, judges while they run, stops, explains."""
