"""Access of commands to a service: options, location, and requests.

Imports nothing of the service, so that commands start fast and run on machines without the service's packages.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from watchstep.capture.service.location import ServiceNote, live_services, local_folder
from watchstep.errors import ConfigError, ServiceError
from watchstep.platform.transport import ServiceAddress, Transport
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
    this machine; without a store, the only one that runs on this machine.

    Raises:
        ServiceError: no service runs for the store, or several run and no store is specified.
        ConfigError: the profile or the service note is not valid.
    """
    token = os.environ.get("WATCHSTEP_TOKEN", "")
    if service:
        return service.rstrip("/"), token
    profile = active_for(store)
    if profile is not None:
        return profile.url, token or profile.token
    note = _note_of(store)
    return note.url, token or note.operator_token


def _note_of(store: str) -> ServiceNote:
    """Return the note of the service on this machine that watches a store; without a store, that of the only service."""
    note = ServiceNote.read(_home_of(store))
    is_named = store == DEFAULT_STORE and bool(os.environ.get("WATCHSTEP_HOME"))
    if note is not None and note.process.is_running() and (is_named or note.watches(store)):
        return note
    running = live_services()
    found = [note for note in running if note.watches(store)]
    if not found and store == DEFAULT_STORE:
        found = running
    if len(found) == 1:
        return found[0]
    if found:
        lines = "".join(f"\n  {note.url}: {', '.join(note.stores)}" for note in found)
        raise ServiceError(
            f"{len(found)} services run on this machine:{lines}", "name one with --store or WATCHSTEP_STORE"
        )
    others = f"; the services here watch {', '.join(note.stores[0] for note in running)}" if running else ""
    raise ServiceError(
        f"no service runs for {store}{others}",
        "start 'watchstep serve' on it, or set --service and WATCHSTEP_TOKEN, or --profile",
    )


def is_without_store(store: str) -> bool:
    """Whether no store is specified and the default folder does not exist, so that the service of this machine is asked."""
    return store == DEFAULT_STORE and not Path(store).is_dir()


def store_of(store: str, run: str) -> str:
    """Return the store of a run that is named without one: the specified one, or the one from which the only service here reads it.

    Raises:
        NotFoundError: the service does not know the run.
        ServiceError: several services run on this machine, or it does not respond.
    """
    if not is_without_store(store) or not live_services() or active_for(store) is not None:
        return store
    project, _, name = run.rpartition("/")
    if "/" in project or not name:
        return store  # a URL
    return str(client_of(store, "", project or default_project()).run(name).info.raw["store"])


def _home_of(store: str) -> Path:
    """Return the folder of the service note, the home of `core.settings.settings_for`."""
    home = os.environ.get("WATCHSTEP_HOME")
    if not home and (folder := local_folder(store)) is not None:
        return folder / ".watchstep"
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
