"""Locating the service that evaluates launched jobs: a named one, one that watches the store here, or one started with the job."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from watchstep.capture.service.location import FoundService, local_folder, make_home, service_at
from watchstep.errors import ConfigError, ServiceError
from watchstep.platform.folders import HOME, absolute_path
from watchstep.platform.transport import TOKEN, ServiceAddress
from watchstep.store.local import refuse_replacement

RECORDER_TOKEN = "WATCHSTEP_RECORDER_TOKEN"  # noqa: S105 - the name of a variable
IDLE_SECONDS = "WATCHSTEP_IDLE_SECONDS"
"""Environment variable: how many seconds a sidecar service waits for another job after its last; five minutes by default."""

_START_SECONDS = 120.0
_POLL_SECONDS = 0.05
_MODULE = "watchstep_services.serve.sidecar"


@dataclass(frozen=True)
class ServiceReference:
    """How to reach a service, now and from a later process: its URL, or its home folder on this machine.

    Attributes:
        url: URL of a named service, with its token in WATCHSTEP_TOKEN. Empty for a service on this machine.
        home: home folder of a service on this machine; empty for a named service.
        store: the store that it watches.
    """

    url: str
    home: str
    store: str

    @property
    def recorder_token(self) -> str:
        """The token that the user configured for jobs of a named service; empty if there is none."""
        return os.environ.get(RECORDER_TOKEN, "") if self.url else ""

    def address(self) -> FoundService:
        """Return the service's address. Restarts a service on this machine that has ended.

        Raises:
            ConfigError: the service package is not installed here.
            ServiceError: the service did not start.
        """
        if self.url:
            named = ServiceAddress.checked(self.url, os.environ.get(TOKEN, ""))
            return FoundService(named, ServiceAddress(named.url, self.recorder_token or named.token))
        return service_at(Path(self.home), self.store) or _start(Path(self.home), self.store)


def locate_service(service: str, store_url: str) -> ServiceReference:
    """Find the service that evaluates a store's runs.

    Args:
        service: URL of a service; empty to search on this machine.
        store_url: the store, as a URL.

    Raises:
        ConfigError: the URL is invalid, or a service's address file cannot be read.
    """
    url = service or os.environ.get("WATCHSTEP_SERVICE", "")
    if url:
        return ServiceReference(ServiceAddress.checked(url, "").url, "", store_url)
    root = absolute_path(os.environ.get(HOME) or "~/.watchstep")
    default = _home_of(root, store_url)
    home = next((home for home in (default, root) if service_at(home, store_url) is not None), default)
    return ServiceReference("", str(home), store_url)


def _home_of(root: Path, store_url: str) -> Path:
    if (folder := local_folder(store_url)) is not None:
        return folder / ".watchstep"
    return root / "beside" / sha256(store_url.encode()).hexdigest()[:12]


def _start(home: Path, store_url: str) -> FoundService:
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("sqlalchemy") is None:
        raise ConfigError(
            f"no service watches store {store_url}, and the service package is not installed here",
            "pip install 'watchstep[server]', or name a service with Estimator(service=…) and WATCHSTEP_TOKEN",
        )
    if (folder := local_folder(store_url)) is not None:
        refuse_replacement(folder)  # before a home in it is created
    make_home(home)
    log = home / "beside.log"
    store = str(local_folder(store_url) or store_url)
    command = (
        sys.executable, "-m", _MODULE, "--store", store, "--home", str(home), "--idle-seconds", os.environ.get(IDLE_SECONDS) or "300"
    )  # fmt: skip
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - this package's own module
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd="/"
        )
    threading.Thread(target=process.wait, name=f"reaper-{process.pid}", daemon=True).start()
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        service = service_at(home, store_url)
        if service is not None:
            return service
        if (
            process.poll() is not None
            and service_at(home, store_url) is None
            and not _is_another_starting(log)
        ):
            break
        time.sleep(_POLL_SECONDS)
    raise ServiceError(f"the service for {store_url} did not start: {_last_line(log)}", f"see {log}")


def _is_another_starting(log: Path) -> bool:
    """Whether this process's service ended because another launcher's started first."""
    return "another watchstep service runs there" in _last_line(log)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return next((line for line in reversed(lines) if "hint:" not in line), "its log is empty")
