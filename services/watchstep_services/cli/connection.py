"""Options that commands about a running service share.

Requests of commands to a service.
"""

from __future__ import annotations

import os
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from watchstep.capture.service.location import ServiceNote
from watchstep.client import Client
from watchstep.errors import ServiceError
from watchstep.platform.transport import ServiceAddress, Transport
from watchstep_services.core.settings import settings_for

DEFAULT_STORE = "watchstep-runs"

Store = Annotated[str, typer.Option(envvar="WATCHSTEP_STORE", help="Folder or URL that holds the runs.")]
Service = Annotated[
    str,
    typer.Option(envvar="WATCHSTEP_SERVICE", help="URL of the service; the one of the store if left out."),
]
Project = Annotated[str, typer.Option(envvar="WATCHSTEP_PROJECT", help="The project.")]
Reason = Annotated[str, typer.Option(help="Why; for those who read it later.")]


_SECONDS = 10.0


def service_of(store: str, service: str) -> tuple[str, str]:
    """URL and token: of a named service with WATCHSTEP_TOKEN, or of the one that runs for a store on this machine.

    Raises:
        ServiceError: none runs there.
        ConfigError: its note cannot be used.
    """
    token = os.environ.get("WATCHSTEP_TOKEN", "")
    if service:
        return service.rstrip("/"), token
    home = settings_for(store, None).home_folder
    note = ServiceNote.read(home)
    if note is None:
        raise ServiceError(
            f"no service runs for {store}",
            "start 'watchstep serve' on it, or give --service and WATCHSTEP_TOKEN",
        )
    return note.url, token or note.operator_token


def client_of(store: str, service: str, project: str) -> Client:
    """A client of the service that `service_of` finds.

    Raises:
        ServiceError: none runs there.
        ConfigError: the URL is none.
    """
    url, token = service_of(store, service)
    return Client(url, token, project)


def call(method: str, url: str, token: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """One request to a service; its answer.

    Raises:
        NotFoundError: there is nothing of that name.
        ServiceError: it does not answer, or refuses.
    """
    parts = urlsplit(url)
    address = ServiceAddress.checked(f"{parts.scheme}://{parts.netloc}", token)
    path = f"{parts.path}?{parts.query}" if parts.query else parts.path
    data: dict[str, Any] = Transport(address, _SECONDS).call(method, path, None, body) or {}
    return data
