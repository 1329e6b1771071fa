"""Locating a service: by its URL, or by the note that ``watchstep serve`` writes on this machine.

A service on this machine has another port and other tokens after each restart, so its note is read again whenever it does
not answer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from watchstep.errors import ConfigError
from watchstep.format.documents import parse_json
from watchstep.platform.folders import HOME, PrivateFolder, absolute_path
from watchstep.platform.process import ProcessIdentity
from watchstep.platform.transport import TOKEN, ServiceAddress
from watchstep.store.local import read_owned_file
from watchstep.store.store import checked_scheme

SERVICE_NOTE = "service.json"
_MAX_BYTES = 65536
_MAX_MEMORY = 4 * 1024 * 1024
_ROOT = 0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundService:
    """A service, with addresses for registration and for recording.

    Attributes:
        operator: for registering the run and binding its job.
        recorder: for the program itself, which may only announce.
    """

    operator: ServiceAddress
    recorder: ServiceAddress


@dataclass(frozen=True)
class ServiceNote:
    """What ``watchstep serve`` writes to its home for programs and commands of its user.

    Attributes:
        url: URL of the API.
        operator_token: token with all permissions.
        recorder_token: token that may register and announce runs.
        stores: the stores that the service watches, as URLs or paths; first the one that it was started on.
        process: the service's process.
    """

    url: str
    operator_token: str
    recorder_token: str
    stores: tuple[str, ...]
    process: ProcessIdentity

    def watches(self, store_url: str) -> bool:
        """Whether the service watches a store.

        Raises:
            ConfigError: the URL is invalid.
        """
        return any(is_same_store(store, store_url) for store in self.stores)

    @classmethod
    def read(cls, home: Path) -> ServiceNote | None:
        """Read the note in a home; None if there is none.

        A home may be in a store that other users write to. The writer of the note receives the run's registration and can stop
        the run, so only notes of this user or of root are read; links, pipes, devices and large files are not.

        Raises:
            ConfigError: the note cannot be read, belongs to another user, or is invalid.
        """
        path = home / SERVICE_NOTE
        try:
            return cls._parse(read_owned_file(path, {os.geteuid(), _ROOT}, max_bytes=_MAX_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ConfigError) as error:
            raise _unusable(path, error) from error

    @classmethod
    def _parse(cls, data: bytes) -> ServiceNote:
        """Raises ConfigError, ValueError, KeyError, TypeError or RecursionError."""
        note: Any = parse_json(data, _MAX_MEMORY)
        url, operator, recorder = (_text(note, name) for name in ("url", "operator_token", "recorder_token"))
        stores = note["stores"]
        if not isinstance(stores, list) or not stores or not all(isinstance(store, str) for store in stores):
            raise ValueError("stores is not a list of texts")
        for part in (url, operator, recorder):
            if not part.isprintable():
                raise ValueError("the URL or a token contains characters that cannot be sent")
        _ = urlsplit(ServiceAddress.checked(url, "").url).port  # ValueError if it is invalid
        for store in stores:
            is_same_store(store, store)  # ConfigError or ValueError if it is invalid
        process = ProcessIdentity(**note["process"])
        if not (
            type(process.pid) is type(process.start_ticks) is int
            and isinstance(process.boot, str)
            and isinstance(process.host, str)
        ):
            raise ValueError("process is not the identity of a process")
        return cls(url, operator, recorder, tuple(stores), process)


def _text(note: Any, name: str) -> str:
    value = note[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is not a string")
    return value


def _unusable(path: Path, error: Exception) -> ConfigError:
    if isinstance(error, ConfigError):
        reason = error.what
    else:
        reason = (error.strerror or "") if isinstance(error, OSError) else repr(error)
    return ConfigError(
        f"{path}: the note of a service is invalid ({reason[:200]})",
        "remove it, or name the service with --service or WATCHSTEP_SERVICE",
    )


@dataclass(frozen=True)
class ServiceLocation:
    """Where to look for a service, now and later.

    Attributes:
        url: URL of a named service, with its token in ``WATCHSTEP_TOKEN``. Empty for a service on this machine.
        homes: homes in which a service on this machine may have written its note.
        store_url: the store that it must watch.
    """

    url: str
    homes: tuple[str, ...]
    store_url: str

    @classmethod
    def of(cls, url: str, store_url: str) -> ServiceLocation:
        """Return the location of the service named by an argument or the environment, or else of one on this machine.

        Raises:
            ConfigError: the URL is invalid.
        """
        named = ServiceAddress.checked(url, "") if url else ServiceAddress.from_environment()
        try:
            homes = [absolute_path(os.environ.get(HOME) or "~/.watchstep")]
        except ConfigError:
            homes = []  # the user has no home folder, and therefore no service in it
        if (folder := local_folder(store_url)) is not None:
            homes.insert(0, folder / ".watchstep")
        return cls(named.url if named else "", () if named else tuple(map(str, homes)), store_url)

    def find(self) -> FoundService | None:
        """Return the current service; None if there is none.

        Raises:
            ConfigError: no home has a service, and a note is invalid.
        """
        if self.url:
            named = ServiceAddress.checked(self.url, os.environ.get(TOKEN, ""))
            return FoundService(named, named)
        refused: ConfigError | None = None
        for home in self.homes:
            try:
                if (service := service_at(Path(home), self.store_url)) is not None:
                    return service
            except ConfigError as error:  # a writer to the store must not hide the service of the other home
                refused = refused or error
        if refused is not None:
            raise refused
        return None


def find_service(url: str, store_url: str) -> FoundService | None:
    """Return the named service, or the one on this machine that watches the store; None if there is none.

    Raises:
        ConfigError: the URL or the service's note is invalid.
    """
    return ServiceLocation.of(url, store_url).find()


def service_at(home: Path, store_url: str) -> FoundService | None:
    """Return the service of a home, if it runs and watches the store.

    Raises:
        ConfigError: its note is invalid.
    """
    note = ServiceNote.read(home)
    if note is None:
        return None
    try:
        if not note.watches(store_url) or not note.process.is_running():
            return None
    except ValueError as error:  # a path with a null character
        raise _unusable(home / SERVICE_NOTE, error) from error
    return FoundService(
        ServiceAddress.checked(note.url, note.operator_token),
        ServiceAddress.checked(note.url, note.recorder_token),
    )


@contextmanager
def listed(home: Path) -> Iterator[None]:
    """List a home among those of this user's services on this machine, so that commands find it without its store."""
    name = sha256(os.fsencode(home)).hexdigest()[:16]
    try:
        with _list_of_homes() as folder, os.fdopen(folder.open_file(name), "wb") as file:
            file.truncate()
            file.write(os.fsencode(home))
    except OSError as error:
        _log.warning("commands need --store or --service to find this service: %s", error)
    try:
        yield
    finally:
        with (
            suppress(OSError),
            _list_of_homes() as folder,
        ):  # a home without a running service is skipped by readers
            folder.remove_file(name)


def live_services() -> list[ServiceNote]:
    """Return the services of this user that run on this machine; without those of another temporary folder, as in a container."""
    notes: list[ServiceNote] = []
    try:
        with _list_of_homes() as folder:
            homes = [_home_in(folder, name) for name in sorted(os.listdir(folder.descriptor))]  # noqa: PTH208 - by its descriptor
    except OSError:
        return []  # no folder that only this user may write
    for home in homes:
        try:
            note = ServiceNote.read(home)
        except ConfigError as error:
            _log.warning("%s", error.what)
            continue
        if note is not None and note.process.is_running():
            notes.append(note)
    return notes


@contextmanager
def _list_of_homes() -> Iterator[PrivateFolder]:
    private = PrivateFolder.open()
    try:
        folder = private.child("services")
    finally:
        private.close()
    try:
        yield folder
    finally:
        folder.close()


def _home_in(folder: PrivateFolder, name: str) -> Path:
    with os.fdopen(folder.open_file(name), "rb") as file:
        return Path(os.fsdecode(file.read(_MAX_BYTES)))


def make_home(home: Path) -> None:
    """Create a private folder for a service, or check that the existing one does not belong to another user.

    A home may be in a store that other users write to. Its owner can replace what the service keeps there: its database, its key, and the
    commands that stop jobs. Root may serve from any user's folder, as in a container with a mounted folder.

    Raises:
        ConfigError: it cannot be created, is not a folder, or belongs to another user.
    """
    user = os.geteuid()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = home.stat().st_uid
    except OSError as error:
        raise ConfigError(
            f"home {home}: the folder cannot be created ({error.strerror})",
            "use a writable folder as WATCHSTEP_HOME or as the store",
        ) from error
    if user != _ROOT and owner not in {user, _ROOT}:
        raise ConfigError(
            f"home {home}: the folder belongs to another user ({owner})",
            "remove it, or start 'watchstep serve' with your own WATCHSTEP_HOME",
        )


def local_folder(store_url: str) -> Path | None:
    """Return the folder of a store on this machine; None for a bucket.

    Raises:
        ConfigError: the URL is invalid.
    """
    scheme = checked_scheme(store_url)
    if scheme == "file":
        return Path(unquote(urlsplit(store_url).path))
    return None if scheme else absolute_path(store_url)


def is_same_store(candidate: str, other: str) -> bool:
    """Whether two URLs or paths name the same store, including ``..`` and symbolic links.

    Raises:
        ConfigError: one of them is invalid.
    """
    return _resolved(candidate) == _resolved(other)


def _resolved(store: str) -> str:
    folder = local_folder(store)
    return store.rstrip("/") if folder is None else os.path.realpath(folder)
