"""Where a service is found: by its URL, or by the note that ``watchstep serve`` leaves on this machine.

A service of this machine has another port and other tokens after each restart, so its note is read again whenever it does
not answer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from watchstep.errors import ConfigError
from watchstep.format.documents import parse_json
from watchstep.platform.folders import absolute_path
from watchstep.platform.process import ProcessIdentity
from watchstep.platform.transport import TOKEN, ServiceAddress
from watchstep.store.local import read_owned_file
from watchstep.store.store import checked_scheme

HOME = "WATCHSTEP_HOME"
SERVICE_NOTE = "service.json"
_MAX_BYTES = 65536
_MAX_MEMORY = 4 * 1024 * 1024
_ROOT = 0


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
class ServiceNote:
    """What ``watchstep serve`` leaves in its home for the programs and commands of its user.

    Attributes:
        url: of the API.
        operator_token: may do everything.
        recorder_token: may register and announce runs.
        store: the store that the service watches, as a URL or a path.
        process: of the service.
    """

    url: str
    operator_token: str
    recorder_token: str
    store: str
    process: ProcessIdentity

    @classmethod
    def read(cls, home: Path) -> ServiceNote | None:
        """The note in a home; None where there is none.

        A home may lie in a store that other users write to. Whoever writes the note receives the run's registration and can stop
        the run, so that only a note of this user or of root is read; a link, a pipe, a device and a large file are not.

        Raises:
            ConfigError: the note cannot be read, belongs to another user, or has another form.
        """
        place = home / SERVICE_NOTE
        try:
            return cls._parse(read_owned_file(place, {os.geteuid(), _ROOT}, max_bytes=_MAX_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ConfigError) as error:
            raise _unusable(place, error) from error

    @classmethod
    def _parse(cls, data: bytes) -> ServiceNote:
        """Raises ConfigError, ValueError, KeyError, TypeError or RecursionError."""
        note: Any = parse_json(data, _MAX_MEMORY)
        url, operator, recorder, store = (
            _text(note, name) for name in ("url", "operator_token", "recorder_token", "store")
        )
        for part in (url, operator, recorder):
            if not part.isprintable():
                raise ValueError("the URL or a token has characters that cannot be sent")
        _ = urlsplit(ServiceAddress.checked(url, "").url).port  # ValueError where it is not a valid one
        local_folder(store)
        process = ProcessIdentity(**note["process"])
        if not (
            type(process.pid) is type(process.start_ticks) is int
            and isinstance(process.boot, str)
            and isinstance(process.host, str)
        ):
            raise ValueError("process: not the identity of a process")
        return cls(url, operator, recorder, store, process)


def _text(note: Any, name: str) -> str:
    value = note[name]
    if not isinstance(value, str):
        raise TypeError(f"{name}: not a text")
    return value


def _unusable(place: Path, error: Exception) -> ConfigError:
    if isinstance(error, ConfigError):
        reason = error.what
    else:
        reason = (error.strerror or "") if isinstance(error, OSError) else repr(error)
    return ConfigError(
        f"{place}: the note of a service cannot be used ({reason[:200]})",
        "remove it, or name the service by --service or WATCHSTEP_SERVICE",
    )


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
        try:
            homes = [absolute_path(os.environ.get(HOME) or "~/.watchstep")]
        except ConfigError:
            homes = []  # of a user without a home folder: no service can have one there
        if (folder := local_folder(store_url)) is not None:
            homes.insert(0, folder / ".watchstep")
        return cls(named.url if named else "", () if named else tuple(map(str, homes)), store_url)

    def find(self) -> FoundService | None:
        """The service as it is there now; None where none is.

        Raises:
            ConfigError: no home has one, and a note cannot be used.
        """
        if self.url:
            named = ServiceAddress.checked(self.url, os.environ.get(TOKEN, ""))
            return FoundService(named, named)
        refused: ConfigError | None = None
        for home in self.homes:
            try:
                if (service := service_at(Path(home), self.store_url)) is not None:
                    return service
            except (
                ConfigError
            ) as error:  # whoever may write to the store must not hide the service of the other home
                refused = refused or error
        if refused is not None:
            raise refused
        return None


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
    note = ServiceNote.read(home)
    if note is None:
        return None
    try:
        if not is_same_store(note.store, store_url) or not note.process.is_running():
            return None
    except ValueError as error:  # a path with a null character
        raise _unusable(home / SERVICE_NOTE, error) from error
    return FoundService(
        ServiceAddress.checked(note.url, note.operator_token),
        ServiceAddress.checked(note.url, note.recorder_token),
    )


def make_home(home: Path) -> None:
    """Make the folder of a service, for its user alone, or see that the one there is not another user's.

    A home may lie in a store that other users write to. Whoever owns it can exchange what the service keeps there: its database, its key, and the
    commands that stop jobs. Root may serve from the folder of any user, as in a container with a mounted folder.

    Raises:
        ConfigError: it cannot be made, is no folder, or belongs to another user.
    """
    user = os.geteuid()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = home.stat().st_uid
    except OSError as error:
        raise ConfigError(
            f"home {home}: the folder cannot be made ({error.strerror})",
            "name a folder that you may write to, in WATCHSTEP_HOME or as the store",
        ) from error
    if user != _ROOT and owner not in {user, _ROOT}:
        raise ConfigError(
            f"home {home}: the folder belongs to another user ({owner})",
            "remove it, or start 'watchstep serve' with a WATCHSTEP_HOME of your own",
        )


def local_folder(store_url: str) -> Path | None:
    """The folder of a store on this machine; None for a bucket.

    Raises:
        ConfigError: there is no such store.
    """
    scheme = checked_scheme(store_url)
    if scheme == "file":
        return Path(unquote(urlsplit(store_url).path))
    return None if scheme else absolute_path(store_url)


def is_same_store(candidate: str, other: str) -> bool:
    """Whether two URLs or paths name the same store, also by way of ``..`` and symbolic links.

    Raises:
        ConfigError: one of them names no store.
    """
    return _resolved(candidate) == _resolved(other)


def _resolved(store: str) -> str:
    folder = local_folder(store)
    return store.rstrip("/") if folder is None else os.path.realpath(folder)
