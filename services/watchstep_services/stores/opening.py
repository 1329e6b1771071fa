"""Opened stores, one for each registration and project, and the endpoints that may be connected to.

A registration that changes takes effect at once. Private and loopback addresses are allowed: an administrator named them.
Link-local addresses and those that hand out a cloud's credentials never are. An endpoint is checked when it is registered and
each time it is opened; the client library then looks the name up again, so a name whose address changes in between is
refused at the next opening.
"""

from __future__ import annotations

import ipaddress
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from watchstep.errors import StoreError
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
from watchstep_services.stores.policies import project_policy
from watchstep_services.stores.role import RoleCredentials

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
