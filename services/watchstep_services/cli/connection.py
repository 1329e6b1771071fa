"""Access of commands to a service: options, location, and requests.

Imports nothing of the service, so that commands start fast and run on machines without the service's packages.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from watchstep.capture.service.location import ServiceNote
from watchstep.errors import ConfigError, ServiceError
from watchstep.platform.transport import ServiceAddress, Transport
from watchstep.store.store import checked_scheme
from watchstep_services.cli.profiles import Profile, active_profile

if TYPE_CHECKING:
    from watchstep.client import Client

DEFAULT_STORE = "watchstep-runs"
DEFAULT_PROJECT = "default"

StoreOption = Annotated[
    str, typer.Option("--store", envvar="WATCHSTEP_STORE", help="Folder or URL that contains the runs.")
]
ServiceOption = Annotated[
    str,
    typer.Option(
        "--service",
        envvar="WATCHSTEP_SERVICE",
        help="URL of the service. Default: the profile's, or the service of the store.",
    ),
]
ProjectOption = Annotated[
    str,
    typer.Option(
        "--project", envvar="WATCHSTEP_PROJECT", help="Project. Default: the profile's, or 'default'."
    ),
]
ReasonOption = Annotated[str, typer.Option("--reason", help="Reason, for the audit log.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="<project>/<run>, or <run> in the default project.")
]

_SECONDS = 10.0


def active_for(store: str) -> Profile | None:
    """Return the active profile; None if a store is specified, on the command line or in the environment.

    Raises:
        ConfigError: the profile is not valid.
    """
    return active_profile() if store == DEFAULT_STORE else None


def service_of(store: str, service: str) -> tuple[str, str]:
    """Return the URL and token of the service.

    The order is: the specified service, with WATCHSTEP_TOKEN; the service of the profile; the service that runs for the store on
    this machine.

    Raises:
        ServiceError: no service runs for the store.
        ConfigError: the profile or the service note is not valid.
    """
    token = os.environ.get("WATCHSTEP_TOKEN", "")
    if service:
        return service.rstrip("/"), token
    profile = active_for(store)
    if profile is not None:
        return profile.url, token or profile.token
    note = ServiceNote.read(_home_of(store))
    if note is None:
        raise ServiceError(
            f"no service runs for {store}",
            "start 'watchstep serve' on it, or set --service and WATCHSTEP_TOKEN, or --profile",
        )
    return note.url, token or note.operator_token


def _home_of(store: str) -> Path:
    """Return the folder of the service note, the home of `core.settings.settings_for`."""
    home = os.environ.get("WATCHSTEP_HOME")
    if not home and not checked_scheme(store):
        return Path(store).expanduser().absolute() / ".watchstep"
    return Path(home or "~/.watchstep").expanduser().absolute()


def default_project() -> str:
    """Return the default project: WATCHSTEP_PROJECT, else the profile's, else ``default``."""
    if project := os.environ.get("WATCHSTEP_PROJECT"):
        return project
    profile = active_profile()
    return profile.project if profile is not None and profile.project else DEFAULT_PROJECT


def split_run(run: str) -> tuple[str, str]:
    """Return project and name of ``<project>/<run>`` or ``<run>``; the name is empty for ``<project>/``."""
    project, _, name = run.rpartition("/")
    return project or default_project(), name


def require_run(run: str) -> tuple[str, str]:
    """Split a run like `split_run`.

    Raises:
        ConfigError: the name of the run is missing.
    """
    project, name = split_run(run)
    if not name:
        raise ConfigError(f"run {run!r}: the name of the run is missing", "use <project>/<run>")
    return project, name


def client_of(store: str, service: str, project: str) -> Client:
    """Return a client of the service that `service_of` selects.

    Raises:
        ServiceError: no service runs for the store.
        ConfigError: the URL is not valid.
    """
    from watchstep.client import Client

    url, token = service_of(store, service)
    return Client(url, token, project)


def call(method: str, url: str, token: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send a request to a service, and return the response.

    Raises:
        NotFoundError: the object does not exist.
        ServiceError: the service does not respond, or refuses the request.
    """
    parts = urlsplit(url)
    address = ServiceAddress.checked(f"{parts.scheme}://{parts.netloc}", token)
    path = f"{parts.path}?{parts.query}" if parts.query else parts.path
    response: dict[str, Any] = Transport(address, _SECONDS).call(method, path, None, body) or {}
    return response
