"""Opening of projects' stores, and the check of a store that an admin registers."""

from __future__ import annotations

import ipaddress
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
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
    """Allows every address except link-local ones, those of cloud credentials, and those that denote no single host."""

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
                f"{named} is link-local or serves a cloud's credentials",
                "name the address of a store; the service never connects to this one",
            ) from error


def check_endpoint(url: str, policy: EndpointPolicy | None = None, *, must_resolve: bool = False) -> None:
    """Check the addresses of an endpoint; does nothing if it is empty.

    Args:
        url: an HTTP address.
        policy: the allowed addresses.
        must_resolve: whether a host without an address is refused.

    Raises:
        AddressRefusedError: the host is written as a number, or one of its addresses is not allowed.
        StoreError: the host cannot be resolved now, and `must_resolve` is set.
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
                f"endpoint {url}: its host cannot be resolved ({error})", "check the name and the resolver"
            ) from error


_MOST_OPEN = 4096


class Stores:
    """Cache of opened stores. Thread-safe. Opening a bucket reads nothing, opening a folder reads its marker.

    A folder that vanishes is missing until it is back, for the life of this process: no store is created in its place.
    """

    def __init__(self, identities: Mapping[str, StoreIdentity] | None = None) -> None:
        self._identities = dict(identities or {})
        self._opened: OrderedDict[StorePlace | str, Store] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, url: str) -> Store:
        """The service's own store. Projects' stores are opened by `of`.

        Raises:
            ConfigError, StoreError: as raised by `Store.open`.
        """
        return self._cached(url) or self._cache(url, _open(StoreRegistration(url), None, self._identity(url)))

    def of(self, place: StorePlace) -> Store:
        """The store at ``<project>/<run>/`` of a project, with the registered role and no other credentials.

        Raises:
            ConfigError, StoreError: as raised by `Store.open`.
        """
        store = self._cached(place)
        return store or self._cache(place, open_place(place, self._identity(place.registration.url)))

    def of_run(self, place: StorePlace, run: str) -> Store:
        """The store of a run.

        Raises:
            BadNameError: the run's name is not valid.
            ConfigError, StoreError: as raised by `Store.open`.
        """
        return self.of(place).child(run_prefix(place.project, run))

    def id_of(self, place: StorePlace) -> str:
        """Return the id of a project's store; empty if it is a bucket, or if this process has not opened it yet.

        A project with a prefix has a store of its own for its recorders, below the registered one.
        """
        if not place.is_local or place.prefix:
            return ""
        return self._identity(place.registration.url).id

    def close(self) -> None:
        """Record that this process does not use the folders any more."""
        with self._lock:
            identities = list(self._identities.values())
        for identity in identities:
            identity.release()

    def _identity(self, url: str) -> StoreIdentity:
        with self._lock:
            return self._identities.setdefault(url, StoreIdentity())

    def _cached(self, key: StorePlace | str) -> Store | None:
        with self._lock:
            store = self._opened.get(key)
            if store is not None:
                self._opened.move_to_end(key)
            return store

    def _cache(self, key: StorePlace | str, store: Store) -> Store:
        with self._lock:
            opened = self._opened.setdefault(key, store)
            while len(self._opened) > _MOST_OPEN:
                self._opened.popitem(last=False)
            return opened


def open_place(place: StorePlace, identity: StoreIdentity | None = None) -> Store:
    """Open the store at ``<project>/<run>/`` of a project.

    Args:
        place: the project's location.
        identity: identity of the store, if it is a folder.

    Raises:
        ConfigError, StoreError: as raised by `Store.open`, or the endpoint is not allowed (`check_endpoint`).
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
        # The session may list only the project, so a missing object is refused as if it were forbidden.
        access = S3Access(
            credentials, registered.region, registered.endpoint, hides_missing=credentials is not None
        )
    opened = Store.open(registered.url, access=None if registered.is_local else access, identity=identity)
    return ConfinedFolder(Path(opened.location), identity=identity) if opened.is_local else opened


CHECK_PROJECT = ".watchstep-check"
"""Used in place of a project's name. No project can have this name, so no project's objects are affected."""


@dataclass(frozen=True)
class CheckedStep:
    """The result of one step of a check.

    Attributes:
        name: ``role``, ``list``, ``write``, ``read``, ``create_once`` or ``delete``.
        ok: whether it succeeded.
        detail: the problem; empty if it succeeded.
        hint: how to correct it.
    """

    name: str
    ok: bool
    detail: str = ""
    hint: str = ""


def check_store(
    registration: StoreRegistration, prefix: str = "", project: str = CHECK_PROJECT
) -> list[CheckedStep]:
    """Check a store by the operations of a project. Steps that depend on a failed one are skipped."""
    place = StorePlace(0, 0, registration, prefix, project)
    steps: list[CheckedStep] = []
    opened: list[Store] = []
    key = f"{project}/{CHECK_PROJECT}-{secrets.token_hex(4)}"

    def attempted(name: str, operation: Callable[[], object]) -> bool:
        try:
            operation()
        except WatchstepError as error:
            steps.append(CheckedStep(name, False, error.what, error.hint))
            return False
        steps.append(CheckedStep(name, True))
        return True

    if registration.role_arn and not attempted(
        "role", RoleCredentials(registration, project_policy(place), "watchstep-check")
    ):
        return steps
    if not attempted("list", lambda: opened.append(_listed(place))):
        return steps
    (store,) = opened
    if not attempted("write", lambda: store.put(key, b"watchstep")):
        return steps
    attempted("read", lambda: _read(store, key))
    attempted("create_once", lambda: _create_once(store, key))
    attempted("delete", lambda: store.delete(key))
    return steps


def failed(steps: list[CheckedStep]) -> CheckedStep | None:
    """The first failed step."""
    return next((step for step in steps if not step.ok), None)


def _listed(place: StorePlace) -> Store:
    store = open_place(place)
    store.folders(f"{place.project}/")
    return store


def _read(store: Store, key: str) -> None:
    if store.get(key, limit=100) != b"watchstep":
        raise StoreError(f"object {key}: differs from the written one", "check for a cache in between")


def _create_once(store: Store, key: str) -> None:
    if store.create(key, b"again"):
        raise StoreError(
            f"store {store.url}: allows an object to be created twice",
            "use a service that honours If-None-Match",
        )
