"""Egress policy: which addresses the service may be directed to by users, to protect its own network.

A host is resolved once, all of its addresses are checked, and the connection is made to one of the checked
addresses, so that a name with a changing answer cannot bypass the check.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import socket
from collections.abc import Callable
from concurrent.futures import TimeoutError as LookUpTimeoutError
from dataclasses import dataclass
from urllib.parse import urlsplit

from watchstep.errors import ConfigError
from watchstep_services.core.fair_threads import FairThreads

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolver = Callable[[str, int], list[str]]

ALLOW_SETTING = "WATCHSTEP_ALLOWED_ADDRESSES"
MOST_CHARACTERS = 2000
"""Limit of characters of an address."""

_SCHEMES = {"http": 80, "https": 443}
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252}[A-Za-z0-9_])?")
_NUMBER = re.compile(r"(?:0[xX][0-9a-fA-F]*|[0-9]+)")
_VISIBLE = re.compile(r"[\x21-\x7e]+")
_LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))

CREDENTIAL_ADDRESSES = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "169.254.169.254",  # AWS, Google Cloud, Azure, OpenStack
        "169.254.170.2",  # AWS, of containers
        "169.254.170.23",  # AWS, of pods
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd20:ce::254",  # Google Cloud
        "168.63.129.16",  # Azure, though public by its form
        "100.100.100.200",  # Alibaba Cloud
        "192.0.0.192",  # Oracle Cloud
    )
)
"""Addresses at which clouds serve credentials without authentication; allowed only if they are listed individually."""

_EMBEDDED_IPV4: tuple[tuple[ipaddress.IPv6Network, int], ...] = (
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),  # mapped
    (ipaddress.IPv6Network("::ffff:0:0:0/96"), 0),  # translated
    (ipaddress.IPv6Network("::/96"), 0),  # compatible
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),  # NAT64
    (ipaddress.IPv6Network("2002::/16"), 80),  # 6to4
)
"""IPv6 networks that embed an IPv4 address, and how many bits follow it."""

_NEVER_PUBLIC: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/3", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "3fff::/20", "5f00::/16",
        "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8", "::/127",
    )
)  # fmt: skip
"""Listed explicitly, because ``ipaddress``'s definition of global differs between versions of Python."""


class AddressRefusedError(ConfigError):
    """An address that the egress policy does not allow."""


@dataclass(frozen=True)
class Address:
    """A parsed HTTP address; the checked parts are those used for the connection.

    Attributes:
        scheme: http or https.
        host: a name in ASCII or an IP address without brackets.
        port: the given port or the scheme's.
        target: path and query.
    """

    scheme: str
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """Value of the header ``Host``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _SCHEMES[self.scheme] else f"{host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse an HTTP address.

    Raises:
        ValueError: it is not valid, or obscures its destination by credentials or a number as its host. The message
            does not repeat the address, which may be a secret.
    """
    if len(text) > MOST_CHARACTERS or not _VISIBLE.fullmatch(text) or "\\" in text:
        raise ValueError("not an address: write https://HOST/PATH in visible ASCII characters")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise ValueError("not an address: its host or port cannot be parsed") from None
    if parts.scheme not in _SCHEMES:
        raise ValueError("the scheme must be http or https")
    if "@" in parts.netloc:
        raise ValueError("credentials in an address appear in logs: give them as a separate secret")
    if port == 0:
        raise ValueError("not an address: port 0")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Address(parts.scheme, check_host(host), port or _SCHEMES[parts.scheme], target)


def check_host(host: str) -> str:
    """Check a host; return it in the form that is resolved.

    Raises:
        ValueError: it is neither a name in ASCII nor an IP address in its plain form.
    """
    host = host.removesuffix(".").lower()
    if "%" in host:
        raise ValueError("not a host name: '%' is not allowed, and zones are not supported")
    if ":" in host:
        try:
            return str(ipaddress.IPv6Address(host))
        except ValueError:
            raise ValueError("not an IPv6 address") from None
    if not _HOST.fullmatch(host):
        raise ValueError("not a host name; use the xn-- form for other letters")
    if _NUMBER.fullmatch(host.rsplit(".", maxsplit=1)[-1]):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise ValueError("not an IPv4 address: write four decimal numbers") from None
    return host


def look_up(host: str, port: int) -> list[str]:
    """Resolve a host with the system's resolver.

    Raises:
        OSError: it has no address, or the resolver does not answer.
    """
    results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(result[4][0]) for result in results))


@dataclass(frozen=True)
class EgressPolicy:
    """Allows public addresses and configured exceptions.

    Attributes:
        networks: networks that are allowed although they are not public.
        hosts: names with addresses that are always allowed.
        resolve: resolves a name.
        project: project with a limit of its own for look-ups; if empty, look-ups are limited by host.
    """

    networks: tuple[Network, ...] = ()
    hosts: frozenset[str] = frozenset()
    resolve: Resolver = look_up
    project: str = ""

    def addresses(self, host: str, port: int, seconds: float) -> list[str]:
        """Resolve a host once; return the addresses to connect to.

        Args:
            host: result of `check_host`.
            port: port to connect to.
            seconds: timeout of the resolver.

        Raises:
            AddressRefusedError: one of its addresses is not allowed.
            OSError: it has no address, or the resolver does not answer in time.
        """
        try:
            addresses = [str(ipaddress.ip_address(host))]
        except ValueError:
            addresses = self._look_up(host, port, seconds)
        for text in addresses:
            self._check(host, text)
        return addresses

    def check_literal(self, host: str) -> None:
        """Check a host that is an IP address; a name is resolved and checked at each delivery.

        Raises:
            AddressRefusedError: it is not allowed.
        """
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return
        self._check(host, host)

    def allows(self, host: str, address: IPAddress) -> bool:
        """Whether an address of a host may be connected to."""
        real = embedded_ipv4(address)
        is_listed = any(network.num_addresses == 1 and real in network for network in self.networks)
        if real in CREDENTIAL_ADDRESSES or address in CREDENTIAL_ADDRESSES:
            return is_listed
        if host in self.hosts or any(real in network or address in network for network in self.networks):
            return True
        return (
            real.is_global and not real.is_multicast and not any(real in network for network in _NEVER_PUBLIC)
        )

    def _check(self, host: str, text: str) -> None:
        try:
            allowed = self.allows(host, ipaddress.ip_address(text))
        except ValueError:  # an address with a zone, which is link-local
            allowed = False
        if not allowed:
            # The addresses of a name are omitted, because they would expose the internal network to users who name hosts.
            named = f"address {text}" if host == text else f"host {host}: an address of it"
            raise AddressRefusedError(
                f"{named} is not public",
                f"use a public address, or have the service's owner allow it in {ALLOW_SETTING}",
            )

    def _look_up(self, host: str, port: int, seconds: float) -> list[str]:
        # The system's resolver has no configurable timeout.
        future = _resolvers().submit(
            self.project or f"host {host}", functools.partial(self.resolve, host, port), host
        )
        try:
            addresses = future.result(max(0.0, seconds))
        except LookUpTimeoutError:
            future.cancel()
            raise TimeoutError("the resolver did not answer in time") from None
        if not addresses:
            raise OSError("the host has no address")
        return addresses


def parse_allowed(text: str) -> tuple[tuple[Network, ...], frozenset[str]]:
    """Parse a comma-separated list of networks and host names; ``loopback`` denotes this machine.

    Raises:
        ConfigError: an entry is not valid.
    """
    networks: list[Network] = []
    hosts: set[str] = set()
    for entry in filter(None, (part.strip() for part in text.split(","))):
        if entry == "loopback":
            networks += _LOOPBACK
            continue
        try:
            networks.append(ipaddress.ip_network(entry))
            continue
        except ValueError:
            pass
        try:
            hosts.add(check_host(entry))
        except ValueError as error:
            raise ConfigError(
                f"{ALLOW_SETTING}: {entry!r}: {error}", "write 10.1.0.0/16, a host's name, or 'loopback'"
            ) from None
    return tuple(networks), frozenset(hosts)


def embedded_ipv4(address: IPAddress) -> IPAddress:
    """The IPv4 address that an IPv6 address embeds, otherwise the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    for network, following_bits in _EMBEDDED_IPV4:
        if address in network and int(address) > 1:
            return ipaddress.IPv4Address((int(address) >> following_bits) & 0xFFFFFFFF)
    return address


@functools.lru_cache(maxsize=1)
def _resolvers() -> FairThreads:
    # A name with unresponsive servers occupies a thread for up to a minute.
    return FairThreads(32, "watchstep-resolver", per_project=4, per_subject=1)
