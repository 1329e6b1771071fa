"""The store of a recording: which one it is, and its opening.

The service names the id of the store in its answer to each registration. If it differs from that of the store at the recorder's path, as
after a launch while a disk was not mounted, the recorder writes nothing more there, and waits for the store that the service reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from watchstep.capture.health import RecorderHealth
from watchstep.capture.service.client import ServiceClient, open_recorded
from watchstep.capture.service.location import is_same_store, local_folder
from watchstep.errors import ConfigError, MissingStoreError, ServiceError
from watchstep.format.layout import run_prefix
from watchstep.store.local import StoreIdentity
from watchstep.store.store import Store, WriteGate

_PATIENCE_SECONDS = 2.0


def require_store(identity: StoreIdentity, own_url: str, url: str, id: str) -> bool:  # noqa: A002 - what it is
    """Treat every other store than the service's as an outage, if both are at the same path. Returns whether that is new.

    Args:
        identity: identity of the recorder's store.
        own_url: URL of the recorder's store.
        url: URL or path of the service's store.
        id: id of the service's store.
    """
    try:
        return is_same_store(url, own_url) and identity.require(id)
    except (ConfigError, ValueError):  # not a path that could be the same
        return False


class RunStore:
    """Opens the store of one run for a recorder. Thread-safe.

    Attributes:
        identity: identity of the store, if it is a folder.
        gate: ends all writes of the recording.
    """

    def __init__(
        self,
        url: str,
        identity: StoreIdentity,
        run: tuple[str, str],
        rules: Sequence[dict[str, Any]],
        health: RecorderHealth,
    ) -> None:
        """Create it without opening anything.

        Args:
            url: URL of the store.
            identity: identity of the store, as the launch passed it.
            run: project and run.
            rules: rule configs to register the run with.
            health: counts faults.
        """
        self.identity = identity
        self.gate = WriteGate()
        self._url = url
        self._run = run
        self._rules = list(rules)
        self._health = health
        self._service: ServiceClient | None = None
        self._patience = _PATIENCE_SECONDS
        self._asks = local_folder(url) is not None

    def follow(self, service: ServiceClient | None, close_seconds: float) -> None:
        """Treat every other store than the one that this service names as an outage.

        Args:
            service: the service; None if there is none.
            close_seconds: how long the end of the recording may take, of which a service that hangs may take a half.
        """
        self._service = service
        self._patience = min(_PATIENCE_SECONDS, close_seconds / 2)
        if service is not None:
            service.on_store = self._named

    def open(self, attempt: str) -> Store:
        """Open the run's store for an attempt.

        Raises:
            ConfigError, StoreError: it cannot be opened.
        """
        self.gate.check(f"store {self._url}")  # opening one may create its folder
        service = self._service if self._service is not None and self._service.is_located else None
        if service is not None and self._asks and not self.identity.is_known:
            self._request_id(service)
        opened = open_recorded(
            self._url, (*self._run, attempt), service, self._health.fault, identity=self.identity
        )
        return opened.child(run_prefix(*self._run)).gated(self.gate)

    def _request_id(self, service: ServiceClient) -> None:
        """Register the run before its store is opened for the first time, because no launch has passed the store's id.

        The folder may be the mount point of a store that the service knows. Nothing waits long for a service that does not answer: the
        announcer registers the run when it answers, and the recorder then waits for the store that it names.
        """
        self._asks = False
        try:
            service.register(
                {"run": self._run[1], "rules": self._rules, "store": self._url}, seconds=self._patience
            )
        except ServiceError as error:
            self._health.fault("service", error)

    def _named(self, url: str, identity: str) -> None:
        earlier = self.identity.id
        if require_store(self.identity, self._url, url, identity) and earlier:
            replaced = MissingStoreError(
                f"store {self._url}: the service reads store {identity}, but the run was recorded to store {earlier}",
                "what was recorded until now is in the other store; the rest waits until the folder returns",
            )
            self._health.fault("store id", replaced)
