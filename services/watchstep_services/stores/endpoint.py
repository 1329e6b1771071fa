"""Which endpoints the service connects to for stores and backends that an administrator registered.

Private and loopback addresses are allowed: an administrator named them. Link-local ones never are, nor those that hand out a
cloud's credentials. An endpoint is checked when it is registered and each time it is opened; the client library then looks
the name up again, so a name whose answer changes in between is not refused until it is opened the next time.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from watchstep.errors import StoreError
from watchstep_services.dispatcher.receivers.reach import (
    CREDENTIAL_ADDRESSES,
    AddressRefusedError,
    IPAddress,
    Reach,
    check_host,
    embedded_ipv4,
)

_PORTS = {"http": 80, "https": 443}
_RESOLVER_SECONDS = 5.0
_NEVER = tuple(
    ipaddress.ip_network(text)
    for text in ("0.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3", "::/128", "fe80::/10", "ff00::/8")
)


@dataclass(frozen=True)
class EndpointPolicy(Reach):
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
