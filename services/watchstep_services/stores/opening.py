"""Stores of projects: opened by the service, and checked when an admin registers them."""

from __future__ import annotations

import ipaddress
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from watchstep.errors import StoreError, WatchstepError
from watchstep.format.layout import run_prefix
from watchstep.store.cloud import S3Access
from watchstep.store.local import StoreIdentity
from watchstep.store.store import Store
from watchstep_services.core.egress import (
    CREDENTIAL_ADDRESSES,
    AddressRefusedError,
    EgressPolicy,
    IPAddress,
    check_host,
    embedded_ipv4,
)
from watchstep_services.core.store_location import StorePlace, StoreRegistration
from watchstep_services.stores.confined_folder import ConfinedFolder
from watchstep_services.stores.role import RoleCredentials, project_policy

_PORTS = {"http": 80, "https": 443}
_RESOLVER_SECONDS = 5.0
_NEVER = tuple(
    ipaddress.ip_network(text)
    for text in ("0.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3", "::/128", "fe80::/10", "ff00::/8")
)


@dataclass(frozen=True)
class EndpointPolicy(EgressPolicy):
    """Every address but link-local ones, those of credentials, and those that name no single host."""

    def allows(self, host: str, address: IPAddress) -> bool:  # noqa: ARG002 - no host is an exception
        """Whether an address of an endpoint may be connected to."""
        return not any(
            of in CREDENTIAL_ADDRESSES or any(of in network for network in _NEVER)
            for of in (address, embedded_ipv4(address))
        )

    def _check(self, host: str, text: str) -> None:
        try:
            super()._check(host, text)
        except AddressRefusedError as error:
            named = f"address {text}" if host == text else f"host {host}: an address of it"
            raise AddressRefusedError(
                f"{named} is link-local or hands out a cloud's credentials",
                "name the address of a store; the service never connects to this one",
            ) from error


def check_endpoint(url: str, policy: EndpointPolicy | None = None, *, must_resolve: bool = False) -> None:
    """Check where an endpoint leads to now; nothing where it is empty.

    Args:
        url: an HTTP address.
        policy: which addresses are allowed.
        must_resolve: whether a name that has no address now is refused.

    Raises:
        AddressRefusedError: the host is written as a number, or one of its addresses is never connected to.
        StoreError: the name cannot be looked up now, and `must_resolve`.
    """
    if not url:
        return
    parts = urlsplit(url)
    try:
        host, port = check_host(parts.hostname or ""), parts.port or _PORTS.get(parts.scheme, 443)
    except ValueError as error:
        raise AddressRefusedError(f"endpoint {url[:200]!r}: {error}", "give https://HOST:PORT") from None
    try:
        (policy or EndpointPolicy()).addresses(host, port, _RESOLVER_SECONDS)
    except OSError as error:
        if must_resolve:
            raise StoreError(
                f"endpoint {url}: its host cannot be looked up ({error})", "check the name and the resolver"
            ) from error


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
        return self._held(url) or self._keep(url, _open(StoreRegistration(url), None, self._identity(url)))

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
    registered: StoreRegistration, credentials: RoleCredentials | None, identity: StoreIdentity | None
) -> Store:
    access = None
    if registered.role_arn or registered.region or registered.endpoint:
        # The session may list the project only: what is not there is refused, as if it were forbidden.
        access = S3Access(
            credentials, registered.region, registered.endpoint, hides_missing=credentials is not None
        )
    opened = Store.open(registered.url, access=None if registered.is_local else access, identity=identity)
    return ConfinedFolder(Path(opened.location), identity=identity) if opened.is_local else opened


TRIED = ".watchstep-check"
"""In place of a project: no project can have the name, so nothing of one is touched."""


@dataclass(frozen=True)
class TriedStep:
    """One thing that was tried.

    Attributes:
        name: what: ``role``, ``list``, ``write``, ``read``, ``create_once`` or ``delete``.
        ok: whether it can be done.
        detail: what is wrong; empty where nothing is.
        hint: what to do about it.
    """

    name: str
    ok: bool
    detail: str = ""
    hint: str = ""


def check_store(registration: StoreRegistration, prefix: str = "", project: str = TRIED) -> list[TriedStep]:
    """Try a store as a project would use it. What follows from a step that failed is not tried."""
    place = StorePlace(0, 0, registration, prefix, project)
    done: list[TriedStep] = []
    opened: list[Store] = []
    key = f"{project}/{TRIED}-{secrets.token_hex(4)}"

    def tried(name: str, what: Callable[[], object]) -> bool:
        try:
            what()
        except WatchstepError as error:
            done.append(TriedStep(name, False, error.what, error.hint))
            return False
        done.append(TriedStep(name, True))
        return True

    if registration.role_arn and not tried(
        "role", RoleCredentials(registration, project_policy(place), "watchstep-check")
    ):
        return done
    if not tried("list", lambda: opened.append(_listed(place))):
        return done
    (store,) = opened
    if not tried("write", lambda: store.put(key, b"watchstep")):
        return done
    tried("read", lambda: _read(store, key))
    tried("create_once", lambda: _create_once(store, key))
    tried("delete", lambda: store.delete(key))
    return done


def failed(checked: list[TriedStep]) -> TriedStep | None:
    """The first thing that cannot be done."""
    return next((step for step in checked if not step.ok), None)


def _listed(place: StorePlace) -> Store:
    store = open_place(place)
    store.folders(f"{place.project}/")
    return store


def _read(store: Store, key: str) -> None:
    if store.get(key, limit=100) != b"watchstep":
        raise StoreError(f"object {key}: another than was written", "see what stands between, as a cache")


def _create_once(store: Store, key: str) -> None:
    if store.create(key, b"again"):
        raise StoreError(
            f"store {store.url}: lets an object be created twice", "use a service that honours If-None-Match"
        )
