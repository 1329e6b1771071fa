"""Where a service is found: by its URL, or by the note that ``watchstep serve`` leaves on this machine.

A service of this machine has another port and other tokens after each restart, so its note is read again whenever it does
not answer.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from watchstep.errors import ConfigError
from watchstep.process_identity import ProcessIdentity
from watchstep.store import checked_scheme
from watchstep.transport import TOKEN, ServiceAddress

HOME = "WATCHSTEP_HOME"
SERVICE_NOTE = "service.json"


@dataclass(frozen=True)
class FoundService:
    """A service to register with, and what the program may use of it.

    Attributes:
        operator: registers the run and binds its job.
        recorder: for the program itself, which may announce and no more.
    """

    operator: ServiceAddress
    recorder: ServiceAddress


@dataclass(frozen=True)
class ServiceLocation:
    """Where to look for a service, now and again.

    Attributes:
        url: of a service that was named; its token is in ``WATCHSTEP_TOKEN``. Empty for one of this machine.
        homes: where a service of this machine may have left its note.
        store_url: the store that it has to watch.
    """

    url: str
    homes: tuple[str, ...]
    store_url: str

    @classmethod
    def of(cls, url: str, store_url: str) -> ServiceLocation:
        """The service that is named, by an argument or the environment, or else one of this machine.

        Raises:
            ConfigError: the URL is none.
        """
        named = ServiceAddress.checked(url, "") if url else ServiceAddress.from_environment()
        homes = [Path(os.environ.get(HOME) or "~/.watchstep").expanduser().absolute()]
        if (folder := local_folder(store_url)) is not None:
            homes.insert(0, folder / ".watchstep")
        return cls(named.url if named else "", () if named else tuple(map(str, homes)), store_url)

    def find(self) -> FoundService | None:
        """The service as it is there now; None where none is.

        Raises:
            ConfigError: a note cannot be used.
        """
        if self.url:
            named = ServiceAddress.checked(self.url, os.environ.get(TOKEN, ""))
            return FoundService(named, named)
        found = (service_at(Path(home), self.store_url) for home in self.homes)
        return next((service for service in found if service is not None), None)


def find_service(url: str, store_url: str) -> FoundService | None:
    """The service named, or the one on this machine that watches the store; None where there is none.

    Raises:
        ConfigError: the URL is none, or the service's own note cannot be used.
    """
    return ServiceLocation.of(url, store_url).find()


def service_at(home: Path, store_url: str) -> FoundService | None:
    """The service of a home, where one runs and watches the store.

    Raises:
        ConfigError: its note cannot be used.
    """
    note = home / SERVICE_NOTE
    try:
        data = json.loads(note.read_text(encoding="utf-8"))
        url, store = str(data["url"]), str(data["store"])
        tokens = str(data["operator_token"]), str(data["recorder_token"])
        process = ProcessIdentity(**data["process"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{note}: cannot be used ({error!r})", "remove it, or name the service by --service"
        ) from error
    if not is_same_store(store, store_url) or not process.is_running():
        return None
    return FoundService(ServiceAddress.checked(url, tokens[0]), ServiceAddress.checked(url, tokens[1]))


def local_folder(store_url: str) -> Path | None:
    """The folder of a store on this machine; None for a bucket.

    Raises:
        ConfigError: there is no such store.
    """
    scheme = checked_scheme(store_url)
    if scheme == "file":
        return Path(unquote(urlsplit(store_url).path))
    return None if scheme else Path(store_url).expanduser().absolute()


def is_same_store(one: str, other: str) -> bool:
    """Whether two URLs or paths name the same store, also by way of ``..`` and symbolic links.

    Raises:
        ConfigError: one of them names no store.
    """
    return _resolved(one) == _resolved(other)


def _resolved(store: str) -> str:
    folder = local_folder(store)
    return store.rstrip("/") if folder is None else os.path.realpath(folder)
