"""The service that judges launched jobs: the one that is named, or that watches the store here, or one started beside them."""

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

from watchstep.capture.service.location import HOME, FoundService, local_folder, make_home, service_at
from watchstep.errors import ConfigError, ServiceError
from watchstep.platform.folders import absolute_path
from watchstep.platform.transport import TOKEN, ServiceAddress

RECORDER_TOKEN = "WATCHSTEP_RECORDER_TOKEN"  # noqa: S105 - the name of a variable
IDLE_SECONDS = "WATCHSTEP_IDLE_SECONDS"
"""The variable that says how long a service beside a job waits for another after its last; five minutes without it."""

_START_SECONDS = 120.0
_LOOK_SECONDS = 0.05
_MODULE = "watchstep_services.serve.sidecar"


@dataclass(frozen=True)
class Judge:
    """Where a service is found, now and by a later process: by its URL, or by its home on this machine.

    Attributes:
        url: of a service that was named; its token is in WATCHSTEP_TOKEN. Empty for one of this machine.
        home: of one of this machine; empty for one that was named.
        store: what it watches.
    """

    url: str
    home: str
    store: str

    @property
    def recorder_token(self) -> str:
        """What the user named for jobs of a service that was named; empty for nothing."""
        return os.environ.get(RECORDER_TOKEN, "") if self.url else ""

    def address(self) -> FoundService:
        """Where it answers. One of this machine that has ended since is started again.

        Raises:
            ConfigError: nothing here can serve.
            ServiceError: it did not start.
        """
        if self.url:
            named = ServiceAddress.checked(self.url, os.environ.get(TOKEN, ""))
            return FoundService(named, ServiceAddress(named.url, self.recorder_token or named.token))
        return service_at(Path(self.home), self.store) or _start(Path(self.home), self.store)


def judge_of(service: str, store_url: str) -> Judge:
    """Find what judges a store's runs.

    Args:
        service: URL of a service; empty to look on this machine.
        store_url: as a URL.

    Raises:
        ConfigError: the URL is none, or a service's note cannot be used.
    """
    named = service or os.environ.get("WATCHSTEP_SERVICE", "")
    if named:
        return Judge(ServiceAddress.checked(named, "").url, "", store_url)
    root = absolute_path(os.environ.get(HOME) or "~/.watchstep")
    own = _home_of(root, store_url)
    home = next((home for home in (own, root) if service_at(home, store_url) is not None), own)
    return Judge("", str(home), store_url)


def _home_of(root: Path, store_url: str) -> Path:
    if (folder := local_folder(store_url)) is not None:
        return folder / ".watchstep"
    return root / "beside" / sha256(store_url.encode()).hexdigest()[:12]


def _start(home: Path, store_url: str) -> FoundService:
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("sqlalchemy") is None:
        raise ConfigError(
            f"store {store_url}: no service watches it, and none is installed here to judge the rules",
            "pip install 'watchstep[server]', or name a service by Estimator(service=…) and WATCHSTEP_TOKEN",
        )
    make_home(home)
    log = home / "beside.log"
    store = str(local_folder(store_url) or store_url)
    command = (
        sys.executable, "-m", _MODULE, "--store", store, "--home", str(home), "--idle-seconds", os.environ.get(IDLE_SECONDS) or "300"
    )  # fmt: skip
    with log.open("ab") as output:
        started = subprocess.Popen(  # noqa: S603 - this package's own module
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd="/"
        )
    threading.Thread(target=started.wait, name=f"reaper-{started.pid}", daemon=True).start()
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        found = service_at(home, store_url)
        if found is not None:
            return found
        if started.poll() is not None and service_at(home, store_url) is None and not _another_starts(log):
            break
        time.sleep(_LOOK_SECONDS)
    raise ServiceError(f"no service started for {store_url}: {_last_line(log)}", f"see {log}")


def _another_starts(log: Path) -> bool:
    """Whether ours ended because another launcher's came first."""
    return "another watchstep service runs there" in _last_line(log)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return next((line for line in reversed(lines) if "hint:" not in line), "it said nothing")
