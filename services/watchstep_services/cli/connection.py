"""How commands reach a service: the options for it, where it runs, and requests to it.

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
    str, typer.Option("--store", envvar="WATCHSTEP_STORE", help="Folder or URL that holds the runs.")
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
    """The active profile, where no store is named: a store on the command line or in the environment takes precedence.

    Raises:
        ConfigError: the profile cannot be used.
    """
    return active_profile() if store == DEFAULT_STORE else None


def service_of(store: str, service: str) -> tuple[str, str]:
    """URL and token of the service to ask.

    The first of: the service that is named, with WATCHSTEP_TOKEN; the profile's; the one that runs for the store on this
    machine.

    Raises:
        ServiceError: no service runs for the store.
        ConfigError: the profile or the note of the service cannot be used.
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
            "start 'watchstep serve' on it, or give --service and WATCHSTEP_TOKEN, or --profile",
        )
    return note.url, token or note.operator_token


def _home_of(store: str) -> Path:
    """Where a service of this machine leaves its note, as `core.settings.settings_for` places its home."""
    named = os.environ.get("WATCHSTEP_HOME")
    if not named and not checked_scheme(store):
        return Path(store).expanduser().absolute() / ".watchstep"
    return Path(named or "~/.watchstep").expanduser().absolute()


def default_project() -> str:
    """The project of commands that name none: WATCHSTEP_PROJECT, else the profile's, else ``default``."""
    if project := os.environ.get("WATCHSTEP_PROJECT"):
        return project
    profile = active_profile()
    return profile.project if profile is not None and profile.project else DEFAULT_PROJECT


def split_run(run: str) -> tuple[str, str]:
    """Project and name of ``<project>/<run>`` or ``<run>``; the name is empty where only a project is given."""
    project, _, name = run.rpartition("/")
    return project or default_project(), name


def require_run(run: str) -> tuple[str, str]:
    """As `split_run`.

    Raises:
        ConfigError: no run is named.
    """
    project, name = split_run(run)
    if not name:
        raise ConfigError(f"run {run!r}: no run is named", "name it <project>/<run>")
    return project, name


def client_of(store: str, service: str, project: str) -> Client:
    """A client of the service that `service_of` finds.

    Raises:
        ServiceError: none runs there.
        ConfigError: the URL is not valid.
    """
    from watchstep.client import Client

    url, token = service_of(store, service)
    return Client(url, token, project)


def call(method: str, url: str, token: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send one request to a service, and return its answer.

    Raises:
        NotFoundError: there is no such object.
        ServiceError: the service does not answer, or refuses.
    """
    parts = urlsplit(url)
    address = ServiceAddress.checked(f"{parts.scheme}://{parts.netloc}", token)
    path = f"{parts.path}?{parts.query}" if parts.query else parts.path
    answer: dict[str, Any] = Transport(address, _SECONDS).call(method, path, None, body) or {}
    return answer
