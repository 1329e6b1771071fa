"""``watchstep runs snapshot``, ``cadence``, ``allow-restart``, ``hold``, ``release`` and ``delete``: what is asked of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from watchstep.client import Client
from watchstep.errors import ConfigError
from watchstep_services.cli.connection import DEFAULT_STORE, client_of
from watchstep_services.cli.runs.events import RunArgument, ServiceOption, StoreOption
from watchstep_services.core.console import console

ReasonOption = Annotated[str, typer.Option(help="Why, for those who read of it.")]


def snapshot(
    run: RunArgument,
    step: Annotated[int | None, typer.Option(min=0, help="Of this step; of the next if left out.")] = None,
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Have a run's workers keep the full tensors of a step. Token: WATCHSTEP_TOKEN, of an operator."""
    client, name = _asked(run, store, service)
    client.request_snapshot(name, step)
    at = "its next step" if step is None else f"step {step}, or of the next if that has passed"
    console().print(f"{run}: asked for the full tensors of {at}")


def cadence(
    run: RunArgument,
    every: Annotated[
        list[str] | None, typer.Argument(help="COLLECTION=STEPS, several maybe; none: as the workers choose.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Have a run's collections measured every so many steps. Token: WATCHSTEP_TOKEN, of an operator."""
    chosen = dict(_cadence(text) for text in every or ())
    client, name = _asked(run, store, service)
    client.set_cadence(name, chosen)
    told = ", ".join(f"{collection} every {steps} steps" for collection, steps in chosen.items())
    console().print(f"{run}: {told or 'as its workers choose'}")


def allow_restart(
    run: RunArgument, reason: ReasonOption, store: StoreOption = DEFAULT_STORE, service: ServiceOption = ""
) -> None:
    """Let new attempts of a stopped run start. Token: WATCHSTEP_TOKEN, of an operator."""
    client, name = _asked(run, store, service)
    client.allow_restart(name, reason)
    console().print(f"{run}: new attempts may start")


def hold(
    run: RunArgument, reason: ReasonOption, store: StoreOption = DEFAULT_STORE, service: ServiceOption = ""
) -> None:
    """Keep a run whole, whatever its project's policy says. Token: WATCHSTEP_TOKEN, of an operator."""
    client, name = _asked(run, store, service)
    client.hold(name, reason)
    console().print(f"{run}: held")


def release(run: RunArgument, store: StoreOption = DEFAULT_STORE, service: ServiceOption = "") -> None:
    """Release the hold on a run: its project's policy applies again. Token: WATCHSTEP_TOKEN, of an operator."""
    client, name = _asked(run, store, service)
    client.release(name)
    console().print(f"{run}: let go")


def delete(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Delete a run that has ended, from the store and the service, soon. Token: WATCHSTEP_TOKEN, of an administrator."""
    client, name = _asked(run, store, service)
    if not yes:
        typer.confirm(f"Delete {run} with all that it recorded?", abort=True)
    client.delete(name)
    console().print(f"{run}: is being deleted")


def _asked(run: str, store: str, service: str) -> tuple[Client, str]:
    project, _, name = run.rpartition("/")
    if not name:
        raise ConfigError(f"run {run!r}: no run is named", "name it <project>/<run>")
    return client_of(store, service, project or "default"), name


def _cadence(text: str) -> tuple[str, int]:
    collection, _, steps = text.partition("=")
    if not collection or not steps.isdecimal() or int(steps) < 1:
        raise ConfigError(f"cadence {text!r}: not COLLECTION=STEPS", "write it as weights=50, say")
    return collection, int(steps)
