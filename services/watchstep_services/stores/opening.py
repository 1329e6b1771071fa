"""Opened stores: one for each registration and project, so that a registration that changes takes effect at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from watchstep.format.layout import run_prefix
from watchstep.store.cloud import S3Access
from watchstep.store.identity import StoreIdentity
from watchstep.store.store import Store
from watchstep_services.stores.confined_folder import ConfinedFolder
from watchstep_services.stores.endpoint import check_endpoint
from watchstep_services.stores.place import Registration, StorePlace
from watchstep_services.stores.policies import project_policy
from watchstep_services.stores.role import RoleCredentials

_MOST_OPEN = 4096


class Stores:
    """Opened stores. Thread-safe; of a bucket nothing is read when it is opened, of a folder its marker.

    A folder that vanishes is missing until it is back, as long as this process lives: no store is made in its place.
    """

    def __init__(self) -> None:
        self._identities: dict[str, StoreIdentity] = {}
        self._opened: OrderedDict[StorePlace | str, Store] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, url: str) -> Store:
        """The service's own store. What belongs to a project is opened by `of`.

        Raises:
            ConfigError, StoreError: as `Store.open`.
        """
        return self._held(url) or self._keep(url, _open(Registration(url), None, self._identity(url)))

    def of(self, place: StorePlace) -> Store:
        """What holds ``<project>/<run>/`` of a project, by the role that is registered, and by no other credentials.

        Raises:
            ConfigError, StoreError: as `Store.open`.
        """
        held = self._held(place)
        return held or self._keep(place, open_place(place, self._identity(place.registration.url)))

    def of_run(self, place: StorePlace, run: str) -> Store:
        """The store seen from a run.

        Raises:
            BadNameError: the run's name cannot be used.
            ConfigError, StoreError: as `Store.open`.
        """
        return self.of(place).child(run_prefix(place.project, run))

    def _identity(self, url: str) -> StoreIdentity:
        with self._lock:
            return self._identities.setdefault(url, StoreIdentity())

    def _held(self, key: StorePlace | str) -> Store | None:
        with self._lock:
            held = self._opened.get(key)
            if held is not None:
                self._opened.move_to_end(key)
            return held

    def _keep(self, key: StorePlace | str, store: Store) -> Store:
        with self._lock:
            held = self._opened.setdefault(key, store)
            while len(self._opened) > _MOST_OPEN:
                self._opened.popitem(last=False)
            return held


def open_place(place: StorePlace, identity: StoreIdentity | None = None) -> Store:
    """Open what holds ``<project>/<run>/`` of a project.

    Args:
        place: of the project.
        identity: of the store, where it is a folder.

    Raises:
        ConfigError, StoreError: as `Store.open`, or the endpoint is never connected to (`check_endpoint`).
    """
    registered = place.registration
    check_endpoint(registered.endpoint, must_resolve=True)
    credentials = None
    if registered.role_arn:
        name = f"watchstep-{place.project}"
        credentials = RoleCredentials(registered, project_policy(place), name)
    opened = _open(registered, credentials, identity)
    return opened.child(place.prefix) if place.prefix else opened


def _open(
    registered: Registration, credentials: RoleCredentials | None, identity: StoreIdentity | None
) -> Store:
    access = None
    if registered.role_arn or registered.region or registered.endpoint:
        # The session may list the project only: what is not there is refused, as if it were forbidden.
        access = S3Access(
            credentials, registered.region, registered.endpoint, hides_missing=credentials is not None
        )
    opened = Store.open(registered.url, access=None if registered.is_local else access, identity=identity)
    return ConfinedFolder(Path(opened.location), identity=identity) if opened.is_local else opened
