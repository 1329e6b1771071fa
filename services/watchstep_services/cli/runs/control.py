"""``watchstep runs stop``, ``allow-restart``, ``snapshot``, ``cadence``, ``hold``, ``release`` and ``delete``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from watchstep.errors import ConfigError
from watchstep_services.cli.connection import (
    DEFAULT_STORE,
    ReasonOption,
    RunArgument,
    ServiceOption,
    StoreOption,
    client_of,
    require_run,
)
from watchstep_services.core.console import console

if TYPE_CHECKING:
    from watchstep.client import Client


def stop(
    run: RunArgument,
    reason: ReasonOption = "",
    attempt: Annotated[str, typer.Option(help="Attempt to stop. Default: the newest.")] = "",
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Stop a run: requests a stop from its workers, then ends its job. Token: WATCHSTEP_TOKEN, of an operator.

    Examples:
        watchstep runs stop vision/night-1 --reason "wrong learning rate"
    """
    client, name = _client_and_run(run, store, service)
    response = client.stop(name, reason, attempt)
    result = "stop requested" if response.accepted else "a stop was already requested"
    console().print(f"{run}: attempt {response.attempt}: {result}")


def snapshot(
    run: RunArgument,
    step: Annotated[int | None, typer.Option(min=0, help="Step to store. Default: the next.")] = None,
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Request a snapshot: the workers of a run store the full tensors of a step. Token: WATCHSTEP_TOKEN, of an operator.

    Examples:
        watchstep runs snapshot vision/night-1
        watchstep runs snapshot vision/night-1 --step 12000
    """
    client, name = _client_and_run(run, store, service)
    client.request_snapshot(name, step)
    target = "the next step" if step is None else f"step {step}, or the next step if it has passed"
    console().print(f"{run}: requested a snapshot of {target}")


def cadence(
    run: RunArgument,
    every: Annotated[
        list[str] | None,
        typer.Argument(help="COLLECTION=STEPS, once or more. Default: the workers' own cadence."),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Set how often the collections of a run are recorded, in steps. Token: WATCHSTEP_TOKEN, of an operator.

    Examples:
        watchstep runs cadence vision/night-1 weights=50 gradients=10
        watchstep runs cadence vision/night-1
    """
    cadences = dict(_cadence(text) for text in every or ())
    client, name = _client_and_run(run, store, service)
    client.set_cadence(name, cadences)
    intervals = ", ".join(
        f"{collection} every {steps} step{'s' * (steps != 1)}" for collection, steps in cadences.items()
    )
    console().print(f"{run}: {intervals or 'the workers choose the cadence'}")


def allow_restart(
    run: RunArgument, reason: ReasonOption, store: StoreOption = DEFAULT_STORE, service: ServiceOption = ""
) -> None:
    """Allow new attempts of a stopped run to start. Token: WATCHSTEP_TOKEN, of an operator.

    Examples:
        watchstep runs allow-restart vision/night-1 --reason "fixed the data loader"
    """
    client, name = _client_and_run(run, store, service)
    client.allow_restart(name, reason)
    console().print(f"{run}: new attempts may start")


def hold(
    run: RunArgument, reason: ReasonOption, store: StoreOption = DEFAULT_STORE, service: ServiceOption = ""
) -> None:
    """Exempt a run from the retention policy of its project. Token: WATCHSTEP_TOKEN, of an operator.

    Examples:
        watchstep runs hold vision/night-1 --reason "paper, figure 3"
    """
    client, name = _client_and_run(run, store, service)
    client.hold(name, reason)
    console().print(f"{run}: on hold")


def release(run: RunArgument, store: StoreOption = DEFAULT_STORE, service: ServiceOption = "") -> None:
    """Release the hold on a run: the retention policy of its project applies again. Token: WATCHSTEP_TOKEN, of an operator.

    Examples:
        watchstep runs release vision/night-1
    """
    client, name = _client_and_run(run, store, service)
    client.release(name)
    console().print(f"{run}: released")


def delete(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Delete a run that has ended, from the store and from the service. Token: WATCHSTEP_TOKEN, of an administrator.

    The service deletes it in the background.

    Examples:
        watchstep runs delete vision/night-1 --yes
    """
    client, name = _client_and_run(run, store, service)
    if not yes:
        typer.confirm(f"Delete {run} and everything that it recorded?", abort=True)
    client.delete(name)
    console().print(f"{run}: scheduled for deletion")


def _client_and_run(run: str, store: str, service: str) -> tuple[Client, str]:
    project, name = require_run(run)
    return client_of(store, service, project), name


def _cadence(text: str) -> tuple[str, int]:
    collection, _, steps = text.partition("=")
    if not collection or not steps.isdecimal() or int(steps) < 1:
        raise ConfigError(
            f"cadence {text!r}: not of the form COLLECTION=STEPS", "use, for example, weights=50"
        )
    return collection, int(steps)
